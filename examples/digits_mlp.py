"""Train a small dense network on the 1,797 handwritten digits that ship with scikit-learn.

autotune tune examples/digits_mlp.py
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import autotune

TRAINING_EXAMPLES = 1437  # the other 360 are held out


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return all 1,797 images (rows of 64 numbers from 0 to 1) and their digits, in a fixed shuffled order."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed=0).permutation(len(images))
    return (images[order] / 16).astype("float32"), labels[order].astype("int32")


def training_examples() -> tf.data.Dataset:
    """Return single examples, shuffled in each epoch."""
    images, labels = digits()
    examples = tf.data.Dataset.from_tensor_slices((images[:TRAINING_EXAMPLES], labels[:TRAINING_EXAMPLES]))
    return examples.shuffle(TRAINING_EXAMPLES)


def held_out() -> tuple[np.ndarray, np.ndarray]:
    """Return the images and digits that are not used for training."""
    images, labels = digits()
    return images[TRAINING_EXAMPLES:], labels[TRAINING_EXAMPLES:]


def network() -> keras.Model:
    """Build two hidden layers and ten classes; the last layer stays float32 under mixed precision."""
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )


def compile_arguments() -> dict:
    """Return the optimizer, loss and metrics."""
    return {
        "optimizer": keras.optimizers.Adam(1e-3),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }


workload = autotune.Workload(model=network, dataset=training_examples, compile=compile_arguments, batch_size=32)
