"""Training code with a recipe: what was measured is what runs, and too late is an error that says so."""

import json

import pytest
from simulated_runs import faster_by, quick_tune, simulated_trials

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


def test_an_applied_recipe_acts_at_every_stage(train):
    seen = train(
        """
        import json, os
        import autotune
        recipe = autotune.Recipe.load("recipe.json")
        recipe.apply()
        import keras, numpy as np, tensorflow as tf
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **recipe.compile_args())
        data = recipe.batch(tf.data.Dataset.from_tensor_slices((np.ones((100, 4)), np.ones((100, 1)))))
        model.fit(data, epochs=2, verbose=0)
        options = data.options()
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_baseline_recipe_is_applied_after_an_optimizer_a_metric_and_a_layer(train):
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


@pytest.mark.slow
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
        recipe.compile_args()                  # may come first
        recipe.apply()
        import keras, numpy as np, tensorflow as tf
        data = tf.data.Dataset.from_tensor_slices((np.ones((100, 4)), np.ones((100, 1))))
        said = []
        def use():
            for each in (recipe.compile_args, lambda: recipe.batch(data), lambda: recipe.fit_args(data)):
                try:
                    each()
                    said.append("")
                except autotune.AutotuneError as error:
                    said.append(error.message)
        use()
        keras.mixed_precision.set_global_policy("float32")
        use()
        print(json.dumps(said))
        """,
        precision="mixed_bfloat16",
    )
    assert said[:3] == [""] * 3
    told = "the recipe set precision=mixed_bfloat16, and a later line has set it to float32"
    assert said[3:] == [told] * 3


def test_settings_of_the_shell_and_of_tensorflow_are_read_as_they_act(train):
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
