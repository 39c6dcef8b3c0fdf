"""No process outlives the driver: keepers, death signals, adopted orphans, marks in the environment.

Above each template stands its *keeper*, forked before anything heavy is imported. It adopts what loses its parent. When
the template or the driver ends, the keeper kills everything below it. If the keeper is killed, the kernel kills
template and trials, and the driver kills what carries the mark. Two things escape: a process that has wiped its
environment, once its keeper was killed; and one in a session of its own, if keeper and driver are killed at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Set

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_SECONDS = 1.0  # for a template whose pipe has closed; one that still imports does not notice
SWEEP_SECONDS = 5.0  # only a process stuck in the kernel takes longer to be gone
FAMILY_VARIABLE = "AUTOTUNE_FAMILY"  # the mark that all descendants of a template have


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies; end at once if it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def leave_a_keeper(pipe: int) -> None:
    """Go on in a child of this process, which stays behind as the child's keeper. There must be one thread only.

    The keeper ends as the child did; a signal counts as its number plus 128. The driver holds the pipe's other end.
    """
    keeper = os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        die_with_parent(keeper)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # of the trials' orphans, as long as this process lives
        return
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # the keeper goes when template or driver goes
    watched = select.poll()
    watched.register(os.pidfd_open(child), select.POLLIN)
    watched.register(pipe, 0)  # a hang-up is told without being asked for
    watched.poll()
    watched.unregister(pipe)
    watched.poll(GRACE_SECONDS * 1000)
    _, status = os.waitpid(child, os.WNOHANG)
    kill_orphans()
    code = os.waitstatus_to_exitcode(status)
    os._exit(128 - code if code < 0 else code)


def kill_orphans(alive: Set[int] = frozenset()) -> None:
    """Kill this process's descendants but for `alive` and their groups."""
    # The group of a living trial works for it, as by `os.system("server &")`.
    me = psutil.Process()
    while orphans := [each.pid for each in me.children() if not {each.pid, os.getpgid(each.pid)} & alive]:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def kill_family(family: str) -> None:
    """Kill all processes with this family's mark, and wait for them to be gone."""
    ends = time.monotonic() + SWEEP_SECONDS
    while (members := _members(family)) and time.monotonic() < ends:  # again: what was killed may have forked
        for each in members:
            with contextlib.suppress(psutil.Error):  # it ended by itself, or became another user's
                each.kill()
        psutil.wait_procs(members, timeout=max(0.0, ends - time.monotonic()))


def _members(family: str) -> list[psutil.Process]:
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            if each.environ().get(FAMILY_VARIABLE) == family:
                found.append(each)
    return found
