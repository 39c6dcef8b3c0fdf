"""Fork trials on the driver's request, from wherever this process stands, and report their ends.

A survey runs a script up to its training, as a trial does. Where a trial would do nothing else up to there, the
process that surveys waits at the training. It goes on as the first trial that suits it, so the script runs once for
both.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import shutil
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

import psutil

from autotune.data.record import Outcome
from autotune.runtime import containment, protocol, supervisor
from autotune.runtime.forkability import ForkState
from autotune.runtime.logs import open_log
from autotune.runtime.protocol import Channel, ChannelClosed, Forked, TrialRequest
from autotune.space.variables import caches_in


def fork() -> int:
    """Fork a process in which TensorFlow's runtime has not started."""
    with warnings.catch_warnings():
        # TensorFlow's import leaves four idle threads; none holds a lock, because no runtime was started.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class ForkServer:
    """Serves the driver. `layers` is the directory for what trials write; None where they write for real."""

    def __init__(self, control: protocol.Channel, layers: Path | None) -> None:
        self.control, self._layers = control, layers
        self._trials: dict[int, int] = {}  # pidfd → pid
        self._waiting: WaitingProcess | None = None

    def tell(self, text: str) -> None:
        """Tell the driver what a survey does."""
        self.control.send(protocol.Surveying(text=text))

    def contain(self) -> None:
        """Give this process, a fork of the template, layers that its own forks read. Raises `OSError`."""
        containment.renew([str(self._layers)], for_forks=True)

    def serve(
        self, state: ForkState, waiting: WaitingProcess | None = None
    ) -> tuple[protocol.TrialRequest, protocol.Channel]:
        """Fork a trial for each request. Returns in the forks only, with the request and the trial's pipe.

        Args:
            state: What forks must restore.
            waiting: A process that may go on as the first trial.

        Raises:
            ChannelClosed: The driver has closed the control socket.
        """
        self._waiting = waiting
        if waiting is not None:
            self._trials[waiting.pidfd] = waiting.pid
        children = {child.pid for child in psutil.Process().children()}
        not_trials = frozenset(children.difference(self._trials.values()))
        while True:
            ready = wait([self.control.fileno(), *self._trials])
            for pidfd in [pidfd for pidfd in self._trials if pidfd in ready]:
                self._reap(pidfd, not_trials)
            # After that: a descriptor that is closed now may be given again.
            if self.control.fileno() in ready and (trial := self._start(state, not_trials)):
                return trial

    def _start(
        self, state: ForkState, not_trials: frozenset[int]
    ) -> tuple[protocol.TrialRequest, protocol.Channel] | None:
        request = self.control.receive()
        assert isinstance(request, protocol.TrialRequest)
        template = os.getpid()
        drivers, trials = socket.socketpair()
        with drivers, trials:
            forked = self._hand_over(request, trials, not_trials)
            if forked is None:
                pid = fork()
                if pid == 0:
                    drivers.close()
                    return request, self._become_trial(request, trials, template, state)
                with contextlib.suppress(OSError):
                    os.setpgid(pid, pid)  # here too, so that the driver can signal the group at once
                self._trials[os.pidfd_open(pid)] = pid
                forked = protocol.Forked(pid=pid)
            self.control.send(forked, drivers)
        return None

    def _hand_over(
        self, request: protocol.TrialRequest, end: socket.socket, not_trials: frozenset[int]
    ) -> protocol.Forked | None:
        """Have the waiting process go on as this trial; None where there is none, or it cannot and is ended."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return None
        forked = waiting.hand_over(request, end)
        if forked is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(waiting.pid, signal.SIGKILL)
            self._reap(waiting.pidfd, not_trials)
        return forked

    def _become_trial(
        self, request: protocol.TrialRequest, end: socket.socket, template: int, state: ForkState
    ) -> protocol.Channel:
        """Separate this fork from the template, and return its pipe."""
        try:
            lead_group(template)
            self.control.close()
            for pidfd in self._trials:
                os.close(pidfd)
            channel = protocol.Channel(end)
            try:
                containment.renew(request.folders)
                state.restore()
                timing = request.timing  # before XLA first compiles
                os.environ.update(caches_in(timing.compiled, os.environ, timing.compiled_use))
            except OSError as error:
                reason = f"its files cannot be isolated: {error}"
                channel.send(protocol.Failed(outcome=Outcome.ERROR, reason=reason))
                os._exit(1)
            write_to_log(request.log)
        except BaseException:
            traceback.print_exc()
            leave(1)
        return channel

    def _reap(self, pidfd: int, not_trials: frozenset[int]) -> None:
        pid = self._trials.pop(pidfd)
        if self._waiting is not None and self._waiting.pid == pid:
            self._waiting = None
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        supervisor.kill_orphans(not_trials | set(self._trials.values()))
        self.control.send(protocol.Exited(pid=pid, status=os.waitstatus_to_exitcode(status)))
        if self._layers is not None:
            containment.remove_layers(self._layers / str(pid))


def leave(status: int) -> NoReturn:
    """End this process at once: no `finally` and no `atexit` of the user's runs."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the user's code may have closed it, or the disk is full
            stream.flush()
    os._exit(status)


def lead_group(parent: int) -> None:
    """Lead a process group that ends with `parent`, leaves no core, and is killed first for want of memory."""
    os.setpgid(0, 0)
    supervisor.die_with_parent(parent)
    with contextlib.suppress(OSError):
        # When memory runs out, the kernel kills this process, not the driver.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def write_to_log(path: str, descriptors: Sequence[int] = (1, 2)) -> None:
    """Send the output of this process to a log, which then shows where in the user's code a signal struck."""
    output = open_log(path)
    for descriptor in descriptors:
        os.dup2(output, descriptor)
    os.close(output)
    faulthandler.enable(2, all_threads=False)  # whatever `sys.stderr` is by now


# ------------------------------------------------------------------------------------------- in the template


@dataclass(kw_only=True)
class WaitingProcess:
    """A process that waits at its training to go on as the first trial.

    Args:
        pid: Its number. It leads its process group.
        channel: Takes the request, and brings the answer.
        suits: Returns whether a trial would have come to the training as this process did.
    """

    pid: int
    channel: Channel
    suits: Callable[[TrialRequest], bool]
    pidfd: int = field(init=False)

    def __post_init__(self) -> None:
        self.pidfd = os.pidfd_open(self.pid)

    def hand_over(self, request: TrialRequest, end: socket.socket) -> Forked | None:
        """Give it a request and the trial's end of a pipe; return its answer, None if it does not suit or is gone."""
        with contextlib.closing(self.channel), contextlib.suppress(ChannelClosed):
            if self.suits(request):
                self.channel.send(request, end)
                if self.channel.fileno() in wait([self.channel.fileno(), self.pidfd]):
                    answer = self.channel.receive()
                    assert isinstance(answer, Forked)
                    return answer
        return None


# ---------------------------------------------------------------------------------- in the process that waits


class Output:
    """What this process prints from now on, to a file that other processes write to as well."""

    def __init__(self) -> None:
        self._file = os.fstat(1)

    def move_to(self, log: str, folders: Sequence[str]) -> None:
        """Copy it to a log, and send what follows there, except where the script has redirected it.

        Raises:
            OSError: `folders`, which this process writes to for real from now on, cannot be shown in it.
        """
        containment.make_writable(folders)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the script may have closed it
                stream.flush()
        unchanged = [descriptor for descriptor in (1, 2) if self._is_open_as(descriptor)]
        for descriptor in unchanged[:1]:
            with open(f"/proc/self/fd/{descriptor}", "rb") as printed, open(open_log(log), "ab") as stream:
                printed.seek(self._file.st_size)
                shutil.copyfileobj(printed, stream)
        write_to_log(log, unchanged)

    def _is_open_as(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._file)
        except OSError:  # the script has closed it
            return False
