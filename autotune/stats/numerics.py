"""Check that a configuration learns as float32 without XLA does, from the same weights and batches. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, FiniteFloat

from autotune.data.figures import Check
from autotune.data.models import Frozen
from autotune.stats.intervals import CONFIDENCE, t_quantile

NAME = "numerics_parity"
LEAST_TOLERANCE = 0.05  # of the fall of float32's loss: what may be lost even where seeds make no difference
FEWEST_STEPS = 9

Curve = Sequence[float | None]  # losses by step; None for one that was not finite


def check_parity(float32: Sequence[Curve], curve: Curve) -> Check:
    """Check that a loss curve ends where float32 without XLA may end."""
    # The first of `float32` begins with the weights of `curve`; the spread over all says what weights make of it.
    steps = min([len(curve), *map(len, float32)], default=0)
    if steps < FEWEST_STEPS:
        return cannot_tell(f"{steps} steps were seen, {FEWEST_STEPS} are needed")
    if any(None in losses[:steps] for losses in float32):
        return cannot_tell("float32 without XLA itself has a loss that is not finite")
    if None in curve[:steps]:
        return Check(name=NAME, passed=False, detail=f"no finite loss at step {curve.index(None) + 1}")
    ends = [_late(losses[:steps]) for losses in float32]
    fall = statistics.fmean(_mean(losses[:3]) for losses in float32) - statistics.fmean(ends)
    tolerance = max(_half_width(ends) * math.sqrt(2), LEAST_TOLERANCE * fall)
    falls = f"by {fall:.3g}, and other weights make {tolerance:.3g} of difference"
    if fall <= tolerance:
        return cannot_tell(f"within {steps} steps float32 falls {falls}")
    own = _late(curve[:steps])
    return Check(
        name=NAME,
        passed=own - ends[0] <= tolerance,
        value=own - ends[0],
        limit=tolerance,
        detail=f"after {steps} steps the loss is {own:.4g}, in float32 without XLA {ends[0]:.4g} from the same "
        f"weights and batches; it fell {falls}",
    )


def cannot_tell(why: str) -> Check:
    """Return the check where too little was seen; `why` is half a sentence."""
    return Check(name=NAME, passed=True, detail=f"cannot tell: {why}")


class BatchLosses(Frozen, strict=True):
    """Training losses after equal numbers of examples, at the recommended batch size and at the baseline's.

    Each is the mean over the last third of the examples and over several seeds' weights; None where it was
    not finite, or where the learning rate cannot be set because it follows a schedule.
    """

    examples: Annotated[int, Field(ge=1)]
    baseline: FiniteFloat
    baseline_spread: Annotated[FiniteFloat, Field(ge=0)]  # by how much one more training would differ
    unscaled: FiniteFloat | None  # at the recommended one, with the learning rate as it is
    sqrt_scaled: FiniteFloat | None  # with the learning rate times the square root of the batches' ratio
    linear_scaled: FiniteFloat | None  # with the learning rate times the batches' ratio


def batch_losses(before: Sequence[Curve], after: Sequence[Curve], *, examples: int) -> BatchLosses | None:
    """Compare the late losses of these curves, a curve for each seed; None where the baseline's are not finite."""
    # `after` has the seeds three times: with the learning rate as it is, scaled by the root, scaled linearly.
    seeds, ends = len(before), [_late(curve) for curve in before]
    if not math.isfinite(sum(ends)):
        return None
    scaled = (_mean([_late(curve) for curve in after[start : start + seeds]]) for start in range(0, 3 * seeds, seeds))
    unscaled, root, linear = (loss if math.isfinite(loss) else None for loss in scaled)
    return BatchLosses(
        examples=examples,
        baseline=statistics.fmean(ends),
        baseline_spread=_half_width(ends) * math.sqrt(1 + 1 / seeds),
        unscaled=unscaled,
        sqrt_scaled=root,
        linear_scaled=linear,
    )


def _late(curve: Curve) -> float:
    """Return the mean of the last third."""
    return _mean(curve[-max(1, round(len(curve) / 3)) :])


def _mean(losses: Curve) -> float:
    """Return the mean; NaN where a loss is missing, or there is none."""
    return statistics.fmean(math.nan if loss is None else loss for loss in losses or [None])


def _half_width(ends: Sequence[float]) -> float:
    """Return the half-width of the interval of one loss; 0 for a single one, which shows no spread."""
    return t_quantile(CONFIDENCE, len(ends) - 1) * statistics.stdev(ends) if len(ends) > 1 else 0.0
