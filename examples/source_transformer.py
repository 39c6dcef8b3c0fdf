"""A small transformer learns to write Python, one character after another, from the standard library's own source.

autotune tune examples/source_transformer.py
"""

import sysconfig
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import autotune

MODULES = ("argparse", "inspect", "typing")  # some 340,000 characters of the Python that runs this
CHARACTERS = 128  # ASCII
LENGTH = 64
WIDTH = 64
HEADS = 4
BLOCKS = 2


def source_text() -> np.ndarray:
    """The modules' source, in this order, as ASCII codes; other characters are left out."""
    library = Path(sysconfig.get_path("stdlib"))
    text = "\n".join((library / f"{name}.py").read_text(encoding="utf-8") for name in MODULES)
    return np.frombuffer(text.encode("ascii", errors="ignore"), dtype="uint8").astype("int32")


def training_examples() -> tf.data.Dataset:
    """Single examples, in a new order each epoch: `LENGTH` characters, and the same ones moved on by one."""
    text = source_text()
    windows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    examples = tf.data.Dataset.from_tensor_slices((windows[:, :-1], windows[:, 1:]))
    return examples.shuffle(len(windows))


class Embeddings(keras.layers.Layer):
    """A vector for what each character is, plus one for where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = keras.layers.Embedding(CHARACTERS, WIDTH)
        self.places = keras.layers.Embedding(LENGTH, WIDTH)

    def call(self, codes: tf.Tensor) -> tf.Tensor:
        """Codes of shape (batch, length) → vectors of shape (batch, length, `WIDTH`)."""
        return self.characters(codes) + self.places(keras.ops.arange(LENGTH))


def block(x: keras.KerasTensor) -> keras.KerasTensor:
    """Attention to the characters so far, then dense layers, each added to what came in; no biases anywhere."""
    attention = keras.layers.MultiHeadAttention(HEADS, key_dim=WIDTH // HEADS, use_bias=False)
    normal = keras.layers.RMSNormalization()(x)
    x = keras.layers.Add()([x, attention(normal, normal, use_causal_mask=True)])
    normal = keras.layers.RMSNormalization()(x)
    hidden = keras.layers.Dense(4 * WIDTH, activation="gelu", use_bias=False)(normal)
    return keras.layers.Add()([x, keras.layers.Dense(WIDTH, use_bias=False)(hidden)])


def network() -> keras.Model:
    """Characters → blocks → a number for each next character, in float32 under mixed precision too."""
    codes = keras.Input((LENGTH,), dtype="int32")
    x = Embeddings()(codes)
    for _ in range(BLOCKS):
        x = block(x)
    x = keras.layers.RMSNormalization()(x)
    return keras.Model(codes, keras.layers.Dense(CHARACTERS, use_bias=False, dtype="float32")(x))


def compile_arguments() -> dict:
    """Optimizer and loss."""
    return {
        "optimizer": keras.optimizers.AdamW(1e-3),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }


workload = autotune.Workload(model=network, dataset=training_examples, compile=compile_arguments, batch_size=32)
