"""The fingerprint of the machine, and its kind: hardware, driver, versions; the cores and memory of this process.

The kind decides which recipe of a folder fits; of the others, one is the nearest.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil

from autotune.data.errors import InputError
from autotune.data.facts import Machine, gpu_names, has_cards_of
from autotune.data.printable import LONGEST_MESSAGE, one_line
from autotune.machine.gpu import lowest_capability, read_gpus
from autotune.version import __version__

PACKAGES = ("tensorflow", "keras", "tf_keras", "numpy", "optuna")
CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_ROOT = Path("/proc")
PROCESSOR_UNITS = ("amx_bf16", "amx_fp16", "avx512_bf16", "avx512_fp16")
"""Flags of the kernel, the fastest units first."""
GPU_UNITS = {"tensor_fp16": 7.0, "tensor_bf16": 8.0, "tensor_fp8": 8.9}
"""Units of NVIDIA's tensor cores, and the lowest compute capability that has them: Volta, Ampere, Ada and Hopper."""


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
            *(unit for unit in PROCESSOR_UNITS if flags and unit in flags[1].split()),
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


def units_of_gpu(capability: str | None) -> tuple[str, ...]:
    """Return the units of a GPU of this compute capability, such as `8.0`; none where it is not known."""
    return tuple(unit for unit, least in GPU_UNITS.items() if float(capability or 0) >= least)


def units_for(units: Collection[str], *, on_gpu: bool) -> frozenset[str]:
    """Return those of a machine's units that a training on its processor, or on its GPUs, computes on."""
    return frozenset(unit for unit in units if (unit in GPU_UNITS) is on_gpu)


# --------------------------------------------------------------------------------------------------- kinds of machines


class Kind(NamedTuple):
    """The device model and count, TensorFlow's minor version, and Keras's major version."""

    device: str  # `2 × NVIDIA H200`; of a machine without a GPU `Intel Xeon × 8 cores`
    tensorflow: str  # `2.21`
    keras: str  # `3`

    def __str__(self) -> str:
        """Return `2 × NVIDIA H200, TensorFlow 2.21, Keras 3`."""
        return f"{self.device}, TensorFlow {self.tensorflow}, Keras {self.keras}"


def kind_of(machine: Machine) -> Kind:
    """Return the kind of a machine."""
    device = gpu_names(machine.gpus) or machine.describe()
    return Kind(device, _version(machine, "tensorflow", parts=2), _version(machine, "keras", parts=1))


def kind_differences(measured: Machine, here: Machine) -> tuple[str, ...]:
    """Return the differences that make two machines unlike kinds, such as `TensorFlow: measured on 2.18, here 2.21`.

    A recipe that was measured on a part of the cards here is of this kind.
    """
    there, now = kind_of(measured), kind_of(here)
    if measured.gpus and has_cards_of(measured, here):
        there = there._replace(device=now.device)
    labels = ("device", "TensorFlow", "Keras")
    return tuple(
        f"{label}: measured on {before}, here {after}"
        for label, before, after in zip(labels, there, now, strict=True)
        if before != after
    )


def describe_changes(changes: Iterable[str], command: str) -> str:
    """Say what has changed since a recipe was measured, and the command that measures its claim again."""
    text = f"changed since the recipe was measured: {'; '.join(changes)}. To measure its claim again: {command}"
    return one_line(text, longest=LONGEST_MESSAGE)


def find_nearest(measured: Sequence[Machine], here: Machine) -> list[int]:
    """Return the positions of the machines, the nearest first.

    One of this kind comes first. Of others the kind of device counts most, then its model, its count, and all else.
    """
    return sorted(range(len(measured)), key=lambda index: _distance(measured[index], here))


def _distance(measured: Machine, here: Machine) -> tuple[float, ...]:
    models = [{gpu.name for gpu in machine.gpus} or {machine.cpu} for machine in (measured, here)]
    counts = [len(machine.gpus) or machine.cores for machine in (measured, here)]
    return (
        bool(kind_differences(measured, here)),
        bool(measured.gpus) != bool(here.gpus),
        models[0] != models[1],
        abs(math.log(counts[0] / counts[1])),
        len(measured.differences(here)),
    )


def _version(machine: Machine, package: str, *, parts: int) -> str:
    return ".".join(machine.packages.get(package, "none").split(".")[:parts])
