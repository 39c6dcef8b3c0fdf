"""Fork trials on the driver's request, from wherever this process stands, and report their ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
import warnings
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

import psutil

from autotune.data.record import Outcome
from autotune.runtime import containment, protocol, supervisor
from autotune.runtime.forkability import ForkState
from autotune.runtime.waiting import WaitingProcess, lead_group, write_to_log
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
