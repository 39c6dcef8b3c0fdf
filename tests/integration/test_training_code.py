"""Training code with a recipe: what was measured is what runs, and too late is an error that says so."""

import json

import pytest
from simulated_runs import faster_by, quick_tune, simulated_trials

from autotune.data.facts import KerasVersion

CHANGES = {
    "batch_size": 20,
    "precision": "mixed_bfloat16",
    "jit_compile": True,
    "steps_per_execution": 3,
    "prefetch": 4,
    "data_threads": 3,
    "deterministic": False,
    "data_autotune": False,
    "intra_op_threads": 3,
    "inter_op_threads": 5,
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe, out of a simulated run."""
    made, _ = quick_tune(simulated_trials(faster_by(batch_size=1.5), noise=0.02), tmp_path_factory.mktemp("run"))
    return made


@pytest.fixture
def train(recipe, tmp_path, run_code):
    """Runs training code with the recipe changed so beside it; returns what it printed last."""

    def start(script: str, **changes):
        configuration = dict(recipe.configuration) | changes
        recipe.model_copy(update={"configuration": configuration}).save(tmp_path / "recipe.json")
        return json.loads(run_code(script).stdout.splitlines()[-1])

    return start


@pytest.mark.fast
def test_an_applied_recipe_acts_at_every_stage(train):
    seen = train(
        """
        import json, os
        import autotune
        recipe = autotune.Recipe.load("recipe.json")
        recipe.apply()
        import keras, numpy as np, tensorflow as tf
        class Model(keras.Model):
            def fit(self, x, **arguments):
                self.data = x
                return super().fit(x, **arguments)
        inputs = keras.Input((4,))
        model = Model(inputs, keras.layers.Dense(1)(inputs))
        recipe.compile(model, "sgd", "mse")
        examples = tf.data.Dataset.from_tensor_slices((np.ones((100, 4)), np.ones((100, 1))))
        recipe.fit(model, examples, epochs=2, verbose=0)
        data, options = model.data, model.data.options()
        print(json.dumps({
            "onednn": os.environ["TF_ENABLE_ONEDNN_OPTS"],
            "threads": [tf.config.threading.get_intra_op_parallelism_threads(),
                        tf.config.threading.get_inter_op_parallelism_threads()],
            "computes_in": model.layers[0].compute_dtype,
            "jit_compile": model.jit_compile,
            "steps_per_execution": model.steps_per_execution,
            "steps": int(model.optimizer.iterations),
            "prefetch": int(data._buffer_size),
            "data_threads": options.threading.private_threadpool_size,
            "deterministic": options.deterministic,
            "data_autotune": options.autotune.enabled,
        }))
        """,
        onednn=False,
        **CHANGES,
    )
    assert seen == {
        "onednn": "0",
        "threads": [3, 5],
        "computes_in": "bfloat16",
        "jit_compile": True,
        "steps_per_execution": 3,
        "steps": 10,
        "prefetch": 4,
        "data_threads": 3,
        "deterministic": False,
        "data_autotune": False,
    }


def test_applied_too_late_is_an_error(train):
    said = train(
        """
        import json
        import tensorflow as tf
        import autotune
        recipe = autotune.Recipe.load("recipe.json")
        said = []
        def apply(recipe):
            try:
                recipe.apply()
                said.append("")
            except autotune.AutotuneError as error:
                said.append(f"{type(error).__name__}: {error}")
        def but(**changes):
            return recipe.model_copy(update={"configuration": {**recipe.configuration, **changes}})
        apply(recipe)                          # imported, not started: oneDNN is too late
        one = tf.constant(1.0)
        apply(but(onednn=True, intra_op_threads=2))
        import keras
        adam = keras.optimizers.Adam()
        apply(but(onednn=True, intra_op_threads=2))
        apply(but(onednn=True))                # started, and nothing is left to set
        print(json.dumps(said))
        """,
        onednn=False,
    )
    import_too_late, tensor, optimizer, nothing_left = said
    assert import_too_late.startswith("ApplyError: TF_ENABLE_ONEDNN_OPTS=0 must be set before TensorFlow is")
    assert "above `import tensorflow`" in import_too_late
    for late, made in ((tensor, "EagerTensor"), (optimizer, "Adam 'adam'")):
        assert late.startswith(
            "ApplyError: intra_op_threads=2 cannot act any more: TensorFlow's runtime has started, "
            f"and {made} was made before"
        )
        assert "before the first tensor, dataset or model" in late
    assert nothing_left == ""


def test_a_baseline_recipe_may_be_applied_late(train):
    seen = train(
        """
        import json
        import tensorflow as tf
        import keras
        import autotune
        made = keras.optimizers.Adam(), keras.metrics.Mean(), keras.layers.Dense(1)
        made[2].build((None, 4))
        recipe = autotune.Recipe.load("recipe.json")
        baseline = {**recipe.baseline, "onednn": recipe.configuration["onednn"]}
        recipe.model_copy(update={"configuration": baseline}).apply()
        print(json.dumps("applied"))
        """
    )
    assert seen == "applied"


def test_the_same_recipe_may_be_applied_again(train):
    seen = train(
        """
        import json
        import keras
        import tensorflow as tf
        import autotune
        recipe = autotune.Recipe.load("recipe.json")
        recipe.apply()
        keras.config.set_dtype_policy("float32")
        recipe.apply()
        seen = [keras.config.dtype_policy().name]
        tf.constant(1.0)
        recipe.apply()
        seen.append(tf.config.threading.get_intra_op_parallelism_threads())
        keras.config.set_dtype_policy("float32")
        dense = keras.layers.Dense(1)
        try:
            recipe.apply()
        except autotune.AutotuneError as error:
            seen.append(str(error).partition(" built")[0])
        print(json.dumps(seen))
        """,
        intra_op_threads=2,
        precision="mixed_bfloat16",
    )
    layer = "precision=mixed_bfloat16 cannot act any more: the layer Dense 'dense' was"
    assert seen == ["mixed_bfloat16", 2, layer]


def test_what_undoes_a_recipe_is_said(train):
    said = train(
        """
        import json
        import autotune
        recipe = autotune.Recipe.load("recipe.json")
        import keras, numpy as np
        said = []
        def use():
            compile = lambda: recipe.compile(model, "sgd", "mse")
            for call in (compile, lambda: recipe.fit(model, x, x[:, :1]), recipe.scope):
                try:
                    call()
                    said.append("")
                except autotune.AutotuneError as error:
                    said.append(error.message)
        x, model = np.ones((40, 4)), None
        use()
        recipe.apply()
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        use()
        plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        try:
            recipe.fit(plain, x)
        except autotune.AutotuneError as error:
            said.append(str(error))
        keras.mixed_precision.set_global_policy("float32")
        use()
        print(json.dumps(said))
        """,
        precision="mixed_bfloat16",
    )
    assert said[:3] == ["the recipe is not in force: apply() was not called"] * 3
    assert said[3:6] == [""] * 3
    assert "not compiled" in said[6]
    assert "recipe.compile(model, " in said[6]
    told = "the recipe set precision=mixed_bfloat16, and a later line has set it to float32"
    assert said[7:] == [told] * 3


KINDS = """
import json, os
import autotune
from autotune.recipe import training_code
recipe = autotune.Recipe.load("recipe.json").apply()
import numpy as np, tensorflow as tf
import {keras} as keras
said = []
training_code._say_once = said.append
rows = np.arange(101, dtype="float32")[:, None] / 100
class Sees(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.seen = keras.layers.Dense(1), []
    def call(self, x):
        return self.dense(x["a"] if isinstance(x, dict) else x)
    def train_step(self, data):
        tf.py_function(lambda each: self.seen.append(each.numpy().tolist()), [data[1]], [])
        return super().train_step(data)
class Own(getattr(keras.utils, "PyDataset", keras.utils.Sequence)):
    batch_size = 25
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return (rows[25 * index:25 * index + 25],) * 2
def train(*data, **more):
    said.clear()
    model = Sees()
    recipe.compile(model, optimizer=keras.optimizers.SGD(0.01), loss="mse", steps_per_execution=3)
    history = recipe.fit(model, *data, epochs=2, verbose=0, **more).history
    seen = sum(model.seen, [])
    epochs = [sorted(seen[:len(seen) // 2]), sorted(seen[len(seen) // 2:])]
    whole = epochs[0] == epochs[1] == rows[: len(seen) // 2].tolist()
    batches = [len(each) for each in model.seen[: len(model.seen) // 2]]
    return [batches, whole, int(model.optimizer.iterations), "val_loss" in history, list(said)]
pairs = tf.data.Dataset.from_tensor_slices((rows, rows))
def forever():
    while True:
        yield rows[:25], rows[:25]
print(json.dumps({{
    "arrays": train(rows, rows, batch_size=7, validation_data=(rows, rows)),
    "weights": train(x=rows, y=rows, sample_weight=np.ones(101)),
    "split": train(rows, rows, validation_split=0.2, shuffle=False),
    "pair": train((rows, rows)),
    "dict": train({{"a": rows}}, rows),
    "examples": train(pairs, validation_data=pairs),
    "batches": train(pairs.batch(25).prefetch(1), validation_data=pairs.batch(9)),
    "steps": train(pairs.take(100).batch(20).repeat(), steps_per_epoch=5),
    "own": train(Own()),
    "generator": train(forever(), steps_per_epoch=4)[:1],
}}))
"""


@pytest.mark.parametrize("version", list(KerasVersion))
@pytest.mark.parametrize("persistent", [True, False])
def test_fit_takes_what_keras_takes(recipe, tmp_path, run_code, version, persistent):
    knobs = {"batch_size": 20, "persistent_iterator": persistent, "steps_per_execution": 4}
    recipe.model_copy(
        update={
            "configuration": {**recipe.configuration, **knobs},
            "workload": recipe.workload.model_copy(update={"keras": version, "batch_ranks": (2, 2)}),
        }
    ).save(tmp_path / "recipe.json")
    legacy = {"TF_USE_LEGACY_KERAS": "1"} if version is KerasVersion.KERAS_2 else {}
    ended = run_code(KINDS.format(keras=version.package), PYTHONWARNINGS="ignore", **legacy)
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert seen["generator"] == [[25] * 4]
    fewer = "steps_per_execution=3, not the recipe's 4: it must divide the steps of an epoch"
    for name in ("arrays", "weights", "pair", "dict", "examples"):
        batches, whole, updates, validates, said = seen[name]
        assert (sorted(batches), whole, updates) == ([1, *[20] * 5], True, 12), name
        assert validates == (name in ("arrays", "examples"))
        assert any(text.startswith(fewer) for text in said) == persistent, name
    assert seen["split"][:4] == [[20] * 4, True, 8, True]
    assert seen["batches"][:4] == [[25, 25, 25, 25, 1], True, 10, True]
    assert any(text.startswith("batch_size=25, not the recipe's 20") for text in seen["batches"][4])
    assert seen["steps"][:3] == [[20] * 5, True, 10]
    assert seen["own"][:3] == [[25] * 4, True, 8]
    assert any(text.startswith("persistent_iterator=false") for text in seen["own"][4]) == persistent


def test_the_tested_learning_rate_acts_in_fit_alone(train, recipe):
    seen = train(
        """
        import json
        import autotune
        from autotune.recipe.evidence import LearningRateRule
        rule = LearningRateRule(batch_ratio=4.0, rule="linear", factor=4.0)
        recipe = autotune.Recipe.load("recipe.json").model_copy(update={"learning_rate_rule": rule}).apply()
        import keras, numpy as np
        def moved(fit, size):
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
            recipe.compile(model, keras.optimizers.SGD(0.01), "mse", jit_compile=False)
            fit(model, np.ones((size, 1), "float32"), np.ones((size, 1), "float32"), verbose=0)
            return float(model.layers[0].kernel.numpy()[0, 0]), float(model.optimizer.learning_rate)
        print(json.dumps([moved(recipe.fit, recipe.batch_size), moved(keras.Model.fit, 32)]))
        """,
        batch_size=4 * recipe.baseline["batch_size"],
    )
    assert seen == [[pytest.approx(0.08), pytest.approx(0.01)], [pytest.approx(0.02), pytest.approx(0.01)]]


def test_settings_of_shell_and_tensorflow_are_read_as_they_act(train):
    seen = train(
        """
        import json, os
        os.environ |= {"TF_NUM_INTRAOP_THREADS": "3", "TF_NUM_INTEROP_THREADS": "5"}
        os.environ["TF_XLA_FLAGS"] = "--tf_xla_clustering_debug"
        import autotune
        from autotune.recipe import apply
        import tensorflow as tf
        before = apply.in_force()
        recipe = autotune.Recipe.load("recipe.json")
        recipe.apply()
        tf.config.optimizer.set_jit(True)
        tf.config.optimizer.set_experimental_options({"auto_mixed_precision": True})
        print(json.dumps([
            [before["intra_op_threads"], before["inter_op_threads"]],
            [os.environ.get("TF_NUM_INTRAOP_THREADS"), os.environ.get("TF_NUM_INTEROP_THREADS")],
            apply.not_knobs(),
        ]))
        """,
        intra_op_threads=0,
        inter_op_threads=5,
    )
    assert seen == [
        [3, 5],
        [None, "5"],
        [
            "TF_XLA_FLAGS=--tf_xla_clustering_debug",
            "tf.config.optimizer jit=autoclustering",
            "tf.config.optimizer auto_mixed_precision=True",
        ],
    ]
