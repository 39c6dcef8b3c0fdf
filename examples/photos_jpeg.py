"""Train a small, input-bound network: every step decodes, resizes and augments JPEG files.

The files are patches of the two photographs that ship with scikit-learn, encoded once and kept in memory. The label of
a patch is its photograph.

    autotune tune examples/photos_jpeg.py
"""

from importlib.resources import files

import keras
import tensorflow as tf

import autotune

PHOTOGRAPHS = ("china.jpg", "flower.jpg")
PATCHES = 2000
PATCH_PIXELS = 192
IMAGE_PIXELS = 48


def patches() -> tuple[tf.Tensor, tf.Tensor]:
    """Return the JPEG bytes of patches at fixed random places, and the photograph of each patch."""
    folder = files("sklearn.datasets").joinpath("images")
    photographs = tf.stack([tf.io.decode_jpeg(folder.joinpath(name).read_bytes()) for name in PHOTOGRAPHS])

    def cut(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        label = number % len(PHOTOGRAPHS)
        size = (PATCH_PIXELS, PATCH_PIXELS, 3)
        patch = tf.image.stateless_random_crop(photographs[label], size, seed=(0, number))
        return tf.io.encode_jpeg(patch, quality=90), tf.cast(label, tf.int32)

    encoded = tf.data.Dataset.range(PATCHES).map(cut, num_parallel_calls=tf.data.AUTOTUNE)
    return encoded.batch(PATCHES).get_single_element()


def decode_and_augment(jpeg: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Decode and resize a file, mirror it half of the time, and change its brightness."""
    pixels = tf.image.convert_image_dtype(tf.io.decode_jpeg(jpeg, channels=3), tf.float32)
    image = tf.image.resize(pixels, (IMAGE_PIXELS, IMAGE_PIXELS), antialias=True)
    image = tf.image.random_flip_left_right(image)
    return tf.image.random_brightness(image, 0.2), label


def training_examples(config: autotune.DatasetConfig) -> tf.data.Dataset:
    """Return single examples, augmented in each epoch; shuffles the JPEG bytes, which are smaller than images."""
    examples = tf.data.Dataset.from_tensor_slices(patches()).shuffle(PATCHES)
    return examples.map(decode_and_augment, num_parallel_calls=config.num_parallel_calls)


def network() -> keras.Model:
    """Build three convolutions that halve the image, and one float32 output per photograph."""
    model = keras.Sequential([keras.Input((IMAGE_PIXELS, IMAGE_PIXELS, 3))])
    for filters in (8, 16, 32):
        model.add(keras.layers.Conv2D(filters, 3, strides=2, activation="relu"))
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(len(PHOTOGRAPHS), dtype="float32"))
    return model


def compile_arguments() -> dict:
    """Return the optimizer, loss and metrics."""
    return {
        "optimizer": keras.optimizers.Adam(1e-3),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }


workload = autotune.Workload(model=network, dataset=training_examples, compile=compile_arguments, batch_size=32)
