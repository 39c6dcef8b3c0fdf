"""What the study asks of a trial that runs, whether it is real, simulated or recorded.

Everything above `executors/process.py` works on these interfaces alone, so that search, statistics and reports
are tested in milliseconds on `executors/simulated.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from autotune.record import Boundary, Outcome, Slice
from autotune.space.configuration import Configuration
from autotune.worker.messages import (
    CONFIRMATION_EPOCH_SECONDS,
    CONFIRMATION_WARMUP_SECONDS,
    SEARCH_EPOCH_SECONDS,
    SEARCH_WARMUP_SECONDS,
    Finished,
    LossCurves,
    LossRuns,
    Ready,
    Started,
    StartedByImport,
)
from autotune.workloads.workload import WorkloadFacts


class TrialFailed(Exception):
    """A trial ended by itself, or was killed at its time limit. Data, not a traceback at the user.

    `trial` is the number of the trial that failed, once the tuning loop has noted it.

    Args:
        outcome: How it ended.
        reason: Why, in one sentence.
        hint: The next step, where there is one.
        detail: The user's own frames of a traceback.
        log_tail: The last lines of the trial's log.
        input_error: Whether the workload itself is at fault, whatever the configuration.
    """

    def __init__(
        self,
        outcome: Outcome,
        reason: str,
        *,
        hint: str = "",
        detail: str = "",
        log_tail: str = "",
        input_error: bool = False,
    ) -> None:
        super().__init__(f"{outcome}: {reason}")
        self.outcome = outcome
        self.reason = reason
        self.hint = hint
        self.detail = detail
        self.log_tail = log_tail
        self.input_error = input_error
        self.trial: int | None = None

    @property
    def whole(self) -> str:
        """Why, the next step and the user's own frames, for a record: each on lines of its own."""
        return "\n".join(part for part in (self.reason, self.hint, self.detail) if part)


class DeviceUnavailable(TrialFailed):
    """The device is lost, or a process that is not of this run has it: of the configuration that says nothing.

    Args:
        reason: What was seen.
        hint: The next step.
        detail: As of any failure.
        log_tail: The same.
    """

    def __init__(self, reason: str, *, hint: str, detail: str = "", log_tail: str = "") -> None:
        super().__init__(Outcome.ERROR, reason, hint=hint, detail=detail, log_tail=log_tail)


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """What is known of a trial once it is warm and frozen. Times in seconds.

    Args:
        launch_seconds: From the request to the fork.
        first_step_seconds: From the request to the end of the first train step, without what counting took.
        ready_seconds: From the request to the steady state, without that as well.
        first_loss: Training loss after the first call.
    """

    started: Started
    ready: Ready
    launch_seconds: float
    first_step_seconds: float
    ready_seconds: float
    first_loss: float | None


class LiveTrial(Protocol):
    """One trial process. Each method raises `TrialFailed` when the trial fails or takes too long."""

    def warm_up(self, timeout_seconds: float) -> WarmUp:
        """Wait until the trial is warm; it is frozen then."""

    def measure(self, seconds: float, timeout_seconds: float) -> Slice:
        """Let it train for about `seconds`, then freeze it again."""

    def measure_continuously(self, seconds: float, count: int, timeout_seconds: float) -> tuple[Slice, ...]:
        """Let it train for `count` slices without a pause between them, then freeze it again."""

    def finish(self, input_wait_seconds: float, timeout_seconds: float) -> Finished:
        """Take the closing figures, and wait for the process to end."""

    def loss_curves(self, timeout_seconds: float) -> LossCurves:
        """Wait for the losses of a trial that was launched for them, and for the process to end."""

    def kill(self) -> None:
        """End it and all its children now; does nothing when it has ended."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What the first trial learned of the dataset, told to the later ones.

    Args:
        examples: Per epoch; None when endless or unknown.
        validation_examples: The same of validation data that does not say how long it is.
        validation_uncounted: Whether that took too long to count.
        endless: Whether the dataset has no end.
    """

    examples: int | None
    validation_examples: int | None = None
    validation_uncounted: bool = False
    endless: bool

    @classmethod
    def found_by(cls, started: Started) -> Data:
        """What a trial has found."""
        return cls(
            examples=started.examples,
            validation_examples=started.validation_examples,
            validation_uncounted=started.validation_uncounted,
            endless=started.endless,
        )


@dataclass(frozen=True, kw_only=True)
class TrialTiming:
    """How a trial is timed.

    Args:
        epoch_seconds: Epochs up to this long are timed whole.
        warmup_seconds: The longest usual warm-up after the first step.
        boundary: What lies between two epochs, taken over from another trial; None to measure it.
    """

    epoch_seconds: float = SEARCH_EPOCH_SECONDS
    warmup_seconds: float = SEARCH_WARMUP_SECONDS
    boundary: Boundary | None = None


IN_SEARCH = TrialTiming()
IN_CONFIRMATION = TrialTiming(
    epoch_seconds=CONFIRMATION_EPOCH_SECONDS, warmup_seconds=CONFIRMATION_WARMUP_SECONDS
)


class Executor(Protocol):
    """Where trials run. A *seat* is where one trial and its baseline can run; seats work at the same time.

    Attributes:
        seats: Their names, at least one.
        started_by_import: What importing the workload started that no fork survives. Known once it is open; None where
            there is no such thing.
    """

    seats: tuple[str, ...]
    started_by_import: StartedByImport | None

    def open(self) -> WorkloadFacts:
        """Import the workload, and say what it is."""

    def launch(
        self,
        configuration: Configuration,
        *,
        seat: str = "",
        log: str,
        data: Data | None,
        timing: TrialTiming = IN_SEARCH,
        losses: LossRuns | None = None,
    ) -> LiveTrial:
        """Start a trial on a seat, the first one where none is named.

        With `losses` nothing is timed: its answer is `loss_curves`.
        """

    def apart(self, one: Configuration, other: Configuration) -> bool:
        """Whether trials of the two are forks of different templates."""

    def close(self) -> None:
        """End everything."""


class Clock(Protocol):
    """Seconds that only go forward; simulated trials bring their own."""

    def __call__(self) -> float:
        """Now."""
