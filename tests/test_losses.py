"""Trainings for their losses: numerics parity, and the loss at another batch size; on simulated trials."""

import pytest
from simulated_runs import BASELINE, Watcher, a_record, a_warm_up, run_on, simulated_trials

from autotune.data.facts import WorkloadReference
from autotune.data.record import Outcome
from autotune.runtime.executor import TrialFailed
from autotune.tuning.events import Began, Notice
from autotune.tuning.learning import Trainings, compare_numerics

BFLOAT = BASELINE.replace(precision="mixed_bfloat16")


@pytest.fixture
def started(tmp_path):
    """A run whose baseline has been measured: its trials, the run, and who watches."""

    def start(*, baseline=BASELINE, **settings):
        trials = simulated_trials(**settings)
        watcher = Watcher()
        run = run_on(trials, tmp_path, observe=watcher)
        run.baseline = baseline
        trials.open()
        run.records[0] = a_record(baseline, trial=0, first_step_seconds=1.5)
        return trials, run, watcher

    return start


def trainings_of(run, seconds=60.0):
    """Trainings that have so much time."""
    return Trainings(run, seat="simulated", ends=run.clock() + seconds, heading="comparing")


def checked(run, configuration, *, seconds=60.0):
    """The check of one configuration, with so much time."""
    return compare_numerics(trainings_of(run, seconds), configuration)


def test_what_learns_passes(started):
    trials, run, _ = started()
    check = checked(run, BFLOAT)
    assert check.passed
    assert check.conclusive
    assert [trial.configuration["precision"] for trial in trials.launched] == ["float32", "mixed_bfloat16"]
    assert trials.alive == []


def test_what_does_not_learn_is_refused(started):
    _, run, _ = started(learns=lambda configuration: configuration["precision"] == "float32")
    assert not checked(run, BFLOAT).passed


def test_float32_without_xla_is_the_measure_itself(started):
    trials, run, _ = started(baseline=BFLOAT)
    assert checked(run, BFLOAT.replace(precision="float32")).passed
    assert trials.launched == []


def test_float64_is_the_measure_where_the_baseline_has_it(started):
    trials, run, _ = started(baseline=BASELINE.replace(precision="float64"))
    check = checked(run, BASELINE.replace(precision="float64", jit_compile=True))
    assert trials.launched[0].configuration["precision"] == "float64"
    assert "in float64 without XLA" in check.detail


def test_the_reference_has_the_candidates_batch_size(started):
    trials, run, _ = started()
    checked(run, BASELINE.replace(batch_size=128, jit_compile=True, prefetch=2))
    assert trials.launched[0].configuration == BASELINE.replace(batch_size=128)


def test_a_trial_that_fails_at_it_is_refused(started):
    killed = TrialFailed(Outcome.CRASHED, "killed by SIGSEGV")
    _, run, _ = started(failure=lambda own: killed if own["precision"] != "float32" else None)
    check = checked(run, BFLOAT)
    assert (check.passed, check.detail) == (False, "killed by SIGSEGV")


def test_without_time_nothing_is_claimed(started):
    trials, run, watcher = started()
    check = checked(run, BFLOAT, seconds=2.0)
    assert check.passed
    assert not check.conclusive
    assert "larger --budget" in watcher.of(Notice)[0].text
    assert trials.launched == []


@pytest.mark.parametrize("seconds", [5.0, 10.0, 30.0])
def test_it_ends_in_time(started, seconds):
    _, run, _ = started(samples_per_second=lambda configuration: 100.0)
    began = run.clock()
    checked(run, BFLOAT, seconds=seconds)
    assert run.clock() - began <= seconds + 1.0


def test_a_reference_that_fails_is_no_candidates_fault(started):
    full = TrialFailed(Outcome.OOM, "out of memory")
    _, run, _ = started(failure=lambda own: full if own["precision"] == "float32" else None)
    check = checked(run, BFLOAT)
    assert check.passed
    assert "float32 without XLA gave no losses at batch_size=32: out of memory" in check.detail


TAKEN = TrialFailed(Outcome.OOM, "INTERNAL: all CUDA-capable devices are busy or unavailable")


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_two_losses_of_another_model_end_the_run(started, tmp_path, precision):
    """Neither of them gives a verdict."""
    _, run, _ = started(model=lambda own: {"shapes": ("(99,)",) if own["precision"] == precision else ()})
    run.model = a_warm_up()
    run.reference = WorkloadReference(file=str(tmp_path / "train.py"), search_path=(str(tmp_path),))
    for _ in range(2):
        check = checked(run, BFLOAT)
        assert (check.passed, check.conclusive) == (True, False)
        assert "trained a model of 0 weights (with one of shape (99,))" in check.detail
    assert "a training for its losses trained a model" in run.model_error.message


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("failure", [None, TAKEN])
def test_a_card_that_is_lost_or_taken_is_no_configurations_fault(started, reference, failure):
    def spoilt(configuration):
        if (configuration["precision"] == "float32") is not reference:
            return None
        if failure is None:
            trials.gpus = ()
        return failure

    trials, run, _ = started(gpus=("NVIDIA H200",), failure=spoilt)
    run.gpus = ("NVIDIA H200",)
    check = checked(run, BFLOAT)
    assert check.passed
    assert not check.conclusive
    assert ("busy or unavailable" if failure else "the baseline saw NVIDIA H200") in check.detail


def test_what_a_dataset_keeps_is_not_filled_for_losses(started):
    _, run, _ = started()
    trainings = trainings_of(run)
    run.records[0] = a_record(BASELINE, trial=0, first_step_seconds=30.0)
    assert trainings.seconds_each(4, share=0.5) <= 0
    run.records[0] = a_record(BASELINE, trial=0, first_step_seconds=30.0, filling_seconds=28.0)
    assert trainings.seconds_each(4, share=0.5) == pytest.approx((30 - 2) / 5)


def test_the_heading_comes_when_the_first_training_begins(started):
    trials, run, watcher = started()
    launched = []
    watcher.react = lambda event: launched.append(len(trials.launched)) if isinstance(event, Began) else None
    checked(run, BASELINE.replace(prefetch=2))
    checked(run, BFLOAT, seconds=0.1)
    assert watcher.of(Began) == []
    checked(run, BFLOAT)
    assert [event.text for event in watcher.of(Began)] == ["comparing"]
    assert launched == [0]


def test_recorded_batches_are_removed(started):
    _, run, _ = started()
    run.directory.path.mkdir(exist_ok=True)
    with trainings_of(run) as trainings:
        compare_numerics(trainings, BFLOAT)
        assert len(list(run.directory.path.glob("scratch-*"))) == 1
    assert list(run.directory.path.glob("scratch-*")) == []
