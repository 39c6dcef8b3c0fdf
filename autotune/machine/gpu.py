"""The NVIDIA GPUs that CUDA would show to this process: what they are, what they do, and XLA's flags for them.

NVML wakes no CUDA. A reading takes a few milliseconds: not to be taken in a timed stretch.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

from autotune.data.facts import GPU_MODES, Gpu, GpuUse
from autotune.space.knobs import KNOBS
from autotune.space.variables import NO_CACHES, TF_XLA, XLA, parse_flags

T = TypeVar("T")

LIMITED_BY = {
    0x1: "idle",
    0x2: "applications_clocks",
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
}
"""NVML's bits for what holds the clocks down (`nvmlClocksEventReason…`), and their names here."""
SAMPLE_SECONDS = 1.0  # longest period over which NVML samples who uses a card
SHOWS_SEVERAL_INSTANCES = 570  # the driver's version from which CUDA shows more than one MIG instance
ASK_SECONDS = 120
_COMPILE = "import tensorflow as tf; tf.function(lambda x: x + 1.0, jit_compile=True)(tf.constant(1.0))"


class GpuReading(NamedTuple):
    """The visible GPUs, the driver's version, and the newest CUDA version that the driver can run."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None


class NvmlDevice(NamedTuple):
    """A GPU or a MIG instance: its NVML handle, its GPU's index, and the number of its GPU instance."""

    handle: Any
    gpu: int
    instance: int | None = None


class VisibleGpu(NamedTuple):
    """A GPU or MIG instance that this process may use."""

    uuid: str  # what `CUDA_VISIBLE_DEVICES` takes
    name: str


def lowest_capability(gpus: Sequence[Gpu]) -> str | None:
    """Return the lowest compute capability of some GPUs; None where it is not known."""
    return min((gpu.compute_capability for gpu in gpus if gpu.compute_capability), key=float, default=None)


def read_gpus() -> GpuReading:
    """Read the GPUs that CUDA would show to this process, in its order; none without a driver, or when NVML fails.

    Indices in `CUDA_VISIBLE_DEVICES` count in PCI order. With unlike GPUs CUDA does so only under
    `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    """
    return query_nvml(_read_gpus, GpuReading())


def visible_gpus() -> list[VisibleGpu]:
    """List the same GPUs by their UUIDs."""
    return query_nvml(
        lambda nvml: [
            VisibleGpu(str(nvml.nvmlDeviceGetUUID(device.handle)), str(nvml.nvmlDeviceGetName(device.handle)))
            for device in _shown_devices(nvml)[1]
        ],
        [],
    )


def query_nvml(query: Callable[[Any], T], otherwise: T) -> T:
    """Return the reading of `query` from NVML, or `otherwise` without a driver and where NVML fails."""
    import pynvml as nvml  # a large module, which trial processes do not need

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return otherwise
    try:
        return query(nvml)
    except nvml.NVMLError:
        return otherwise
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def ask_nvml(nvml: Any, function: str, *arguments: Any) -> Any:
    """Call a function of NVML; return None where the device, the driver or these bindings do not have it."""
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def split_gpu(nvml: Any, index: int, handle: Any) -> list[NvmlDevice]:
    """Return a GPU, or its MIG instances where it is divided."""
    modes = ask_nvml(nvml, "nvmlDeviceGetMigMode", handle)  # the present and the pending one; None: it knows no MIG
    most = ask_nvml(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) if modes and modes[0] else None
    if most is None:
        return [NvmlDevice(handle, index)]
    instances = []
    for number in range(most):
        with contextlib.suppress(nvml.NVMLError):  # the GPU or this container has fewer instances
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            instances.append(NvmlDevice(instance, index, nvml.nvmlDeviceGetGpuInstanceId(instance)))
    return instances


def _read_gpus(nvml: Any) -> GpuReading:
    handles, devices = _shown_devices(nvml)
    driver, cuda = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion_v2()
    gpus = []
    for device in devices:
        handle = handles[device.gpu]
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        # ECC and MIG answer with the present and the pending mode.
        modes = (ask_nvml(nvml, f"nvmlDeviceGet{mode}Mode", handle) for mode in ("Ecc", "Persistence", "Mig"))
        current = (mode[0] if isinstance(mode, (list, tuple)) else mode for mode in modes)
        gpus.append(
            Gpu(
                name=nvml.nvmlDeviceGetName(device.handle),
                memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(device.handle).total),
                compute_capability=f"{major}.{minor}",
                **{name: None if on is None else bool(on) for name, on in zip(GPU_MODES, current, strict=True)},
            )
        )
    return GpuReading(tuple(gpus), driver, f"{cuda // 1000}.{cuda % 1000 // 10}")


def _shown_devices(nvml: Any) -> tuple[list[Any], list[NvmlDevice]]:
    """Return the handles of all GPUs, and what CUDA would show to this process. Raises `NVMLError`."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    devices = [device for index, handle in enumerate(handles) for device in split_gpu(nvml, index, handle)]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None:
        devices = list(_pick_devices(nvml, wanted, devices, handles))
    instances = [device for device in devices if device.instance is not None]
    # Until driver 570 CUDA shows one instance and no other GPU, since then one of each GPU instance beside whole GPUs
    # (NVIDIA's MIG user guide, "CUDA Device Enumeration").
    if instances and int(nvml.nvmlSystemGetDriverVersion().partition(".")[0]) < SHOWS_SEVERAL_INSTANCES:
        return handles, instances[:1]
    distinct: dict[tuple[int, int | None], NvmlDevice] = {}
    for device in devices:
        distinct.setdefault((device.gpu, device.instance), device)
    return handles, list(distinct.values())


def _pick_devices(nvml: Any, wanted: str, devices: list[NvmlDevice], handles: list[Any]) -> Iterator[NvmlDevice]:
    """Yield the entries of `CUDA_VISIBLE_DEVICES`, up to the first entry that names no single device, such as -1."""

    def has_uuid(handle: Any) -> bool:
        return bool(nvml.nvmlDeviceGetUUID(handle).startswith(entry))

    for entry in (part.strip() for part in wanted.split(",")):
        if entry.startswith("MIG-"):
            named = [device for device in devices if device.instance is not None and has_uuid(device.handle)]
            named = named if len(named) == 1 else []
        else:
            by_uuid = entry.startswith("GPU-")
            gpus = [
                index for index, handle in enumerate(handles) if entry == str(index) or (by_uuid and has_uuid(handle))
            ]
            named = [device for device in devices if gpus == [device.gpu]]
        if not named:
            return
        yield from named


class GpuCounters(NamedTuple):
    """The counters of a GPU at a moment."""

    at: float  # seconds, by a clock that only goes forward
    joules: float | None
    processes: frozenset[int] | None  # that have the card open for computing


class GpuMeter:
    """Reads the clocks, power, energy, heat and other users of a GPU or MIG instance that this process trains on."""

    def __init__(self, nvml: Any, device: NvmlDevice, gpu: Any) -> None:
        self._nvml, self._device, self._card = nvml, device.handle, gpu
        self._whole = gpu if device.instance is None else None  # a card's power and use are all its instances'

    def _ask(self, name: str, handle: Any, *more: Any) -> Any:
        return None if handle is None else ask_nvml(self._nvml, f"nvmlDeviceGet{name}", handle, *more)

    def read_counters(self) -> GpuCounters:
        """Read what was counted up to now."""
        millijoules = self._ask("TotalEnergyConsumption", self._whole)
        processes = self._ask("ComputeRunningProcesses", self._device)
        return GpuCounters(
            at=time.monotonic(),
            joules=None if millijoules is None else millijoules / 1e3,
            processes=None if processes is None else frozenset(process.pid for process in processes),
        )

    def read_use(self, before: GpuCounters, *, seconds: float) -> GpuUse:
        """Read what the GPU did in a slice of so many seconds since `before`; counters in proportion."""
        nvml, card = self._nvml, self._card
        clock = self._ask("ClockInfo", card, nvml.NVML_CLOCK_SM)  # first: it falls soon after the last kernel
        bits = self._ask("CurrentClocksEventReasons", card)
        if bits is None:  # drivers before 535 have the older name only
            bits = self._ask("CurrentClocksThrottleReasons", card)
        rates, memory = self._ask("UtilizationRates", self._whole), self._ask("MemoryInfo", self._device)
        power = self._ask("PowerUsage", self._whole)
        after = self.read_counters()
        passed = max(after.at - before.at, 1e-9)
        watts, joules = None if power is None else power / 1e3, None
        if before.joules is not None and after.joules is not None:
            watts = max(0.0, after.joules - before.joules) / passed
            joules = watts * min(seconds, passed)
        others = _find_others(before.processes, after.processes)
        return GpuUse(
            sm_mhz=clock,
            most_sm_mhz=self._ask("MaxClockInfo", card, nvml.NVML_CLOCK_SM),
            watts=watts,
            joules=joules,
            celsius=self._ask("Temperature", card, nvml.NVML_TEMPERATURE_GPU),
            limited_by=None if bits is None else tuple(name for bit, name in LIMITED_BY.items() if bits & bit),
            utilisation=None if rates is None else rates.gpu / 100,
            memory_utilisation=None if rates is None else rates.memory / 100,
            used_bytes=None if memory is None else memory.used,
            free_bytes=None if memory is None else memory.free,
            others=None if others is None else len(others),
            foreign_utilisation=None if others is None else self._share_of(others, passed),
        )

    def _share_of(self, processes: frozenset[int], seconds: float) -> float | None:
        """Return the share of the card's time that processes took in the last seconds; None where it is unknown."""
        if not processes:
            return 0.0
        since = time.time() - max(seconds, SAMPLE_SECONDS)
        samples = self._ask("ProcessUtilization", self._whole, int(since * 1e6))
        if samples is None:
            return None
        shares = [[sample.smUtil for sample in samples if sample.pid == pid] or [0] for pid in processes]
        return min(1.0, sum(map(statistics.fmean, shares)) / 100)


def _find_others(before: frozenset[int] | None, after: frozenset[int] | None) -> frozenset[int] | None:
    """Return the processes on a card but this one and frozen ones, such as the other side of a pair.

    None where this process is not among them: in a container the numbers may be the host's.
    """
    if before is None or after is None or os.getpid() not in before | after:
        return None
    return frozenset(pid for pid in (before | after) - {os.getpid()} if not _is_frozen(pid))


def _is_frozen(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:  # it has ended, or is somebody else's
        return False


def open_meters(indices: Collection[int]) -> list[GpuMeter]:
    """Open meters of these GPUs, by their place among what CUDA shows; none where NVML does not answer."""
    # NVML stays open until this process ends: to start it takes up to a second on hosts with several cards.
    import pynvml as nvml  # a large module, which trials on a CPU do not need

    try:
        nvml.nvmlInit()
        handles, devices = _shown_devices(nvml)
    except nvml.NVMLError:
        return []
    return [GpuMeter(nvml, device, handles[device.gpu]) for index, device in enumerate(devices) if index in indices]


def _try_flags(xla: str, tf_xla: str = "") -> tuple[int, str]:
    """Compile in a process with these flags, which sees no GPU; return its exit status and what it wrote."""
    variables = {**os.environ, XLA: xla, TF_XLA: tf_xla, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", _COMPILE]
    try:
        ended = subprocess.run(
            command, env=variables, capture_output=True, text=True, errors="replace", timeout=ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return ended.returncode, ended.stderr


def missing_xla_flags(names: Iterable[str], try_flags: Callable[[str], tuple[int, str]] = _try_flags) -> dict[str, str]:
    """Return those of these knobs that are flags of XLA the installed TensorFlow lacks, with the reason.

    An unknown flag ends the process that first compiles. One process is tried with all of them.
    """
    wanted, flags = _xla_flags(names)
    if not wanted:
        return {}
    status, output = try_flags(flags)
    if status == 0:
        return {}
    # As xla/parse_flags_from_env.cc says it.
    found = re.search(rf"Unknown flags? in {XLA}: (.*)", output)
    unknown = [name for name in parse_flags({XLA: found[1]}, XLA) if name in wanted] if found else []
    if unknown:
        return dict.fromkeys(unknown, "the installed TensorFlow has no such flag of XLA")
    return dict.fromkeys(wanted, "autotune could not find out which flags of XLA the installed TensorFlow has")


def can_keep_compilations(
    names: Iterable[str] = (), try_flags: Callable[[str, str], tuple[int, str]] = _try_flags
) -> bool:
    """Return whether the installed TensorFlow has the flags that keep compilations, and those of these knobs."""
    return try_flags(f"{_xla_flags(names)[1]} {NO_CACHES[XLA]}".strip(), NO_CACHES[TF_XLA])[0] == 0


def _xla_flags(names: Iterable[str]) -> tuple[list[str], str]:
    """Return which of these knobs are flags of XLA, and the text of these flags with their defaults."""
    found = [name for name in names if name in KNOBS and KNOBS[name].variable == XLA]
    variables: dict[str, str] = {}
    for name in found:
        KNOBS[name].set(variables, KNOBS[name].default)
    return found, variables.get(XLA, "")


def is_gpu_file(path: str) -> bool:
    """Return whether CUDA holds such a file open: of NVIDIA's driver, under WSL 2, on Jetson boards."""
    return path.startswith(("/dev/nvidia", "/dev/dxg", "/dev/nvhost", "/dev/nvmap"))


def has_gpu_files() -> bool:
    """Return whether this machine has a file by which CUDA could open a GPU."""
    return any(is_gpu_file(f"/dev/{name}") for name in os.listdir("/dev"))


def is_gpu_open(descriptors: Path = Path("/proc/self/fd")) -> bool:
    """Return whether a process, by its list of descriptors, holds a GPU's file open: no fork survives that."""
    for name in os.listdir(descriptors):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            if is_gpu_file(os.readlink(descriptors / name)):
                return True
    return False
