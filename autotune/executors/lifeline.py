"""No process of the tuner's outlives the tuner: keepers, death signals, adopted orphans, out-of-memory priority.

Linux only: prctl(2). Above each template stands its *keeper*, forked off before anything heavy is imported: when the
template ends, however it ends, or the tuner does, the keeper kills everything below it. It has adopted what lost
its parent, so that also means what trials left in sessions of their own. The tuner learns of it only then:
the keeper holds the template's pipe open to the last.

Should the keeper be killed itself, the kernel kills the template, and the trials with that. What trials left in
sessions of their own is then nobody's child any more; the tuner finds it by a mark that a template's descendants
inherit in their environment, and kills it. Two things escape: what has wiped its environment, once its keeper was
killed; and, where keeper and tuner are killed before the tuner has seen the first of these deaths, whatever is in a
session of its own. The kernel passes no death signal on to children, so only a PID namespace would end those, and
making one takes rights that users often lack.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from pathlib import Path
from typing import NoReturn

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 1.0
"""How long a template whose pipe has closed may take to end by itself; one that still imports does not notice."""
FAMILY_VARIABLE = "AUTOTUNE_FAMILY"
"""Environment variable with the names of the families that a process is of: a tuner may run within a trial of another,
and the inner families are then a part of the outer."""
SWEEP_SECONDS = 5.0
"""How long the tuner waits for what it killed to be gone; only a process stuck in the kernel takes longer."""


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies; end at once if it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of whatever descendants lose theirs."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def leave_a_keeper(pipe: int) -> None:
    """Go on in a child of this process; what calls this stays behind as the child's keeper.

    To be called while there is one thread only.

    Args:
        pipe: The descriptor of a socket whose other end the tuner holds. When that closes, all is over.
    """
    adopt_orphans()
    keeper = os.getpid()
    child = os.fork()
    if child:
        _keep(child, pipe)
    die_with_parent(keeper)
    adopt_orphans()  # its trials' first: the keeper's turn comes when this process is gone


def _keep(child: int, pipe: int) -> NoReturn:
    """Wait for the end of the child, or of the tuner; then end all that is left, and end as the child did."""
    with contextlib.suppress(BaseException):
        _wait_for_an_end(child, pipe)
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    kill_orphans(frozenset())
    if ended is not None and ended.si_code != os.CLD_EXITED:  # by a signal: the tuner shall see by which
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if ended.si_status != signal.SIGKILL:
            signal.signal(ended.si_status, signal.SIG_DFL)
        os.kill(os.getpid(), ended.si_status)
    os._exit(0 if ended is None else ended.si_status)


def _wait_for_an_end(child: int, pipe: int) -> None:
    def told(number: int, frame: object) -> NoReturn:
        raise InterruptedError

    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, told)
    watched = select.poll()
    watched.register(os.pidfd_open(child), select.POLLIN)
    watched.register(pipe, 0)  # a hang-up is told without being asked for
    watched.poll()
    watched.unregister(pipe)
    watched.poll(GRACE_SECONDS * 1000)


def be_the_first_to_go() -> None:
    """Ask the kernel to kill this process, not the tuner, when memory runs out."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def kill_orphans(alive: frozenset[int]) -> None:
    """Kill this process's children that are neither in `alive` nor in a group led by one of these, with descendants.

    What a living trial has started and left to itself (`os.system("server &")`) is in the trial's group, and works for
    it. Again until there are none: the children of what was killed are adopted in turn.
    """
    me = psutil.Process()
    while orphans := [child for child in me.children() if not alive & {child.pid, _group_of(child.pid)}]:
        for child in orphans:
            for each in (*_descendants(child), child):
                with contextlib.suppress(psutil.Error):
                    each.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, 0)


def _group_of(pid: int) -> int:
    """The process group; the process itself where it has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return pid


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(process.children(recursive=True))
    return []


def mark_of(family: str) -> dict[str, str]:
    """The environment variable by which all descendants of a template are known, whoever their parent is."""
    inherited = os.environ.get(FAMILY_VARIABLE)
    return {FAMILY_VARIABLE: f"{inherited}:{family}" if inherited else family}


def kill_family(family: str) -> None:
    """Kill all processes with this family's mark, and wait for them to be gone.

    Again until there are none: what was killed may have forked meanwhile.

    Args:
        family: A name that no other family has, nor had.
    """
    ends = time.monotonic() + SWEEP_SECONDS
    while members := _members(family):
        for each in members:
            with contextlib.suppress(OSError):  # ended by itself, or became another user's
                signal.pidfd_send_signal(each, signal.SIGKILL)
        for each in members:  # not known by its mark any more once it begins to end
            gone = select.poll()
            gone.register(each, select.POLLIN)
            gone.poll(max(0.0, ends - time.monotonic()) * 1000)
            os.close(each)
        if time.monotonic() > ends:
            return


def _members(family: str) -> list[int]:
    """Descriptors (pidfd) of the processes with this family's mark."""
    found = []
    for pid in psutil.pids():
        if _is_of(family, pid):
            with contextlib.suppress(ProcessLookupError):
                member = os.pidfd_open(pid)
                if _is_of(family, pid):  # still: the number is not another process's by now
                    found.append(member)
                else:
                    os.close(member)
    return found


def _is_of(family: str, pid: int) -> bool:
    """Whether a process has the mark; one that has ended has no environment, and another user's cannot be read."""
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, families = each.partition(b"=")
            if name == FAMILY_VARIABLE.encode():
                return family.encode() in families.split(b":")
    return False
