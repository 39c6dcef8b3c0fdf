"""The driver's side of a trial: start, command, freeze, time out, kill, and report how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from autotune.data.record import Outcome, Slice
from autotune.runtime import protocol
from autotune.runtime.containment import ALLOW_LARGE, LayerLimit
from autotune.runtime.executor import LiveTrial, SeatLost, TrialFailed, WarmUp, never
from autotune.runtime.logs import cap_log, count_oom_kills, find_fatal_line, gpu_fault_hint, is_memory_error, read_tail
from autotune.runtime.protocol import ChannelClosed, ProtocolError
from autotune.runtime.template_process import EXIT_SECONDS, Template, describe_status

LOOK_SECONDS = 0.1  # how often the driver looks at log, files and the user's stop while it waits
FREEZE_SECONDS = 5.0  # how long a process group may take to stop

# The work of a trial while the driver waits for each message.
_DOING: dict[type, str] = {
    protocol.Started: "while building the model and dataset",
    protocol.FirstStep: "in the first step, which traces and compiles",
    protocol.Ready: "while warming up",
    protocol.SliceDone: "in a slice",
    protocol.Finished: "over the closing figures",
    protocol.LossCurves: "while training for loss curves",
}

Profiled = Literal["all", "finalists", "none"]
Message = TypeVar("Message")


class TrialProcess(LiveTrial):
    """A real trial: a fork of a template; see `executor.LiveTrial`."""

    def __init__(self, template: Template, request: protocol.TrialRequest, profile: Profiled) -> None:
        self.template = template
        self._profile = profile
        self._log = Path(request.log)
        self._requested = time.monotonic()
        self._kernel_kills = count_oom_kills()
        self._killed = False
        forked, self._channel = template.fork(request)
        self.pid, self._ran_seconds = forked.pid, forked.ran_seconds
        self._limit = LayerLimit(template.layers, self.pid)
        self._launch_seconds = time.monotonic() - self._requested

    def warm_up(
        self, timeout_seconds: float, on_started: Callable[[protocol.Started], None] = lambda started: None
    ) -> WarmUp:
        deadline = self._requested + timeout_seconds
        started = self._expect(protocol.Started, deadline)
        on_started(started)
        since = self._requested + started.counting_seconds - self._ran_seconds
        first = self._expect(protocol.FirstStep, deadline)
        first_step_seconds = max(0.0, time.monotonic() - since)
        ready = self._expect(protocol.Ready, deadline)
        self.freeze()
        return WarmUp(
            started=started,
            ready=ready,
            launch_seconds=self._launch_seconds,
            first_step_seconds=first_step_seconds,
            ready_seconds=max(0.0, time.monotonic() - since - ready.saving_seconds),
            first_loss=first.loss,
            parameters=first.parameters,
            shapes=first.shapes,
        )

    def measure_continuously(self, seconds: float, count: int, timeout_seconds: float) -> tuple[Slice, ...]:
        deadline = time.monotonic() + timeout_seconds
        self._command(protocol.Measure(seconds=seconds, slices=count))
        slices = tuple(self._expect(protocol.SliceDone, deadline).slice for _ in range(count))
        self.freeze()
        return slices

    def finish(self, input_wait_seconds: float, timeout_seconds: float, *, thorough: bool = False) -> protocol.Finished:
        deadline = time.monotonic() + timeout_seconds
        profile = self._profile == "all" or (self._profile == "finalists" and thorough)
        self._command(protocol.Finish(input_wait_seconds=input_wait_seconds, ceilings=thorough, profile=profile))
        figures = self._expect(protocol.Finished, deadline)
        if input_wait_seconds > 0:
            with contextlib.suppress(TrialFailed):  # the trial has ended; the figures before the wait stand
                figures = self._expect(protocol.Finished, deadline)
        self.kill()
        return figures

    def loss_curves(self, timeout_seconds: float, stopped: Callable[[], bool] = never) -> protocol.LossCurves:
        answer = self._expect(protocol.LossCurves, self._requested + timeout_seconds, stopped)
        self.kill()
        return answer

    def kill(self) -> None:
        """Kill the whole process group, and wait for it to be gone; the template kills what left the group."""
        if self._killed:
            return
        self._killed = True
        self._channel.close()
        # A trial dies with its template, and its process id may then belong to another process.
        if self.template.wait_exit(self.pid, 0.0) is None and self.template.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.template.wait_exit(self.pid, EXIT_SECONDS)
        cap_log(self._log)

    def freeze(self) -> None:
        """Wait until every thread of the trial has stopped; the trial stops its own process group after each report."""
        deadline, looked_at = time.monotonic() + FREEZE_SECONDS, 0.0
        while not is_stopped(self.pid):
            if looked_at > deadline:  # not the time now: this process itself may have been suspended
                raise self._failed(Outcome.TIMEOUT, f"could not be frozen within {FREEZE_SECONDS:.0f} s")
            time.sleep(0.0005)
            looked_at = time.monotonic()

    def thaw(self) -> None:
        """Let the process group continue."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)

    def _command(self, command: protocol.Measure | protocol.Finish) -> None:
        try:
            self._channel.send(command)
        except ChannelClosed as error:
            raise self._died() from error
        self.thaw()

    def _receive(self, deadline: float, stopped: Callable[[], bool]) -> object:
        """Return the next message. Raises as `protocol.Channel.receive` does."""
        while True:
            answer = None
            with contextlib.suppress(TimeoutError):
                answer = self._channel.receive(min(max(0.0, deadline - time.monotonic()), LOOK_SECONDS))
            cap_log(self._log)
            if excess := self._limit.excess():
                raise self._failed(Outcome.ERROR, excess, hint=ALLOW_LARGE)
            if answer is not None:
                return answer
            if stopped():
                raise self._failed(Outcome.INTERRUPTED, "stopped by the user")
            if not self.template.alive:  # a child of the trial's may hold its end of the pipe open
                raise ChannelClosed("the template is gone")
            if deadline <= time.monotonic():
                raise TimeoutError

    def _expect(self, kind: type[Message], deadline: float, stopped: Callable[[], bool] = never) -> Message:
        """Return the next message; one of another kind is a failure of the trial."""
        try:
            answer = self._receive(deadline, stopped)
        except TimeoutError as error:
            reason = f"timed out after {time.monotonic() - self._requested:.1f} s {_DOING[kind]}"
            raise self._failed(Outcome.TIMEOUT, reason) from error
        except ChannelClosed as error:
            raise self._died() from error
        except ProtocolError as error:
            raise self._failed(Outcome.CRASHED, f"sent something that is no report: {error}") from error
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, protocol.Failed):
            raise self._failed(**answer.model_dump(exclude={"kind"}))
        found = getattr(answer, "kind", answer)
        raise self._failed(Outcome.CRASHED, f"sent {found!r} out of turn {_DOING[kind]}")

    def _failed(
        self, outcome: Outcome, reason: str, *, kind: type[TrialFailed] = TrialFailed, **more: Any
    ) -> TrialFailed:
        """Kill the trial, and return its failure."""
        self.kill()
        return kind(outcome, reason, log_tail=read_tail(self._log), **more)

    def _died(self) -> TrialFailed:
        """Return the failure of a trial whose end of the pipe closed without a message."""
        exited = self.template.wait_exit(self.pid, EXIT_SECONDS)
        if exited is None:
            death = self.template.death()
            if count_oom_kills() > self._kernel_kills:
                return self._failed(Outcome.OOM, f"its template process died ({death}): out of memory")
            why = f"its template process died ({death})" if death else "closed its pipe and did not end"
            return self._failed(Outcome.CRASHED, why, kind=SeatLost if death else TrialFailed)
        if exited == -signal.SIGKILL and count_oom_kills() > self._kernel_kills:
            return self._failed(Outcome.OOM, "killed by the kernel: out of memory")
        how = f"{'' if exited < 0 else 'ended with '}{describe_status(exited)}"
        fatal = find_fatal_line(self._log).strip()
        outcome = Outcome.OOM if is_memory_error(fatal) else Outcome.CRASHED
        return self._failed(outcome, f"{how}: {fatal[:400]}" if fatal else how, hint=gpu_fault_hint(fatal))


def is_stopped(pid: int) -> bool:
    """Return whether every thread of a process is stopped, or the process is gone."""
    states = set()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                states.add(file.read().rpartition(b")")[2].split()[0])
    except (FileNotFoundError, ProcessLookupError):
        return not os.path.exists(f"/proc/{pid}") or is_stopped(pid)
    stopped = {b"T", b"t"}
    # A thread that waits in the kernel (D) stops before it runs on, once the others have. One that starts a program
    # waits for the new process, which is stopped.
    return states <= stopped | {b"Z", b"X", b"D"} and (b"D" not in states or bool(states & stopped))
