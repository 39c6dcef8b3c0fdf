"""Train a small character-level transformer on the source of Python's standard library.

autotune tune examples/source_transformer.py
"""

import sysconfig
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import autotune

MODULES = ("argparse", "inspect", "typing")  # about 340,000 characters of the running Python
CHARACTERS = 128  # ASCII
LENGTH = 64
WIDTH = 64
HEADS = 4
BLOCKS = 2


def source_text() -> np.ndarray:
    """Return the source of the modules as ASCII codes, without other characters."""
    library = Path(sysconfig.get_path("stdlib"))
    text = "\n".join((library / f"{name}.py").read_text(encoding="utf-8") for name in MODULES)
    return np.frombuffer(text.encode("ascii", errors="ignore"), dtype="uint8").astype("int32")


def training_examples() -> tf.data.Dataset:
    """Return single examples, shuffled in each epoch: `LENGTH` characters, and the same text one character later."""
    text = source_text()
    windows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    examples = tf.data.Dataset.from_tensor_slices((windows[:, :-1], windows[:, 1:]))
    return examples.shuffle(len(windows))


class Embeddings(keras.layers.Layer):
    """Sum of a character embedding and a position embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = keras.layers.Embedding(CHARACTERS, WIDTH)
        self.positions = keras.layers.Embedding(LENGTH, WIDTH)

    def call(self, codes: tf.Tensor) -> tf.Tensor:
        """Map codes (batch, length) to vectors (batch, length, `WIDTH`)."""
        return self.characters(codes) + self.positions(keras.ops.arange(LENGTH))


def block(x: keras.KerasTensor) -> keras.KerasTensor:
    """Apply causal attention and dense layers, each with a residual connection and without biases."""
    attention = keras.layers.MultiHeadAttention(HEADS, key_dim=WIDTH // HEADS, use_bias=False)
    normal = keras.layers.RMSNormalization()(x)
    x = keras.layers.Add()([x, attention(normal, normal, use_causal_mask=True)])
    normal = keras.layers.RMSNormalization()(x)
    hidden = keras.layers.Dense(4 * WIDTH, activation="gelu", use_bias=False)(normal)
    return keras.layers.Add()([x, keras.layers.Dense(WIDTH, use_bias=False)(hidden)])


def network() -> keras.Model:
    """Build embeddings, blocks and one logit per next character; logits stay float32 under mixed precision."""
    codes = keras.Input((LENGTH,), dtype="int32")
    x = Embeddings()(codes)
    for _ in range(BLOCKS):
        x = block(x)
    x = keras.layers.RMSNormalization()(x)
    return keras.Model(codes, keras.layers.Dense(CHARACTERS, use_bias=False, dtype="float32")(x))


def compile_arguments() -> dict:
    """Return the optimizer and loss."""
    return {
        "optimizer": keras.optimizers.AdamW(1e-3),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }


workload = autotune.Workload(model=network, dataset=training_examples, compile=compile_arguments, batch_size=32)
