"""The driver's side of a template: start it, wait for what it found, have it fork trials."""

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
from typing import Literal

from autotune.data.errors import BudgetError, InputError, TrialProcessError, WorkloadError
from autotune.data.facts import WorkloadReference
from autotune.data.record import Outcome
from autotune.machine.fingerprint import memory_limit_bytes
from autotune.runtime import protocol, supervisor
from autotune.runtime.containment import ALLOW_LARGE, LayerLimit
from autotune.runtime.executor import TrialFailed
from autotune.runtime.logs import cap_log, count_oom_kills, is_memory_error, open_log, read_tail
from autotune.runtime.protocol import Channel, ChannelClosed, ProtocolError

ENTRY_POINT = "autotune.script.runner"  # a name, not an import: `runtime` lies below `script`
IMPORT_SECONDS = 300.0  # of TensorFlow and the user's module
FORK_SECONDS = 20.0
EXIT_SECONDS = 5.0
LOOK_SECONDS = 0.2  # how often the log is looked at while the template imports

Mode = Literal["new", "known", "shared", "later"]
"""The parts of the workload that the template imports, see `template`."""


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
        self.tell: Callable[[str], object] = lambda text: None  # reports progress while it imports
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

    def wait_ready(self, longest_seconds: float = IMPORT_SECONDS) -> protocol.TemplateReady:
        """Return the facts that the template found by importing.

        Raises `WorkloadError`, `TemplateDied`, `TrialFailed` for want of memory, or `TrialProcessError` if TensorFlow
        cannot be imported.
        """
        deadline = time.monotonic() + longest_seconds
        while self._ready is None:
            cap_log(self._log)
            if excess := self._limit.excess():
                raise WorkloadError(f"importing the workload {excess}", hint=ALLOW_LARGE)
            try:
                answer = self._channel.receive(LOOK_SECONDS)
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
                self.tell(answer.text)
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
            status = self._process.wait(LOOK_SECONDS)  # its pipe closes a moment before it is gone
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
