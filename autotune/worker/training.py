"""What is trained: how large its steps and epochs are, and how much of it was trained so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the clock must know of the training it times.

    Args:
        steps_per_call: The knob `steps_per_execution`.
        batch_size: Examples per full step.
        examples: Examples per epoch; None when endless or unknown.
        drop_remainder: Whether a smaller last batch is dropped.
        synchronise: Waits until the devices have done what they were given.
        retraces: How often the train function was traced or compiled since this was last called; None where that
            cannot be seen.
        updates: Reads how many steps changed the weights so far; None where no loss scale skips any.
        endless: Whether the dataset is known to have no end.
        count: Counts the examples that an epoch trains on, by reading one; None where epochs have no end.
        device_bytes: Reads what TensorFlow holds on a device; None without one.
    """

    steps_per_call: int
    batch_size: int
    examples: int | None
    drop_remainder: bool
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
    def may_end_anywhere(self) -> bool:
        """Whether an epoch has an end, and it is unknown where."""
        return self.steps_per_epoch is None and not self.endless

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
        """Whether the call with this number, from 1, is the last of an epoch; False where that is unknown."""
        steps = self.steps_per_epoch
        return steps is not None and calls * self.steps_per_call >= steps


class Mark(NamedTuple):
    """A point of a training.

    Args:
        at: When it was reached.
        calls: Calls of the train function up to then.
    """

    at: float
    calls: int


class Progress:
    """How much was trained so far.

    Attributes:
        training: What is trained.
        calls: Calls of the train function in this epoch.
        total_calls: The same in all epochs.
        calls_of_last_epoch: The same in the last whole epoch.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.calls = 0
        self.total_calls = 0
        self.calls_of_last_epoch = 0
        self._ended_epochs = 0
        self._steps_before_epoch = 0

    def called(self) -> None:
        """The train function has returned."""
        self.calls += 1
        self.total_calls += 1

    def epoch_began(self) -> None:
        """A new epoch begins; the one before may have been left in its midst."""
        self._steps_before_epoch = self.steps
        self.calls = 0

    def epoch_ended(self) -> None:
        """A whole epoch has been trained."""
        if self.training.steps_per_epoch is None:  # its last call may have had a single step
            self._steps_before_epoch -= self.training.steps_per_call - 1
        self._ended_epochs += 1
        self.calls_of_last_epoch = self.calls

    def mark(self, at: float) -> Mark:
        """This point of the training."""
        return Mark(at, self.total_calls)

    @property
    def steps(self) -> int:
        """Steps so far; at least so many where an epoch's length is unknown."""
        steps, known = self.calls * self.training.steps_per_call, self.training.steps_per_epoch
        return self._steps_before_epoch + (steps if known is None else min(steps, known))

    @property
    def examples(self) -> int | None:
        """Examples so far, the last step of this epoch counted as a full one; None where epochs may end anywhere."""
        if self.training.may_end_anywhere:
            return None
        missing = self._ended_epochs * self.training.examples_missing_from_last_step
        return max(0, self.steps * self.training.batch_size - missing)

    def steps_since(self, mark: Mark) -> int:
        """Steps since a mark in the same epoch, or since the same point of the epoch before.

        A dataset may yield fewer batches than it says: there are no more steps than calls.
        """
        per_call, known = self.training.steps_per_call, self.training.steps_per_epoch
        called = self.total_calls - mark.calls
        if known is None:
            return called * per_call
        before = self.calls - called
        if before <= 0:
            return min(known, called * per_call)
        return max(1, min(self.calls * per_call, known) - min(before * per_call, known))
