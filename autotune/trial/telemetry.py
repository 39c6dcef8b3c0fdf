"""What a trial process can read of itself: peak memory of its process tree, processor time.

Linux only. This module knows no TensorFlow.
"""

from __future__ import annotations

import contextlib
import os

import psutil


def peak_host_bytes() -> int:
    """Largest resident memory so far of this process, plus that of its living children.

    Pages shared with the template count: they are what the training needs when it runs alone.
    """
    me = psutil.Process()
    total = _peak_of(me.pid)
    for child in me.children(recursive=True):
        with contextlib.suppress(OSError):
            total += _peak_of(child.pid)
    return total


def host_bytes() -> int:
    """Resident memory now of this process and its children that no file backs: what a leak makes grow.

    It is read between slices that follow on one another, so children are looked up without a walk over all processes.
    """
    total = 0
    for pid in ("self", *_children()):
        with contextlib.suppress(OSError):
            total += _status_bytes(pid, "RssAnon:") + _status_bytes(pid, "RssShmem:")
    return total


def _children() -> list[str]:
    """Process numbers of the children of all threads; none where the kernel does not list them."""
    found: list[str] = []
    for thread in os.listdir("/proc/self/task"):
        with (
            contextlib.suppress(OSError),
            open(f"/proc/self/task/{thread}/children", encoding="ascii") as file,
        ):
            found += file.read().split()
    return found


def _peak_of(pid: int) -> int:
    return _status_bytes(str(pid), "VmHWM:")


def _status_bytes(pid: str, name: str) -> int:
    """A line of a process's status, which the kernel gives in KiB, in bytes; 0 where it has none."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0
