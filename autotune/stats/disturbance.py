"""Which pairs of slices were disturbed by something that is not the training's own. Pure functions.

A pair is left out for its *cause*, never because its ratio looks odd: that would trim the claim into shape.

**Load.** What others took of the machine during a slice, as a share of what it has, is held against the running
median of that side's slices. A pair is disturbed where one of its slices had much more than usual, or its two
slices departed from the usual by much different amounts. No speed enters this, so nothing is chosen by its result; and
what is always there, constant load or kernel threads that work for one of the configurations, is usual. So are bursts
that come so often that half of the slices depart from the usual by a ninth of the machine: nothing is left out then.
(Throttling by a quota is recorded and not used: a configuration with more threads brings it upon itself.)

**Pace.** Not every machine shows who disturbs it. The slices' own speeds, against the running median of their
side, show a burst as a stretch in which *both* processes were far below: the slow slices are next to each other in
time and belong to both. All pairs that such a stretch touches go. The rule treats candidate and baseline alike, and
asks for a common cause, because each simpler one would be wrong:

- To leave out pairs whose baseline was slow is conservative (it makes the baseline look faster than it is), but blind
  to a candidate's slow slices, and it takes the baseline's own stalls away.
- To leave out pairs in which either was slow takes away the own stalls of whichever has more of them, and a long
  training pays for its stalls: a candidate that stands still in every tenth slice would look as if it did not.
- Chance and a stall of one's own seldom make two neighbours of different processes slow.

A burst shorter than two slices on a machine that does not show it stays in, as noise.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NEIGHBOURS, NEIGHBOUR_SECONDS = 7, 7.0
"""Pairs before, and as many after, that the usual is the median of: so many, and all within so long. A burst shows as
long as it is shorter than what is usual around it, however short the slices are."""
LEAST_LOAD = 0.10
"""Share of the machine by which others must take more than usual to be called a burst."""
LEAST_SLOWDOWN = 0.25
"""Logarithm by which slices must be slower than usual, without a load that shows: 0.25 is 22 percent."""
DEVIATIONS = 6.0
"""The same in standard deviations, estimated robustly: where all is always restless, that is the usual."""
FEWEST_KEPT = 2
"""Pairs that must remain in an instance, and at least half: else all are used."""
_DEVIATION_OF_MEDIAN = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""


class Disturbance(enum.StrEnum):
    """What a pair of slices was disturbed by."""

    LOAD = "load"
    """Others took more of the machine than usual during one of its slices, or not during both alike."""
    PACE = "pace"
    """Both processes were much slower than usual for a while, whatever the machine shows."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A slice, as far as it tells of disturbances.

    Args:
        at: When it ended, in seconds.
        log_rate: Logarithm of its samples per second.
        load: Share of the machine that others took, 0 to 1; None where the machine does not show it.
    """

    at: float
    log_rate: float
    load: float | None


def load_of(
    *, seconds: float, cores: int | None, foreign_cpu_seconds: float | None, steal_seconds: float | None
) -> float | None:
    """Share of the machine that others took during a slice; None where it is not known.

    Args:
        seconds: The slice's length.
        cores: That the process could use.
        foreign_cpu_seconds: Processor time that others took on them.
        steal_seconds: What the host gave to others.
    """
    if cores is None or (foreign_cpu_seconds is None and steal_seconds is None):
        return None
    return min(1.0, ((foreign_cpu_seconds or 0.0) + (steal_seconds or 0.0)) / (seconds * cores))


def disturbances(pairs: Sequence[tuple[Timing, Timing]]) -> list[Disturbance | None]:
    """What disturbed each pair of one trial; None for nothing.

    Args:
        pairs: Baseline's and candidate's slice of each, in the order they were taken.
    """
    by_load, by_pace = _loaded(pairs), _slow_together(pairs)
    return [
        Disturbance.LOAD if load else Disturbance.PACE if pace else None
        for load, pace in zip(by_load, by_pace, strict=True)
    ]


def kept(disturbed: Sequence[bool]) -> list[bool]:
    """Which pairs of one instance count: those that were not disturbed, or all where too few of these remain."""
    sound = [not each for each in disturbed]
    enough = sum(sound) >= max(FEWEST_KEPT, len(sound) / 2)
    return sound if enough else [True] * len(sound)


def _loaded(pairs: Sequence[tuple[Timing, Timing]]) -> list[bool]:
    """Whether a burst of foreign load hit the pair, or its two slices differently."""
    loads = [(baseline.load, candidate.load) for baseline, candidate in pairs]
    known = [place for place, pair in enumerate(loads) if None not in pair]
    sides = [[loads[place][side] or 0.0 for place in known] for side in (0, 1)]
    times = [[pairs[place][side].at for place in known] for side in (0, 1)]
    found = [False] * len(pairs)
    if sum(map(_range, sides)) <= LEAST_LOAD:
        return found  # as it would come out below, without the work
    baseline, candidate = map(departures, sides, times)
    limit = max(LEAST_LOAD, DEVIATIONS * _deviation(baseline + candidate))
    for place, one, other in zip(known, baseline, candidate, strict=True):
        found[place] = max(one, other) > limit or abs(one - other) > limit
    return found


def _slow_together(pairs: Sequence[tuple[Timing, Timing]]) -> list[bool]:
    """Whether a slice of the pair lies in a stretch of slow slices of both processes."""
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    found = [False] * len(pairs)
    if min(_range([each.log_rate for each in slices]) for slices in sides) <= LEAST_SLOWDOWN:
        return found  # as it would come out below, without the work
    in_time = []
    for side, slices in enumerate(sides):
        away = departures([each.log_rate for each in slices], [each.at for each in slices])
        limit = max(LEAST_SLOWDOWN, DEVIATIONS * _deviation(away))
        in_time += [
            (each.at, place, side, departure < -limit)
            for place, (each, departure) in enumerate(zip(slices, away, strict=True))
        ]
    for slow, stretch in itertools.groupby(sorted(in_time), key=lambda each: each[3]):
        members = list(stretch)
        if slow and {side for _, _, side, _ in members} == {0, 1}:
            for _, place, _, _ in members:
                found[place] = True
    return found


def departures(values: Sequence[float], times: Sequence[float]) -> list[float]:
    """How far each value is from the median of its neighbours in time and itself.

    Args:
        values: In any order; what brackets something else is not in the order of time.
        times: Of each, in seconds.
    """
    order = sorted(range(len(values)), key=lambda place: times[place])
    at, in_order = [times[place] for place in order], [values[place] for place in order]
    found = [0.0] * len(values)
    for rank, place in enumerate(order):
        first = bisect.bisect_left(at, times[place] - NEIGHBOUR_SECONDS)
        last = bisect.bisect_right(at, times[place] + NEIGHBOUR_SECONDS)
        around = in_order[max(0, min(first, rank - NEIGHBOURS)) : max(last, rank + NEIGHBOURS + 1)]
        found[place] = values[place] - statistics.median(around)
    return found


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values) if values else 0.0


def _deviation(departed: Sequence[float]) -> float:
    """Standard deviation of most of these values, whatever the others are; 0 for none."""
    return _DEVIATION_OF_MEDIAN * statistics.median(map(abs, departed)) if departed else 0.0
