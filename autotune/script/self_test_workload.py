"""The training of `autotune doctor --self-test`, with a delay in each step that the configuration plants.

The delay is `num_parallel_calls` times `TICK_SECONDS`. The data is one batch, on which no knob of the pipeline acts.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from autotune.script.workload import Workload

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from autotune.space.configuration import DatasetConfig

TICK_SECONDS = 1e-5
BATCH, WIDTH = 64, 512

_delay_seconds = 0.0  # of this process, which trains one configuration


def batches(config: DatasetConfig) -> tf.data.Dataset:
    """Return the same batch without end, and set the delay."""
    import numpy as np
    import tensorflow as tf

    global _delay_seconds
    _delay_seconds = TICK_SECONDS * (config.num_parallel_calls or 0)
    inputs = np.random.default_rng(seed=0).normal(size=(BATCH, WIDTH)).astype("float32")
    return tf.data.Dataset.from_tensors((inputs, inputs.sum(axis=1, keepdims=True))).repeat()


def network() -> keras.Model:
    """Build three layers, behind one that waits in each step: busily, because a sleep takes longer than asked for."""
    import keras
    import numpy as np
    import tensorflow as tf

    def wait() -> Any:
        end = time.perf_counter() + _delay_seconds
        while time.perf_counter() < end:
            pass
        return np.int64(0)

    class Wait(keras.layers.Layer):  # type: ignore[misc]  # Keras ships no types
        def call(self, inputs: Any) -> Any:
            with tf.control_dependencies([tf.numpy_function(wait, [], tf.int64)]):
                return tf.identity(inputs)

    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((WIDTH,)), Wait(), *hidden, keras.layers.Dense(1)])


def compile_arguments() -> dict[str, Any]:
    """Return a loss, and an optimizer that changes nothing, so that all steps compute the same."""
    import keras

    return {"optimizer": keras.optimizers.SGD(0.0), "loss": "mse"}


workload = Workload(
    model=network,
    dataset=batches,
    compile=compile_arguments,
    batch_size=BATCH,
    baseline={"jit_compile": False},  # XLA compiles no Python
    batched=True,
    name="self-test",
)
