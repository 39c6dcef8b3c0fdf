"""Trainings that are each limited by one thing; which one a trial runs is the name of its log file.

`input`: a map that sleeps. `launch`: a thousand tiny operations. `compute`: large matrix products. `memory_bandwidth`:
element-wise operations over large tensors.
"""

import os
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import autotune

WIDTH, EXAMPLES = 64, 4096
ELEMENTS = 1 << 17
SECONDS = 0.0005


class Tiny(keras.layers.Layer):
    """A chain of a thousand operations on one number."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Apply them."""
        number = tf.reduce_mean(x)
        for _ in range(250):
            number = tf.sin(number) * 0.999 + tf.cos(number) * 0.001
        return x + number


class ElementWise(keras.layers.Layer):
    """Passes over large tensors that compute one sum an element."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.passes = passes

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Apply them."""
        wide = tf.tile(x[:, :1], [1, ELEMENTS])
        for index in range(self.passes):
            wide = tf.minimum(wide + float(index), 1e6)
        return x + 1e-3 * tf.stop_gradient(tf.reduce_mean(wide, axis=1, keepdims=True))


def case() -> str:
    """Which one this trial is."""
    return Path(os.readlink("/proc/self/fd/1")).stem.partition("-")[0]


def model() -> keras.Model:
    """The network of this trial's case."""
    inputs = keras.Input((WIDTH,))
    x, width = inputs, 1536 if case() == "compute" else 32
    if case() == "launch":
        x = Tiny()(x)
    if case() == "memory_bandwidth":
        x = ElementWise(4)(x)
    for _ in range(3 if case() == "compute" else 1):
        x = keras.layers.Dense(width)(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


def slowly(x: np.ndarray) -> np.ndarray:
    """The same, a moment later."""
    time.sleep(SECONDS)
    return x


def dataset() -> tf.data.Dataset:
    """Rows of numbers; of `input` each takes a moment."""
    x = np.random.default_rng(0).normal(size=(EXAMPLES, WIDTH)).astype("float32")
    examples = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    if case() != "input":
        return examples

    def late(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        (x,) = tf.numpy_function(slowly, [x], [tf.float32])
        return tf.ensure_shape(x, (WIDTH,)), y

    return examples.map(late)


workload = autotune.Workload(
    model=model, dataset=dataset, compile=lambda: {"optimizer": "sgd", "loss": "mse"}, batch_size=64
)
