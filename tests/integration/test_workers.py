"""Scripts under MultiWorkerMirroredStrategy: a trial runs all of the training's workers, on this host."""

import json
import os

import psutil
import pytest
from real_trials import PATIENCE_SECONDS, is_gone, until

from autotune.data.errors import WorkloadError
from autotune.data.record import Outcome
from autotune.runtime.executor import TrialFailed

PARTS = """
import json
import os
import time

import keras
import numpy as np
import tensorflow as tf

index = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
batch = 8 * strategy.num_replicas_in_sync
x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)


def one(inputs):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((model(inputs[0], training=True) - inputs[1]) ** 2) / batch
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss
"""
BY_ELEMENT = (
    PARTS
    + """
@tf.function
def step(inputs):
    return strategy.reduce("SUM", strategy.run(one, args=(inputs,)), axis=None)


for epoch in range(2):
    for inputs in strategy.experimental_distribute_dataset(data.batch(batch)):
        if index == 1 and os.environ.get("FAULT"):
            raise RuntimeError(os.environ["FAULT"])
        if index == 1 and "HANGS" in os.environ and optimizer.iterations.numpy() == 5:
            time.sleep(3600)
        step(inputs)
"""
)
BY_ITERATOR = (
    PARTS
    + """
@tf.function
def step(iterator):
    return strategy.reduce("SUM", strategy.run(one, args=(next(iterator),)), axis=None)


epoch = tf.Variable(0)
while epoch.numpy() < 2:
    iterator = iter(strategy.experimental_distribute_dataset(data.repeat().batch(batch)))
    for _ in range(5):
        step(iterator)
    epoch.assign_add(1)
"""
)
BY_STEPS = (
    PARTS.replace("import json", "import json\n\nimport autotune")
    + """
@tf.function
def step(inputs):
    strategy.run(one, args=(inputs,))


for inputs in autotune.steps(strategy.experimental_distribute_dataset(data.batch(batch).repeat(50))):
    step(inputs)
"""
)
BY_EPOCH = (
    PARTS
    + """
@tf.function
def train(iterator):
    for _ in tf.range(96 // batch):
        strategy.run(one, args=(next(iterator),))


for epoch in range(3):
    train(iter(strategy.experimental_distribute_dataset(data.repeat().batch(batch))))
"""
)
WITH_CHECKPOINTS = (
    PARTS
    + """
own = strategy.cluster_resolver
if sorted(json.loads(os.environ["TF_CONFIG"])["cluster"]) != ["chief", "worker"]:
    raise RuntimeError("no chief")
directory = os.environ["CHECKPOINTS"] if own.task_type == "chief" else os.environ["CHECKPOINTS"] + "_temporary"
tf.io.gfile.makedirs(directory)
manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), directory, max_to_keep=1)


@tf.function
def step(inputs):
    strategy.run(one, args=(inputs,))


for epoch in range(2):
    for inputs in strategy.experimental_distribute_dataset(data.batch(batch)):
        step(inputs)
    manager.save()
    if own.task_type != "chief":
        tf.io.gfile.rmtree(directory)
"""
)
BY_MODULE = """
import numpy as np
import tensorflow as tf
from network import step

epoch = 0
while epoch < 2:
    for x in tf.data.Dataset.from_tensor_slices(np.ones((96, 4), "float32")).batch(16):
        step(x)
    epoch += 1
"""
NETWORK = """
import keras
import tensorflow as tf

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.01)


@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
"""
BY_FUNCTION = (  # the style of TensorFlow's tutorial
    PARTS
    + """
@tf.function
def step(iterator):
    return strategy.reduce("SUM", strategy.run(one, args=(next(iterator),)), axis=None)


def make(context):
    part = data.shard(context.num_input_pipelines, context.input_pipeline_id)
    return part.repeat().batch(context.get_per_replica_batch_size(batch))


epoch = tf.Variable(0)
while epoch.numpy() < 2:
    iterator = iter(strategy.distribute_datasets_from_function(make))
    for _ in range(5):
        step(iterator)
    epoch.assign_add(1)
"""
)
BY_FIT = PARTS + "\nwith strategy.scope():\n    model.compile('sgd', 'mse')\nmodel.fit(data.batch(batch), verbose=0)\n"
BY_RESOLVER = """
import tensorflow as tf

cluster = tf.train.ClusterSpec({"worker": ["localhost:1"]})
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, task_type="worker", task_id=0)
tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
"""


def config(*addresses):
    """`TF_CONFIG` of the first of these workers."""
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}})


@pytest.fixture
def opened(trials_of_script, monkeypatch):
    """Trials of a script, whose `TF_CONFIG` names these workers."""

    def start(source, *workers):
        if workers:
            monkeypatch.setenv("TF_CONFIG", config(*workers))
        return trials_of_script(source, profile="finalists")

    return start


def others(trial):
    """The processes of a trial's other workers."""
    return [process for process in psutil.Process(trial.pid).children() if os.getpgid(process.pid) == trial.pid]


@pytest.mark.parametrize("source", [BY_ELEMENT, BY_STEPS, BY_FUNCTION])
def test_both_workers_train_and_global_examples_are_counted(opened, source):
    trials = opened(source, "localhost:12345", "localhost:23456")
    assert trials.facts.script.workers == 2
    parts = 2 if source is BY_FUNCTION else 1  # each worker makes batches of its own
    assert trials.facts.script.baseline["batch_size"] == 16 / parts
    assert "sets its own MultiWorkerMirroredStrategy" in trials.facts.script.not_reached["strategy"]
    assert {"prefetch", "data_threads"} <= trials.facts.script.not_reached.keys()
    for batch_size in (16, 32) if source is BY_ELEMENT else (32 // parts,):
        trial = trials.launch(batch_size=batch_size)
        trial.warm_up(PATIENCE_SECONDS)
        pids = [trial.pid, *(each.pid for each in others(trial))]
        assert len(pids) == 2
        for part in (trial.measure(0.5, PATIENCE_SECONDS), trial.measure(0.5, PATIENCE_SECONDS)):
            assert part.examples == pytest.approx(part.steps * batch_size * parts)
        finished = trial.finish(0.1, PATIENCE_SECONDS, thorough=True)
        assert finished.peak_host_bytes
        assert finished.no_profile in ("", "the training ended while its last steps were measured")
        by_call = source is BY_FUNCTION  # which reads inside a function, where no wait is seen
        assert (finished.input_wait_fraction is None) == by_call
        trial.kill()
        until(lambda pids=pids: all(map(is_gone, pids)), "both workers to end")


@pytest.mark.parametrize("workers", [(), ("localhost:12345", "localhost:23456")])
def test_all_steps_of_a_call_are_counted(opened, workers):
    trials = opened(BY_EPOCH, *workers)
    steps = 96 // trials.facts.batch_size
    for batch_size in (trials.facts.batch_size, 2 * trials.facts.batch_size):
        trial = trials.launch(batch_size=batch_size)
        trial.warm_up(PATIENCE_SECONDS)
        for part in (trial.measure(0.2, PATIENCE_SECONDS), trial.measure(0.2, PATIENCE_SECONDS)):
            assert part.steps % steps == 0
            assert part.examples == part.steps * batch_size
        trial.kill()


def test_a_chief_and_a_worker_train_where_they_would_save(opened, tmp_path, monkeypatch):
    monkeypatch.setenv("CHECKPOINTS", str(tmp_path / "checkpoints"))
    cluster = {"chief": ["localhost:12345"], "worker": ["localhost:23456"], "evaluator": ["localhost:34567"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
    trials = opened(WITH_CHECKPOINTS)
    assert trials.facts.script.workers == 2
    for _ in range(2):
        trial = trials.launch()
        trial.warm_up(PATIENCE_SECONDS)
        assert trial.measure(1.0, PATIENCE_SECONDS).steps > 0
        trial.kill()


@pytest.mark.parametrize("pause", [0.0, 0.3], ids=["short epochs", "epochs too long to be timed whole"])
def test_a_step_in_a_module_of_the_users_is_seen_again(opened, tmp_path, pause):
    (tmp_path / "network.py").write_text(NETWORK, encoding="utf-8")
    trials = opened(
        BY_MODULE.replace("step(x)", f"step(x); time.sleep({pause})").replace(
            "import numpy", "import time; import numpy"
        )
    )
    trial = trials.launch()
    trial.warm_up(PATIENCE_SECONDS)
    assert trial.measure(0.2, PATIENCE_SECONDS).steps > 0
    trial.kill()


def test_a_first_worker_that_begins_anew_last_trains_on(opened):
    late = BY_ITERATOR.replace("strategy = ", "time.sleep(index == 0)\nstrategy = ", 1).replace("range(5)", "[0] * 5")
    trials = opened(late, "localhost:12345", "localhost:23456")
    trial = trials.launch()
    trial.warm_up(PATIENCE_SECONDS)
    assert trial.measure(0.5, PATIENCE_SECONDS).steps > 0
    trial.kill()


def test_a_worker_that_is_killed_ends_the_trial(opened):
    trials = opened(BY_ELEMENT, "localhost:12345", "localhost:23456")
    trial = trials.launch()
    trial.warm_up(PATIENCE_SECONDS)
    (other,) = others(trial)
    other.kill()
    with pytest.raises(TrialFailed) as caught:
        trial.measure(1.0, PATIENCE_SECONDS)
    assert (caught.value.outcome, caught.value.reason) == (
        Outcome.CRASHED,
        "worker 1 of the training was killed by SIGKILL",
    )
    until(lambda: is_gone(trial.pid), "the trial to end")


def test_a_worker_that_hangs_times_the_trial_out(opened, monkeypatch):
    monkeypatch.setenv("HANGS", "1")
    trials = opened(BY_ELEMENT, "localhost:12345", "localhost:23456")
    trial = trials.launch()
    (other,) = until(lambda: others(trial), "the other worker to start")
    with pytest.raises(TrialFailed) as caught:
        trial.warm_up(20.0)
    assert caught.value.outcome is Outcome.TIMEOUT
    until(lambda: is_gone(trial.pid) and is_gone(other.pid), "both workers to end")


def test_an_exception_in_another_worker_is_told(opened, monkeypatch):
    monkeypatch.setenv("FAULT", "no such column")
    with pytest.raises(WorkloadError, match="raised RuntimeError: no such column"):
        opened(BY_ELEMENT, "localhost:12345", "localhost:23456")


@pytest.mark.parametrize(("source", "workers"), [(BY_ELEMENT, ("localhost:12345",)), (BY_FIT, ())])
def test_one_worker_trains_by_itself(opened, source, workers):
    trials = opened(source, *workers)
    assert trials.facts.script.workers == len(workers)
    both = [trials.launch() for _ in range(2)]
    for each in both:
        each.warm_up(PATIENCE_SECONDS)
    for each in both:
        assert each.measure(0.2, PATIENCE_SECONDS).steps > 0
        each.kill()


@pytest.mark.parametrize(
    ("source", "workers", "message", "hint"),
    [
        (
            BY_FIT,
            ("localhost:1", "localhost:2"),
            r"fit\(\) in train\.py, line \d+, under .* of several workers, cannot be tuned.*keras#20585",
            "strategy.run",
        ),
        (
            BY_ELEMENT,
            ("localhost:1", "far.away:2"),
            "TF_CONFIG names far.away:2, a worker on another host",
            "localhost",
        ),
        (
            BY_RESOLVER,
            (),
            r"train\.py, line \d+: names the workers by a SimpleClusterResolver",
            "TFConfigClusterResolver",
        ),
    ],
)
def test_what_trials_cannot_run_is_refused_in_a_sentence(opened, source, workers, message, hint):
    with pytest.raises(WorkloadError, match=message) as caught:
        opened(source, *workers)
    assert hint in caught.value.hint
