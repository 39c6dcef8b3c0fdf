"""The training of `autotune doctor --self-test`: small steps, and a delay in each that the configuration plants.

`num_parallel_calls` is the delay: so many times `TICK_SECONDS`. The data is one batch, for which no other knob of the
pipeline does anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.script.workload import Workload
from autotune.space.configuration import DatasetConfig

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

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


def _wait() -> int:
    """Take the delay, busily: a sleep would take longer than it was asked for."""
    end = time.perf_counter() + _delay_seconds
    while time.perf_counter() < end:
        pass
    return 0


def network() -> keras.Model:
    """Build three layers, behind one that waits in each step."""
    import keras
    import numpy as np
    import tensorflow as tf

    class Wait(keras.layers.Layer):  # type: ignore[misc]  # Keras ships no types
        def call(self, inputs: Any) -> Any:
            waited = tf.numpy_function(lambda: np.int64(_wait()), [], tf.int64)
            with tf.control_dependencies([waited]):
                return tf.identity(inputs)

    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((WIDTH,)), Wait(), *hidden, keras.layers.Dense(1)])


def compile_arguments() -> Mapping[str, Any]:
    """Return optimizer and loss."""
    return {"optimizer": "sgd", "loss": "mse"}


workload = Workload(
    model=network,
    dataset=batches,
    compile=compile_arguments,
    batch_size=BATCH,
    baseline={"jit_compile": False},  # XLA compiles no Python
    batched=True,
    name="self-test",
)
