"""Leave no process behind: supervisors, death signals, adopted orphans, a mark in the environment.

Above each template stands its *supervisor*, forked before anything heavy is imported. It adopts processes whose parent
ends. When the template or the driver ends, the supervisor kills everything below it. If the supervisor is killed, the
kernel kills template and trials, and the driver kills every process that carries the mark. Two kinds of process escape:
one that wiped its environment, once its supervisor was killed; and one in its own session, if supervisor and driver are
killed at once.
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

from autotune.runtime.containment import call_libc

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_SECONDS = 1.0  # for a template whose pipe has closed; one that still imports does not notice
SWEEP_SECONDS = 5.0  # only a process stuck in the kernel takes longer to end
FAMILY_VARIABLE = "AUTOTUNE_FAMILY"  # the mark that all descendants of a template inherit


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies; end at once if it is dead already."""
    call_libc("prctl", _PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Have this process adopt descendants whose parent ends."""
    call_libc("prctl", _PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)


def fork_supervisor(pipe: int) -> None:
    """Fork, and return in the child; this process stays behind as its supervisor. Call it with one thread only.

    The supervisor exits as the child does: with its status, or with a signal's number plus 128. The driver holds the
    other end of the pipe.
    """
    supervisor = os.getpid()
    adopt_orphans()
    child = os.fork()
    if child == 0:
        die_with_parent(supervisor)
        adopt_orphans()  # those of the trials, as long as it lives
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor ends with the template or the driver, not before
    watched = select.poll()
    watched.register(os.pidfd_open(child), select.POLLIN)
    watched.register(pipe, 0)  # poll reports a hang-up without being asked
    watched.poll()
    watched.unregister(pipe)
    watched.poll(GRACE_SECONDS * 1000)
    _, status = os.waitpid(child, os.WNOHANG)
    kill_orphans()
    code = os.waitstatus_to_exitcode(status)
    os._exit(128 - code if code < 0 else code)


def kill_orphans(alive: Set[int] = frozenset()) -> None:
    """Kill the descendants of this process, except `alive` and their process groups."""
    # The group of a living trial works for it, as by `os.system("server &")`.
    me = psutil.Process()
    while orphans := [child.pid for child in me.children() if not {child.pid, os.getpgid(child.pid)} & alive]:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def kill_family(family: str) -> None:
    """Kill all processes that carry this mark, and wait until they are gone."""
    ends = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < ends:  # look again: a killed process may have forked
        found = psutil.process_iter(["environ"])  # None for other users' processes
        members = [member for member in found if (member.info["environ"] or {}).get(FAMILY_VARIABLE) == family]
        if not members:
            return
        for member in members:
            with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user now
                member.kill()
        psutil.wait_procs(members, timeout=max(0.0, ends - time.monotonic()))
