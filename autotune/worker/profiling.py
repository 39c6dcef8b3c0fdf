"""What a trial tells of itself beyond its slices: input wait, devices and their memory.

Runs in the trial process, on the model's own compiled functions.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

FEWEST_KEPT_CALLS = 2
"""Of the train function on the kept batch, after a first one that does not count."""


def input_wait_fraction(
    model: keras.Model, iterator: Any, call_seconds: float, seconds: float
) -> float | None:
    """Share of the step that waits for input: the same step on a batch kept in memory is the counterfactual.

    The batch is the next one of the training's own iterator: no pipeline is opened again. What the pipeline takes away
    from the step by using the same cores counts as waiting.

    Args:
        model: Compiled, and trained already.
        iterator: The training's own, which no training goes on with.
        call_seconds: What a call of the train function took in the timed slices.
        seconds: How long calls on the kept batch are timed, two of them at least.

    Returns:
        None where the iterator has no batch left.
    """
    import tensorflow as tf

    kept = _kept(iterator)
    if kept is None:
        return None
    model.train_function(kept)
    tf.test.experimental.sync_devices()
    began, calls = time.perf_counter(), 0
    while calls < FEWEST_KEPT_CALLS or time.perf_counter() - began < seconds:
        model.train_function(kept)
        calls += 1
    tf.test.experimental.sync_devices()
    kept_call = (time.perf_counter() - began) / calls
    return min(1.0, max(0.0, 1.0 - kept_call / call_seconds))


def _kept(iterator: Any) -> Any:
    """An iterator that yields the next batch of another one again and again, in its shapes: nothing is traced again."""
    import tensorflow as tf

    batch = next(iterator, None)
    if batch is None:
        return None
    spec = iterator.element_spec

    def as_in_pipeline(*parts: Any) -> Any:
        whole = parts if isinstance(spec, tuple) else parts[0]
        shaped = [
            tf.raw_ops.PlaceholderWithDefault(input=each, shape=wanted.shape)
            if isinstance(wanted, tf.TensorSpec)
            else each
            for each, wanted in zip(tf.nest.flatten(whole), tf.nest.flatten(spec), strict=True)
        ]
        return tf.nest.pack_sequence_as(spec, shaped)

    as_it_is = tf.autograph.experimental.do_not_convert(as_in_pipeline)  # a conversion leaves a file in /tmp
    return iter(tf.data.Dataset.from_tensors(batch).map(as_it_is).cache().repeat())


def gpu_names() -> tuple[str, ...]:
    """Names of the GPUs that TensorFlow sees."""
    import tensorflow as tf

    return tuple(
        str(tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name))
        for gpu in tf.config.list_physical_devices("GPU")
    )


def device_limit_bytes(cuda: Any = None) -> int | None:
    """What TensorFlow may take of the GPU that it uses; None where CUDA does not tell.

    That is all of its memory as CUDA has it, of a MIG instance that instance's; less where the workload has limited or
    divided it. Of several the least, and of those that hold nothing, while others do, none: peaks are the others'.

    Args:
        cuda: CUDA's driver library, or what answers like it; None loads it, where TensorFlow sees a GPU.
    """
    import tensorflow as tf

    limits: list[int] = []
    for gpu in tf.config.get_visible_devices("GPU"):
        try:
            cuda = cuda or ctypes.CDLL("libcuda.so.1")
            total = _cuda_memory_bytes(cuda, int(gpu.name.rpartition(":")[2]))
        except (OSError, AttributeError):  # there is no such library, or it has other names
            return None
        for part in tf.config.get_logical_device_configuration(gpu) or [None]:
            mebibytes = None if part is None else part.memory_limit
            limits.append(total if mebibytes is None else min(total, int(mebibytes) << 20))
    if not limits or not all(limits):
        return None
    held = _taken_by_device("peak")
    in_use = [limit for limit, bytes_held in zip(limits, held, strict=False) if bytes_held]
    return min(in_use if len(held) == len(limits) and in_use else limits)


def _cuda_memory_bytes(cuda: Any, ordinal: int) -> int:
    """All memory of a device by its number in CUDA's order, which is TensorFlow's; 0 where CUDA does not say."""
    device, total = ctypes.c_int(), ctypes.c_size_t()
    failed = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        or cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    )
    return 0 if failed else total.value


def build_versions() -> dict[str, str]:
    """CUDA and cuDNN versions that TensorFlow was built with, where it was."""
    import tensorflow as tf

    info = tf.sysconfig.get_build_info()
    return {key: str(info[key]) for key in ("cuda_version", "cudnn_version") if key in info}


def peak_device_bytes() -> int | None:
    """Largest memory that TensorFlow took on any one GPU so far; None where it cannot tell."""
    return _most_on_a_device("peak")


def device_bytes() -> int | None:
    """What TensorFlow holds now on the GPU where it holds most; None where it cannot tell."""
    return _most_on_a_device("current")


def _most_on_a_device(which: str) -> int | None:
    return max((each for each in _taken_by_device(which) if each is not None), default=None)


def _taken_by_device(which: str) -> list[int | None]:
    """Of each GPU, or part of one, that TensorFlow uses: bytes; None where its allocator keeps no statistics."""
    import tensorflow as tf

    taken: list[int | None] = []
    for gpu in tf.config.list_logical_devices("GPU"):
        try:
            info = tf.config.experimental.get_memory_info(gpu.name.removeprefix("/device:"))
            taken.append(int(info[which]))
        except (ValueError, tf.errors.OpError):
            taken.append(None)
    return taken
