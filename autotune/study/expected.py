"""How long the parts of a confirmation will take, by what the search has seen of them and what those before took."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.trial.messages import EPOCH_SECONDS
from autotune.trial.record import Pairing, TrialRecord

WARM_UP_EPOCHS = 3
"""Of the longer epochs that are timed whole, before a process is warm."""
BETWEEN_SECONDS = 0.3
"""Allowed for between a process and the next: forking it, and what they and the tuner have to tell each other."""


class Expected:
    """What is to be expected of processes of the baseline and of finalists, in seconds.

    Args:
        baseline: The search's record of it.
        slice_seconds: The shortest slice that it can be timed in.

    Attributes:
        whole_up_to: Up to which length epochs are timed whole.
    """

    def __init__(self, baseline: TrialRecord, *, slice_seconds: float) -> None:
        self.whole_up_to = EPOCH_SECONDS
        self._baseline = baseline
        self._longest_seen = slice_seconds

    def note_slice(self, took: float) -> None:
        """A slice took so long, run-in and all: others will not be expected to take less."""
        self._longest_seen = max(self._longest_seen, took)

    def start(self, record: TrialRecord) -> float:
        """To start and warm up one process of a configuration."""
        warm_up = max(record.warmup_seconds or 1.0, WARM_UP_EPOCHS * self._now_whole(record))
        return (record.first_step_seconds or 1.0) + warm_up + BETWEEN_SECONDS

    def instance_start(self, finalists: Sequence[TrialRecord]) -> float:
        """To start all processes of one instance: one baseline for all who stand beside it, two to bracket."""
        apart = sum(each.pairing is Pairing.BRACKETED for each in finalists)
        baselines = 2 * apart + (1 if apart < len(finalists) else 0)
        return baselines * self.start(self._baseline) + sum(self.start(each) for each in finalists)

    def shortest_slice(self, finalists: Sequence[TrialRecord]) -> float:
        """The least that suits the baseline and these finalists."""
        return max(self._longest_seen, *(self.slice_of(each) for each in (self._baseline, *finalists)))

    def slice_of(self, record: TrialRecord) -> float:
        """The shortest slice of one of them, by the search's: of several epochs in a slice, one would do."""
        slices = [*record.slices, *(pair.candidate for pair in record.pairs)]
        shortest = min((each.seconds / max(1, each.epochs) for each in slices), default=0.0)
        return max(shortest, self._now_whole(record)) + self.run_in(record)

    def run_in(self, record: TrialRecord) -> float:
        """What it trains before a slice begins."""
        seconds = epoch_seconds(record)
        return record.run_in_seconds or (seconds if seconds <= self.whole_up_to else 0.0)

    def _now_whole(self, record: TrialRecord) -> float:
        """An epoch that the search has timed by steps and the confirmation times whole; 0 for all others."""
        seconds = epoch_seconds(record)
        return seconds if record.timed_by == "steps" and seconds <= self.whole_up_to else 0.0


def epoch_seconds(record: TrialRecord) -> float:
    """What an epoch of a configuration takes; infinite where that is not known."""
    if record.examples_per_epoch is None or record.throughput is None:
        return math.inf
    return record.examples_per_epoch / record.throughput.value
