"""Loss curves of real trainings: the same weights and batches give the same curve, and what does not learn shows."""

import itertools
import statistics

import psutil
import pytest
from real_trials import PATIENCE_SECONDS

from autotune.data.record import Outcome
from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import Data, LossRuns
from autotune.stats.stability import check_parity

STEPS = 60
KNOWN = Data(examples=512, endless=False)


@pytest.fixture
def curves(launch, tmp_path):
    """The loss curves of a case; all of one test read the batches that the first recorded."""

    def train(case, batch_size=32, *, seeds=(0,), steps=STEPS, seconds=PATIENCE_SECONDS, folder="batches", **knobs):
        runs = LossRuns(
            folder=str(tmp_path / folder), recorded_batch_size=32, seeds=seeds, most_steps=steps, seconds=seconds
        )
        trial = launch(case, batch_size, data=KNOWN, losses=runs, **knobs).trial
        return trial.loss_curves(PATIENCE_SECONDS).curves

    return train


def test_the_same_weights_and_batches_give_the_same_curve(curves):
    first = curves("learns")[0]
    again = curves("learns", prefetch=2, steps_per_execution=4, persistent_iterator=True)[0]
    assert len(first) == len(again) == STEPS
    assert again == pytest.approx(first, rel=1e-4)


def test_batches_are_found_below_a_directory_named_as_a_pattern(curves, tmp_path):
    (tmp_path / "run[1]*").mkdir()
    assert len(curves("learns", folder="run[1]*/batches")[0]) == STEPS


def test_nobody_waits_for_losses_of_a_run_that_is_stopped(launch, tmp_path):
    runs = LossRuns(
        folder=str(tmp_path / "batches"), recorded_batch_size=32, seeds=(0,), most_steps=10**9, seconds=PATIENCE_SECONDS
    )
    trial = launch("learns", 32, data=KNOWN, losses=runs).trial
    with pytest.raises(TrialFailed) as failed:
        trial.loss_curves(PATIENCE_SECONDS, itertools.chain([False], itertools.repeat(True)).__next__)
    assert failed.value.outcome is Outcome.INTERRUPTED
    assert not psutil.pid_exists(trial.pid)


def test_seeds_are_other_weights(curves):
    several = curves("learns", seeds=(0, 1, 2))
    assert curves("learns")[0] == pytest.approx(several[0], rel=1e-4)
    assert len({round(curve[0], 4) for curve in several}) == 3
    assert all(statistics.fmean(curve[-10:]) < 0.7 * statistics.fmean(curve[:3]) for curve in several)


def test_all_trainings_are_as_long_as_the_first(curves):
    several = curves("learns", seeds=(0, 1), steps=100_000, seconds=0.5)
    assert 1 <= len(several[0]) < 100_000
    assert len(several[1]) == len(several[0])


def test_weights_that_no_seed_changes_are_moved_by_rounding(curves):
    first, *others = curves("trained_before", seeds=(0, 1, 2))
    assert curves("trained_before")[0] == pytest.approx(first, rel=1e-6)
    assert len({first[-1], *(curve[-1] for curve in others)}) == 3
    assert all(curve[0] == pytest.approx(first[0], rel=0.02) for curve in others)


def test_a_model_that_is_always_the_same_object_has_no_curves(curves):
    with pytest.raises(TrialFailed, match="returns the same weights each time"):
        curves("the_same", seeds=(0, 1))


SEEDS = (0, 1, 2, 3, 4)


def test_an_innocent_bfloat16_passes(curves):
    reference = curves("learns", seeds=SEEDS)
    check = check_parity(reference, curves("learns", precision="mixed_bfloat16")[0])
    assert check.passed
    assert check.conclusive


def test_half_precision_that_underflows_is_refused(curves):
    reference = curves("underflows", seeds=SEEDS)
    check = check_parity(reference, curves("underflows", precision="mixed_float16")[0])
    assert not check.passed
    assert check_parity(reference, curves("underflows", precision="mixed_bfloat16")[0]).passed


def test_xla_with_bfloat16_that_stalls_is_refused(curves):
    reference = curves("stalls", seeds=SEEDS)
    assert not check_parity(reference, curves("stalls", precision="mixed_bfloat16", jit_compile=True)[0]).passed
    assert check_parity(reference, curves("stalls", jit_compile=True)[0]).passed
    assert check_parity(reference, curves("stalls", precision="mixed_bfloat16")[0]).passed


def test_a_loss_that_is_not_finite_is_none(curves):
    curve = curves("is_nan", steps=5)[0]
    assert curve == (None,) * 5


def test_another_batch_size_sees_the_same_examples(curves):
    small = curves("standing", steps=4)[0]
    large = curves("standing", 64, steps=2)[0]
    assert large == pytest.approx([(small[0] + small[1]) / 2, (small[2] + small[3]) / 2], rel=1e-4)
