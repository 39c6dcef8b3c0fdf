"""Events that a run sends to its user, and requests to stop. The console draws them; nothing here prints.

The first Ctrl-C, SIGQUIT, SIGTERM or closing terminal ends a run with its verdict, the second at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.data.figures import Interval
from autotune.data.record import Phase, TrialRecord
from autotune.space.configuration import Configuration


@dataclass(frozen=True, kw_only=True)
class RunBegan:
    """A run directory exists."""

    directory: Path
    workload: str
    budget: float  # seconds for everything
    spent: float = 0.0  # seconds of the budget that earlier invocations took


@dataclass(frozen=True, kw_only=True)
class Began:
    """Something other than a trial began that takes time, in words. It has a line of its own if it is `shown`."""

    text: str
    shown: bool = True


@dataclass(frozen=True, kw_only=True)
class TrialBegan:
    """A trial began; `changes` is how it differs from the baseline, in words."""

    trial: int
    phase: Phase
    configuration: Configuration
    changes: str


@dataclass(frozen=True, kw_only=True)
class StepsBegan:
    """A trial's process has built its model and pipeline, and trains its first steps."""


@dataclass(frozen=True, kw_only=True)
class TrialMeasured:
    """Another pair of slices was measured; `speedup` is the estimate so far (None: the baseline on its own)."""

    trial: int
    speedup: Interval | None
    pairs: int


@dataclass(frozen=True, kw_only=True)
class PairMeasured:
    """A fresh pair of processes of a leader was measured and did not decide its confirmation."""

    trial: int  # the leader's
    processes: int  # a side so far
    speedup: Interval | None  # the estimate from them; None before the second pair


@dataclass(frozen=True, kw_only=True)
class TrialEnded:
    """A trial ended, or a leader was looked at; its record is on disk."""

    record: TrialRecord
    changes: str
    unit: str = "samples"  # what its throughput counts


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Something the user should know, once."""

    text: str


Event = RunBegan | Began | TrialBegan | StepsBegan | TrialMeasured | PairMeasured | TrialEnded | Notice
Observer = Callable[[Event], None]


def silent(event: Event) -> None:
    """Ignore an event."""


class Interruptions:
    """The count of the user's requests to stop."""

    def __init__(self, *, answerable: bool = False) -> None:
        self.answerable = answerable  # something was measured that the run can end with; else it stops at once
        self.count = 0

    def __call__(self) -> int:
        """Return the number of requests so far."""
        return self.count


@contextlib.contextmanager
def count_interruptions(observe: Observer, answer: str) -> Iterator[Interruptions]:
    """Count Ctrl-C, SIGQUIT, SIGTERM and, except under `nohup`, SIGHUP; the first answerable one raises nothing."""
    # A thread acknowledges the first, because a signal handler may run in the middle of printing.
    interruptions = Interruptions()
    if threading.current_thread() is not threading.main_thread():
        yield interruptions  # signals reach the main thread only; its owner decides
        return
    reading, writing = os.pipe()

    def acknowledge() -> None:
        if os.read(reading, 1) == b"!":
            observe(Notice(text=answer))

    def note(number: int, frame: object) -> None:
        interruptions.count += 1
        if interruptions.count > 1 or not interruptions.answerable:
            raise KeyboardInterrupt
        os.write(writing, b"!")

    thread = threading.Thread(target=acknowledge, daemon=True)
    thread.start()
    noted = [signal.SIGINT, signal.SIGQUIT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        noted.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in noted}
    try:
        yield interruptions
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.write(writing, b".")
        thread.join()
        os.close(reading)
        os.close(writing)
