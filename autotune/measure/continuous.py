"""What pauses between slices give a training that a long one does not have. Pure functions.

A pause stops the training, not the world: what a pipeline waits for arrives meanwhile, and a slice after the pause is
faster than the training is. In a *leg*, slices follow on one another; only the first has a pause before it. How much
faster it is than the others of its leg, a moment later in the same process, is what the pause gave. The claim, which
comes from slices of which most have a pause before them, is freed of that.

(To set the legs' own speeds against each other says less: they are seconds apart, and two processes' luck is in them.)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.measure.intervals import CONFIDENCE, LogInterval, t_quantile
from autotune.measure.throughput import Measured

FEWEST_SLICES = 3
"""In a leg, the first included."""
FEWEST_LEGS = 4
"""Of both together, two of each."""
TELLING = 0.10
"""Half-width of the pauses' effect on the claim, above which a soak is too short to tell: 0.1 is about ten percent."""
SURELY = 0.99
"""Confidence at which pauses are held to have made the speed-up look smaller than it is. That they made it look larger
is believed at an interval's own: a claim that chance corrects is wrong by just what chance showed, and then it had
better be too small."""


@dataclass(frozen=True, kw_only=True)
class Soaked:
    """What a continuous run showed.

    Args:
        pauses: Logarithm of the factor by which pauses raise the speed-up that slices show.
        surely: The same with the wider interval of `SURELY`.
        slices: Of the slices that had no pause before them, samples per second and examples, by leg: the winner's.
        baseline_slices: The baseline's.
        seconds: How long the winner trained.
    """

    pauses: LogInterval
    surely: LogInterval
    slices: tuple[tuple[Measured, ...], ...]
    baseline_slices: tuple[tuple[Measured, ...], ...]
    seconds: float

    @property
    def tells(self) -> bool:
        """Whether it was long enough to say something of the claim."""
        return self.pauses.half_width <= TELLING

    @property
    def contradicts(self) -> bool:
        """Whether slices surely show another speed-up than the training has."""
        return self.pauses.low > 0 or self.surely.high < 0

    def without_pauses(self, claim: LogInterval) -> LogInterval:
        """A claim from slices, freed of what the pauses gave; both errors are in its interval."""
        value = claim.value - self.pauses.value
        error = math.hypot(claim.half_width, self.pauses.half_width)
        return LogInterval(value=value, low=value - error, high=value + error, count=claim.count)


def soaked(
    measured: Sequence[Sequence[Measured]],
    baseline_measured: Sequence[Sequence[Measured]],
    *,
    seconds: float,
    shares: tuple[float, float] = (1.0, 1.0),
) -> Soaked:
    """What two trainings showed in turns.

    What pauses give has the wider of two intervals of Student's t: by the spread of the legs' gains, and by what their
    slices predict for it. Legs are few, and the gains of two agree by chance now and then.

    Args:
        measured: The slices of each leg of the winner, in order; at least `FEWEST_SLICES` in each, and at least two
            legs.
        baseline_measured: The same of the baseline.
        seconds: How long the winner trained.
        shares: Of the slices that the claim comes from, those with a pause before them, the winner's and the
            baseline's: so much of what a pause gives is in it.
    """
    legs, baseline_legs = (
        [[rate for rate, _ in leg] for leg in each] for each in (measured, baseline_measured)
    )
    gains = [
        [share * _gain(leg) for leg in each]
        for each, share in zip((legs, baseline_legs), shares, strict=True)
    ]
    errors = [_error_by_gains(gains), _error_by_slices((legs, baseline_legs), shares)]
    value = statistics.fmean(gains[0]) - statistics.fmean(gains[1])

    def interval(confidence: float) -> LogInterval:
        margin = max(t_quantile(confidence, degrees) * error for error, degrees in errors)
        return LogInterval(value=value, low=value - margin, high=value + margin, count=sum(map(len, gains)))

    return Soaked(
        pauses=interval(CONFIDENCE),
        surely=interval(SURELY),
        slices=tuple(tuple(leg[1:]) for leg in measured),
        baseline_slices=tuple(tuple(leg[1:]) for leg in baseline_measured),
        seconds=seconds,
    )


def _error_by_gains(sides: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Standard error of the difference of both sides' means, and its degrees of freedom, by what legs gained."""
    variance, degrees = _pooled(sides)
    return math.sqrt(variance * sum(1 / len(each) for each in sides)), degrees


def _error_by_slices(
    sides: Sequence[Sequence[Sequence[float]]], shares: Sequence[float]
) -> tuple[float, float]:
    """The same by what slices without a pause vary by, which either side does by itself (Welch)."""
    parts = []
    for legs, share in zip(sides, shares, strict=True):
        variance, degrees = _pooled([_logs_without_pause(leg) for leg in legs])
        of_mean = variance * sum(1 + 1 / (len(leg) - 1) for leg in legs) / len(legs) ** 2
        parts.append((share**2 * of_mean, degrees))
    total = sum(part for part, _ in parts)
    if not total:
        return 0.0, 1.0
    return math.sqrt(total), total**2 / sum(part**2 / degrees for part, degrees in parts)


def _gain(leg: Sequence[float]) -> float:
    """Logarithm by which the slice after the pause is faster than those that follow."""
    return math.log(leg[0]) - statistics.fmean(_logs_without_pause(leg))


def _logs_without_pause(leg: Sequence[float]) -> list[float]:
    """Of the slices that follow."""
    return [math.log(each) for each in leg[1:]]


def _pooled(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The variance within groups, and its degrees of freedom."""
    degrees = sum(len(each) - 1 for each in groups)
    return sum(statistics.variance(each) * (len(each) - 1) for each in groups) / degrees, degrees
