"""Find the pairs of slices that other processes or GPU clocks disturbed. Pure functions.

A pair is left out for its cause, never for its result: no speed enters here. Throttling by a quota is no cause,
because a configuration with more threads brings it upon itself. Nor is a power cap that one configuration meets often.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from autotune.data.figures import Cause
from autotune.data.record import Slice, TrialRecord

CAUSES: dict[Cause, str] = {
    "others": "other processes were running",
    "others_on_gpu": "another process used the GPU",
    "gpu_clocks": "the GPU's clocks were held down on one side",
}
LEAST_DEPARTURE = 0.10  # share of the machine by which a slice's load must depart from the usual
MAX_DEPARTURE_RATIO = 9.0  # times the median departure: six standard deviations, where loads vary normally
HEAT = frozenset({"hardware_slowdown", "thermal", "hardware_thermal", "power_brake"})
SLOWING = HEAT | {"power_cap"}  # what holds a card's clocks down while it works, as `GpuUse.limited_by` has it
OWN_SHARE = 0.25  # share of pairs from which a limit that one side meets more often is that side's own doing


def load_of(part: Slice) -> float | None:
    """Return the share of the machine that others took during a slice, 0 to 1; None where it is unknown."""
    if part.cores is None or (part.foreign_cpu_seconds is None and part.steal_seconds is None):
        return None
    taken = (part.foreign_cpu_seconds or 0.0) + (part.steal_seconds or 0.0)
    return min(1.0, taken / (part.seconds * part.cores))


def gpu_load_of(part: Slice) -> float | None:
    """Return the share of its most loaded card that others took during a slice, 0 to 1; None where it is unknown.

    A card that tells only that another process is on it counts as taken whole.
    """
    known = [
        float(card.others > 0) if card.foreign_utilisation is None else card.foreign_utilisation
        for card in part.gpus
        if card.others is not None
    ]
    return max(known, default=None)


def slowed_by(part: Slice) -> frozenset[str] | None:
    """Return the limits that held the cards' clocks down at a slice's end; None where it is unknown."""
    limits = [card.limited_by for card in part.gpus if card.limited_by is not None]
    return SLOWING.intersection(itertools.chain(*limits)) if limits else None


def find_disturbances(pairs: Sequence[tuple[Slice, Slice]]) -> list[Cause | None]:
    """Return why pairs of a process (the baseline's and the candidate's slice) are left out; None for usable pairs."""
    marks: dict[Cause, list[bool]] = {
        "others": _departing([(load_of(baseline), load_of(candidate)) for baseline, candidate in pairs]),
        "others_on_gpu": _departing([(gpu_load_of(baseline), gpu_load_of(candidate)) for baseline, candidate in pairs]),
        "gpu_clocks": _slowed_alone([(slowed_by(baseline), slowed_by(candidate)) for baseline, candidate in pairs]),
    }
    causes = [next((cause for cause, marked in marks.items() if marked[at]), None) for at in range(len(pairs))]
    usable = usable_pairs([cause is not None for cause in causes])
    return [None if keep else cause for cause, keep in zip(causes, usable, strict=True)]


def _departing(loads: Sequence[tuple[float | None, float | None]]) -> list[bool]:
    """Mark the pairs that have a slice whose load was far from the usual."""
    # Usual is the median of that side's slices: a constant load, and kernel work for one of the configurations.
    known = [(baseline, candidate) for baseline, candidate in loads if baseline is not None and candidate is not None]
    if not known:
        return [False] * len(loads)
    medians = [statistics.median(side) for side in zip(*known, strict=True)]
    departures = [
        [0.0 if None in pair or load is None else abs(load - usual) for load, usual in zip(pair, medians, strict=True)]
        for pair in loads
    ]
    limit = max(LEAST_DEPARTURE, MAX_DEPARTURE_RATIO * statistics.median(itertools.chain(*departures)))
    return [max(pair) > limit for pair in departures]


def _slowed_alone(sides: Sequence[tuple[frozenset[str] | None, frozenset[str] | None]]) -> list[bool]:
    """Mark the pairs that had the clocks held down on one side only, where it is no side's own doing."""
    # A configuration that draws more meets the power cap more often. Without those pairs it would look too fast.
    alone = [False] * len(sides)
    for reason in SLOWING:
        signs = [
            0 if baseline is None or candidate is None else (reason in baseline) - (reason in candidate)
            for baseline, candidate in sides
        ]
        if abs(sum(signs)) <= OWN_SHARE * len(sides):
            alone = [marked or sign != 0 for marked, sign in zip(alone, signs, strict=True)]
    return alone


def usable_pairs(disturbed: Sequence[bool]) -> list[bool]:
    """Mark the pairs of a process that count: undisturbed ones, or all where fewer than two or half are left."""
    sound = [not pair for pair in disturbed]
    return sound if sum(sound) >= max(2, len(sound) / 2) else [True] * len(sound)


def joules_of(part: Slice) -> float | None:
    """Return the energy that all cards of a slice took; None where it is not known of one, or there is none."""
    joules = [card.joules for card in part.gpus]
    return sum(taken or 0.0 for taken in joules) if joules and None not in joules else None


def gpu_figures(record: TrialRecord) -> dict[str, float | None]:
    """Return figures of a trial's GPUs while it was measured, by the names of history's columns.

    Power and energy are of all its cards, use and clocks the mean over them, the temperature the highest. None is
    what a card does not tell.
    """
    slices, rate = record.own_slices, record.throughput.value if record.throughput else None
    seconds = sum(part.seconds for part in slices)
    cards = [card for part in slices for card in part.gpus]
    joules = [joules_of(part) for part in slices]
    counted = bool(joules) and None not in joules
    watts: float | None = None
    if counted:
        watts = sum(taken or 0.0 for taken in joules) / seconds
    elif cards and all(card.watts is not None for card in cards):
        watts = sum(sum(card.watts or 0.0 for card in part.gpus) * part.seconds for part in slices) / seconds
    slowed = [bool(limits) for part in slices if (limits := slowed_by(part)) is not None]
    return {
        "joules_per_sample": watts / rate if counted and watts and rate else None,
        "gpu_power_watts": watts,
        "gpu_utilisation": _mean([card.utilisation for card in cards]),
        "gpu_memory_utilisation": _mean([card.memory_utilisation for card in cards]),
        "gpu_sm_clock_share": _mean(
            [card.sm_mhz / card.most_sm_mhz if card.sm_mhz and card.most_sm_mhz else None for card in cards]
        ),
        "gpu_temperature": max((card.celsius for card in cards if card.celsius is not None), default=None),
        "gpu_slowed_share": _mean([float(held) for held in slowed]),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
