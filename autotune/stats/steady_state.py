"""Find out when a training has warmed up, by its step times. Trial processes load it, so it imports no library."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

WINDOW_SECONDS = 0.2  # how long a window is, at least
SLOW_CALL_SECONDS = 0.2  # calls of the train function from here on are few: a training with them is measured by calls
SMALLEST_WINDOWS = ((1.0, 1), (SLOW_CALL_SECONDS, 2), (0.0, 3))  # the fewest calls of a window, if all take so long
MOST_SLOW_CALLS = 8  # of a warm-up


def is_steady(
    times: Sequence[float], *, tolerance: float = math.exp(0.05), window_seconds: float = WINDOW_SECONDS
) -> bool | None:
    """Return whether the last two windows of `times` agree by their medians; None where there are no two."""
    # Warm-up makes later steps faster, never slower: a window that is slower than the one before is steady.
    rest, last = _split_window(times, window_seconds)
    _, before = _split_window(rest, window_seconds)
    return statistics.median(before) <= tolerance * statistics.median(last) if before else None


def recent_mean(times: Sequence[float]) -> float:
    """Return the mean of the last window of `times`; of all where there is none, and 0 of no times."""
    return statistics.fmean(_split_window(times, WINDOW_SECONDS)[1] or times or (0.0,))


def smallest_window(least_seconds: float) -> int:
    """Return the fewest calls of a window whose calls take so long, at least."""
    return next(calls for seconds, calls in SMALLEST_WINDOWS if least_seconds >= seconds)


def _split_window(times: Sequence[float], window_seconds: float) -> tuple[Sequence[float], Sequence[float]]:
    """Split `times` before the shortest window at their end; the window is empty if there is none."""
    total, least = 0.0, math.inf
    for count, seconds in enumerate(reversed(times), start=1):
        total, least = total + seconds, min(least, seconds)
        if count >= smallest_window(least) and total >= window_seconds:
            return times[:-count], times[-count:]
    return times, ()


def enough_calls(times: Sequence[float], *, seconds: float, cap_seconds: float) -> bool:
    """Return whether a warm-up by calls is over: they are steady, or as many as are allowed."""
    if is_steady(times):
        return True
    if recent_mean(times) >= SLOW_CALL_SECONDS:
        return len(times) >= MOST_SLOW_CALLS
    caps = 2 if is_steady(times, tolerance=1.1) is False else 1  # still getting faster by more than a tenth
    return len(times) >= smallest_window(0.0) and seconds >= caps * cap_seconds


def enough_epochs(times: Sequence[float], *, seconds: float, cap_seconds: float) -> bool:
    """Return whether a warm-up by whole epochs is over."""
    # One of over a second is enough. Of shorter ones there are two at least, where two fit the cap.
    usual = statistics.median(times)
    if usual > 1 or is_steady(times):
        return True
    return len(times) >= (2 if 2 * usual < cap_seconds else 1) and seconds + usual > cap_seconds
