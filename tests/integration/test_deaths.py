"""However a trial, its template or the tuner dies, the outcome says so and no process is left."""

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from real_trials import PATIENCE_SECONDS, REPOSITORY, WORKLOADS, configuration, is_gone, until

from autotune.trial.live import TrialFailed
from autotune.trial.messages import ChannelClosed
from autotune.trial.record import Outcome

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("case", "outcome", "words"),
    [
        ("exits", Outcome.CRASHED, "ended with exit status 7"),
        ("segfaults", Outcome.CRASHED, "killed by SIGSEGV"),
        ("kills_itself", Outcome.CRASHED, "killed by SIGKILL"),
        ("out_of_host_memory", Outcome.OOM, "out of host memory: no 8 GiB left"),
        ("out_of_tensor_memory", Outcome.OOM, "OOM when allocating"),
        ("is_nan", Outcome.NONFINITE, "the training loss became nan by step 1"),
        ("becomes_nan", Outcome.NONFINITE, "the training loss became"),
    ],
)
def test_a_death_is_an_outcome(launch, case, outcome, words):
    """It is data: how the trial ended, why, and not the workload's fault whatever the configuration."""
    trial = launch(case)
    failure = trial.failure()
    assert failure.outcome is outcome
    assert words in failure.reason
    assert not failure.input_error
    assert is_gone(trial.trial.pid)


def test_the_template_outlives_its_trials(launch, cases):
    """After a crash the next trial is forked from the same template."""
    template = psutil.Process(launch("pairs").trial.pid).ppid()
    launch("segfaults").failure()
    trial = launch("pairs")
    assert psutil.Process(trial.trial.pid).ppid() == template
    trial.warm_up()


def test_a_trial_that_hangs_is_killed_with_its_whole_family(launch):
    """At its time limit: also children in a session of their own, and theirs."""
    trial = launch("hangs")
    family = until(lambda: trial.printed().get("family"), "the hanging trial's children")
    assert os.getsid(family[0]) != os.getsid(trial.trial.pid)
    with pytest.raises(TrialFailed) as caught:
        trial.trial.warm_up(0.0)
    assert caught.value.outcome is Outcome.TIMEOUT
    for pid in (trial.trial.pid, *family):
        until(lambda pid=pid: is_gone(pid), f"process {pid} to end")


def test_the_family_of_a_trial_that_finished_is_killed_too(launch):
    """What a workload leaves running does not outlive its trial."""
    trial = launch("with_child")
    trial.warm_up()
    (child,) = psutil.Process(trial.trial.pid).children()
    trial.trial.finish(0.0, PATIENCE_SECONDS)
    until(lambda: is_gone(child.pid), "the child to end")


def test_what_a_living_trial_left_to_itself_outlives_other_trials(launch):
    """A server that it started in the background works for it: the end of another trial is not its end."""
    trial, other = launch("with_orphan"), launch("pairs")
    trial.warm_up()
    (helper,) = trial.printed()["family"]
    template = psutil.Process(trial.trial.pid).ppid()
    until(lambda: psutil.Process(helper).ppid() == template, "the helper to be adopted")
    other.warm_up()
    other.trial.finish(0.0, PATIENCE_SECONDS)
    assert is_gone(other.trial.pid)
    assert not is_gone(helper)
    trial.measure()
    trial.trial.finish(0.0, PATIENCE_SECONDS)
    until(lambda: is_gone(helper), "the helper to end with its trial")


def test_a_trial_killed_from_outside_while_frozen(launch):
    """The next slice says what happened, instead of waiting."""
    trial = launch("pairs")
    trial.warm_up()
    os.kill(trial.trial.pid, signal.SIGKILL)
    with pytest.raises(TrialFailed) as caught:
        trial.measure()
    assert (caught.value.outcome, caught.value.reason) == (Outcome.CRASHED, "killed by SIGKILL")


def test_a_dead_template_is_restarted(cases, launch, tmp_path):
    """Its trials die with it; the next launch starts another template."""
    processes = cases.processes()
    trial = launch("pairs")
    trial.warm_up()
    template = psutil.Process(trial.trial.pid).ppid()
    os.kill(template, signal.SIGKILL)
    until(lambda: is_gone(trial.trial.pid), "the trial to die with its template")
    with pytest.raises(TrialFailed) as caught:
        trial.measure()
    assert caught.value.outcome is Outcome.CRASHED
    later = launch("pairs")
    assert later.warm_up().started.examples == 100
    assert psutil.Process(later.trial.pid).ppid() != template
    assert processes.isolation == "template"


def test_a_killed_template_takes_the_whole_family_with_it(cases, launch):
    """Also what its trials left in sessions of their own; the tuner hears of it when all are gone."""
    trial = launch("hangs")
    family = until(lambda: trial.printed().get("family"), "the hanging trial's children")
    template = psutil.Process(trial.trial.pid).ppid()
    os.kill(template, signal.SIGKILL)
    failure = trial.failure()
    assert failure.outcome is Outcome.CRASHED
    with pytest.raises(ChannelClosed):
        trial.trial.template.channel.receive(PATIENCE_SECONDS)
    assert [pid for pid in (template, trial.trial.pid, *family) if not is_gone(pid)] == []


def test_closing_ends_every_process(processes_of, tmp_path):
    """A template, another that was prepared, and a frozen trial are gone after `close`."""
    before = set(psutil.Process().children(recursive=True))
    processes = processes_of(WORKLOADS / "cases.py")
    processes.open()
    processes.prepare(1, [configuration()])
    trial = processes.launch(configuration(), log=str(tmp_path / "pairs.log"), data=None)
    trial.warm_up(PATIENCE_SECONDS)

    def started():
        return set(psutil.Process().children(recursive=True)) - before

    until(lambda: len(started()) == 5, "two keepers, two templates and a trial")
    family = started()
    processes.close()
    trial.kill()
    assert all(is_gone(each.pid) for each in family)


TUNER = """
    import sys, time
    from pathlib import Path
    from autotune.space.configuration import baseline_configuration
    from autotune.space.knobs import Device
    from autotune.workload import WorkloadReference
    from autotune.trial.process import TrialProcesses

    workload, folder = sys.argv[1:]
    processes = TrialProcesses(WorkloadReference(file=workload), logs=Path(folder))
    processes.open()
    baseline = baseline_configuration(16, {}, Device.CPU, where="test")
    frozen = processes.launch(baseline, log=folder + "/pairs.log", data=None)
    frozen.warm_up(60.0)
    hanging = processes.launch(baseline, log=folder + "/hangs.log", data=None)
    print("frozen", frozen.pid, hanging.pid, flush=True)
    time.sleep(1000)
"""


def test_nothing_outlives_a_tuner_that_is_killed(tmp_path, environment):
    """SIGKILL to the tuner ends its template, a frozen trial, a hanging one, and that one's own family."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TUNER), str(WORKLOADS / "cases.py"), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=REPOSITORY,
    ) as tuner:
        assert tuner.stdout is not None
        word, frozen, hanging = tuner.stdout.readline().split()
        assert word == "frozen"
        log = tmp_path / "hangs.log"
        until(lambda: log.exists() and "family" in log.read_text(), "the hanging trial's children")
        family = psutil.Process(tuner.pid).children(recursive=True)
        assert {int(frozen), int(hanging)} < {each.pid for each in family}
        assert len(family) == 6  # keeper, template, two trials, a shell and its child
        tuner.kill()
    for each in family:
        until(lambda each=each: is_gone(each.pid), f"{each} to end")
