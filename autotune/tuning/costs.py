"""What starting and measuring a process takes, by what the run has seen of it. Pure: records in, seconds out."""

from __future__ import annotations

import statistics

from autotune.data.record import Pairing, TrialRecord
from autotune.runtime.executor import IN_SEARCH
from autotune.tuning.slicing import SHORT_SLICE_SECONDS

BETWEEN_SECONDS = 0.4  # added to each start: the fork, the pipes, and the end of the process
LEAST_ROUNDS, MOST_ROUNDS = 3, 24  # pairs of slices in a fresh pair of processes
LEAST_SLICES_SECONDS, MOST_SLICES_SECONDS = 3.0, 12.0  # of a fresh pair, where rounds allow
SLICES_OVER_STARTS = 0.5  # slices take this share of what starts take: degrees of freedom cost starts
LEAST_MEASURED_SECONDS, MOST_MEASURED_SECONDS = 2.5, 10.0  # slices of a search trial, both sides
SMALLEST_TRIAL_TIMEOUT, FIRST_STEP_FACTOR, SLOWEST_START, LARGEST_TRIAL_SHARE = 20.0, 4.0, 1.5, 0.1


def measured_seconds(first_step: float) -> float:
    """What the slices of a search trial may take: processes that take long until their first step are asked more."""
    return min(MOST_MEASURED_SECONDS, max(LEAST_MEASURED_SECONDS, first_step))


def trial_timeout(budget: float, *, first_step: float, ready: float) -> float:
    """Seconds that one search trial may take: a bad guess costs a tenth of the budget at most, where that holds one."""
    usual = max(SMALLEST_TRIAL_TIMEOUT, FIRST_STEP_FACTOR * first_step, 2 * ready)
    least = SLOWEST_START * ready + measured_seconds(first_step) + 1.0
    return max(least, min(usual, LARGEST_TRIAL_SHARE * budget))


def start_seconds(record: TrialRecord) -> float:
    """Return what it takes to start and warm up one process of a configuration that the search has measured."""
    warm_up = record.warmup_seconds or 1.0
    if record.boundary is not None:  # its process measured that, and others take it over
        warm_up = min(warm_up, IN_SEARCH.warmup_seconds)
    return (record.first_step_seconds or 1.0) + warm_up + BETWEEN_SECONDS


def slice_seconds(record: TrialRecord) -> float:
    """Return what a slice of a configuration that the search has measured takes, its run-in included."""
    slices = record.own_slices
    usual = statistics.median(timed.seconds for timed in slices) if slices else SHORT_SLICE_SECONDS
    return usual + (record.run_in_seconds or 0.0)


def slices_seconds(records: list[TrialRecord]) -> float:
    """Return what the slices of a fresh pair of processes should take: more where processes take long to start."""
    starts = sum(map(start_seconds, records))
    return min(MOST_SLICES_SECONDS, max(LEAST_SLICES_SECONDS, SLICES_OVER_STARTS * starts))


def rounds(records: list[TrialRecord]) -> int:
    """Return how many pairs of slices a fresh pair of processes should have."""
    one = len(records) * max(map(slice_seconds, records))
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, round(slices_seconds(records) / one)))


def pair_seconds(records: list[TrialRecord], *, least: bool = False) -> float:
    """Return what a fresh pair of processes takes, or three of them where a champion stands beside both.

    Args:
        records: The search's records of all sides, the baseline's first.
        least: With the fewest rounds of slices that a pair may have.
    """
    starts = sum(map(start_seconds, records))
    if any(record.pairing is Pairing.BRACKETED for record in records):
        starts += start_seconds(records[0])  # the baseline starts before and after
    slices = LEAST_ROUNDS * len(records) * max(map(slice_seconds, records))
    return starts + (slices if least else max(slices, slices_seconds(records)))
