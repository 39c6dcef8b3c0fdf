"""Counters that a trial process reads of itself and of its machine; what a machine does not show is None."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from autotune.machine.fingerprint import core_quota

_peak_before_bytes = 0  # of the process that this one was forked from, which ran the start of the same training


def note_peak_before(peak_bytes: int) -> None:
    """Carry over the parent's peak memory: the kernel resets it in a fork."""
    global _peak_before_bytes
    _peak_before_bytes = peak_bytes


def peak_host_bytes() -> int:
    """Return the largest resident memory so far of this process, plus that of its living children.

    Pages shared with the template count: the training needs them when it runs alone.
    """
    me = psutil.Process()
    own, *others = (_status_bytes(process.pid, "VmHWM") for process in (me, *me.children(recursive=True)))
    return max(own, _peak_before_bytes) + sum(others)


def host_bytes() -> int:
    """Return the resident memory of this process and its children that no file backs: a leak makes it grow."""
    # Read between consecutive slices, so children are found without a walk over all processes.
    return sum(_status_bytes(pid, "RssAnon", "RssShmem") for pid in (os.getpid(), *_descendants(os.getpid())))


def _status_bytes(pid: int, *names: str) -> int:
    """Sum these lines of a process's status, which psutil does not read; 0 once the process has ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            kibibytes = dict(re.findall(r"^(\w+):\s*(\d+) kB$", file.read(), re.MULTILINE))
    except OSError:
        return 0
    return sum(int(kibibytes.get(name, 0)) * 1024 for name in names)


def _descendants(pid: int) -> Iterator[int]:
    """Yield the living children of a process, and theirs; none where the kernel does not list them."""
    for file in glob.iglob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError), open(file, encoding="ascii") as children:
            for child in map(int, children.read().split()):
                yield child
                yield from _descendants(child)


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The counters of the processor at a moment, in seconds."""

    at: float  # the moment, by a clock that only goes forward
    own: float  # processor time of this process and of its children, ended ones too
    cores: int  # that this process may use
    busy: float | None = None  # processor time on these cores, everybody's; None under a quota of fewer
    steal: float | None = None  # what the host of this virtual machine gave to others
    faults: int | None = None  # pages that the kernel gave to this process


def read_counters() -> Counters:
    """Read what was counted up to now. Takes a millisecond: not to be called in a timed stretch."""
    allowed, quota = os.sched_getaffinity(0), core_quota()
    busy = steal = None
    if quota >= len(allowed):  # a smaller quota is of no certain cores, and others are entitled to the rest
        # IndexError: some cores are offline, so psutil's list shows no core's number.
        with contextlib.suppress(OSError, ValueError, IndexError):
            all_cores = psutil.cpu_times(percpu=True)
            times = [all_cores[core] for core in allowed]
            busy = sum(core.user + core.nice + core.system + core.irq + core.softirq for core in times)
            steal = sum(core.steal for core in times)
    own = sum(os.times()[:4])
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(psutil.Error):
            own += sum(psutil.Process(pid).cpu_times()[:4])
    cores, faults = math.ceil(min(len(allowed), quota)), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return Counters(at=time.monotonic(), own=own, cores=cores, busy=busy, steal=steal, faults=faults)


def part_of(before: Counters, after: Counters, *, seconds: float) -> float:
    """Return the share of what lies between two readings that belongs to a slice of so many seconds; at most 1."""
    return min(1.0, seconds / max(after.at - before.at, 1e-9))


def between(before: Counters, after: Counters, *, seconds: float) -> dict[str, Any]:
    """Return the changes between two readings, in proportion to a slice's seconds, as `Slice` fields."""
    part = part_of(before, after, seconds=seconds)

    def counted(earlier: float | None, later: float | None) -> float | None:
        return None if earlier is None or later is None else part * max(0.0, later - earlier)

    own, busy = counted(before.own, after.own) or 0.0, counted(before.busy, after.busy)
    faults = counted(before.faults, after.faults)
    return {
        "cores": after.cores,
        "foreign_cpu_seconds": None if busy is None else max(0.0, busy - own),
        "steal_seconds": counted(before.steal, after.steal),
        "page_faults": None if faults is None else round(faults),
    }
