"""Workloads for `benchmarks/freezing.py`: a pipeline that keeps the processor busy, and one that only waits."""

import time
from importlib.resources import files
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import autotune

PATCHES, PATCH_PIXELS = 256, 224
SIDE = 32
INPUTS = SIDE * SIDE * 3
"""What a patch is made smaller to."""
LATENCY_SECONDS = 0.2
IN_FLIGHT = 16


def patches() -> list[bytes]:
    """Square cuttings from scikit-learn's two photographs, as JPEG files in memory."""
    rng = np.random.default_rng(0)
    folder = files("sklearn.datasets.images")
    photographs = [tf.io.decode_jpeg((folder / name).read_bytes()).numpy() for name in ("china.jpg", "flower.jpg")]
    encoded = []
    for number in range(PATCHES):
        picture = photographs[number % len(photographs)]
        top, left = (int(rng.integers(0, side - PATCH_PIXELS)) for side in picture.shape[:2])
        encoded.append(tf.io.encode_jpeg(picture[top : top + PATCH_PIXELS, left : left + PATCH_PIXELS]).numpy())
    return encoded


def decoded(config: autotune.DatasetConfig) -> tf.data.Dataset:
    """The patches, decoded and made smaller, again and again."""

    def decode(file: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        small = tf.image.resize(tf.io.decode_jpeg(file, channels=3), (SIDE, SIDE))
        return tf.reshape(small / 255, (INPUTS,)), label

    labels = np.arange(PATCHES, dtype="int32") % 2
    encoded = tf.data.Dataset.from_tensor_slices((patches(), labels)).repeat()
    return encoded.map(decode, num_parallel_calls=config.num_parallel_calls)


def awaited(config: autotune.DatasetConfig) -> tf.data.Dataset:
    """What comes from elsewhere: each example waits for its answer."""

    def answer(number: np.ndarray) -> np.ndarray:
        time.sleep(LATENCY_SECONDS)
        return np.full(64, number % 2, "float32")

    def example(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x = tf.numpy_function(answer, [number], tf.float32)
        return tf.ensure_shape(x, (64,)), tf.cast(number % 2, tf.int32)

    return tf.data.Dataset.range(1 << 40).repeat().map(example, num_parallel_calls=config.num_parallel_calls)


def network(inputs: int) -> keras.Model:
    """One hidden layer, quicker than the pipelines that feed it."""
    return keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(2)])


def compile_arguments() -> dict[str, Any]:
    """Adam on the cross-entropy."""
    return {"optimizer": "adam", "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


decoding = autotune.Workload(model=lambda: network(INPUTS), dataset=decoded, compile=compile_arguments, batch_size=32)
waiting = autotune.Workload(model=lambda: network(64), dataset=awaited, compile=compile_arguments, batch_size=4)
