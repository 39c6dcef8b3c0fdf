"""Fork trials on the driver's request, from wherever this process stands, and report their ends."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
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
from autotune.runtime.logs import open_log


def fork() -> int:
    """Fork a process in which TensorFlow's runtime has not started."""
    with warnings.catch_warnings():
        # TensorFlow's import leaves four idle threads; none holds a lock, because no runtime was started.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class ForkServer:
    """Serves the driver.

    Args:
        control: The driver's socket.
        layers: The directory for what trials write; None where they write for real.
    """

    def __init__(self, control: protocol.Channel, layers: Path | None) -> None:
        self.control, self._layers = control, layers
        self._trials: dict[int, int] = {}  # pidfd → pid

    def contain(self) -> None:
        """Give this process, a fork of the template, layers that its own forks read. Raises `OSError`."""
        containment.renew([str(self._layers)], for_forks=True)

    def serve(self, state: ForkState) -> tuple[protocol.TrialRequest, protocol.Channel]:
        """Fork a trial for each request. Returns in the forks only, with the request and the trial's pipe.

        Args:
            state: What forks must restore.

        Raises:
            ChannelClosed: The driver has closed the control socket.
        """
        not_trials = frozenset(child.pid for child in psutil.Process().children())
        while True:
            for ready in wait([self.control.fileno(), *self._trials]):
                if ready in self._trials:
                    self._reap(ready, not_trials)
                elif trial := self._start(state):
                    return trial

    def _start(self, state: ForkState) -> tuple[protocol.TrialRequest, protocol.Channel] | None:
        request = self.control.receive()
        assert isinstance(request, protocol.TrialRequest)
        template = os.getpid()
        drivers, trials = socket.socketpair()
        with drivers, trials:
            pid = fork()
            if pid == 0:
                drivers.close()
                return request, self._become_trial(request, trials, template, state)
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # here too, so that the driver can signal the group at once
            self._trials[os.pidfd_open(pid)] = pid
            self.control.send(protocol.Forked(pid=pid), drivers)
        return None

    def _become_trial(
        self, request: protocol.TrialRequest, end: socket.socket, template: int, state: ForkState
    ) -> protocol.Channel:
        """Separate this fork from the template, and return its pipe."""
        try:
            os.setpgid(0, 0)
            supervisor.die_with_parent(template)
            with contextlib.suppress(OSError):
                # When memory runs out, the kernel kills this process, not the driver.
                Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
            self.control.close()
            for pidfd in self._trials:
                os.close(pidfd)
            channel = protocol.Channel(end)
            recorded = [] if request.losses is None else [os.path.dirname(request.losses.folder)]
            try:
                containment.renew([os.path.dirname(request.log), *recorded])
                state.restore()
            except OSError as error:
                reason = f"its files cannot be isolated: {error}"
                channel.send(protocol.Failed(outcome=Outcome.ERROR, reason=reason))
                os._exit(1)
            output = open_log(request.log)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            faulthandler.enable(all_threads=False)  # the log shows where in the user's code a signal struck
        except BaseException:
            traceback.print_exc()
            leave(1)
        return channel

    def _reap(self, pidfd: int, not_trials: frozenset[int]) -> None:
        pid = self._trials.pop(pidfd)
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
