"""When has a training warmed up? Tests on its step times. Pure Python: trial processes load it too."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

WINDOW_SECONDS = 0.2
"""How much time a window holds at least."""
SMALLEST_WINDOW = 3
"""How many times a window holds at least."""
TOLERANCE = math.exp(0.05)
"""Two windows agree when the earlier one's median is at most this multiple of the later one's."""
STILL_FALLING = 1.1
"""Steps that get faster by more than this are given up to twice the usual warm-up."""
FEWEST_STEPS = 20
"""The usual warm-up by steps has at least so many, however long they take, unless they are steady before."""
LONG_EPOCH_SECONDS = 1.0
"""Of longer epochs, one is a whole warm-up."""


def is_steady(times: Sequence[float], *, tolerance: float = TOLERANCE) -> bool | None:
    """Whether the last two windows of `times` agree; None where there are no two.

    A window is the shortest stretch that holds `WINDOW_SECONDS` and `SMALLEST_WINDOW` times.

    Args:
        times: Seconds of consecutive steps, calls or epochs, oldest first.
        tolerance: The largest ratio of two windows that agree.
    """
    last, rest = _take_window(times)
    before, _ = _take_window(rest)
    return _agree((before, last), tolerance)


def recent_mean(times: Sequence[float]) -> float:
    """The mean of the last window of `times`; of all where there is none, and 0 of no times."""
    last, _ = _take_window(times)
    return statistics.fmean(last or times or (0.0,))


def thirds_agree(times: Sequence[float]) -> bool | None:
    """Whether two neighbouring thirds of `times` agree; None where a third is smaller than a window.

    Args:
        times: As for `is_steady`.
    """
    size = len(times) // 3
    first = len(times) - 3 * size
    return _agree(
        [times[begin : begin + size] for begin in range(first, len(times), max(1, size))], TOLERANCE
    )


def _agree(stretches: Sequence[Sequence[float]], tolerance: float) -> bool | None:
    """Whether any two neighbouring stretches show the same pace; None where one is smaller than a window.

    Warm-up makes later steps faster, never slower, so a stretch that is slower than the one before counts as steady.
    """
    if not stretches or any(len(each) < SMALLEST_WINDOW or sum(each) < WINDOW_SECONDS for each in stretches):
        return None
    medians = map(statistics.median, stretches)
    return any(before <= tolerance * last for before, last in itertools.pairwise(medians))


def _take_window(times: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The shortest whole window at the end of `times`, empty if there is none, and what stands before it."""
    total = 0.0
    for count, seconds in enumerate(reversed(times), start=1):
        total += seconds
        if count >= SMALLEST_WINDOW and total >= WINDOW_SECONDS:
            return times[-count:], times[:-count]
    return (), times


def enough_calls(times: Sequence[float], *, steps_per_call: int, seconds: float, cap_seconds: float) -> bool:
    """Whether a warm-up by steps is over.

    It ends when its calls are steady, and at its cap: `cap_seconds` or `FEWEST_STEPS`, whichever comes last. Calls that
    still get faster then have twice the cap.

    Args:
        times: Seconds of the calls so far, oldest first.
        steps_per_call: Steps in a call.
        seconds: How long the warm-up has taken.
        cap_seconds: How long it usually may.
    """
    if is_steady(times):
        return True
    steps = len(times) * steps_per_call
    if len(times) < SMALLEST_WINDOW or seconds < cap_seconds or steps < FEWEST_STEPS:
        return False
    falling = is_steady(times, tolerance=STILL_FALLING) is False
    return not falling or (seconds >= 2 * cap_seconds and steps >= 2 * FEWEST_STEPS)


def enough_epochs(times: Sequence[float], *, seconds: float, cap_seconds: float) -> bool:
    """Whether a warm-up by whole epochs is over.

    It ends when its epochs are steady, and when another epoch would end beyond the cap. It has one epoch at least, and
    two where two fit the cap.

    Args:
        times: Seconds of the epochs after the first, oldest first.
        seconds: How long the warm-up has taken, the first epoch included.
        cap_seconds: How long it usually may.
    """
    usual = statistics.median(times)
    if usual > LONG_EPOCH_SECONDS or is_steady(times):
        return True
    return len(times) >= (2 if 2 * usual < cap_seconds else 1) and seconds + usual > cap_seconds
