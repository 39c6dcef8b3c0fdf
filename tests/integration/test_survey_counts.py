"""What a script counts by steps, calls and batches: such a knob is held, with its line, or the dependence is named."""

from typing import Any

import pytest
from real_trials import facts_of
from test_survey import COMPILED, MODEL, TAPE

STEP = TAPE + "step = tf.function(step)\nendless = batches.repeat()\n"
WARM_UP = """
class WarmUp(keras.callbacks.Callback):
    seen = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.seen += 1
        self.model.optimizer.learning_rate = min(1.0, self.seen / 500) * 0.01

"""
DATA = "data = tf.data.Dataset.from_tensor_slices((x, y))\n"

LOOPS = {
    "counts": "it = iter(endless)\nfor epoch in range(4):\n    for i in range(len(x) // 16):\n        step(*next(it))",
    "reads_inside": "@tf.function\ndef read(it):\n    step(*next(it))\nit = iter(endless)\n"
    "for i in range(50):\n    read(it)",
    "endless": "for a, b in endless:\n    if step(a, b) < -1.0:\n        break",
    "monitors": "held = iter(endless)\nfor e in range(9):\n    for a, b in batches:\n        step(a, b)\n"
    "        model(next(held)[0])",
    "looks_ahead": "held = iter(batches.unbatch().batch(48).repeat())\nfor e in range(9):\n    for a, b in batches:\n"
    "        model(next(held)[0])\n        step(a, b)",
    "starts_anew": "for i in range(50):\n    step(*next(iter(batches)))",
    "to_the_end": "for e in range(9):\n    for i, (a, b) in enumerate(batches):\n        step(a, b)\n"
    "        if i % 100 == 0:\n            print(i)",
}
EAGER_FUNCTIONS = "tf.config.run_functions_eagerly(True)\n"
COUNTING = """
class Counting(keras.Sequential):
    calls = 0

    def train_step(self, data):
        self.calls += 1
        return super().train_step(data)

    def compute_loss(self, *args, **named):
        return super().compute_loss(*args, **named) * min(1.0, self.calls / 50)

model = Counting([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", run_eagerly=True)
model.fit(x, y)
"""
LOSS = "tf.reduce_mean((model(images) - labels) ** 2)"
SCRIPTS = {
    **{f"loop_{name}": f"{STEP}{source}\n" for name, source in LOOPS.items()},
    "endless_fit": COMPILED + "model.fit(tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(8))\n",
    "asks_for_its_batch": "import autotune\nsize = autotune.tuned(batch_size=16).batch_size\n"
    + STEP
    + "it = iter(endless)\nfor i in range(96 // size):\n    step(*next(it))\n",
    "own_callback": COMPILED + WARM_UP + "model.fit(x, y, callbacks=[WarmUp()])\n",
    "old_hook": COMPILED
    + "class Old(keras.callbacks.Callback):\n    def on_batch_end(self, batch, logs=None):\n        pass\n\n"
    + "model.fit(x, y, callbacks=[Old()])\n",
    "lambda_callback": COMPILED
    + "every = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)\n"
    + "model.fit(x, y, callbacks=[every])\n",
    "keras_by_batch": COMPILED
    + "model.fit(x, y, callbacks=[keras.callbacks.TensorBoard('logs', update_freq=5), "
    + "keras.callbacks.ModelCheckpoint('a.keras', save_freq=7)])\n",
    "keras_by_epoch": COMPILED
    + "own = keras.callbacks\nmodel.fit(x, y, callbacks=[own.TensorBoard('logs'), own.ModelCheckpoint('a.keras'), "
    + "own.ReduceLROnPlateau('loss'), own.EarlyStopping('loss'), own.TerminateOnNaN(), "
    + "own.LearningRateScheduler(lambda e, r: r), own.LambdaCallback(on_epoch_end=lambda e, logs: None)])\n",
    "drops": COMPILED + DATA + "model.fit(data.batch(7, drop_remainder=True))\n",
    "averages": MODEL
    + "model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=9), 'mse')\nmodel.fit(x, y)\n",
    "sums": MODEL + "model.compile('sgd', keras.losses.MeanSquaredError(reduction='sum'))\nmodel.fit(x, y)\n",
    "evaluates": TAPE
    + "def evaluate():\n    return model(x)\n\n"
    + "for e in range(4):\n    for i, (a, b) in enumerate(batches):\n        step(a, b)\n"
    + "        if i % 3 == 0:\n            evaluate()\n",
    "loop_with_schedule": TAPE.replace("SGD(0.01)", "SGD(keras.optimizers.schedules.CosineDecay(0.1, 100))")
    + "for e in range(4):\n    for a, b in batches:\n        step(a, b)\n",
    "divides": TAPE.replace(LOSS, "tf.reduce_sum(model(images)) / 16")
    + "for e in range(4):\n    for a, b in batches:\n        step(a, b)\n",
    "own_loss": "N = 8\n"
    + MODEL
    + "def own_loss(a, b):\n    return tf.reduce_sum((a - b) ** 2) / N\n\n"
    + "model.compile('sgd', own_loss)\nmodel.fit(x, y, batch_size=N)\n",
    "eager_functions": COMPILED + EAGER_FUNCTIONS + "model.fit(x, y)\n",
    "loop_with_eager_functions": STEP + EAGER_FUNCTIONS + "for a, b in batches:\n    step(a, b)\n",
    "graphs_again": MODEL
    + EAGER_FUNCTIONS
    + "tf.config.run_functions_eagerly(False)\n"
    + "model.compile('sgd', 'mse', run_eagerly=True)\nmodel.compile('sgd', 'mse')\nmodel.fit(x, y)\n",
    "eager_with_counter": MODEL + COUNTING,
    "graph_with_counter": MODEL + COUNTING.replace("True", "False"),
}
"""Each is surveyed in a directory of its own."""


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The facts of each script."""
    found = facts_of(tmp_path_factory.mktemp("counts") / "scripts", SCRIPTS)
    return {name: facts.model_dump(mode="json")["script"] for name, facts in found.items()}


def line_of(name: str, text: str) -> str:
    """Where a text stands in a script, as a reason has it."""
    lines = SCRIPTS[name].splitlines()
    return f"train.py, line {next(number for number, line in enumerate(lines, 1) if text in line)} "


@pytest.mark.parametrize("name", ["counts", "reads_inside"])
def test_a_loop_that_counts_steps_keeps_its_batch_size(surveyed, name):
    reason = surveyed[f"loop_{name}"]["not_reached"]["batch_size"]
    assert reason.startswith(
        f"{line_of(f'loop_{name}', 'for i in range(')}ends the training loop by a number of steps; "
    )
    assert "autotune.tuned" in reason


@pytest.mark.parametrize("name", ["to_the_end", "monitors"])
def test_a_loop_over_its_data_has_its_batch_size_varied(surveyed, name):
    assert "batch_size" not in surveyed[f"loop_{name}"]["not_reached"]


def test_a_loop_whose_step_reads_more_keeps_its_own_batch_size(surveyed):
    found = surveyed["loop_looks_ahead"]
    assert found["baseline"]["batch_size"] == 16
    assert found["not_reached"]["batch_size"].startswith("each step reads several iterators, whose batches may belong")


def test_an_iterator_made_in_each_step_is_why_no_dataset_is_known(surveyed):
    reasons = surveyed["loop_starts_anew"]["not_reached"]
    why = (
        f"iter() in {line_of('loop_starts_anew', 'next(iter(')}starts the pipeline anew in each step: make one iterator"
    )
    assert all(reasons[name].startswith(why) for name in ("batch_size", "prefetch", "num_parallel_calls", "cache"))


def test_endless_data_without_steps_keeps_the_batch_size(surveyed):
    assert "endless and fit has no steps_per_epoch" in surveyed["endless_fit"]["not_reached"]["batch_size"]
    reason = surveyed["loop_endless"]["not_reached"]["batch_size"]
    assert f"the loop in {line_of('loop_endless', 'in endless')}reads an endless dataset" in reason


def test_a_script_that_asks_for_its_batch_size_has_it_varied(surveyed):
    assert "batch_size" not in surveyed["asks_for_its_batch"]["not_reached"]


@pytest.mark.parametrize(
    ("name", "words", "text"),
    [
        ("own_callback", "WarmUp.on_train_batch_begin (", "def on_train_batch_begin"),
        ("old_hook", "Old.on_batch_end (", "def on_batch_end"),
        ("lambda_callback", "LambdaCallback.on_train_batch_end (", "every ="),
    ],
)
def test_a_callback_of_each_batch_keeps_steps_per_execution(surveyed, name, words, text):
    reason = surveyed[name]["not_reached"]["steps_per_execution"]
    assert reason.startswith(words + line_of(name, text).rstrip() + ") acts on batches")
    assert "batch_size" not in surveyed[name]["not_reached"]
    (note,) = surveyed[name]["batch_notes"]
    assert note.startswith(words)
    assert note.endswith("acts on each batch: a larger batch size calls it less often per epoch")


def test_keras_callbacks_of_batches_keep_steps_per_execution(surveyed):
    reason = surveyed["keras_by_batch"]["not_reached"]["steps_per_execution"]
    assert "TensorBoard(update_freq=5), ModelCheckpoint(save_freq=7) acts on batches" in reason
    assert surveyed["keras_by_batch"]["batch_notes"] == []


def test_callbacks_of_epochs_keep_nothing(surveyed):
    assert "steps_per_execution" not in surveyed["keras_by_epoch"]["not_reached"]
    assert surveyed["keras_by_epoch"]["batch_notes"] == []


@pytest.mark.parametrize(
    ("name", "text", "note"),
    [
        ("drops", "drop_remainder", "batch() in {}drops the remainder"),
        ("averages", "", "SGD averages the weights over updates, and overwrites the weights every 9 updates"),
        ("sums", "reduction=", "{}sums the loss over a batch"),
        ("evaluates", "if i % 3", "{}acts at every so many steps"),
    ],
)
def test_what_a_larger_batch_changes_beside_is_named(surveyed, name, text, note):
    assert "batch_size" not in surveyed[name]["not_reached"]
    assert surveyed[name]["batch_notes"][0].startswith(note.format(line_of(name, text)))


def test_a_loops_schedule_is_known(surveyed):
    assert surveyed["loop_with_schedule"]["schedule"] == "CosineDecay"


@pytest.mark.parametrize(("name", "text"), [("divides", "/ 16"), ("own_loss", "/ N")])
def test_a_step_that_computes_with_the_batch_size_keeps_it(surveyed, name, text):
    assert surveyed[name]["not_reached"]["batch_size"].startswith(f"{line_of(name, text)}computes with the batch size")


@pytest.mark.parametrize("name", ["eager_functions", "loop_with_eager_functions"])
def test_eager_steps_keep_what_compiles(surveyed, name):
    held = surveyed[name]["not_reached"]
    line = line_of(name, "run_functions_eagerly").strip()
    assert held["jit_compile"].startswith(
        f"tf.config.run_functions_eagerly(True), {line}: each operation runs by itself"
    )
    assert held["xla_auto_clustering"] == held["graph_step"] == held["jit_compile"]
    assert name.startswith("loop") or held["steps_per_execution"] == held["jit_compile"]


def test_a_call_counter_in_an_eager_step_keeps_the_batch_size(surveyed):
    reason = surveyed["eager_with_counter"]["not_reached"]["batch_size"]
    line = line_of("eager_with_counter", "self.calls += 1")
    assert reason.startswith(f"{line}counts the calls of train_step")
    held = surveyed["eager_with_counter"]["not_reached"]
    assert held["graph_step"].startswith(f"{line.strip()}: train_step() changes self.calls")
    assert held["jit_compile"].startswith("compile(run_eagerly=True)")


def test_steps_that_run_as_functions_are_tuned(surveyed):
    """A number of Python's does not change there after the function was traced."""
    for name in ("graphs_again", "graph_with_counter"):
        assert "graph_step" not in surveyed[name]["baseline"]
        assert not surveyed[name]["not_reached"].keys() & {"jit_compile", "steps_per_execution", "batch_size"}
