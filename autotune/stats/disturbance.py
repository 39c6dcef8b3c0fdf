"""Which pairs of slices were disturbed by other work on the machine or its cards. Pure functions.

A pair is left out for its cause, never for its result: no speed enters here. Throttling by a quota is no cause,
because a configuration with more threads brings it upon itself. Nor is a power cap that one configuration meets often.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from autotune.data.figures import Cause
from autotune.data.record import Slice

CAUSES: dict[Cause, str] = {
    "others": "other processes were running",
    "others_on_gpu": "another process used the GPU",
    "gpu_clocks": "the GPU's clocks were held down on one side",
}
LEAST_DEPARTURE = 0.10  # share of the machine by which a slice's load must depart from the usual
RESTLESS = 9.0  # times the median departure: six standard deviations, where loads vary normally
HEAT = frozenset({"hardware_slowdown", "thermal", "hardware_thermal", "power_brake"})
SLOWING = HEAT | {"power_cap"}  # what holds a card's clocks down while it works, as `GpuUse.limited_by` has it
OWN_SHARE = 0.25  # share of pairs from which a limit that one side meets more often is that side's own doing


def load_of(each: Slice) -> float | None:
    """Share of the machine that others took during a slice, 0 to 1; None where it is unknown."""
    if each.cores is None or (each.foreign_cpu_seconds is None and each.steal_seconds is None):
        return None
    taken = (each.foreign_cpu_seconds or 0.0) + (each.steal_seconds or 0.0)
    return min(1.0, taken / (each.seconds * each.cores))


def gpu_load_of(each: Slice) -> float | None:
    """Share of its most loaded card that others took during a slice, 0 to 1; None where it is unknown.

    A card that tells only that another process is on it counts as taken whole.
    """
    known = [
        float(card.others > 0) if card.foreign_utilisation is None else card.foreign_utilisation
        for card in each.gpus
        if card.others is not None
    ]
    return max(known, default=None)


def slowed_by(each: Slice) -> frozenset[str] | None:
    """What held the clocks of its cards down at a slice's end; None where it is unknown."""
    told = [card.limited_by for card in each.gpus if card.limited_by is not None]
    return SLOWING.intersection(itertools.chain(*told)) if told else None


def disturbances(pairs: Sequence[tuple[Slice, Slice]]) -> list[Cause | None]:
    """Why pairs of a process are left out, each of the baseline's and the candidate's slice; None for what counts."""
    marks: dict[Cause, list[bool]] = {
        "others": _departing([(load_of(one), load_of(other)) for one, other in pairs]),
        "others_on_gpu": _departing([(gpu_load_of(one), gpu_load_of(other)) for one, other in pairs]),
        "gpu_clocks": _slowed_alone([(slowed_by(one), slowed_by(other)) for one, other in pairs]),
    }
    found = [next((cause for cause, marked in marks.items() if marked[at]), None) for at in range(len(pairs))]
    return [
        None if keep else cause for cause, keep in zip(found, kept([each is not None for each in found]), strict=True)
    ]


def _departing(loads: Sequence[tuple[float | None, float | None]]) -> list[bool]:
    """Which pairs have a slice whose load was far from the usual."""
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
    return [max(each) > limit for each in departures]


def _slowed_alone(sides: Sequence[tuple[frozenset[str] | None, frozenset[str] | None]]) -> list[bool]:
    """Which pairs had the clocks held down on one side only, where it is no side's own doing."""
    # A configuration that draws more meets the power cap more often. Without those pairs it would look too fast.
    alone = [False] * len(sides)
    for reason in SLOWING:
        signs = [0 if one is None or other is None else (reason in one) - (reason in other) for one, other in sides]
        if abs(sum(signs)) <= OWN_SHARE * len(sides):
            alone = [each or sign != 0 for each, sign in zip(alone, signs, strict=True)]
    return alone


def kept(disturbed: Sequence[bool]) -> list[bool]:
    """Which pairs of a process count: those that are not disturbed, or all where fewer than two or half are left."""
    sound = [not each for each in disturbed]
    return sound if sum(sound) >= max(2, len(sound) / 2) else [True] * len(sound)
