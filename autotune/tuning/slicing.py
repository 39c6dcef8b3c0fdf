"""How long a slice is. Pure: what is known of the trials in, seconds out.

Short slices pair better on a restless machine. But what a trial waits for from outside (files, a network) comes in
while it is frozen, and is gained in every slice. So slices are short only where a trial surely does not wait, and long
where it surely waits a lot (`benchmarks/freezing.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.data.options import Objective
from autotune.data.record import Slice
from autotune.runtime.executor import WarmUp

SLICE_SECONDS = 0.5
SHORT_SLICE_SECONDS = 0.25  # for trials that do not wait for anything from outside
MOST_WAITING = 0.15  # share of its time that a trial may wait and still have short slices
LONG_SLICE_SECONDS = 2.0
"""For trials that wait for much of their time: pauses make a pipeline with 200 ms of latency 25% faster in slices
of half a second, and 4% in these."""
MUCH_WAITING = 0.3  # share of its time from which that is so
BUSY = 0.5  # cores' worth of processor time: a training that takes less waits, whatever for
CALLS_IN_A_SLICE = 5
ALMOST_AN_EPOCH = 0.8
"""Share of an epoch that is asked for where a slice is one epoch. A slice has as many epochs as hold the seconds asked
for: with the whole of one, there would be two wherever epochs are a little quicker than usual."""


def slice_seconds(*warm: WarmUp, wanted: float = SLICE_SECONDS, most: float = math.inf) -> float:
    """How long a slice is: several calls of each trial that is timed by steps, a whole epoch of the others."""
    by_steps = [each.ready for each in warm if each.ready.epoch_seconds is None]
    longest_call = max((each.call_seconds for each in by_steps), default=0.0)
    longest_epoch = max(each.ready.epoch_seconds or 0.0 for each in warm)
    wanted = max(wanted, CALLS_IN_A_SLICE * longest_call)
    return max(min(wanted, most), longest_call, ALMOST_AN_EPOCH * longest_epoch)


def taken_seconds(length: float, warm: WarmUp) -> float:
    """How long a slice takes that is asked for: whole epochs or calls, and the run-in after a pause."""
    unit = warm.ready.epoch_seconds or warm.ready.call_seconds
    return max(1, math.ceil(length / unit - 1e-6)) * unit + warm.ready.run_in_seconds


def wanted_seconds(*waiting: float, objective: Objective = "throughput") -> float:
    """Seconds of a slice that suit trials of which the largest share of their time is known that they may wait."""
    if objective == "energy":  # cards count it in steps of up to a tenth of a second
        return LONG_SLICE_SECONDS
    if max(waiting) <= MOST_WAITING:
        return SHORT_SLICE_SECONDS
    return LONG_SLICE_SECONDS if max(waiting) > MUCH_WAITING else SLICE_SECONDS


def wanted_in_blocks(objective: Objective) -> float:
    """The same where sides follow each other, each without a pause."""
    return LONG_SLICE_SECONDS if objective == "energy" else SLICE_SECONDS


def is_busy(slices: Sequence[Slice]) -> bool:
    """Whether a trial uses a processor for much of its time, so that it hardly waits for anything from outside."""
    seconds = sum(each.seconds for each in slices)
    return sum(each.cpu_seconds for each in slices) > BUSY * seconds


def most_waiting(slices: Sequence[Slice], input_wait_fraction: float | None) -> float:
    """Share of its time in which a trial can at most have waited for something from outside of its processors."""
    # It waits for input no longer than the input-wait measurement says, and no longer than some of its
    # processors were idle. Where only the latter is known, it is not taken to wait for much of its time.
    told = [each for each in slices if each.cores is not None]
    offered = sum(each.seconds * (each.cores or 0) for each in told)
    idle = 1.0 - sum(each.cpu_seconds for each in told) / offered if offered else 1.0
    return min(max(0.0, idle), MUCH_WAITING if input_wait_fraction is None else input_wait_fraction)
