"""Train a small network on the 1,797 handwritten digits that ship with scikit-learn.

python examples/train_digits.py --epochs 20
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

HELD_OUT = 360


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return all images (rows of 64 numbers from 0 to 1) and their digits, in a fixed shuffled order."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed=0).permutation(len(images))
    return (images[order] / 16).astype("float32"), labels[order].astype("int32")


def build_model() -> keras.Model:
    """Build two hidden layers and ten classes; the last layer stays float32 under mixed precision."""
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )


def main() -> None:
    """Train, evaluate, and save the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--save-to", default="digits.keras")
    args = parser.parse_args()

    images, labels = digits()
    train = tf.data.Dataset.from_tensor_slices((images[HELD_OUT:], labels[HELD_OUT:]))
    train = train.shuffle(len(images)).batch(32)
    held_out = tf.data.Dataset.from_tensor_slices((images[:HELD_OUT], labels[:HELD_OUT])).batch(120)

    model = build_model()
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(train, epochs=args.epochs, verbose=2)

    _, accuracy = model.evaluate(held_out, verbose=0)
    print(f"held-out accuracy: {accuracy:.3f}")
    model.save(args.save_to)


if __name__ == "__main__":
    main()
