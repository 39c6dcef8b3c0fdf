"""Measures the gradient's noise beside several trainings in this one process, and prints what each came to as JSON."""

import functools
import json

import keras
import numpy as np
import tensorflow as tf

from autotune.training.noise import UpcomingBatches, measure_noise


def train(model, dataset, *, at=None, steps=1, epochs=1, **options):
    """Train as `fit` does, and measure the noise before the call of this number.

    Returns what was measured, and all that the training came to.
    """
    measured, upcoming, calls = None, UpcomingBatches(steps), 0
    model.make_train_function()
    usual = upcoming.wrap(model.train_function)
    options = {"batch_size": 32, "seconds": 1e3, "step_seconds": 0.0, "compile_seconds": 0.0, **options}

    def train_function(iterator):
        nonlocal measured, calls
        if calls == at:
            measured = measure_noise(model, upcoming, iterator, **options)
        calls += 1
        return usual(iterator)

    model.train_function = train_function
    history = model.fit(dataset, epochs=epochs, verbose=0).history
    return measured, [calls, history, [np.asarray(variable).tolist() for variable in model.variables]]


def numbers(*shape, seed=0):
    """Random numbers, the same for each seed."""
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def batches(*arrays, size=32):
    """Batches of arrays, in their order."""
    return tf.data.Dataset.from_tensor_slices(arrays).batch(size)


def linear(**options):
    """A model of 20 weights."""
    return keras.Sequential([keras.Input((20,)), keras.layers.Dense(1, use_bias=False, **options)])


def compiled(model, optimizer="sgd", **options):
    """Return a model compiled for a regression."""
    model.compile(optimizer, loss="mse", **options)
    return model


# ------------------------------------------------------------------------- that a training goes on as if there was none


class Noisy(keras.layers.Layer):
    """Draws from Keras's global generator of seeds."""

    def call(self, x, training=None):
        """Add noise."""
        return x + 0.1 * keras.random.normal(tf.shape(x)) if training else x


def with_state(steps):
    """A model that changes statistics, seeds and metrics in each step."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((20,))
    x = keras.layers.BatchNormalization()(keras.layers.Dense(8, activation="relu")(inputs))
    x = Noisy()(keras.layers.Dropout(0.5)(x))
    outputs = [keras.layers.Dense(1, name="a", kernel_regularizer="l2")(x), keras.layers.Dense(1, name="b")(x)]
    model = keras.Model(inputs, outputs)
    model.compile("adam", loss=["mse", "mae"], metrics=[["mae"], ["mse"]], steps_per_execution=steps)
    return model


def shuffled(*, counted):
    """Ten batches, the last of 12 examples; each epoch has another order."""
    x, y = numbers(300, 20), numbers(300, 1, seed=1)
    examples = tf.data.Dataset.from_tensor_slices((x, (y, y))).shuffle(100, seed=1)
    return (examples if counted else examples.filter(lambda x, y: True)).batch(32)


def beside_the_same(steps, at, *, counted=True):
    """Train two epochs with and without a measurement: why there was none, and whether both came to the same."""
    measured, with_noise = train(with_state(steps), shuffled(counted=counted), at=at, steps=steps, epochs=2)
    _, without = train(with_state(steps), shuffled(counted=counted), steps=steps, epochs=2)
    return {"not_measured": measured.not_measured, "same": with_noise == without}


# ------------------------------------------------------------------------------------------- that its figures are true


def regression():
    """The gradients of a linear regression at weights of 0, where the right ones have length 1; label noise is 4."""
    x = numbers(4096, 20)
    y = x @ np.full((20, 1), 20**-0.5, "float32") + 2.0 * numbers(4096, 1, seed=1)
    model = compiled(linear(kernel_initializer="zeros"), keras.optimizers.SGD(0.0))
    measured, _ = train(model, batches(x, y, size=512), at=1, batch_size=512)
    return measured.model_dump()


def squares():
    """Squares of gradients with sample weights and a regularizer: computed by hand, and without and with a scale."""
    x, y, weight = numbers(300, 20), numbers(300, 1, seed=1), np.abs(numbers(300, seed=2))
    kernel, expected = np.ones((20, 1)), []
    for start in range(0, 128, 4):
        part = slice(start, start + 4)
        errors = weight[part, None] * (x[part] @ kernel - y[part])
        expected.append(float(np.sum((2 / 4 * x[part].T @ errors + 2 * 0.5 * kernel) ** 2)))

    def measured(optimizer):
        model = linear(kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.5))
        return train(compiled(model, optimizer), batches(x, y, weight), at=0)[0].squares

    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=1024.0)
    return [expected, measured(keras.optimizers.SGD(0.0)), measured(scaled)]


# --------------------------------------------------------------------------------------------- where there can be none


class OwnStep(keras.Model):
    """Trains by a step of its own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        """Compute."""
        return self.dense(x)

    def train_step(self, data):
        """Train."""
        return super().train_step(data)


class OfFixedSize(keras.layers.Layer):
    """Takes batches of 32 only."""

    def call(self, x):
        """Add nothing."""
        return x + tf.zeros((32, 1))


def none(model, **options):
    """Why nothing was measured, and how many calls the training had."""
    data = batches(numbers(320, 20), numbers(320, 1, seed=1))
    measured, (calls, *_) = train(model, data, at=1, **options)
    return [measured.not_measured, calls]


CASES = {
    "early": functools.partial(beside_the_same, 1, 4),
    "late": functools.partial(beside_the_same, 1, 8),
    "three steps a call": functools.partial(beside_the_same, 3, 1),
    "three steps a call, late": functools.partial(beside_the_same, 3, 3, counted=False),
    "at the last batch": functools.partial(beside_the_same, 1, 9, counted=False),
    "regression": regression,
    "squares": squares,
    "own step": lambda: none(compiled(OwnStep())),
    "eager": lambda: none(compiled(linear(), run_eagerly=True)),
    "slow": lambda: none(compiled(linear()), step_seconds=5.0, seconds=12.0),
    "over": lambda: none(compiled(linear()), seconds=1e-9),
    "of a fixed size": lambda: none(compiled(keras.Sequential([linear(), OfFixedSize()]))),
}
print(json.dumps({name: case() for name, case in CASES.items()}))  # noqa: T201  # the test reads it
