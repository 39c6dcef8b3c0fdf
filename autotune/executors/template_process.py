"""A template process as the tuner sees it: start it, hear what it found, have it fork trials and kill them.

This module may not import TensorFlow: it runs in the tuner process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path

from autotune.errors import TrialProcessError, WorkloadError
from autotune.executors import lifeline
from autotune.executors.log import LOOK_SECONDS, cap, tail
from autotune.worker import messages
from autotune.worker.messages import ChannelClosed, ProtocolError
from autotune.workloads.workload import WorkloadReference

TEMPLATE_SECONDS = 300.0
"""How long importing TensorFlow and the user's module may take."""
FORK_SECONDS = 20.0
EXIT_SECONDS = 5.0


class TemplateDied(TrialProcessError):
    """A template ended while it imported, without saying why."""


class Template:
    """A template process below its keeper (see `lifeline`), and the pipe to it.

    Args:
        reference: The workload to import.
        preload: Whether it imports the workload itself, or leaves that to each trial.
        variables: Environment variables on top of the tuner's own.
        log: File for its stdout and stderr.
    """

    def __init__(
        self,
        reference: WorkloadReference,
        *,
        preload: bool,
        variables: Mapping[str, str],
        log: Path,
    ) -> None:
        ours, theirs = socket.socketpair()
        self._log = log
        self._family = secrets.token_hex(16)
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # the current directory shadows no module of ours or Python's
                    "-m",
                    "autotune.executors.template",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    "1" if preload else "0",
                    reference.model_dump_json(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **_import_path(), **variables, **lifeline.mark_of(self._family)},
                start_new_session=True,
            )
        self.channel = messages.Channel(ours, messages.from_template)
        self._ready: messages.TemplateReady | None = None
        self._exits: dict[int, messages.Exited] = {}

    def wait_ready(self) -> messages.TemplateReady:
        """What the template found by importing.

        Raises:
            WorkloadError: The user's module cannot be used.
            TemplateDied: It ended without a word.
            TrialProcessError: TensorFlow cannot be imported.
        """
        if self._ready is None:
            try:
                answer = self._receive_ready()
            except TimeoutError as error:
                raise WorkloadError(
                    f"importing the workload took longer than {TEMPLATE_SECONDS:.0f} s",
                    hint="Move slow work out of the top level of the file, into model() or dataset().",
                ) from error
            except (ChannelClosed, ProtocolError) as error:
                self.close()
                raise TemplateDied(
                    f"the process that imports the workload died ({_status(self._process.returncode)})",
                    hint=f"Its log is {self._log}.",
                    detail=tail(self._log),
                ) from error
            if isinstance(answer, messages.TemplateFailed):
                kind = WorkloadError if answer.users else TrialProcessError
                raise kind(answer.message, hint=answer.hint, detail=answer.detail)
            assert isinstance(answer, messages.TemplateReady)
            self._ready = answer
        return self._ready

    def _receive_ready(self) -> object:
        """The template's first message; its log is capped meanwhile, for importing leaves it no time to."""
        deadline = time.monotonic() + TEMPLATE_SECONDS
        while True:
            cap(self._log)
            with contextlib.suppress(TimeoutError):
                return self.channel.receive(LOOK_SECONDS)
            if time.monotonic() > deadline:
                raise TimeoutError

    def fork(self, request: messages.TrialRequest) -> tuple[int, socket.socket]:
        """Start a trial.

        Returns:
            Its process id, and the tuner's end of its pipe.

        Raises:
            ChannelClosed: The template is gone.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self.channel.send(request, (theirs.fileno(),))
            deadline = time.monotonic() + FORK_SECONDS
            while True:
                answer = self.channel.receive(max(0.0, deadline - time.monotonic()))
                if isinstance(answer, messages.Forked):
                    self._exits.pop(answer.pid, None)  # of an earlier process with this number
                    return answer.pid, ours
                self._note(answer)
        except BaseException:
            ours.close()
            raise

    def sweep(self, pid: int) -> None:
        """Have a trial killed, and what it left behind."""
        with contextlib.suppress(ChannelClosed):
            self.channel.send(messages.Sweep(pid=pid))

    def wait_exit(self, pid: int, timeout_seconds: float) -> messages.Exited | None:
        """How a trial ended; None when it has not, or the template is gone."""
        deadline = time.monotonic() + timeout_seconds
        with contextlib.suppress(TimeoutError, ChannelClosed, ProtocolError):
            while pid not in self._exits:
                self._note(self.channel.receive(max(0.0, deadline - time.monotonic())))
        return self._exits.get(pid)

    def _note(self, answer: object) -> None:
        if isinstance(answer, messages.Exited):
            self._exits[answer.pid] = answer

    def death(self) -> str | None:
        """How the template ended, in words, once nothing of it is left; None when it lives."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # its pipe closes a moment before it is gone
            code = self._process.wait(LOOK_SECONDS)
            lifeline.kill_family(self._family)
            return _status(code)
        return None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the template's keeper, which lives as long as anything below it."""
        return self._process.pid

    def close(self) -> None:
        """End the template; its trials die with it."""
        self.channel.close()
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        lifeline.kill_family(self._family)


def _import_path() -> dict[str, str]:
    """Where this autotune was imported from, so that the template imports the same one."""
    root = str(Path(__file__).resolve().parents[2])
    if root in (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]):
        return {}  # found there anyway, and not to be put before the standard library
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([root, inherited] if inherited else [root])}


def _status(code: int | None) -> str:
    if code is None:
        return "still running"
    return f"killed by {signal_name(-code)}" if code < 0 else f"exit status {code}"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
