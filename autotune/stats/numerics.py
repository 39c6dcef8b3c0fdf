"""Does a configuration still learn as float32 without XLA does? A rule on loss curves. Pure functions.

A configuration's curve is held against that of float32 without XLA: the same batch size, the same weights, the same
recorded batches. How far apart they may end is what other weights, from other seeds, do to float32 itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.stats.intervals import CONFIDENCE, t_quantile
from autotune.stats.stability import Check

NAME = "numerics_parity"
LEAST_TOLERANCE = 0.05
"""Of the fall of float32's loss: what may be lost even where seeds make no difference."""
FEWEST_STEPS = 9
LATE_SHARE = 1 / 3
"""Of the steps: those whose mean loss is compared."""
EARLY_STEPS = 3
"""Steps whose mean loss is where the fall begins."""

Curve = Sequence[float | None]


def parity(reference: Sequence[Curve], curve: Curve) -> Check:
    """Whether a loss curve ends where float32 without XLA may end.

    The late loss is the mean of the last third of the steps. How far apart two trainings from different weights
    may end follows from the spread over the seeds, by Student's t.

    Args:
        reference: Losses by step of float32 without XLA, the first from the weights that `curve` began with, the
            others from other seeds.
        curve: Losses by step of the configuration.

    Returns:
        Failed where the loss ends too high or is not finite. Where too little was seen to tell, passed, with
        `value` None and the reason in `detail`.
    """
    steps = min([len(curve), *(len(each) for each in reference)], default=0)
    if steps < FEWEST_STEPS:
        return _cannot_tell(f"{steps} steps were seen, {FEWEST_STEPS} are needed")
    finite = [[loss for loss in each[:steps] if loss is not None] for each in reference]
    if any(len(each) < steps for each in finite):
        return _cannot_tell("float32 without XLA itself has a loss that is not finite")
    own = [loss for loss in curve[:steps] if loss is not None]
    if len(own) < steps:
        step = next(index for index, loss in enumerate(curve, start=1) if loss is None)
        return Check(name=NAME, passed=False, value=None, limit=None, detail=f"no finite loss at step {step}")
    ends = [_late(each) for each in finite]
    fall = statistics.fmean(_early(each) for each in finite) - statistics.fmean(ends)
    tolerance = max(_spread(ends, of_two=True), LEAST_TOLERANCE * fall)
    if fall <= tolerance:
        return _cannot_tell(
            f"within {steps} steps float32 falls by {fall:.3g}, and other weights make {tolerance:.3g} of difference"
        )
    excess = _late(own) - ends[0]
    return Check(
        name=NAME,
        passed=excess <= tolerance,
        value=excess,
        limit=tolerance,
        detail=f"after {steps} steps the loss is {_late(own):.4g}, in float32 without XLA {ends[0]:.4g} from the same "
        f"weights and batches; it fell by {fall:.3g}, and other weights make {tolerance:.3g} of difference",
    )


@dataclass(frozen=True, kw_only=True)
class BatchLosses:
    """Training losses at another batch size beside the baseline's, after equal numbers of examples.

    Each is the mean of the last third of the examples, over several seeds' weights; None where one was not
    finite, or the learning rate cannot be set.

    Args:
        examples: How many each training has seen.
        baseline: At the baseline's batch size.
        baseline_spread: Half-width of what one more such training would end at.
        unscaled: With the learning rate as it is.
        sqrt_scaled: With the learning rate times the square root of the batches' ratio.
        linear_scaled: With the learning rate times the batches' ratio.
    """

    examples: int
    baseline: float
    baseline_spread: float
    unscaled: float | None
    sqrt_scaled: float | None
    linear_scaled: float | None


def batch_losses(
    before: Sequence[Curve], after: Sequence[Curve], *, examples: int, seeds: int
) -> BatchLosses | None:
    """What became of the loss, out of the curves.

    Args:
        before: At the baseline's batch size, a curve for each seed.
        after: At the other: for each seed with the learning rate as it is, then scaled by the root, then linearly.
        examples: How many each training has seen.
        seeds: How many there are.

    Returns:
        None where the baseline itself has a loss that is not finite.
    """
    ends = [_late_or_none(curve) for curve in before]
    finite = [each for each in ends if each is not None]
    if not finite or len(finite) < len(ends):
        return None
    unscaled, root, linear = (
        _mean_or_none(after[start : start + seeds]) for start in range(0, 3 * seeds, seeds)
    )
    return BatchLosses(
        examples=examples,
        baseline=statistics.fmean(finite),
        baseline_spread=_spread(finite),
        unscaled=unscaled,
        sqrt_scaled=root,
        linear_scaled=linear,
    )


def _late_or_none(curve: Curve) -> float | None:
    late = curve[-max(1, round(len(curve) * LATE_SHARE)) :]
    finite = [loss for loss in late if loss is not None]
    return statistics.fmean(finite) if finite and len(finite) == len(late) else None


def _mean_or_none(curves: Sequence[Curve]) -> float | None:
    ends = [_late_or_none(curve) for curve in curves]
    finite = [each for each in ends if each is not None]
    return statistics.fmean(finite) if finite and len(finite) == len(ends) else None


def tells(check: Check) -> bool:
    """Whether the check saw enough to pass or fail."""
    return check.value is not None or not check.passed


def _cannot_tell(why: str) -> Check:
    return Check(name=NAME, passed=True, value=None, limit=None, detail=f"cannot tell: {why}")


def _late(curve: Sequence[float]) -> float:
    return statistics.fmean(curve[-max(1, round(len(curve) * LATE_SHARE)) :])


def _early(curve: Sequence[float]) -> float:
    return statistics.fmean(curve[:EARLY_STEPS])


def _spread(ends: Sequence[float], *, of_two: bool = False) -> float:
    """By how much one more training may differ from the mean of these, or from a single one; 0 for fewer than two."""
    if len(ends) < 2:
        return 0.0
    variances = 2 if of_two else 1 + 1 / len(ends)
    return t_quantile(CONFIDENCE, len(ends) - 1) * statistics.stdev(ends) * math.sqrt(variances)
