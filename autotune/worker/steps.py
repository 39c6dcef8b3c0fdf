"""Times long epochs by their steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autotune.stats.steady_state import enough_calls, is_steady

if TYPE_CHECKING:
    from autotune.worker.boundary import BetweenEpochs
    from autotune.worker.step_clock import StepClock


class BySteps:
    """Times calls of the train function. A slice ends with the call in which it is long enough.

    Not counted are an epoch's first call, which waits for a new iterator, its last call if that holds a smaller batch
    or fewer steps, and what a full shuffle buffer feeds at its end.

    Args:
        clock: Whose training.
        between: What lies between two epochs. None where the training has no end.
    """

    def __init__(self, clock: StepClock, between: BetweenEpochs | None) -> None:
        self._clock = clock
        self._between = between
        full = clock.progress.training.full_calls
        before_tail = None if between is None else between.counted_calls
        self._counted_calls = min(each or math.inf for each in (full, before_tail))
        self._began_at, self._calls_before = 0.0, 0
        """When the stretch began that is to be counted next, and after how many calls of its epoch."""

    def dropped(self) -> None:
        """The stretch that is going on does not count: an epoch's first call begins another."""

    def called(self, now: float, seconds: float) -> None:
        """The train function has returned."""
        calls, slices = self._clock.progress.calls, self._clock.slices
        if calls > self._counted_calls:
            return
        if calls == 1:
            self._begin_stretch(now)
        elif slices.open is None:
            self._warm_up(seconds)
        else:
            slices.called(seconds)
            if slices.open.seconds + now - self._began_at >= slices.open.wanted_seconds:
                self._count_stretch(now)
                slices.end(self._clock.logs)
                self._begin_slice()
            elif calls == self._counted_calls:
                self._count_stretch(now)

    def _begin_stretch(self, now: float) -> None:
        self._began_at, self._calls_before = now, self._clock.progress.calls

    def _count_stretch(self, now: float) -> None:
        current, training = self._clock.slices.open, self._clock.progress.training
        assert current is not None
        steps = (self._clock.progress.calls - self._calls_before) * training.steps_per_call
        current.count(now - self._began_at, steps, steps * training.batch_size)

    def _begin_slice(self) -> None:
        self._clock.slices.begin()
        self._begin_stretch(self._clock.now())

    def _warm_up(self, seconds: float) -> None:
        warm_up, progress, between = self._clock.warm_up, self._clock.progress, self._between
        training, calls = progress.training, warm_up.call_seconds
        calls.append(seconds)
        if not enough_calls(
            calls,
            steps_per_call=training.steps_per_call,
            seconds=self._clock.now() - warm_up.since,
            cap_seconds=warm_up.cap_seconds,
        ):
            return
        overhead, measured, uncounted = None, None, 0.0
        if between is not None:
            pace = warm_up.usual_call_seconds / (training.steps_per_call * training.batch_size)
            boundary, uncounted = between.boundary, between.uncounted_seconds
            if not between.taken_over:
                boundary = measured = boundary.model_copy(update={"seconds_per_example": pace})
            overhead = boundary.seconds_at(pace)
            if training.examples_missing_from_last_step and not progress.ended_epochs:
                uncounted += warm_up.compile_seconds  # an epoch's end is yet to be compiled for
        self._clock.hold_ready(
            settled=is_steady(calls),
            timed_by="steps",
            epoch_seconds=None,
            epoch_overhead_seconds=overhead,
            boundary=measured,
            uncounted_seconds=uncounted,
        )
        self._begin_slice()
