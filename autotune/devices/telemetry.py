"""What a trial process can read of itself and of its machine: memory, processor time, and what others took.

Linux only. What a machine does not show is None. This module knows no TensorFlow.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from autotune.devices.machine import CGROUP_ROOT, PROC_ROOT, control_groups, core_quota

CPU_ROOT = Path("/sys/devices/system/cpu")
MOST_CORES_READ = 2
"""Cores whose clock rate is read: some kernels sleep ten milliseconds over each that is asked."""
MOST_CPUINFO_BYTES = 1 << 16
"""Of /proc/cpuinfo, for the same reason."""
LARGEST_COUNT = float(1 << 64)
"""No counter of the kernel's is larger."""


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
    for pid in (os.getpid(), *_descendants(os.getpid())):
        with contextlib.suppress(OSError):
            total += _status_bytes(pid, "RssAnon:") + _status_bytes(pid, "RssShmem:")
    return total


def _peak_of(pid: int) -> int:
    return _status_bytes(pid, "VmHWM:")


def _status_bytes(pid: int, name: str) -> int:
    """A line of a process's status, which the kernel gives in KiB, in bytes; 0 where it has none."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0


# ----------------------------------------------------------------------------------------------- the machine


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What was counted up to a moment, in seconds; None where the machine does not show it.

    Args:
        at: The moment, by a clock that only goes forward.
        own: Processor time of this process, its threads, its ended and its living children.
        cores: Cores that this process may use, by its affinity and its quota.
        busy: Processor time that anybody took on these cores, this process included; None under a quota of fewer.
        steal: What the host of this virtual machine gave to others while these cores had work to do.
        throttled: How long the control groups of this process were held back at their quota, summed over cores.
        megahertz: Mean clock rate of the cores now.
    """

    at: float
    own: float
    cores: int
    busy: float | None = None
    steal: float | None = None
    throttled: float | None = None
    megahertz: float | None = None


def read_counters() -> Counters:
    """What was counted up to now. Takes a millisecond or so: not to be called in a timed stretch."""
    cores, quota = os.sched_getaffinity(0), core_quota(CGROUP_ROOT, PROC_ROOT)
    busy, steal = None, None
    if quota >= len(cores):  # else a quota's are no certain ones, and others are entitled to the rest
        busy, steal = processor_seconds(_text(PROC_ROOT / "stat"), cores)
    return Counters(
        at=time.monotonic(),
        own=sum(os.times()[:4]) + sum(_seconds_of(pid) for pid in _descendants(os.getpid())),
        cores=math.ceil(min(len(cores), quota)),
        busy=busy,
        steal=steal,
        throttled=_throttled_seconds(),
        megahertz=_megahertz(cores),
    )


def between(before: Counters, after: Counters, *, seconds: float) -> dict[str, Any]:
    """What happened during a slice that lies between two readings, as fields of a `Slice`.

    More may lie between them than was timed, such as the boundaries of epochs that are timed by steps: the slice has
    its part of it, in proportion to its length.

    Args:
        before: The reading before the slice.
        after: The one after it.
        seconds: The slice's length.
    """
    part = part_of(before, after, seconds=seconds)

    def counted(earlier: float | None, later: float | None) -> float | None:
        return None if earlier is None or later is None else part * max(0.0, later - earlier)

    own = counted(before.own, after.own) or 0.0
    busy = counted(before.busy, after.busy)
    return {
        "cores": after.cores,
        "foreign_cpu_seconds": None if busy is None else max(0.0, busy - own),
        "steal_seconds": counted(before.steal, after.steal),
        "throttled_seconds": counted(before.throttled, after.throttled),
        "cpu_megahertz": after.megahertz,
    }


def part_of(before: Counters, after: Counters, *, seconds: float) -> float:
    """Which part of what lies between two readings is a slice's of so many seconds; at most 1."""
    return min(1.0, seconds / max(after.at - before.at, 1e-9))


# --------------------------------------------------------------------------------------------------- parsers


def processor_seconds(stat: str, cores: Collection[int]) -> tuple[float | None, float | None]:
    """Busy and stolen seconds of some cores, from the text of /proc/stat; None where it does not tell.

    Busy is user, nice, system and interrupts; what guests took is counted in user already.
    """
    ticks = os.sysconf("SC_CLK_TCK")
    busy: list[float] = []
    steal: list[float] = []
    for line in stat.splitlines():
        name, *columns = line.split()[:9] or [""]
        core = _count(name.removeprefix("cpu")) if name.startswith("cpu") else None
        if core is None or core not in cores:
            continue
        counts = [_count(each) for each in columns]
        if len(counts) < 7 or None in counts:
            continue
        known = [each for each in counts if each is not None]
        busy.append((sum(known[:3]) + sum(known[5:7])) / ticks)
        steal += [each / ticks for each in known[7:8]]
    return (sum(busy) if busy else None), (sum(steal) if steal else None)


def throttled_seconds(cpu_stat: str) -> float | None:
    """How long a control group was throttled, from the text of its cpu.stat, of either version."""
    scales = {"throttled_usec": 1e-6, "throttled_time": 1e-9}
    for line in cpu_stat.splitlines():
        name, _, value = line.partition(" ")
        count = _count(value.strip())
        if name in scales and count is not None:
            return count * scales[name]
    return None


def mean_megahertz(cpuinfo: str) -> float | None:
    """Mean of the cores' clock rates, from the text of /proc/cpuinfo; None where it names none."""
    rates = []
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() != "cpu MHz":
            continue
        with contextlib.suppress(ValueError):
            rates.append(float(value))
    rates = [each for each in rates if 0 < each < LARGEST_COUNT]
    return statistics.fmean(rates) if rates else None


def process_seconds(stat: str) -> float:
    """Processor time of a process and its ended children, from the text of /proc/PID/stat; 0 where it does not tell.

    The name of the program stands in parentheses and may hold anything, parentheses included.
    """
    columns = stat.rpartition(")")[2].split()[11:15]
    counts = [_count(each) for each in columns]
    known = [each for each in counts if each is not None]
    return sum(known) / os.sysconf("SC_CLK_TCK") if len(known) == 4 else 0.0


def _count(text: str) -> float | None:
    """The number that a counter shows; None for anything else."""
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        return None
    return float(text)


# --------------------------------------------------------------------------------------------------- reading


def _text(file: Path, most_bytes: int = -1) -> str:
    """A file's beginning; empty where it cannot be read."""
    try:
        with file.open("rb") as opened:
            return opened.read(most_bytes).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _descendants(pid: int) -> Iterator[int]:
    """The living children of a process, and theirs; none where the kernel does not list them."""
    try:
        threads = os.listdir(PROC_ROOT / str(pid) / "task")
    except OSError:
        return
    for thread in threads:
        for child in _text(PROC_ROOT / str(pid) / "task" / thread / "children").split():
            yield int(child)
            yield from _descendants(int(child))


def _seconds_of(pid: int) -> float:
    return process_seconds(_text(PROC_ROOT / str(pid) / "stat"))


@functools.cache
def _throttling_files() -> tuple[Path, ...]:
    """The cpu.stat of each control group that may hold this process back; a process stays in its groups."""
    groups = {group.resolve() for group in control_groups("cpu", CGROUP_ROOT, PROC_ROOT)}
    files = sorted(group / "cpu.stat" for group in groups)
    return tuple(file for file in files if throttled_seconds(_text(file)) is not None)


def _throttled_seconds() -> float | None:
    found = [throttled_seconds(_text(file)) for file in _throttling_files()]
    known = [each for each in found if each is not None]
    return sum(known) if known else None


def _megahertz(cores: Collection[int]) -> float | None:
    """Where the kernel scales clock rates it tells each core's apart; elsewhere /proc/cpuinfo may name them."""
    first = itertools.islice(sorted(cores), MOST_CORES_READ)
    files = [CPU_ROOT / f"cpu{core}" / "cpufreq" / "scaling_cur_freq" for core in first]
    rates = [_count(_text(file).strip()) for file in files]
    kilohertz = [each for each in rates if each]
    if kilohertz:
        return statistics.fmean(kilohertz) / 1000
    return mean_megahertz(_text(PROC_ROOT / "cpuinfo", MOST_CPUINFO_BYTES))
