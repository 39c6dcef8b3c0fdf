"""What a continuous run says of a claim that was measured in frozen slices. Pure functions.

A pause between slices stops the training, not the world: what a pipeline waits for arrives meanwhile, and a slice
after the pause is faster than the training is. Here two trainings take turns in long *legs*, each begun after a pause
but not counted until that has worn off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.measure.intervals import LogInterval, instance_interval

LEAD_SHARE = 0.25
"""Of a leg's slices: the first ones, in which the pause before it still shows. One at least."""
FEWEST_SLICES = 3
"""In a leg, the lead included."""


@dataclass(frozen=True, kw_only=True)
class Soaked:
    """What a continuous run showed.

    Args:
        ratio: Logarithm of the speed-up.
        seconds: How long the winner trained.
    """

    ratio: LogInterval
    seconds: float


def after_the_lead(rates: Sequence[float]) -> Sequence[float]:
    """The rates of a leg's slices that count."""
    return rates[max(1, math.ceil(LEAD_SHARE * len(rates))) :]


def continuous_ratio(legs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> LogInterval:
    """Logarithm of the speed-up in continuous runs, with its interval.

    Args:
        legs: For each two neighbouring legs the rates of their slices, the lead included: the candidate's, and
            the baseline's. Both have at least `FEWEST_SLICES`.
    """
    return instance_interval(
        [
            [
                math.log(own / reference)
                for own, reference in zip(after_the_lead(candidate), after_the_lead(baseline), strict=False)
            ]
            for candidate, baseline in legs
        ]
    )


def contradicts(claim: LogInterval, continuous: LogInterval) -> bool:
    """Whether the two differ by more than their errors together allow."""
    return abs(claim.value - continuous.value) > math.hypot(claim.half_width, continuous.half_width)
