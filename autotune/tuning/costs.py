"""Estimate the seconds of slices, processes and pairs. Pure: records and warm-ups in, seconds out.

Short slices pair better on a noisy machine. But a trial that waits for something from outside (files, a network)
gains in every slice what came in while it was frozen. So slices are short only where a trial surely does not wait, and
long where it surely waits a lot.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autotune.data.options import Objective
from autotune.data.record import Pairing, Slice, TrialRecord
from autotune.runtime.executor import SEARCH_TIMING, WarmUp
from autotune.space.configuration import Configuration
from autotune.stats.steady_state import MOST_SLOW_CALLS, SLOW_CALL_SECONDS

SLICE_SECONDS = 0.5
SHORT_SLICE_SECONDS = 0.25  # for trials that do not wait for anything from outside
MOST_WAITING = 0.15  # share of its time that a trial may wait and still have short slices
LONG_SLICE_SECONDS = 2.0
"""For trials that wait for much of their time: pauses make a pipeline with 200 ms of latency 25% faster in slices
of half a second, and 4% in these."""
MUCH_WAITING = 0.3  # share of its time from which a trial needs them
BUSY = 0.5  # cores' worth of processor time: a training that takes less waits, whatever for
CALLS_IN_A_SLICE = 5
ALMOST_ONE = 0.8
"""Share of an epoch, or of a slow call, to ask for where a slice is one of them. A slice has as many as hold the
seconds asked for: with the whole of one, there would be two wherever they are a little quicker than usual."""

BETWEEN_SECONDS = 0.4  # added to each start: the fork, the pipes, and the end of the process
LEAST_ROUNDS, MOST_ROUNDS = 3, 24  # pairs of slices in a fresh pair of processes
LEAST_SLICES_SECONDS, MOST_SLICES_SECONDS = 3.0, 12.0  # of a fresh pair, where rounds allow
SLICES_OVER_STARTS = 0.5  # slices take this share of what starts take: degrees of freedom cost starts
LEAST_MEASURED_SECONDS, MOST_MEASURED_SECONDS = 2.5, 10.0  # slices of a search trial, both sides
MEASURED_SLOW_CALLS = 8  # the same where calls are slow
LEAST_SLOW_CALLS = 5  # of a search trial: the first, two of the warm-up, two slices
SLICES_IN_A_TRIAL = 8  # where calls and epochs let them be so short
SMALLEST_TRIAL_TIMEOUT, FIRST_STEP_FACTOR, SLOWEST_START, LARGEST_TRIAL_SHARE = 20.0, 4.0, 1.5, 0.1


# --------------------------------------------------------------------------------------------------- a slice


def is_slow(warm: WarmUp) -> bool:
    """Return whether a call of the train function takes so long that calls are counted, and not seconds."""
    return warm.ready.epoch_seconds is None and warm.ready.call_seconds >= SLOW_CALL_SECONDS


def slice_length(*warm: WarmUp, wanted: float = SLICE_SECONDS, most: float = math.inf) -> float:
    """Return the seconds of a slice: several calls of each trial timed by steps, a whole epoch of the others.

    Where all of them have slow calls, a slice may hold a single call of each, and so take longer for some.
    """
    calls = [process.ready.call_seconds for process in warm if process.ready.epoch_seconds is None]
    longest_epoch = max(process.ready.epoch_seconds or 0.0 for process in warm)
    if all(map(is_slow, warm)):
        return max(min(wanted, most), ALMOST_ONE * min(calls))
    wanted = max(wanted, CALLS_IN_A_SLICE * max(calls, default=0.0))
    return max(min(wanted, most), max(calls, default=0.0), ALMOST_ONE * longest_epoch)


def taken_seconds(length: float, warm: WarmUp) -> float:
    """Return how long a slice of this length takes: whole epochs or calls, and the run-in after a pause."""
    unit = warm.ready.epoch_seconds or warm.ready.call_seconds
    return max(1, math.ceil(length / unit - 1e-6)) * unit + warm.ready.run_in_seconds


def length_in_turns(*waiting: float, objective: Objective = "throughput") -> float:
    """Return the seconds of a slice that suit trials which may wait for at most these shares of their time."""
    if objective == "energy":  # cards count it in steps of up to a tenth of a second
        return LONG_SLICE_SECONDS
    if max(waiting) <= MOST_WAITING:
        return SHORT_SLICE_SECONDS
    return LONG_SLICE_SECONDS if max(waiting) > MUCH_WAITING else SLICE_SECONDS


def length_in_blocks(objective: Objective) -> float:
    """Return the same for slices of one process in a row."""
    return LONG_SLICE_SECONDS if objective == "energy" else SLICE_SECONDS


def is_busy(slices: Sequence[Slice]) -> bool:
    """Return whether a trial uses a processor for much of its time, so that it hardly waits for anything."""
    seconds = sum(timed.seconds for timed in slices)
    return sum(timed.cpu_seconds for timed in slices) > BUSY * seconds


def most_waiting(slices: Sequence[Slice], input_wait_fraction: float | None) -> float:
    """Return the share of its time in which a trial can at most have waited for something from outside."""
    # It waits for input no longer than the input-wait measurement says, and no longer than some of its
    # processors were idle. Where only the latter is known, it is not taken to wait for much of its time.
    known = [timed for timed in slices if timed.cores is not None]
    offered = sum(timed.seconds * (timed.cores or 0) for timed in known)
    idle = 1.0 - sum(timed.cpu_seconds for timed in known) / offered if offered else 1.0
    return min(max(0.0, idle), MUCH_WAITING if input_wait_fraction is None else input_wait_fraction)


# -------------------------------------------------------------------------------------------- a search trial


def measured_seconds(first_step: float, slow_call: float = 0.0) -> float:
    """Return the most seconds of a search trial's slices: more where the baseline's first step or calls are slow."""
    if slow_call:
        return max(LEAST_MEASURED_SECONDS, MEASURED_SLOW_CALLS * slow_call)
    return min(MOST_MEASURED_SECONDS, max(LEAST_MEASURED_SECONDS, first_step))


def trial_timeout(
    budget: float, *, first_step: float, ready: float, slow_call: float = 0.0, is_eager: bool = False
) -> float:
    """Return the most seconds of a search trial: a bad guess costs a tenth of the budget at most, where that holds one.

    A fifth if the baseline's step `is_eager`: a trial traces, and proves, what the baseline does not.
    """
    usual = max(SMALLEST_TRIAL_TIMEOUT, FIRST_STEP_FACTOR * first_step, 2 * ready)
    least = SLOWEST_START * ready + measured_seconds(first_step, slow_call) + 1.0
    return max(least, min(usual, (1 + is_eager) * LARGEST_TRIAL_SHARE * budget))


def least_trial_seconds(baseline: TrialRecord, configuration: Configuration, gain: float) -> float:
    """Return the least seconds of a search trial with that gain, a logarithm, where calls are slow; 0 elsewhere."""
    steps = [int(values["steps_per_execution"]) for values in (baseline.configuration, configuration)]
    sizes = [int(values["batch_size"]) for values in (baseline.configuration, configuration)]
    call = slow_call_seconds(baseline) * steps[1] * sizes[1] / (steps[0] * sizes[0]) * math.exp(-gain)
    return start_seconds(baseline) + LEAST_SLOW_CALLS * call if call else 0.0


# ------------------------------------------------------------------------------------ a fresh pair of processes


def slow_call_seconds(record: TrialRecord) -> float:
    """Return the seconds of a call of a measured configuration, where calls are slow; 0 elsewhere."""
    steps = int(record.configuration["steps_per_execution"])
    calls = [steps * timed.step_seconds.p50 for timed in record.own_slices]
    usual = statistics.median(calls) if calls and record.timed_by == "steps" else 0.0
    return usual if usual >= SLOW_CALL_SECONDS else 0.0


def start_seconds(record: TrialRecord) -> float:
    """Return the seconds to start and warm up one process of a configuration that the search has measured."""
    warm_up = record.warmup_seconds or 1.0
    if record.boundary is not None:  # its process measured that, and others take it over
        warm_up = min(warm_up, max(SEARCH_TIMING.warmup_seconds, MOST_SLOW_CALLS * slow_call_seconds(record)))
    return record.start_seconds + warm_up + BETWEEN_SECONDS


def starts_seconds(records: Sequence[TrialRecord]) -> float:
    """Return the seconds of starting a fresh pair; the first record is the baseline's."""
    in_blocks = any(record.pairing is Pairing.BRACKETED for record in records)
    again = start_seconds(records[0]) if in_blocks else 0.0  # the baseline starts before and after
    return sum(map(start_seconds, records)) + again


def usual_slice_seconds(record: TrialRecord) -> float:
    """Return the seconds of a slice of a configuration that the search has measured, with its run-in."""
    slices = record.own_slices
    usual = statistics.median(timed.seconds for timed in slices) if slices else SHORT_SLICE_SECONDS
    return usual + (record.run_in_seconds or 0.0)


def slices_seconds(records: Sequence[TrialRecord]) -> float:
    """Return the planned seconds of a fresh pair's slices: more where processes take long to start."""
    starts = sum(map(start_seconds, records))
    return min(MOST_SLICES_SECONDS, max(LEAST_SLICES_SECONDS, SLICES_OVER_STARTS * starts))


def round_seconds(records: Sequence[TrialRecord]) -> float:
    """Return the seconds of one slice of each process of a fresh pair."""
    seconds = [*map(usual_slice_seconds, records)]
    return sum(seconds) if all(map(slow_call_seconds, records)) else len(seconds) * max(seconds)


def rounds(records: Sequence[TrialRecord]) -> int:
    """Return how many pairs of slices a fresh pair of processes should have."""
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, round(slices_seconds(records) / round_seconds(records))))


def pair_seconds(records: Sequence[TrialRecord], *, least: bool = False) -> float:
    """Return the seconds of fresh processes of these sides, the baseline's first; `least`: with the fewest rounds."""
    slices = LEAST_ROUNDS * round_seconds(records)
    return starts_seconds(records) + (slices if least else max(slices, slices_seconds(records)))
