"""The seats of an executor: each does one action at a time, all of them at once."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from autotune.tuning.run import Run
from autotune.tuning.seat import BASELINE_SECONDS, Seat
from autotune.tuning.waiting import Deadline


class Seats:
    """Does actions on seats; a context manager that ends with no action running."""

    # A single seat works in the caller's thread. Several have a thread each while they do something. All of
    # them take turns in the driver by the run's baton, which is lent while a trial is waited for.

    def __init__(self, run: Run, deadline: Deadline, first: Seat, *, bracketed: bool) -> None:
        self._run = run
        self._others = [
            Seat(run, deadline, name=name, bracketed=bracketed) for name in run.executor.seats if name != first.name
        ]
        self._free = [first, *self._others]
        self._several = bool(self._others)
        self._begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[Seat, BaseException | None]] = queue.SimpleQueue()
        self._running: dict[Seat, int] = {}  # the trial that each measures, -1 for a new one

    def __enter__(self) -> Seats:
        """Itself, with the baton held where there are several seats."""
        if self._several:
            self._run.baton.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for all that runs, unless the user ends it; end the other seats' baselines; give the baton back."""
        if not self._several:
            return
        try:
            if kind is None or issubclass(kind, Exception):
                while self._running:
                    with contextlib.suppress(Exception):
                        self.wait()
                for seat in self._others:
                    seat.end_baseline()
        finally:
            self._run.baton.release()

    @property
    def busy(self) -> frozenset[int]:
        """The numbers of the trials that are being measured now; -1 for new ones."""
        return frozenset(self._running.values())

    def do(self, action: Callable[[Seat], None], number: int | None) -> None:
        """Do something on a free seat; comes back when it has ended or, with several seats, waits for a trial."""
        # `number` is the trial that it measures, busy from now on; None for one that has no number yet.
        if not self._several:
            action(self._free[0])
            return
        seat = self._free.pop(0)
        self._running[seat] = -1 if number is None else number
        threading.Thread(target=self._work, args=(seat, action), daemon=True).start()
        with self._run.others_work():
            self._begun.get()

    def wait_for_free(self) -> None:
        """Wait until a seat is free. Raises what an action raised."""
        while not self._free:
            self.wait()

    def _work(self, seat: Seat, action: Callable[[Seat], None]) -> None:
        error: BaseException | None = None
        with self._run.baton:
            self._begun.put(None)
            try:
                if not seat.is_open:
                    seat.start_baseline(BASELINE_SECONDS)
                action(seat)
            except BaseException as raised:  # handed to whoever waits
                error = raised
        self._ended.put((seat, error))

    def wait(self) -> None:
        """Wait until an action has ended."""
        with self._run.others_work():
            seat, error = self._ended.get()
        del self._running[seat]
        self._free.append(seat)
        if error is not None:
            raise error
