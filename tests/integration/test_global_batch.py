"""`--global-batch`: the weights are updated as with one large batch, whatever the batch size of a step is."""

import json
import textwrap

import pytest
from real_trials import configuration
from simulated import SimulatedTrials
from simulated_runs import FACTS, Watcher, faster_by, flat, quick_tune, simulated_trials, space

from autotune.data.errors import ArgumentError
from autotune.data.facts import ScriptFacts, Trains
from autotune.space.configuration import Configuration
from autotune.tuning.events import Notice

LOOP = FACTS.model_copy(update={"script": ScriptFacts(trains=Trains.LOOP, baseline={"batch_size": 32})})

MIRRORED = FACTS.model_copy(update={"baseline": {"strategy": "mirrored", "replicas": 2}})
OWN = ScriptFacts(
    trains=Trains.FIT, baseline={"batch_size": 32}, not_reached={"strategy": "the script sets its own MirroredStrategy"}
)

TRAINS = """
import json, sys
import keras, numpy as np, tensorflow as tf
from autotune.data.errors import ApplyError
from autotune.recipe import apply
from autotune.recipe.recipe import Recipe

x = np.random.default_rng(0).normal(size=(192, 4)).astype("float32")
y = np.tanh(x.sum(axis=1, keepdims=True))

def network():
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])

def weights(model):
    return np.concatenate([each.numpy().ravel() for each in model.weights])
"""


@pytest.fixture
def run(run_code):
    """Runs training code; returns the JSON that it printed last."""
    return lambda script: json.loads(run_code(TRAINS + textwrap.dedent(script)).stdout.splitlines()[-1])


@pytest.mark.parametrize("changes", [{}, {"jit_compile": True, "steps_per_execution": 4}])
def test_four_batches_of_8_train_as_one_of_32(run, tmp_path, changes):
    recipe, _ = quick_tune(simulated_trials(faster_by(batch_size=1.5), noise=0.02), tmp_path / "run")
    wanted = {**recipe.configuration, "batch_size": 8, "global_batch": 32, **changes}
    baseline = {**recipe.baseline, "batch_size": 32, "global_batch": 32}
    recipe.model_copy(update={"configuration": wanted, "baseline": baseline}).save(tmp_path / "recipe.json")
    seen = run(
        """
        recipe = Recipe.load("recipe.json")
        recipe.apply()
        micro, whole = network(), network()
        whole.compile(keras.optimizers.SGD(0.1), "mse")
        whole.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
        recipe.compile(micro, keras.optimizers.SGD(0.1), "mse")
        data = tf.data.Dataset.from_tensor_slices((x, y))
        recipe.fit(micro, data, epochs=2, verbose=0)
        print(json.dumps({
            "apart": float(np.abs(weights(micro) - weights(whole)).max()),
            "moved": float(np.abs(weights(micro) - weights(network())).max()),
            "updates": [int(micro.optimizer.iterations), int(whole.optimizer.iterations)],
        }))
        """
    )
    assert seen["updates"] == [12, 12]
    assert seen["apart"] < 1e-5 < 1e-2 < seen["moved"]


def test_accumulation_reaches_below_a_loss_scale(run):
    seen = run(
        """
        keras.config.set_dtype_policy("mixed_float16")
        model = network()
        model.compile("sgd", "mse")
        apply.accumulate(model.optimizer, {"global_batch": 32, "batch_size": 8})
        moved, before = [], weights(model)
        for begin in range(0, 64, 8):
            model.train_on_batch(x[begin:begin + 8], y[begin:begin + 8])
            moved.append(bool((weights(model) != before).any()))
            before = weights(model)
        try:
            apply.accumulate(model.optimizer, {"global_batch": 64, "batch_size": 8})
        except ApplyError as error:
            refused = str(error)
        print(json.dumps({"moved": moved, "refused": refused}))
        """
    )
    assert seen["moved"] == [False, False, False, True] * 2
    assert "was built before" in seen["refused"]


def test_a_trial_counts_the_examples_of_each_batch(launch):
    trial = launch("telling", 8, global_batch=32)
    trial.warm_up()
    part = trial.measure()
    assert part.examples == part.epochs * 100


@pytest.mark.fast
def test_with_several_devices_it_says_that_no_strategy_is_tried(tmp_path):
    watcher, gpus = Watcher(), ("NVIDIA H100", "NVIDIA H100")
    quick_tune(simulated_trials(gpus=gpus), tmp_path / "run", global_batch=64, budget=60.0, trials=1, observe=watcher)
    assert any("strategy is not varied: gradients" in notice.text for notice in watcher.of(Notice))


@pytest.mark.fast
def test_only_whole_parts_of_the_global_batch_are_tried(tmp_path):
    trials = simulated_trials(faster_by(batch_size=1.5), noise=0.02)
    recipe, directory = quick_tune(trials, tmp_path / "run", space=space(batch_size=(8, 512)), global_batch=96)
    tried = {Configuration(each.configuration) for each in directory.trials.values()}
    assert {each["global_batch"] for each in tried} == {96}
    assert {each.batch_size for each in tried} == {8, 16, 32}
    assert recipe.batch_size < 32
    assert recipe.configuration["global_batch"] == 96
    assert recipe.learning_rate_rule is None
    assert configuration(16, global_batch=96).update_size == 96


@pytest.mark.fast
@pytest.mark.parametrize(
    ("wanted", "facts", "said"),
    [
        (48, FACTS, "--global-batch 48 is no multiple of the workload's batch size, which is 32"),
        (16, FACTS, "--global-batch 16 is no multiple"),
        (64, MIRRORED, "gradients are not accumulated under MirroredStrategy"),
        (64, FACTS.model_copy(update={"script": OWN}), "gradients are not accumulated under MirroredStrategy"),
        (64, LOOP, "--global-batch does not reach a custom training loop"),
    ],
)
def test_a_global_batch_that_cannot_be_is_refused(tmp_path, wanted, facts, said):
    trials = SimulatedTrials(facts=facts, samples_per_second=flat)
    with pytest.raises(ArgumentError, match=said):
        quick_tune(trials, tmp_path / "run", global_batch=wanted)
