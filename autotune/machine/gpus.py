"""The NVIDIA GPUs that CUDA would show to this process, read from NVML without waking CUDA."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from autotune.data.hardware import GPU_MODES, Gpu

T = TypeVar("T")


def lowest_capability(gpus: Sequence[Gpu]) -> str | None:
    """The lowest compute capability of some GPUs; None where it is not known."""
    return min((each.compute_capability for each in gpus if each.compute_capability), key=float, default=None)


class GpuReading(NamedTuple):
    """The visible GPUs, the driver's version, and the newest CUDA version that the driver can run."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None


class Device(NamedTuple):
    """A GPU or a MIG instance: its NVML handle, its GPU's index, and the number of its GPU instance."""

    handle: Any
    gpu: int
    instance: int | None = None


class VisibleGpu(NamedTuple):
    """A GPU or MIG instance that this process may use."""

    uuid: str  # what `CUDA_VISIBLE_DEVICES` takes
    name: str


def read_gpus() -> GpuReading:
    """The GPUs that CUDA would show to this process, in its order; none without a driver, or when NVML fails.

    Indices in `CUDA_VISIBLE_DEVICES` count in PCI order. With unlike GPUs CUDA does so only under
    `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    """
    return with_nvml(_reading, GpuReading())


def visible_gpus() -> list[VisibleGpu]:
    """The same by their UUIDs."""
    return with_nvml(
        lambda nvml: [
            VisibleGpu(str(nvml.nvmlDeviceGetUUID(each.handle)), str(nvml.nvmlDeviceGetName(each.handle)))
            for each in shown_devices(nvml)[1]
        ],
        [],
    )


def with_nvml(use: Callable[[Any], T], otherwise: T) -> T:
    """What `use` makes of NVML, or `otherwise` without a driver and where NVML fails."""
    import pynvml as nvml  # a large module, which trial processes do not need

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return otherwise
    try:
        return use(nvml)
    except nvml.NVMLError:
        return otherwise
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def shown_devices(nvml: Any) -> tuple[list[Any], list[Device]]:
    """The handles of all GPUs, and what CUDA would show to this process. Raises `NVMLError`."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    devices = [each for index, handle in enumerate(handles) for each in parts_of(nvml, index, handle)]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None:
        devices = list(_picked(nvml, wanted, devices, handles))
    driver = nvml.nvmlSystemGetDriverVersion()
    return handles, _shown(devices, several=int(driver.partition(".")[0]) >= 570)


def asked(nvml: Any, name: str, *arguments: Any) -> Any:
    """What an NVML function answers; None where the device, the driver or these bindings do not have it."""
    try:
        return getattr(nvml, name)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _reading(nvml: Any) -> GpuReading:
    handles, devices = shown_devices(nvml)
    driver, cuda = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion_v2()
    gpus = []
    for device in devices:
        handle = handles[device.gpu]
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        modes = (
            asked(nvml, f"nvmlDeviceGet{mode}Mode", handle)  # ECC and MIG: the present and the pending one
            for mode in ("Ecc", "Persistence", "Mig")
        )
        current = (each[0] if isinstance(each, (list, tuple)) else each for each in modes)
        gpus.append(
            Gpu(
                name=nvml.nvmlDeviceGetName(device.handle),
                memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(device.handle).total),
                compute_capability=f"{major}.{minor}",
                **{name: None if each is None else bool(each) for name, each in zip(GPU_MODES, current, strict=True)},
            )
        )
    return GpuReading(tuple(gpus), driver, f"{cuda // 1000}.{cuda % 1000 // 10}")


def parts_of(nvml: Any, index: int, handle: Any) -> list[Device]:
    """A GPU, or its MIG instances where it is divided."""
    modes = asked(nvml, "nvmlDeviceGetMigMode", handle)  # the present and the pending one; None: it knows no MIG
    most = asked(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) if modes and modes[0] else None
    if most is None:
        return [Device(handle, index)]
    found = []
    for number in range(most):
        with contextlib.suppress(nvml.NVMLError):  # the GPU or this container has fewer instances
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            found.append(Device(instance, index, nvml.nvmlDeviceGetGpuInstanceId(instance)))
    return found


def _picked(nvml: Any, wanted: str, devices: list[Device], handles: list[Any]) -> Iterator[Device]:
    """What the entries of `CUDA_VISIBLE_DEVICES` name, up to the first that names no single device, such as -1."""

    def has_uuid(handle: Any) -> bool:
        return bool(nvml.nvmlDeviceGetUUID(handle).startswith(entry))

    for entry in (part.strip() for part in wanted.split(",")):
        if entry.startswith("MIG-"):
            named = [each for each in devices if each.instance is not None and has_uuid(each.handle)]
            named = named if len(named) == 1 else []
        else:
            by_uuid = entry.startswith("GPU-")
            gpus = [
                index for index, handle in enumerate(handles) if entry == str(index) or (by_uuid and has_uuid(handle))
            ]
            named = [each for each in devices if gpus == [each.gpu]]
        if not named:
            return
        yield from named


def _shown(devices: list[Device], *, several: bool) -> list[Device]:
    """What CUDA shows of these to one process: `several` MIG instances, or one alone.

    Until driver 570 it shows one instance and no other GPU, since then one of each GPU instance beside whole GPUs
    (NVIDIA's MIG user guide, "CUDA Device Enumeration").
    """
    instances = [each for each in devices if each.instance is not None]
    if instances and not several:
        return instances[:1]
    once: dict[tuple[int, int | None], Device] = {}
    for each in devices:
        once.setdefault((each.gpu, each.instance), each)
    return list(once.values())
