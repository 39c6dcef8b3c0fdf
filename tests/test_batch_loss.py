"""The loss at another batch size: whose is measured, and where too little would be seen."""

import pytest
from simulated_runs import BASELINE, Watcher, a_record, run_on, simulated_trials

from autotune.tuning.batch_loss import measure_batch_losses
from autotune.tuning.progress import Notice, silent
from autotune.tuning.trainings import Trainings


@pytest.fixture
def measured(tmp_path):
    """What is found for these batch sizes, and what was launched for it."""

    def measure(*sizes, seconds=60.0, observe=silent):
        trials = simulated_trials()
        run = run_on(trials, tmp_path, observe=observe)
        run.baseline = BASELINE
        trials.open()
        run.records[0] = a_record(BASELINE, trial=0, first_step_seconds=1.5)
        configurations = [BASELINE.replace(batch_size=size) for size in sizes]
        with Trainings(run, ends=run.clock() + seconds) as trainings:
            return measure_batch_losses(trainings, configurations), trials.launched

    return measure


def test_each_other_batch_size_is_measured_once(measured):
    """Beside the baseline's, on as many examples; the baseline's own size asks for nothing."""
    found, launched = measured(64, 32, 64)
    assert set(found) == {64}
    assert found[64].examples % 64 == 0
    assert [each.configuration.batch_size for each in launched] == [32, 64]


def test_a_batch_too_large_for_a_curve_is_left_out(measured):
    """400 steps of 32 are six of 2,048: nothing that few steps end at is reported, and a notice says so."""
    watcher = Watcher()
    found, launched = measured(2048, observe=watcher)
    assert ["batch_size=2048 was not compared" in each.text for each in watcher.of(Notice)] == [True]
    assert found == {}
    assert [each.configuration.batch_size for each in launched] == [32]


def test_without_time_nothing_is_measured(measured):
    """Not even begun."""
    assert measured(64, seconds=2.0) == ({}, [])


def test_what_a_dataset_keeps_is_not_filled_for_losses(tmp_path):
    """A few batches are read: of a start of 30 s, 28 of which fill a cache, trainings are planned with two."""
    run = run_on(simulated_trials(), tmp_path)
    trainings = Trainings(run, ends=run.clock() + 60.0)
    run.records[0] = a_record(BASELINE, trial=0, first_step_seconds=30.0)
    assert trainings.seconds_each(4, share=0.5) <= 0
    run.records[0] = a_record(BASELINE, trial=0, first_step_seconds=30.0, filling_seconds=28.0)
    assert trainings.seconds_each(4, share=0.5) == pytest.approx((30 - 2) / 5)
