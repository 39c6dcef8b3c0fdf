"""A script that calls `fit` in a loop is charged what lies between two of its calls; a script with one call is not."""

import pytest
from real_trials import PATIENCE_SECONDS, QUICK

from autotune.data.facts import ScriptSettings, WorkloadReference
from autotune.runtime.local import LocalExecutor
from autotune.space.knobs import Device
from autotune.tuning.opening import baseline_of

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
def opened(tmp_path):
    """Trials of a script, with what its survey has found."""
    made = []

    def start(source):
        (tmp_path / "train.py").write_text(HEAD + source, encoding="utf-8")
        settings = ScriptSettings(created=str(tmp_path / "created.txt"))
        reference = WorkloadReference(file=str(tmp_path / "train.py"), search_path=(str(tmp_path),), script=settings)
        made.append(LocalExecutor(reference, logs=tmp_path))
        return made[-1], made[-1].open()

    yield start
    for processes in made:
        processes.close()


def launched(processes, facts, tmp_path, **changes):
    """A trial of the script, with some changes."""
    baseline = baseline_of(facts, "train.py", Device.CPU, lambda event: None)
    log = str(tmp_path / "trial.log")
    return processes.launch(baseline.replace(**changes), log=log, data=None, timing=QUICK)


def slice_of(processes, facts, tmp_path, **changes):
    """A slice of such a trial."""
    trial = launched(processes, facts, tmp_path, **changes)
    trial.warm_up(PATIENCE_SECONDS)
    return trial.measure(0.1, PATIENCE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_what_lies_between_two_calls_of_fit_is_charged(opened, tmp_path, name):
    """Each epoch bears its share of it, with the script's knobs and with others."""
    source, epochs_per_call = SCRIPTS[name]
    processes, facts = opened(source)
    assert facts.script.fit_calls > 1
    for changes in ({}, {"batch_size": 64, "steps_per_execution": 2}):
        measured = slice_of(processes, facts, tmp_path, **changes)
        epochs = measured.examples / 512
        boundary = 0.9  # what lies between epochs inside a call is not charged twice
        assert measured.charged_seconds >= boundary * epochs / epochs_per_call * BETWEEN_SECONDS


def test_a_single_call_of_fit_is_charged_nothing(opened, tmp_path):
    """The survey ends at it, and its trials run it once."""
    processes, facts = opened("model.fit(x, y, epochs=50, verbose=0)\nraise SystemExit('the survey went on')\n")
    assert facts.script.fit_calls == 1
    assert slice_of(processes, facts, tmp_path).charged_seconds == 0.0


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


@pytest.mark.slow
def test_a_callback_at_the_end_of_a_long_epoch_is_charged(opened, tmp_path):
    """It sees what a validation reports, also where epochs are timed by steps and the trial passes their ends."""
    processes, facts = opened("import tensorflow as tf\n" + LONG_EPOCHS)
    trial = launched(processes, facts, tmp_path)
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


@pytest.mark.slow
@pytest.mark.parametrize("reads_by", LOOPS)
def test_what_a_loop_does_between_long_epochs_is_charged(opened, tmp_path, reads_by):
    """Some epochs end early; not where the script reads by `next`, which would raise."""
    processes, facts = opened(LOOP + LOOPS[reads_by])
    ready = launched(processes, facts, tmp_path).warm_up(PATIENCE_SECONDS).ready
    assert ready.timed_by == "steps"
    charged = ready.epoch_overhead_seconds
    assert charged >= BETWEEN_SECONDS if reads_by == "for" else charged == 0.0
