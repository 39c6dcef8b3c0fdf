"""The sizes and the progress of a training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.data.record import Boundary

WHOLE_EPOCH_CALLS = 3
"""An epoch of so few calls is timed whole, however long: by steps, its first and last call would not count."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The sizes of a training that is timed."""

    steps_per_call: int  # the knob `steps_per_execution`
    batch_size: int  # examples per full step
    examples: int | None  # per epoch; None if the training is infinite
    drop_remainder: bool  # a smaller last batch is dropped
    synchronise: Callable[[], None]  # waits until the devices have done what they were given
    charged_per_epoch_seconds: float = 0.0  # an epoch's share of what a further call of `fit` costs

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of one epoch; None without an end."""
        if self.examples is None:
            return None
        incomplete = 0 if self.drop_remainder else self.batch_size - 1
        return (self.examples + incomplete) // self.batch_size

    @property
    def full_calls(self) -> int | None:
        """Calls of an epoch that have all their steps, and no smaller batch; None without an end."""
        return None if self.examples is None else self.examples // self.batch_size // self.steps_per_call

    @property
    def has_few_calls(self) -> bool:
        """True if an epoch has so few calls that it is always timed whole."""
        steps = self.steps_per_epoch
        return steps is not None and steps <= WHOLE_EPOCH_CALLS * self.steps_per_call

    @property
    def examples_missing_from_last_step(self) -> int:
        """The examples by which an epoch's last step is smaller than the others."""
        return 0 if self.examples is None or self.drop_remainder else -self.examples % self.batch_size

    def examples_in_epoch(self, steps: int) -> int:
        """Return the examples of a whole epoch that took `steps` steps."""
        missing = self.examples_missing_from_last_step if steps == self.steps_per_epoch else 0
        return steps * self.batch_size - missing

    @property
    def examples_per_epoch(self) -> int | None:
        """Examples that a whole epoch trains on; None without an end."""
        steps = self.steps_per_epoch
        return None if steps is None else self.examples_in_epoch(steps)

    def charged_seconds(self, examples: int) -> float:
        """Return the cost of further calls of `fit` for `examples`."""
        whole = self.examples_per_epoch
        return self.charged_per_epoch_seconds * examples / whole if whole else 0.0


@dataclass(frozen=True, kw_only=True)
class BetweenEpochs:
    """The cost between two long epochs, and the steps of them that are timed."""

    boundary: Boundary  # what an epoch costs beyond its steps
    taken_over: bool = False  # another process measured it
    counted_calls: int | None = None  # an epoch's first calls that count; None for all. A shuffle buffer feeds the rest


@dataclass
class Progress:
    """The progress of a training so far."""

    training: Training
    calls: int = 0  # of the train function in this epoch
    calls_of_last_epoch: int = 0  # in the last epoch that ended by itself; 0 before
    ended_epochs: int = 0  # whole ones
    _steps_before_epoch: int = 0

    def epoch_began(self) -> None:
        """Begin a new epoch; the one before may have ended early."""
        self._steps_before_epoch = self.steps
        self.calls = 0

    def steps_in(self, calls: int) -> int:
        """Return the steps of an epoch's first calls. The last call may have fewer than the others."""
        steps, known = calls * self.training.steps_per_call, self.training.steps_per_epoch
        return steps if known is None else min(steps, known)

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._steps_before_epoch + self.steps_in(self.calls)

    @property
    def examples(self) -> int:
        """Examples so far."""
        missing = self.ended_epochs * self.training.examples_missing_from_last_step
        return max(0, self.steps * self.training.batch_size - missing)
