"""A transformer of BERT-base's size learns to fill in tokens; much smaller with AUTOTUNE_BENCHMARK=small.

autotune tune benchmarks/workloads/bert_base.py
"""

import os
from typing import Any

import keras
import tensorflow as tf

import autotune

SMALL = os.environ.get("AUTOTUNE_BENCHMARK") == "small"
LAYERS, WIDTH, HEADS, LENGTH, TOKENS = (1, 32, 2, 16, 100) if SMALL else (12, 768, 12, 128, 30_522)
EXAMPLES, BATCH_SIZE = (64, 8) if SMALL else (16_384, 32)


def example(seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Tokens of which some are replaced by token 0, and what they were."""
    tokens = tf.random.stateless_uniform((LENGTH,), seed=[seed, 0], minval=1, maxval=TOKENS, dtype=tf.int32)
    hidden = tf.random.stateless_uniform((LENGTH,), seed=[seed, 1]) < 0.15
    return tf.where(hidden, 0, tokens), tokens


def training_examples() -> tf.data.Dataset:
    """Single examples, made anew in each epoch."""
    return tf.data.Dataset.range(EXAMPLES).map(example, num_parallel_calls=tf.data.AUTOTUNE)


class Places(keras.layers.Layer):  # type: ignore[misc]  # Keras ships no types
    """Adds a vector for where a token stands."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = keras.layers.Embedding(LENGTH, WIDTH)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Vectors of shape (batch, length, `WIDTH`), in and out."""
        return x + self.vectors(keras.ops.arange(LENGTH))


def block(x: keras.KerasTensor) -> keras.KerasTensor:
    """Attention and dense layers, each added to what came in and then normalised, as in BERT."""
    attended = keras.layers.MultiHeadAttention(HEADS, key_dim=WIDTH // HEADS, dropout=0.1)(x, x)
    x = keras.layers.LayerNormalization()(keras.layers.Add()([x, attended]))
    hidden = keras.layers.Dense(WIDTH)(keras.layers.Dense(4 * WIDTH, activation="gelu")(x))
    hidden = keras.layers.Dropout(0.1)(hidden)
    return keras.layers.LayerNormalization()(keras.layers.Add()([x, hidden]))


def network() -> keras.Model:
    """Tokens → blocks → a number for each token of the vocabulary, in float32 under mixed precision too."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = Places()(keras.layers.Embedding(TOKENS, WIDTH)(tokens))
    for _ in range(LAYERS):
        x = block(x)
    return keras.Model(tokens, keras.layers.Dense(TOKENS, dtype="float32")(x))


def compile_arguments() -> dict[str, Any]:
    """Optimizer and loss."""
    return {
        "optimizer": keras.optimizers.AdamW(1e-4),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }


workload = autotune.Workload(model=network, dataset=training_examples, compile=compile_arguments, batch_size=BATCH_SIZE)
