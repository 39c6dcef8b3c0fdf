"""What a trial process can read of itself: peak memory of its process tree, processor time.

Linux only. This module knows no TensorFlow.
"""

from __future__ import annotations

import contextlib

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


def _peak_of(pid: int) -> int:
    """`VmHWM` of a process, in bytes."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
