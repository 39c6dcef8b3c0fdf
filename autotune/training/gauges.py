"""Measure each slice besides its length, and read TensorFlow's figures of the GPUs.

A gauge is called when a slice begins. It returns a function that is called with the slice's seconds when it ends, and
gives fields of `record.Slice`. A new figure per slice is one more gauge.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from autotune.data.printable import plural
from autotune.data.record import Outcome
from autotune.machine.gpu import GpuMeter, open_meters, read_gpus
from autotune.machine.telemetry import Counters, between, host_bytes, part_of, read_counters
from autotune.recipe.tf_private import tf, tracing_seconds
from autotune.runtime.executor import TrialFailed
from autotune.training.progress import Progress

Gauge = Callable[[], Callable[[float], dict[str, Any]]]

_LOGS_COMPILATIONS = "device_compilation_profiler=1"
"""The source file of TensorFlow's runtime that logs each compilation, with the level of verbosity at which it does."""
_COMPILED = re.compile(rb"device_compilation_profiler\.cc:\d+\] Compiled \S+ \d+ times?,")


class Weights(NamedTuple):
    """The weights of a training."""

    variables: Sequence[Any]
    trained: Sequence[Any]  # those of them that are updated


def measure_machine(read: Callable[[], Counters] = read_counters) -> Callable[[float], dict[str, Any]]:
    """Measure processor time of the trial and of others, memory and clock rate, scaled to the slice's length."""
    before = read()

    def measured(slice_seconds: float) -> dict[str, Any]:
        after = read()
        part = part_of(before, after, seconds=slice_seconds)
        counted = between(before, after, seconds=slice_seconds)
        return {**counted, "cpu_seconds": part * max(0.0, after.own - before.own), "host_bytes": host_bytes()}

    return measured


def gpu_gauges(cards: Sequence[GpuMeter]) -> list[Gauge]:
    """Return a gauge of what NVML tells of the GPUs that are trained on; none without a GPU."""

    def gauge() -> Callable[[float], dict[str, Any]]:
        before = [card.read_counters() for card in cards]
        return lambda seconds: {
            "gpus": tuple(card.read_use(counted, seconds=seconds) for card, counted in zip(cards, before, strict=True))
        }

    return [gauge] if cards else []


def skipped_steps_gauge(progress: Progress, finite_steps: Callable[[], int]) -> Gauge:
    """Return a gauge of steps whose gradients a loss scale found infinite; `finite_steps` counts the others so far."""

    def gauge() -> Callable[[float], dict[str, Any]]:
        before = progress.steps - finite_steps()
        return lambda _: {"skipped_steps": max(0, progress.steps - finite_steps() - before)}

    return gauge


def finite_weights_gauge(weights: Callable[[], Weights], progress: Progress) -> Gauge:
    """Return a gauge that measures nothing: it checks the weights once, at the end of the first slice."""
    check = functools.cache(lambda: check_finite_weights(weights(), step=progress.steps))

    def measured(_: float) -> dict[str, Any]:
        check()
        return {}

    return lambda: measured


def count_parameters(weights: Weights) -> int:
    """Return how many numbers the weights hold; those of unknown shape count as none."""
    return sum(int(tf.TensorShape(weight.shape).num_elements() or 0) for weight in weights.variables)


def describe_weights(weights: Weights) -> dict[str, Any]:
    """Return the fields of `FirstStep` that tell one model from another."""
    shapes = sorted(str(tf.TensorShape(weight.shape)) for weight in weights.trained)
    return {"parameters": count_parameters(weights), "shapes": tuple(shapes)}


def check_finite_weights(weights: Weights, *, step: int) -> None:
    """Raise TrialFailed where training has ruined a weight: no number that a step returns need show it."""
    trained = {id(weight) for weight in weights.trained}  # others may hold infinities, as masks do
    for weight in (weight for weight in weights.variables if tf.as_dtype(weight.dtype).is_floating):
        values = tf.convert_to_tensor(weight)
        if not tf.reduce_any(tf.math.is_nan(values) | (tf.math.is_inf(values) & (id(weight) in trained))):
            continue
        name = weight.path if hasattr(weight, "path") else weight.name  # in Keras 2
        raise TrialFailed(Outcome.NONFINITE, f"the weight {name} is not finite after {plural(step, 'step')}")


# --------------------------------------------------------------------------------------------- tracing and compiling


class _AskRuntime(importlib.abc.MetaPathFinder):
    """Sets what the runtime's log depends on at the last moment: a user's file may set it, too, before its import."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Find nothing, and stay: it may be asked more than once, as looking for a module does not import it."""
        if name != "tensorflow":
            return
        wanted = os.environ.get("TF_CPP_VMODULE", "").split(",")
        others = [level for level in wanted if level and level != _LOGS_COMPILATIONS]
        os.environ["TF_CPP_VMODULE"] = ",".join([*others, _LOGS_COMPILATIONS])
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"  # at any other, the runtime keeps such lines to itself


def enable_compile_logging() -> None:
    """Have TensorFlow, which is not imported yet, log each compilation of XLA's."""
    sys.meta_path.insert(0, _AskRuntime())


class Retracing:
    """Counts how often the train function was traced or compiled in each slice.

    Tracing shows in the seconds that TensorFlow says it spends on it, before and after each call. XLA compiles anew for
    each shape that it meets, without a new trace: of that its runtime writes a line into the log. Lines written between
    calls are of other functions, such as a validation's.
    """

    def __init__(self, log: Path, *, xla: bool) -> None:
        self._log = log
        self._read_bytes = log.stat().st_size
        self._retraces = 0
        self._seen = not xla  # where XLA compiles, a first compilation must be seen: else the log does not tell
        self._spent = tracing_seconds()

    def wrap(self, train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return `train_function`, with what its calls trace or compile counted.

        Each new trace is compiled: the larger of the two numbers counts.
        """
        spent = self._spent
        if spent is None:
            return train_function

        def watched(iterator: Any) -> Any:
            before = spent()
            self._count_compilations()
            logs = train_function(iterator)
            self._retraces += max(spent() != before, self._count_compilations())
            return logs

        return watched

    def gauge(self) -> Callable[[float], dict[str, Any]]:
        """Count how often the function is traced or compiled in a slice; None where that cannot be seen."""
        before = self._retraces

        def measured(_: float) -> dict[str, Any]:
            seen = self._seen and self._spent is not None
            return {"retraces": self._retraces - before if seen else None}

        return measured

    def _count_compilations(self) -> int:
        """Count those that the log's whole lines tell of since the last time."""
        found = 0
        with contextlib.suppress(OSError):
            if os.stat(self._log).st_size == self._read_bytes:
                return 0
        with contextlib.suppress(OSError), self._log.open("rb") as stream:
            # A log that had grown too large is shorter than before: what its lost lines said is not counted.
            start = stream.seek(min(self._read_bytes, os.fstat(stream.fileno()).st_size))
            whole, newline, _ = stream.read().rpartition(b"\n")
            self._read_bytes = start + len(whole + newline)
            found = len(_COMPILED.findall(whole))
        self._seen = self._seen or found > 0
        return found


# --------------------------------------------------------------------------------------------- the GPUs of this trial


def gpu_names() -> tuple[str, ...]:
    """Return the names of the GPUs that TensorFlow sees."""
    details = tf.config.experimental.get_device_details
    return tuple(str(details(gpu).get("device_name", gpu.name)) for gpu in tf.config.list_physical_devices("GPU"))


def cards_in_use(strategy: tf.distribute.Strategy | None = None) -> list[GpuMeter]:
    """Open the GPUs that a training uses, for NVML: its strategy's, or the first; all where that is not known."""
    visible = [int(gpu.name.rpartition(":")[2]) for gpu in tf.config.get_visible_devices("GPU")]
    if strategy is not None:
        try:
            visible = visible_gpus_of(strategy.extended.worker_devices, visible)
        except RuntimeError:  # TensorFlow's own no-op has none
            visible = visible_gpus_of((), visible)
    return open_meters(visible) if visible else []


def visible_gpus_of(devices: Sequence[str], visible: Sequence[int]) -> list[int]:
    """Return those visible GPUs that devices such as `/device:GPU:1` name; the first where they name none."""
    named = [int(device.rpartition(":")[2]) for device in devices if "GPU:" in device.upper()]
    return [visible[index] for index in named if index < len(visible)] or list(visible[:1])


def build_versions() -> dict[str, str]:
    """Return the CUDA and cuDNN versions that TensorFlow was built with, where it was."""
    info = tf.sysconfig.get_build_info()
    return {key: str(info[key]) for key in ("cuda_version", "cudnn_version") if key in info}


def device_limit_bytes() -> int | None:
    """Return the bytes that TensorFlow may take of a GPU: of several the least, or the workload's own limit.

    None without one, and where NVML does not tell.
    """
    visible = tf.config.get_visible_devices("GPU")
    limits = [gpu.memory_bytes for gpu in read_gpus().gpus] if visible else []
    parts = [part for gpu in visible for part in tf.config.get_logical_device_configuration(gpu) or ()]
    own = [int(part.memory_limit) << 20 for part in parts if part.memory_limit is not None]
    return min(limits + own) if limits else None


def device_bytes(which: Literal["current", "peak"] = "current") -> int | None:
    """Return TensorFlow's memory, now or at its peak, on the GPU where that is most; None where it is unknown."""
    taken: list[int] = []
    for gpu in tf.config.list_logical_devices("GPU"):
        try:
            info = tf.config.experimental.get_memory_info(gpu.name.removeprefix("/device:"))
        except (ValueError, tf.errors.OpError):  # its allocator keeps no statistics
            continue
        taken.append(int(info[which]))
    return max(taken, default=None)
