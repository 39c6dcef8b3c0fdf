"""What a trial tells of its GPUs: names, versions, their memory, and how to ask for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autotune.machine.gpu import GpuMeter, open_meters, read_gpus
from autotune.recipe.lazy import tf


def gpu_names() -> tuple[str, ...]:
    """Names of the GPUs that TensorFlow sees."""
    details = tf.config.experimental.get_device_details
    return tuple(str(details(gpu).get("device_name", gpu.name)) for gpu in tf.config.list_physical_devices("GPU"))


def cards(strategy: tf.distribute.Strategy | None = None) -> list[GpuMeter]:
    """The GPUs that a training uses, for NVML: its strategy's, the first without one; all where that is not known."""
    visible = [int(each.name.rpartition(":")[2]) for each in tf.config.get_visible_devices("GPU")]
    if strategy is not None:
        try:
            visible = used(visible, strategy.extended.worker_devices)
        except RuntimeError:  # TensorFlow's own no-op has none
            visible = used(visible, ())
    return open_meters(visible) if visible else []


def used(visible: Sequence[int], devices: Sequence[str]) -> list[int]:
    """The numbers of the visible GPUs that devices such as `/device:GPU:1` name; the first where they name none."""
    named = [int(each.rpartition(":")[2]) for each in devices if "GPU:" in each.upper()]
    return [visible[each] for each in named if each < len(visible)] or list(visible[:1])


def build_versions() -> dict[str, str]:
    """CUDA and cuDNN versions that TensorFlow was built with, where it was."""
    info = tf.sysconfig.get_build_info()
    return {key: str(info[key]) for key in ("cuda_version", "cudnn_version") if key in info}


def device_limit_bytes() -> int | None:
    """What TensorFlow may take of a GPU or MIG instance; of several the least, and less where the workload limits it.

    None without one, and where NVML does not tell.
    """
    visible = tf.config.get_visible_devices("GPU")
    limits = [gpu.memory_bytes for gpu in read_gpus().gpus] if visible else []
    parts = [part for gpu in visible for part in tf.config.get_logical_device_configuration(gpu) or ()]
    own = [int(part.memory_limit) << 20 for part in parts if part.memory_limit is not None]
    return min(limits + own) if limits else None


def device_bytes(which: Literal["current", "peak"] = "current") -> int | None:
    """What TensorFlow holds, or has held at most, on the GPU where that is most; None where it cannot tell."""
    taken: list[int] = []
    for gpu in tf.config.list_logical_devices("GPU"):
        try:
            info = tf.config.experimental.get_memory_info(gpu.name.removeprefix("/device:"))
        except (ValueError, tf.errors.OpError):  # its allocator keeps no statistics
            continue
        taken.append(int(info[which]))
    return max(taken, default=None)
