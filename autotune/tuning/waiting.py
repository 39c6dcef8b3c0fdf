"""Waits that end with the time there is: nothing is begun that cannot end, and nobody is blamed for a short wait."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.data.record import Outcome
from autotune.runtime.executor import Clock, TrialFailed

CLOSING_SECONDS = 1.0  # for ending the processes and writing the recipe
OVERRUN_SHARE = 0.03  # of the budget: how far waits may run beyond its end
GENEROUS = 2.0
"""A wait of so many times the usual length that ends in a timeout is the trial's failure, not the budget's."""
LEAST_CLOSING_SECONDS = 1.0  # what closing figures may take, however late it is


class Interrupted(Exception):
    """The user asked to stop."""


class TimeIsUp(Exception):
    """The phase's time does not hold what was to be done next; if `begun` all the same, the trial was killed."""

    def __init__(self, *, begun: bool = False) -> None:
        super().__init__()
        self.begun = begun


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """The last moment of a phase, in seconds since the run began."""

    clock: Clock
    at: float = math.inf

    def left(self) -> float:
        """Return the seconds until then; 0 once it is over."""
        return max(0.0, self.at - self.clock())

    def closing(self, at_most: float) -> float:
        """Return the seconds to wait for closing figures, which are not worth an overrun."""
        return min(at_most, max(LEAST_CLOSING_SECONDS, self.left()))

    @contextlib.contextmanager
    def wait(self, usual: float, *, at_most: float, generous: float = GENEROUS, beyond: float = 0.0) -> Iterator[float]:
        """Return the seconds to wait for a step that takes `usual` seconds, rarely `beyond` more. Raises TimeIsUp."""
        # With less than `usual` left, nothing is begun. A wait in vain of `generous` times that is the trial's fault.
        timeout = min(at_most + GENEROUS * beyond, self.left())
        if timeout < min(usual, at_most):
            raise TimeIsUp
        try:
            yield timeout
        except TrialFailed as failure:
            if failure.outcome is Outcome.TIMEOUT and timeout < min(at_most, generous * usual) + beyond:
                raise TimeIsUp(begun=True) from failure
            raise
