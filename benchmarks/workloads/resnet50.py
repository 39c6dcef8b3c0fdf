"""ResNet-50 on images of noise, 224 × 224, 1,000 classes; much smaller with AUTOTUNE_BENCHMARK=small.

autotune tune benchmarks/workloads/resnet50.py
"""

import os
from typing import Any

import keras
import tensorflow as tf

import autotune

SMALL = os.environ.get("AUTOTUNE_BENCHMARK") == "small"
PIXELS, CLASSES, EXAMPLES, BATCH_SIZE = (32, 10, 64, 8) if SMALL else (224, 1000, 8192, 64)


def example(seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """An image that its seed makes, as bytes that are scaled; and a class."""
    noise = tf.random.stateless_uniform((PIXELS, PIXELS, 3), seed=[seed, 0], maxval=256, dtype=tf.int32)
    return tf.cast(noise, tf.float32) / 255.0, tf.cast(seed % CLASSES, tf.int32)


def training_examples() -> tf.data.Dataset:
    """Single examples, made anew in each epoch."""
    return tf.data.Dataset.range(EXAMPLES).map(example, num_parallel_calls=tf.data.AUTOTUNE)


def network() -> keras.Model:
    """Keras's own, with random weights; the probabilities stay float32 under mixed precision."""
    images = keras.Input((PIXELS, PIXELS, 3))
    features = keras.applications.ResNet50(weights=None, include_top=False, pooling="avg")(images)
    return keras.Model(images, keras.layers.Dense(CLASSES, dtype="float32")(features))


def compile_arguments() -> dict[str, Any]:
    """Optimizer and loss."""
    return {
        "optimizer": keras.optimizers.SGD(0.01, momentum=0.9),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }


workload = autotune.Workload(model=network, dataset=training_examples, compile=compile_arguments, batch_size=BATCH_SIZE)
