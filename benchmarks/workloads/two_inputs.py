"""A functional model with two inputs and two outputs ranks and routes support tickets, as in Keras's functional guide.

The tickets are made from a seed: a title as a sequence of words, and a vector of tags.

    autotune tune benchmarks/workloads/two_inputs.py
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import autotune

TRAINING_EXAMPLES, VALIDATION_EXAMPLES = 12_000, 2_000
WORDS = 2_000
TITLE_WORDS = 40
TAGS = 12
DEPARTMENTS = 4


@functools.cache
def tickets() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """All inputs and targets by name: a title's words decide its department, its tags its priority."""
    random = np.random.default_rng(seed=0)
    count = TRAINING_EXAMPLES + VALIDATION_EXAMPLES
    department = random.integers(DEPARTMENTS, size=count, dtype="int32")
    usual = department[:, None] + DEPARTMENTS * random.integers(WORDS // DEPARTMENTS, size=(count, TITLE_WORDS))
    rare = random.integers(WORDS, size=(count, TITLE_WORDS))
    title = np.where(random.random((count, TITLE_WORDS)) < 0.5, usual, rare).astype("int32")
    tags = random.integers(2, size=(count, TAGS)).astype("float32")
    priority = (tags @ random.normal(size=(TAGS, 1)) > 0).astype("float32")
    return {"title": title, "tags": tags}, {"priority": priority, "department": department}


def examples(part: slice) -> tf.data.Dataset:
    """Single examples of one part of the tickets: a dict of inputs, and a dict of targets."""
    inputs, targets = tickets()
    chosen = [{name: values[part] for name, values in each.items()} for each in (inputs, targets)]
    return tf.data.Dataset.from_tensor_slices(tuple(chosen))


def training_examples() -> tf.data.Dataset:
    """Single examples, in a new order each epoch."""
    return examples(slice(TRAINING_EXAMPLES)).shuffle(TRAINING_EXAMPLES)


def held_out() -> tf.data.Dataset:
    """Single examples for validation."""
    return examples(slice(TRAINING_EXAMPLES, None))


def network() -> keras.Model:
    """Words through a convolution, joined by the tags; both outputs stay float32 under mixed precision."""
    title = keras.Input((TITLE_WORDS,), dtype="int32", name="title")
    tags = keras.Input((TAGS,), name="tags")
    words = keras.layers.Embedding(WORDS, 64)(title)
    words = keras.layers.Conv1D(64, 3, activation="relu")(words)
    joined = keras.layers.Concatenate()([keras.layers.GlobalMaxPooling1D()(words), tags])
    hidden = keras.layers.Dense(128, activation="relu")(joined)
    priority = keras.layers.Dense(1, dtype="float32", name="priority")(hidden)
    department = keras.layers.Dense(DEPARTMENTS, dtype="float32", name="department")(hidden)
    return keras.Model({"title": title, "tags": tags}, {"priority": priority, "department": department})


def compile_arguments() -> dict[str, Any]:
    """Optimizer, and by output the loss, its weight and the metrics."""
    return {
        "optimizer": keras.optimizers.RMSprop(1e-3),
        "loss": {
            "priority": keras.losses.BinaryCrossentropy(from_logits=True),
            "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        },
        "loss_weights": {"priority": 1.0, "department": 0.2},
        "metrics": {"department": ["accuracy"]},
    }


workload = autotune.Workload(
    model=network, dataset=training_examples, compile=compile_arguments, batch_size=32, validation=held_out
)
