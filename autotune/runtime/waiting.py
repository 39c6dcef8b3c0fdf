"""Forks of the template: what each does first, and the one that waits to go on as the first trial.

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
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from autotune.runtime import containment, supervisor
from autotune.runtime.logs import open_log
from autotune.runtime.protocol import Channel, ChannelClosed, Forked, TrialRequest


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
