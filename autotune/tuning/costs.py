"""What starting and measuring a process takes, by what the run has seen of it. Pure: records in, seconds out."""

from __future__ import annotations

import math
import statistics

from autotune.executors.executor import IN_CONFIRMATION, IN_SEARCH, TrialTiming
from autotune.record import Pairing, TrialRecord
from autotune.tuning.slicing import SHORT_SLICE_SECONDS

BETWEEN_SECONDS = 0.4  # added to each start: the fork, the pipes, and the end of the process
CLEARLY_WHOLE = 0.8  # of the longest epoch timed whole: it takes seconds to find out about one that long
LEAST_ROUNDS, MOST_ROUNDS = 3, 24  # pairs of slices in a fresh pair of processes
LEAST_SLICES_SECONDS, MOST_SLICES_SECONDS = 3.0, 12.0  # of a fresh pair, where rounds allow
SLICES_OVER_STARTS = 0.5  # slices take this share of what starts take: degrees of freedom cost starts
LEAST_MEASURED_SECONDS, MOST_MEASURED_SECONDS = 2.5, 10.0  # slices of a search trial, both sides
SMALLEST_TRIAL_TIMEOUT, FIRST_STEP_FACTOR, SLOWEST_START, LARGEST_TRIAL_SHARE = 20.0, 4.0, 1.5, 0.1


BY_STEPS = TrialTiming(epoch_seconds=IN_SEARCH.epoch_seconds, warmup_seconds=IN_CONFIRMATION.warmup_seconds)
"""Timing of a confirmation in which only short epochs are timed whole."""


def epoch_seconds(record: TrialRecord) -> float:
    """What an epoch of a configuration takes; infinite where not known."""
    if record.examples_per_epoch is None or record.throughput is None:
        return math.inf
    return record.examples_per_epoch / record.throughput.value


def measured_seconds(first_step: float) -> float:
    """What the slices of a search trial may take: processes that take long until their first step are asked more."""
    return min(MOST_MEASURED_SECONDS, max(LEAST_MEASURED_SECONDS, first_step))


def trial_timeout(budget: float, *, first_step: float, ready: float) -> float:
    """Seconds that one search trial may take: a bad guess costs a tenth of the budget at most, where that holds one."""
    usual = max(SMALLEST_TRIAL_TIMEOUT, FIRST_STEP_FACTOR * first_step, 2 * ready)
    least = SLOWEST_START * ready + measured_seconds(first_step) + 1.0
    return max(least, min(usual, LARGEST_TRIAL_SHARE * budget))


def start_seconds(record: TrialRecord, timing: TrialTiming) -> float:
    """To start and warm up one process of a configuration that the search has measured."""
    warm_up = record.warmup_seconds or 1.0
    if record.boundary is not None:  # its process measured that, and others take it over
        warm_up = min(warm_up, timing.warmup_seconds)
    seconds = (record.first_step_seconds or 1.0) + warm_up + BETWEEN_SECONDS
    if whole := _now_whole(record, timing):
        seconds += 2 * whole
    return seconds


def slice_seconds(record: TrialRecord, timing: TrialTiming) -> float:
    """What a slice of a configuration that the search has measured takes, its run-in included."""
    if whole := _now_whole(record, timing):
        return 2 * whole
    slices = [*record.slices, *(pair.candidate for pair in record.pairs)]
    usual = statistics.median(each.seconds for each in slices) if slices else SHORT_SLICE_SECONDS
    return usual + (record.run_in_seconds or 0.0)


def _now_whole(record: TrialRecord, timing: TrialTiming) -> float:
    """An epoch that the search has timed by steps and the confirmation times whole; 0 for all others."""
    seconds = epoch_seconds(record)
    return seconds if record.timed_by == "steps" and seconds <= timing.epoch_seconds else 0.0


def rounds(records: list[TrialRecord], timing: TrialTiming) -> int:
    """Pairs of slices in a fresh pair of processes."""
    starts = sum(start_seconds(each, timing) for each in records)
    one = sum(max(slice_seconds(each, timing) for each in records) for _ in records)
    seconds = min(MOST_SLICES_SECONDS, max(LEAST_SLICES_SECONDS, SLICES_OVER_STARTS * starts))
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, round(seconds / one)))


def pair_seconds(records: list[TrialRecord], timing: TrialTiming) -> float:
    """What a fresh pair of processes takes, or three where a champion stands beside both."""
    # The first pair takes longer, because its processes are asked how long they wait for input.
    starts = sum(start_seconds(each, timing) for each in records)
    if any(each.pairing is Pairing.BRACKETED for each in records):
        starts += start_seconds(records[0], timing)  # the baseline starts before and after
    longest = max(slice_seconds(each, timing) for each in records)
    return starts + rounds(records, timing) * len(records) * longest


def confirmation_timing(records: list[TrialRecord], *, seconds: float, pairs: int) -> TrialTiming:
    """How a confirmation is timed: epochs of up to 5 s whole, where all sides' are and `pairs` fit `seconds` so."""
    clearly = max(map(epoch_seconds, records)) <= CLEARLY_WHOLE * IN_CONFIRMATION.epoch_seconds
    if clearly and pairs * pair_seconds(records, IN_CONFIRMATION) <= seconds:
        return IN_CONFIRMATION
    return BY_STEPS
