"""Forecast the next value of noisy oscillations, each with a period of its own, with an LSTM."""

import argparse

import keras
import numpy as np
import tensorflow as tf

WINDOW = 32


def make_windows(count, seed):
    rng = np.random.default_rng(seed)
    period, phase = rng.uniform(6, 40, (count, 1)), rng.uniform(0, 2 * np.pi, (count, 1))
    swing, slope = rng.uniform(0.5, 1.5, (count, 1)), rng.normal(0, 0.01, (count, 1))
    time = np.arange(WINDOW + 1)
    series = swing * np.sin(2 * np.pi * time / period + phase) + slope * time
    series += rng.normal(0, 0.1, series.shape)
    return series[:, :WINDOW, None].astype("float32"), series[:, WINDOW:].astype("float32")


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=28)
parser.add_argument("--learning-rate", type=float, default=0.001)
parser.add_argument("--lstm-units", type=int, default=32)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()
tf.keras.utils.set_random_seed(args.seed)

x_train, y_train = make_windows(8000, seed=0)
x_val, y_val = make_windows(2000, seed=1)

dataset_train = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(8000).batch(args.batch_size)
dataset_val = tf.data.Dataset.from_tensor_slices((x_val, y_val)).batch(args.batch_size)

inputs = keras.layers.Input(shape=(WINDOW, 1))
lstm_out = keras.layers.LSTM(args.lstm_units)(inputs)
outputs = keras.layers.Dense(1, dtype="float32")(lstm_out)
model = keras.Model(inputs=inputs, outputs=outputs)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=args.learning_rate), loss="mse")

history = model.fit(dataset_train, epochs=args.epochs, validation_data=dataset_val, verbose=2)
