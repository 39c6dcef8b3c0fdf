"""The seats of an executor: each does one action at a time, all of them at once. One that is lost is made anew once."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable

from autotune.data.errors import BudgetError, NoStableConfigurationError
from autotune.data.models import KnobValue
from autotune.data.printable import first_line
from autotune.data.record import Outcome, Pairing, Phase, TrialRecord
from autotune.runtime.executor import SeatLost
from autotune.space.configuration import Configuration
from autotune.tuning.events import Notice
from autotune.tuning.run import Run
from autotune.tuning.seat import BASELINE_SECONDS, Seat

MOST_LOSSES = 2  # of a seat, until it is dropped
FEWEST_OF_A_CHANGE = 2  # failures of one change, before it is left out
FEWEST_FAILURES = 3  # failures for one reason, before it counts
FailingChanges = frozenset[tuple[str, KnobValue]]
_BUILDING = "while building"  # in a timeout's reason: the configuration has not acted on anything yet


class NoSeatLeft(Exception):
    """All seats were lost."""


class Unusable(Exception):
    """A seat cannot train, where others can."""


class Seats:
    """Does actions on seats; a context manager that ends with no action running."""

    # A single seat works in the caller's thread. Several have a thread each while they do something. A thread holds
    # the driver lock, except while it waits for a trial.

    def __init__(self, first: Seat) -> None:
        self._run, self._first, self._bracketed = first.run, first, first.bracketed
        self.free = [first]
        self._several = first.run.several
        self._begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[Seat, BaseException | None]] = queue.SimpleQueue()
        self._running: dict[Seat, int] = {}  # the trial that each measures, -1 for a new one
        self._losses: Counter[Seat] = Counter()
        self._gone: set[Seat] = set()  # lost, and not made anew yet
        self._known = {first.name}

    def __enter__(self) -> Seats:
        """Acquire the driver lock if there are several seats."""
        if self._several:
            self._run.driver_lock.acquire()
            try:
                self._add_new_seats()
            except BaseException:
                self._run.driver_lock.release()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for all that runs, unless the user ends it; end the other seats' baselines; release the lock."""
        if not self._several:
            return
        try:
            if kind is None or issubclass(kind, Exception):
                while self._running:
                    with contextlib.suppress(Exception):
                        self.wait()
                for seat in self.free:
                    if seat is not self._first:
                        seat.end_baseline()
        finally:
            self._run.driver_lock.release()

    @property
    def busy(self) -> frozenset[int]:
        """The numbers of the trials that are being measured now; -1 for new ones."""
        return frozenset(self._running.values())

    @property
    def has_other_seats(self) -> bool:
        """Return whether another seat is running."""
        return bool(self._running) and len(self._running) + len(self.free) > 1

    def run_action(self, action: Callable[[Seat], None], number: int | None, *, alone: bool = False) -> None:
        """Run an action on a free seat. A single seat blocks until it ends, several until it waits for a trial."""
        # `number` is the trial that it measures, busy from now on; None for one that has no number yet.
        # Work done `alone` has ended on return; the caller ensures that no other seat works.
        seat = self.free[0]
        if alone or not self._several:
            try:
                self._restart(seat)
                action(seat)
            except SeatLost as lost:
                self.free.remove(seat)
                self._lost(seat, lost)
            return
        self.free.remove(seat)
        self._running[seat] = -1 if number is None else number
        threading.Thread(target=self._work, args=(seat, action), daemon=True).start()
        with self._run.driver_lock.released():
            self._begun.get()

    def wait_for_free(self) -> None:
        """Wait until a seat is free. Raises what an action raised, and NoSeatLeft."""
        self._add_new_seats()
        while not self.free:
            if not self._running:
                raise NoSeatLeft
            self.wait()

    def _work(self, seat: Seat, action: Callable[[Seat], None]) -> None:
        error: BaseException | None = None
        with self._run.driver_lock:
            self._begun.put(None)
            try:
                self._restart(seat)
                if not seat.is_open:
                    seat.start_baseline(BASELINE_SECONDS)
                action(seat)
            except (NoStableConfigurationError, BudgetError) as raised:
                error = Unusable(raised.message) if self.has_other_seats else raised
            except BaseException as raised:  # handed to whoever waits
                error = raised
        self._ended.put((seat, error))

    def _restart(self, seat: Seat) -> None:
        if seat in self._gone:
            with self._run.driver_lock.released():
                self._run.executor.restart(seat.name)
            self._gone.discard(seat)

    def wait(self) -> None:
        """Wait until an action has ended. Raises what it raised."""
        with self._run.driver_lock.released():
            seat, error = self._ended.get()
        del self._running[seat]
        if isinstance(error, SeatLost):
            self._lost(seat, error)
        elif isinstance(error, Unusable):
            self._drop(seat, str(error))
        else:
            self.free.append(seat)
            if error is not None:
                raise error

    # ------------------------------------------------------------------------------------- coming and going

    def _add_new_seats(self) -> None:
        """Use seats that have been added."""
        if not self._several:
            return
        run = self._run
        run.executor.refresh()
        for name in run.executor.seats:
            if name not in self._known:
                self._known.add(name)
                self.free.append(Seat(run, name=name, bracketed=self._bracketed))
                place = run.executor.place(name)
                run.observe(Notice(text=f"new seat: {name} ({place.host}, {place.device or 'the whole host'})"))

    def _lost(self, seat: Seat, lost: SeatLost) -> None:
        seat.abandon()
        self._losses[seat] += 1
        self._gone.add(seat)
        if self._losses[seat] >= MOST_LOSSES:
            self._drop(seat, f"it was lost twice: {first_line(lost.reason)}")
            return
        self._run.observe(Notice(text=f"seat {seat.name} was lost; restarting it: {first_line(lost.reason)}"))
        self.free.append(seat)

    def _drop(self, seat: Seat, why: str) -> None:
        seat.abandon()
        self._run.executor.drop(seat.name)
        self._run.observe(Notice(text=f"seat {seat.name} is dropped: {why}"))


class ExclusiveResources:
    """Run trials without the live baseline if all of them fail with the same error beside it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._beside: list[TrialRecord] = []  # what failed beside the baseline, for the reason tested last
        self._alone: Configuration | None = None  # what runs without the baseline, to find out
        self._tested: set[str] = set()

    def judge(self, record: TrialRecord, seat: Seat) -> tuple[list[Configuration], str]:
        """Return the configurations to run again, and why the search cannot continue; empty if it can."""
        run = self._run
        requested = _requested(record)
        if (tested := requested == self._alone) and record.outcome.measured:
            self._alone = None
            run.observe(
                Notice(text="the trial succeeds without the baseline: from now on only one process runs at a time")
            )
            return [_requested(failed) for failed in self._beside if _requested(failed) != requested], ""
        key = failure_key(record)
        searched = [known for known in run.records.values() if known.phase is Phase.SEARCH]
        beside = any(known.outcome.measured and known.pairing is Pairing.ALTERNATING for known in searched)
        same = [known for known in searched if failure_key(known) == key] if key and not beside else []
        if len(same) < FEWEST_FAILURES or len(run.executor.seats) > 1 or _common_changes(same, run.baseline):
            return [], ""
        reason = first_line(record.reason)
        if not seat.bracketed and key not in self._tested:
            self._tested.add(key)
            self._beside, self._alone, seat.bracketed = same, requested, True
            text = f"{len(same)} trials failed with the same error while the baseline was running: {reason}"
            held = "The baseline may hold a port, a lock file or a device; repeating the last trial without it"
            run.observe(Notice(text=f"{text}. {held}"))
            return [requested], ""
        if tested:
            self._alone, seat.bracketed = None, False
        if any(known.outcome.measured for known in searched):
            return [], ""
        log = run.directory.trial_directory(record.trial) / "log.txt"
        return (
            [],
            f"{len(same)} trials failed with the same error, with and without the baseline: {reason} (see {log})",
        )


def failure_key(record: TrialRecord) -> str:
    """Return the key that equal failures share; empty where a failure may be the configuration's own."""
    reason = first_line(record.reason)
    if record.outcome is Outcome.TIMEOUT and _BUILDING in reason:
        return re.sub(r"\d+\.\d+ s", "", reason)
    return reason if record.outcome in (Outcome.ERROR, Outcome.CRASHED) else ""


def find_failing_changes(records: Iterable[TrialRecord], baseline: Configuration) -> dict[FailingChanges, TrialRecord]:
    """Return the changes that failed twice with the same error and were never measured, each with its last failure."""
    searched = [record for record in records if record.phase is Phase.SEARCH]
    acting = {item for record in searched if record.outcome.measured for item in record.configuration.items()}
    alike: dict[str, list[TrialRecord]] = {}
    for record in searched:
        alike.setdefault(failure_key(record), []).append(record)
    found = {}
    for key, failed in alike.items():
        common = _common_changes(failed, baseline) - acting
        if key and len(failed) >= FEWEST_OF_A_CHANGE and common:
            found[frozenset(common)] = failed[-1]
    return found


def _common_changes(failed: Iterable[TrialRecord], baseline: Configuration) -> set[tuple[str, KnobValue]]:
    return set.intersection(*(set(_requested(record).items()) - set(baseline.items()) for record in failed))


def _requested(record: TrialRecord) -> Configuration:
    return Configuration(record.asked or record.configuration)
