"""Train on batches that a keras.utils.Sequence makes, in worker threads.

Usage: python keras2_sequence.py --epochs 6 --workers 2
"""

import argparse
import math
import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf


class WaveSequence(tf.keras.utils.Sequence):
    def __init__(self, ids, labels, batch_size):
        self.ids, self.labels, self.batch_size = ids, labels, batch_size

    def __len__(self):
        return math.ceil(len(self.ids) / self.batch_size)

    def __getitem__(self, index):
        chosen = self.ids[index * self.batch_size : (index + 1) * self.batch_size]
        return np.stack([self.load(i) for i in chosen]), self.labels[chosen]

    def load(self, i):
        # stands for np.load(f"data/{i}.npy")
        rng = np.random.default_rng(i)
        wave = np.sin((self.labels[i] + 1) * np.linspace(0, 2 * np.pi, 64) + rng.uniform(0, 2 * np.pi))
        return (wave + rng.normal(scale=0.5, size=64)).astype("float32")[:, None]


parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--workers", type=int, default=2)
args = parser.parse_args()
tf.keras.utils.set_random_seed(0)

labels = np.random.RandomState(0).randint(0, 4, size=3000)
ids = np.arange(3000)
train = WaveSequence(ids[:2400], labels, args.batch_size)
valid = WaveSequence(ids[2400:], labels, args.batch_size)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv1D(16, 5, strides=2, activation="relu", input_shape=(64, 1)),
        tf.keras.layers.Conv1D(32, 5, strides=2, activation="relu"),
        tf.keras.layers.GlobalMaxPooling1D(),
        tf.keras.layers.Dense(4, activation="softmax"),
    ]
)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    train,
    validation_data=valid,
    epochs=args.epochs,
    workers=args.workers,
    max_queue_size=20,
    callbacks=[tf.keras.callbacks.ModelCheckpoint("waves_{epoch:02d}.h5")],
)
print(model.evaluate(valid, verbose=0))
