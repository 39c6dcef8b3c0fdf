"""No process of the tuner's outlives the tuner: death signals, adopted orphans, out-of-memory priority.

Linux only: prctl(2). While a template imports, the kernel kills it together with the tuner. Once it serves,
it notices the end of its pipe instead, so that it can kill its trials, frozen ones too, and the children
that they left in sessions of their own, which it has adopted. Should it be killed itself, the kernel
kills its trials.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies; end at once if it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with_parent`: from now on this process notices by itself, and has time to clean up."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of whatever descendants lose theirs."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def be_the_first_to_go() -> None:
    """Ask the kernel to kill this process, not the tuner, when memory runs out."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def kill_orphans(alive: frozenset[int]) -> None:
    """Kill this process's children that are not in `alive`, and all their descendants.

    Again until there are none: the children of what was killed are adopted in turn.
    """
    me = psutil.Process()
    while orphans := [child for child in me.children() if child.pid not in alive]:
        for child in orphans:
            for each in (*_descendants(child), child):
                with contextlib.suppress(psutil.Error):
                    each.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, 0)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(process.children(recursive=True))
    return []
