"""Notices that this machine stood still: it slept, or all that runs here was stopped for a while.

No clock tells of a process that was stopped, and CLOCK_MONOTONIC leaves out what a machine slept. Who looks often
finds that much more time has passed between two looks than was waited for. This module may not import TensorFlow.
"""

from __future__ import annotations

import time

LOOK_SECONDS = 0.1
"""How often to look."""
STILL_SECONDS = 0.4
"""A look that comes so much late tells of a standstill; on a busy machine they come some milliseconds late."""


class Standstill:
    """Looks for standstills from now on.

    Args:
        found: Whether there was one.
    """

    def __init__(self) -> None:
        self.found = False
        self._ran, self._passed = _clocks()

    def look(self) -> float:
        """To be called after each wait of at most `LOOK_SECONDS`.

        Returns:
            By how many seconds CLOCK_MONOTONIC went on in a standstill since the last look; 0 without one.
        """
        ran, passed = _clocks()
        still = passed - self._passed > LOOK_SECONDS + STILL_SECONDS
        seconds = ran - self._ran if still else 0.0
        self._ran, self._passed = ran, passed
        self.found = self.found or still
        return seconds


def _clocks() -> tuple[float, float]:
    """Seconds without and with what the machine slept."""
    return time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
