"""The fingerprint of the machine: hardware, driver, versions; and the cores and memory that this process may use."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

import psutil

from autotune.data.errors import InputError
from autotune.data.facts import Machine
from autotune.machine.gpu import lowest_capability, read_gpus
from autotune.machine.units import units_of_gpu, units_of_processor
from autotune.version import __version__

PACKAGES = ("tensorflow", "keras", "tf_keras", "numpy", "optuna")
CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_ROOT = Path("/proc")


def require_linux() -> None:
    """Raise `InputError` anywhere but on Linux."""
    # Through a variable, or the type checker takes the rest for dead code on the platform it checks.
    system: str = sys.platform
    if system != "linux":
        raise InputError(f"autotune runs on Linux only, and this is {system}: use a Linux machine or container")


def fingerprint() -> Machine:
    """Describe this machine, as this process may use it. Takes milliseconds, and wakes no GPU."""
    gpus, driver, cuda = read_gpus()
    processor = text_of(PROC_ROOT / "cpuinfo")
    model, flags = (re.search(rf"^{name}[ \t]*:(.*\S)", processor, re.MULTILINE) for name in ("model name", "flags"))
    return Machine(
        cpu=" ".join(model[1].split()) if model else platform.machine(),  # ARM's kernels name no model
        cores=available_cores(),
        memory_bytes=memory_limit_bytes(),
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages={"autotune": __version__}
        | {name: version for name in PACKAGES if (version := installed_version(name))},
        gpus=gpus,
        driver=driver,
        cuda=cuda,
        cudnn=None,
        units=(
            *units_of_processor(frozenset(flags[1].split()) if flags else ()),
            *units_of_gpu(lowest_capability(gpus)),
        ),
    )


def installed_version(package: str) -> str | None:
    """Return the installed version; None without one. Finds a package in builds of another name: `tensorflow-cpu`."""
    with contextlib.suppress(metadata.PackageNotFoundError, KeyError):  # KeyError: left by a broken uninstall
        return metadata.version(package)
    with contextlib.suppress(metadata.PackageNotFoundError, KeyError):
        return metadata.version(metadata.packages_distributions()[package][0])
    return None


def available_cores() -> int:
    """Return how many cores this process may use, by affinity and quota. 1.5 cores keep two threads busy."""
    return math.ceil(min(len(os.sched_getaffinity(0)), core_quota()))


def core_quota() -> float:
    """Return the tightest CPU quota of this process's control groups, in cores; infinite without one."""
    quotas = [math.inf]
    for group in _control_groups():
        # Version 2 keeps "quota period" in one file, version 1 in two; both in microseconds.
        text = text_of(group / "cpu.max") or " ".join(
            text_of(group / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        )
        match [_number(word) for word in text.split()]:
            case [float(quota), float(period)]:
                quotas.append(quota / period)
    return min(quotas)


def memory_limit_bytes() -> int:
    """Return the host memory this process may use: the host's, or the tightest limit of its control groups."""
    texts = [text_of(group / name) for group in _control_groups() for name in ("memory.max", "memory.limit_in_bytes")]
    limits = [limit for text in texts if (limit := _number(text)) is not None]
    return int(min([psutil.virtual_memory().total, *limits]))


def _control_groups() -> set[Path]:
    """Return the directories in which a limit on this process may stand; not all of them exist."""
    # In a container the mount's root may be the group that /proc names as the host sees it: roots always count.
    found = {CGROUP_ROOT, CGROUP_ROOT / "cpu", CGROUP_ROOT / "memory"}
    for line in text_of(PROC_ROOT / "self" / "cgroup").split("\n"):
        # hierarchy:controllers:path; version 2 has no controllers, version 1 is mounted once per set of them
        controllers, _, path = line.partition(":")[2].partition(":")
        names = [name for name in path.split("/") if name not in ("", ".", "..")]
        for mount in {controllers, *controllers.split(",")}:
            found.update(CGROUP_ROOT.joinpath(mount, *names[:depth]) for depth in range(len(names) + 1))
    return found


def text_of(file: Path) -> str:
    """Return a file's text; empty when it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # ValueError: a null character in the path
        return ""


def _number(text: str) -> float | None:
    """Return the number in `text`, if it is at least 1; None for anything else, such as `max`."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 1 <= number < math.inf else None
