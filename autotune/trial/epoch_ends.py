"""How epochs end while `tf.data` tunes a pipeline: some in a stall. Pure: seconds in, seconds out.

The thread that tunes an iterator's pipeline sleeps for 10 ms, then for twice as long, and so on, up to a minute. When
the iterator goes the thread is woken, looks whether it was cancelled, and may find that it was not yet: then it sleeps
on, and the training waits until it has slept. Whether that happens is a race, whose odds short epochs show; how long
the wait is follows from the iterator's age alone (`benchmarks/epoch_ends.py`). In TensorFlow 2.21; by its published
sources `Model::OptimizeLoop` sleeps, and `CancellationManager::StartCancel` wakes it before it sets the flag.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

FIRST_SLEEP_SECONDS = 0.01
LONGEST_SLEEP_SECONDS = 60.0
TELLING_SECONDS = 0.03
"""A stall that would be shorter than this is not told from the rest of a gap."""
EARLY_SECONDS, LATE_SECONDS = 0.015, 0.05
"""How far from the awakening a gap may end that was a stall. The thread begins a few milliseconds before the first call,
and between sleeps tuning takes a little time. A gap that ends later had other causes."""
SPREAD = 0.1
"""How far, relatively, epochs' lengths are apart: a length that lies close to an awakening is on either side of it."""
AGES = 40
TELLING_EPOCH_SECONDS = 0.1
"""An epoch of about this length shows it: the thread, which awoke after 0.07 s, awakes after 0.15."""


@dataclass(frozen=True, kw_only=True)
class EpochEnd:
    """What was seen when an epoch's iterator went, at the beginning of the next epoch.

    Args:
        age: Seconds that the iterator had been in use when that epoch began.
        gap: Seconds from then to that epoch's first call.
    """

    age: float
    gap: float


def awakening(age: float) -> float:
    """The age at which an iterator's thread awakes next, in seconds."""
    awake, sleep = 0.0, FIRST_SLEEP_SECONDS
    while awake <= age:
        awake += sleep
        sleep = min(2 * sleep, LONGEST_SLEEP_SECONDS)
    return awake


def mean_stall(length: float) -> float:
    """What a stall takes on average at the ends of epochs that are about this long, in seconds."""
    ages = [length * (1 + SPREAD * ((2 * index + 1) / AGES - 1)) for index in range(AGES)]
    return statistics.fmean(awakening(age) - age for age in ages)


def stalled(end: EpochEnd, usual_gap: float) -> bool | None:
    """Whether an epoch ended in a stall; None where a stall would have been too short to show, or the gap is no such.

    Args:
        end: What was seen.
        usual_gap: Seconds from an epoch's beginning to its first call where no iterator had to go.
    """
    awake = awakening(end.age + usual_gap)
    if awake - end.age - usual_gap < TELLING_SECONDS:
        return None
    late = end.age + end.gap - awake
    if late < -EARLY_SECONDS:
        return False
    return True if late <= LATE_SECONDS else None
