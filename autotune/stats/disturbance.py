"""Which pairs of slices were disturbed by other work on the machine. Pure functions.

A pair is left out for its cause, never for its result: no speed enters here. Throttling by a quota is no cause,
because a configuration with more threads brings it upon itself.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.record import Slice

LEAST_DEPARTURE = 0.10  # share of the machine by which a slice's load must depart from the usual
RESTLESS = 9.0  # times the median departure: six standard deviations, where loads vary normally


def load_of(each: Slice) -> float | None:
    """Share of the machine that others took during a slice, 0 to 1; None where it is unknown."""
    if each.cores is None or (each.foreign_cpu_seconds is None and each.steal_seconds is None):
        return None
    taken = (each.foreign_cpu_seconds or 0.0) + (each.steal_seconds or 0.0)
    return min(1.0, taken / (each.seconds * each.cores))


def disturbed_pairs(loads: Sequence[tuple[float | None, float | None]]) -> list[bool]:
    """Which pairs of a process are left out: the load of a slice was far from the usual."""
    # Usual is the median of that side's slices: a constant load, and kernel work for one of the configurations.
    known = [(one, other) for one, other in loads if one is not None and other is not None]
    if not known:
        return [False] * len(loads)
    usual = [statistics.median(side) for side in zip(*known, strict=True)]
    departures = [
        [0.0 if None in pair or load is None else abs(load - each) for load, each in zip(pair, usual, strict=True)]
        for pair in loads
    ]
    limit = max(LEAST_DEPARTURE, RESTLESS * statistics.median(itertools.chain(*departures)))
    return [not keep for keep in kept([max(each) > limit for each in departures])]


def kept(disturbed: Sequence[bool]) -> list[bool]:
    """Which pairs of a process count: those that are not disturbed, or all where fewer than two or half are left."""
    sound = [not each for each in disturbed]
    return sound if sum(sound) >= max(2, len(sound) / 2) else [True] * len(sound)
