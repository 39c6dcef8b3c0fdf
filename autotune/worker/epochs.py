"""Times short epochs whole."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from autotune.stats.steady_state import WINDOW_SECONDS, enough_epochs, is_steady

if TYPE_CHECKING:
    from autotune.worker.step_clock import StepClock


class ByEpochs:
    """Times *laps*: from the end of an epoch's first call to the end of the next one's. A slice is whole laps.

    The process is frozen after an epoch's first call: `tf.data` takes longer to end an iterator after a pause. The
    first lap after a freeze, the *run-in*, is not counted: work that was on its way would be a gift.

    Args:
        clock: Whose training.
        longest_seconds: Longer epochs are timed by steps, unless they have very few calls.
    """

    def __init__(self, clock: StepClock, *, longest_seconds: float) -> None:
        self._clock = clock
        self._longest_seconds = longest_seconds
        self._lap_began_at: float | None = None
        self._compiled = self._warm = self._skips = False
        self._slice_epochs = 0

    @property
    def is_warm(self) -> bool:
        """Whether its slices have begun."""
        return self._warm

    def dropped(self) -> None:
        """The lap that is going on does not count, and neither does the next one: it may trace and compile."""
        self._lap_began_at = None
        self._skips = True

    def called(self, now: float, seconds: float) -> None:
        """The train function has returned."""
        self._clock.slices.called(seconds)
        if self._clock.progress.calls > 1:
            if not self._warm:
                self._clock.warm_up.call_seconds.append(seconds)
                self._change_if_long(now)
            return
        began_at, self._lap_began_at = self._lap_began_at, now
        skipped = self._skips
        if began_at is not None:
            self._skips = False
        if began_at is not None and not skipped:
            (self._count if self._warm else self._warm_up)(now - began_at)
        elif self._warm and not self._skips and self._clock.slices.open is None:  # the run-in is over
            self._begin_slice()

    def _change_if_long(self, now: float) -> None:
        """Time by steps where the present epoch proves too long to be timed whole."""
        training, calls = self._clock.progress.training, self._clock.warm_up.call_seconds
        steps = training.steps_per_epoch
        assert steps is not None
        assert self._lap_began_at is not None
        if training.has_few_calls or self._clock.progress.calls * training.steps_per_call >= steps:
            return  # at its end it may have compiled for a smaller batch
        watched = now - self._lap_began_at
        whole = statistics.median(calls) * steps / training.steps_per_call
        if watched > max(self._clock.warm_up.cap_seconds, self._longest_seconds) or (
            whole > self._longest_seconds and is_steady(calls)
        ):
            self._clock.change_to_steps()

    def _warm_up(self, lap_seconds: float) -> None:
        warm_up, training = self._clock.warm_up, self._clock.progress.training
        calls, epochs = warm_up.call_seconds, warm_up.epoch_seconds
        if not self._compiled:  # the first lap may have compiled for a smaller last batch
            self._compiled = True
            if calls and training.examples_missing_from_last_step:
                warm_up.compiling_seconds.append(calls[-1])
            calls.clear()
            return
        epochs.append(lap_seconds)
        # Of an even number the lower middle one: the last epoch may have stalled.
        if statistics.median_low(epochs) > self._longest_seconds and not training.has_few_calls:
            self._clock.change_to_steps()
            return
        seconds = self._clock.now() - warm_up.since
        if not enough_epochs(epochs, seconds=seconds, cap_seconds=warm_up.cap_seconds):
            return
        self._warm = True
        settled, usual = is_steady(epochs), statistics.median(epochs)
        if settled is None:  # too few epochs to tell: the last two thirds of the calls do
            settled = is_steady(calls, window_seconds=max(WINDOW_SECONDS, sum(calls) / 3))
        overhead = None
        if calls:
            steps = self._clock.progress.calls_of_last_epoch * statistics.median(calls)
            overhead = max(0.0, usual - steps)
        self._clock.hold_ready(
            settled=settled,
            timed_by="epochs",
            epoch_seconds=usual,
            epoch_overhead_seconds=overhead,
            run_in_seconds=usual,
        )
        self._lap_began_at = None

    def _begin_slice(self) -> None:
        # The number of epochs is set beforehand: to end a slice once its time is up would prefer slow epochs.
        usual = statistics.median(self._clock.warm_up.epoch_seconds)
        wanted = self._clock.slices.begin().wanted_seconds
        self._slice_epochs = max(1, math.ceil(wanted / usual - 1e-6))
        self._lap_began_at = self._clock.now()

    def _count(self, lap_seconds: float) -> None:
        progress, current = self._clock.progress, self._clock.slices.open
        assert current is not None
        steps = progress.steps_in(progress.calls_of_last_epoch)
        current.count(lap_seconds, steps, progress.training.examples_in_epoch(steps), epochs=1)
        if current.epochs < self._slice_epochs:
            return
        if self._clock.slices.end(self._clock.epoch_logs):
            self._lap_began_at = None
        else:
            self._begin_slice()
