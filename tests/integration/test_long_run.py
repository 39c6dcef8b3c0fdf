"""`autotune run`: a script trains with a recipe's values in its own places, and is otherwise as it is by itself."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from real_trials import REPOSITORY, facts_of

from autotune.data.facts import WorkloadFacts
from autotune.recipe.recipe import Recipe
from autotune.script.patch import script_diff
from autotune.space.configuration import Configuration, add_strategy_knobs

RECORDED = REPOSITORY / "results" / "recorded" / "digits_mlp_command_one" / "recipe.json"

TRAIN = """
import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)


def batches(size=16):
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96, seed=1).batch(size)


model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse")
history = model.fit(batches(), epochs=3, verbose=0)
print("losses", history.history["loss"])
print("steps", int(model.optimizer.iterations.numpy()), "rate", float(model.optimizer.learning_rate))
print("policy", keras.config.dtype_policy().name, "calls of", model.steps_per_execution)
"""
ARRAYS = TRAIN.replace("model.fit(batches(), epochs=3", "model.fit(x, y, batch_size=16, epochs=3")
LOOP = """
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
batches = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(16)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.01)


@tf.function
def step(images, labels):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(images) - labels) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss


for epoch in range(3):
    for images, labels in batches:
        step(images, labels)
print("steps", int(optimizer.iterations.numpy()), "xla", bool(step._jit_compile))
"""
ENDS = """
import sys

import keras
print("read", sys.stdin.readline().strip(), sys.argv[1:])
if "raise" in sys.argv:
    raise ValueError("no such column")
if "wait" in sys.argv:
    print("waiting", flush=True)
    sys.stdin.read()
sys.exit(7)
"""
EACH_EPOCH = TRAIN.replace(
    "history = model.fit(batches(), epochs=3, verbose=0)",
    """
held_out = batches(1).take(5)
for epoch in range(3):
    history = model.fit(batches(), epochs=1, verbose=0)
print("held out", [int(a.shape[0]) for a, _ in held_out])
""",
)
AFTER_ANOTHER = TRAIN.replace(
    "history = model.fit(batches(), epochs=3, verbose=0)",
    """
calls = []
count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: calls.append(batch))
model.fit(batches(), epochs=1, callbacks=[count], verbose=0)
calls.append("tuned")
history = model.fit(batches(), epochs=9, callbacks=[count], verbose=0)
print("calls", calls[: calls.index("tuned") + 3])
""",
)
SEQUENCE = TRAIN.replace(
    "history = model.fit(batches(), epochs=3, verbose=0)",
    """
class Batches(keras.utils.PyDataset):
    batch_size = 16
    def __len__(self):
        return 96 // self.batch_size
    def __getitem__(self, index):
        return tuple(each[index * self.batch_size : (index + 1) * self.batch_size] for each in (x, y))

history = model.fit(Batches(), steps_per_epoch=6, epochs=1, verbose=0)
print("asked for", history.params["steps"])
""",
)
HALVES = TRAIN.replace(
    "history = model.fit(batches(), epochs=3, verbose=0)",
    """
class Memory(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if self.params["steps"] < 6:
            raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

size = 16
while True:
    try:
        history = model.fit(batches(size), epochs=3, verbose=0, callbacks=[Memory()])
        break
    except tf.errors.ResourceExhaustedError:
        size //= 2
""",
)
HALVES_ARRAYS = HALVES.replace("model.fit(batches(size)", "model.fit(x, y, batch_size=size")
FOLDS = TRAIN.replace(
    "history = model.fit(batches(), epochs=3, verbose=0)",
    """
by_hand, folds = 3 if "by-hand" in sys.argv else 1, []
scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: by_hand * 0.01 / (1 + epoch))
for fold in range(3):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    other = keras.callbacks.LearningRateScheduler(lambda epoch, rate: by_hand * 0.02 / (1 + epoch))
    for callback in (scheduler, other):
        history = model.fit(batches(), epochs=2, callbacks=[callback], verbose=0)
        folds += history.history["loss"]
print("folds", folds)
""",
)
SCHEDULED = TRAIN.replace(
    "history = model.fit(batches(), epochs=3, verbose=0)",
    """
decay, kept = keras.optimizers.schedules.ExponentialDecay, []

def learn(factor):
    model.optimizer.learning_rate = decay(factor * 0.01, 10, 0.5)
    model.train_function = None

model.compile(keras.optimizers.SGD(decay(0.01, 10, 0.5)), "mse")
kept += model.fit(batches(), epochs=1, verbose=0).history["loss"]
if "by-hand" in sys.argv:
    learn(3)
history = model.fit(batches(), epochs=99, verbose=0)  # clearly the longest, also on a busy machine
if "by-hand" in sys.argv:
    learn(1)
kept += model.fit(batches(), epochs=1, verbose=0).history["loss"]
print("all", kept + history.history["loss"])
model.save("model.keras")
print("saved", keras.models.load_model("model.keras").optimizer.get_config()["learning_rate"]["config"])
""",
)
CACHED = TRAIN.replace(".batch(size)", ".batch(size).cache('kept')")
MAPPED = TRAIN.replace(
    ".shuffle(96, seed=1)", ".map(lambda a, b: (a / tf.reduce_max(tf.abs(a)), b), num_parallel_calls=2).shuffle(50)"
)
VALIDATED = TRAIN.replace("epochs=3", "epochs=3, validation_data=(x, y)")
TWO_DEVICES = """\
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
"""
SCRIPTS = {"train": TRAIN, "arrays": ARRAYS}
ALL = {
    **SCRIPTS,
    "loop": LOOP,
    "each_epoch": EACH_EPOCH,
    "cached": CACHED,
    "mapped": MAPPED,
    "validated": VALIDATED,
    "after_another": AFTER_ANOTHER,
    "sequence": SEQUENCE,
    "folds": FOLDS,
    "scheduled": SCHEDULED,
    "halves": HALVES,
    "halves_arrays": HALVES_ARRAYS,
}


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WorkloadFacts]:
    """What is known of each script."""
    return facts_of(tmp_path_factory.mktemp("long") / "scripts", ALL)


def recipe_of(facts: WorkloadFacts, folder: Path, **changes: object) -> Path:
    """A recipe of a script, with these changes."""
    recorded = Recipe.load(RECORDED)
    usual = {**dict(recorded.baseline), **facts.script.baseline, "prefetch": 0, "persistent_iterator": False}
    usual |= {name: changes[name] for name in ("global_batch",) if name in changes}
    if "strategy" in changes:
        usual = dict(add_strategy_knobs(Configuration(usual)))
    of_script = {
        "name": "train",
        "script": facts.script,
        "keras": facts.keras,
        "args": (),
        "fingerprint": facts.fingerprint,
    }
    workload = recorded.workload.model_copy(update=of_script)
    recipe = recorded.model_copy(
        update={
            "baseline": usual,
            "configuration": {**usual, **changes},
            "workload": workload,
            "learning_rate_rule": None,
        }
    )
    recipe.save(folder / "recipe.json")
    return folder / "recipe.json"


def trained(folder: Path, arguments: list[str], **more: object) -> subprocess.CompletedProcess[str]:
    """What Python gave."""
    environment = {**os.environ, **more.pop("environment", {})}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False, env=environment, **more
    )


def by_recipe(
    folder: Path, recipe: Path, *options: str, args: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """What `autotune run` gave."""
    run = ["-m", "autotune", "run", str(recipe), *options, "train.py", *args]
    return trained(folder, run)


def numbers_of(ended: subprocess.CompletedProcess[str], word: str) -> list[float]:
    """The numbers of the line that begins with a word."""
    return json.loads(said(ended, word).removeprefix(word))


def said(ended: subprocess.CompletedProcess[str], word: str) -> str:
    """The line that begins with a word."""
    lines = [line for line in ended.stdout.splitlines() if line.startswith(word)]
    assert lines, ended.stderr[-3000:]
    return lines[0]


def assert_nothing_changes(folder: Path, source: str, facts: WorkloadFacts) -> None:
    """With the script's own values its training is the same."""
    (folder / "train.py").write_text(source, encoding="utf-8")
    alone, with_recipe = trained(folder, ["train.py"]), by_recipe(folder, recipe_of(facts, folder))
    assert with_recipe.returncode == 0, with_recipe.stderr
    for word in ("losses", "steps"):
        assert said(with_recipe, word) == said(alone, word)


def assert_values_act(
    folder: Path, source: str, facts: WorkloadFacts, **changes: object
) -> subprocess.CompletedProcess[str]:
    """A recipe's values, and a scaled learning rate, act in the script's own places."""
    (folder / "train.py").write_text(source, encoding="utf-8")
    changes |= {"batch_size": 48, "precision": "mixed_bfloat16", "steps_per_execution": 2}
    recipe = recipe_of(facts, folder, **changes)
    ended = by_recipe(folder, recipe, "--scale-learning-rate", "linear")
    assert ended.returncode == 0, ended.stderr
    assert said(ended, "steps").startswith("steps 6 ")  # three epochs of 96 examples
    assert float(said(ended, "steps").split()[-1]) == pytest.approx(0.01), "the script sees its own"
    assert said(ended, "policy") == "policy mixed_bfloat16 calls of 2"
    assert "learning rate 0.01 → 0.03" in ended.stderr
    kept = by_recipe(folder, recipe)
    assert numbers_of(kept, "losses") != pytest.approx(numbers_of(ended, "losses"), rel=0.01)
    (folder / "train.py").write_text(source.replace("SGD(0.01)", "SGD(0.03)"), encoding="utf-8")
    by_hand = by_recipe(folder, recipe)
    assert numbers_of(by_hand, "losses") == pytest.approx(numbers_of(ended, "losses"), rel=1e-3)
    return ended


@pytest.mark.parametrize("name", SCRIPTS)
def test_with_the_scripts_own_values_nothing_changes(surveyed, tmp_path, name):
    assert_nothing_changes(tmp_path, SCRIPTS[name], surveyed[name])


@pytest.mark.fast
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_recipes_values_act_in_the_scripts_own_places(surveyed, tmp_path, name):
    ended = assert_values_act(tmp_path, SCRIPTS[name], surveyed[name], persistent_iterator=True)
    assert ("`shuffle=True` was passed" in ended.stderr) == (name == "train"), "Keras warns as it does by itself"


def test_the_edit_of_a_recipe_trains_as_the_recipe_does(surveyed, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    changes = {"batch_size": 24, "steps_per_execution": 2, "persistent_iterator": True, "data_autotune": False}
    recipe = recipe_of(surveyed["train"], tmp_path, **changes, data_threads=2, prefetch=2)
    ended = by_recipe(tmp_path, recipe)
    diff, rest = script_diff(Recipe.load(recipe), tmp_path / "train.py")
    assert rest == []
    subprocess.run(["patch", "-p0"], cwd=tmp_path, input=diff, text=True, check=True, capture_output=True)
    edited = trained(tmp_path, ["train.py"])
    for word in ("losses", "steps", "policy"):
        assert said(edited, word) == said(ended, word), edited.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_global_batch_is_kept_by_accumulating(surveyed, tmp_path, name):
    (tmp_path / "train.py").write_text(SCRIPTS[name], encoding="utf-8")
    recipe = recipe_of(surveyed[name], tmp_path, batch_size=8, global_batch=32)
    ended = by_recipe(tmp_path, recipe, "--scale-learning-rate", "linear")
    assert ended.returncode == 0, ended.stderr
    assert said(ended, "steps").startswith("steps 9 ")  # three epochs of 96 examples
    (tmp_path / "train.py").write_text(SCRIPTS[name].replace("SGD(0.01)", "SGD(0.02)"), encoding="utf-8")
    by_hand = by_recipe(tmp_path, recipe)
    assert numbers_of(by_hand, "losses") == pytest.approx(numbers_of(ended, "losses"), rel=1e-3)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_recipes_strategy_is_opened_for_a_script_that_has_none(surveyed, tmp_path, name):
    source = SCRIPTS[name].replace(".shuffle(96, seed=1)", "").replace("epochs=3", "epochs=3, shuffle=False")
    told = "print('replicas', model.distribute_strategy.num_replicas_in_sync)\n"
    (tmp_path / "train.py").write_text(source + told, encoding="utf-8")
    alone = json.loads(said(trained(tmp_path, ["train.py"]), "losses").removeprefix("losses "))
    changes = {"strategy": "mirrored", "replicas": 2, "per_replica_buffer_size": 2 if name == "train" else 1}
    recipe = recipe_of(surveyed[name], tmp_path, **changes)
    assert "replicas=2 needs as many devices, and TensorFlow sees 1" in by_recipe(tmp_path, recipe).stderr
    source = source.replace("import keras\n", f"import keras\n{TWO_DEVICES}")
    (tmp_path / "train.py").write_text(source + told, encoding="utf-8")
    ended = by_recipe(tmp_path, recipe)
    assert said(ended, "replicas") == "replicas 2"
    assert json.loads(said(ended, "losses").removeprefix("losses ")) == pytest.approx(alone, rel=1e-4)
    assert float(said(ended, "steps").split()[-1]) == pytest.approx(0.01)  # the script reads a variable as a number
    own = "tf.distribute.OneDeviceStrategy('cpu:0').scope().__enter__()\nmodel = keras"
    within = source.replace("model = keras", own)
    (tmp_path / "train.py").write_text(within, encoding="utf-8")
    refused = by_recipe(tmp_path, recipe)
    assert "strategy=mirrored does not act" in refused.stderr
    assert "steps" not in refused.stdout


def test_a_call_that_moved_is_found_and_a_lost_one_is_an_error(surveyed, tmp_path):
    recipe = recipe_of(surveyed["train"], tmp_path, batch_size=48)
    (tmp_path / "train.py").write_text("# é\n\n" + TRAIN.replace("import sys", "import os, sys"), encoding="utf-8")
    assert said(by_recipe(tmp_path, recipe), "steps").startswith("steps 6 ")
    gone = TRAIN.replace(".batch(size)", ".ragged_batch(size)")
    (tmp_path / "train.py").write_text(gone, encoding="utf-8")
    ended = by_recipe(tmp_path, recipe)
    assert ended.returncode == 2
    assert re.search(r"batch_size was set at batch\(\) in train.py, line \d+", ended.stderr)
    assert "--skip-missing" in ended.stderr
    assert "steps" not in ended.stdout
    skipped = by_recipe(tmp_path, recipe, "--skip-missing")
    assert said(skipped, "steps").startswith("steps 18 ")


def test_the_scripts_ends_are_its_own(surveyed, tmp_path):
    (tmp_path / "train.py").write_text(ENDS, encoding="utf-8")
    run = ["-m", "autotune", "run", str(recipe_of(surveyed["train"], tmp_path)), "train.py"]
    ended = trained(tmp_path, [*run, "--debug", "-m", "--", "x"], input="hello\n")
    assert ended.returncode == 7
    assert "read hello ['--debug', '-m', '--', 'x']" in ended.stdout
    raised = trained(tmp_path, [*run, "raise"], input="\n")
    assert raised.returncode == 1
    assert "ValueError: no such column" in raised.stderr
    assert f'File "{tmp_path}/train.py"' in raised.stderr


def test_a_signal_ends_the_script(surveyed, tmp_path):
    (tmp_path / "train.py").write_text(ENDS, encoding="utf-8")
    recipe = recipe_of(surveyed["train"], tmp_path)
    command = [sys.executable, "-m", "autotune", "run", str(recipe), "train.py", "wait"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdin.write("\n")
        process.stdin.flush()
        assert any("waiting" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == -signal.SIGTERM


def test_a_recipe_of_another_script_is_refused(surveyed, tmp_path):
    (tmp_path / "other.py").write_text(ENDS, encoding="utf-8")
    recipe = recipe_of(surveyed["train"], tmp_path)
    other = trained(tmp_path, ["-m", "autotune", "run", str(recipe), "other.py"])
    assert other.returncode == 2
    assert "is of train, and other.py is another script" in other.stderr
    workload = trained(tmp_path, ["-m", "autotune", "run", str(RECORDED), "other.py"])
    assert workload.returncode == 2
    assert "recipe.apply()" in workload.stderr


def test_one_line_takes_the_recipe_from_the_environment(surveyed, tmp_path):
    recipe = recipe_of(surveyed["train"], tmp_path, batch_size=48)
    (tmp_path / "train.py").write_text("import autotune\nautotune.activate()\n" + TRAIN, encoding="utf-8")
    assert said(trained(tmp_path, ["train.py"]), "steps").startswith("steps 18 ")
    active = trained(tmp_path, ["train.py"], environment={"AUTOTUNE_RECIPE": str(recipe)})
    assert said(active, "steps").startswith("steps 6 "), active.stderr


def test_a_loop_of_its_own_runs_by_its_recipe(surveyed, tmp_path):
    (tmp_path / "train.py").write_text(LOOP, encoding="utf-8")
    same = by_recipe(tmp_path, recipe_of(surveyed["loop"], tmp_path))
    assert said(same, "steps") == "steps 18 xla False"
    changed = recipe_of(surveyed["loop"], tmp_path, batch_size=48, jit_compile=True, data_autotune=False)
    ended = by_recipe(tmp_path, changed)
    assert ended.returncode == 0, ended.stderr
    assert said(ended, "steps") == "steps 6 xla True"
    assert "learning rate" not in ended.stderr
    scaled = by_recipe(tmp_path, changed, "--scale-learning-rate", "sqrt")
    assert "learning rate 0.01 → 0.0173205, as asked for, for batches of 48 instead of 16 (sqrt)" in scaled.stderr


def test_the_recipe_acts_at_each_execution_of_the_tuned_fit_only(surveyed, tmp_path):
    (tmp_path / "train.py").write_text(EACH_EPOCH, encoding="utf-8")
    recipe = recipe_of(surveyed["each_epoch"], tmp_path, batch_size=48)
    ended = by_recipe(tmp_path, recipe, "--scale-learning-rate", "linear")
    assert ended.returncode == 0, ended.stderr
    assert said(ended, "steps").startswith("steps 6 rate 0.0"), ended.stderr
    assert ended.stderr.count("learning rate 0.01 → 0.03") == 1
    (tmp_path / "train.py").write_text(EACH_EPOCH.replace("SGD(0.01)", "SGD(0.03)"), encoding="utf-8")
    assert numbers_of(by_recipe(tmp_path, recipe), "losses") == pytest.approx(numbers_of(ended, "losses"), rel=1e-3)
    assert said(ended, "held out") == "held out [1, 1, 1, 1, 1]"


@pytest.mark.parametrize(("name", "word"), [("folds", "folds"), ("scheduled", "all")])
def test_rates_of_callbacks_and_schedules_are_scaled_in_its_fit(surveyed, tmp_path, name, word):
    (tmp_path / "train.py").write_text(ALL[name], encoding="utf-8")
    recipe = recipe_of(surveyed[name], tmp_path, batch_size=48)
    ended = by_recipe(tmp_path, recipe, "--scale-learning-rate", "linear")
    by_hand = by_recipe(tmp_path, recipe, args=("by-hand",))
    assert numbers_of(ended, word) == pytest.approx(numbers_of(by_hand, word), rel=0.02), ended.stderr
    if name == "scheduled":
        assert "'initial_learning_rate': 0.01" in said(ended, "saved"), "the model is saved with the script's schedule"


def test_a_sequences_steps_and_rate_follow_its_batch_size(surveyed, tmp_path):
    (tmp_path / "train.py").write_text(SEQUENCE, encoding="utf-8")
    recipe = recipe_of(surveyed["sequence"], tmp_path, batch_size=48)
    ended = by_recipe(tmp_path, recipe, "--scale-learning-rate", "linear")
    assert said(ended, "asked for") == "asked for 2", ended.stderr
    assert said(ended, "steps").startswith("steps 2 rate 0.0")
    assert "learning rate 0.01 → 0.03" in ended.stderr


@pytest.mark.parametrize("name", ["halves", "halves_arrays"])
def test_a_smaller_batch_after_running_out_of_memory_is_obeyed(surveyed, tmp_path, name):
    (tmp_path / "train.py").write_text(ALL[name], encoding="utf-8")
    recipe = recipe_of(surveyed[name], tmp_path, batch_size=48)
    ended = by_recipe(tmp_path, recipe, "--scale-learning-rate", "linear")
    assert said(ended, "steps").startswith("steps 36 "), ended.stderr
    assert float(said(ended, "steps").split()[-1]) == pytest.approx(0.01)


def test_a_map_of_batches_trains_to_the_same_losses(surveyed, tmp_path):
    (tmp_path / "train.py").write_text(MAPPED, encoding="utf-8")
    recipe = recipe_of(surveyed["mapped"], tmp_path, batched_map=True)
    assert surveyed["mapped"].script.vectorized, "its function mixes the examples of a batch"
    alone = trained(tmp_path, ["train.py"])
    ended = by_recipe(tmp_path, recipe)
    assert "left out" not in ended.stderr
    assert said(ended, "losses") == said(alone, "losses")
    (tmp_path / "train.py").write_text(MAPPED.replace("tf.abs(a)", "a"), encoding="utf-8")
    changed = by_recipe(tmp_path, recipe)
    assert "batched_map is left out: the script has changed since it was proven" in changed.stderr
    assert said(changed, "losses") == said(trained(tmp_path, ["train.py"]), "losses")


@pytest.mark.parametrize("changes", [{}, {"data_autotune": False}], ids=["steps", "dataset"])
def test_another_fit_keeps_its_steps_per_execution(surveyed, tmp_path, changes):
    (tmp_path / "train.py").write_text(AFTER_ANOTHER, encoding="utf-8")
    recipe = recipe_of(surveyed["after_another"], tmp_path, steps_per_execution=3, **changes)
    ended = by_recipe(tmp_path, recipe)
    assert ended.returncode == 0, ended.stderr
    assert said(ended, "calls") == "calls [0, 1, 2, 3, 4, 5, 'tuned', 2, 5]"


def test_a_cache_in_a_file_does_not_mix_batch_sizes(surveyed, tmp_path):
    (tmp_path / "train.py").write_text(CACHED, encoding="utf-8")
    assert said(trained(tmp_path, ["train.py"]), "steps").startswith("steps 18 ")
    own = {path.name: path.read_bytes() for path in tmp_path.glob("kept*")}
    ended = by_recipe(tmp_path, recipe_of(surveyed["cached"], tmp_path, batch_size=48))
    assert said(ended, "steps").startswith("steps 6 "), ended.stderr
    others = {path.name for path in tmp_path.glob("kept*")} - own.keys()
    assert "kept.batch-48.index" in others
    assert all(name.startswith("kept.batch-48.") for name in others)
    assert {name: (tmp_path / name).read_bytes() for name in own} == own
    assert said(trained(tmp_path, ["train.py"]), "steps").startswith("steps 18 ")


@pytest.mark.parametrize(
    ("name", "source", "weights"),
    [("train", TRAIN, 19), ("train", TRAIN.replace("keras.Input((4,)), ", ""), 19), ("loop", LOOP, 5)],
    ids=["built", "built by its first step", "loop"],
)
def test_a_model_that_changed_is_said_once(surveyed, tmp_path, name, source, weights):
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    path = recipe_of(surveyed[name], tmp_path, batch_size=48)
    recipe = Recipe.load(path)

    def run_with(parameters: int) -> str:
        workload = recipe.workload.model_copy(update={"parameters": parameters})
        recipe.model_copy(update={"workload": workload}).save(path)
        ended = by_recipe(tmp_path, path)
        assert ended.returncode == 0, ended.stderr
        return ended.stderr

    assert "changed since" not in run_with(weights)
    told = run_with(3)
    assert told.count(f"the model: measured with 3 weights, here {weights}") == 1
    assert f"autotune verify {path} train.py --budget " in told


def test_the_learning_benchmark_watches_a_script(surveyed, tmp_path):
    (tmp_path / "train.py").write_text(VALIDATED, encoding="utf-8")
    watch = str(REPOSITORY / "benchmarks" / "held_out_losses.py")

    def losses(recipe: str) -> list[float]:
        ended = trained(tmp_path, [watch, recipe, "train.py"])
        assert ended.returncode == 0, ended.stderr[-3000:]
        return [loss for _, loss in json.loads(ended.stdout.splitlines()[-1])]

    plain = losses("-")
    assert len(plain) == 3
    assert losses(str(recipe_of(surveyed["validated"], tmp_path))) == plain
    assert losses(str(recipe_of(surveyed["validated"], tmp_path, batch_size=32))) != plain
