"""Answers the tuner's `Measure` commands with slices, and freezes the process between them."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autotune.data.record import Outcome, Slice, StepSeconds
from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import Channel, Finish, Measure, SliceDone
from autotune.training.gauges import Gauge
from autotune.training.progress import Progress


class TrainingEnded(Exception):
    """The tuner asks for the closing figures; carries its message."""

    def __init__(self, finish: Finish) -> None:
        super().__init__("finish")
        self.finish = finish


@dataclass
class OpenSlice:
    """A slice that is being measured: its counts so far, of `wanted_seconds` at least."""

    wanted_seconds: float
    seconds: float = 0.0
    steps: int = 0
    examples: int = 0
    epochs: int = 0
    call_seconds: list[float] = field(default_factory=list)

    def count(self, seconds: float, steps: int, examples: int, epochs: int = 0) -> None:
        """Add a stretch of training."""
        self.seconds += seconds
        self.steps += steps
        self.examples += examples
        self.epochs += epochs


def freeze_own_group() -> None:
    """Stop every process of this process's group until the tuner sends SIGCONT."""
    os.killpg(0, signal.SIGSTOP)


class Slices:
    """Opens slices as the tuner asks for them, and reports them. For its arguments see `StepClock`."""

    def __init__(
        self,
        progress: Progress,
        tuner: Channel,
        gauges: Sequence[Gauge],
        *,
        freeze: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.open: OpenSlice | None = None
        self._progress, self._synchronise = progress, progress.training.synchronise
        self._tuner = tuner
        self._gauges = gauges
        self._measures: list[Callable[[float], dict[str, Any]]] = []
        self._freeze = freeze
        self._clock = clock
        self._wanted_seconds, self._left = 0.0, 0
        self._within_seconds, self._within_calls = 0.0, 0
        self._usual_calls = list[float]()  # the median time of a call in each slice
        self._outside_seconds: float | None = None  # None where nothing sees what passes between two calls

    def wait_for_command(self) -> None:
        """Freeze until the next command comes. Raises TrainingEnded at `Finish`."""
        self._freeze()
        command = self._tuner.receive()
        if isinstance(command, Finish):
            raise TrainingEnded(command)
        assert isinstance(command, Measure)
        self._wanted_seconds, self._left = command.seconds, command.slices

    def begin(self) -> OpenSlice:
        """Open a slice, once the devices have done what they were given before it."""
        self._synchronise()
        self._measures = [gauge() for gauge in self._gauges]
        self.open = OpenSlice(self._wanted_seconds)
        return self.open

    def note_call(self, seconds: float) -> None:
        """Note a call of the train function in the open slice, if there is one."""
        if self.open is None:
            return
        self.open.call_seconds.append(seconds)
        if self._progress.calls > 1:
            self._within_seconds += seconds
            self._within_calls += 1

    def note_outside(self, seconds: float) -> None:
        """Note the time between two calls, in Keras, callbacks and the user's code."""
        counts = self.open is not None and self._progress.calls > 0
        self._outside_seconds = (self._outside_seconds or 0.0) + (seconds if counts else 0.0)

    @property
    def outside_fraction(self) -> float | None:
        """The part of a call's time that passed outside the train function, without an epoch's first call."""
        if self._outside_seconds is None or not self._within_seconds:
            return None
        return min(1.0, self._outside_seconds / self._within_seconds)

    @property
    def call_seconds(self) -> float | None:
        """The time of a call over all slices, without an epoch's first call; None where epochs have no other."""
        return self._within_seconds / self._within_calls if self._within_calls else None

    @property
    def usual_call_seconds(self) -> float:
        """The time of a call in a usual slice, whatever single calls took; 0 before there is one."""
        return statistics.median(self._usual_calls or [0.0])

    def end(self, logs: Any) -> bool:
        """Report the open slice, then freeze unless the tuner wants another one at once; return whether it froze.

        `logs` are those of the last whole epoch where epochs are timed.
        """
        current, before = self.open, self._clock()
        assert current is not None
        self._synchronise()
        behind = self._clock() - before
        current.seconds += behind
        self._within_seconds += behind
        self.open = None
        self._usual_calls += [statistics.median(current.call_seconds)] if current.call_seconds else []
        loss = finite_loss(logs, step=self._progress.steps)
        figures: dict[str, Any] = {}
        for measure in self._measures:
            figures |= measure(current.seconds)
        measured_slice = Slice(
            seconds=current.seconds,
            charged_seconds=self._progress.training.charged_seconds(current.examples),
            steps=current.steps,
            examples=current.examples,
            epochs=current.epochs,
            step_seconds=step_quantiles(current.call_seconds, self._progress.training.steps_per_call),
            loss=loss,
            trained_examples=self._progress.examples,
            **figures,
        )
        self._tuner.send(SliceDone(slice=measured_slice))
        self._left -= 1
        if self._left > 0:
            return False
        self.wait_for_command()
        return True


def finite_loss(logs: Any, *, step: int) -> float | None:
    """Return the training loss that the train function reported; None where there is none.

    Text is left alone. Reading a number waits for the device.

    Raises:
        TrialFailed: A number in the logs is not finite, however deep it lies in them.
    """
    loss = None
    for name, numbers in _numbers_in(logs):
        if not np.isfinite(numbers).all():
            quantity = "the training loss" if name == "loss" else f"the metric {name}".rstrip()
            odd = numbers[~np.isfinite(numbers)].ravel()[0]
            raise TrialFailed(Outcome.NONFINITE, f"{quantity} became {odd} by step {step}")
        if name == "loss" and numbers.size == 1:
            loss = float(numbers.item())
    return loss


def _numbers_in(logs: Any, name: str = "") -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield all numbers in what a step returns, with the keys that lead to them."""
    if isinstance(logs, Mapping | list | tuple):
        for key, value in logs.items() if isinstance(logs, Mapping) else enumerate(logs):
            yield from _numbers_in(value, f"{name}.{key}" if name else str(key))
    elif logs is not None:
        with contextlib.suppress(TypeError, ValueError):
            found = np.asarray(getattr(logs, "flat_values", getattr(logs, "values", logs)))
            if found.dtype.kind not in "OSUM":  # objects, text, dates
                yield name, found.astype(float)


def step_quantiles(call_seconds: Sequence[float], steps_per_call: int) -> StepSeconds:
    """Return nearest-rank quantiles of the time per step, of calls with so many steps."""
    ordered = sorted(seconds / steps_per_call for seconds in call_seconds) or [0.0]
    found = {f"p{share}": ordered[math.ceil(share * len(ordered) / 100) - 1] for share in (50, 90, 99)}
    return StepSeconds(**found, max=ordered[-1])
