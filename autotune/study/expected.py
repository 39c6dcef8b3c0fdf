"""How long the parts of a confirmation will take, by what the search has seen of them and what those before took."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.trial.messages import EPOCH_SECONDS
from autotune.trial.record import Pairing, TrialRecord

WARM_UP_EPOCHS = 3
"""Of the longer epochs that are timed whole, before a process is warm."""
BETWEEN_SECONDS = 0.3
"""Added to each start. Never measured by itself: an allowance for the fork and for what is said on the pipes."""


class Expected:
    """What is to be expected of processes of the baseline and of finalists, in seconds.

    Args:
        baseline: The search's record of it.
        slice_seconds: The shortest slice that it can be timed in, by the plan.

    Attributes:
        whole_up_to: Up to which length epochs are timed whole: what is expected follows from it.
        baseline: The search's record of it.
    """

    def __init__(self, baseline: TrialRecord, *, slice_seconds: float) -> None:
        self.whole_up_to = EPOCH_SECONDS
        self.baseline = baseline
        self._slice_seconds = slice_seconds

    def note_slice(self, took: float) -> None:
        """Slices took so long on average, run-in and all: none will be expected to take less."""
        self._slice_seconds = max(self._slice_seconds, took)

    def ask_for(self, slice_seconds: float) -> None:
        """Slices will be asked for that are at least so long."""
        self._slice_seconds = max(self._slice_seconds, slice_seconds)

    def start_seconds(self, record: TrialRecord) -> float:
        """To start and warm up one process of a configuration."""
        warm_up = max(record.warmup_seconds or 1.0, WARM_UP_EPOCHS * self._now_whole(record))
        return (record.first_step_seconds or 1.0) + warm_up + BETWEEN_SECONDS

    def instance_start_seconds(self, records: Sequence[TrialRecord]) -> float:
        """To start all processes of one instance: one baseline for all who stand beside it, two to bracket."""
        apart = sum(each.pairing is Pairing.BRACKETED for each in records)
        baselines = 2 * apart + (1 if apart < len(records) else 0)
        return baselines * self.start_seconds(self.baseline) + sum(
            self.start_seconds(each) for each in records
        )

    def shortest_slice_seconds(self, records: Sequence[TrialRecord]) -> float:
        """What a slice takes, run-in and all, that is as short as the baseline and all of these allow."""
        return max(self._slice_seconds, *(self.slice_seconds(each) for each in (self.baseline, *records)))

    def slice_seconds(self, record: TrialRecord) -> float:
        """The shortest slice of one of them, by the search's: of several epochs in a slice, one would do."""
        slices = [*record.slices, *(pair.candidate for pair in record.pairs)]
        shortest = min((each.seconds / max(1, each.epochs) for each in slices), default=0.0)
        return max(shortest, self._now_whole(record)) + self.run_in_seconds(record)

    def run_in_seconds(self, record: TrialRecord) -> float:
        """What it trains before a slice begins."""
        seconds = epoch_seconds(record)
        return record.run_in_seconds or (seconds if seconds <= self.whole_up_to else 0.0)

    def _now_whole(self, record: TrialRecord) -> float:
        """An epoch that the search has timed by steps and the confirmation times whole; 0 for all others."""
        seconds = epoch_seconds(record)
        return seconds if record.timed_by == "steps" and seconds <= self.whole_up_to else 0.0


def epoch_seconds(record: TrialRecord) -> float:
    """What an epoch of a configuration takes, stalls that slices leave out not counted; infinite where not known."""
    if record.examples_per_epoch is None or record.throughput is None:
        return math.inf
    slices = [*record.slices, *(pair.candidate for pair in record.pairs)]
    own = [each for each in slices if not each.epochs]
    if record.stalled_ends and own:
        pace = sum(each.seconds for each in own) / sum(each.examples for each in own)
        return record.examples_per_epoch * pace + (record.epoch_overhead_seconds or 0.0)
    return record.examples_per_epoch / record.throughput.value
