"""A template that dies, at whatever moment, is started again, and the study goes on."""

import os
import signal
import time

import psutil
import pytest
from fault_table import witness
from real_trials import configuration, is_gone, until
from studies import Study

from autotune.trial.live import TrialFailed
from autotune.trial.record import Outcome

pytestmark = pytest.mark.slow

KILL_SECONDS = 5.0
"""How long anything below a keeper that is killed may live: promised, so asserted."""


def template_of(trial):
    """Which process the trial was forked from."""
    return psutil.Process(trial.trial.pid).ppid()


@pytest.mark.parametrize("moment", ["starting", "frozen"])
def test_a_template_killed_below_its_trial(launch, moment):
    """The trial's outcome says so; the next trial has another template."""
    trial = launch("hangs_in_python" if moment == "starting" else "")
    if moment == "frozen":
        trial.warm_up()
    template = template_of(trial)
    os.kill(template, signal.SIGKILL)
    with pytest.raises(TrialFailed) as caught:
        trial.measure() if moment == "frozen" else trial.warm_up()
    assert caught.value.outcome is Outcome.CRASHED
    assert caught.value.reason == "its template process died (killed by SIGKILL)"
    assert is_gone(trial.trial.pid)
    later = launch()
    assert template_of(later) != template
    later.warm_up()


def test_a_keeper_killed_above_its_trial(launch):
    """What the trial put into sessions of its own has no parent to end it, and ends; the next trial has a template."""
    trial = launch("kills_its_keeper")
    template = template_of(trial)
    with pytest.raises(TrialFailed) as caught:
        trial.warm_up()
    entered = witness(trial.log)
    assert [pid for pid in entered["family"] if not is_gone(pid)] == []
    for pid in (entered["keeper"], template, trial.trial.pid):
        until(lambda pid=pid: is_gone(pid), f"process {pid} to end")
    assert time.time() - (trial.log.parent / "witness.json").stat().st_mtime < KILL_SECONDS
    assert caught.value.reason == "its template process died (killed by SIGKILL)"
    later = launch()
    assert template_of(later) != template
    later.warm_up()


def test_closing_ends_what_a_keeper_left(launch):
    """Also where nobody has waited for the trial since its keeper was killed."""
    trial = launch("hangs_with_a_family")
    entered = until(lambda: witness(trial.log), "the trial's family")
    template = trial.trial.template
    os.kill(template.pid, signal.SIGKILL)
    template.close()
    assert [pid for pid in entered["family"] if not is_gone(pid)] == []


def test_a_template_killed_while_it_imports(processes, tmp_path):
    """It is started once more, and nobody is told."""
    processes.prepare(7, [configuration()])
    keeper = max(psutil.Process().children(), key=lambda each: each.create_time())
    (template,) = until(keeper.children, "the keeper to have its template")
    template.kill()
    processes.await_ready(7)
    assert is_gone(template.pid)
    processes.launch(configuration(), log=str(tmp_path / "log.txt"), data=None, group=7).warm_up(60.0)
    processes.retire(7)


def test_the_study_goes_on(processes, tmp_path):
    """Trials that crash, hang, kill their template and flood their log are records; those after them are measured."""
    study = Study(processes, tmp_path / "run", trial_seconds=8.0)
    faults = (
        "segfaults",
        "kills_its_template",
        "kills_its_keeper",
        "hangs_with_a_family",
        "sends_too_much",
        "prints_gigabytes",
        "",
    )
    outcomes = [study.try_fault(name).outcome for name in faults]
    study.end()
    assert outcomes == ["crashed", "crashed", "crashed", "timeout", "crashed", "ok", "ok"]
    records = list(study.run.directory.read_trials())
    assert [record.outcome for record in records] == ["ok", *outcomes]
    assert "in segfaults" in records[1].log_tail
    assert all(record.reason for record in records[1:6])
    for record in records[3:5]:
        assert all(is_gone(pid) for pid in witness(study.log_of(record))["family"])
