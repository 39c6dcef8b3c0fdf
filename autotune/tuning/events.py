"""What happens during a run, as events. The console draws them; nothing here prints."""

from __future__ import annotations

from collections.abc import Callable
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
    spent: float = 0.0  # seconds of them that are gone: an earlier invocation's, where the run is resumed


@dataclass(frozen=True, kw_only=True)
class Began:
    """Something began that is no trial and takes its time, in words."""

    text: str


@dataclass(frozen=True, kw_only=True)
class TrialBegan:
    """A trial was asked for; `changes` is how it differs from the baseline, in words."""

    trial: int
    phase: Phase
    configuration: Configuration
    changes: str


@dataclass(frozen=True, kw_only=True)
class TrialMeasured:
    """Another pair of slices; `speedup` is the estimate so far (None: the baseline on its own)."""

    trial: int
    speedup: Interval | None
    pairs: int


@dataclass(frozen=True, kw_only=True)
class PairMeasured:
    """A fresh pair of processes of a leader was measured, which did not decide its confirmation.

    Args:
        trial: The leader's number.
        processes: Fresh processes a side so far.
        speedup: What they show; None before the second pair.
    """

    trial: int
    processes: int
    speedup: Interval | None


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


Event = RunBegan | Began | TrialBegan | TrialMeasured | PairMeasured | TrialEnded | Notice
Observer = Callable[[Event], None]


def silent(event: Event) -> None:
    """An observer that does nothing."""
