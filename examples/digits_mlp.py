"""A small dense network on real input: the 1,797 handwritten digits that ship inside scikit-learn.

autotune tune examples/digits_mlp.py
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import autotune

TRAINING_EXAMPLES = 1437  # the other 360 are held out


def digits() -> tuple[np.ndarray, np.ndarray]:
    """All 1,797 images as rows of 64 numbers from 0 to 1, and their digits, in a fixed shuffled order."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed=0).permutation(len(images))
    return (images[order] / 16).astype("float32"), labels[order].astype("int32")


def training_examples() -> tf.data.Dataset:
    """Single examples, in a new order each epoch."""
    images, labels = digits()
    examples = tf.data.Dataset.from_tensor_slices((images[:TRAINING_EXAMPLES], labels[:TRAINING_EXAMPLES]))
    return examples.shuffle(TRAINING_EXAMPLES)


def held_out() -> tuple[np.ndarray, np.ndarray]:
    """The images and digits that training never sees."""
    images, labels = digits()
    return images[TRAINING_EXAMPLES:], labels[TRAINING_EXAMPLES:]


def network() -> keras.Model:
    """64 pixels → two hidden layers → ten classes; the last layer stays float32 under mixed precision."""
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )


def compile_arguments() -> dict:
    """Optimizer, loss and metrics."""
    return {
        "optimizer": keras.optimizers.Adam(1e-3),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }


workload = autotune.Workload(model=network, dataset=training_examples, compile=compile_arguments, batch_size=32)
