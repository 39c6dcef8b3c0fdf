"""The interface through which the study runs trials, whether they are real, simulated or recorded.

An *executor* is a pool of *seats*; a seat has the devices on which one trial and its baseline run.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from autotune.data.facts import Machine, WorkloadFacts
from autotune.data.record import Outcome, Place, Slice
from autotune.recipe.apply import environment
from autotune.runtime import protocol
from autotune.space.configuration import Configuration

Clock = Callable[[], float]
"""Seconds that only go forward; simulated trials bring their own."""
Isolation = Literal["template", "spawn"]
"""Trials are forks of a template, or fresh interpreters."""
SEARCH_TIMING = protocol.TrialTiming(epoch_seconds=1.0, warmup_seconds=1.5)


def never() -> bool:
    """Return false: the wait goes on until its answer or its time limit."""
    return False


class TrialFailed(Exception):
    """A trial cannot continue, or was killed at its time limit. Data, not a traceback at the user.

    It is raised in the trial, and again where the driver receives it.
    """

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
        super().__init__(outcome, reason)  # the arguments with which a pickled exception is made again
        self.outcome = outcome
        self.reason = reason
        self.hint = hint
        self.detail = detail
        self.log_tail = log_tail
        self.input_error = input_error
        self.trial: int | None = None  # its number, once the tuning loop has noted it

    def __str__(self) -> str:
        """Return how it ended, and why."""
        return f"{self.outcome}: {self.reason}"

    @property
    def whole(self) -> str:
        """The reason, the next step and the user's own frames, for a record: each on its own lines."""
        return "\n".join(part for part in (self.reason, self.hint, self.detail) if part)


class DeviceUnavailable(TrialFailed):
    """The device is lost, or a process of another run has it. That says nothing about the configuration."""


class SeatLost(TrialFailed):
    """A process of the tuner's own on a seat is gone: the trial says nothing, and runs again on another seat."""


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """The reports of a trial once it is warm and frozen.

    A process that has surveyed the script counts as requested when its survey began, without its wait for the request.
    """

    started: protocol.Started
    ready: protocol.Ready
    launch_seconds: float  # from the request to the fork
    first_step_seconds: float  # from the request to the end of the first train step, without counting
    ready_seconds: float  # from the request to the steady state, without counting and what was done aside
    first_loss: float | None  # training loss after the first call
    parameters: int = 0  # weights of the model, once it has trained a step
    shapes: tuple[str, ...] = ()  # of those that are trained
    saved_seconds: float | None = None  # of the first step, see `record.ProcessLog`


class LiveTrial(Protocol):
    """One trial process. Each method raises `TrialFailed` when the trial fails or takes too long."""

    def warm_up(
        self, timeout_seconds: float, on_started: Callable[[protocol.Started], None] = lambda started: None
    ) -> WarmUp:
        """Wait until the trial is warm; it is frozen then. `on_started` gets its first report at once."""

    def measure(self, seconds: float, timeout_seconds: float) -> Slice:
        """Let it train for about `seconds`, then freeze it again."""
        return self.measure_continuously(seconds, 1, timeout_seconds)[0]

    def measure_continuously(self, seconds: float, count: int, timeout_seconds: float) -> tuple[Slice, ...]:
        """Let it train for `count` slices without a pause between them, then freeze it again."""

    def finish(self, input_wait_seconds: float, timeout_seconds: float, *, thorough: bool = False) -> protocol.Finished:
        """Take the closing figures, and wait for the process to end.

        Those of the baseline and of leaders are `thorough`: ceilings, and a profile where one is wanted.
        """

    def loss_curves(self, timeout_seconds: float, stopped: Callable[[], bool] = never) -> protocol.LossCurves:
        """Wait for the losses of a trial that was launched for them, and for the process to end.

        It fails as interrupted once `stopped()` is true.
        """

    def kill(self) -> None:
        """End it and all its children now; do nothing when it has ended."""


class SeatHandle(Protocol):
    """One seat: here, or a proxy of one on another host."""

    place: Place  # the host and devices on which its trials run

    def launch(self, request: protocol.TrialRequest) -> LiveTrial:
        """Start a trial. Raises `TrialFailed`, `SeatLost`."""

    def close(self) -> None:
        """End all its processes."""


class Executor(abc.ABC):
    """A pool of seats that run trials at the same time; a context manager that leaves no process behind.

    A subclass opens seats, and says how a lost one is replaced.
    """

    elastic = False  # there may be more seats after a `refresh`
    keeps_files = False  # its trials leave files in the run directory

    def __init__(self, isolation: Isolation = "template") -> None:
        self.machine: Machine | None = None  # what the first seat runs on; None for the driver's own machine
        self.started_by_import: protocol.StartedByImport | None = None  # what no fork survives; known once it is open
        self.isolation = isolation  # `spawn` where importing the workload leaves no choice
        self.tell: Callable[[str], object] = lambda text: None  # reports progress while it opens
        self._handles: Mapping[str, SeatHandle] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def seats(self) -> tuple[str, ...]:
        """The names of its seats, at least one once it is open."""
        return tuple(self._handles)

    @abc.abstractmethod
    def open(self) -> WorkloadFacts:
        """Import the workload, and return what it is."""

    def handle(self, seat: str = "") -> SeatHandle:
        """Return a seat, the first one where none is named. Raises `SeatLost`."""
        name = seat or next(iter(self.seats), "")
        if name not in self._handles:
            raise SeatLost(Outcome.CRASHED, f"seat {name} is gone")
        return self._handles[name]

    def place(self, seat: str) -> Place:
        """Return where the trials of a seat run."""
        return self.handle(seat).place

    def launch(
        self,
        configuration: Configuration,
        *,
        seat: str = "",
        log: str,
        data: protocol.Data | None,
        timing: protocol.TrialTiming = SEARCH_TIMING,
        losses: protocol.Trainings | None = None,
    ) -> LiveTrial:
        """Start a trial on a seat, the first one where none is named. Raises `TrialFailed`, `SeatLost`.

        With `losses` nothing is timed: the answer is `loss_curves`.
        """
        request = protocol.TrialRequest(
            configuration=dict(configuration), log=log, data=data, timing=timing, losses=losses
        )
        return self.handle(seat).launch(request)

    def needs_different_template(self, first: Configuration, second: Configuration) -> bool:
        """Return whether trials of both are forks of different templates; fresh interpreters have none."""
        return self.isolation == "template" and environment(first) != environment(second)

    def use_fresh_interpreters(self) -> None:
        """Import the workload afresh in each trial from now on. Call it before any trial runs. Raises `SeatLost`."""
        self.isolation = "spawn"

    def refresh(self) -> None:  # noqa: B027  # seats on one host neither come nor go
        """Look for seats that have come or gone; return at once."""

    def restart(self, seat: str) -> None:  # noqa: B027  # the next trial starts a template again
        """Replace a seat that was lost. Raises `SeatLost`."""

    def drop(self, seat: str) -> None:
        """Stop using a seat, and end its processes."""
        if seat in self._handles:
            self._handles[seat].close()
            self._handles = {name: handle for name, handle in self._handles.items() if name != seat}

    def close(self) -> None:
        """End everything."""
        for handle in self._handles.values():
            handle.close()
