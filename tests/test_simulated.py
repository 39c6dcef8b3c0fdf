"""Trials without processes."""

import itertools
import math

import pytest
from simulated_runs import BASELINE, simulated_trials

from autotune.data.record import Outcome
from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import Data

KNOWN = Data(examples=1437, endless=False)


def launch(trials, configuration=BASELINE, **settings):
    """A trial of a workload whose dataset is known."""
    return trials.launch(configuration, log="log.txt", data=settings.pop("data", None), **settings)


def warm(trials, configuration=BASELINE, **settings):
    """A trial that is warm."""
    trial = launch(trials, configuration, **settings)
    trial.warm_up(100.0)
    return trial


def rate(measured):
    """Samples per second of a slice."""
    return measured.examples / measured.seconds


def test_what_an_epoch_runs_in_with_is_not_counted():
    trials = simulated_trials(examples=1437)
    trial = launch(trials)
    ready = trial.warm_up(100.0).ready
    assert ready.run_in_seconds == ready.epoch_seconds > 0.0
    before = trials.clock()
    paused = trial.measure(0.5, 100.0)
    assert trials.clock() - before == pytest.approx(paused.seconds + ready.run_in_seconds)
    before = trials.clock()
    slices = trial.measure_continuously(0.5, 3, 100.0)
    assert trials.clock() - before == pytest.approx(sum(slice_.seconds for slice_ in slices) + ready.run_in_seconds)
    trained = [each.trained_examples for each in (paused, *slices)]
    assert [later - earlier for earlier, later in itertools.pairwise(trained)] == [3 * 1437, 2 * 1437, 2 * 1437]


def test_warming_up_takes_the_time_it_tells():
    trials = simulated_trials(start_seconds=1.5, import_seconds=0.0)
    found = launch(trials, BASELINE.replace(steps_per_execution=8)).warm_up(100.0)
    assert found.first_step_seconds == pytest.approx(1.5)
    assert found.ready_seconds == pytest.approx(1.5 + found.ready.warmup_seconds) == trials.clock()
    assert found.ready.call_seconds == pytest.approx(8 * 32 / 4000)
    assert found.ready.epoch_seconds == pytest.approx(1437 / 4000)
    assert found.ready.settled
    assert 0 < found.launch_seconds < found.first_step_seconds


def test_a_training_with_slow_steps_is_warm_after_few_of_them():
    trials = simulated_trials(lambda configuration: 16.0, examples=None)
    ready = launch(trials).warm_up(100.0).ready
    assert ready.settled
    assert ready.warmup_seconds <= 8 * ready.call_seconds


def test_the_loss_falls_with_training():
    trial = warm(simulated_trials(examples=None))
    losses = [trial.measure(5.0, 100.0).loss for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1] > losses[0] / 2


def test_a_step_takes_the_slices_share():
    measured = warm(simulated_trials(examples=None)).measure(0.5, 100.0)
    assert measured.step_seconds.p50 == measured.step_seconds.max == pytest.approx(32 / 4000)


@pytest.mark.parametrize("examples", [None, 1_000_000])
def test_long_epochs_are_timed_by_steps(examples):
    trials = simulated_trials(examples=examples)
    trial = launch(trials, BASELINE.replace(steps_per_execution=8))
    warm_up = trial.warm_up(100.0)
    measured = trial.measure(0.5, 100.0)
    assert warm_up.ready.timed_by == "steps"
    assert warm_up.started.endless == (examples is None)
    assert measured.epochs == 0
    assert measured.steps % 8 == 0
    assert measured.examples == measured.steps * 32
    assert measured.seconds == pytest.approx(0.5, abs=8 * 32 / 4000)


def test_a_pause_is_one_only_where_another_has_run_meanwhile():
    trials = simulated_trials(freeze_gain=lambda configuration: 2.0, examples=None)
    first, second = launch(trials), launch(trials)
    first.warm_up(100.0)
    second.warm_up(100.0)
    speeds = [each.examples / each.seconds for each in second.measure_continuously(0.5, 2, 10.0)]
    for trial in (second, first, second, second):
        taken = trial.measure(0.5, 10.0)
        speeds.append(taken.examples / taken.seconds)
    assert speeds == pytest.approx([4000.0, 4000.0, 4000.0, 8000.0, 8000.0, 4000.0])


def test_drift_hits_everything_alike():
    trials = simulated_trials(drift=lambda seconds: 0.5 if seconds > 50 else 1.0)
    trial = warm(trials)
    fast = rate(trial.measure(0.5, 100.0))
    trials.clock.advance(50.0)
    assert rate(trial.measure(0.5, 100.0)) == pytest.approx(fast / 2)


def test_what_takes_longer_than_allowed_times_out():
    trials = simulated_trials(start_seconds=10.0, examples=None)
    late = launch(trials)
    with pytest.raises(TrialFailed, match="timeout"):
        late.warm_up(9.0)
    trial = warm(trials)
    before = trials.clock()
    with pytest.raises(TrialFailed, match="timeout"):
        trial.measure(5.0, 2.0)
    assert trials.clock() - before == pytest.approx(2.0)
    assert trials.alive == []


def test_closing_figures():
    small = warm(simulated_trials()).finish(0.1, 10.0)
    large = warm(simulated_trials(gpus=("H200",)), BASELINE.replace(batch_size=512)).finish(0.0, 10.0)
    assert large.peak_host_bytes > small.peak_host_bytes
    assert small.peak_device_bytes is None
    assert large.peak_device_bytes is not None
    assert small.input_wait_fraction == 0.0
    assert large.input_wait_fraction is None


# ------------------------------------------------------------------------------------------------ templates


def test_a_knob_that_is_read_at_import_costs_an_import():
    trials = simulated_trials(import_seconds=4.0)
    trials.open()
    launch(trials)
    assert trials.clock() == 4.0
    launch(trials, BASELINE.replace(onednn=False))
    launch(trials, BASELINE.replace(onednn=False))
    assert trials.clock() == 8.0


def test_what_is_closed_has_no_trials_any_more():
    trials = simulated_trials(import_seconds=4.0, start_seconds=0.0)
    gone = warm(trials)
    trials.close()
    assert trials.alive == []
    before = trials.clock()
    launch(trials)
    assert trials.clock() == pytest.approx(before + 4.0)
    with pytest.raises(TrialFailed, match="template died") as caught:
        gone.measure(0.5, 10.0)
    assert caught.value.outcome is Outcome.CRASHED


# --------------------------------------------------------------------------------------------------- misuse


def test_a_killed_trial_cannot_be_asked_anything():
    trial = warm(simulated_trials())
    trial.kill()
    trial.kill()
    with pytest.raises(AssertionError):
        trial.measure(0.5, 10.0)
    with pytest.raises(AssertionError):
        trial.finish(0.0, 10.0)


def test_a_trial_is_asked_in_turn():
    trials = simulated_trials()
    with pytest.raises(AssertionError):
        launch(trials).measure(0.5, 10.0)
    trial = warm(trials)
    with pytest.raises(AssertionError):
        trial.warm_up(10.0)
    trial.finish(0.0, 10.0)
    with pytest.raises(AssertionError):
        trial.measure(0.5, 10.0)


@pytest.mark.parametrize("wrong", [Data(examples=5, endless=False), Data(examples=None, endless=True)])
def test_what_a_trial_is_told_of_its_data_must_be_true(wrong):
    launch(simulated_trials(), data=KNOWN)
    with pytest.raises(AssertionError):
        launch(simulated_trials(), data=wrong)


def test_time_never_goes_back():
    clock = simulated_trials().clock
    for seconds in (-1.0, math.inf, math.nan):
        with pytest.raises(AssertionError):
            clock.advance(seconds)
