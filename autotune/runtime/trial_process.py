"""The driver's side of templates and trials: start, command, freeze, time out, kill, and report how they ended."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from autotune.data.errors import BudgetError, InputError, TrialProcessError, WorkloadError
from autotune.data.facts import WorkloadReference
from autotune.data.record import Outcome, Slice
from autotune.machine.fingerprint import memory_limit_bytes
from autotune.runtime import protocol, supervisor
from autotune.runtime.containment import ALLOW_LARGE, LayerLimit
from autotune.runtime.executor import LiveTrial, SeatLost, TrialFailed, WarmUp, never
from autotune.runtime.logs import (
    cap_log,
    count_oom_kills,
    find_fatal_line,
    gpu_fault_hint,
    is_memory_error,
    open_log,
    read_tail,
)
from autotune.runtime.protocol import Channel, ChannelClosed, ProtocolError

ENTRY_POINT = "autotune.script.runner"  # a name, not an import: `runtime` lies below `script`
IMPORT_SECONDS = 300.0  # of TensorFlow and the user's module
FORK_SECONDS = 20.0
EXIT_SECONDS = 5.0
IMPORT_LOOK_SECONDS = 0.2  # how often the log is looked at while the template imports
LOOK_SECONDS = 0.1  # how often the driver looks at log, files and the user's stop while it waits
FREEZE_SECONDS = 5.0  # how long a process group may take to stop

Mode = Literal["new", "known", "shared", "later"]
"""The parts of the workload that the template imports, see `template`."""
Profiled = Literal["all", "finalists", "none"]
Message = TypeVar("Message")


class TemplateDied(TrialProcessError):
    """A template ended without saying why."""


class Template:
    """A template process below its supervisor (see `supervisor`), and the pipe to it."""

    def __init__(
        self,
        reference: WorkloadReference,
        mode: Mode,
        *,
        variables: Mapping[str, str],
        log: Path,
        layers: Path | None = None,  # directory for what contained processes write; None where they write for real
    ) -> None:
        ours, theirs = socket.socketpair()
        self._reference, self._log, self.layers = reference, log, layers
        self._limit = LayerLimit(layers)
        self._family = secrets.token_hex(16)
        self._oom_kills = count_oom_kills()
        # With -P, the current directory shadows no module of autotune's or Python's.
        command = [sys.executable, "-P", "-m", "autotune.runtime.template", str(theirs.fileno())]
        folder = "" if layers is None else str(layers)
        command += [str(os.getpid()), mode, reference.model_dump_json(), folder, ENTRY_POINT]
        self._channel = Channel(ours)
        self._ready: protocol.TemplateReady | None = None
        self.waits = False  # one of its processes waits to go on as its first trial
        self._exits: dict[int, int] = {}
        try:
            with theirs, open(open_log(log), "ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, **import_path(), **variables, supervisor.FAMILY_VARIABLE: self._family},
                    start_new_session=True,
                )
            self.pid = self._process.pid  # the supervisor's, which lives as long as anything below it
        except BaseException:  # such as Ctrl-C: nobody else would end it, and it would write to the run's directory
            self._channel.close()
            supervisor.kill_family(self._family)
            raise

    def wait_ready(
        self, longest_seconds: float = IMPORT_SECONDS, tell: Callable[[str], object] = str
    ) -> protocol.TemplateReady:
        """Return the facts that the template found by importing; `tell` gets what it does meanwhile.

        Raises `WorkloadError`, `TemplateDied`, `TrialFailed` for want of memory, or `TrialProcessError` if TensorFlow
        cannot be imported.
        """
        deadline = time.monotonic() + longest_seconds
        while self._ready is None:
            cap_log(self._log)
            if excess := self._limit.excess():
                raise WorkloadError(f"importing the workload {excess}", hint=ALLOW_LARGE)
            try:
                answer = self._channel.receive(IMPORT_LOOK_SECONDS)
            except TimeoutError as error:
                if time.monotonic() > deadline:
                    raise self._too_slow(longest_seconds) from error
                continue
            except (ChannelClosed, ProtocolError) as error:
                raise self._died("the process that imports the workload died") from error
            if isinstance(answer, protocol.Failed):
                if answer.outcome is Outcome.OOM:
                    raise _no_memory(answer.reason, read_tail(self._log))
                kind = WorkloadError if answer.input_error else TrialProcessError
                raise kind(answer.reason, hint=answer.hint, detail=answer.detail)
            if isinstance(answer, protocol.Surveying):
                tell(answer.text)
                continue
            assert isinstance(answer, protocol.TemplateReady)
            self._ready, self.waits = answer, answer.waits
        return self._ready

    def _too_slow(self, seconds: float) -> InputError:
        if self._reference.script is None and seconds < IMPORT_SECONDS:
            return BudgetError(
                f"the budget ended after {seconds:.0f} s, while the workload was imported",
                hint=f"Give a larger --budget, such as {max(60, math.ceil(seconds / 6) * 60)}s.",
            )
        if self._reference.script is None:
            return WorkloadError(
                f"importing the workload took longer than {seconds:.0f} s",
                hint="Move slow work out of the top level of the file, into model() or dataset().",
            )
        return WorkloadError(
            f"{self._reference} did not begin to train within {seconds:.0f} s",
            hint="Give a larger --budget. Or check by itself what it does before it trains: does it wait for another "
            "process?",
        )

    def fork(self, request: protocol.TrialRequest) -> tuple[protocol.Forked, Channel]:
        """Start a trial; return its process and the driver's end of its pipe. Raises as `wait_ready` does."""
        self.waits = False
        try:
            self._channel.send(request)
            while not isinstance(answer := self._channel.receive(FORK_SECONDS), protocol.Forked):
                self._note_exit(answer)
            channel = Channel(self._channel.receive_end())
        except (ChannelClosed, TimeoutError, ProtocolError) as error:
            raise self._died("the template process cannot start trials") from error
        self._exits.pop(answer.pid, None)  # of an earlier process with this number
        return answer, channel

    def wait_exit(self, pid: int, timeout_seconds: float) -> int | None:
        """Return how a trial ended, see `protocol.Exited`; None when it has not, or the template is gone."""
        deadline = time.monotonic() + timeout_seconds
        with contextlib.suppress(TimeoutError, ChannelClosed, ProtocolError):
            while pid not in self._exits:
                self._note_exit(self._channel.receive(max(0.0, deadline - time.monotonic())))
        return self._exits.get(pid)

    def _note_exit(self, answer: object) -> None:
        if isinstance(answer, protocol.Exited):
            self._exits[answer.pid] = answer.status

    def death(self) -> str | None:
        """Return how the template ended, in words, once nothing of it is left; None while it lives."""
        try:
            status = self._process.wait(IMPORT_LOOK_SECONDS)  # its pipe closes a moment before it is gone
        except subprocess.TimeoutExpired:
            return None
        supervisor.kill_family(self._family)
        return describe_status(status)

    @property
    def alive(self) -> bool:
        """True if the process runs."""
        return self._process.poll() is None

    def _died(self, reason: str) -> TemplateDied | TrialFailed:
        self.close()
        status, log_tail = describe_status(self._process.returncode), read_tail(self._log)
        killed = status == describe_status(-signal.SIGKILL)
        if is_memory_error(log_tail) or (killed and count_oom_kills() > self._oom_kills):
            return _no_memory(f"memory ran out while the workload was imported: {reason} ({status})", log_tail)
        hint = f"Its log is {self._log}."
        if killed:
            hint += " If nobody killed it, a limit on memory did, such as a container's."
        return TemplateDied(f"{reason} ({status})", hint=hint, detail=log_tail)

    def close(self) -> None:
        """End the template; its trials die with it."""
        self._channel.close()
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        supervisor.kill_family(self._family)


def _no_memory(reason: str, log_tail: str) -> TrialFailed:
    limits = [memory_limit_bytes(), *(limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit > 0)]
    hint = (
        f"It may use {min(limits) / 2**30:.1f} GiB here, by the machine's size, the container's limit or ulimit -v: "
        "raise the limit, free memory, or move data from the top of the file into dataset()."
    )
    return TrialFailed(Outcome.OOM, reason, hint=hint, log_tail=log_tail)


def import_path() -> dict[str, str]:
    """Return the variable with which another process imports this same autotune."""
    root = str(Path(__file__).resolve().parents[2])
    if root in sysconfig.get_paths().values():
        return {}  # it is found there anyway, and must not come before the standard library
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([root, inherited] if inherited else [root])}


def describe_status(status: int) -> str:
    """Return `killed by SIGKILL` for -9 or, as a supervisor reports it, 137; `exit status 1` for 1."""
    number = -status if status < 0 else status - 128
    if not 0 < number < signal.NSIG:
        return f"exit status {status}"
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"killed by {name}"


# The work of a trial while the driver waits for each message.
_DOING: dict[type, str] = {
    protocol.Started: "while building the model and dataset",
    protocol.FirstStep: "in the first step, which traces and compiles",
    protocol.Ready: "while warming up",
    protocol.SliceDone: "in a slice",
    protocol.Finished: "over the closing figures",
    protocol.LossCurves: "while training for loss curves",
}


class TrialProcess(LiveTrial):
    """A real trial: a fork of a template; see `executor.LiveTrial`."""

    def __init__(self, template: Template, request: protocol.TrialRequest, profile: Profiled) -> None:
        self.template = template
        self._profile = profile
        self._log = Path(request.log)
        self._requested_at = time.monotonic()
        self._kernel_kills = count_oom_kills()
        self._killed = False
        forked, self._channel = template.fork(request)
        self.pid, self._ran_seconds = forked.pid, forked.ran_seconds
        self._limit = LayerLimit(template.layers, self.pid)
        self._launch_seconds = time.monotonic() - self._requested_at

    def warm_up(
        self, timeout_seconds: float, on_started: Callable[[protocol.Started], None] = lambda started: None
    ) -> WarmUp:
        deadline = self._requested_at + timeout_seconds
        started = self._expect(protocol.Started, deadline)
        on_started(started)
        since = self._requested_at + started.counting_seconds - self._ran_seconds
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
        answer = self._expect(protocol.LossCurves, self._requested_at + timeout_seconds, stopped)
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
            reason = f"timed out after {time.monotonic() - self._requested_at:.1f} s {_DOING[kind]}"
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
