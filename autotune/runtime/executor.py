"""What the study asks of a trial that runs, whether it is real, simulated or recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from autotune.data.facts import WorkloadFacts
from autotune.data.hardware import Machine
from autotune.data.record import Outcome, Place, Slice
from autotune.runtime.protocol import Data as Data
from autotune.runtime.protocol import Finished, LossCurves, LossRuns, Ready, Started, StartedByImport
from autotune.runtime.protocol import TrialTiming as TrialTiming
from autotune.space.configuration import Configuration


class TrialFailed(Exception):
    """A trial ended by itself, or was killed at its time limit. Data, not a traceback at the user."""

    def __init__(
        self,
        outcome: Outcome,
        reason: str,  # one sentence
        *,
        hint: str = "",  # the next step
        detail: str = "",  # the user's own frames of a traceback
        log_tail: str = "",
        input_error: bool = False,  # the workload itself is at fault, whatever the configuration
    ) -> None:
        super().__init__(outcome, reason)  # what an exception that was pickled is made of again
        self.outcome = outcome
        self.reason = reason
        self.hint = hint
        self.detail = detail
        self.log_tail = log_tail
        self.input_error = input_error
        self.trial: int | None = None  # its number, once the tuning loop has noted it

    def __str__(self) -> str:
        """How it ended, and why."""
        return f"{self.outcome}: {self.reason}"

    @property
    def whole(self) -> str:
        """Why, the next step and the user's own frames, for a record: each on lines of its own."""
        return "\n".join(part for part in (self.reason, self.hint, self.detail) if part)


class DeviceUnavailable(TrialFailed):
    """The device is lost, or a process of another run has it. That says nothing of the configuration."""


class SeatLost(TrialFailed):
    """A process of the tuner's own on a seat is gone: the trial says nothing, and is run again on another seat."""


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """What is known of a trial once it is warm and frozen."""

    started: Started
    ready: Ready
    launch_seconds: float  # from the request to the fork
    first_step_seconds: float  # from the request to the end of the first train step, without counting
    ready_seconds: float  # from the request to the steady state, without counting
    first_loss: float | None  # training loss after the first call


class LiveTrial(Protocol):
    """One trial process. Each method raises `TrialFailed` when the trial fails or takes too long."""

    def warm_up(self, timeout_seconds: float) -> WarmUp:
        """Wait until the trial is warm; it is frozen then."""

    def measure(self, seconds: float, timeout_seconds: float) -> Slice:
        """Let it train for about `seconds`, then freeze it again."""

    def measure_continuously(self, seconds: float, count: int, timeout_seconds: float) -> tuple[Slice, ...]:
        """Let it train for `count` slices without a pause between them, then freeze it again."""

    def finish(self, input_wait_seconds: float, timeout_seconds: float, *, thorough: bool = False) -> Finished:
        """Take the closing figures, and wait for the process to end.

        Those of the baseline and of leaders are `thorough`: ceilings, and a profile where one is wanted.
        """

    def loss_curves(self, timeout_seconds: float) -> LossCurves:
        """Wait for the losses of a trial that was launched for them, and for the process to end."""

    def kill(self) -> None:
        """End it and all its children now; does nothing when it has ended."""


IN_SEARCH = TrialTiming(epoch_seconds=1.0, warmup_seconds=1.5)


class Executor(Protocol):
    """Where trials run. A *seat* is where one trial and its baseline can run; seats work at the same time.

    Attributes:
        seats: Their names, at least one once it is open. Where it is `elastic`, there may be more after a `refresh`.
        whole: The name of a further seat that has what all others share, as all cores of a host. A recipe speaks of it,
            so confirmations run on it while the others rest. None where each seat is a whole.
        machine: What the first seat runs on; None for the driver's own machine.
        isolation: How trials are kept apart: forks of a template, or fresh interpreters. Known once it is open.
        started_by_import: What importing the workload started that no fork survives. Known once it is open; None where
            there is no such thing.
    """

    seats: tuple[str, ...]
    elastic: bool
    whole: str | None
    machine: Machine | None
    isolation: Literal["template", "spawn"]
    started_by_import: StartedByImport | None

    def place(self, seat: str) -> Place:
        """Where the trials of a seat run."""

    def refresh(self) -> None:
        """Look for seats that have come or gone; returns at once."""

    def restart(self, seat: str) -> None:
        """Make a seat anew that was lost. Raises SeatLost."""

    def drop(self, seat: str) -> None:
        """Use a seat no more."""

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
        """Start a trial on a seat, the first one where none is named. Raises TrialFailed, SeatLost.

        With `losses` nothing is timed: its answer is `loss_curves`.
        """

    def apart(self, one: Configuration, other: Configuration) -> bool:
        """Whether trials of the two are forks of different templates."""

    def close(self) -> None:
        """End everything."""


Clock = Callable[[], float]
"""Seconds that only go forward; simulated trials bring their own."""
