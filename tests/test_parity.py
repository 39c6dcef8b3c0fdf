"""Who is held against float32, how often, and what follows; on simulated trials."""

import pytest
from simulated_runs import BASELINE, Watcher, a_record, run_on, simulated_trials

from autotune.executors.executor import TrialFailed
from autotune.record import Outcome
from autotune.stats.numerics import tells
from autotune.tuning.parity import SAME, Parity
from autotune.tuning.progress import Notice
from autotune.tuning.trainings import Trainings

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


def checked(run, configuration, *, seconds=60.0):
    """The check of one configuration, with so much time."""
    return Parity(Trainings(run, ends=run.clock() + seconds)).check(configuration)


def test_what_learns_passes(started):
    """Float32 from five seeds, the configuration from the first: two processes."""
    trials, run, _ = started()
    check = checked(run, BFLOAT)
    assert check.passed
    assert tells(check)
    assert [each.configuration["precision"] for each in trials.launched] == ["float32", "mixed_bfloat16"]
    assert trials.alive == []


def test_what_does_not_learn_is_refused(started):
    """The loss stays where it began."""
    _, run, _ = started(learns=lambda each: each["precision"] == "float32")
    assert not checked(run, BFLOAT).passed


@pytest.mark.parametrize(
    "changes", [{"batch_size": 128}, {"prefetch": 2, "steps_per_execution": 8}, {"deterministic": False}]
)
def test_the_same_numerics_need_no_check(started, changes):
    """Batch size and pipeline change the order or number of examples, which the comparison holds still anyway."""
    trials, run, _ = started()
    assert checked(run, BASELINE.replace(**changes)) == SAME
    assert trials.launched == []


def test_what_the_baseline_computes_in_is_not_held_against_it(started):
    """A user of bfloat16 is offered other batch sizes of it; and float32 without XLA is the measure itself."""
    trials, run, _ = started(baseline=BFLOAT)
    assert checked(run, BFLOAT.replace(batch_size=64)) == SAME
    assert checked(run, BFLOAT.replace(precision="float32")).passed
    assert trials.launched == []


def test_the_reference_has_the_candidates_batch_size(started):
    """And float32 without XLA, the rest the baseline's."""
    trials, run, _ = started()
    checked(run, BASELINE.replace(batch_size=128, jit_compile=True, prefetch=2))
    assert trials.launched[0].configuration == BASELINE.replace(batch_size=128)


def test_each_class_is_checked_once_for_each_batch_size(started):
    """Pipeline knobs ask nothing new; another batch size does, and another precision shares the reference."""
    trials, run, _ = started()
    parity = Parity(Trainings(run, ends=run.clock() + 600))
    for changes in ({}, {"prefetch": 8}, {"batch_size": 64}, {"jit_compile": True}):
        parity.check(BFLOAT.replace(**changes))
    assert [(each.configuration.batch_size, each.configuration["precision"]) for each in trials.launched] == [
        (32, "float32"),
        (32, "mixed_bfloat16"),
        (64, "float32"),
        (64, "mixed_bfloat16"),
        (32, "mixed_bfloat16"),
    ]


def test_what_was_refused_at_one_batch_size_is_refused_at_all(started):
    """Without further trainings: a class that does not learn is not stable, and time is short."""
    trials, run, _ = started(learns=lambda each: each["precision"] == "float32")
    parity = Parity(Trainings(run, ends=run.clock() + 600))
    assert not parity.check(BFLOAT).passed
    launched = len(trials.launched)
    assert not parity.check(BFLOAT.replace(batch_size=64)).passed
    assert parity.check(BASELINE.replace(batch_size=64, jit_compile=True)).passed
    assert len(trials.launched) == launched + 2


def test_a_trial_that_fails_at_it_is_refused(started):
    """What crashes within two hundred steps is not stable."""

    def failure(configuration):
        if configuration["precision"] != "float32":
            return TrialFailed(Outcome.CRASHED, "killed by SIGSEGV")
        return None

    _, run, _ = started(failure=failure)
    check = checked(run, BFLOAT)
    assert (check.passed, check.detail) == (False, "killed by SIGSEGV")


def test_without_time_nothing_is_claimed(started):
    """It passes, cannot tell, and the user hears of it."""
    trials, run, watcher = started()
    check = checked(run, BFLOAT, seconds=2.0)
    assert check.passed
    assert not tells(check)
    assert "larger --budget" in watcher.of(Notice)[0].text
    assert trials.launched == []


@pytest.mark.parametrize("seconds", [5.0, 10.0, 30.0])
def test_it_ends_in_time(started, seconds):
    """However slow the steps."""
    _, run, _ = started(samples_per_second=lambda each: 100.0)
    began = run.clock()
    checked(run, BFLOAT, seconds=seconds)
    assert run.clock() - began <= seconds + 1.0


def test_a_reference_that_fails_is_no_candidates_fault(started):
    """Where float32 itself runs out of memory at this batch size, nothing can be told."""

    def failure(configuration):
        if configuration["precision"] == "float32":
            return TrialFailed(Outcome.OOM, "out of memory")
        return None

    _, run, _ = started(failure=failure)
    check = checked(run, BFLOAT)
    assert check.passed
    assert "float32 without XLA gave no losses at batch_size=32: out of memory" in check.detail


TAKEN = TrialFailed(Outcome.OOM, "INTERNAL: all CUDA-capable devices are busy or unavailable")


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("failure", [None, TAKEN])
def test_a_card_that_is_lost_or_taken_is_no_configurations_fault(started, reference, failure):
    """Be it the reference's process or the configuration's own: nothing is refused, and nothing is told."""

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
    assert not tells(check)
    assert ("busy or unavailable" if failure else "where the baseline saw NVIDIA H200") in check.detail
