"""Times a running training, without TensorFlow.

The clock is called when an epoch begins, when a call of the train function returns, and when an epoch ends. A *call* is
`steps_per_execution` steps. The clock watches the warm-up, reports, freezes the process, and obeys the tuner: each
`Measure` asks for one slice, or for several without a pause (`slices.py`).

Epochs that are short, or of very few calls, are timed whole. Long ones, and those without an end, are timed by steps;
what lies between them is charged separately (`boundary.py`). Whether an epoch is long shows while it runs. Where the
cost between two epochs is not known yet, `LongEpoch` leaves the training, so that it can be measured.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.data.record import Boundary, Outcome
from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import Channel, FirstStep, Ready
from autotune.stats.steady_state import (
    SLOW_CALL_SECONDS,
    WINDOW_SECONDS,
    enough_calls,
    enough_epochs,
    is_steady,
    recent_mean,
)
from autotune.training.gauges import Gauge
from autotune.training.progress import BetweenEpochs, Progress
from autotune.training.slices import Slices, finite_loss, freeze_own_group

FEWEST_EPOCHS = 3
"""Of a training that restarts when it ends: with fewer, none of them can be timed whole."""


LONG_EPOCH_RATIO = 2.0
"""Lower bound of an epoch's time over the limit above which it is long."""


class LongEpoch(Exception):
    """Epochs must be timed by steps, and what lies between two of them must be measured first."""


@dataclass
class WarmUp:
    """The state of the warm-up so far. Times are in seconds."""

    cap_seconds: float  # its usual length at most, from the end of its first call
    since: float = math.inf  # when its first call had ended
    call_seconds: list[float] = field(default_factory=list)  # each epoch's first call left out
    epoch_seconds: list[float] = field(default_factory=list)
    compiling_seconds: list[float] = field(default_factory=list)  # of calls that trace and compile

    @property
    def usual_call_seconds(self) -> float:
        """The time of a call, by the last ones; of a whole epoch where that is a single call."""
        return max(recent_mean(self.call_seconds or self.epoch_seconds), 1e-9)

    @property
    def compile_seconds(self) -> float:
        """The time of tracing and compiling: the excess of those calls over a usual one."""
        usual = statistics.median(self.call_seconds or self.epoch_seconds or [0.0])
        return sum(max(0.0, seconds - usual) for seconds in self.compiling_seconds)


class StepClock:
    """Times one training; see the module's docstring.

    Args:
        progress: How much of the training has run; the clock updates it.
        tuner: Where reports go and commands come from.
        warmup_seconds: Usual cap on the warm-up after the first step.
        epoch_seconds: Longest epoch that is timed whole, unless it has very few calls.
        between_epochs: Measures the boundary between two epochs. None to raise LongEpoch where epochs are long.
        longest_boundary_epoch_seconds: The boundary of longer epochs is not measured.
        saves_state: Saves weights and optimizer; returns whether it did.
        save_after: Steps after which to do that, once; a warm training is saved in any case.
        time_writers: Times the writers that trials omit, once the training is warm; returns None where it cannot.
        gauges: The measurements of each slice.
        describe_weights: Returns the fields of `FirstStep` about the model's weights, after that step.
        freeze: Stops the process; returns when the tuner lets it continue.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        progress: Progress,
        tuner: Channel,
        *,
        warmup_seconds: float,
        epoch_seconds: float,
        between_epochs: BetweenEpochs | None = None,
        longest_boundary_epoch_seconds: float = math.inf,
        saves_state: Callable[[], bool] = lambda: False,
        save_after: float = math.inf,
        time_writers: Callable[[], float | None] = lambda: None,
        gauges: Sequence[Gauge] = (),
        describe_weights: Callable[[], dict[str, Any]] = dict,
        freeze: Callable[[], None] = freeze_own_group,  # returns when the tuner lets the process continue
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.progress = progress
        self.epoch_began = progress.epoch_began  # to be called before an epoch's iterator is made
        self.warm_up = WarmUp(cap_seconds=warmup_seconds)
        self.slices = Slices(progress, tuner, gauges, freeze=freeze, clock=clock)
        self.now = clock
        self.iterator: Any = None  # what the train function was last called with
        self.logs: Any = None  # what it reported last
        self.epoch_logs: Any = None  # ... of a whole epoch: Keras resets its means in each
        self._tuner = tuner
        self._describe_weights = describe_weights
        self._between = between_epochs
        self._saves_state = saves_state
        self._save_after: float | None = save_after  # None once that was done
        self._state_steps: int | None = None
        self._time_writers = time_writers
        self._saving_seconds = 0.0
        self._longest_boundary_epoch_seconds = longest_boundary_epoch_seconds
        self._epochs_before_restart = 0
        self._first_call_ended_at = math.inf
        self._last_call_at = clock()
        endless = progress.training.examples is None
        self._timing: _ByEpochs | _BySteps = _BySteps(self, None) if endless else _ByEpochs(self, epoch_seconds)

    def wrap(self, train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return `train_function` with every call of it timed."""

        def timed(iterator: Any) -> Any:
            self.iterator = iterator
            self.slices.note_outside(self.now() - self._last_call_at)
            logs = train_function(iterator)
            self.call_ended(logs)
            return logs

        return timed

    def epoch_ended(self) -> None:
        """Note that a whole epoch, its validation included, is over. Raises TrialFailed where it had no data."""
        progress = self.progress
        if progress.calls == 0 or progress.training.examples is None:
            raise self._exhausted_error()
        progress.ended_epochs += 1
        progress.calls_of_last_epoch = progress.calls
        self.epoch_logs = self.logs

    def restarted(self, began_at: float) -> None:
        """Note that the whole training restarted, at this time of the clock: the epoch in progress is not counted."""
        if isinstance(self._timing, _BySteps):
            self._timing.count_up_to(self._last_call_at)
        epochs = self.progress.ended_epochs - self._epochs_before_restart
        self._epochs_before_restart = self.progress.ended_epochs
        self.progress.epoch_began()
        if isinstance(self._timing, _ByEpochs):
            self._timing.drop_lap()
            if epochs < FEWEST_EPOCHS and not self._timing.is_warm:
                self.change_to_steps()
        self._last_call_at = began_at

    def time_by_steps(self, between_epochs: BetweenEpochs) -> None:
        """Time by steps from the next `fit` on, with this between its epochs."""
        self._timing = _BySteps(self, between_epochs)
        self.warm_up.since = math.inf
        if self.warm_up.usual_call_seconds < SLOW_CALL_SECONDS:  # slow calls are too dear to be made again
            self.warm_up.call_seconds.clear()
        self._last_call_at = self.now()

    def change_to_steps(self) -> None:
        """Time by steps from now on. Raises LongEpoch where what lies between two epochs is to be measured first."""
        if self._between is None:
            training, call_seconds = self.progress.training, self.warm_up.usual_call_seconds
            if (training.full_calls or 0) * call_seconds <= self._longest_boundary_epoch_seconds:
                raise LongEpoch
            pace = call_seconds / (training.steps_per_call * training.batch_size)
            self._between = BetweenEpochs(boundary=Boundary(seconds=0.0, seconds_per_example=pace, measured=False))
        self._timing = _BySteps(self, self._between)

    def report_ready(self, **figures: Any) -> None:
        """Report that the training is warm, with the figures of this way of timing, and freeze it for the tuner."""
        warmup_seconds = self.now() - self._first_call_ended_at
        self._save_state()
        writing_seconds = self._time_writers()
        self._saving_seconds += writing_seconds or 0.0
        self._tuner.send(
            Ready(
                writing_seconds=writing_seconds,
                warmup_seconds=warmup_seconds,
                compile_seconds=self.warm_up.compile_seconds,
                call_seconds=self.warm_up.usual_call_seconds,
                warmup_steps=self.progress.steps,
                state_steps=self._state_steps,
                saving_seconds=self._saving_seconds,
                **figures,
            )
        )
        self.slices.wait_for_command()

    def _save_state(self) -> None:
        """Save weights and optimizer unless that was done. The warm-up's times leave it out."""
        if self._save_after is None:
            return
        self._save_after = None
        self.progress.training.synchronise()
        began = self.now()
        if self._saves_state():
            self._state_steps = self.progress.steps
        seconds = self.now() - began
        self._saving_seconds += seconds
        self._last_call_at += seconds
        self._first_call_ended_at += seconds
        self.warm_up.since += seconds
        if isinstance(self._timing, _ByEpochs):
            self._timing.leave_out(seconds)

    def note_begun(self, seconds: float) -> None:
        """Note that the first call began so many seconds ago."""
        self._last_call_at = self.now() - seconds

    def call_ended(self, logs: Any) -> None:
        """Note that a call of the train function returned these numbers. Raises TrainingEnded at `Finish`."""
        self.logs = logs
        self.progress.calls += 1
        first = self._first_call_ended_at == math.inf
        if first:
            self.progress.training.synchronise()
        now = self.now()
        seconds = now - self._last_call_at
        self.warm_up.since = min(self.warm_up.since, now)
        if first:
            self._first_call_ended_at = now
            self.warm_up.compiling_seconds.append(seconds)
            self._tuner.send(FirstStep(loss=finite_loss(self.logs, step=1), **self._describe_weights()))
        self._timing.call_ended(now, seconds)
        if self._save_after is not None and self.progress.steps >= self._save_after:
            self._save_state()
        self._last_call_at = self.now()  # what was done here is no part of the next call

    def _exhausted_error(self) -> TrialFailed:
        reason = "the dataset was exhausted by its first pass: the second got nothing"
        hint = (
            "Train on a dataset that starts afresh each epoch; a Python generator that is consumed once does not "
            "(from_generator takes a function that returns a new one)."
        )
        if self._first_call_ended_at == math.inf and not self.progress.training.steps_per_epoch:
            reason = "the dataset yields no batch: it is empty, or smaller than one batch with drop_remainder"
            hint = "The dataset must have at least one batch."
        return TrialFailed(Outcome.ERROR, reason, hint=hint, input_error=True)


class _ByEpochs:
    """Times *laps*: from the end of an epoch's first call to the end of the next one's. A slice is whole laps.

    The process is frozen after an epoch's first call: `tf.data` takes longer to end an iterator after a pause. The
    first lap after a freeze, the *run-in*, is not counted: work prefetched during the freeze would flatter it.
    """

    def __init__(self, clock: StepClock, longest_seconds: float) -> None:
        self.is_warm = False
        self._clock, self._progress, self._training = clock, clock.progress, clock.progress.training
        self._slices, self._warm = clock.slices, clock.warm_up
        self._longest_seconds = longest_seconds
        self._lap_began_at: float | None = None
        self._compiled = self._skips = False
        self._slice_epochs = 0

    def leave_out(self, seconds: float) -> None:
        """Leave so many seconds out of the lap in progress."""
        if self._lap_began_at is not None:
            self._lap_began_at += seconds

    def drop_lap(self) -> None:
        """Leave out the lap in progress, and the next one, which may trace and compile."""
        self._lap_began_at = None
        self._skips = True

    def call_ended(self, now: float, seconds: float) -> None:
        """Note that the train function returned."""
        self._slices.note_call(seconds)
        if self._progress.calls > 1:
            if not self.is_warm:
                self._warm.call_seconds.append(seconds)
                self._change_if_long(now)
            return
        began_at, self._lap_began_at, skipped = self._lap_began_at, now, self._skips
        if began_at is not None:
            self._skips = False
        if began_at is not None and not skipped:
            (self._count if self.is_warm else self._warm_up)(now - began_at)
        elif self.is_warm and not self._skips and self._slices.open is None:  # the run-in is over
            self._begin_slice()

    def _change_if_long(self, now: float) -> None:
        """Change to steps where the present epoch proves too long to be timed whole."""
        calls, per_call, steps = self._warm.call_seconds, self._training.steps_per_call, self._training.steps_per_epoch
        assert steps is not None
        assert self._lap_began_at is not None
        if self._training.has_few_calls or self._progress.calls * per_call >= steps:
            return  # its last call may have compiled for a smaller batch
        watched, whole = now - self._lap_began_at, statistics.median(calls) * steps / per_call
        proven = watched > max(self._warm.cap_seconds, self._longest_seconds)
        slow = len(calls) > 1 and min(calls) >= SLOW_CALL_SECONDS
        surely = slow and min(calls) * steps / per_call > LONG_EPOCH_RATIO * self._longest_seconds
        if proven or surely or (whole > self._longest_seconds and is_steady(calls)):
            self._clock.change_to_steps()

    def _warm_up(self, lap_seconds: float) -> None:
        calls, epochs, cap = self._warm.call_seconds, self._warm.epoch_seconds, self._warm.cap_seconds
        if not self._compiled:  # the first lap may have compiled for a smaller last batch
            self._compiled = True
            if calls and self._training.examples_missing_from_last_step:
                self._warm.compiling_seconds.append(calls[-1])
            calls.clear()
            return
        epochs.append(lap_seconds)
        # Of an even number the lower middle one: the last epoch may have stalled.
        if statistics.median_low(epochs) > self._longest_seconds and not self._training.has_few_calls:
            self._clock.change_to_steps()
            return
        if not enough_epochs(epochs, seconds=self._clock.now() - self._warm.since, cap_seconds=cap):
            return
        self.is_warm = True
        settled, usual, overhead = is_steady(epochs), statistics.median(epochs), None
        if settled is None:  # too few epochs to tell: the last two thirds of the calls do
            settled = is_steady(calls, window_seconds=max(WINDOW_SECONDS, sum(calls) / 3))
        if calls:
            overhead = max(0.0, usual - self._progress.calls_of_last_epoch * statistics.median(calls))
        self._clock.report_ready(
            settled=settled,
            timed_by="epochs",
            epoch_seconds=usual,
            epoch_overhead_seconds=overhead,
            run_in_seconds=usual,
        )
        self._lap_began_at = None

    def _begin_slice(self) -> None:
        # The number of epochs is set beforehand: to end a slice once its time is up would prefer slow epochs.
        wanted = self._slices.begin().wanted_seconds
        self._slice_epochs = max(1, math.ceil(wanted / statistics.median(self._warm.epoch_seconds) - 1e-6))
        self._lap_began_at = self._clock.now()

    def _count(self, lap_seconds: float) -> None:
        current = self._slices.open
        assert current is not None
        steps = self._progress.steps_in(self._progress.calls_of_last_epoch)
        current.count(lap_seconds, steps, self._training.examples_in_epoch(steps), epochs=1)
        if current.epochs < self._slice_epochs:
            return
        if self._slices.end(self._clock.epoch_logs):
            self._lap_began_at = None
        else:
            self._begin_slice()


class _BySteps:
    """Times calls of the train function. A slice ends with the call in which it is long enough.

    Not counted are an epoch's first call, which waits for a new iterator, its last call if that holds a smaller batch
    or fewer steps, and what a full shuffle buffer feeds at its end.
    """

    def __init__(self, clock: StepClock, between: BetweenEpochs | None) -> None:
        self._clock, self._progress, self._training = clock, clock.progress, clock.progress.training
        self._slices, self._between = clock.slices, between
        before_tail = None if between is None else between.counted_calls
        self._counted_calls = min(calls or math.inf for calls in (self._training.full_calls, before_tail))
        self._began_at, self._calls_before = 0.0, 0  # of the stretch that is to be counted next

    def call_ended(self, now: float, seconds: float) -> None:
        """Note that the train function returned."""
        calls, current = self._progress.calls, self._slices.open
        if calls > self._counted_calls:
            return
        if calls == 1:
            self._began_at, self._calls_before = now, calls
        elif current is None:
            self._warm_up(seconds)
        else:
            self._slices.note_call(seconds)
            full = current.seconds + now - self._began_at >= current.wanted_seconds
            if full or calls == self._counted_calls:
                steps = (calls - self._calls_before) * self._training.steps_per_call
                current.count(now - self._began_at, steps, steps * self._training.batch_size)
            if full:
                self._slices.end(self._clock.logs)
                self._begin_slice()

    def count_up_to(self, last_call_at: float) -> None:
        """Count the calls up to this moment, after which the epoch has no more."""
        current, calls = self._slices.open, self._progress.calls - self._calls_before
        if current is not None and calls > 0 and self._progress.calls < self._counted_calls:
            steps = calls * self._training.steps_per_call
            current.count(last_call_at - self._began_at, steps, steps * self._training.batch_size)

    def _begin_slice(self) -> None:
        self._slices.begin()
        self._began_at, self._calls_before = self._clock.now(), self._progress.calls

    def _warm_up(self, seconds: float) -> None:
        warm, training, between = self._clock.warm_up, self._training, self._between
        warm.call_seconds.append(seconds)
        watched, per_call = self._clock.now() - warm.since, training.steps_per_call
        if not enough_calls(warm.call_seconds, seconds=watched, cap_seconds=warm.cap_seconds):
            return
        overhead, measured, uncounted = None, None, 0.0
        if between is not None:
            pace = warm.usual_call_seconds / (per_call * training.batch_size)
            boundary = between.boundary
            if not between.taken_over:
                boundary = measured = boundary.model_copy(update={"seconds_per_example": pace})
            overhead = boundary.seconds_at(pace)
            # A buffer takes up to as long to refill as the tail takes; `boundary.seconds` may leave that out.
            tail = (training.full_calls or 0) - self._counted_calls
            uncounted = boundary.seconds + 2 * tail * warm.usual_call_seconds
            if training.examples_missing_from_last_step and not self._progress.ended_epochs:
                uncounted += warm.compile_seconds  # an epoch's end is yet to be compiled for
        self._clock.report_ready(
            settled=is_steady(warm.call_seconds),
            timed_by="steps",
            epoch_seconds=None,
            epoch_overhead_seconds=overhead,
            boundary=measured,
            uncounted_seconds=uncounted,
        )
        self._begin_slice()
