"""Train a wide and deep network on a table: hashed pairs of columns beside dense layers, in very short steps.

The table is scikit-learn's 569 tumours with 30 measurements each. It is small, so an epoch has 12,000 rows, drawn once
with replacement. Launching the steps takes most of the time.

    autotune tune examples/tabular_wide_deep.py
"""

from itertools import combinations

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_breast_cancer

import autotune

ROWS = 12_000
CROSSED_COLUMNS = 8  # which makes 28 pairs
QUANTILES = 10
HASH_BUCKETS = 1000


def crosses(table: np.ndarray) -> np.ndarray:
    """Return each row's hash buckets, one per pair of columns; a pair is the deciles of its two values."""
    edges = np.quantile(table, np.linspace(0, 1, QUANTILES + 1)[1:-1], axis=0)
    deciles = np.stack([np.searchsorted(edges[:, column], table[:, column]) for column in range(CROSSED_COLUMNS)])
    names = [
        [f"{a}={x} {b}={y}" for x, y in zip(deciles[a], deciles[b], strict=True)]
        for a, b in combinations(range(CROSSED_COLUMNS), 2)
    ]
    return tf.strings.to_hash_bucket_fast(names, HASH_BUCKETS).numpy().T.astype("int32")


def training_examples() -> tf.data.Dataset:
    """Return single examples, shuffled in each epoch: a dict of both inputs, and 1 for a benign tumour."""
    table, benign = load_breast_cancer(return_X_y=True)
    rows = np.random.default_rng(seed=0).integers(len(table), size=ROWS)
    inputs = {
        "measurements": ((table - table.mean(axis=0)) / table.std(axis=0)).astype("float32")[rows],
        "crosses": crosses(table)[rows],
    }
    labels = benign.astype("float32")[rows, None]
    return tf.data.Dataset.from_tensor_slices((inputs, labels)).shuffle(ROWS)


def network() -> keras.Model:
    """Build a linear term over the pairs and dense layers over the measurements; their sum stays float32."""
    measurements = keras.Input((30,), name="measurements")
    pairs = keras.Input((CROSSED_COLUMNS * (CROSSED_COLUMNS - 1) // 2,), dtype="int32", name="crosses")
    weights = keras.layers.Embedding(HASH_BUCKETS, 1, embeddings_initializer="zeros")(pairs)
    wide = keras.layers.Flatten()(weights)
    deep = keras.layers.Dense(64, activation="relu")(measurements)
    deep = keras.layers.Dense(32, activation="relu")(deep)
    joined = keras.layers.Concatenate()([wide, deep])
    logit = keras.layers.Dense(1, dtype="float32")(joined)
    return keras.Model({"measurements": measurements, "crosses": pairs}, logit)


def compile_arguments() -> dict:
    """Return the optimizer, loss and metrics."""
    return {
        "optimizer": keras.optimizers.Adam(1e-3),
        "loss": keras.losses.BinaryCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }


workload = autotune.Workload(model=network, dataset=training_examples, compile=compile_arguments, batch_size=32)
