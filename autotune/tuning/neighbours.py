"""Seats of one host that slow one another down: the host runs fewer at once."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from autotune.tuning.events import Notice
from autotune.tuning.run import Run
from autotune.tuning.seat import Seat
from autotune.tuning.seat_contention import AT_LEAST, Crowding, crowding_of
from autotune.tuning.waiting import TimeIsUp

if TYPE_CHECKING:
    from autotune.tuning.seats import Seats

LOOK_ROUNDS = 3  # in which the first seat of a host is timed alone, and beside its neighbours


def thin_out(seats: Seats, run: Run) -> None:
    """Have each host run as many seats as do not slow one another down, by halves."""
    hosts: dict[str, list[Seat]] = {}
    for seat in seats.free:
        hosts.setdefault(run.executor.place(seat.name).host, []).append(seat)
    for host, there in hosts.items():
        if len(there) > 1:
            seats.together(there, lambda seat: None)  # warms all of them
        own = [seat for seat in there if seat in seats.free]
        while len(own) > 1 and not run.interrupted():
            seen = _crowding(seats, own)
            if seen is None or not seen.too_much:
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


def _crowding(seats: Seats, own: list[Seat]) -> Crowding | None:
    """What the first of these loses beside the others; None where the time does not hold it."""
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
    return crowding_of(alone, beside) if min(len(alone), len(beside)) >= AT_LEAST else None
