"""Measures what lies between two calls of `fit`, or two long epochs of a loop, by cutting some of them short.

A trial trains by one endless `fit`. What lies between two calls is not part of that: the start of `fit`, a new data
adapter and iterator, and the script's own lines, such as `evaluate`, `predict`, or a new model that compiles. So the
first calls are run as the long run makes them, with two epochs that are cut short after a few steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

ENOUGH = ((5, 0.0), (2, 3.0), (1, 10.0))
"""Gaps between two calls, and seconds since the first call, that end the measuring; the first gap may compile."""
CALLS_PER_EPOCH = 2
"""Calls of the train function in an epoch that is cut short."""


class Gaps:
    """What lies between two trainings, or two epochs, measured several times."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._began = time.perf_counter()

    def add(self, seconds: float) -> None:
        """Note a gap."""
        self._seconds.append(seconds)

    @property
    def are_enough(self) -> bool:
        """Return whether no further one is to be measured."""
        taken = time.perf_counter() - self._began
        return any(len(self._seconds) >= gaps and taken >= seconds for gaps, seconds in ENOUGH)

    @property
    def usual_seconds(self) -> float:
        """Return the usual gap; 0 without any."""
        return statistics.median(self._seconds[1:] or self._seconds or [0.0])


class Refits:
    """The first calls of a `fit` that a script calls again and again.

    Args:
        calls: How often the script calls it, as far as that is known.
        synchronise: Waits until the devices have done what they were given.
    """

    def __init__(self, calls: int, synchronise: Callable[[], None]) -> None:
        self._calls_left, self._synchronise = calls, synchronise
        self._gaps = Gaps()  # from an epoch's last call to the first one of the next `fit`
        self._boundaries = Gaps()  # the same between two epochs of one `fit`
        self._last_call_at: float | None = None
        self.first_call_seconds: float | None = None
        """Of the train function, which it compiles in."""

    @property
    def are_measured(self) -> bool:
        """Return whether no further call is to be cut short."""
        return self._calls_left <= 0 or self._gaps.are_enough

    @property
    def seconds(self) -> float:
        """Return what a call costs beyond the boundary of an epoch."""
        return max(0.0, self._gaps.usual_seconds - self._boundaries.usual_seconds)

    def end(self) -> None:
        """Cut no further call short: the script has ended, and begins anew."""
        self._calls_left = 0

    def run(self, model: Any, usual: Callable[..., Any], arguments: Mapping[str, Any], callbacks: list[Any]) -> Any:
        """Call `fit` for two short epochs, and return its history."""
        import keras

        self._calls_left -= 1
        gaps, calls = self._gaps, 0
        first_epoch = int(arguments["initial_epoch"])

        def timed(iterator: Any) -> Any:
            nonlocal calls
            began = time.perf_counter()
            logs = train(iterator)
            self._synchronise()
            now = time.perf_counter()
            if self.first_call_seconds is None:
                self.first_call_seconds = now - began
            if calls == 0 and self._last_call_at is not None:
                gaps.add(now - self._last_call_at)
            calls, self._last_call_at = calls + 1, now
            if calls >= CALLS_PER_EPOCH:
                model.stop_training = True
            return logs

        def epoch_began(epoch: int, _: Any = None) -> None:
            nonlocal gaps, calls
            calls = 0
            if epoch > first_epoch:
                gaps = self._boundaries

        def epoch_ended(epoch: int, _: Any = None) -> None:
            model.stop_training = epoch > first_epoch

        edges = keras.callbacks.LambdaCallback(on_epoch_begin=epoch_began, on_epoch_end=epoch_ended)
        model.make_train_function()
        train, model.train_function = model.train_function, timed
        try:
            return usual(model, **{**arguments, "epochs": first_epoch + 2, "callbacks": [*callbacks, edges]})
        finally:
            model.train_function = train
