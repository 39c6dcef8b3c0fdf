"""Times a running `model.fit`.

The clock wraps the model's train function: `fit`, its loop and its callbacks stay the user's. A *call* is one call of
the train function: `steps_per_execution` steps. The clock watches the warm-up, reports, freezes the process, and obeys
the tuner: each `Measure` asks for one slice, or for several without a pause (`worker/slices.py`).

| epochs | how they are timed |
|---|---|
| short, or of very few calls | whole, boundaries included (`worker/epochs.py`) |
| long, or without an end | by steps (`worker/steps.py`); their boundaries are charged apart (`worker/boundary.py`) |

An epoch is found to be long while it runs. Where it is not known yet what lies between two epochs, `LongEpoch` leaves
`fit`, so that it can be measured; a second `fit` is timed by steps. Otherwise the clock changes to steps within the
same `fit`.

This module knows no TensorFlow: what it needs of it is handed in.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotune.record import Outcome
from autotune.stats.steady_state import recent_mean
from autotune.worker.epochs import ByEpochs
from autotune.worker.failures import TrainingFailed
from autotune.worker.gauges import Gauge
from autotune.worker.messages import FirstStep, Ready
from autotune.worker.slices import Slices, Tuner, finite_loss, freeze_own_group
from autotune.worker.steps import BySteps
from autotune.worker.training import Progress, Training

if TYPE_CHECKING:
    from autotune.worker.boundary import BetweenEpochs


FEWEST_EPOCHS = 3
"""Of a training that begins anew when it has ended: with fewer, none of them could be timed whole."""


class LongEpoch(Exception):
    """Epochs are to be timed by steps, and what lies between two of them must be measured first."""


@dataclass
class WarmUp:
    """What the warm-up has shown so far. Times in seconds.

    Args:
        cap_seconds: Its usual length at most, from the end of its first call.
        since: When its first call had ended.
        call_seconds: Of calls, each epoch's first one left out.
        epoch_seconds: Of whole epochs.
        compiling_seconds: Of calls that trace and compile.
    """

    cap_seconds: float
    since: float = math.inf
    call_seconds: list[float] = field(default_factory=list)
    epoch_seconds: list[float] = field(default_factory=list)
    compiling_seconds: list[float] = field(default_factory=list)

    @property
    def usual_call_seconds(self) -> float:
        """What a call takes, by the last ones; a whole epoch where that is a single call."""
        return max(recent_mean(self.call_seconds or self.epoch_seconds), 1e-9)

    @property
    def compile_seconds(self) -> float:
        """Trace and compile: what the calls that do so took beyond a usual one."""
        usual = statistics.median(self.call_seconds or self.epoch_seconds or [0.0])
        return sum(max(0.0, seconds - usual) for seconds in self.compiling_seconds)


class StepClock:
    """Times one training; see the module's docstring.

    Args:
        training: What is timed.
        tuner: Where reports go and commands come from.
        warmup_seconds: Usual cap on the warm-up after the first step.
        epoch_seconds: Longest epoch that is timed whole, unless it has very few calls.
        between_epochs: What lies between two epochs. None to leave `fit` where epochs are long.
        gauges: What is measured in each slice.
        freeze: Stops the process; comes back when the tuner lets it go on.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        training: Training,
        tuner: Tuner,
        *,
        warmup_seconds: float,
        epoch_seconds: float,
        between_epochs: BetweenEpochs | None = None,
        gauges: Sequence[Gauge] = (),
        freeze: Callable[[], None] = freeze_own_group,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.progress = Progress(training)
        self.warm_up = WarmUp(cap_seconds=warmup_seconds)
        self.slices = Slices(self.progress, tuner, gauges, freeze=freeze, clock=clock)
        self.now = clock
        self.iterator: Any = None  # what the train function was last called with
        self.logs: Any = None  # what it reported last
        self.epoch_logs: Any = None  # ... of a whole epoch: Keras begins its means anew in each
        self._tuner = tuner
        self._between = between_epochs
        self._epochs_before_restart = 0
        self._first_call_ended_at = math.inf
        self._last_call_at = clock()
        self._timing: ByEpochs | BySteps
        if training.examples is None:
            self._timing = BySteps(self, None)
        else:
            self._timing = ByEpochs(self, longest_seconds=epoch_seconds)

    def wrap(self, train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`train_function`, with every call of it timed."""

        def timed(iterator: Any) -> Any:
            self.iterator = iterator
            self.slices.outside(self.now() - self._last_call_at)
            logs = train_function(iterator)
            self.called(logs)
            return logs

        return timed

    def epoch_began(self) -> None:
        """`fit` is about to make the epoch's iterator."""
        self.progress.epoch_began()

    def epoch_ended(self) -> None:
        """`fit` has trained, and validated if it does, one whole epoch.

        Raises:
            TrainingFailed: The dataset cannot be read once more.
        """
        if self.progress.calls == 0 or self.progress.training.examples is None:
            raise self._exhausted()
        self.progress.epoch_ended()
        self.epoch_logs = self.logs

    def restarted(self, began_at: float) -> None:
        """The whole training has begun anew, at this time of the clock: what was going on is not counted."""
        epochs = self.progress.ended_epochs - self._epochs_before_restart
        self._epochs_before_restart = self.progress.ended_epochs
        self.progress.epoch_began()
        self._timing.dropped()
        if epochs < FEWEST_EPOCHS and isinstance(self._timing, ByEpochs) and not self._timing.is_warm:
            self.change_to_steps()
        self._last_call_at = began_at

    def time_by_steps(self, between_epochs: BetweenEpochs) -> None:
        """From the next `fit` on, time by steps; between its epochs lies what is said here."""
        self._timing = BySteps(self, between_epochs)
        self.warm_up.since = math.inf
        self.warm_up.call_seconds.clear()
        self._last_call_at = self.now()

    def change_to_steps(self) -> None:
        """Time by steps from now on.

        Raises:
            LongEpoch: What lies between two epochs must be measured first.
        """
        if self._between is None:
            raise LongEpoch
        self._timing = BySteps(self, self._between)

    def hold_ready(self, *, settled: bool | None, **told: Any) -> None:
        """Report that the training is warm, and freeze it until the first slice is asked for.

        Args:
            settled: Whether it has reached its steady state; None where too few steps ran to tell.
            told: Fields of `Ready` that depend on how it is timed.
        """
        warmup_seconds = self.now() - self._first_call_ended_at
        self.progress.training.synchronise()
        self._tuner.send(
            Ready(
                settled=settled,
                warmup_seconds=warmup_seconds,
                compile_seconds=self.warm_up.compile_seconds,
                call_seconds=self.warm_up.usual_call_seconds,
                warmup_steps=self.progress.steps,
                **told,
            )
        )
        self.slices.hold()

    def called(self, logs: Any) -> None:
        """A call of the train function has returned these numbers.

        Raises:
            TrainingEnded: The tuner asks for the closing figures.
        """
        self.logs = logs
        self.progress.called()
        first = self._first_call_ended_at == math.inf
        if first:
            self.progress.training.synchronise()
        now = self.now()
        seconds = now - self._last_call_at
        self.warm_up.since = min(self.warm_up.since, now)
        if first:
            self._first_call_ended_at = now
            self.warm_up.compiling_seconds.append(seconds)
            self._tuner.send(FirstStep(loss=finite_loss(self.logs, step=1)))
        self._timing.called(now, seconds)
        self._last_call_at = self.now()  # what was done here is no part of the next call

    def _exhausted(self) -> TrainingFailed:
        reason = "the dataset was exhausted by its first pass: the second got nothing"
        hint = (
            "dataset() must return a Dataset that starts afresh each epoch; a Python generator that is consumed once "
            "does not (from_generator takes a function that returns a new one)."
        )
        if self._first_call_ended_at == math.inf and not self.progress.training.steps_per_epoch:
            reason = "the dataset yields no batch: it is empty, or smaller than one batch with drop_remainder"
            hint = "dataset() must return a tf.data.Dataset with at least one batch."
        return TrainingFailed(Outcome.ERROR, reason, hint=hint, input_error=True)
