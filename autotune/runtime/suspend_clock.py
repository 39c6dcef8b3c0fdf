"""Notices that this machine stood still: it slept, or all that runs here was stopped for a while.

No clock tells of a stopped process. But between two looks much more time has passed than was waited for.
"""

from __future__ import annotations

import time

LOOK_SECONDS = 0.1  # how often to look
STILL_SECONDS = 0.4  # a look this late shows a standstill; on a busy machine looks are late by milliseconds


class AwakeClock:
    """Seconds since any moment, without standstills; `standstills` counts those that it has noticed."""

    def __init__(self) -> None:
        self.standstills = 0
        self._still_seconds = 0.0
        self.watch()

    def __call__(self) -> float:
        """Now."""
        return time.monotonic() - self._still_seconds

    def watch(self) -> None:
        """Begin to look: what was before is not looked at."""
        self._ran = time.monotonic()
        self._passed = time.clock_gettime(time.CLOCK_BOOTTIME)  # it counts what the machine slept as well

    def look(self) -> None:
        """Notice a standstill since the last look. To be called after each wait of at most `LOOK_SECONDS`."""
        ran, passed = self._ran, self._passed
        self.watch()
        if self._passed - passed > LOOK_SECONDS + STILL_SECONDS:
            self.standstills += 1
            self._still_seconds += self._ran - ran
