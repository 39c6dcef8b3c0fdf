"""`show --diff`: the edit that makes a recipe permanent in a script."""

from pathlib import Path

import pytest

from autotune.data.errors import RecipeError
from autotune.data.facts import ScriptFacts, Trains
from autotune.front import cli
from autotune.recipe.answers import LearningRateRule
from autotune.recipe.recipe import Recipe
from autotune.script.call_sites import calls_in
from autotune.script.patch import script_diff

RECORDED = Path(__file__).parents[1] / "results" / "digits_mlp_command_one" / "recipe.json"
PIPELINE = '''"""Train é."""
import keras
import tensorflow as tf
from data import examples


def batches(data, size):
    return data.map(parse).shuffle(9).batch(size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


model = keras.Sequential()
model.compile("sgd", "mse")
model.fit(batches(examples(), 16), epochs=3)
'''
ARRAYS = "from keras import Sequential\nmodel = Sequential()\nmodel.compile(\n    'sgd',\n)\nmodel.fit(x, y)\n"


def recipe_of(file, baseline, batch_calls=("batch",), *, rule=None, **changes):
    """A recipe of a script whose calls are reached as far as it has them."""
    calls = {site.call: site for site, _ in calls_in(str(file), str(file.parent)).values()}
    knobs = {"batch_size": batch_calls, "num_parallel_calls": ("map",), "prefetch": ("prefetch",)}
    sites = {knob: tuple(calls[name] for name in names if name in calls) for knob, names in knobs.items()}
    facts = ScriptFacts(
        trains=Trains.FIT,
        baseline=baseline,
        sites={knob: found for knob, found in sites.items() if found},
        fit_site=calls.get("fit"),
        compile_site=calls.get("compile"),
        batch_given_as=str(sites["batch_size"][0]) if sites["batch_size"] else "",
    )
    recorded = Recipe.load(RECORDED)
    usual = {**dict(recorded.baseline), **baseline}
    workload = recorded.workload.model_copy(update={"name": file.stem, "script": facts})
    changed = {"baseline": usual, "configuration": {**usual, **changes}, "learning_rate_rule": rule}
    return recorded.model_copy(update={**changed, "workload": workload})


def changed_lines(diff):
    """The lines that an edit removes and adds."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    return [line[1:] for line in lines if line[:1] == "-"], [line[1:] for line in lines if line[:1] == "+"]


def test_the_edit_sets_constants_at_their_calls_and_lines_at_the_top(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(PIPELINE, encoding="utf-8")
    changes = {"batch_size": 64, "prefetch": 8, "num_parallel_calls": "autotune", "jit_compile": True}
    changes |= {"steps_per_execution": 2, "precision": "mixed_bfloat16", "onednn": False, "data_threads": 3}
    baseline = {"batch_size": 16, "prefetch": "autotune", "num_parallel_calls": 0}
    diff, rest = script_diff(recipe_of(file, baseline, **changes), file)
    removed, added = changed_lines(diff)
    assert [line for line in added if line] == [
        "import os",
        'os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"',
        'keras.config.set_dtype_policy("mixed_bfloat16")',
        "    return data.map(parse, num_parallel_calls=tf.data.AUTOTUNE).shuffle(9)"
        ".batch(64, drop_remainder=True).prefetch(8)",
        'model.compile("sgd", "mse", jit_compile=True, steps_per_execution=2)',
    ]
    assert len(removed) == 2
    assert rest == ["data_threads=3"]
    assert diff.index("import os") < diff.index("import keras")


def test_arrays_are_batched_by_fit_and_missing_imports_are_added(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(ARRAYS, encoding="utf-8")
    changes = {"batch_size": 64, "precision": "mixed_bfloat16", "intra_op_threads": 3, "jit_compile": True}
    diff, rest = script_diff(recipe_of(file, {"batch_size": 32}, **changes), file)
    assert [line for line in changed_lines(diff)[1] if line] == [
        "import keras",
        "import tensorflow as tf",
        'keras.config.set_dtype_policy("mixed_bfloat16")',
        "tf.config.threading.set_intra_op_parallelism_threads(3)",
        "    'sgd', jit_compile=True",
        "model.fit(x, y, batch_size=64)",
    ]
    assert rest == []


def test_what_an_edit_cannot_reach_is_left_to_run(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("model.compile()\nmodel.fit(Batches())\n", encoding="utf-8")
    recipe = recipe_of(file, {"batch_size": 32, "workers": 1}, batch_size=64)
    assert script_diff(recipe, file) == ("", ["batch_size=64"])
    file.write_text(
        "model.compile()\nmodel.fit(keras.utils.image_dataset_from_directory('d', batch_size=32))\n", encoding="utf-8"
    )
    calls_in.cache_clear()
    recipe = recipe_of(file, {"batch_size": 32}, ("image_dataset_from_directory",), batch_size=64)
    facts = recipe.workload.script
    sites = {**facts.sites, "prefetch": facts.sites["batch_size"]}
    workload = recipe.workload.model_copy(update={"script": facts.model_copy(update={"sites": sites})})
    configuration = {**recipe.configuration, "prefetch": 2}
    diff, rest = script_diff(recipe.model_copy(update={"workload": workload, "configuration": configuration}), file)
    assert changed_lines(diff)[1] == ["model.fit(keras.utils.image_dataset_from_directory('d', batch_size=64))"]
    assert rest == ["prefetch=2"]


def test_a_recipe_of_another_script_is_refused(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(ARRAYS, encoding="utf-8")
    recipe = recipe_of(file, {"batch_size": 32}, batch_size=64)
    with pytest.raises(RecipeError, match=r"other\.py is another script"):
        script_diff(recipe, file.rename(tmp_path / "other.py"))


def test_the_command_prints_an_edit_that_patch_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(ARRAYS, encoding="utf-8")
    recipe_of(file, {"batch_size": 32}, batch_size=64, data_threads=3).save(tmp_path / "recipe.json")
    assert cli.main(["show", "recipe.json", "--diff", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("--- train.py\n+++ train.py\n")
    assert "+model.fit(x, y, batch_size=64)" in out
    assert "data_threads=3" in err


# ------------------------------------------------------------------------------------------- the learning rate

LINEAR = LearningRateRule(batch_ratio=8.0, rule="linear", factor=8.0)
IMPORTS = "import keras\nfrom keras.optimizers import SGD\nfrom keras.optimizers import schedules\n"


def rate_lines(tmp_path, source, rule=LINEAR):
    """What the edit of a script of these lines changes, without its imports; and what it omits."""
    file = tmp_path / "train.py"
    file.write_text(f"{IMPORTS}{source}", encoding="utf-8")
    calls_in.cache_clear()
    diff, rest = script_diff(recipe_of(file, {"batch_size": 32}, rule=rule), file)
    return *changed_lines(diff), rest


@pytest.mark.parametrize(
    ("source", "scaled"),
    [
        ("model.compile(keras.optimizers.Adam(1e-3), 'mse')", "model.compile(keras.optimizers.Adam(0.008), 'mse')"),
        ("model.compile(optimizer=SGD(learning_rate=1))", "model.compile(optimizer=SGD(learning_rate=8))"),
        ("model.compile(SGD(momentum=0.9, lr=0.01))", "model.compile(SGD(momentum=0.9, lr=0.08))"),
        ("adam = keras.optimizers.AdamW(0.01)\nmodel.compile(adam)", "adam = keras.optimizers.AdamW(0.08)"),
        ("RATE = 0.01\nmodel.compile(SGD(RATE))", "RATE = 0.08"),
        ("def make():\n    return SGD(0.01)\nmodel.compile(make())", "    return SGD(0.08)"),
        ("model.compile(LossScaleOptimizer(SGD(0.01)))", "model.compile(LossScaleOptimizer(SGD(0.08)))"),
        (
            "falls = schedules.ExponentialDecay(0.1, 9, 0.5)\nmodel.compile(SGD(falls))",
            "falls = schedules.ExponentialDecay(0.8, 9, 0.5)",
        ),
        (
            "model.compile(SGD(schedules.PolynomialDecay(0.1, 9, 0.01)))",
            "model.compile(SGD(schedules.PolynomialDecay(0.8, 9, 0.08)))",
        ),
        (
            "model.compile(SGD(schedules.CosineDecay(0.1, 9, warmup_target=0.2)))",
            "model.compile(SGD(schedules.CosineDecay(0.8, 9, warmup_target=1.6)))",
        ),
    ],
)
def test_a_learning_rate_that_is_surely_a_number_is_scaled(tmp_path, source, scaled):
    _, added, omitted = rate_lines(tmp_path, f"{source}\nmodel.fit(x)\n")
    assert (added, omitted) == ([scaled], [])


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("model.compile('adam')", 'compile() in train.py, line 4, where optimizer="adam" has Keras\'s own rate'),
        ("name = 'sgd'\nmodel.compile(name)", 'compile() in train.py, line 5, where optimizer="sgd" has'),
        (
            "model.compile(loss='mse')",
            "compile() in train.py, line 4, where the optimizer and its rate are Keras's own",
        ),
        ("model.compile(SGD())", "SGD() in train.py, line 4, which has Keras's own rate"),
        ("model.compile(SGD(args.rate))", "SGD() in train.py, line 4"),
        ("model.compile(SGD(**settings))", "SGD() in train.py, line 4"),
        ("model.compile(**settings)", "compile() in train.py, line 4"),
        ("RATE = 0.1\nmodel.compile(SGD(RATE))\nother = SGD(RATE)", "SGD() in train.py, line 5"),
        ("for rate in (0.1, 0.2):\n    model.compile(SGD(rate))", "SGD() in train.py, line 5"),
        ("model.compile(SGD(0.1) if big else 'adam')", "compile() in train.py, line 4"),
        ("def make(): return SGD(0.1)\nother = SGD(0.2)\nmodel.compile(make())", "compile() in train.py, line 6"),
        ("model.compile(SGD(schedules.PolynomialDecay(0.1, 9)))", "PolynomialDecay() in train.py, line 4"),
        ("model.compile(SGD(WarmUp(0.1)))", "WarmUp() in train.py, line 4"),
        ("model.compile(SGD(0.1))\nmodel.optimizer.learning_rate = 0.2", "in train.py, line 5, which sets it"),
        ("model.compile(SGD(0.1))\nmodel.optimizer.lr.assign(0.2)", "assign() in train.py, line 5, which sets it"),
        ("model.compile(SGD(0.1))\nkeras.callbacks.LearningRateScheduler(f)", "in train.py, line 5, which sets it"),
    ],
)
def test_a_learning_rate_that_is_not_surely_a_number_has_its_line_named(tmp_path, source, where):
    removed, added, (omitted,) = rate_lines(tmp_path, f"{source}\nmodel.fit(x)\n")
    assert (removed, added) == ([], [])
    assert omitted.startswith("learning rate ×8 (linear), to be applied ")
    assert where in omitted


def test_a_custom_loop_has_the_rate_of_its_only_optimizer(tmp_path):
    assert rate_lines(tmp_path, "optimizer = SGD(0.01)\n")[1:] == (["optimizer = SGD(0.08)"], [])
    _, added, (omitted,) = rate_lines(tmp_path, "one, other = SGD(0.01), SGD(0.02)\n")
    assert added == []
    assert omitted.endswith("where the script makes its optimizer")


def test_a_rule_that_leaves_the_learning_rate_edits_nothing(tmp_path):
    as_is = LearningRateRule(batch_ratio=8.0)
    assert rate_lines(tmp_path, "model.compile('adam')\nmodel.fit(x)\n", as_is) == ([], [], [])


def test_the_command_names_the_line_of_the_learning_rate(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text("model.compile('adam')\nmodel.fit(x)\n", encoding="utf-8")
    recipe_of(file, {"batch_size": 32}, rule=LINEAR).save(tmp_path / "recipe.json")
    assert cli.main(["show", "recipe.json", "--diff", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert 'learning rate ×8 (linear), to be applied at compile() in train.py, line 1, where optimizer="adam"' in err
