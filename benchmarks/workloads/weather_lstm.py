"""An LSTM forecasts the temperature from 120 past steps, as Keras's weather example does, on a series made from a seed.

The windows are cut and batched by `keras.utils.timeseries_dataset_from_array`, so the workload does its own batching.

    autotune tune benchmarks/workloads/weather_lstm.py
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import autotune

ROWS = 24_000
TRAINING_ROWS = 19_000
FEATURES = 7
STEPS_BACK = 120
SAMPLING_RATE = 6
"""Rows between two steps."""
STEPS_AHEAD = 12
PAST = STEPS_BACK * SAMPLING_RATE
FUTURE = STEPS_AHEAD * SAMPLING_RATE


@functools.cache
def series() -> np.ndarray:
    """Normalised weather, one row for every ten minutes, of shape (`ROWS`, `FEATURES`): seasons plus a random walk."""
    random = np.random.default_rng(seed=0)
    days = np.arange(ROWS)[:, None] / 144
    phases = random.uniform(0, 2 * np.pi, size=(2, FEATURES))
    seasons = np.sin(2 * np.pi * days + phases[0]) + 2 * np.sin(2 * np.pi * days / 365 + phases[1])
    walk = random.normal(scale=0.02, size=(ROWS, FEATURES)).cumsum(axis=0)
    rows = seasons + walk @ random.normal(size=(FEATURES, FEATURES))
    known = rows[:TRAINING_ROWS]
    normalised: np.ndarray = ((rows - known.mean(axis=0)) / known.std(axis=0)).astype("float32")
    return normalised


def windows(rows: np.ndarray, batch_size: int) -> tf.data.Dataset:
    """Batches of windows, in order, each with the temperature `FUTURE` rows after its end."""
    return keras.utils.timeseries_dataset_from_array(
        rows[: -PAST - FUTURE],
        rows[PAST + FUTURE :, :1],
        sequence_length=STEPS_BACK,
        sampling_rate=SAMPLING_RATE,
        batch_size=batch_size,
    )


def training_batches(config: autotune.DatasetConfig) -> tf.data.Dataset:
    """Batches of the first part of the series."""
    return windows(series()[:TRAINING_ROWS], config.batch_size)


def held_out(config: autotune.DatasetConfig) -> tf.data.Dataset:
    """Batches of the rest of the series."""
    return windows(series()[TRAINING_ROWS:], config.batch_size)


def network() -> keras.Model:
    """One LSTM, one number; the last layer stays float32 under mixed precision."""
    return keras.Sequential(
        [keras.Input((STEPS_BACK, FEATURES)), keras.layers.LSTM(32), keras.layers.Dense(1, dtype="float32")]
    )


def compile_arguments() -> dict[str, Any]:
    """Optimizer and loss."""
    return {"optimizer": keras.optimizers.Adam(1e-3), "loss": "mse"}


workload = autotune.Workload(
    model=network,
    dataset=training_batches,
    compile=compile_arguments,
    batch_size=256,
    validation=held_out,
    batched=True,
)
