"""`show --diff`: the edit that makes a recipe permanent in a script."""

import ast
import itertools
import subprocess
from pathlib import Path

import pytest

from autotune.data.errors import RecipeError
from autotune.data.facts import ScriptFacts, Site, Trains
from autotune.data.figures import Interval
from autotune.front import cli
from autotune.recipe.evidence import Contribution, LearningRateRule
from autotune.recipe.recipe import Recipe
from autotune.script.call_sites import calls_in
from autotune.script.inline_steps import is_moved, move_inline_steps
from autotune.script.patch import script_diff

RECORDED = Path(__file__).parents[1] / "results" / "recorded" / "digits_mlp_command_one" / "recipe.json"
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


def with_script(recipe, **changes):
    """The recipe, with changes to what is known of its script."""
    script = recipe.workload.script.model_copy(update=changes)
    return recipe.model_copy(update={"workload": recipe.workload.model_copy(update={"script": script})})


def written(folder, text):
    """A script with this text."""
    file = folder / "train.py"
    file.write_text(text, encoding="utf-8")
    calls_in.cache_clear()
    return file


def changed_lines(diff):
    """The lines that an edit removes and adds."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    return [line[1:] for line in lines if line[:1] == "-"], [line[1:] for line in lines if line[:1] == "+"]


def moved(tmp_path, text, *, vectorized=False, **changes):
    """The lines that an edit of a script adds where its `map` is to map batches, and what the edit leaves out."""
    file = written(tmp_path, text)
    recipe = recipe_of(
        file, {"batch_size": 16, "num_parallel_calls": 0, "batched_map": False}, batched_map=True, **changes
    )
    calls = {site.call: site for site, _ in calls_in(str(file), str(tmp_path)).values()}
    sites = {**recipe.workload.script.sites, "batched_map": (calls["map"], calls["batch"])}
    diff, rest = script_diff(with_script(recipe, sites=sites, vectorized=vectorized), file)
    return [line.strip() for line in changed_lines(diff)[1]], rest


def test_a_map_of_batches_is_moved_behind_batch(tmp_path):
    added, rest = moved(tmp_path, PIPELINE, batch_size=64, num_parallel_calls=4)
    chain = "data.shuffle(9).batch(64, drop_remainder=True).map(parse, num_parallel_calls=4).prefetch(tf.data.AUTOTUNE)"
    assert (added, rest) == ([f"return {chain}"], [])
    lines = "made = raw.map(lambda x: x + 1, 2)\nmade = made.cache()\nmade = made.batch(16)\n"
    added, rest = moved(tmp_path, lines, vectorized=True)
    each = "lambda *batch: tf.vectorized_map(lambda example: (lambda x: x + 1)(*example), batch)"
    assert (added, rest) == (["made = raw", f"made = made.batch(16).map({each}, 2)"], [])
    lines = "def prepare(made):\n    made = made.map(f)\n    if mixes:\n        made = made.shuffle(9)\n"
    assert moved(tmp_path, f"{lines}    return made.batch(16)\n") == (["return made.batch(16).map(f)"], [])
    added, rest = moved(tmp_path, "made = (\n    raw\n    .map(f)  # é\n    .batch(16)\n)\n")
    assert added == ["raw  # é", ".map(f)"]
    assert moved(tmp_path, "made = raw \\\n  .map(f) \\\n  .batch(16)\n")[0] == [".batch(16) \\", ".map(f)"]


@pytest.mark.parametrize(
    "lines",
    [
        "made = raw.map(f)\nheld_out = made.take(9)\nmade = made.batch(16)",
        "made = raw.map(f)\nbatches = made.batch(16)\nfirst = next(iter(made))",
        "made = raw.map(f) if scaled else raw\nmade = made.batch(16)",
        "made = raw.map(f)\nif train:\n    made = made.batch(16)",
        "def prepare():\n    return raw.map(f)\n\n\nmade = prepare().batch(16)",
    ],
)
def test_a_map_that_others_may_read_is_not_moved(tmp_path, lines):
    assert moved(tmp_path, f"{lines}\n") == ([], ["batched_map=true"])


def test_edit_sets_constants_at_calls_and_lines_at_the_top(tmp_path):
    file = written(tmp_path, PIPELINE)
    changes = {"batch_size": 64, "prefetch": 8, "num_parallel_calls": "autotune", "jit_compile": True}
    changes |= {"steps_per_execution": 2, "precision": "mixed_bfloat16", "onednn": False, "data_threads": 3}
    changes["keep_freed_memory"] = "thresholds"
    baseline = {"batch_size": 16, "prefetch": "autotune", "num_parallel_calls": 0}
    diff, rest = script_diff(recipe_of(file, baseline, **changes), file)
    removed, added = changed_lines(diff)
    assert [line for line in added if line] == [
        "import os",
        'os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"',
        "import ctypes",
        "ctypes.CDLL(None).mallopt(-3, 1073741824)",
        "ctypes.CDLL(None).mallopt(-1, 2147483647)",
        'keras.config.set_dtype_policy("mixed_bfloat16")',
        "    return data.map(parse, num_parallel_calls=tf.data.AUTOTUNE).shuffle(9)"
        ".batch(64, drop_remainder=True).prefetch(8)",
        'model.compile("sgd", "mse", jit_compile=True, steps_per_execution=2)',
        "options = tf.data.Options()",
        "options.threading.private_threadpool_size = 3",
        "batches_of_recipe = batches(examples(), 16).with_options(options)",
        "model.fit(batches_of_recipe, epochs=3)",
    ]
    assert len(removed) == 3
    assert rest == []
    assert diff.index("import os") < diff.index("import keras")


@pytest.mark.parametrize(
    ("source", "added"),
    [
        (
            "import tensorflow as T\nmade = raw.batch(16)\ndef train():\n    return model.fit(made, epochs=3)\n",
            [
                "options = T.data.Options()",
                "options.autotune.enabled = False",
                "batches = made.with_options(options)",
                "return model.fit(batches.repeat().prefetch(1), epochs=3, steps_per_epoch=len(batches))",
            ],
        ),
        (
            "options, batches = {}, 9\nmodel.fit(\n    x=raw\n    .batch(16),\n)\n",
            [
                "import tensorflow as tf",
                "options_of_recipe = tf.data.Options()",
                "options_of_recipe.autotune.enabled = False",
                "batches_of_recipe = (raw",
                ".batch(64)).with_options(options_of_recipe)",
                "x=batches_of_recipe.repeat().prefetch(1), steps_per_epoch=len(batches_of_recipe)",
            ],
        ),
    ],
)
def test_options_and_a_persistent_iterator_are_lines_above_fit(tmp_path, source, added):
    file = written(tmp_path, source)
    size = {"batch_size": 64} if "batch(16),\n" in source else {}
    recipe = recipe_of(file, {"batch_size": 16}, data_autotune=False, persistent_iterator=True, prefetch=0, **size)
    diff, rest = script_diff(recipe, file)
    assert ([line.strip() for line in changed_lines(diff)[1]], rest) == (added, [])


def test_printed_edit_lists_omitted_changes_with_their_gains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, ARRAYS)
    recipe = recipe_of(file, {"batch_size": 32}, batch_size=64, persistent_iterator=True, data_autotune=False)
    gain = Contribution(knob="persistent_iterator", gain=Interval(value=1.3, low=1.1, high=1.5), trial=4)
    evidence = recipe.evidence.model_copy(update={"contributions": (gain,)})
    recipe.model_copy(update={"evidence": evidence}).save(tmp_path / "recipe.json")
    assert cli.main(["show", "recipe.json", "--diff", "train.py"]) == 0
    out, err = capsys.readouterr()
    said = " ".join(err.split())
    assert out.startswith("--- train.py\n+++ train.py\n"), "as patch reads it"
    assert "batches" not in out
    assert "omits persistent_iterator=true (gave ×1.30)" in said
    assert "omits data_autotune=false (its part of the gain was not measured)" in said
    assert f"{recipe.answer.headline}." in said
    assert "That is with data_autotune=false, persistent_iterator=true, which this edit omits." in said


def test_arrays_are_batched_by_fit_and_missing_imports_are_added(tmp_path):
    file = written(tmp_path, ARRAYS)
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
    file = written(tmp_path, "model.compile()\nmodel.fit(Batches())\n")
    recipe = recipe_of(file, {"batch_size": 32, "workers": 1}, batch_size=64)
    assert script_diff(recipe, file) == ("", ["batch_size=64"])
    file.write_text(
        "model.compile()\nmodel.fit(keras.utils.image_dataset_from_directory('d', batch_size=32))\n", encoding="utf-8"
    )
    calls_in.cache_clear()
    recipe = recipe_of(file, {"batch_size": 32}, ("image_dataset_from_directory",), batch_size=64)
    sites = {**recipe.workload.script.sites, "prefetch": recipe.workload.script.sites["batch_size"]}
    recipe = recipe.model_copy(update={"configuration": {**recipe.configuration, "prefetch": 2}})
    diff, rest = script_diff(with_script(recipe, sites=sites), file)
    assert changed_lines(diff)[1] == ["model.fit(keras.utils.image_dataset_from_directory('d', batch_size=64))"]
    assert rest == ["prefetch=2"]


@pytest.mark.parametrize(
    ("imports", "jit", "added"),
    [
        ("import tensorflow as tf\n", False, ["    @tf.function(reduce_retracing=True)"]),
        ("import tensorflow as tf\ndef size(x):\n    return x.shape[0]\n", False, ["    @tf.function"]),
        ("import tensorflow as T\n", True, ["    @T.function(reduce_retracing=True, jit_compile=True)"]),
    ],
)
def test_an_eager_step_gets_one_line_above_it(tmp_path, imports, jit, added):
    file = tmp_path / "train.py"
    step = "    def step(x):\n        pass\n"
    source = f"{imports}class Agent:\n    @staticmethod\n{step}{step}"
    file.write_text(source, encoding="utf-8")
    recipe = recipe_of(
        file, {"batch_size": 32, "graph_step": False, "jit_compile": False}, graph_step=True, jit_compile=jit
    )
    site = Site(file="train.py", function="Agent.step", call="step", order=0, line=99)
    diff, rest = script_diff(with_script(recipe, sites={"graph_step": (site,)}), file)
    assert ([line for line in changed_lines(diff)[1] if line], rest) == (added, [])
    assert diff.index("@staticmethod") < diff.index(".function")
    gone = site.model_copy(update={"function": "gone"})
    assert script_diff(with_script(recipe, sites={"graph_step": (gone,)}), file)[1][-1] == "graph_step=true"


INLINE = """import tensorflow as tf


def main():
    model, optimizer = make()
    for epoch in range(3):
        for x, y in data:
            with tf.GradientTape() as tape:  # of one batch
                loss = model(x, y)

            optimizer.apply_gradients(tape.gradient(loss))
            print(loss)


main()
"""
MOVED = """import tensorflow as tf


def main():
    model, optimizer = make()
    @tf.function(reduce_retracing=True)
    def train_step(x, y):
        with tf.GradientTape() as tape:  # of one batch
            loss = model(x, y)

        optimizer.apply_gradients(tape.gradient(loss))
        return loss

    for epoch in range(3):
        for x, y in data:
            loss = train_step(x, y)
            print(loss)


main()
"""


@pytest.mark.parametrize(
    ("text", "rest"), [(INLINE, []), (INLINE.replace("x, y)\n\n", '"""a\nb""")\n'), ["graph_step=true"])]
)
def test_an_eager_step_in_its_loop_becomes_a_function(tmp_path, text, rest):
    file = written(tmp_path, text)
    recipe = recipe_of(file, {"batch_size": 32, "graph_step": False}, graph_step=True)
    site = Site(file="train.py", function="main.<locals>.train_step", call="train_step", order=0, line=8)
    facts = recipe.workload.script.model_copy(update={"sites": {"graph_step": (site,)}})
    workload = recipe.workload.model_copy(update={"script": facts})
    diff, left_out = script_diff(recipe.model_copy(update={"workload": workload}), file)
    assert left_out == rest
    (tmp_path / "a.diff").write_text(diff, encoding="utf-8")
    if not rest:
        subprocess.run(["patch", "-s", file, tmp_path / "a.diff"], check=True)
        assert file.read_text(encoding="utf-8") == MOVED


def edit_of_inline_step(tmp_path, text):
    """The script with the printed edit, and what that omits."""
    file = written(tmp_path, text)
    recipe = recipe_of(file, {"batch_size": 32, "graph_step": False}, graph_step=True)
    function = "main.<locals>.train_step" if "def main" in text else "train_step"
    site = Site(file="train.py", function=function, call="train_step", order=0, line=1)
    diff, rest = script_diff(with_script(recipe, sites={"graph_step": (site,)}), file)
    (tmp_path / "a.diff").write_text(diff, encoding="utf-8")
    if diff:
        subprocess.run(["patch", "-s", file, tmp_path / "a.diff"], check=True)
    return file.read_text(encoding="utf-8"), rest


LOOP = """import tensorflow as tf
for x in data:
    with tf.GradientTape() as tape:
        loss = max(
            x, 1)
    optimizer.apply(loss)"""


@pytest.mark.parametrize(
    "text",
    [
        INLINE.replace(" " * 4, "\t"),
        INLINE.replace("                loss", "# the loss\n                loss"),
        f"{LOOP}\n    print(loss)\n".replace("            x, 1)", "  x, 1)"),
        LOOP,
    ],
    ids=["tabs", "comment_further_left", "line_further_left", "no_last_newline"],
)
def test_a_moved_step_can_be_laid_out_in_any_way(tmp_path, text):
    edited, rest = edit_of_inline_step(tmp_path, text)
    tree = ast.parse(text)
    move_inline_steps(tree)
    moved = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and is_moved(node)]
    moved[0].decorator_list = [ast.parse("tf.function(reduce_retracing=True)", mode="eval").body]
    if not isinstance(moved[0].body[-1], ast.Return) or moved[0].body[-1].value is None:
        moved[0].body = [part for part in moved[0].body if not isinstance(part, ast.Return)]
    assert (ast.unparse(ast.parse(edited)), rest) == (ast.unparse(tree), [])


@pytest.mark.parametrize(
    "text",
    [f"{LOOP}; print(loss)\n", "if True:\n    " + LOOP.replace("\n", "\n    ")],
    ids=["shares_its_line", "tensorflow_is_imported_below"],
)
def test_a_step_whose_lines_cannot_move_is_left_to_run(tmp_path, text):
    assert edit_of_inline_step(tmp_path, text) == (text, ["graph_step=true"])


def test_an_eager_fit_gets_another_argument_of_compile(tmp_path):
    file = written(tmp_path, "model.compile('sgd', run_eagerly=True)\nmodel.fit(x, y)\n")
    recipe = recipe_of(file, {"batch_size": 32, "graph_step": False}, graph_step=True)
    diff, rest = script_diff(recipe, file)
    assert (changed_lines(diff)[1], rest) == (["model.compile('sgd', run_eagerly=False)"], [])
    file.write_text("model.compile('sgd')\nmodel.run_eagerly = True\nmodel.fit(x, y)\n", encoding="utf-8")
    calls_in.cache_clear()
    assert script_diff(recipe_of(file, {"batch_size": 32, "graph_step": False}, graph_step=True), file) == (
        "",
        ["graph_step=true"],
    )


def test_a_recipe_of_another_script_is_refused(tmp_path):
    file = written(tmp_path, ARRAYS)
    recipe = recipe_of(file, {"batch_size": 32}, batch_size=64)
    with pytest.raises(RecipeError, match=r"other\.py is another script"):
        script_diff(recipe, file.rename(tmp_path / "other.py"))


# ------------------------------------------------------------------------------------------- the learning rate

LINEAR = LearningRateRule(batch_ratio=4.0, rule="linear", factor=4.0)
COMMENT = "# autotune: multiply the learning rate by 4 (linear); tested only with it"


def rate_edit(tmp_path, source, rule=LINEAR):
    """What the edit of a script adds, each line with the one below it; and what it omits."""
    file = written(tmp_path, source)
    diff, rest = script_diff(recipe_of(file, {"batch_size": 32}, rule=rule), file)
    lines = diff.splitlines()
    return [(line[1:], below[1:]) for line, below in itertools.pairwise(lines) if line[:1] == "+" != line[1:2]], rest


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("model.compile('adam')\nmodel.fit(x)\n", ["model.compile('adam')"]),
        ("sgd = optimizers.SGD(0.1)\nmodel.compile(\n    sgd\n)\nmodel.fit(x)\n", ["model.compile("]),
        ("with scope:\n    model.compile(loss='mse')\nmodel.fit(x)\n", ["    model.compile(loss='mse')"]),
        ("from keras.optimizers import SGD\nsgd = SGD(0.1)\n", ["sgd = SGD(0.1)"]),
        (
            "one = keras.optimizers.Adam(schedules.CosineDecay(0.1, 9))\nif two:\n    other = tf.optimizers.SGD()\n",
            ["one = keras.optimizers.Adam(schedules.CosineDecay(0.1, 9))", "    other = tf.optimizers.SGD()"],
        ),
        ("load().fit(x)\n", ["load().fit(x)"]),
    ],
    ids=["compile", "compile in lines", "compile in a block", "imported optimizer", "two optimizers", "training"],
)
def test_edit_marks_the_line_where_the_learning_rate_changes(tmp_path, source, lines):
    assert rate_edit(tmp_path, source) == (
        [(line[: len(line) - len(line.lstrip())] + COMMENT, line) for line in lines],
        [],
    )


def test_inserted_lines_do_not_separate_comment_from_its_call(tmp_path):
    file = written(tmp_path, "import keras\nmodel.compile('adam')\nmodel.fit(x)\n")
    recipe = recipe_of(file, {"batch_size": 32}, rule=LINEAR, precision="mixed_bfloat16")
    added = [line for line in changed_lines(script_diff(recipe, file)[0])[1] if line]
    assert added == ['keras.config.set_dtype_policy("mixed_bfloat16")', COMMENT]


def test_a_learning_rate_whose_place_is_not_found_is_omitted(tmp_path):
    assert rate_edit(tmp_path, "train()\n") == ([], ["learning rate times 4 (linear)"])


def test_a_rule_that_leaves_the_learning_rate_edits_nothing(tmp_path):
    as_is = LearningRateRule(batch_ratio=4.0)
    assert rate_edit(tmp_path, "model.compile('adam')\nmodel.fit(x)\n", as_is) == ([], [])


def test_edit_says_speed_was_measured_with_the_tested_rate(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, "model.compile('adam')\nmodel.fit(x)\n")
    recipe_of(file, {"batch_size": 32}, rule=LINEAR).save(tmp_path / "recipe.json")
    assert cli.main(["show", "recipe.json", "--diff", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert f"+{COMMENT}\n model.compile('adam')" in out
    assert "The speed was measured with that rate." in " ".join(err.split())
