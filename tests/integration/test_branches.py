"""Trainings that branch from a state of the baseline's, in real trials: how they begin, and how their losses fall."""

import json

import pytest
from real_trials import PATIENCE_SECONDS

from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import BranchRuns, Data
from autotune.stats.same_loss import find_step_counter

KNOWN = Data(examples=512, endless=False)
PROBES, EXAMPLES = 4, 256


@pytest.fixture
def branches(launch, tmp_path):
    """The losses of trainings from the state that the case's baseline saved, by scale and seed."""

    states = {}

    def train(case, batch_size=32, *, of=None, seeds=(0, 1), scales=(1.0,), **knobs):
        if (name := of or case) not in states:
            baseline = launch(name, 32, save_state="state.npz")
            assert baseline.warm_up().ready.state_steps > 0
            states[name] = baseline.log.with_name("state.npz")
        runs = BranchRuns(
            state=str(states[name]),
            folder=str(tmp_path / f"{case}-batches"),
            recorded_batch_size=32,
            seeds=seeds,
            scales=scales,
            examples=EXAMPLES,
            probes=PROBES,
            probe_examples=64,
            seconds=PATIENCE_SECONDS,
        )
        trial = launch(case, batch_size, data=KNOWN, losses=runs, **knobs).trial
        return trial.loss_curves(PATIENCE_SECONDS).curves

    return train


def test_a_seed_decides_the_training(branches):
    first, second = branches("learns")
    again, _ = branches("learns", prefetch=2)
    assert len(first) == PROBES
    assert again == pytest.approx(first, rel=1e-4)
    assert second != pytest.approx(first, rel=1e-6)


def test_losses_fall_on_from_the_baselines_state(branches):
    for curve in (*branches("learns"), *branches("learns", 128, scales=(2.0,))):
        assert curve[-1] < curve[0] < 0.69, "a fresh network would have a loss of ln 2"


@pytest.mark.parametrize("case", ["learns", "scheduled"])
def test_the_learning_rate_is_scaled_also_that_of_a_schedule(branches, case):
    as_it_is, hardly = branches(case, seeds=(0,), scales=(1.0, 1e-6))
    assert as_it_is[-1] < 0.95 * as_it_is[0]
    assert hardly[-1] == pytest.approx(hardly[0], rel=0.02)


def test_the_state_of_another_model_is_refused(branches):
    with pytest.raises(TrialFailed, match="do not fit the model"):
        branches("standing", of="learns")


BRANCHES = """
import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from autotune.runtime.protocol import BranchRuns
from autotune.training.losses import branch_losses, save_state

processor = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * 2)
mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
strategy = mirrored if STRATEGY == "mirrored" else tf.distribute.get_strategy()
x = np.random.default_rng(0).normal(size=(608, 8)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1] ** 2)).batch(32)
traced = []


class Counted(keras.Sequential):
    def train_step(self, batch):
        traced.append(1)
        return super().train_step(batch)


with strategy.scope():
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = Counted([keras.Input((8,)), *layers])
    model.compile(keras.optimizers.Adagrad(0.05), "mse")
model.fit(data, epochs=1, verbose=0)
assert save_state(model, Path("state.npz"))
accumulated = [np.asarray(variable) for variable in model.optimizer.variables if "accumulator" in variable.path]


owner = keras.optimizers.Optimizer
usual = owner.learning_rate, owner.apply


def losses(seeds, scales):
    owner.learning_rate, owner.apply = usual  # as a fresh process has them
    traced.clear()
    runs = BranchRuns(state="state.npz", folder=f"{Path.cwd()}/batches", recorded_batch_size=32, seeds=seeds,
                      scales=scales, examples=320, probes=4, probe_examples=512, seconds=600.0)
    return branch_losses(model, lambda: data, None, runs, batch_size=32).curves, len(traced)


first, traces = losses((0, 1), (1.0, 4.0, 0.01))
again, fewer = losses((1,), (0.01, 1.0))
state = np.load("state.npz")
saved = [state[name] for name in state.files if name.startswith("slot")]
print(json.dumps({
    "curves": first,
    "again": again,
    "traces": (traces, fewer),
    "accumulators": len(accumulated),
    "saved": sum(any(np.array_equal(slot, values) for slot in saved) for values in accumulated),
}))
"""


@pytest.mark.parametrize("strategy", ["none", "mirrored"])
def test_each_training_is_its_own_and_none_is_traced_again(run_code, strategy):
    found = json.loads(run_code(f"STRATEGY = {strategy!r}\n{BRANCHES}").stdout)
    assert found["saved"] == found["accumulators"] == 4
    six_trainings, two_trainings = found["traces"]
    assert six_trainings == two_trainings
    _, own, _, faster, _, slow = found["curves"]
    assert found["again"][0] == pytest.approx(slow, rel=1e-4), "dropout too, whatever was trained before"
    assert found["again"][1] == pytest.approx(own, rel=1e-4)
    assert faster != pytest.approx(own, rel=1e-3)
    assert slow[-1] == pytest.approx(slow[0], rel=0.05)


def test_class_weights_of_fit_act_on_the_batches_of_a_dataset(run_code):
    run_code(
        """
        import numpy as np
        import tensorflow as tf

        from autotune.script.fit_call import FitCall

        batches = tf.data.Dataset.from_tensor_slices((np.zeros((4, 1)), np.array([0, 1, 1, 0]))).batch(2)
        for weights, wanted in (({0: 1.0, 1: 5.0}, [[1.0, 5.0], [5.0, 1.0]]), (None, [])):
            call = FitCall(model=None, arguments={"x": batches, "class_weight": weights}, settings=None)
            found = [batch[2].numpy().tolist() for batch in call.with_class_weight(batches) if len(batch) == 3]
            assert found == wanted, found
        """
    )


COUNTERS = """
import json
from pathlib import Path

import numpy as np
import tensorflow as tf

from autotune.recipe.tf_private import keras
from autotune.runtime.protocol import BranchRuns
from autotune.training.losses import branch_losses, save_state

x = np.random.default_rng(0).normal(size=(608, 8)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1] ** 2)).batch(32)
shared = tf.Variable(0.5)


class Own(keras.layers.Layer):
    def build(self, shape):
        self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False, name="kept")

    def call(self, inputs, training=None):
        if CASE == "a layer's calls":
            self.kept.assign(self.kept + 1.0)
        if CASE == "its examples":
            self.kept.assign(self.kept + tf.cast(tf.shape(inputs)[0], tf.float32))
        if CASE == "an average":
            self.kept.assign(0.9 * self.kept + 0.1 * tf.reduce_mean(inputs**2))
        if CASE == "a mere counter":
            self.kept.assign_add(1.0)
        else:
            self.add_loss(tf.minimum(1.0, self.kept / 1000.0) * tf.reduce_mean(inputs**2))
        return inputs


class Rate(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.01 / (1.0 + tf.cast(step, tf.float32))


class Calls(keras.metrics.Metric):
    def __init__(self):
        super().__init__()
        self.calls = self.add_weight(name="calls", initializer="zeros")

    def update_state(self, *_, **__):
        self.calls.assign(self.calls + 1.0)

    def result(self):
        return self.calls


class Anneal(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        shared.assign(shared * 0.9)


def rate(labels, found):
    return model.optimizer.learning_rate


def loss(labels, found):
    if CASE == "the optimizer's iterations":
        return keras.losses.mean_squared_error(labels, found) / tf.cast(1 + model.optimizer.iterations, tf.float32)
    return keras.losses.mean_squared_error(labels, found) * (shared if CASE == "a callback's variable" else 1.0)


found = {}
cases = ["a layer's calls", "the optimizer's iterations", "a callback's variable"]
cases += ["its examples", "an average", "Keras's own", "a mere counter", "a callback's mere counter"]
for number, CASE in enumerate(cases):
    layers = [keras.layers.Dense(16, "relu"), Own(), keras.layers.Dropout(0.5), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.layers.Input((8,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(Rate()), loss, metrics=[Calls(), rate])
    model.fit(data, epochs=1, verbose=0)
    save_state(model, Path("state.npz"))
    model.compile(keras.optimizers.Adam(Rate()), loss, metrics=[Calls(), rate])  # unbuilt, as where a branch begins
    callbacks = [Anneal()] if "a callback's" in CASE else []
    found[CASE] = []
    for size in (32, 128):
        runs = BranchRuns(state="state.npz", folder=f"{Path.cwd()}/{number}", recorded_batch_size=32, seeds=(0,),
                          scales=(1.0,), examples=128, probes=1, probe_examples=64, seconds=600.0)
        shared.assign(0.5)
        found[CASE].append(branch_losses(model, lambda: data, None, runs, batch_size=size, callbacks=callbacks).counted)
        assert float(shared) == 0.5, "a training branches from what was there before its steps were counted"
print(json.dumps(found))
"""


@pytest.mark.parametrize("legacy", ["0", "1"], ids=["Keras 3", "Keras 2"])
def test_what_counts_steps_and_weighs_a_loss_is_found(run_code, legacy):
    """Schedules, metrics, dropout, averages of the data and counted examples are no such thing."""
    found = json.loads(run_code(COUNTERS, TF_USE_LEGACY_KERAS=legacy).stdout)
    counters = {case: find_step_counter(*both) for case, both in found.items()}
    assert "kept (<string>, line " in counters["a layer's calls"]
    named = [case for case, counter in counters.items() if counter]
    assert named == ["a layer's calls", "the optimizer's iterations", "a callback's variable"]
