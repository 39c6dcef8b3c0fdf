"""Workloads for `benchmarks/false_wins.py` and `power.py`: steps that do the same work, or a known part less.

How much work a step does travels in its batch, so that baseline and finalist run the same program. The only knob that
they differ in, `deterministic`, does nothing else here: no call of this pipeline is parallel.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import autotune

REPEATS = 200
"""Products of a step that does no extra work: they take nearly all of its time."""
WIDTH = 128
EXAMPLES = 1024


class Products(keras.Model):  # type: ignore[misc]  # Keras ships no types
    """A small classifier on top of so many matrix products in a row, which are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.square = self.add_weight(shape=(WIDTH, WIDTH), initializer="orthogonal", trainable=False)
        self.out = keras.layers.Dense(2)

    def call(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        """As many products as the batch says."""
        x, repeats = inputs
        _, y = tf.while_loop(
            lambda done, _: done < repeats[0],
            lambda done, y: (done + 1, tf.matmul(y, self.square)),
            (tf.constant(0), x),
        )
        return self.out(tf.stop_gradient(y))


def learning() -> dict[str, Any]:
    """Plain gradient descent on the cross-entropy."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"optimizer": keras.optimizers.SGD(0.01), "loss": loss}


def examples(extra: float) -> Callable[[autotune.DatasetConfig], tf.data.Dataset]:
    """An endless dataset whose steps do a share of extra work unless `deterministic` is off."""

    def dataset(config: autotune.DatasetConfig) -> tf.data.Dataset:
        x = np.random.default_rng(seed=0).normal(size=(EXAMPLES, WIDTH)).astype("float32")
        repeats = round(REPEATS * (1 + extra)) if config.deterministic else REPEATS
        features = (x, np.full(EXAMPLES, repeats, "int32"))
        return tf.data.Dataset.from_tensor_slices((features, (x[:, 0] > 0).astype("int32"))).repeat()

    return dataset


def workload(extra: float) -> autotune.Workload:
    """Its baseline does this share of extra work."""
    return autotune.Workload(
        model=Products, dataset=examples(extra), compile=learning, batch_size=32, baseline={"jit_compile": False}
    )


equal = workload(0.0)
gain_5 = workload(0.05)
gain_10 = workload(0.10)
