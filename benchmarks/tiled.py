"""Workloads for `benchmarks/epochs.py`: the digits, repeated until there are as many examples as asked for.

How many is in the name of the trial's log file (`300-…`), so that one import of TensorFlow serves all sizes.
"""

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import autotune

TUNING = "TILED_TF_DATA_TUNING"
"""Environment variable: `1` for what TensorFlow does by itself, which makes some epochs end in a stall."""
SHUFFLED = 10_000
"""What a shuffle buffer holds, as tutorials have it: all of a small data set, part of a large one."""


def examples(count: int) -> tf.data.Dataset:
    """`count` digits, in order."""
    images, labels = load_digits(return_X_y=True)
    rows = np.resize(np.arange(len(images)), count)
    dataset = tf.data.Dataset.from_tensor_slices(((images[rows] / 16).astype("float32"), labels[rows].astype("int32")))
    options = tf.data.Options()
    options.autotune.enabled = os.environ.get(TUNING) == "1"
    return dataset.with_options(options)


def shuffled(count: int) -> tf.data.Dataset:
    """The same in a new order each epoch."""
    return examples(count).shuffle(SHUFFLED)


def held_out(count: int) -> tf.data.Dataset:
    """What a training on `count` is validated on: a fifth as many."""
    return examples(count // 5)


def network() -> keras.Model:
    """64 pixels → two hidden layers → ten classes."""
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def compile_arguments() -> dict[str, Any]:
    """Adam on the cross-entropy."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"optimizer": keras.optimizers.Adam(1e-3), "loss": loss, "metrics": ["accuracy"]}


def _count() -> int:
    return int(Path(os.readlink("/proc/self/fd/1")).name.partition("-")[0])


def _training() -> tf.data.Dataset:
    return shuffled(_count())


def _validation() -> tf.data.Dataset:
    return held_out(_count())


alone = autotune.Workload(model=network, dataset=_training, compile=compile_arguments, batch_size=32)
validated = autotune.Workload(
    model=network, dataset=_training, validation=_validation, compile=compile_arguments, batch_size=32
)
