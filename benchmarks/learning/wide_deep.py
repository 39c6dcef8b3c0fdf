"""Wide and deep: click prediction from categorical columns, some of which act only together."""

import argparse
import itertools

import keras
import numpy as np
import tensorflow as tf
from keras import layers

COLUMNS = {"site": 60, "device": 8, "hour": 24, "country": 20, "category": 15, "ad": 80}
CROSS_BUCKETS = 2000
LEARNING_RATE = 0.0005


def make_clicks(count, seed):
    tastes, rng = np.random.default_rng(0), np.random.default_rng(seed)
    features = {name: rng.integers(0, size, count).astype("int32") for name, size in COLUMNS.items()}
    logit = np.full(count, -1.0)
    for name, size in COLUMNS.items():
        logit += 0.3 * tastes.normal(size=size)[features[name]]
    for one, other in itertools.combinations(COLUMNS, 2):
        mine, theirs = (tastes.normal(size=(COLUMNS[name], 2)) for name in (one, other))
        logit += 0.4 * (mine[features[one]] * theirs[features[other]]).sum(axis=1)
    return features, (rng.random(count) < 1 / (1 + np.exp(-logit))).astype("float32")


def add_crosses(features):
    pairs = enumerate(itertools.combinations(COLUMNS, 2))
    crosses = [(features[one] * 7919 + features[other] * 104729 + n) % CROSS_BUCKETS for n, (one, other) in pairs]
    return features | {"crosses": np.stack(crosses, axis=1).astype("int32")}


def create_wide_and_deep_model():
    inputs = {name: layers.Input(name=name, shape=(), dtype="int32") for name in COLUMNS}
    inputs["crosses"] = layers.Input(name="crosses", shape=(15,), dtype="int32")
    wide = layers.Flatten()(layers.Embedding(CROSS_BUCKETS, 1, embeddings_initializer="zeros")(inputs["crosses"]))
    deep = layers.concatenate([layers.Embedding(size, 16)(inputs[name]) for name, size in COLUMNS.items()])
    for units in (128, 64):
        deep = layers.Dense(units, activation="relu")(deep)
        deep = layers.Dropout(0.1)(deep)
    merged = layers.concatenate([wide, deep])
    return keras.Model(inputs=inputs, outputs=layers.Dense(1, activation="sigmoid", dtype="float32")(merged))


def run_experiment(batch_size, num_epochs):
    features, clicks = make_clicks(80000, seed=1)
    train_dataset = tf.data.Dataset.from_tensor_slices((add_crosses(features), clicks))
    train_dataset = train_dataset.cache().shuffle(10000).batch(batch_size)
    features, clicks = make_clicks(10000, seed=2)
    val_dataset = tf.data.Dataset.from_tensor_slices((add_crosses(features), clicks)).batch(batch_size)

    lr_schedule = keras.optimizers.schedules.InverseTimeDecay(
        LEARNING_RATE, decay_steps=80000 // batch_size * 10, decay_rate=1
    )
    model = create_wide_and_deep_model()
    model.compile(optimizer=keras.optimizers.Adam(lr_schedule), loss="binary_crossentropy", metrics=["binary_accuracy"])
    model.fit(train_dataset, validation_data=val_dataset, epochs=num_epochs, verbose=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    keras.utils.set_random_seed(args.seed)
    run_experiment(args.batch_size, args.epochs)
