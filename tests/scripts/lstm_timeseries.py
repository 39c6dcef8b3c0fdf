"""Forecast a temperature series with an LSTM, one hour ahead."""

import argparse

import keras
import numpy as np
from keras import layers


def make_series(n=6000, seed=0):
    rng = np.random.default_rng(seed)
    t = np.arange(n)
    temp = 10 + 8 * np.sin(2 * np.pi * t / 2000) + 4 * np.sin(2 * np.pi * t / 24)
    temp = temp + np.cumsum(rng.normal(scale=0.05, size=n)) + rng.normal(scale=0.3, size=n)
    pressure = 1000 + 5 * np.cos(2 * np.pi * t / 300) + rng.normal(size=n)
    humidity = 60 - 1.5 * (temp - temp.mean()) + rng.normal(scale=3, size=n)
    return np.stack([temp, pressure, humidity], axis=1).astype("float32")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("-e", "--epochs", type=int, default=6)
    ap.add_argument("-b", "--batch-size", type=int, default=64)
    ap.add_argument("--past", type=int, default=24, help="length of the input window")
    ap.add_argument("--units", type=int, default=32)
    args = ap.parse_args()

    keras.utils.set_random_seed(1)

    data = make_series()
    split = int(0.8 * len(data))
    mean, std = data[:split].mean(axis=0), data[:split].std(axis=0)
    data = (data - mean) / std

    def windows(values, shuffle):
        return keras.utils.timeseries_dataset_from_array(
            values[: -args.past],
            values[args.past :, 0],
            sequence_length=args.past,
            batch_size=args.batch_size,
            shuffle=shuffle,
        )

    dataset_train = windows(data[:split], shuffle=True)
    dataset_val = windows(data[split:], shuffle=False)

    inputs = keras.layers.Input(shape=(args.past, data.shape[1]))
    lstm_out = keras.layers.LSTM(args.units)(inputs)
    outputs = layers.Dense(1)(lstm_out)

    model = keras.Model(inputs=inputs, outputs=outputs)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.001), loss="mse", metrics=["mae"])
    model.summary()

    es_callback = keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=0, patience=5)
    modelckpt_callback = keras.callbacks.ModelCheckpoint(
        monitor="val_loss",
        filepath="model_checkpoint.weights.h5",
        verbose=1,
        save_weights_only=True,
        save_best_only=True,
    )

    history = model.fit(
        dataset_train, epochs=args.epochs, validation_data=dataset_val, callbacks=[es_callback, modelckpt_callback]
    )

    val_loss, val_mae = model.evaluate(dataset_val, verbose=0)
    print(f"val mse {val_loss:.4f}, val mae {val_mae * std[0]:.3f} degrees")
