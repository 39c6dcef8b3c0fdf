"""Eager steps that trials compile: what is trained, and what is refused because it trains otherwise."""

import pytest
from real_trials import PATIENCE_SECONDS

from autotune.data.record import Outcome
from autotune.runtime.executor import TrialFailed

SCRIPT = """
import keras, time
import tensorflow as tf
from agent import Agent

{prepare}
keras.utils.set_random_seed(1)
x = tf.random.stateless_uniform((96, 4), (1, 2))
data = tf.data.Dataset.from_tensor_slices((x, tf.reduce_sum(x, 1, keepdims=True))).shuffle(96).batch(16)
agent = Agent()
for epoch in range(1000):
    for batch in data:
        agent.update(batch)
    {between}
"""
AGENT = """
import keras
import tensorflow as tf

class Agent:
    def __init__(self):
        self.net = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
        self.optimizer, self.mean = keras.optimizers.Adam(0.01), keras.metrics.Mean()
        self.weight = 1.0

    def update(self, batch):
        x, y = batch
        def loss():
            return tf.reduce_mean((self.net(x, training=True) - y) ** 2) * self.weight
        with tf.GradientTape() as tape:
            value = loss()
        self.apply(tape.gradient(value, self.net.trainable_variables))
        if value < 100.0:
            self.mean.update_state(value)
        return value

    def apply(self, gradients):
        self.optimizer.apply(gradients, self.net.trainable_variables)
"""


FIT = """
import keras
import numpy as np

x = np.arange(384, dtype="float32").reshape(96, 4) % 7
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
model.compile("adam", "mse"{eager})
{by_attribute}
model.fit(x, x[:, :1], batch_size=16, epochs=9)
"""


@pytest.fixture
def launched(trials_of_script, tmp_path):
    """A trial of the script with its step compiled, and the facts of the script."""

    def launch(between="pass", prepare="", **changes):
        (tmp_path / "agent.py").write_text(AGENT, encoding="utf-8")
        trials = trials_of_script(SCRIPT.format(between=between, prepare=prepare))
        return trials.facts.script, trials.launch(graph_step=True, **changes)

    return launch


def test_a_step_with_dropout_is_compiled_by_xla(launched):
    _, trial = launched(jit_compile=True)
    trial.warm_up(PATIENCE_SECONDS)
    assert trial.finish(0.0, PATIENCE_SECONDS).peak_host_bytes > 0


@pytest.mark.parametrize("prepare", ["", "time.sleep(1.5)"], ids=["alone", "shared_start"])
def test_a_method_of_a_module_is_compiled_and_proven(launched, prepare):
    facts, trial = launched(prepare=prepare)
    assert [str(site) for site in facts.sites["graph_step"]] == ["update() in agent.py, line 11"]
    assert bool(facts.shared_seconds) == bool(prepare)
    trial.warm_up(PATIENCE_SECONDS)
    assert trial.measure(0.2, PATIENCE_SECONDS).steps > 0
    assert trial.finish(0.0, PATIENCE_SECONDS).peak_host_bytes > 0


def test_a_step_that_reads_what_nothing_shows_is_refused(launched):
    _, trial = launched("vars(agent).update(weight=0.5)")
    trial.warm_up(PATIENCE_SECONDS)
    with pytest.raises(TrialFailed) as failed:
        trial.finish(0.0, PATIENCE_SECONDS)
    assert failed.value.outcome is Outcome.UNSTABLE
    assert failed.value.reason.startswith("graph_step: update() in agent.py, line 11, trains otherwise as a graph")


INLINE = """
import keras
import tensorflow as tf

keras.utils.set_random_seed(1)
x = tf.random.stateless_uniform((96, 4), (1, 2))
data = tf.data.Dataset.from_tensor_slices((x, tf.reduce_sum(x, 1, keepdims=True))).batch(16)

def main():
    net, optimizer = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), keras.optimizers.Adam(0.01)
    mean = keras.metrics.Mean()
    for epoch in range(1000):
        for step, (x, y) in enumerate(data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((net(x) - y) ** 2) + {read}
            gradients = tape.gradient(loss, net.trainable_variables)
            optimizer.apply_gradients(zip(gradients, net.trainable_variables))
            mean.update_state(loss)
            if step == 0:
                print(float(loss))

main()
"""


@pytest.mark.parametrize("prepare", ["", "import time; time.sleep(1.5)"], ids=["alone", "shared_start"])
def test_a_step_in_its_loop_is_compiled_and_proven(trials_of_script, prepare):
    trials = trials_of_script(INLINE.format(read="tf.random.normal([])").replace("\n\n", f"\n{prepare}\n", 1))
    script = trials.facts.script
    assert bool(script.shared_seconds) == bool(prepare)
    assert [(site.call, site.line) for site in script.sites["graph_step"]] == [("train_step", 14)]
    trial = trials.launch(graph_step=True)
    trial.warm_up(PATIENCE_SECONDS)
    assert trial.measure(0.2, PATIENCE_SECONDS).steps > 0
    assert trial.finish(0.0, PATIENCE_SECONDS).peak_host_bytes > 0


def test_a_step_in_its_loop_that_no_graph_repeats_is_held(trials_of_script):
    reasons = trials_of_script(INLINE.format(read="1.0 * epoch")).facts.script.not_reached
    assert reasons["graph_step"].startswith("train.py, line 14: the step is given epoch as a Python number")


@pytest.mark.parametrize(
    ("eager", "by_attribute"),
    [(", run_eagerly=True", ""), ("", "model.run_eagerly = True")],
    ids=["compile", "attribute"],
)
def test_a_fit_that_runs_eagerly_is_switched_and_proven(trials_of_script, eager, by_attribute):
    trials = trials_of_script(FIT.format(eager=eager, by_attribute=by_attribute))
    assert trials.facts.script.baseline["graph_step"] is False
    trial = trials.launch(graph_step=True, steps_per_execution=3)
    assert trial.warm_up(PATIENCE_SECONDS).started.in_force == {}
    assert trial.measure(0.2, PATIENCE_SECONDS).retraces == 0
    assert trial.finish(0.0, PATIENCE_SECONDS).peak_host_bytes > 0


BY_CALL = """
import keras
import tensorflow as tf

actor, critic = (keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)]) for units in (4, 1))
first, second = keras.optimizers.Adam(), keras.optimizers.SGD()
x = tf.random.stateless_uniform((32, 3), (1, 2))

def learn(batch):
    for model, optimizer in ((actor, first), (critic, second)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch + tf.random.normal([32, 3])) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss

for step in range(5000):
    learn(x)
"""


ROUNDS = """
import keras
import tensorflow as tf

actor, critic = (keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)]) for units in (4, 1))
first, second = keras.optimizers.Adam(), keras.optimizers.SGD()

def update_actor(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(actor(x) ** 2)
    first.apply(tape.gradient(loss, actor.trainable_variables), actor.trainable_variables)

def update_critic(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(critic(x) ** 2)
    second.apply(tape.gradient(loss, critic.trainable_variables), critic.trainable_variables)

def update_never(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(critic(x) ** 2)

for epoch in range(5000):
    x = tf.random.stateless_uniform((32, 3), (1, epoch))
    for step in range(12):
        update_actor(x)
    for step in range(12):
        update_critic(x)
"""


def test_functions_that_take_turns_are_all_compiled(trials_of_script):
    """A step is a round of both, so that no time of a slice is without the second."""
    trials = trials_of_script(ROUNDS)
    assert [site.call for site in trials.facts.script.sites["graph_step"]] == ["update_actor", "update_critic"]
    assert (trials.facts.script.updaters, trials.facts.batch_size) == (2, 32)
    warm = []
    for compiles in (False, True):
        trial = trials.launch(graph_step=compiles)
        warm.append(trial.warm_up(PATIENCE_SECONDS))
        assert trial.finish(0.0, PATIENCE_SECONDS).peak_host_bytes > 0, "both were called, and proven"
    assert warm[0].shapes == warm[1].shapes
    assert len(warm[1].shapes) == 4


@pytest.mark.parametrize(("seeded", "redraws"), [(False, ""), (True, "train.py, line 13")])
def test_a_step_of_two_optimizers_trains_the_baselines_model(trials_of_script, seeded, redraws):
    trials = trials_of_script(BY_CALL.replace("\n\n", "\nkeras.utils.set_random_seed(3)\n\n", 1) if seeded else BY_CALL)
    assert trials.facts.script.redraws == redraws
    warm = []
    for changes in ({}, {"graph_step": True}, {"graph_step": True, "jit_compile": True}):
        trial = trials.launch(**changes)
        warm.append(trial.warm_up(PATIENCE_SECONDS))
        assert trial.finish(0.0, PATIENCE_SECONDS).peak_host_bytes > 0, "it draws the same numbers in its proof"
    assert warm[0].parameters == warm[1].parameters > 0
    assert warm[0].shapes == warm[1].shapes


FEATURES = """
import keras
import tensorflow as tf

keras.utils.set_random_seed(1)
net, optimizer = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]), keras.optimizers.Adam(0.01)
epoch = 0

class Weight:
    def __call__(self):
        return 1.0 if epoch < 30 else 0.1

weigh = Weight()

def update(x):
    ones = tf.ones((x.shape[0], 1))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((net(tf.cos(x @ {projection})) - ones) ** 2)
    optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)

other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
rarely = keras.optimizers.SGD()

def update_rarely(x):
    weight = {weight}
    with tf.GradientTape() as tape:
        loss = weight * tf.reduce_mean(other(x) ** 2)
    rarely.apply(tape.gradient(loss, other.trainable_variables), other.trainable_variables)

data = tf.data.Dataset.from_tensor_slices(tf.random.stateless_uniform((99, 3), (1, 2))).batch(16)
for epoch in range(5000):
    for number, x in enumerate(data):
        update(x)
        if {rare} and number == 5:
            update_rarely(x)
"""


def test_batches_of_two_sizes_are_compiled_for_each(trials_of_script):
    """With `reduce_retracing` the size of the second batch would be None in the step."""
    trials = trials_of_script(FEATURES.format(projection="tf.ones((3, 8))", weight="1.0", rare=False))
    trial = trials.launch(graph_step=True)
    trial.warm_up(PATIENCE_SECONDS)
    assert trial.finish(0.0, PATIENCE_SECONDS).peak_host_bytes > 0


def test_constants_that_xla_draws_otherwise_are_refused(trials_of_script):
    projection = "tf.random.stateless_normal((3, 8), seed=(1, 2))"
    trials = trials_of_script(FEATURES.format(projection=projection, weight="1.0", rare=False))
    with pytest.raises(TrialFailed) as failed:
        trials.launch(graph_step=True, jit_compile=True).warm_up(PATIENCE_SECONDS)
    assert "update() in " in failed.value.reason


def test_what_a_rare_function_calls_before_its_tape_is_seen(trials_of_script):
    trials = trials_of_script(FEATURES.format(projection="tf.ones((3, 8))", weight="weigh()", rare=True))
    assert [site.call for site in trials.facts.script.sites["graph_step"]] == ["update"]
