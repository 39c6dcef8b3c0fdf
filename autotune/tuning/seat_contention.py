"""Whether seats of one host slow one another down, as by the width of its memory. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MOST_COST, MOST_SPREAD = 0.05, 1.5  # share of throughput lost, and times the usual spread, that are put up with
AT_LEAST = 2  # measurements of each kind


@dataclass(frozen=True, kw_only=True)
class Crowding:
    """What a seat's baseline loses while the other seats work."""

    cost: float  # share of its throughput
    spread: float  # of its slices, over that alone

    @property
    def too_much(self) -> bool:
        """Whether fewer seats would tell more."""
        return self.cost > MOST_COST or self.spread > MOST_SPREAD

    def in_words(self) -> str:
        """`cost 12% of a seat's speed`."""
        if self.cost > MOST_COST:
            return f"cost {self.cost:.0%} of a seat's speed"
        return f"make slices vary {self.spread:.1f} times as much"


def crowding_of(alone: Sequence[float], beside: Sequence[float]) -> Crowding:
    """Of a baseline's throughputs alone and beside busy neighbours, in turns."""
    cost = 1 - statistics.median(beside) / statistics.median(alone)
    spreads = [statistics.stdev(map(math.log, each)) for each in (alone, beside)]
    # A few slices tell a spread badly: a wider one counts only where it is also wide for itself.
    wider = spreads[1] / spreads[0] if spreads[0] > 0 else 1.0
    return Crowding(cost=cost, spread=wider if spreads[1] > MOST_COST else 1.0)
