"""When has a training warmed up? A test on its step times. Pure Python: trial processes load it too."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

WINDOW_SECONDS = 0.2
"""How much time a window holds at least."""
SMALLEST_WINDOW = 3
"""How many times a window holds at least."""
TOLERANCE = 0.05
"""Two windows agree when their medians differ by at most this, as a log-ratio."""


def is_steady(times: Sequence[float]) -> bool | None:
    """Whether the last two windows of `times` agree; None where there are no two.

    A window is the shortest stretch that holds `WINDOW_SECONDS` and `SMALLEST_WINDOW` times.

    Args:
        times: Seconds of consecutive steps, calls or epochs, oldest first.
    """
    last, rest = _take_window(times)
    before, _ = _take_window(rest)
    return agree(before, last)


def agree(*stretches: Sequence[float]) -> bool | None:
    """Whether any two neighbouring stretches show the same pace; None where one is smaller than a window.

    Warm-up makes later steps faster, never slower, so a stretch that is slower than the one before counts as steady.

    Args:
        stretches: Seconds of the steps, calls or epochs of each, the earliest first.
    """
    if any(len(each) < SMALLEST_WINDOW or sum(each) < WINDOW_SECONDS for each in stretches):
        return None
    medians = map(statistics.median, stretches)
    return any(before <= math.exp(TOLERANCE) * last for before, last in itertools.pairwise(medians))


def _take_window(times: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The shortest whole window at the end of `times`, empty if there is none, and what stands before it."""
    total = 0.0
    for count, seconds in enumerate(reversed(times), start=1):
        total += seconds
        if count >= SMALLEST_WINDOW and total >= WINDOW_SECONDS:
            return times[-count:], times[:-count]
    return (), times
