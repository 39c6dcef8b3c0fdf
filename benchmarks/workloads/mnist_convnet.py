"""Keras's "simple MNIST convnet" on 60,000 images that look like MNIST and are made from a seed.

autotune tune benchmarks/workloads/mnist_convnet.py
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import autotune

TRAINING_EXAMPLES, VALIDATION_EXAMPLES = 54_000, 6_000
PIXELS = 28
CLASSES = 10
SHUFFLE_BUFFER = 1024
CONTRAST = 0.12
"""Share of a pattern in an image; the rest is noise."""


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """All images, of shape (60000, 28, 28, 1) from 0 to 1, and their classes: one blurred pattern each, plus noise."""
    random = np.random.default_rng(seed=0)
    coarse = random.uniform(size=(CLASSES, PIXELS // 4, PIXELS // 4)).astype("float32")
    patterns = coarse.repeat(4, axis=1).repeat(4, axis=2)
    labels = random.integers(CLASSES, size=TRAINING_EXAMPLES + VALIDATION_EXAMPLES, dtype="int32")
    noise = random.random(size=(len(labels), PIXELS, PIXELS), dtype="float32")
    return (CONTRAST * patterns[labels] + (1 - CONTRAST) * noise)[..., None], labels


def training_examples() -> tf.data.Dataset:
    """Single examples, shuffled within a buffer as Keras's guides do it."""
    images, labels = digits()
    examples = tf.data.Dataset.from_tensor_slices((images[:TRAINING_EXAMPLES], labels[:TRAINING_EXAMPLES]))
    return examples.shuffle(SHUFFLE_BUFFER)


def held_out() -> tf.data.Dataset:
    """Single examples for validation."""
    images, labels = digits()
    return tf.data.Dataset.from_tensor_slices((images[TRAINING_EXAMPLES:], labels[TRAINING_EXAMPLES:]))


def network() -> keras.Model:
    """Two convolutions with pooling, dropout, ten classes; the last layer stays float32 under mixed precision."""
    return keras.Sequential(
        [
            keras.Input((PIXELS, PIXELS, 1)),
            keras.layers.Conv2D(32, kernel_size=(3, 3), activation="relu"),
            keras.layers.MaxPooling2D(pool_size=(2, 2)),
            keras.layers.Conv2D(64, kernel_size=(3, 3), activation="relu"),
            keras.layers.MaxPooling2D(pool_size=(2, 2)),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(CLASSES, activation="softmax", dtype="float32"),
        ]
    )


def compile_arguments() -> dict[str, Any]:
    """Optimizer, loss and metrics."""
    return {"optimizer": "adam", "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}


workload = autotune.Workload(
    model=network, dataset=training_examples, compile=compile_arguments, batch_size=128, validation=held_out
)
