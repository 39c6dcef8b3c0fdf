"""How epochs end while `tf.data` tunes a pipeline: some in a stall. Pure: seconds in, seconds out.

The thread that tunes an iterator's pipeline sleeps for 20 ms, then for twice as long, and so on, up to a minute. When
the iterator goes the thread is woken, looks whether it was cancelled, and may find that it was not yet: then it sleeps
on, and the training waits until it has slept. Whether that happens is a race, whose odds short epochs show; how long
the wait is follows from the iterator's age (`benchmarks/epoch_ends.py`). So it is in TensorFlow 2.21; by published
sources of other versions `Model::OptimizeLoop` sleeps, and `CancellationManager::StartCancel` wakes it before it sets
the flag.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_SLEEP_SECONDS = 0.02
LONGEST_SLEEP_SECONDS = 60.0
SPREAD = 0.1
"""How far, relatively, epochs' lengths are apart: a length that lies close to an awakening is on either side of it."""
AGES = 40
ENDS_OF_A_PROCESS = 9
"""Of short epochs: so many a process sees where they are quick, and fewer where not (`trial/boundary.py`)."""
FEWEST_ENDS = 3
"""Of short epochs: fewer do not tell how often one stalls."""
LEAST_STALL_SECONDS = 0.03
"""What stalls at their ages would take on average; where that is less, gaps differ by as much without a stall."""
ABOUT = 1.25
"""What takes so many times as long as a stall would, or so many times less, is something else."""


@dataclass(frozen=True, kw_only=True)
class EpochEnd:
    """What was seen when an epoch's iterator went, at the beginning of the next epoch.

    Args:
        age: Seconds that the iterator had been in use when that epoch began.
        gap: Seconds from then to that epoch's first call.
    """

    age: float
    gap: float


@dataclass(frozen=True, kw_only=True)
class WholeEpoch:
    """An epoch, from boundary to boundary.

    Args:
        seconds: Of it.
        longest: Seconds of its longest call, which its end is part of.
    """

    seconds: float
    longest: float


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """What stalls took of epochs.

    Args:
        epochs: How many ended in one.
        share: Of all the time.
    """

    epochs: int
    share: float


def stall_seconds(age: float) -> float:
    """How long a stall takes at the end of an iterator of this age, in seconds: until its thread awakes."""
    awake, sleep = 0.0, FIRST_SLEEP_SECONDS
    while awake <= age:
        if sleep >= LONGEST_SLEEP_SECONDS:
            return LONGEST_SLEEP_SECONDS - (age - awake) % LONGEST_SLEEP_SECONDS
        awake += sleep
        sleep *= 2
    return awake - age


def mean_stall_seconds(length: float) -> float:
    """What a stall takes on average at the ends of epochs that are about this long, in seconds."""
    ages = [length * (1 + SPREAD * ((2 * index + 1) / AGES - 1)) for index in range(AGES)]
    return statistics.fmean(map(stall_seconds, ages))


def variance_of_charge(share: float, epoch_seconds: float) -> float:
    """Variance of the logarithm of a process's rate for the luck of its few ends of short epochs.

    Args:
        share: Of epochs that end in a stall, by several processes.
        epoch_seconds: Of a long epoch, what it is charged included.
    """
    low, high = 0.0, epoch_seconds
    for _ in range(
        30
    ):  # its length without the charge, which goes by that: the longer, the longer with it, too
        middle = (low + high) / 2
        if middle + share * mean_stall_seconds(middle) < epoch_seconds:
            low = middle
        else:
            high = middle
    of_share = share * (1 - share) / ENDS_OF_A_PROCESS
    return of_share * (mean_stall_seconds(high) / epoch_seconds) ** 2


def usual_gap_of(ends: Sequence[EpochEnd], untuned_gap: float) -> float:
    """Seconds from an epoch's beginning to its first call without a stall, which every epoch takes.

    A tuned pipeline takes longer to be made and taken down, for it has more in it: its usual gap is that of the ends
    that are clearly no stall, where that is longer.

    Args:
        ends: Of short epochs whose pipeline is tuned.
        untuned_gap: What it is where the same pipeline is not tuned.
    """
    clear = [each.gap for each in ends if each.gap < stall_seconds(each.age + untuned_gap) / 2]
    return max(untuned_gap, statistics.median(clear)) if clear else untuned_gap


def share_of_stalls(ends: Sequence[EpochEnd], usual_gap: float) -> float | None:
    """Which share of epochs ends in a stall: the time that these took too long, of what stalls would have taken.

    Args:
        ends: Of short epochs whose pipeline is tuned.
        usual_gap: Seconds from an epoch's beginning to its first call where the same pipeline is not tuned.

    Returns:
        From 0 to 1; None where there are too few ends, or stalls would have been too short to show.
    """
    usual = usual_gap_of(ends, usual_gap)
    stalls = [stall_seconds(each.age + usual) for each in ends]
    if len(ends) < FEWEST_ENDS or statistics.fmean(stalls) < LEAST_STALL_SECONDS:
        return None
    late = sum(min(each.gap - usual, stall) for each, stall in zip(ends, stalls, strict=True))
    return min(1.0, max(0.0, late / sum(stalls)))


def stalls_in(epochs: Sequence[WholeEpoch]) -> Stalls:
    """What stalls took of epochs of a pipeline that is tuned.

    An end without a stall is taken for as long as the quickest of all the longest calls. What is beyond that is
    counted where it is about as long as a stall would be at that age.
    """
    usual = min((each.longest for each in epochs), default=0.0)
    found = [late for each in epochs if _is_a_stall(late := each.longest - usual, each)]
    return Stalls(
        epochs=len(found), share=sum(found) / sum(each.seconds for each in epochs) if found else 0.0
    )


def _is_a_stall(late: float, epoch: WholeEpoch) -> bool:
    stall = stall_seconds(max(0.0, epoch.seconds - late))
    return late >= LEAST_STALL_SECONDS and stall / ABOUT <= late <= ABOUT * stall
