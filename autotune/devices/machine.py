"""The fingerprint of the machine: hardware, driver, versions; and the cores and memory that this process may use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import re
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field

from autotune.devices.gpus import GPU_MODES, Gpu, read_gpus
from autotune.errors import InputError
from autotune.models import Count, Frozen, Many

PACKAGES = ("autotune", "tensorflow", "keras", "numpy", "optuna")
CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_ROOT = Path("/proc")
MEMORY_TOLERANCE = 0.1  # the share by which memory of the same size may differ
_GIB = 1 << 30


class Machine(Frozen, strict=True):
    """What a speed was measured on: what this process may use, and versions."""

    cpu: str  # the model's name
    cores: Annotated[Count, Field(ge=1)]
    memory_bytes: Count  # of the host
    platform: str  # kernel and architecture, such as `Linux x86_64`
    python: str
    packages: dict[str, str]  # installed versions by name
    gpus: Many[Gpu]  # in the driver's order
    driver: str | None  # NVIDIA's
    cuda: str | None  # the newest version that the driver can run, such as `12.8`
    cudnn: str | None  # as TensorFlow reports it; None until it was asked
    tensorflow_cuda: str | None = None  # that TensorFlow was built with; None until it was asked

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits that stay the same as long as hardware, driver and versions do."""
        # TensorFlow's answers are left out: the same machine must not get another id once it was asked.
        modes = {"__all__": set(GPU_MODES)}
        facts = self.model_dump(mode="json", exclude={"cudnn": True, "tensorflow_cuda": True, "gpus": modes})
        # The kernel's own share of the memory changes by some megabytes with each of its updates.
        facts["memory_bytes"] = round(self.memory_bytes / _GIB) * _GIB
        canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def differences(self, other: Machine) -> tuple[str, ...]:
        """What can make `other` faster or slower, such as `GPU: measured on NVIDIA H200, here none`."""
        gpus = gpu_names(self.gpus), gpu_names(other.gpus)
        counts = [Counter(gpu.name for gpu in each.gpus) for each in (self, other)]
        if self.gpus and counts[0].keys() == counts[1].keys() and counts[0] <= counts[1]:
            gpus = gpus[0], gpus[0]  # a seat had a part of cards of one kind
        pairs: list[tuple[str, str | None, str | None]] = [
            ("CPU", self.cpu, other.cpu),
            ("cores", str(self.cores), str(other.cores)),
            ("memory", *_sizes(self.memory_bytes, other.memory_bytes)),
            ("GPU", *gpus),
        ]
        if self.gpus and gpus[0] == gpus[1]:
            sizes = [min(gpu.memory_bytes for gpu in each.gpus) for each in (self, other)]
            pairs.append(("GPU memory", *_sizes(*sizes)))
            pairs.append(("NVIDIA driver", self.driver, other.driver))
        for what, package in (("TensorFlow", "tensorflow"), ("Keras", "keras")):
            pairs.append((what, self.packages.get(package), other.packages.get(package)))
        there, here = (".".join(each.python.split(".")[:2]) for each in (self, other))
        pairs.append(("Python", there, here))
        return tuple(
            f"{what}: measured on {there or 'none'}, here {here or 'none'}"
            for what, there, here in pairs
            if there != here
        )


def gpu_names(gpus: tuple[Gpu, ...]) -> str:
    """`2 × NVIDIA H200, NVIDIA L4`; empty for none."""
    counts = Counter(gpu.name for gpu in gpus)
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items())


def _sizes(measured: int, here: int) -> tuple[str, str]:
    """Both sizes in GiB; the same text twice when they differ by no more than the tolerance."""
    if abs(here - measured) <= MEMORY_TOLERANCE * measured:
        here = measured
    return f"{measured / _GIB:.2f} GiB", f"{here / _GIB:.2f} GiB"


def require_linux() -> None:
    """Raise `InputError` anywhere but on Linux."""
    # Through a variable, or the type checker takes the rest for dead code on the platform it checks.
    system: str = sys.platform
    if system != "linux":
        raise InputError(f"autotune runs on Linux only, and this is {system}: use a Linux machine or container")


def fingerprint() -> Machine:
    """This machine, as this process may use it. Takes milliseconds, and wakes no GPU."""
    gpus, driver, cuda = read_gpus()
    model = re.search(r"^model name[ \t]*:(.*\S)", text_of(PROC_ROOT / "cpuinfo"), re.MULTILINE)
    return Machine(
        cpu=" ".join(model[1].split()) if model else platform.machine(),  # ARM's kernels name no model
        cores=available_cores(),
        memory_bytes=memory_limit_bytes(),
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages={name: version for name in PACKAGES if (version := installed_version(name))},
        gpus=gpus,
        driver=driver,
        cuda=cuda,
        cudnn=None,
    )


def installed_version(package: str) -> str | None:
    """The installed version; None without one. Builds such as `tensorflow-cpu` hold the package under another name."""
    with contextlib.suppress(metadata.PackageNotFoundError, KeyError):  # KeyError: left by a broken uninstall
        return metadata.version(package)
    with contextlib.suppress(metadata.PackageNotFoundError, KeyError):
        return metadata.version(metadata.packages_distributions()[package][0])
    return None


def available_cores() -> int:
    """Cores this process may use: the smaller of its affinity and its quota. 1.5 cores keep two threads busy."""
    return math.ceil(min(len(os.sched_getaffinity(0)), core_quota()))


def core_quota() -> float:
    """The tightest CPU quota of this process's control groups, in cores; infinite where there is none."""
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
    """Host memory this process may use: the smaller of the host's and the tightest limit of its control groups."""
    texts = [text_of(group / name) for group in _control_groups() for name in ("memory.max", "memory.limit_in_bytes")]
    limits = [limit for text in texts if (limit := _number(text)) is not None]
    return int(min([psutil.virtual_memory().total, *limits]))


def _control_groups() -> set[Path]:
    """The directories in which a limit on this process may stand; not all of them exist."""
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
    """A file's text; empty when it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # ValueError: a null character in the path
        return ""


def _number(text: str) -> float | None:
    """The number in `text`, if it is at least 1; None for anything else, such as `max`."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 1 <= number < math.inf else None
