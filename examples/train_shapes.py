"""Train a small convnet to tell shapes apart in photos, which are drawn when it starts.

python examples/train_shapes.py --epochs 160
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras import layers

SHAPES = ("disc", "square", "diamond", "cross")
PHOTO_PIXELS = 360
IMAGE_PIXELS = 48
ROWS, COLUMNS = np.mgrid[-1 : 1 : PHOTO_PIXELS * 1j, -1 : 1 : PHOTO_PIXELS * 1j].astype("float32")


def draw_photo(shape: str, rng: np.random.Generator) -> np.ndarray:
    """Draw one shape in any two colours, at any place and size, under noise."""
    x, y = (abs(at - np.float32(rng.uniform(-0.4, 0.4))) for at in (COLUMNS, ROWS))
    size = np.float32(rng.uniform(0.25, 0.5))
    distance = {"disc": np.hypot(x, y), "diamond": x + y}.get(shape, np.maximum(x, y))
    inside = distance < size
    if shape == "cross":
        inside &= np.minimum(x, y) < 0.3 * size
    background, colour = rng.integers(0, 210, (2, 3), dtype="uint8")
    noise = rng.integers(0, 45, (PHOTO_PIXELS, PHOTO_PIXELS, 1), dtype="uint8")
    return np.where(inside[..., None], colour, background) + noise


def take_photos(count: int, seed: int) -> tuple[list[bytes], np.ndarray]:
    """Return photos as JPEG files, and the number of the shape on each."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(SHAPES), count)
    photos = [draw_photo(SHAPES[label], rng) for label in labels]
    return [tf.io.encode_jpeg(photo).numpy() for photo in photos], labels


def load(jpeg: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Decode a photo, and shrink it to the size that the model takes."""
    photo = tf.io.decode_jpeg(jpeg, channels=3)
    return tf.image.resize(photo, (IMAGE_PIXELS, IMAGE_PIXELS), antialias=True) / 255, label


def build_model() -> keras.Model:
    """Build three convolutions and four classes; the last layer stays float32 under mixed precision."""
    model = keras.Sequential([keras.Input((IMAGE_PIXELS, IMAGE_PIXELS, 3))])
    for filters in (8, 16, 32):
        model.add(layers.Conv2D(filters, 3, padding="same", activation="relu"))
        model.add(layers.MaxPooling2D())
    model.add(layers.GlobalMaxPooling2D())
    model.add(layers.Dense(len(SHAPES), dtype="float32"))
    return model


def main() -> None:
    """Train, and evaluate on other photos."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=160)
    parser.add_argument("--photos", type=int, default=400)
    args = parser.parse_args()

    train = tf.data.Dataset.from_tensor_slices(take_photos(args.photos, seed=0))
    train = train.map(load).shuffle(100).batch(32)

    model = build_model()
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(train, epochs=args.epochs, verbose=2)

    held_out = tf.data.Dataset.from_tensor_slices(take_photos(100, seed=1)).map(load).batch(32)
    _, accuracy = model.evaluate(held_out, verbose=0)
    print(f"held-out accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
