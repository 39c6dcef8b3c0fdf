"""What a trial tells of itself beyond its slices: epoch overhead, input wait, devices and their memory.

Runs in the trial process, on the model's own compiled functions.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from autotune.trial.step_clock import Training

BOUNDARY_CALLS = 6
"""Calls of the train function in each of the short epochs that show what a boundary costs."""
BOUNDARY_EPOCHS = 4
VALIDATION_CALLS = 20
"""Calls of the test function from which a longer validation's time is extrapolated."""


def epoch_overhead(
    model: keras.Model,
    train: tf.data.Dataset,
    validation: tf.data.Dataset | None,
    training: Training,
) -> float:
    """What an epoch costs beyond its steps: a new iterator, a refilled shuffle buffer, validation.

    Trains a few short epochs of the same pipeline and takes the time of their steps away.

    Returns:
        Seconds per epoch; the mean of several, for a long training pays for its stalls too.
    """
    import keras

    edges: list[float] = []
    calls: list[float] = []
    validations: list[float] = []

    class Edges(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        """Notes when epochs and validations end."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            edges.append(time.perf_counter())

        def on_test_begin(self, logs: Any = None) -> None:
            validations.append(-time.perf_counter())

        def on_test_end(self, logs: Any = None) -> None:
            validations[-1] += time.perf_counter()

    usual = model.train_function
    model.train_function = _timing(usual, calls)
    batches = BOUNDARY_CALLS * training.steps_per_call
    arguments: dict[str, Any] = {"epochs": BOUNDARY_EPOCHS, "verbose": 0, "shuffle": False}
    short, whole = validation, 1.0
    if validation is not None:
        short, whole = _shortened(validation, training.steps_per_call)
    try:
        model.fit(train.take(batches), validation_data=short, callbacks=[Edges()], **arguments)
    finally:
        model.train_function = usual
    calls_each = len(calls) // len(edges)
    usual_call = statistics.fmean(
        [seconds for index, seconds in enumerate(calls) if index % calls_each] or calls
    )
    spent = [late - early for early, late in itertools.pairwise(edges)]
    checked = validations[1:] or [0.0] * len(spent)
    return max(
        0.0,
        statistics.fmean(
            [
                epoch - calls_each * usual_call - validated + validated * whole
                for epoch, validated in zip(spent, checked, strict=True)
            ]
        ),
    )


def _shortened(validation: tf.data.Dataset, steps_per_call: int) -> tuple[tf.data.Dataset, float]:
    """At most `VALIDATION_CALLS` calls' worth of a validation set, and how often that is the whole."""
    batches = VALIDATION_CALLS * steps_per_call
    cardinality = int(validation.cardinality().numpy())
    if 0 <= cardinality <= batches:
        return validation, 1.0
    return validation.take(batches), max(1.0, cardinality / batches)


def _timing(function: Callable[[Any], Any], into: list[float]) -> Callable[[Any], Any]:
    def timed(iterator: Any) -> Any:
        began = time.perf_counter()
        result = function(iterator)
        into.append(time.perf_counter() - began)
        return result

    return timed


def input_wait_fraction(model: keras.Model, train: tf.data.Dataset, seconds: float) -> float:
    """Share of the step that waits for input: the same step on a batch kept in memory is the counterfactual.

    Both take turns in short stretches, on the model's own compiled function. What a pipeline takes away
    from the step by using the same cores counts as waiting, for it goes away with the pipeline.

    Args:
        model: Compiled, and trained already.
        train: The training pipeline, batched.
        seconds: How long all of it may take.
    """
    import tensorflow as tf

    real = iter(train.repeat())
    kept = iter(train.take(1).cache().repeat())
    deadline = time.perf_counter() + seconds
    for iterator in (kept, real, kept):
        model.train_function(iterator)
    began = time.perf_counter()
    model.train_function(real)
    calls = max(1, min(200, int(seconds / 10 / max(time.perf_counter() - began, 1e-6))))
    spent = {"real": 0.0, "kept": 0.0}
    rounds = 0
    while rounds < 2 or (time.perf_counter() < deadline and rounds < 50):
        for name, iterator in (("real", real), ("kept", kept)):
            tf.test.experimental.sync_devices()
            began = time.perf_counter()
            for _ in range(calls):
                model.train_function(iterator)
            tf.test.experimental.sync_devices()
            spent[name] += time.perf_counter() - began
        rounds += 1
    return min(1.0, max(0.0, 1.0 - spent["kept"] / spent["real"]))


def gpu_names() -> tuple[str, ...]:
    """Names of the GPUs that TensorFlow sees."""
    import tensorflow as tf

    return tuple(
        str(tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name))
        for gpu in tf.config.list_physical_devices("GPU")
    )


def build_versions() -> dict[str, str]:
    """CUDA and cuDNN versions that TensorFlow was built with, where it was."""
    import tensorflow as tf

    info = tf.sysconfig.get_build_info()
    return {key: str(info[key]) for key in ("cuda_version", "cudnn_version") if key in info}


def peak_device_bytes() -> int | None:
    """Largest memory that TensorFlow took on its GPUs so far; None without one."""
    import tensorflow as tf

    gpus = tf.config.list_logical_devices("GPU")
    if not gpus:
        return None
    return sum(
        int(tf.config.experimental.get_memory_info(gpu.name.removeprefix("/device:"))["peak"]) for gpu in gpus
    )
