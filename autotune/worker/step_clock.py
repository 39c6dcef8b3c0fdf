"""Times a running `model.fit` in slices, and freezes the process in between.

The clock wraps the model's train function: `fit`, its loop and its callbacks stay the user's. A *call* is one call of
the train function: `steps_per_execution` steps. The clock watches the warm-up, reports, freezes the process, and obeys
the tuner: each `Measure` asks for one slice, or for several without a pause.

| epochs | how they are timed |
|---|---|
| short | In *laps*, from the end of an epoch's first call to the end of the next one's. A slice is whole laps. |
| long, of very few calls | Whole, from boundary to boundary. |
| long | By steps. The stretch from an epoch's last call to the end of the next one's first call is not counted. |

The first lap after a freeze is not counted: work that was on its way would be a gift, and `tf.data` takes longer to end
an iterator after a pause. By steps, the cost of a boundary is charged apart (`worker/boundary.py`). Where that cost is
unknown, `LongEpoch` leaves `fit`, so that it can be measured; a second `fit` is timed by steps. Otherwise the clock
changes to steps within the same `fit`.

This module knows no TensorFlow: what it needs of it is handed in.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from autotune.devices.telemetry import Counters, between, host_bytes, part_of, read_counters
from autotune.record import Boundary, Outcome, Slice, StepSeconds
from autotune.stats.steady_state import WINDOW_SECONDS, enough_calls, enough_epochs, is_steady, recent_mean
from autotune.worker.messages import Finish, FirstStep, Measure, Ready, SliceDone
from autotune.worker.training import Mark, Progress, Training

if TYPE_CHECKING:
    from autotune.worker.boundary import BetweenEpochs

LOOK_SECONDS = 0.2
"""An epoch's length is extrapolated once it has been watched for so long."""
FEWEST_CALLS_TO_EXTRAPOLATE = 3
"""After the first: their median gives an epoch's length. The first calls may take a hundred times as long."""
WHOLE_EPOCH_CALLS = 3
"""An epoch of so few calls is timed whole, however long: by steps, its first call would not count."""


class LongEpoch(Exception):
    """Epochs are to be timed by steps, and what lies between two of them must be measured first."""


class TrainingEnded(Exception):
    """The tuner asked for the closing figures; carries its message."""

    def __init__(self, finish: Finish) -> None:
        super().__init__("finish")
        self.finish = finish


class TrainingFailed(Exception):
    """Training showed something that ends the trial."""

    def __init__(self, outcome: Outcome, reason: str, *, hint: str = "", input_error: bool = False) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason
        self.hint = hint
        self.input_error = input_error


class Tuner(Protocol):
    """The other end of the pipe."""

    def send(self, message: Any) -> None:
        """Send one message."""

    def receive(self, timeout_seconds: float | None = None) -> Measure | Finish:
        """Wait for the next command."""


@dataclass
class _OpenSlice:
    """A slice that is being measured."""

    target_seconds: float
    target_epochs: int
    cpu_at_start: float
    counters: Counters
    call_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    examples: int = 0
    epochs: int = 0


def freeze_own_group() -> None:
    """Stop every process of this process's group until the tuner sends SIGCONT."""
    import signal

    os.killpg(0, signal.SIGSTOP)


class StepClock:
    """Times one training; see the module's docstring.

    Args:
        training: What is timed.
        tuner: Where reports go and commands come from.
        warmup_seconds: Usual cap on the warm-up after the first step.
        epoch_seconds: Longest epoch that is timed whole, unless it has very few calls.
        between_epochs: What lies between two epochs. None to leave `fit` where epochs are long.
        freeze: Stops the process; comes back when the tuner lets it go on.
        clock: Seconds, monotonic.
        counters: Reads what the machine counts; before and after a slice, outside of what is timed.
    """

    def __init__(
        self,
        training: Training,
        tuner: Tuner,
        *,
        warmup_seconds: float,
        epoch_seconds: float,
        between_epochs: BetweenEpochs | None = None,
        freeze: Callable[[], None] = freeze_own_group,
        clock: Callable[[], float] = time.perf_counter,
        counters: Callable[[], Counters] = read_counters,
    ) -> None:
        self._progress = Progress(training)
        self._tuner = tuner
        self._warmup_seconds = warmup_seconds
        self._epoch_seconds = epoch_seconds
        self._between = between_epochs
        self._freeze = freeze
        self._clock = clock
        self._counters = counters
        self._by_epochs = not training.endless
        self._in_laps = False
        self._settled: bool | None = None
        self._open: _OpenSlice | None = None
        self._slices_left = 0
        self._sliced_seconds = self._sliced_calls = 0.0
        self.iterator: Any = None
        self._first_call_at: float | None = None
        self._first_call_seconds = 0.0
        self._compile_seconds: float | None = None
        self._epoch_times: list[float] = []
        self._logs: Any = None
        self._epoch_logs: Any = None
        self._mark: Mark | None = None
        """Where a lap, an epoch or a segment began that may count in a slice."""
        self._smaller_batch_traced = False
        self._expected_traces = 0
        self._skipped_before = 0
        self._begin_fit()

    # ------------------------------------------------------------------------------------- from the worker

    def wrap(self, train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`train_function`, with every call of it timed."""

        def timed(iterator: Any) -> Any:
            self.iterator = iterator
            logs = train_function(iterator)
            self._call_ended(logs)
            return logs

        return timed

    def time_by_steps(self, between_epochs: BetweenEpochs) -> None:
        """From the next `fit` on, time by steps.

        Args:
            between_epochs: What lies between two epochs.
        """
        self._by_epochs = False
        self._between = between_epochs
        self._begin_fit()

    def epoch_began(self) -> None:
        """`fit` is about to make the epoch's iterator."""
        self._progress.epoch_began()

    def epoch_ended(self) -> None:
        """`fit` has trained, and validated if it does, one whole epoch."""
        if self._progress.calls == 0:
            self._refuse_exhausted()
        now = self._clock()
        self._smaller_batch_traced = True
        if self._by_epochs:
            self._epoch_logs = self._logs
            self._count_if_unknown(now)
        self._progress.epoch_ended()
        if not self._by_epochs:
            self._close_segment()
        elif self._open is None:
            self._warm_up_by_epochs(now)
        elif not self._in_laps:
            self._count_epoch(now)
        if self._by_epochs and not self._in_laps:
            self._mark = self._progress.mark(self._clock())

    @property
    def call_seconds(self) -> float:
        """What a call of the train function takes, by the last ones seen."""
        return max(recent_mean(self._call_times or self._epoch_times), 1e-9)

    # ------------------------------------------------------------------------------------------- each call

    @property
    def _training(self) -> Training:
        return self._progress.training

    def _begin_fit(self) -> None:
        now = self._clock()
        self._call_times: list[float] = []
        self._fits_first_epoch = True
        self._first_epoch_last_call: float | None = None
        self._call_before_at = self._last_call_at = now
        self._warm_since: float | None = None
        self._mark = self._progress.mark(now) if self._by_epochs else None
        self._counted_up_to: Mark | None = None

    def _call_ended(self, logs: Any) -> None:
        self._logs = logs
        self._progress.called()
        if self._first_call_at is None:
            self._report_first_call()
            return
        now = self._clock()
        seconds = now - self._last_call_at
        self._call_before_at, self._last_call_at = self._last_call_at, now
        if self._warm_since is None:
            self._warm_since = now
        if self._by_epochs:
            self._called_by_epochs(now, seconds)
        else:
            self._called_by_steps(now, seconds)

    def _called_by_epochs(self, now: float, seconds: float) -> None:
        first_of_epoch = self._progress.calls == 1
        if self._open is not None:
            self._open.call_seconds.append(seconds)
        elif not first_of_epoch:
            self._call_times.append(seconds)
            if self._takes_long(now):
                self._change_to_steps()
        if first_of_epoch and self._in_laps:
            self._lap_ended(now)

    def _called_by_steps(self, now: float, seconds: float) -> None:
        calls = self._progress.calls
        counted = self._between.counted_calls if self._between else None
        if self._traces_smaller_batch():
            self._expected_traces = 1
            self._mark = None  # a training pays for it once: the stretch it fell into is not counted
            return
        if counted is not None and calls > counted:
            return
        if calls == 1:
            self._open_segment(now)
        elif self._open is not None:
            self._open.call_seconds.append(seconds)
            self._measure_by_steps(self._open, now)
        else:
            self._call_times.append(seconds)
            self._warm_up_by_steps(now)
        if calls == counted:
            self._close_segment()

    def _traces_smaller_batch(self) -> bool:
        """Whether this call met the epoch's smaller last batch for the first time, and so compiled for it."""
        return (
            not self._smaller_batch_traced
            and self._training.examples_missing_from_last_step > 0
            and self._training.ends_epoch(self._progress.calls)
        )

    def _report_first_call(self) -> None:
        self._training.synchronise()
        self._warm_since = self._first_call_at = self._clock()
        self._first_call_seconds = self._first_call_at - self._last_call_at
        self._tuner.send(FirstStep(loss=self._finite_loss()))
        self._last_call_at = self._clock()

    def _finite_loss(self) -> float | None:
        """The running training loss, of the last whole epoch where those are timed; None where there is none.

        Raises:
            TrainingFailed: The loss, or another number that a step reports, is not finite.
        """
        whole_epoch = self._by_epochs and self._epoch_logs is not None
        reported = _numbers(self._epoch_logs if whole_epoch else self._logs)
        for name, value in reported.items():
            if not math.isfinite(value):
                what = "the training loss" if name == "loss" else f"the metric {name}"
                raise TrainingFailed(
                    Outcome.NONFINITE, f"{what} became {value} by step {self._progress.steps}"
                )
        return reported.get("loss")

    def _count_if_unknown(self, now: float) -> None:
        """Have the examples of an epoch counted, once one has ended in good time and they are unknown.

        Otherwise its smaller last batch would count as a whole one: the more, the larger batches are.
        """
        if self._training.examples is None and self._training.count is not None:
            self._progress.training = replace(self._training, examples=self._training.count())
            assert self._warm_since is not None
            self._warm_since += self._clock() - now  # a warm-up is no shorter for it

    def _refuse_exhausted(self) -> None:
        counted = self._training.steps_per_epoch  # more than 0: counting has seen batches
        if self._first_call_at is None and not counted:
            raise TrainingFailed(
                Outcome.ERROR,
                "the dataset yields no batch: it is empty, or smaller than one batch with drop_remainder",
                hint="dataset() must return a tf.data.Dataset with at least one batch.",
                input_error=True,
            )
        raise TrainingFailed(
            Outcome.ERROR,
            "the dataset was exhausted by its first pass: the second got nothing",
            hint="dataset() must return a Dataset that starts afresh each epoch; a Python generator that is "
            "consumed once does not (from_generator takes a function that returns a new one).",
            input_error=True,
        )

    # -------------------------------------------------------------------------------------------- warm-up

    def _takes_long(self, now: float) -> bool:
        """Whether this epoch, of which two calls are over, will be too long to be timed whole."""
        training, calls = self._training, self._progress.calls
        if training.ends_epoch(WHOLE_EPOCH_CALLS):
            return False
        if training.ends_epoch(calls):  # perhaps it compiled for a smaller batch
            return False
        assert self._mark is not None
        watched = now - self._mark.at - (self._first_call_seconds if self._fits_first_epoch else 0)
        if watched < LOOK_SECONDS:
            return False
        steps = training.steps_per_epoch
        if steps is None and calls <= WHOLE_EPOCH_CALLS:
            return False  # it may end in a moment, and an epoch needs more calls to be timed by steps
        if steps is not None and len(self._call_times) >= FEWEST_CALLS_TO_EXTRAPOLATE:
            ratio = (
                statistics.median(self._call_times) * steps / training.steps_per_call / self._epoch_seconds
            )
            if ratio > 2 or (ratio > 1 and is_steady(self._call_times)):  # the first calls may be slow
                return True
        return watched > max(self._warmup_seconds, self._epoch_seconds)

    def _change_to_steps(self) -> None:
        if self._between is None:
            self._note_compile_seconds()
            raise LongEpoch
        self._by_epochs = False

    def _warm_up_by_epochs(self, now: float) -> None:
        if self._in_laps:
            return  # it is warm, and the next epoch's first call is waited for
        if self._fits_first_epoch:
            self._fits_first_epoch = False
            self._first_epoch_last_call = self._call_times[-1] if self._call_times else None
            self._call_times.clear()
            return
        assert self._mark is not None
        assert self._warm_since is not None
        times = [*self._epoch_times, now - self._mark.at]
        few_calls = self._progress.calls <= WHOLE_EPOCH_CALLS
        # Of an even number the lower middle one: the last epoch may have stalled.
        if statistics.median_low(times) > self._epoch_seconds and not few_calls:
            self._change_to_steps()
            return
        self._epoch_times = times
        if enough_epochs(times, seconds=now - self._warm_since, cap_seconds=self._warmup_seconds):
            self._settled = is_steady(times)
            if self._settled is None:  # too few epochs to tell: the last two thirds of the calls do
                third = sum(self._call_times) / 3
                self._settled = is_steady(self._call_times, window_seconds=max(WINDOW_SECONDS, third))
            self._in_laps = not few_calls or statistics.median(times) <= self._epoch_seconds
            if not self._in_laps:
                self._hold_ready(now)

    def _warm_up_by_steps(self, now: float) -> None:
        assert self._warm_since is not None
        if enough_calls(
            self._call_times,
            steps_per_call=self._training.steps_per_call,
            seconds=now - self._warm_since,
            cap_seconds=self._warmup_seconds,
        ):
            self._settled = is_steady(self._call_times)
            self._hold_ready(now)
            self._open_segment(self._clock())

    def _note_compile_seconds(self) -> None:
        """Trace and compile: the first call's excess, and a smaller last batch's, over a usual call."""
        if self._compile_seconds is not None:
            return
        calls = self._call_times or self._epoch_times  # an epoch without a second call is one call
        usual = statistics.median(calls) if calls else 0.0
        excess = max(0.0, self._first_call_seconds - usual)
        if self._first_epoch_last_call is not None and self._training.examples_missing_from_last_step:
            excess += max(0.0, self._first_epoch_last_call - usual)
        self._compile_seconds = excess

    def _hold_ready(self, now: float) -> None:
        self._training.synchronise()
        self._note_compile_seconds()
        assert self._compile_seconds is not None
        assert self._first_call_at is not None
        epoch_seconds = statistics.median(self._epoch_times) if self._by_epochs else None
        overhead, measured = self._charged()
        self._tuner.send(
            Ready(
                timed_by="epochs" if self._by_epochs else "steps",
                settled=self._settled,
                warmup_seconds=now - self._first_call_at,
                compile_seconds=self._compile_seconds,
                epoch_overhead_seconds=overhead,
                boundary=measured,
                call_seconds=self.call_seconds,
                epoch_seconds=epoch_seconds,
                warmup_steps=self._progress.total_calls * self._training.steps_per_call,
                run_in_seconds=epoch_seconds or 0.0 if self._in_laps else 0.0,
                uncounted_seconds=self._uncounted_seconds(),
            )
        )
        self._retraces()  # those of the warm-up are no retraces
        self._skipped_steps()
        self._hold()

    def _charged(self) -> tuple[float | None, Boundary | None]:
        """What an epoch costs beyond its steps, in seconds, and the boundary that this process measured."""
        if self._by_epochs:
            if not self._call_times:
                return None, None
            steps = self._progress.calls_of_last_epoch * statistics.median(self._call_times)
            return max(0.0, statistics.median(self._epoch_times) - steps), None
        if self._between is None:  # there is no end
            return None, None
        pace = self.call_seconds / (self._training.steps_per_call * self._training.batch_size)
        boundary = self._between.boundary
        if self._between.taken_over:
            return boundary.seconds_at(pace), None
        boundary = boundary.model_copy(update={"seconds_per_example": pace})  # of the warm training
        return boundary.seconds_at(pace), boundary

    def _uncounted_seconds(self) -> float:
        """How long a slice may take beyond what counts in it."""
        if self._by_epochs:
            return 0.0
        seconds = self._between.uncounted_seconds if self._between else 0.0
        training = self._training
        smaller = training.examples_missing_from_last_step > 0
        smaller = smaller or (training.may_end_anywhere and not training.drop_remainder)
        if smaller and not self._smaller_batch_traced:
            seconds += self._compile_seconds or 0.0
        return seconds

    # --------------------------------------------------------------------------------------------- slices

    def _hold(self) -> None:
        """Freeze, then do as the tuner says."""
        self._freeze()
        self._mark = None
        command = self._tuner.receive()
        if isinstance(command, Finish):
            raise TrainingEnded(command)
        self._slices_left = command.slices
        self._open_slice(command.seconds)

    def _open_slice(self, seconds: float) -> None:
        # The number of epochs is set beforehand: to end a slice once its time is up would prefer slow epochs.
        usual = statistics.median(self._epoch_times) if self._epoch_times else seconds
        self._open = _OpenSlice(
            target_seconds=seconds,
            target_epochs=max(1, math.ceil(seconds / max(usual, 1e-9) - 1e-6)),
            cpu_at_start=_cpu_seconds(),
            counters=self._counters(),
        )
        self._last_call_at = self._clock()

    def _count_epoch(self, now: float) -> None:
        """Count the epoch or lap that began at the mark, and report the slice where it was the last one."""
        current, mark = self._open, self._mark
        assert current is not None
        assert mark is not None
        steps = self._progress.steps_since(mark)
        current.epochs += 1
        current.steps += steps
        current.examples += self._training.examples_in_epoch(steps)
        current.seconds += now - mark.at
        if current.epochs >= current.target_epochs:
            self._report_slice(current, now)

    def _lap_ended(self, now: float) -> None:
        """An epoch's first call has come back: a lap ends, and the next begins."""
        if self._open is None:
            self._hold_ready(now)
            return
        if self._mark is None:  # the run-in ends
            self._training.synchronise()
            self._skipped_steps()
            self._open.call_seconds.clear()
        else:
            self._count_epoch(now)
            if self._mark is None:  # it was frozen
                return
        self._mark = self._progress.mark(self._clock())

    def _open_segment(self, now: float) -> None:
        self._mark = self._progress.mark(now)
        self._counted_up_to = None

    def _close_segment(self) -> None:
        """Count what was trained since the segment began, up to the last call's end.

        Where an epoch may end anywhere, only up to the end of the call before. The last call may have held a smaller
        batch, or fewer steps, and have compiled for it.
        """
        current, mark, training = self._open, self._mark, self._training
        self._mark = None
        if mark is None or current is None:
            return
        end = self._progress.mark(self._last_call_at)
        if training.may_end_anywhere:
            end = Mark(self._call_before_at, end.calls - 1)
            if self._counted_up_to is not None and self._counted_up_to.calls <= end.calls:
                end = self._counted_up_to
        if end.calls <= mark.calls:
            return
        if training.may_end_anywhere:
            steps, missing = (end.calls - mark.calls) * training.steps_per_call, 0
        else:
            steps = self._progress.steps_since(mark)
            ended = training.ends_epoch(self._progress.calls)
            missing = training.examples_missing_from_last_step if ended else 0
        current.seconds += end.at - mark.at
        current.steps += steps
        current.examples += max(1, steps * training.batch_size - missing)

    def _measure_by_steps(self, current: _OpenSlice, now: float) -> None:
        assert self._mark is not None
        if self._counted_up_to is None:
            if current.seconds + (now - self._mark.at) < current.target_seconds:
                return
            self._training.synchronise()
            self._last_call_at = self._clock()
            if self._training.may_end_anywhere:  # the next call shows that this one was not an epoch's last
                self._counted_up_to = self._progress.mark(self._last_call_at)
                return
        self._close_segment()
        self._report_slice(current, now)
        self._open_segment(self._clock())

    @property
    def sliced_call_seconds(self) -> float | None:
        """What a call took in the slices so far, boundaries of epochs left out; None where no call shows it."""
        return self._sliced_seconds / self._sliced_calls if self._sliced_calls else None

    def _note_pace(self, current: _OpenSlice) -> None:
        if not self._by_epochs:
            self._sliced_seconds += current.seconds
            self._sliced_calls += current.steps / self._training.steps_per_call
            return
        within = sorted(current.call_seconds)[: -current.epochs] or current.call_seconds
        self._sliced_seconds += sum(within)
        self._sliced_calls += len(within)

    def _report_slice(self, current: _OpenSlice, now: float) -> None:
        self._training.synchronise()
        if self._by_epochs:
            current.seconds += self._clock() - now
        self._note_pace(current)
        loss = self._finite_loss()
        self._open = None
        cpu_seconds, after = _cpu_seconds() - current.cpu_at_start, self._counters()
        part = part_of(current.counters, after, seconds=current.seconds)
        self._tuner.send(
            SliceDone(
                slice=Slice(
                    seconds=current.seconds,
                    steps=current.steps,
                    examples=current.examples,
                    epochs=current.epochs,
                    cpu_seconds=part * max(0.0, cpu_seconds),
                    step_seconds=step_quantiles(current.call_seconds, self._training.steps_per_call),
                    loss=loss,
                    host_bytes=host_bytes(),
                    device_bytes=self._training.device_bytes(),
                    **between(current.counters, after, seconds=current.seconds),
                    trained_examples=self._progress.examples,
                    retraces=self._retraces(),
                    skipped_steps=self._skipped_steps(),
                )
            )
        )
        self._slices_left -= 1
        if self._slices_left:
            self._open_slice(current.target_seconds)
        else:
            self._hold()

    def _retraces(self) -> int | None:
        """How often something was traced or compiled since this was last called, the first smaller batch's left out."""
        seen, expected = self._training.retraces(), self._expected_traces
        self._expected_traces = 0
        return None if seen is None else max(0, seen - expected)

    def _skipped_steps(self) -> int | None:
        """Steps since this was last called whose gradients a loss scale found to be infinite."""
        if self._training.updates is None:
            return None
        skipped, before = self._progress.steps - self._training.updates(), self._skipped_before
        self._skipped_before = skipped
        return max(0, skipped - before)


def _numbers(logs: Any) -> dict[str, float]:
    """The numbers that a step reports, by name; vectors and text are left out. Each one read waits for the device."""
    numbers: dict[str, float] = {}
    for name, value in logs.items() if isinstance(logs, Mapping) else ():
        if not isinstance(value, str | bytes):
            with contextlib.suppress(TypeError, ValueError):
                numbers[name] = float(value)
    return numbers


def _cpu_seconds() -> float:
    """Processor time of this process and its ended children, all threads."""
    return sum(os.times()[:4])


def step_quantiles(call_seconds: Sequence[float], steps_per_call: int) -> StepSeconds:
    """Nearest-rank quantiles of the time per step.

    Args:
        call_seconds: Seconds of each call of the train function.
        steps_per_call: Steps in a call.
    """
    ordered = sorted(seconds / steps_per_call for seconds in call_seconds) or [0.0]

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]

    return StepSeconds(p50=at(0.5), p90=at(0.9), p99=at(0.99), max=ordered[-1])
