"""JPEG files are decoded, resized and augmented for every step: a small network that waits for its input.

The files are patches of the two photographs that ship inside scikit-learn, encoded once and kept in memory; the
label is the photograph that a patch was cut from.

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
    """JPEG bytes of patches at random places, the same ones each time, and the photograph each comes from."""
    folder = files("sklearn.datasets").joinpath("images")
    photographs = tf.stack([tf.io.decode_jpeg(folder.joinpath(name).read_bytes()) for name in PHOTOGRAPHS])

    def cut(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        label = number % len(PHOTOGRAPHS)
        size = (PATCH_PIXELS, PATCH_PIXELS, 3)
        patch = tf.image.stateless_random_crop(photographs[label], size, seed=(0, number))
        return tf.io.encode_jpeg(patch, quality=90), tf.cast(label, tf.int32)

    every = tf.data.Dataset.range(PATCHES).map(cut, num_parallel_calls=tf.data.AUTOTUNE)
    return every.batch(PATCHES).get_single_element()


def seen(jpeg: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """What the network sees of a file: decoded, resized, mirrored half of the time, in another light."""
    pixels = tf.image.convert_image_dtype(tf.io.decode_jpeg(jpeg, channels=3), tf.float32)
    image = tf.image.resize(pixels, (IMAGE_PIXELS, IMAGE_PIXELS), antialias=True)
    image = tf.image.random_flip_left_right(image)
    return tf.image.random_brightness(image, 0.2), label


def training_examples(config: autotune.DatasetConfig) -> tf.data.Dataset:
    """Single examples, in a new order and augmented anew each epoch; the bytes are shuffled, not the images."""
    examples = tf.data.Dataset.from_tensor_slices(patches()).shuffle(PATCHES)
    return examples.map(seen, num_parallel_calls=config.num_parallel_calls)


def network() -> keras.Model:
    """Three convolutions that halve the image, then one number for each photograph, in float32."""
    model = keras.Sequential([keras.Input((IMAGE_PIXELS, IMAGE_PIXELS, 3))])
    for filters in (8, 16, 32):
        model.add(keras.layers.Conv2D(filters, 3, strides=2, activation="relu"))
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(len(PHOTOGRAPHS), dtype="float32"))
    return model


def compile_arguments() -> dict:
    """Optimizer, loss and metrics."""
    return {
        "optimizer": keras.optimizers.Adam(1e-3),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }


workload = autotune.Workload(model=network, dataset=training_examples, compile=compile_arguments, batch_size=32)
