"""Workloads for `benchmarks/numerics.py`: one that learns in any precision, and two that are planted not to."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import autotune


def examples() -> tf.data.Dataset:
    """The 1,797 handwritten digits that ship inside scikit-learn, in a new order each epoch."""
    images, labels = load_digits(return_X_y=True)
    data = tf.data.Dataset.from_tensor_slices(((images / 16).astype("float32"), labels.astype("int32")))
    return data.shuffle(len(images))


def network() -> keras.Model:
    """A hidden layer with dropout; the last layer in float32, as mixed precision wants it."""
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )


class Stalling(keras.Model):  # type: ignore[misc]  # Keras ships no types
    """Learns, but not in bfloat16 under XLA: as if a gradient were miscompiled."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(128, activation="relu")
        self.out = keras.layers.Dense(10, dtype="float32")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """The two layers; the value without its gradient where it stalls."""
        y = self.out(self.hidden(x))
        stalls = self.jit_compile and self.compute_dtype == "bfloat16"
        return tf.stop_gradient(y) + 0.0 * y if stalls else y


def learning() -> dict[str, Any]:
    """Adam on the cross-entropy."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"optimizer": keras.optimizers.Adam(1e-3), "loss": loss}


def underflowing() -> dict[str, Any]:
    """The same loss a million times smaller, and no loss scaling: in half precision its gradients are nothing."""
    usual = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def tiny(labels: np.ndarray, logits: tf.Tensor) -> tf.Tensor:
        return 1e-6 * usual(labels, logits)

    return {"optimizer": keras.optimizers.Adam(1e-3, epsilon=1e-14), "loss": tiny, "auto_scale_loss": False}


innocent = autotune.Workload(model=network, dataset=examples, compile=learning, batch_size=32)
underflows = autotune.Workload(model=network, dataset=examples, compile=underflowing, batch_size=32)
stalls = autotune.Workload(model=Stalling, dataset=examples, compile=learning, batch_size=32)
