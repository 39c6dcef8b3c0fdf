"""Check that a configuration learns as float32 without XLA does, from the same weights and batches. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autotune.data.figures import Check
from autotune.stats.intervals import CONFIDENCE, t_quantile

NAME = "numerics_parity"
LEAST_TOLERANCE = 0.05  # of the fall of float32's loss: what may be lost even where seeds make no difference
FEWEST_STEPS = 9

Curve = Sequence[float | None]  # losses by step; None for one that was not finite


def check_parity(float32: Sequence[Curve], curve: Curve, precision: str = "float32") -> Check:
    """Check that a loss curve ends where float32 without XLA may end, or another `precision` of the reference."""
    # The first of `float32` begins with the weights of `curve`; the spread over all says what weights make of it.
    steps = min([len(curve), *map(len, float32)], default=0)
    if steps < FEWEST_STEPS:
        return cannot_tell(f"{steps} step{' was' if steps == 1 else 's were'} seen, {FEWEST_STEPS} are needed")
    if any(None in losses[:steps] for losses in float32):
        return cannot_tell(f"{precision} without XLA itself has a loss that is not finite")
    if None in curve[:steps]:
        return Check(name=NAME, passed=False, detail=f"no finite loss at step {curve.index(None) + 1}")
    ends = [_late(losses[:steps]) for losses in float32]
    fall = statistics.fmean(_mean(losses[:3]) for losses in float32) - statistics.fmean(ends)
    tolerance = max(_half_width(ends) * math.sqrt(2), LEAST_TOLERANCE * fall)
    falls = f"by {fall:.3g}, and other weights make {tolerance:.3g} of difference"
    if fall <= tolerance:
        return cannot_tell(f"within {steps} steps {precision} falls {falls}")
    own = _late(curve[:steps])
    return Check(
        name=NAME,
        passed=own - ends[0] <= tolerance,
        value=own - ends[0],
        limit=tolerance,
        detail=f"after {steps} steps the loss is {own:.4g}, in {precision} without XLA {ends[0]:.4g} from the same "
        f"weights and batches; it fell {falls}",
    )


def cannot_tell(why: str) -> Check:
    """Return the check where too little was seen; `why` is half a sentence."""
    return Check(name=NAME, passed=True, detail=f"cannot tell: {why}")


def _late(curve: Curve) -> float:
    return _mean(curve[-max(1, round(len(curve) / 3)) :])


def _mean(losses: Curve) -> float:
    """Return the mean; NaN where a loss is missing, or there is none."""
    return statistics.fmean(math.nan if loss is None else loss for loss in losses or [None])


def _half_width(ends: Sequence[float]) -> float:
    """Return the half-width of the interval of one loss; 0 for a single one, which shows no spread."""
    return t_quantile(CONFIDENCE, len(ends) - 1) * statistics.stdev(ends) if len(ends) > 1 else 0.0
