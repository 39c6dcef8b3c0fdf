"""Loss curves of real trainings: the same weights and batches give the same curve, and what does not learn shows."""

import statistics

import pytest
from real_trials import PATIENCE_SECONDS

from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import Data, LossRuns
from autotune.stats.numerics import parity

pytestmark = pytest.mark.slow

STEPS = 60
KNOWN = Data(examples=512, endless=False)


@pytest.fixture
def curves(launch, tmp_path):
    """The loss curves of a case; all of one test read the batches that the first recorded."""

    def train(
        case,
        batch_size=32,
        *,
        seeds=(0,),
        scales=(1.0,),
        steps=STEPS,
        seconds=PATIENCE_SECONDS,
        folder="batches",
        **knobs,
    ):
        runs = LossRuns(
            folder=str(tmp_path / folder),
            recorded_batch_size=32,
            seeds=seeds,
            scales=scales,
            most_steps=steps,
            seconds=seconds,
        )
        trial = launch(case, batch_size, data=KNOWN, losses=runs, **knobs).trial
        return trial.loss_curves(PATIENCE_SECONDS).curves

    return train


def test_the_same_weights_and_batches_give_the_same_curve(curves):
    """Another process, another order of shuffling, other pipeline knobs: the losses are the first one's."""
    first = curves("learns")[0]
    again = curves("learns", prefetch=2, steps_per_execution=4, persistent_iterator=True)[0]
    assert len(first) == len(again) == STEPS
    assert again == pytest.approx(first, rel=1e-4)


def test_batches_are_found_in_a_directory_whose_name_is_a_pattern(curves, tmp_path):
    """TensorFlow takes brackets for a pattern; a run's directory may have them."""
    (tmp_path / "run[1]*").mkdir()
    assert len(curves("learns", folder="run[1]*/batches")[0]) == STEPS


def test_seeds_are_other_weights(curves):
    """The first training of several is the one of its seed alone; the others differ, and all learn."""
    several = curves("learns", seeds=(0, 1, 2))
    assert curves("learns")[0] == pytest.approx(several[0], rel=1e-4)
    assert len({round(curve[0], 4) for curve in several}) == 3
    assert all(statistics.fmean(curve[-10:]) < 0.7 * statistics.fmean(curve[:3]) for curve in several)


def test_all_trainings_are_as_long_as_the_first(curves):
    """Where the time ends the first one, the others stop at the same step."""
    several = curves("learns", seeds=(0, 1), steps=100_000, seconds=0.5)
    assert 1 <= len(several[0]) < 100_000
    assert len(several[1]) == len(several[0])


def test_weights_that_no_seed_changes_are_moved_by_rounding(curves):
    """Else five equal trainings would say that rounding makes no difference; the candidate's own are untouched."""
    first, *others = curves("trained_before", seeds=(0, 1, 2))
    assert curves("trained_before")[0] == pytest.approx(first, rel=1e-6)
    assert len({first[-1], *(curve[-1] for curve in others)}) == 3
    assert all(curve[0] == pytest.approx(first[0], rel=0.02) for curve in others)


def test_a_model_that_is_always_the_same_object_has_no_curves(curves):
    """Each training would go on where the last one ended, and be told as one from other weights."""
    with pytest.raises(TrialFailed, match="returns the same weights each time"):
        curves("the_same", seeds=(0, 1))


SEEDS = (0, 1, 2, 3, 4)


def test_an_innocent_bfloat16_passes(curves):
    """Rounding moves the curve by less than other weights do."""
    reference = curves("learns", seeds=SEEDS)
    check = parity(reference, curves("learns", precision="mixed_bfloat16")[0])
    assert check.passed
    assert check.tells


def test_half_precision_that_underflows_is_refused(curves):
    """Gradients of nothing: float32 learns, float16 without loss scaling stays where it was."""
    reference = curves("underflows", seeds=SEEDS)
    check = parity(reference, curves("underflows", precision="mixed_float16")[0])
    assert not check.passed
    assert parity(reference, curves("underflows", precision="mixed_bfloat16")[0]).passed


def test_xla_with_bfloat16_that_stalls_is_refused(curves):
    """Either alone learns; the two together do not, and only the two together are refused."""
    reference = curves("stalls", seeds=SEEDS)
    assert not parity(reference, curves("stalls", precision="mixed_bfloat16", jit_compile=True)[0]).passed
    assert parity(reference, curves("stalls", jit_compile=True)[0]).passed
    assert parity(reference, curves("stalls", precision="mixed_bfloat16")[0]).passed


def test_a_loss_that_is_not_finite_is_none(curves):
    """NaN does not travel; where it came is told, and the curve goes on."""
    curve = curves("is_nan", steps=5)[0]
    assert curve == (None,) * 5


def test_another_batch_size_sees_the_same_examples(curves):
    """The recorded batches are batched anew: with fixed weights, a loss of 64 is the mean of two of 32."""
    small = curves("standing", steps=4)[0]
    large = curves("standing", 64, steps=2)[0]
    assert large == pytest.approx([(small[0] + small[1]) / 2, (small[2] + small[3]) / 2], rel=1e-4)


def test_the_learning_rate_is_scaled(curves):
    """A scale of next to nothing leaves the loss where it was; under half precision the inner optimizer is meant."""
    for precision in ("float32", "mixed_float16"):
        as_it_is, hardly = curves("learns", scales=(1.0, 1e-6), precision=precision)
        assert statistics.fmean(as_it_is[-10:]) < 0.7 * statistics.fmean(hardly[-10:])
        assert hardly[0] == pytest.approx(as_it_is[0], rel=0.1)  # dropout draws on


def test_a_schedule_is_left_alone(curves):
    """Its rate cannot be set: that training is empty, the unscaled one is not."""
    as_it_is, scaled = curves("scheduled", scales=(1.0, 2.0))
    assert len(as_it_is) == STEPS
    assert scaled == ()
