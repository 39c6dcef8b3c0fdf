"""A template that dies, at whatever moment, is started again, and the study goes on."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from fault_table import witness
from real_trials import configuration, is_gone, until
from studies import Study

from autotune.data.record import Outcome
from autotune.runtime.executor import TrialFailed

KILL_SECONDS = 5.0
"""How long anything below a supervisor that is killed may live: promised, so asserted."""


def template_of(trial):
    """Which process the trial was forked from."""
    return psutil.Process(trial.trial.pid).ppid()


@pytest.mark.parametrize("moment", ["starting", "frozen"])
def test_a_template_killed_below_its_trial(launch, moment):
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


def test_a_supervisor_killed_above_its_trial(launch):
    trial = launch("kills_its_supervisor")
    template = template_of(trial)
    with pytest.raises(TrialFailed) as caught:
        trial.warm_up()
    entered = witness(trial.log)
    assert [pid for pid in entered["family"] if not is_gone(pid)] == []
    for pid in (entered["supervisor"], template, trial.trial.pid):
        until(lambda pid=pid: is_gone(pid), f"process {pid} to end")
    assert time.time() - (trial.log.parent / "witness.json").stat().st_mtime < KILL_SECONDS
    assert caught.value.reason == "its template process died (killed by SIGKILL)"
    later = launch()
    assert template_of(later) != template
    later.warm_up()


def test_closing_ends_what_a_supervisor_left(launch):
    trial = launch("hangs_with_a_family")
    entered = until(lambda: witness(trial.log), "the trial's family")
    template = trial.trial.template
    os.kill(template.pid, signal.SIGKILL)
    template.close()
    until(lambda: all(is_gone(pid) for pid in entered["family"]), f"{entered['family']} to end")


def test_a_template_killed_while_it_imports(processes, tmp_path):
    before = set(psutil.Process().children(recursive=True))
    wanted = configuration(onednn=False)
    with ThreadPoolExecutor() as pool:
        launched = pool.submit(processes.launch, wanted, log=str(tmp_path / "log.txt"), data=None)
        supervisor, template = until(lambda: new_template(before), "a supervisor and its template")
        template.kill()
        launched.result().warm_up(60.0)
    assert is_gone(template.pid)
    assert is_gone(supervisor.pid)


def new_template(before):
    """A supervisor of this process that was not there before, and its template; None until both are there."""
    for supervisor in set(psutil.Process().children()) - before:
        for template in supervisor.children():
            return supervisor, template
    return None


def test_a_live_baseline_that_somebody_kills_is_started_again(processes, tmp_path):
    study = Study(processes, tmp_path / "run", trial_seconds=4.0)
    launch, killed = processes.launch, []

    def launch_and_kill(configuration, **options):
        live = launch(configuration, **options)
        if study.seat.baseline.live is None and not killed:  # the one that takes its place
            killed.append(live.pid)
            os.kill(live.pid, signal.SIGKILL)
        return live

    processes.launch = launch_and_kill
    os.kill(study.seat.baseline.live.pid, signal.SIGKILL)
    record = study.try_fault("")
    study.end()
    assert killed
    assert record.outcome is Outcome.OK
