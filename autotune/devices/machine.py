"""The fingerprint of the machine: hardware, driver, versions.

Read from /proc, the control groups, NVML and the installed packages' metadata. Sizes are in bytes and are
what this process may use, not what the host has.

This module may not import TensorFlow, nor anything of the package but `errors`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from autotune.errors import InputError

PACKAGES = ("autotune", "tensorflow", "keras", "numpy", "optuna")
"""The packages whose versions are part of the fingerprint."""

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_ROOT = Path("/proc")

FIRST_DRIVER_OF_SEVERAL_INSTANCES = 570
"""From this major version on CUDA shows several MIG instances to one process."""
MEMORY_TOLERANCE = 0.1
"""The share by which two machines' memory may differ and still count as the same size."""

_GIB = 1 << 30
_LARGEST_INTEGER = (1 << 63) - 1
_LONGEST_INTEGER = 20
"""Digits of the largest number a control group holds, an unsigned 64-bit integer."""


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Gpu(_Data):
    """One NVIDIA GPU, or one MIG instance of it.

    Args:
        name: As the driver calls it, such as `NVIDIA H200`.
        memory_bytes: All of its memory, whoever uses it now.
        compute_capability: Such as `9.0`; None where it is not known.
    """

    name: str
    memory_bytes: Annotated[int, Field(ge=0, le=_LARGEST_INTEGER)]
    compute_capability: str | None = None


class Machine(_Data):
    """What a speed was measured on.

    Args:
        cpu: The processor's model name.
        cores: Cores this process may use.
        memory_bytes: Host memory this process may use.
        platform: Kernel and architecture, such as `Linux x86_64`.
        python: The interpreter's version.
        packages: Installed versions by package name; a package that is not installed is left out.
        gpus: The GPUs visible to this process, in the driver's order.
        driver: The NVIDIA driver's version; None without one.
        cuda: The newest CUDA version the driver can run, such as `12.8`.
        cudnn: The cuDNN version that TensorFlow reports; None until it was asked.
        tensorflow_cuda: The CUDA version TensorFlow was built with; None until it was asked.
    """

    cpu: str
    cores: Annotated[int, Field(ge=1, le=_LARGEST_INTEGER)]
    memory_bytes: Annotated[int, Field(ge=0, le=_LARGEST_INTEGER)]
    platform: str
    python: str
    packages: dict[str, str]
    gpus: Annotated[tuple[Gpu, ...], Field(fail_fast=True)]
    driver: str | None
    cuda: str | None
    cudnn: str | None
    tensorflow_cuda: str | None = None

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits that stay the same as long as hardware, driver and versions do."""
        # What TensorFlow reports is left out: the same machine must not get another id once it was asked.
        facts = self.model_dump(mode="json", exclude={"cudnn", "tensorflow_cuda"})
        # The kernel's own share of the memory changes by some megabytes with each of its updates.
        facts["memory_bytes"] = round(self.memory_bytes / _GIB) * _GIB
        canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def differences(self, other: Machine) -> tuple[str, ...]:
        """What can make `other` faster or slower than this machine, one line each.

        Args:
            other: The machine at hand; `self` is the one that was measured on.

        Returns:
            Lines such as `GPU: measured on NVIDIA H200, here none`; empty when speeds carry over.
        """
        pairs = [
            ("CPU", self.cpu, other.cpu),
            ("cores", str(self.cores), str(other.cores)),
            ("memory", *_sizes(self.memory_bytes, other.memory_bytes)),
            *_gpu_pairs(self, other),
            ("TensorFlow", self.packages.get("tensorflow"), other.packages.get("tensorflow")),
            ("Keras", self.packages.get("keras"), other.packages.get("keras")),
            ("Python", _minor(self.python), _minor(other.python)),
        ]
        return tuple(
            f"{what}: measured on {measured or 'none'}, here {here or 'none'}"
            for what, measured, here in pairs
            if measured != here
        )


class GpuReading(NamedTuple):
    """What NVML told: the visible GPUs, the driver's version, and the CUDA version it can run."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None


def require_linux() -> None:
    """Refuse to go on anywhere but on Linux.

    Raises:
        InputError: This is another operating system.
    """
    # Through a variable, or the type checker takes the rest for dead code on the platform it checks.
    system: str = sys.platform
    if system != "linux":
        raise InputError(
            f"autotune runs on Linux only, and this is {system}: use a Linux machine or container"
        )


def fingerprint() -> Machine:
    """This machine, as this process may use it. Takes milliseconds, and wakes no GPU."""
    gpus, driver, cuda = read_gpus()
    return Machine(
        cpu=_cpu_model(PROC_ROOT),
        cores=available_cores(),
        memory_bytes=memory_limit_bytes(),
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages=_installed_versions(),
        gpus=gpus,
        driver=driver,
        cuda=cuda,
        cudnn=None,
    )


# --------------------------------------------------------------------------------- processor and memory


def available_cores(cgroup_root: Path = CGROUP_ROOT, proc_root: Path = PROC_ROOT) -> int:
    """How many cores this process may use, at least 1.

    The smaller of its CPU affinity and the tightest CPU quota of its control groups, which is rounded up:
    a quota of 1.5 cores keeps two threads busy.

    Args:
        cgroup_root: Where the control groups (version 1 or 2) are mounted.
        proc_root: Where procfs is mounted.
    """
    cores = len(os.sched_getaffinity(0))
    return math.ceil(min(cores, core_quota(cgroup_root, proc_root)))


def core_quota(cgroup_root: Path = CGROUP_ROOT, proc_root: Path = PROC_ROOT) -> float:
    """The tightest CPU quota of this process's control groups, in cores; infinite where there is none.

    Args:
        cgroup_root: Where the control groups (version 1 or 2) are mounted.
        proc_root: Where procfs is mounted.
    """
    quotas = [math.inf]
    for group in control_groups("cpu", cgroup_root, proc_root):
        # Version 2 keeps "quota period" in one file, version 1 in two; both in microseconds.
        text = _read(group / "cpu.max") or " ".join(
            _read(group / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        )
        match [_positive(word) for word in text.split()]:
            case [int(quota), int(period)]:
                quotas.append(quota / period)
    return min(quotas)


def memory_limit_bytes(cgroup_root: Path = CGROUP_ROOT, proc_root: Path = PROC_ROOT) -> int:
    """How much host memory this process may use, in bytes.

    The smaller of the host's memory and the tightest limit of the process's control groups.

    Args:
        cgroup_root: Where the control groups (version 1 or 2) are mounted.
        proc_root: Where procfs is mounted.
    """
    limits = [_host_memory_bytes(proc_root)]
    for group in control_groups("memory", cgroup_root, proc_root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _positive(_read(group / name))
            if limit is not None:
                limits.append(limit)
    return min(limits)


def control_groups(controller: str, cgroup_root: Path, proc_root: Path) -> Iterator[Path]:
    """The directories in which a limit on this process may stand: its own groups and all above them.

    Inside a container /proc may name the group as the host sees it, while the mount shows the container's
    own group as its root. So the roots always count, and directories that do not exist are left to the
    reader to skip.
    """
    yield cgroup_root
    yield cgroup_root / controller
    for line in _read(proc_root / "self" / "cgroup").split("\n"):
        # hierarchy:controllers:path; version 2 has no controllers, version 1 is mounted once per set of them
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:
            mounts = [cgroup_root]
        elif controller in controllers.split(","):
            mounts = [cgroup_root / controller, cgroup_root / controllers]
        else:
            continue
        names = [name for name in path.split("/") if name not in ("", ".", "..")]
        for mount in mounts:
            yield from (mount.joinpath(*names[:depth]) for depth in range(len(names) + 1))


def _host_memory_bytes(proc_root: Path) -> int:
    for line in _read(proc_root / "meminfo").splitlines():
        key, _, rest = line.partition(":")
        kibibytes = _positive(rest.removesuffix("kB"))
        if key == "MemTotal" and kibibytes is not None:
            return kibibytes * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_model(proc_root: Path) -> str:
    """The processor's model name; the architecture where the kernel gives none (ARM)."""
    for line in _read(proc_root / "cpuinfo").splitlines():
        key, _, name = line.partition(":")
        if key.strip() == "model name" and name.strip():
            return " ".join(name.split())
    return platform.machine() or "unknown"


def _read(file: Path) -> str:
    """A file's text; empty when it cannot be read, as half of these files are missing on any one machine."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # ValueError: a null character in the path
        return ""


def _positive(text: str) -> int | None:
    """The positive integer in `text`; None for anything else, such as `max`, `-1` or nothing."""
    digits = text.strip()
    if len(digits) > _LONGEST_INTEGER or not (digits.isascii() and digits.isdigit()):
        return None
    return int(digits) or None


# ------------------------------------------------------------------------------------------------ versions


def _installed_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        # What a broken uninstall leaves behind has no version: a KeyError or None, depending on the Python.
        with contextlib.suppress(metadata.PackageNotFoundError, KeyError):
            if version := metadata.version(package):
                versions[package] = version
    return versions


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


# ---------------------------------------------------------------------------------------------------- GPUs


def read_gpus(nvml: Any = None) -> GpuReading:
    """The GPUs that CUDA would show to this process, from NVML, without waking CUDA.

    `CUDA_VISIBLE_DEVICES` is respected for indices, `GPU-…` and `MIG-…` UUIDs. Indices count in PCI order, as NVML
    does; on machines with unlike GPUs CUDA does so only under `CUDA_DEVICE_ORDER=PCI_BUS_ID`. Of a GPU that is divided
    into MIG instances CUDA shows those: one to a process, and no other GPU, until driver 570; since then one of each
    GPU instance, beside whole GPUs (NVIDIA's MIG user guide, "CUDA Device Enumeration").

    Args:
        nvml: The `pynvml` module or one that answers like it; None imports `pynvml`.

    Returns:
        What NVML told; an empty reading when there is no library or no driver, or when NVML fails at any
        point: half a list of GPUs would be taken for the whole.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return GpuReading()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return GpuReading()
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        return GpuReading(
            gpus=tuple(_read_gpu(nvml, device) for device in _visible_devices(nvml, driver)),
            driver=driver,
            cuda=_cuda_version(nvml.nvmlSystemGetCudaDriverVersion_v2()),
        )
    except nvml.NVMLError:
        return GpuReading()
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


class _Device(NamedTuple):
    """What CUDA can show, by NVML's handles: a GPU, or a MIG instance.

    Args:
        handle: Its own.
        gpu: Of the GPU that it is, or is a part of.
        instance: NVML's number of the GPU instance, of which CUDA shows one compute instance; None of a whole GPU.
    """

    handle: Any
    gpu: Any
    instance: int | None = None


def _visible_devices(nvml: Any, driver: str) -> list[_Device]:
    """What `CUDA_VISIBLE_DEVICES` shows, in its order; everything without it."""
    gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    devices = [_devices_of(nvml, gpu) for gpu in gpus]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = (
        [one for each in devices for one in each]
        if wanted is None
        else list(_picked(nvml, wanted, devices, gpus))
    )
    instances = [each for each in shown if each.instance is not None]
    if instances and _major(driver) < FIRST_DRIVER_OF_SEVERAL_INSTANCES:
        return instances[:1]
    once: dict[tuple[int, int | None], _Device] = {}
    for each in shown:
        once.setdefault((id(each.gpu), each.instance), each)
    return list(once.values())


def _picked(nvml: Any, wanted: str, devices: list[list[_Device]], gpus: list[Any]) -> Iterator[_Device]:
    """What the entries of `CUDA_VISIBLE_DEVICES` name, up to the first that names no single device: so -1 hides all.

    Args:
        nvml: For UUIDs.
        wanted: Its entries.
        devices: Of each GPU, itself or its instances.
        gpus: NVML's handles of those, in the same order.
    """
    instances = [one for each in devices for one in each if one.instance is not None]
    for entry in (part.strip() for part in wanted.split(",")):
        if entry.startswith("MIG-"):
            named = [
                [each] for each in instances if _text(nvml.nvmlDeviceGetUUID(each.handle)).startswith(entry)
            ]
        elif entry.startswith("GPU-"):
            uuids = [_text(nvml.nvmlDeviceGetUUID(gpu)) for gpu in gpus]
            named = [each for each, uuid in zip(devices, uuids, strict=True) if uuid.startswith(entry)]
        else:
            named = [each for index, each in enumerate(devices) if entry == str(index)]
        if len(named) != 1 or not named[0]:
            return
        yield from named[0]


def _devices_of(nvml: Any, gpu: Any) -> list[_Device]:
    """A GPU, or its MIG instances where it is divided."""
    try:
        divided, _ = nvml.nvmlDeviceGetMigMode(gpu)
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(gpu) if divided else 0
    except nvml.NVMLError:  # it knows no MIG, or cannot be asked
        divided = most = 0
    if not divided:
        return [_Device(gpu, gpu)]
    found = []
    for index in range(most):
        with contextlib.suppress(nvml.NVMLError):  # fewer are there, or are this container's
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
            found.append(_Device(handle, gpu, int(nvml.nvmlDeviceGetGpuInstanceId(handle))))
    return found


def _major(version: str) -> int:
    """The first number of a version; 0 where it is none."""
    return _positive(version.partition(".")[0]) or 0


def _read_gpu(nvml: Any, device: _Device) -> Gpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device.gpu)
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(device.handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(device.handle).total),
        compute_capability=f"{major}.{minor}",
    )


def _cuda_version(number: int) -> str:
    """`12.8` for NVML's 12080."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _text(value: str | bytes) -> str:
    """NVML's strings are bytes in some versions of its bindings."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


# --------------------------------------------------------------------------------------------- differences


def _gpu_pairs(measured: Machine, here: Machine) -> list[tuple[str, str, str]]:
    """What to compare of two machines' GPUs: their details only where the GPUs are the same."""
    names = ("GPU", _gpu_names(measured.gpus), _gpu_names(here.gpus))
    if not measured.gpus or names[1] != names[2]:
        return [names]
    return [
        ("GPU memory", *_sizes(_gpu_memory_bytes(measured), _gpu_memory_bytes(here))),
        ("NVIDIA driver", measured.driver or "", here.driver or ""),
    ]


def _gpu_names(gpus: tuple[Gpu, ...]) -> str:
    """`2 × NVIDIA H200, NVIDIA L4`; empty for none."""
    counts = Counter(gpu.name for gpu in gpus)
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items())


def _gpu_memory_bytes(machine: Machine) -> int:
    return sum(gpu.memory_bytes for gpu in machine.gpus)


def _sizes(measured: int, here: int) -> tuple[str, str]:
    """Both sizes in GiB; the same text twice when they differ by no more than the tolerance."""
    if abs(here - measured) <= MEMORY_TOLERANCE * measured:
        here = measured
    return f"{measured / _GIB:.2f} GiB", f"{here / _GIB:.2f} GiB"
