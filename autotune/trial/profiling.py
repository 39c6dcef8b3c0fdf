"""What a trial tells of itself beyond its slices: input wait, devices and their memory.

Runs in the trial process, on the model's own compiled functions.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

FIRST_BATCH_SECONDS = 3.0
"""A pipeline whose first batch takes longer is not opened again for the input wait."""
STRETCH_SECONDS = 0.015
"""How long the step runs on what is kept, or one call, before the pipeline has its turn."""
DRAIN_STRETCHES, COUNTED_STRETCHES = 6, 3
"""What the pipeline has filled its buffers with during a stretch, a step that waits for a share `w` of its time has
used up within (1 - w)/w stretches: within 6 for 15% and more. So many pass before so many count."""
LONG_CALL_SHARE = 0.1
"""Of the time: a call that takes more leaves no room for stretches."""
FIRST_DRAIN_SHARE = 0.25
"""Of the time: for what the pipeline had gathered before the first stretch."""


def input_wait_fraction(
    model: keras.Model, train: tf.data.Dataset, seconds: float, patience_seconds: float = FIRST_BATCH_SECONDS
) -> float | None:
    """Share of the step that waits for input: the same step on a batch kept in memory is the counterfactual.

    Both take turns in short stretches, on the model's own compiled function. While the step runs on what is kept, the
    pipeline goes on and fills its buffers; so before the step on the pipeline counts, it runs until a pipeline that is
    slower than the step has emptied them again. What a pipeline takes away from the step by using the same cores counts
    as waiting only as far as it stops meanwhile.

    Args:
        model: Compiled, and trained already.
        train: The training pipeline, batched.
        seconds: How long all of it may take, once both have begun. Where calls take more than a tenth of it, the one
            on what is kept is timed once, the one on the pipeline as often as the seconds hold.
        patience_seconds: How long the pipeline's first batch may take.

    Returns:
        None where the first batch takes longer than that: a shuffle buffer to be filled, files to be opened.
    """
    import tensorflow as tf

    def timed(iterator: Any, calls: int) -> float:
        tf.test.experimental.sync_devices()
        began = time.perf_counter()
        for _ in range(calls):
            model.train_function(iterator)
        tf.test.experimental.sync_devices()
        return time.perf_counter() - began

    began = time.perf_counter()
    kept = iter(train.take(1).cache().repeat())
    model.train_function(kept)
    if time.perf_counter() - began > patience_seconds:
        return None
    real = iter(train.repeat())
    for iterator in (kept, real, real):
        model.train_function(iterator)
    real_call, kept_call = timed(real, 1), timed(kept, 1)
    one = max(real_call, kept_call)
    if one > LONG_CALL_SHARE * seconds:
        more = int((seconds - real_call - kept_call) / one)  # a single one may have found full buffers
        if more > 0:
            real_call = (real_call + timed(real, more)) / (1 + more)
        return max(0.0, 1.0 - kept_call / real_call)
    calls = max(1, min(200, int(min(STRETCH_SECONDS, seconds / 10) / one)))

    def timed_for(at_least: float) -> tuple[float, int]:
        """On the pipeline, for so long: seconds, and how many calls that were."""
        spent, done = timed(real, calls), calls
        while spent < at_least:
            spent, done = spent + timed(real, calls), done + calls
        return spent, done

    deadline = time.perf_counter() + seconds
    timed_for(seconds * FIRST_DRAIN_SHARE)
    kept_spent = real_spent = 0.0
    kept_calls = real_calls = 0
    while not real_calls or time.perf_counter() < deadline:
        stretch = timed(kept, calls)
        timed_for(stretch * DRAIN_STRETCHES)
        spent, done = timed_for(stretch * COUNTED_STRETCHES)
        kept_spent, kept_calls = kept_spent + stretch, kept_calls + calls
        real_spent, real_calls = real_spent + spent, real_calls + done
    return min(1.0, max(0.0, 1.0 - (kept_spent / kept_calls) / (real_spent / real_calls)))


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
