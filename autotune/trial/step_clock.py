"""Times a running `model.fit` in slices, and holds it still in between.

The clock wraps the model's train function, so `fit` itself stays as the user's: same loop, same callbacks. A
*call* is one call of the train function: `steps_per_execution` steps. While it warms up the clock looks on;
then it reports, freezes the process, and obeys: each `Measure` is one slice, or several without a pause.

Short epochs are timed in *laps*, each from the end of an epoch's first call to that of the next one's, and the
process freezes after a first call: a slice is a number of whole epochs. The first lap after a freeze is not counted.
What was on its way when it was frozen would be a gift; and to end what `tf.data` has begun in an iterator takes
longer after a pause, which no training pays. Epochs that are longer than the tuner allows, and of very few calls, are
timed boundary to boundary. Where an epoch is longer and has more calls, `LongEpoch` leaves `fit` once, and a second
`fit` is timed by steps: the stretch from the last call of an epoch to the first call of the next is not counted,
because its cost is measured apart (`trial/boundary.py`).

This module knows no TensorFlow: what it needs of it is handed in.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from autotune.measure.steady_state import agree, is_steady
from autotune.trial.messages import Finish, FirstStep, Measure, Ready, SliceDone
from autotune.trial.record import Outcome, Slice, StepSeconds
from autotune.trial.telemetry import Counters, between, host_bytes, part_of, read_counters

ENDLESS_EPOCH_SECONDS = 0.5
"""How long a first epoch is watched before its length is extrapolated, where it is not known to have no end."""
FEWEST_CALLS_TO_EXTRAPOLATE = 3
"""From the second call on: their median tells what an epoch takes; the first ones may take a hundred times as long."""
WHOLE_EPOCH_CALLS = 3
"""An epoch of so few calls is timed whole, however long: by steps, its first call would not count."""


class LongEpoch(Exception):
    """An epoch takes longer than slices may: time by steps instead."""


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


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the clock must know of the training it times.

    Args:
        steps_per_call: The knob `steps_per_execution`.
        batch_size: Examples per full step.
        examples: Examples per epoch; None when endless or unknown.
        drop_remainder: Whether a smaller last batch is dropped.
        iterations: Reads `optimizer.iterations`; None when the model has no optimizer.
        synchronise: Waits until the devices have done what they were given.
        retraces: How often the train function was traced or compiled since this was last called; None where that
            cannot be seen.
        updates: Reads how many steps changed the weights so far; None where no loss scale skips any.
        endless: Whether the dataset is known to have no end.
        count: Counts the examples that an epoch trains on, by reading one; None where it cannot be asked.
        device_bytes: Reads what TensorFlow holds on a device; None without one.
    """

    steps_per_call: int
    batch_size: int
    examples: int | None
    drop_remainder: bool
    iterations: Callable[[], int] | None
    synchronise: Callable[[], None]
    retraces: Callable[[], int | None] = lambda: None
    updates: Callable[[], int] | None = None
    endless: bool = False
    count: Callable[[], int] | None = None
    device_bytes: Callable[[], int | None] = lambda: None

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of one epoch, None when endless or unknown."""
        if self.examples is None:
            return None
        whole, rest = divmod(self.examples, self.batch_size)
        return whole if self.drop_remainder or not rest else whole + 1

    @property
    def examples_missing_from_last_step(self) -> int:
        """By how many examples an epoch's last step is smaller than the others."""
        if self.examples is None or self.drop_remainder:
            return 0
        return -self.examples % self.batch_size

    def examples_in_epoch(self, steps: int) -> int:
        """Examples of a whole epoch that took `steps` steps."""
        if steps == self.steps_per_epoch:
            return steps * self.batch_size - self.examples_missing_from_last_step
        return steps * self.batch_size

    @property
    def examples_per_epoch(self) -> int | None:
        """Examples that a whole epoch trains on, None when endless or unknown."""
        steps = self.steps_per_epoch
        return None if steps is None else self.examples_in_epoch(steps)

    def ends_epoch(self, calls: int) -> bool:
        """Whether the call with this number, from 1, is the last of an epoch; False where nobody knows."""
        steps = self.steps_per_epoch
        return steps is not None and calls * self.steps_per_call >= steps


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
        warmup_seconds: Cap on the warm-up after the first step.
        epoch_seconds: Longest epoch that is timed whole, unless it has very few calls.
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
        freeze: Callable[[], None] = freeze_own_group,
        clock: Callable[[], float] = time.perf_counter,
        counters: Callable[[], Counters] = read_counters,
    ) -> None:
        self._training = training
        self._tuner = tuner
        self._warmup_seconds = warmup_seconds
        self._epoch_seconds = epoch_seconds
        self._freeze = freeze
        self._clock = clock
        self._counters = counters
        self._by_epochs = True
        self._overhead: float | None = None
        self._stalled_ends: float | None = None
        self._uncounted_seconds = 0.0
        self._counting_seconds = 0.0
        self._counted_calls = math.inf
        self._open: _OpenSlice | None = None
        self._slices_left = 0
        self._ready = False
        self._in_laps = False
        self._settled: bool | None = None
        self._epoch_began_at = 0.0
        self._first_call_at: float | None = None
        self._first_call_seconds = 0.0
        self._compile_seconds: float | None = None
        self._epoch_times: list[float] = []
        self._logs: Any = None
        self._epoch_logs: Any = None
        self._total_calls = 0
        self._smaller_batch_traced = False
        self._expected_traces = 0
        self._steps_of_ended_epochs = 0
        self._ended_epochs = 0
        self._skipped_before = 0
        self._begin_fit()

    # ------------------------------------------------------------------------------------- from the worker

    def wrap(self, train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`train_function`, with every call of it timed."""

        def timed(iterator: Any) -> Any:
            logs = train_function(iterator)
            self._call_ended(logs)
            return logs

        return timed

    def time_by_steps(
        self,
        epoch_overhead_seconds: float | None,
        *,
        counted_calls: int | None = None,
        stalled_ends: float | None = None,
        uncounted_seconds: float = 0.0,
    ) -> None:
        """From the next `fit` on, time by steps.

        Args:
            epoch_overhead_seconds: What an epoch costs beyond its steps, measured apart.
            counted_calls: After so many calls of an epoch the rest of it is not counted: the overhead speaks of it.
            stalled_ends: Share of epochs that end in a stall, to be told.
            uncounted_seconds: How long nothing counts between two epochs, to be told.
        """
        self._by_epochs = False
        self._overhead = epoch_overhead_seconds
        self._stalled_ends = stalled_ends
        self._uncounted_seconds = uncounted_seconds
        self._counted_calls = math.inf if counted_calls is None else counted_calls
        self._begin_fit()

    def epoch_began(self) -> None:
        """`fit` is about to make the epoch's iterator."""
        self._steps_of_ended_epochs = self._steps_trained()
        self._calls = 0

    def epoch_ended(self) -> None:
        """`fit` has trained, and validated if it does, one whole epoch."""
        if self._calls == 0:
            self._refuse_exhausted()
        self._smaller_batch_traced = True
        if self._training.steps_per_epoch is None:  # nobody knows how many of its steps the last call had
            self._steps_of_ended_epochs -= self._training.steps_per_call - 1
        self._ended_epochs += 1
        self._calls_of_epoch = self._calls
        self._epoch_logs = self._logs
        now = self._clock()
        self._count_if_unknown(now)
        if not self._by_epochs:
            self._close_segment()
        elif self._open is None:
            self._warm_up_by_epochs(now)
        elif not self._in_laps:
            self._count_epoch(now, now - self._epoch_began_at)
        self._epoch_began_at = self._clock()
        if not self._in_laps:
            self._epoch_iterations = self._iterations_if_unknown()
            self._epoch_calls = self._total_calls

    def _count_if_unknown(self, now: float) -> None:
        """Have the examples of an epoch counted, once one has ended in good time and nobody knows them.

        Its smaller last batch would else count as a whole one: the more, the larger batches are.
        """
        if not self._by_epochs or self._training.examples is not None or self._training.count is None:
            return
        self._training = replace(self._training, examples=self._training.count())
        assert self._first_call_at is not None
        self._counting_seconds = self._clock() - now
        self._first_call_at += self._counting_seconds  # a warm-up is no shorter for it

    @property
    def call_seconds(self) -> float:
        """What a call of the train function takes, by the last ones seen."""
        recent = (self._call_times or self._epoch_times)[-50:]
        return max(sum(recent) / max(len(recent), 1), 1e-9)

    @property
    def last_loss(self) -> float | None:
        """The running training loss, of the last whole epoch where those are timed; None where there is none."""
        logs = self._logs if self._epoch_logs is None or not self._by_epochs else self._epoch_logs
        value = logs.get("loss") if isinstance(logs, Mapping) else None
        return None if value is None else float(value)

    # ------------------------------------------------------------------------------------------- each call

    def _begin_fit(self) -> None:
        self._call_times: list[float] = []
        self._calls = 0
        self._fits_first_epoch = True
        self._first_epoch_last_call: float | None = None
        self._call_before_at = self._last_call_at = self._clock()
        self._epoch_began_at = self._last_call_at
        self._fit_began_at = self._last_call_at
        self._calls_of_epoch = 0
        self._epoch_iterations = self._iterations_if_unknown()
        self._epoch_calls = self._total_calls
        self._lap_at: float | None = None
        self._segment_at: float | None = None
        self._counted_up_to: tuple[float, int] | None = None

    def _call_ended(self, logs: Any) -> None:
        self._logs = logs
        self._calls += 1
        self._total_calls += 1
        if self._first_call_at is None:
            self._report_first_call()
            return
        now = self._clock()
        seconds = now - self._last_call_at
        self._call_before_at, self._last_call_at = self._last_call_at, now
        first_of_epoch = self._calls == 1
        if not self._by_epochs and self._traces_smaller_batch():
            self._expected_traces = 1
            self._segment_at = None  # a training pays for it once: the stretch it fell into is not counted
            return
        if not self._by_epochs and self._calls > self._counted_calls:
            return
        if not first_of_epoch and not self._ready:
            self._call_times.append(seconds)
        if self._open is not None and (self._by_epochs or not first_of_epoch):
            self._open.call_seconds.append(seconds)
        if self._by_epochs:
            self._watch_for_long_epoch(now)
            if first_of_epoch and self._in_laps:
                self._lap_ended(now)
        elif first_of_epoch:
            self._open_segment(now)
        elif self._open is not None:
            self._measure_by_steps(now)
        elif not self._ready:
            self._warm_up_by_steps(now)
        if not self._by_epochs and self._calls == self._counted_calls:
            self._close_segment()

    def _traces_smaller_batch(self) -> bool:
        """Whether this call met the epoch's smaller last batch for the first time, and so compiled for it."""
        return (
            not self._smaller_batch_traced
            and self._training.examples_missing_from_last_step > 0
            and self._training.ends_epoch(self._calls)
        )

    def _report_first_call(self) -> None:
        self._training.synchronise()
        loss = self.last_loss
        self._first_call_at = self._clock()
        self._first_call_seconds = self._first_call_at - self._last_call_at
        self._require_finite(loss)
        self._tuner.send(FirstStep(at=time.monotonic(), loss=loss))
        self._last_call_at = self._clock()

    def _iterations(self) -> int:
        if self._training.iterations is None:
            return self._total_calls * self._training.steps_per_call
        return self._training.iterations()

    def _steps_since(self, iterations: int, calls: int) -> int:
        """Optimizer steps since `iterations` and the number of `calls` were these.

        Never more than the calls that came back can have taken: where Keras does not know an epoch's length, it
        calls once more than there are batches, and that call counts an iteration before it finds no data.
        Where a loss scale skips steps they are not counted by the optimizer, and cost as much: the calls are what was
        trained, where every call has all of its steps, as of data that never ends, and where it skipped every step.
        """
        most = (self._total_calls - calls) * self._training.steps_per_call
        if self._training.endless:
            return most
        counted = self._iterations() - iterations
        return min(counted, most) if counted > 0 else most

    def _steps_trained(self) -> int:
        """Batches trained on so far, whether they changed the weights or not; at least so many, if in doubt."""
        steps, known = self._calls * self._training.steps_per_call, self._training.steps_per_epoch
        return self._steps_of_ended_epochs + (steps if known is None else min(steps, known))

    def _examples_trained(self) -> int | None:
        """Examples trained on so far, an epoch's smaller last step counted as a whole one until it ends.

        None where nobody knows how many steps the last call of an epoch had.
        """
        if self._training.steps_per_epoch is None and not self._training.endless:
            return None
        missing = self._ended_epochs * self._training.examples_missing_from_last_step
        return max(0, self._steps_trained() * self._training.batch_size - missing)

    def _iterations_if_unknown(self) -> int:
        """Where the steps of an epoch are known, they need not be read, which takes a tenth of a millisecond."""
        return self._iterations() if self._training.steps_per_epoch is None else 0

    def _steps_of_epoch(self) -> int:
        """Steps of the epoch or lap that ends; what is known of the dataset counts more than what an optimizer says.

        An optimizer counts updates: fewer than steps where gradients are accumulated or a loss scale skips.
        """
        known = self._training.steps_per_epoch
        if known is None:
            return self._steps_since(self._epoch_iterations, self._epoch_calls)
        # Fewer, where a dataset that batches by itself drops more than anybody can tell.
        called = (self._total_calls - self._epoch_calls) * self._training.steps_per_call
        return min(known, called)

    def _steps_of_segment(self) -> int:
        """Steps since the segment began, within one epoch."""
        known = self._training.steps_per_epoch
        if known is None:
            return self._steps_since(self._segment_iterations, self._segment_calls)
        before = self._calls - (self._total_calls - self._segment_calls)
        per_call = self._training.steps_per_call
        return max(1, min(self._calls * per_call, known) - min(before * per_call, known))

    def _require_finite(self, loss: float | None) -> None:
        if loss is not None and not math.isfinite(loss):
            raise TrainingFailed(
                Outcome.NONFINITE, f"the training loss became {loss} by step {self._iterations()}"
            )

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

    def _elapsed(self, now: float) -> float:
        assert self._first_call_at is not None
        return now - self._first_call_at

    def _watch_for_long_epoch(self, now: float) -> None:
        if self._open is not None or self._ready or self._calls < 2:
            return
        if self._training.ends_epoch(WHOLE_EPOCH_CALLS):
            return
        if self._training.ends_epoch(self._calls):  # perhaps it compiled for a smaller batch
            return
        if self._training.endless:
            raise LongEpoch  # what a usual call takes shows later
        elapsed = now - self._epoch_began_at - (self._first_call_seconds if self._fits_first_epoch else 0)
        if elapsed < ENDLESS_EPOCH_SECONDS:
            return
        steps = self._training.steps_per_epoch
        if steps is None and self._calls <= WHOLE_EPOCH_CALLS:
            return  # it may end in a moment, and an epoch needs more calls to be timed by steps
        watched = max(self._warmup_seconds, self._epoch_seconds)
        too_long = False
        if (
            steps is not None and len(self._call_times) >= FEWEST_CALLS_TO_EXTRAPOLATE
        ):  # the first ones may be slow
            too_long = _median(self._call_times) * steps / self._training.steps_per_call > 2 * watched
        if too_long or elapsed > watched:
            self._note_compile_seconds()
            raise LongEpoch

    def _warm_up_by_epochs(self, now: float) -> None:
        if self._in_laps:
            return  # it is warm, and the next epoch's first call is waited for
        if self._fits_first_epoch:
            self._fits_first_epoch = False
            self._first_epoch_last_call = self._call_times[-1] if self._call_times else None
            self._call_times.clear()
            return
        seconds = now - self._epoch_began_at
        so_far = sorted([*self._epoch_times, seconds])
        usual = so_far[(len(so_far) - 1) // 2]  # one that comes later may have stalled
        if usual > self._epoch_seconds and self._calls > WHOLE_EPOCH_CALLS:
            self._note_compile_seconds()
            raise LongEpoch
        self._epoch_times.append(seconds)
        self._settled = is_steady(self._epoch_times)
        if self._settled or (self._elapsed(now) >= self._warmup_seconds and len(self._epoch_times) >= 2):
            if self._settled is None:  # the cap holds too few epochs to tell
                self._settled = self._last_epochs_agree()
            self._in_laps = (
                self._calls > WHOLE_EPOCH_CALLS or _median(self._epoch_times) <= self._epoch_seconds
            )
            if not self._in_laps:
                self._hold_ready(self._settled, now)

    def _last_epochs_agree(self) -> bool | None:
        """Whether the calls of the last three epochs do not say that each was clearly faster than the one before.

        Of two, a machine that is restless for a second would say that too often. First calls do not count.
        """
        calls = self._calls_of_epoch - 1
        if calls < 1 or len(self._call_times) < 3 * calls:
            return None
        times = self._call_times[-3 * calls :]
        return agree(times[:calls], times[calls : 2 * calls], times[2 * calls :])

    def _warm_up_by_steps(self, now: float) -> None:
        settled = is_steady(self._call_times)
        if settled or (now - self._fit_began_at >= self._warmup_seconds and len(self._call_times) >= 3):
            self._close_segment()
            self._hold_ready(settled, now)
            self._open_segment(self._clock())

    def _note_compile_seconds(self) -> None:
        """Trace and compile: the first call's excess, and a smaller last batch's, over a usual call."""
        if self._compile_seconds is not None:
            return
        calls = self._call_times or self._epoch_times  # an epoch without a second call is one call
        usual = _median(calls) if calls else 0.0
        excess = max(0.0, self._first_call_seconds - usual)
        if self._first_epoch_last_call is not None and self._training.examples_missing_from_last_step:
            excess += max(0.0, self._first_epoch_last_call - usual)
        self._compile_seconds = excess

    def _hold_ready(self, settled: bool | None, now: float) -> None:
        self._training.synchronise()
        self._note_compile_seconds()
        epoch_seconds = _median(self._epoch_times) if self._by_epochs else None
        overhead = self._overhead_of_short_epochs() if self._by_epochs else self._overhead
        assert self._compile_seconds is not None
        self._tuner.send(
            Ready(
                timed_by="epochs" if self._by_epochs else "steps",
                settled=settled,
                warmup_seconds=self._elapsed(now) + self._counting_seconds,  # each process takes them
                compile_seconds=self._compile_seconds,
                epoch_overhead_seconds=overhead,
                call_seconds=self.call_seconds,
                epoch_seconds=epoch_seconds,
                warmup_steps=self._total_calls * self._training.steps_per_call,
                run_in_seconds=epoch_seconds or 0.0 if self._in_laps else 0.0,
                stalled_ends=self._stalled_ends,
                uncounted_seconds=self._uncounted_seconds + self._compiling_still(),
            )
        )
        self._ready = True
        self._retraces()  # those of the warm-up are no retraces
        self._skipped_steps()
        self._hold()

    @property
    def _may_end_anywhere(self) -> bool:
        """Whether an epoch has an end, and nobody knows where."""
        return self._training.steps_per_epoch is None and not self._training.endless

    def _compiling_still(self) -> float:
        """Seconds that an epoch's smaller last batch will take to compile for, where none was met so far."""
        if self._by_epochs or self._smaller_batch_traced:
            return 0.0
        smaller = self._training.examples_missing_from_last_step > 0
        smaller = smaller or (self._may_end_anywhere and not self._training.drop_remainder)
        return (self._compile_seconds or 0.0) if smaller else 0.0

    def _overhead_of_short_epochs(self) -> float | None:
        """What an epoch takes beyond its steps at the usual pace; needs two calls in an epoch."""
        if not self._call_times:
            return None
        return max(0.0, _median(self._epoch_times) - self._calls_of_epoch * _median(self._call_times))

    # --------------------------------------------------------------------------------------------- slices

    def _hold(self) -> None:
        """Freeze, then do as the tuner says."""
        self._freeze()
        self._lap_at = None
        command = self._tuner.receive()
        if isinstance(command, Finish):
            raise TrainingEnded(command)
        self._slices_left = command.slices
        self._open_slice(command.seconds)

    def _open_slice(self, seconds: float) -> None:
        # The number of epochs is set beforehand: to end a slice once its time is up would prefer slow epochs.
        usual = _median(self._epoch_times) if self._epoch_times else seconds
        self._open = _OpenSlice(
            target_seconds=seconds,
            target_epochs=max(1, math.ceil(seconds / max(usual, 1e-9) - 1e-6)),
            cpu_at_start=_cpu_seconds(),
            counters=self._counters(),
        )
        self._last_call_at = self._clock()

    def _count_epoch(self, now: float, seconds: float) -> None:
        current = self._open
        assert current is not None
        steps = self._steps_of_epoch()
        current.epochs += 1
        current.steps += steps
        current.examples += self._training.examples_in_epoch(steps)
        current.seconds += seconds
        if current.epochs >= current.target_epochs:
            self._report_slice(current, now)

    def _begin_lap(self) -> None:
        self._epoch_iterations = self._iterations_if_unknown()
        self._epoch_calls = self._total_calls
        self._lap_at = self._clock()

    def _lap_ended(self, now: float) -> None:
        """An epoch's first call has come back: a lap ends, and the next begins."""
        began = self._lap_at
        if self._open is None:
            self._hold_ready(self._settled, now)
        elif began is None:
            self._training.synchronise()
            self._skipped_steps()  # those of the run-in are nobody's
            self._open.call_seconds.clear()
            self._begin_lap()
        else:
            self._count_epoch(now, now - began)
            if self._lap_at is not None:
                self._begin_lap()

    def _open_segment(self, now: float) -> None:
        self._segment_at = now
        self._counted_up_to = None
        self._segment_iterations = self._iterations()
        self._segment_calls = self._total_calls

    def _close_segment(self) -> None:
        """Count what was trained since the segment began, up to the last call's end.

        Up to the end of the one before where nobody knows whether it was an epoch's last: that may have held a smaller
        batch, or fewer steps, and have compiled for it.
        """
        if self._segment_at is None:
            return
        current, began = self._open, self._segment_at
        self._segment_at = None
        may_be_last = self._may_end_anywhere
        counted_at, counted_calls = self._call_before_at, self._total_calls - 1
        if self._counted_up_to is not None and self._counted_up_to[1] <= counted_calls:
            counted_at, counted_calls = self._counted_up_to
        calls = (counted_calls if may_be_last else self._total_calls) - self._segment_calls
        if current is None or calls < 1:
            return
        if may_be_last:
            steps = calls * self._training.steps_per_call
            current.seconds += counted_at - began
            current.steps += steps
            current.examples += steps * self._training.batch_size
            return
        steps = self._steps_of_segment()
        ended = self._training.ends_epoch(self._calls)
        missing = self._training.examples_missing_from_last_step if ended else 0
        current.seconds += self._last_call_at - began
        current.steps += steps
        current.examples += max(1, steps * self._training.batch_size - missing)

    def _measure_by_steps(self, now: float) -> None:
        current = self._open
        assert current is not None
        assert self._segment_at is not None
        if self._counted_up_to is None:
            if current.seconds + (now - self._segment_at) < current.target_seconds:
                return
            self._training.synchronise()
            self._last_call_at = self._clock()
            if self._may_end_anywhere:  # the next call shows that this one was not an epoch's last
                self._counted_up_to = self._last_call_at, self._total_calls
                return
        self._close_segment()
        self._report_slice(current, now)
        self._open_segment(self._clock())

    def _report_slice(self, current: _OpenSlice, now: float) -> None:
        self._training.synchronise()
        if self._by_epochs:
            current.seconds += self._clock() - now
        loss = self.last_loss
        self._require_finite(loss)
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
                    trained_examples=self._examples_trained(),
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
        skipped, before = self._steps_trained() - self._training.updates(), self._skipped_before
        self._skipped_before = skipped
        return max(0, skipped - before)


def _cpu_seconds() -> float:
    """Processor time of this process and its ended children, all threads."""
    return sum(os.times()[:4])


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


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
