"""A real template, and its forks, of a workload that needs no TensorFlow: what the driver makes of how they end."""

import itertools
import json
import signal
import subprocess

import pytest
from real_trials import is_gone
from simulated_runs import REFERENCE
from test_trial_process import REQUEST

from autotune.data.record import Outcome
from autotune.runtime import trial_process
from autotune.runtime.executor import TrialFailed
from autotune.runtime.trial_process import Template, TemplateDied, TrialProcess, describe_status

ENTRY = """
import json, os, resource, signal
from autotune.runtime.protocol import Failed

def enable_compile_logging():
    {at_import}

def run(request, channel, workload, reference):
    facts = {{
        "leads_its_group": os.getpgid(0) == os.getpid(),
        "oom_score": int(open("/proc/self/oom_score_adj").read()),
        "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
        "log": os.readlink("/proc/self/fd/1"),
        "template": os.getppid(),
    }}
    channel.send(Failed(outcome="error", reason=json.dumps(facts)))
    return 0
"""
KILLS_ITSELF = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a template that does something before it would import the workload."""
    started = []
    monkeypatch.setattr(trial_process, "ENTRY_POINT", "entry_of_a_test")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def template(at_import="pass", **variables):
        (tmp_path / "entry_of_a_test.py").write_text(ENTRY.format(at_import=at_import))
        started.append(Template(REFERENCE, "later", variables=variables, log=tmp_path / "template.log"))
        return started[-1]

    yield template
    for each in started:
        each.close()


def test_a_fork_leads_a_group_and_is_killed_first(start, tmp_path):
    most = "resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)"
    template = start(most)
    assert template.wait_ready().workload is None
    log = tmp_path / "log.txt"
    with pytest.raises(TrialFailed) as caught:
        TrialProcess(template, REQUEST.model_copy(update={"log": str(log)}), "none").warm_up(60.0)
    facts = json.loads(caught.value.reason)
    assert facts.pop("template") != template.pid  # that is the supervisor's
    assert facts == {"leads_its_group": True, "oom_score": 1000, "core": 0, "log": str(log)}


def test_closing_ends_template_and_supervisor(start):
    template = start()
    template.wait_ready()
    assert template.alive
    template.close()
    assert not template.alive
    assert is_gone(template.pid)


def test_ctrl_c_while_a_template_starts_leaves_no_process(start, monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        start()
    assert is_gone(started[0].pid)
    started[0].wait()


@pytest.mark.parametrize(
    ("kills", "error", "words"),
    [
        (itertools.repeat(3), TemplateDied, "the process that imports the workload died (killed by SIGKILL)"),
        (itertools.count(), TrialFailed, "memory ran out while the workload was imported"),
    ],
)
def test_a_killed_template_ran_out_of_memory_if_the_kernel_says(start, monkeypatch, kills, error, words):
    monkeypatch.setattr(trial_process, "count_oom_kills", lambda: next(kills))
    with pytest.raises(error) as caught:
        start(KILLS_ITSELF).wait_ready()
    assert words in str(caught.value)
    if error is TrialFailed:
        assert caught.value.outcome is Outcome.OOM
    else:
        assert "a limit on memory" in caught.value.hint


def test_the_log_says_that_memory_ran_out_whatever_the_status(start):
    with pytest.raises(TrialFailed, match="memory ran out while the workload was imported"):
        start("print('std::bad_alloc', flush=True); os._exit(1)").wait_ready()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (1, "exit status 1"),
        (-9, "killed by SIGKILL"),
        (128 + signal.SIGSEGV, "killed by SIGSEGV"),
        (255, "exit status 255"),
    ],
)
def test_a_status_in_words(status, words):
    assert describe_status(status) == words
