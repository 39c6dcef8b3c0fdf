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
        rates: Samples per second, by leg, of the slices that had no pause before them: the winner's.
        baseline_rates: The baseline's.
        seconds: How long the winner trained.
    """

    pauses: LogInterval
    rates: tuple[float, ...]
    baseline_rates: tuple[float, ...]
    seconds: float

    @property
    def tells(self) -> bool:
        """Whether it was long enough to say something of the claim."""
        return self.pauses.half_width <= TELLING

    @property
    def contradicts(self) -> bool:
        """Whether slices surely show another speed-up than the training has."""
        wider = t_quantile(SURELY, self.pauses.count) / t_quantile(CONFIDENCE, self.pauses.count)
        return self.pauses.low > 0 or self.pauses.value < -wider * self.pauses.half_width

    def without_pauses(self, claim: LogInterval) -> LogInterval:
        """A claim from slices, freed of what the pauses gave; both errors are in its interval."""
        value = claim.value - self.pauses.value
        error = math.hypot(claim.half_width, self.pauses.half_width)
        return LogInterval(value=value, low=value - error, high=value + error, count=claim.count)


def soaked(
    legs: Sequence[Sequence[float]],
    baseline_legs: Sequence[Sequence[float]],
    *,
    seconds: float,
    shares: tuple[float, float] = (1.0, 1.0),
) -> Soaked:
    """What two trainings showed in turns.

    The interval is Student's t, by the larger of two spreads: that of the legs' gains, and the one that their slices
    predict. Legs are few, and the gains of two agree by chance now and then.

    Args:
        legs: The rates of the slices of each leg of the winner, in order; at least `FEWEST_SLICES` in each, and at
            least two legs.
        baseline_legs: The same of the baseline.
        seconds: How long the winner trained.
        shares: Of the slices that the claim comes from, those with a pause before them, the winner's and the
            baseline's: so much of what a pause gives is in it.
    """
    sides = tuple(zip((legs, baseline_legs), shares, strict=True))
    gains = [[share * _gain(leg) for leg in each] for each, share in sides]
    of_gains, degrees_of_gains = _pooled(gains)
    of_slices, degrees_of_slices = _pooled([_logs_without_pause(leg) for each, _ in sides for leg in each])
    predicted = [[share**2 * of_slices * (1 + 1 / (len(leg) - 1)) for leg in each] for each, share in sides]
    margin, degrees = max(
        (t_quantile(CONFIDENCE, count) * math.sqrt(variance), count)
        for variance, count in (
            (of_gains * sum(1 / len(each) for each in gains), degrees_of_gains),
            (sum(sum(each) / len(each) ** 2 for each in predicted), degrees_of_slices),
        )
    )
    value = statistics.fmean(gains[0]) - statistics.fmean(gains[1])
    return Soaked(
        pauses=LogInterval(value=value, low=value - margin, high=value + margin, count=degrees),
        rates=tuple(statistics.fmean(leg[1:]) for leg in legs),
        baseline_rates=tuple(statistics.fmean(leg[1:]) for leg in baseline_legs),
        seconds=seconds,
    )


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
