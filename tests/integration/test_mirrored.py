"""Trainings under a `tf.distribute` strategy, on two logical devices of the processor."""

import json
import os
import shutil
import socket
import subprocess
import sys

import psutil
import pytest
from real_trials import PATIENCE_SECONDS, QUICK, WORKLOADS, autotune, configuration, is_gone, until
from test_end_to_end import with_enough_time

from autotune.data.facts import WorkloadReference
from autotune.data.record import Outcome
from autotune.data.run_directory import RunDirectory
from autotune.recipe.recipe import Recipe
from autotune.runtime.executor import TrialFailed
from autotune.runtime.local import LocalExecutor
from autotune.runtime.protocol import Data, LossRuns
from autotune.space.configuration import read_trials
from autotune.space.knobs import STRATEGY_KNOBS

MIRRORED = {"strategy": "mirrored", "replicas": 2}
SPACE = """
schema_version = 1
[knobs.strategy]
kind = "categorical"
choices = ["none", "one_device", "mirrored"]
[knobs.replicas]
kind = "categorical"
choices = [2, 4]
"""

SLOW_STEPS = """
import os, signal, time

import keras
import numpy as np
import tensorflow as tf

import autotune

FAULT = os.environ.get("FAULT", "")
if "TWO_DEVICES" in os.environ:
    (processor,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * 2)


def work(values, replica):
    if replica == 1 and FAULT == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if replica == 1 and FAULT == "hangs":
        time.sleep(3600)
    time.sleep(0.002 * len(values))
    return 0 * values


@keras.saving.register_keras_serializable()
class Works(keras.layers.Layer):
    '''Takes two milliseconds an example, on each replica for itself.'''

    def call(self, inputs):
        context = tf.distribute.get_replica_context()
        replica = 0 if context is None else context.replica_id_in_sync_group
        zeros = tf.numpy_function(work, [inputs, replica], tf.float32, stateful=False)  # else they run in turn
        return inputs + tf.stop_gradient(tf.ensure_shape(zeros, inputs.shape))


def model():
    return keras.Sequential([keras.Input((4,)), Works(), keras.layers.Dense(1)])


def dataset():
    x = np.random.default_rng(0).normal(size=(4096, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1]))


workload = autotune.Workload(
    model=model, dataset=dataset, compile=lambda: {"optimizer": "sgd", "loss": "mse"}, batch_size=32
)
"""


@pytest.fixture(scope="module", autouse=True)
def _two_devices():
    """The workloads divide the processor into two devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWO_DEVICES", "yes")
        yield


@pytest.fixture(scope="module")
def processes(_two_devices, tmp_path_factory):
    """Trials of the cases, in a template that sees two devices."""
    reference = WorkloadReference(file=str(WORKLOADS / "cases.py"), search_path=(str(WORKLOADS),))
    with LocalExecutor(reference, logs=tmp_path_factory.mktemp("templates")) as opened:
        opened.open()
        yield opened


def test_two_replicas_learn_as_one_device_does(processes, tmp_path):
    runs = LossRuns(
        folder=str(tmp_path / "batches"), recorded_batch_size=16, seeds=(0,), most_steps=40, seconds=PATIENCE_SECONDS
    )
    found = []
    for knobs in ({}, {"strategy": "one_device"}, MIRRORED, {**MIRRORED, "cross_device": "reduce_to_one"}):
        trial = processes.launch(
            configuration(16, **knobs),
            log=str(tmp_path / "pairs.log"),
            data=Data(examples=100, endless=False),
            losses=runs,
        )
        found.append(trial.loss_curves(PATIENCE_SECONDS).curves[0])
    assert len(found[0]) == 40
    for each in found[1:]:
        assert each == pytest.approx(found[0], rel=1e-4)


def test_a_trial_counts_global_examples_and_tells_of_its_devices(processes, tmp_path):
    knobs = {**MIRRORED, "per_replica_buffer_size": 2, "persistent_iterator": True, "auto_shard_policy": "off"}
    knobs |= {"cross_device": "reduce_to_one", "steps_per_execution": 5}
    trial = processes.launch(configuration(10, **knobs), log=str(tmp_path / "pairs.log"), data=None, timing=QUICK)
    warm = trial.warm_up(PATIENCE_SECONDS)
    assert (warm.started.devices, warm.started.examples_per_epoch) == (2, 100)
    part = trial.measure(0.5, PATIENCE_SECONDS)
    assert part.examples == part.epochs * 100
    assert part.steps == part.epochs * 10
    trial.kill()


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"strategy": "mirrored", "replicas": 4}, "replicas=4 needs as many devices, and TensorFlow sees 2"),
        ({**MIRRORED, "cross_device": "nccl"}, "cross_device=nccl needs GPUs"),
        ({"strategy": "mirrored", "replicas": 3}, "batch_size=16 is global, and 3 replicas do not divide it"),
    ],
)
def test_what_this_machine_cannot_have_fails_in_one_sentence(processes, tmp_path, knobs, reason):
    with pytest.raises(TrialFailed) as caught:
        processes.launch(configuration(**knobs), log=str(tmp_path / "pairs.log"), data=None).warm_up(PATIENCE_SECONDS)
    assert caught.value.reason == reason


@pytest.mark.parametrize(("fault", "outcome"), [("dies", Outcome.CRASHED), ("hangs", Outcome.TIMEOUT)])
def test_a_replica_that_dies_or_hangs_leaves_nothing(processes_of, monkeypatch, tmp_path, fault, outcome):
    monkeypatch.setenv("FAULT", fault)
    processes = processes_of(SLOW_STEPS)
    processes.open()
    before = set(psutil.Process().children(recursive=True))
    trial = processes.launch(configuration(32, **MIRRORED), log=str(tmp_path / "log"), data=None)
    with pytest.raises(TrialFailed) as caught:
        trial.warm_up(PATIENCE_SECONDS if fault == "dies" else 20.0)
    assert caught.value.outcome is outcome
    until(lambda: is_gone(trial.pid), "the trial to end")
    assert all(is_gone(process.pid) for process in set(psutil.Process().children(recursive=True)) - before)


TRAIN = """
import train
import tensorflow as tf

import autotune

recipe = autotune.Recipe.load("run/recipe.json").apply()
with recipe.scope():
    model = train.model()
    recipe.compile(model, "sgd", "mse")
history = recipe.fit(model, train.dataset().take(128), epochs=1, verbose=0)
print("replicas", model.distribute_strategy.num_replicas_in_sync, history.history["loss"])
"""


def test_a_strategy_is_found_from_start_to_recipe(tmp_path):
    (tmp_path / "train.py").write_text(SLOW_STEPS, encoding="utf-8")
    (tmp_path / "space.toml").write_text(SPACE, encoding="utf-8")
    (tmp_path / "use.py").write_text(TRAIN, encoding="utf-8")

    def tune(budget):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return autotune(tmp_path, "tune", "train.py", "--space", "space.toml", "--budget", f"{budget}s", "--out", "run")

    ended = with_enough_time(tune, 100, enough=lambda ended: "Undecided" not in ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    recipe = Recipe.load(tmp_path / "run" / "recipe.json")
    assert set(STRATEGY_KNOBS) <= set(recipe.configuration)
    assert recipe.changes["strategy"] == "mirrored"
    assert "with recipe.scope():" in ended.stdout
    records = read_trials(RunDirectory(tmp_path / "run"))
    assert any(record.scaling_efficiency for record in records if record.configuration["strategy"] == "mirrored")
    used = subprocess.run([sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert used.stdout.startswith("replicas 2"), used.stderr[-3000:]


WORKER = """
import numpy as np
import keras
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
x = np.random.default_rng(0).normal(size=(128, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(32)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
try:
    model.fit(data, verbose=0)
    print("fit trains")
except ValueError as error:
    print("fit fails", "PerReplica" in str(error))


@tf.function
def step(batch):
    def one(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / 32
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    strategy.run(one, args=batch)


for batch in strategy.experimental_distribute_dataset(data):
    step(batch)
print("loop trains", optimizer.iterations.numpy())
"""


def test_fit_of_keras_3_fails_with_several_workers(tmp_path):
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            ports.append(free.getsockname()[1])
    cluster = {"worker": [f"localhost:{port}" for port in ports]}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env={
                **os.environ,
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": each}}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for each in range(2)
    ]
    try:
        said = [worker.communicate(timeout=PATIENCE_SECONDS)[0].splitlines() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert said == [["fit fails True", "loop trains 4"]] * 2
