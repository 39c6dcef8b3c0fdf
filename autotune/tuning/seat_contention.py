"""Seats of one host that slow one another down, as by the width of its memory: the host runs fewer at once."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.tuning.events import Notice
from autotune.tuning.run import Run
from autotune.tuning.seat import Seat
from autotune.tuning.waiting import TimeIsUp

if TYPE_CHECKING:
    from autotune.tuning.seats import Seats

LOOK_ROUNDS = 3  # in which the first seat of a host is timed alone, and beside its neighbours
MOST_COST, MOST_SPREAD = 0.05, 1.5  # share of throughput lost, and times the usual spread, that are put up with
FEWEST_RATES = 2  # of each kind


@dataclass(frozen=True, kw_only=True)
class Contention:
    """What a seat's baseline loses while the other seats work."""

    cost: float  # share of its throughput
    spread: float  # of its slices, over that alone

    @property
    def is_too_much(self) -> bool:
        """Return whether fewer seats would tell more."""
        return self.cost > MOST_COST or self.spread > MOST_SPREAD

    def in_words(self) -> str:
        """Return such as `cost 12% of a seat's speed`."""
        if self.cost > MOST_COST:
            return f"cost {self.cost:.0%} of a seat's speed"
        return f"make slices vary {self.spread:.1f} times as much"


def contention_of(alone: Sequence[float], beside: Sequence[float]) -> Contention:
    """Return the contention from a baseline's throughputs alone and beside busy neighbours, in turns."""
    cost = 1 - statistics.median(beside) / statistics.median(alone)
    spreads = [statistics.stdev(map(math.log, rates)) for rates in (alone, beside)]
    # A few slices tell a spread badly: a wider one counts only where it is also wide for itself.
    wider = spreads[1] / spreads[0] if spreads[0] > 0 else 1.0
    return Contention(cost=cost, spread=wider if spreads[1] > MOST_COST else 1.0)


def drop_contended_seats(seats: Seats, run: Run) -> None:
    """Have each host run as many seats as do not slow one another down, by halves."""
    hosts: dict[str, list[Seat]] = {}
    for seat in seats.free:
        hosts.setdefault(run.executor.place(seat.name).host, []).append(seat)
    for host, there in hosts.items():
        if len(there) > 1:
            seats.together(there, lambda seat: None)  # warms all of them
        own = [seat for seat in there if seat in seats.free]
        while len(own) > 1 and not run.interrupted():
            seen = _measure_contention(seats, own)
            if seen is None or not seen.is_too_much:
                break
            kept = len(own) // 2
            text = f"{len(own)} seats at once {seen.in_words()} on {host}: it runs {kept}; --all-seats keeps all"
            run.observe(Notice(text=text))
            for seat in own[kept:]:
                seats.free.remove(seat)
                with contextlib.suppress(Exception):
                    seat.end_baseline()
                run.executor.drop(seat.name)
            own = own[:kept]


def _measure_contention(seats: Seats, own: list[Seat]) -> Contention | None:
    """Return what the first of these seats loses beside the others; None where the time does not hold it."""
    alone: list[float] = []
    beside: list[float] = []

    def add(seat: Seat) -> None:
        rate = seat.rate()
        if seat is own[0]:
            beside.append(rate)

    try:
        for _ in range(LOOK_ROUNDS):
            seats.together(own[:1], lambda seat: alone.append(seat.rate()))
            seats.together(own, add)
    except TimeIsUp:
        return None
    return contention_of(alone, beside) if min(len(alone), len(beside)) >= FEWEST_RATES else None
