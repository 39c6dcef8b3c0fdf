"""Find out when a training has warmed up, by its step times. Trial processes load it, so it imports no library."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

WINDOW_SECONDS, SMALLEST_WINDOW = 0.2, 3  # how long a window is, and how many times it holds, at least


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


def _split_window(times: Sequence[float], window_seconds: float) -> tuple[Sequence[float], Sequence[float]]:
    """Split `times` before the shortest window at their end; the window is empty if there is none."""
    total = 0.0
    for count, seconds in enumerate(reversed(times), start=1):
        total += seconds
        if count >= SMALLEST_WINDOW and total >= window_seconds:
            return times[:-count], times[-count:]
    return times, ()


def enough_calls(times: Sequence[float], *, steps_per_call: int, seconds: float, cap_seconds: float) -> bool:
    """Return whether a warm-up by steps is over."""
    if is_steady(times):
        return True
    caps = 2 if is_steady(times, tolerance=1.1) is False else 1  # still getting faster by more than a tenth
    steps = len(times) * steps_per_call
    return len(times) >= SMALLEST_WINDOW and seconds >= caps * cap_seconds and steps >= caps * 20


def enough_epochs(times: Sequence[float], *, seconds: float, cap_seconds: float) -> bool:
    """Return whether a warm-up by whole epochs is over."""
    # One of over a second is enough. Of shorter ones there are two at least, where two fit the cap.
    usual = statistics.median(times)
    if usual > 1 or is_steady(times):
        return True
    return len(times) >= (2 if 2 * usual < cap_seconds else 1) and seconds + usual > cap_seconds
