"""Scripts that train with Keras 2 (`tf_keras`): their survey, their trials, and the training with a recipe."""

import pytest
from real_trials import PATIENCE_SECONDS, QUICK, configuration, facts_of
from test_long_run import ARRAYS, LOOP, TRAIN, assert_nothing_changes, assert_values_act, by_recipe, recipe_of, said

from autotune.data.facts import KerasVersion, WorkloadFacts
from autotune.runtime.protocol import BranchRuns, LossRuns


def in_keras_2(source: str) -> str:
    """The same script with `tf_keras`."""
    source = source.replace("import keras\n", "import tf_keras as keras\n")
    source = source.replace("keras.config.dtype_policy()", "keras.mixed_precision.global_policy()")
    return source.replace('calls of", model.steps_per_execution', 'calls of", int(model.steps_per_execution.numpy())')


SEEDED = "keras.utils.set_random_seed(3)\n"
DETERMINISTIC = f"{SEEDED}tf.config.experimental.enable_op_determinism()\n"
LEGACY = "keras.optimizers.legacy.SGD(0.01)"
SEQUENCE = in_keras_2(TRAIN).replace(
    "history = model.fit(batches(), epochs=3, verbose=0)",
    """
class Batches(keras.utils.Sequence):
    batch_size = 16
    def __len__(self):
        return 96 // self.batch_size
    def __getitem__(self, index):
        return tuple(each[index * self.batch_size : (index + 1) * self.batch_size] for each in (x, y))

history = model.fit(Batches(), epochs=3, workers=2, max_queue_size=5, shuffle=False, verbose=0)
""",
)
WATCHED_WORKERS = """
usual_start = keras.utils.OrderedEnqueuer.start


def start(enqueuer, workers=1, max_queue_size=10):
    print("workers", workers, "queue", max_queue_size)
    usual_start(enqueuer, workers, max_queue_size)


keras.utils.OrderedEnqueuer.start = start
"""
UNCOUNTED = in_keras_2(TRAIN).replace(".batch(size)", ".filter(lambda *_: True).batch(size)")
AUTO = in_keras_2(TRAIN).replace('"mse")', '"mse", steps_per_execution="auto")')
SCRIPTS = {
    "dataset": in_keras_2(TRAIN),
    "arrays": in_keras_2(ARRAYS),
    "legacy": in_keras_2(TRAIN).replace("keras.optimizers.SGD(0.01)", LEGACY),
    "loop": in_keras_2(LOOP),
    "legacy_loop": in_keras_2(LOOP).replace("keras.optimizers.SGD(0.01)", LEGACY),
    "sequence": SEQUENCE,
    "uncounted": UNCOUNTED,
    "unbuilt": in_keras_2(TRAIN).replace("keras.Input((4,)), ", ""),
    "floatx": "import tf_keras\ntf_keras.backend.set_floatx('float64')\n" + in_keras_2(ARRAYS),
}
FITS = ("dataset", "arrays", "legacy")


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WorkloadFacts]:
    """What is known of each script."""
    return facts_of(tmp_path_factory.mktemp("keras_2") / "scripts", SCRIPTS)


@pytest.mark.fast
def test_a_survey_tells_the_keras_and_the_scripts_own_values(surveyed):
    assert {facts.keras for facts in surveyed.values()} == {KerasVersion.KERAS_2}
    own = {name: facts.script.baseline for name, facts in surveyed.items()}
    assert own["dataset"]["jit_compile"] is False, "Keras 2 has no rule by which it turns XLA on"
    assert (own["dataset"]["precision"], own["floatx"]["precision"]) == ("float32", "float64")
    assert {name: own["sequence"][name] for name in ("workers", "use_multiprocessing", "max_queue_size")} == {
        "workers": 2,
        "use_multiprocessing": False,
        "max_queue_size": 5,
    }
    reasons = {name: facts.script.not_reached for name, facts in surveyed.items()}
    assert "one iterator" in reasons["arrays"]["persistent_iterator"]
    assert "persistent_iterator" not in reasons["dataset"]
    assert reasons["floatx"]["precision"].startswith("set_floatx() in train.py, line 2 chooses it")
    assert "precision" not in reasons["dataset"]
    assert "known cardinality" in reasons["uncounted"]["steps_per_execution"]
    assert "steps_per_execution" not in reasons["dataset"]


@pytest.mark.parametrize("name", [*FITS, "sequence", "loop"])
def test_an_identity_recipe_gives_the_same_losses(surveyed, tmp_path, name):
    source = SCRIPTS[name].replace(SEEDED, DETERMINISTIC)
    if name == "loop":
        source = source.replace("model = keras", f"{DETERMINISTIC}model = keras").replace(
            "print(", 'print("losses", model.get_weights()[0].tolist())\nprint('
        )
    assert_nothing_changes(tmp_path, source, surveyed[name])


@pytest.mark.parametrize("name", FITS)
def test_a_recipes_values_act_in_the_scripts_own_places(surveyed, tmp_path, name):
    assert_values_act(tmp_path, SCRIPTS[name], surveyed[name], jit_compile=True)


@pytest.mark.parametrize("name", ["loop", "legacy_loop"])
def test_a_loop_runs_by_its_recipe(surveyed, tmp_path, name):
    (tmp_path / "train.py").write_text(SCRIPTS[name], encoding="utf-8")
    recipe = recipe_of(surveyed[name], tmp_path, batch_size=48, jit_compile=True)
    ended = by_recipe(tmp_path, recipe, "--scale-learning-rate", "sqrt")
    assert ended.returncode == 0, ended.stderr
    assert said(ended, "steps") == "steps 6 xla True"
    assert "learning rate 0.01 → 0.0173205" in ended.stderr


def test_workers_of_a_sequence_are_arguments_of_fit(surveyed, tmp_path):
    source = SCRIPTS["sequence"].replace(SEEDED, SEEDED + WATCHED_WORKERS)
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    ended = by_recipe(tmp_path, recipe_of(surveyed["sequence"], tmp_path, workers=3, batch_size=48))
    assert said(ended, "workers") == "workers 3 queue 5"
    assert ended.returncode == 0, ended.stderr
    assert said(ended, "steps").startswith("steps 6 ")


@pytest.mark.parametrize("name", ["dataset", "loop"])
def test_a_recipe_of_the_other_keras_is_refused_before_a_step(surveyed, tmp_path, name):
    source = {"dataset": TRAIN, "loop": LOOP}[name]
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    ended = by_recipe(tmp_path, recipe_of(surveyed[name], tmp_path))
    assert ended.returncode == 2
    assert "was tuned with Keras 2 (tf_keras), and the training uses Keras 3" in ended.stderr
    assert "TF_USE_LEGACY_KERAS=1" in ended.stderr
    assert "steps" not in ended.stdout


TRIALS = {
    "arrays": in_keras_2(ARRAYS).replace("epochs=3", "epochs=3, validation_split=0.25"),
    "lists": in_keras_2(ARRAYS).replace("fit(x, y", "fit(x.tolist(), y.tolist()"),
    # With several workers Keras 2 may wait 5 s at the end of an epoch whose last steps are quick.
    "sequence": SEQUENCE.replace("workers=2, max_queue_size=5, ", ""),
    "tf.keras": "import os\nos.environ['TF_USE_LEGACY_KERAS'] = '1'\n"
    + TRAIN.replace("import keras\n", "from tensorflow import keras\n").replace(
        "keras.config.dtype_policy()", "keras.mixed_precision.global_policy()"
    ),
}


@pytest.mark.parametrize("name", TRIALS)
def test_trials_time_and_compare_losses(trials_of_script, tmp_path, name):
    trials = trials_of_script(TRIALS[name])
    assert trials.facts.keras is KerasVersion.KERAS_2
    state = tmp_path / "state.npz"
    others = {"workers": 2} if name == "sequence" else {}
    for changes in ({}, {"batch_size": 32, "steps_per_execution": 2, "jit_compile": True, **others}):
        trial = trials.launch(save_state=str(state) if not changes else "", **changes)
        warm = trial.warm_up(PATIENCE_SECONDS)
        assert warm.started.examples == (72 if name == "arrays" else 96)
        assert trial.measure(0.2, PATIENCE_SECONDS).steps > 0
        trial.kill()
    fresh = LossRuns(folder=str(tmp_path / "fresh"), recorded_batch_size=16, seeds=(0, 1), most_steps=4, seconds=60.0)
    curves = trials.launch(losses=fresh).loss_curves(PATIENCE_SECONDS).curves
    assert [len(curve) for curve in curves] == [4, 4]
    branch = BranchRuns(
        state=str(state),
        folder=str(tmp_path / "branch"),
        recorded_batch_size=16,
        seeds=(0,),
        scales=(1.0, 1e-6),
        examples=64,
        probes=2,
        probe_examples=16,
        seconds=PATIENCE_SECONDS,
    )
    as_it_is, hardly = trials.launch(losses=branch).loss_curves(PATIENCE_SECONDS).curves
    assert as_it_is[-1] < as_it_is[0]
    assert hardly[-1] == pytest.approx(hardly[0], rel=1e-3), "the learning rate is scaled"


def test_steps_that_keras_tunes_are_those_on_which_it_settled(trials_of_script):
    facts = trials_of_script(AUTO).facts
    assert facts.script.tunes_steps
    assert facts.script.baseline["steps_per_execution"] >= 1


OTHERS = """
import math
import numpy as np
import tensorflow as tf
import tf_keras
from autotune.data.facts import KerasVersion
from autotune.recipe.keras_api import keras_api
from autotune.space.keras_in_use import use_keras

use_keras(KerasVersion.KERAS_2)
api = keras_api()
api.watch_trained_variables()
for kind in (tf_keras.optimizers.Adam, tf_keras.optimizers.legacy.Adam):
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(kind(0.1))
    variable = tf.Variable([1.0, 2.0])
    finite = api.finite_steps(optimizer)
    api.build_optimizer(optimizer, [variable])
    before = finite()
    for gradient in ([1.0, 1.0], [math.inf, 1.0], [1.0, 1.0]):
        optimizer.apply_gradients([(tf.constant(gradient), variable)])
    assert finite() - before == 2, finite() - before
    assert api.updates_of(optimizer.inner_optimizer) == 3
    assert [held is variable for held in api.trained_by(optimizer)] == [True]
    names = [held.name for held in api.optimizer_variables(optimizer)]
    assert any("learning_rate" in name for name in names), names
"""


def test_loss_scales_and_variables_of_both_optimizers_are_known(run_code):
    run_code(OTHERS)


WORKLOAD = """
import autotune
import tensorflow as tf
import tf_keras


def model():
    return tf_keras.Sequential([tf_keras.layers.Dense(8, input_shape=(4,)), tf_keras.layers.Dense(1)])


def dataset():
    return tf.data.Dataset.from_tensors((tf.ones(4), tf.ones(1))).repeat()


workload = autotune.Workload(
    model=model, dataset=dataset, compile=lambda: {"optimizer": "sgd", "loss": "mse"}, batch_size=16
)
"""


def test_a_workload_of_keras_2_trains_on_endless_data(processes_of, tmp_path):
    processes = processes_of(WORKLOAD)
    assert processes.open().keras is KerasVersion.KERAS_2
    for knobs in ({}, {"steps_per_execution": 4, "precision": "mixed_bfloat16", "jit_compile": True}):
        trial = processes.launch(configuration(16, **knobs), log=str(tmp_path / "trial.log"), data=None, timing=QUICK)
        warm = trial.warm_up(PATIENCE_SECONDS)
        assert warm.started.jit_compile is bool(knobs)
        assert warm.started.examples is None
        assert trial.measure(0.2, PATIENCE_SECONDS).steps > 0
        trial.kill()
