"""How long a slice is. Pure: what is known of the trials in, seconds out.

Short slices pair better. Of two identical processes on two shared cores the standard error of ten seconds of pairs was
0.038, 0.029, 0.022 and 0.017 with slices of 0.5, 0.25, 0.12 and 0.06 s: such a machine is restless at every scale.
But what a trial waits for from outside (files, a network) comes in while it is frozen, and is gained in every slice:
the shorter, the more. And a processor's caches are cold after each pause. So slices are short only where a trial
surely does not wait, and long where it surely waits a lot.
"""

from __future__ import annotations

import math

from autotune.trial.live import WarmUp
from autotune.trial.record import TrialRecord

SLICE_SECONDS = 0.5
SHORT_SLICE_SECONDS = 0.25
"""For trials that do not wait for anything from outside."""
MOST_WAITING = 0.15
"""Share of its time that a trial may wait and still have short slices: pauses cannot make it more than 1/(1 - 0.15) as
fast, which slices of half a second already do to a pipeline with 200 ms of latency (1.25)."""
LONG_SLICE_SECONDS = 2.0
"""For trials that wait for much of their time: pauses make a pipeline with 200 ms of latency 25% faster in slices
of half a second, and 4% in these (`benchmarks/freezing.py`)."""
MUCH_WAITING = 0.3
"""Share of its time from which that is so, where the input wait was measured."""
CALLS_IN_A_SLICE = 5
SLICES_IN_A_TRIAL = 8
ALMOST_AN_EPOCH = 0.8
"""Share of an epoch that is asked for where a slice is one epoch. A slice has as many epochs as hold the seconds asked
for: with the whole of one, there would be two wherever epochs are a little quicker than usual."""


def slice_seconds(*warm: WarmUp, measured: float, wanted: float = SLICE_SECONDS) -> float:
    """How long a slice is: several calls of each of the trials, a whole epoch where those are short.

    Args:
        warm: The trials that take turns.
        measured: Seconds for all the slices of a trial and its partner.
        wanted: Seconds of a slice, where calls and epochs let it be so short.
    """
    longest_call = max(each.ready.call_seconds for each in warm)
    longest_epoch = max(each.ready.epoch_seconds or 0.0 for each in warm)
    wanted = max(wanted, CALLS_IN_A_SLICE * longest_call)
    return max(min(wanted, measured / SLICES_IN_A_TRIAL), longest_call, ALMOST_AN_EPOCH * longest_epoch)


def taken_seconds(length: float, warm: WarmUp) -> float:
    """How long a slice takes that is asked for: whole epochs or calls, and the run-in after a pause."""
    return counted_seconds(length, warm) + warm.ready.run_in_seconds


def slice_times(length: float, warm: WarmUp | None) -> tuple[float, float]:
    """How long a slice usually takes that is asked for, and what it may take beyond that, with nothing amiss."""
    if warm is None:
        return length, 0.0
    return taken_seconds(length, warm), warm.ready.uncounted_seconds


def counted_seconds(length: float, warm: WarmUp) -> float:
    """The same without the run-in: what a slice has that follows on another without a pause."""
    unit = warm.ready.epoch_seconds or warm.ready.call_seconds
    return max(1, math.ceil(length / unit - 1e-6)) * unit


def asked_seconds(taken: float, warm: WarmUp) -> float:
    """How long a slice is to be asked for that is to take so long, run-in and all: of as many epochs as that holds."""
    spare, epoch = taken - warm.ready.run_in_seconds, warm.ready.epoch_seconds
    if epoch is None:
        return max(spare, warm.ready.call_seconds)
    return (max(1, math.floor(spare / epoch + 1e-6)) - (1 - ALMOST_AN_EPOCH)) * epoch


def shortest_taken(warm: WarmUp, *, measured: float) -> float:
    """The least that a slice of a trial takes, for plans.

    Args:
        warm: The trial.
        measured: Seconds for all the slices of a trial and its partner.
    """
    counted = max(slice_seconds(warm, measured=measured), warm.ready.epoch_seconds or 0.0)
    return counted + warm.ready.run_in_seconds


def wanted_seconds(*seen: TrialRecord) -> float:
    """Seconds of a slice that suit trials of which this much has been seen, whatever their calls and epochs take."""
    if all(most_waiting(each) <= MOST_WAITING for each in seen):
        return SHORT_SLICE_SECONDS
    return LONG_SLICE_SECONDS if any(map(waits_much, seen)) else SLICE_SECONDS


def waits_much(seen: TrialRecord) -> bool:
    """Whether a trial is known to wait for a large part of its time."""
    return seen.input_wait_fraction is not None and most_waiting(seen) > MUCH_WAITING


def most_waiting(seen: TrialRecord) -> float:
    """Share of its time in which a trial can at most have waited for something from outside of its processors.

    It waits for input no longer than the input-wait measurement says (a pipeline that computes is among that), and
    no longer than some of its processors were idle (a device that computes is among that). 1 where neither is known.
    """
    slices = [*seen.slices, *(pair.candidate for pair in seen.pairs)]
    told = [each for each in slices if each.cores is not None]
    offered = sum(each.seconds * (each.cores or 0) for each in told)
    idle = 1.0 - sum(each.cpu_seconds for each in told) / offered if offered else 1.0
    return min(idle, 1.0 if seen.input_wait_fraction is None else seen.input_wait_fraction)
