"""A small convnet tells outlines and solid shapes apart, at any place, size and angle, under noise."""

import argparse

import keras
import numpy as np
from keras import layers

SIZE = 24
CLASSES = ["disc", "ring", "square", "frame", "cross", "bar"]


def draw_shapes(count, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(CLASSES), count)
    rows, columns = np.mgrid[:SIZE, :SIZE].astype("float32")
    angle, radius = rng.uniform(0, np.pi, (count, 1, 1)), rng.uniform(4, 9, (count, 1, 1))
    x = columns - rng.uniform(8, SIZE - 8, (count, 1, 1))
    y = rows - rng.uniform(8, SIZE - 8, (count, 1, 1))
    x, y = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    round_, straight = np.hypot(x, y) / radius, np.maximum(abs(x), abs(y)) / (0.8 * radius)
    thin = np.minimum(abs(x), abs(y)) < 0.3 * radius
    shapes = [
        round_ < 1,
        (round_ < 1) & (round_ > 0.65),
        straight < 1,
        (straight < 1) & (straight > 0.65),
        (straight < 1.1) & thin,
        (abs(x) < 0.3 * radius) & (abs(y) < 1.1 * radius),
    ]
    images = np.choose(labels[:, None, None], shapes) * rng.uniform(0.3, 1.0, (count, 1, 1))
    images += rng.normal(0, 0.35, images.shape)
    return images[..., None].astype("float32"), labels


def step_decay(epoch, lr):
    return lr * 0.5 if epoch and epoch % 10 == 0 else lr


parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", default=64, type=int)
parser.add_argument("--epochs", default=20, type=int)
parser.add_argument("--seed", default=1, type=int)
args = parser.parse_args()
keras.utils.set_random_seed(args.seed)

train_images, train_labels = draw_shapes(10000, seed=100)
val_images, val_labels = draw_shapes(2000, seed=101)

model = keras.Sequential(
    [
        keras.Input(shape=(SIZE, SIZE, 1)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(64, activation="relu"),
        layers.Dense(len(CLASSES)),
    ]
)
model.compile(
    optimizer=keras.optimizers.SGD(learning_rate=0.02, momentum=0.9),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(
    train_images,
    train_labels,
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_data=(val_images, val_labels),
    callbacks=[keras.callbacks.LearningRateScheduler(step_decay)],
    verbose=2,
)
