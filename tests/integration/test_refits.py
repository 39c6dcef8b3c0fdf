"""A script that calls `fit` in a loop is charged what lies between two of its calls; a script with one call is not."""

import pytest
from real_trials import PATIENCE_SECONDS

BETWEEN_SECONDS = 0.25
"""What the scripts below do between two calls, at least."""
HEAD = """
import time

import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
y = x[:, :1]


def new_model():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def judge(model):
    model.evaluate(x, y, verbose=0)
    time.sleep(0.25)


model = new_model()
"""
SCRIPTS = {
    "each_epoch": ("for epoch in range(50):\n    model.fit(x, y, epochs=1, verbose=0)\n    judge(model)\n", 1),
    "two_calls": ("for epoch in range(2):\n    model.fit(x, y, verbose=0)\n    judge(model)\n", 1),
    "ends_earlier_in_a_trial": (
        "while int(model.optimizer.iterations) < 12:\n    model.fit(x, y, verbose=0)\n    judge(model)\n",
        1,
    ),
    "continued_in_a_function": (
        "def train(first):\n    model.fit(x, y, initial_epoch=first, epochs=first + 2, verbose=0)\n\n"
        "done = 0\nwhile done < 60:\n    train(done)\n    judge(model)\n    done += 2\n",
        2,
    ),
    "folds": (
        "for fold in range(5):\n    model = new_model()\n"
        "    model.fit(x, y, epochs=4, validation_data=(x, y), verbose=0)\n    judge(model)\n",
        4,
    ),
}


@pytest.fixture
def opened(trials_of_script):
    """Trials of a script that begins with `HEAD`."""
    return lambda source: trials_of_script(HEAD + source)


def slice_of(trials, **changes):
    """A slice of a trial with some changes."""
    trial = trials.launch(**changes)
    trial.warm_up(PATIENCE_SECONDS)
    return trial.measure(0.1, PATIENCE_SECONDS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_lies_between_two_calls_of_fit_is_charged(opened, name):
    source, epochs_per_call = SCRIPTS[name]
    trials = opened(source)
    assert trials.facts.script.fit_calls > 1
    several = [{}, {"batch_size": 64, "steps_per_execution": 2}]
    for changes in several if name == "each_epoch" else [{}]:
        measured = slice_of(trials, **changes)
        epochs = measured.examples / 512
        boundary = 0.9  # what lies between epochs inside a call is not charged twice
        assert measured.charged_seconds >= boundary * epochs / epochs_per_call * BETWEEN_SECONDS


def test_a_single_call_of_fit_is_charged_nothing(opened):
    trials = opened("model.fit(x, y, epochs=50, verbose=0)\nraise SystemExit('the survey went on')\n")
    assert trials.facts.script.fit_calls == 1
    assert slice_of(trials).charged_seconds == 0.0


LONG_EPOCHS = """
def slow(element):
    time.sleep(0.01)
    return element


class Judge(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs):
        assert logs["val_loss"] >= 0
        time.sleep(0.25)


data = tf.data.Dataset.from_tensor_slices((x, y)).map(
    lambda a, b: (tf.numpy_function(slow, [a], tf.float32, stateful=True), b)
)
data = data.map(lambda a, b: (tf.ensure_shape(a, (8,)), b)).batch(2)
model.fit(data, epochs=20, validation_data=(x, y), callbacks=[Judge()], verbose=2)
"""


def test_a_callback_at_the_end_of_a_long_epoch_is_charged(opened):
    trials = opened("import tensorflow as tf\n" + LONG_EPOCHS)
    trial = trials.launch()
    ready = trial.warm_up(PATIENCE_SECONDS).ready
    assert ready.timed_by == "steps"
    assert ready.epoch_overhead_seconds >= BETWEEN_SECONDS
    assert trial.measure(8.0, PATIENCE_SECONDS).epochs == 0


LOOP = """
import tensorflow as tf

optimizer = keras.optimizers.SGD(0.01)


@tf.function
def step(a, b):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(a, training=True) - b) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss


def slow(a, b):
    time.sleep(0.01)
    return a, b


held_out = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)
data = tf.data.Dataset.from_tensor_slices((x, y)).map(lambda a, b: tf.numpy_function(slow, [a, b], [tf.float32] * 2))
data = data.map(lambda a, b: (tf.ensure_shape(a, (8,)), tf.ensure_shape(b, (1,)))).batch(2)
for epoch in range(20):
"""
LOOPS = {
    "for": "    for index, (a, b) in enumerate(data):\n        loss = step(a, b)\n    judge(model)\n",
    "next": "    batches = iter(data)\n    for i in range(256):\n        step(*next(batches))\n    judge(model)\n",
}


LOOPS_THAT_COMPILE = {
    "a dataset": "    for a, b in data.take(16).repeat(40):\n        step(a, b)\n",
    "arrays": "    for i in range(640):\n        step(tf.constant(x[:2]), tf.constant(y[:2]))\n",
    "arrays by Keras": "    model.compile(optimizer, 'mse')\n"
    "    for i in range(640):\n        model.train_on_batch(x[:2], y[:2])\n",
}


@pytest.mark.parametrize("reads", LOOPS_THAT_COMPILE)
def test_the_first_step_of_a_loop_is_its_compile_time(opened, reads):
    """Tracing takes many steps' time, whatever the machine does meanwhile."""
    ready = opened(LOOP + LOOPS_THAT_COMPILE[reads]).launch().warm_up(PATIENCE_SECONDS).ready
    assert ready.compile_seconds > ready.call_seconds


@pytest.mark.parametrize("reads_by", LOOPS)
def test_what_a_loop_does_between_long_epochs_is_charged(opened, reads_by):
    trials = opened(LOOP + LOOPS[reads_by])
    ready = trials.launch().warm_up(PATIENCE_SECONDS).ready
    assert ready.timed_by == "steps"
    charged = ready.epoch_overhead_seconds
    assert charged >= BETWEEN_SECONDS if reads_by == "for" else charged == 0.0


def test_an_epoch_that_a_trial_cuts_short_is_not_the_loops_epoch(opened):
    trial = opened(LOOP + LOOPS["for"]).launch()
    trial.warm_up(PATIENCE_SECONDS)
    assert trial.finish(0.0, PATIENCE_SECONDS).calls_per_epoch in (None, 256)
