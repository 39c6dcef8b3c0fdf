"""Nothing that a trial started outlives it, and nothing outlives `close`; `tests/faults` has the other faults."""

import psutil
from real_trials import PATIENCE_SECONDS, WORKLOADS, configuration, is_gone, until


def test_the_family_of_a_trial_that_finished_is_killed_too(launch):
    trial = launch("with_child")
    trial.warm_up()
    (child,) = psutil.Process(trial.trial.pid).children()
    trial.trial.finish(0.0, PATIENCE_SECONDS)
    until(lambda: is_gone(child.pid), "the child to end")


def test_processes_of_a_living_trial_outlive_other_trials(launch):
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


def test_closing_ends_every_process(processes_of, tmp_path):
    before = set(psutil.Process().children(recursive=True))
    processes = processes_of(WORKLOADS / "cases.py")
    processes.open()
    frozen = processes.launch(configuration(), log=str(tmp_path / "pairs.log"), data=None)
    frozen.warm_up(PATIENCE_SECONDS)
    processes.launch(configuration(), log=str(tmp_path / "endless.log"), data=None)
    family = set(psutil.Process().children(recursive=True)) - before
    assert len(family) >= 4
    processes.close()
    assert all(is_gone(each.pid) for each in family)
