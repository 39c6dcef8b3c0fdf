"""Train a convolutional network with batch normalisation, augmentation and validation on scikit-learn's digits.

autotune tune examples/digits_cnn.py
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import autotune

TRAINING_EXAMPLES = 1437  # the other 360 are held out
FILTERS = (32, 64)


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return all 1,797 images (8 x 8 x 1, from 0 to 1) and their digits, in a fixed shuffled order."""
    found = load_digits()
    order = np.random.default_rng(seed=0).permutation(len(found.images))
    return (found.images[order, :, :, None] / 16).astype("float32"), found.target[order].astype("int32")


def augment(image: tf.Tensor, digit: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Shift an image by up to one pixel in each direction, and change its brightness a little."""
    padded = tf.pad(image, [[1, 1], [1, 1], [0, 0]])
    return tf.image.random_brightness(tf.image.random_crop(padded, image.shape), 0.1), digit


def training_examples(config: autotune.DatasetConfig) -> tf.data.Dataset:
    """Return single examples, shuffled and augmented in each epoch."""
    images, labels = digits()
    examples = tf.data.Dataset.from_tensor_slices((images[:TRAINING_EXAMPLES], labels[:TRAINING_EXAMPLES]))
    return examples.shuffle(TRAINING_EXAMPLES).map(augment, num_parallel_calls=config.num_parallel_calls)


def held_out() -> tf.data.Dataset:
    """Return single validation examples, not augmented; `fit` evaluates them after every epoch."""
    images, labels = digits()
    return tf.data.Dataset.from_tensor_slices((images[TRAINING_EXAMPLES:], labels[TRAINING_EXAMPLES:]))


def network() -> keras.Model:
    """Build two blocks of convolutions and ten classes; the last layer stays float32 under mixed precision."""
    model = keras.Sequential([keras.Input((8, 8, 1))])
    for filters in FILTERS:
        for _ in range(2):
            model.add(keras.layers.Conv2D(filters, 3, padding="same", use_bias=False))
            model.add(keras.layers.BatchNormalization())
            model.add(keras.layers.ReLU())
        model.add(keras.layers.MaxPooling2D())
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(10, dtype="float32"))
    return model


def compile_arguments() -> dict:
    """Return the optimizer, loss and metrics."""
    return {
        "optimizer": keras.optimizers.Adam(1e-3),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }


workload = autotune.Workload(
    model=network, dataset=training_examples, compile=compile_arguments, batch_size=32, validation=held_out
)
