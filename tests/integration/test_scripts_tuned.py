"""Scripts as their users wrote them: each is surveyed; some are tuned unmodified, and train with the recipe."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from real_trials import REPOSITORY, autotune, survey_all
from test_end_to_end import with_enough_time

from autotune.data.record import Phase
from autotune.data.run_directory import RunDirectory
from autotune.recipe.recipe import Recipe
from autotune.space.configuration import Configuration, read_trials
from autotune.stats.deciding import ClaimResult

SCRIPTS = REPOSITORY / "tests" / "scripts"
BUDGET = 25
"""Seconds of a run."""
LOOPS = {"gan", "gradient_tape_loop", "keras2_gan", "mirrored_custom", "numpy_tape", "train_on_batch"}
FIXED_BATCH_SIZE = {"mirrored_custom", "numpy_tape", "train_on_batch"}
"""One divides its loss by its own global batch size; the batches of the others are slices of arrays."""

SLOW = pytest.mark.slow


def digest(folder: Path) -> str:
    """Of all files below a directory."""
    whole = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        whole.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return whole.hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's directory, with the scripts in it."""
    made = tmp_path / "ünser work"
    made.mkdir()
    for path in SCRIPTS.glob("*.py"):
        shutil.copy(path, made)
    return made


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "arguments", "trains", "reached"),
    [
        # `fit` on arrays, argparse, callbacks that write and one that stops
        pytest.param("mlp_numpy", ["--epochs", "2", "--batch_size", "32"], "fit", {"batch_size"}),
        # a loop with GradientTape, a test loop in each epoch, checkpoints
        pytest.param("gradient_tape_loop", ["--epochs", "2"], "loop", {"batch_size", "jit_compile"}, marks=SLOW),
        # Keras 2; all other scripts are surveyed below
        pytest.param("keras2_functional", [], "fit", {"batch_size", "num_parallel_calls"}, marks=SLOW),
    ],
)
def test_a_script_is_tuned_as_it_is_and_trains_with_its_recipe(folder, tmp_path, name, arguments, trains, reached):
    before = digest(folder)
    tune = ("tune", f"{name}.py", "--out", str(tmp_path / "run"), "--budget")
    tuned = with_enough_time(lambda budget: autotune(folder, *tune, f"{budget}s", "--", *arguments), BUDGET)
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    assert digest(folder) == before
    recipe = Recipe.load(tmp_path / "run" / "recipe.json")
    script = recipe.workload.script
    assert script.trains == trains
    assert (recipe.workload.keras.package == "tf_keras") is name.startswith("keras2_")
    assert reached.isdisjoint(script.not_reached)
    assert recipe.workload.args == tuple(arguments)
    logs = [file.read_text(encoding="utf-8") for file in (tmp_path / "run" / "trials").rglob("log.txt")]
    assert not any("/1073741824" in log for log in logs), "a trial's own number of epochs is nothing to the script"
    assert not (tmp_path / "run" / "script-scratch").exists()
    run = autotune(folder, "run", str(tmp_path / "run" / "recipe.json"), f"{name}.py", *arguments)
    assert run.returncode == 0, run.stderr[-4000:]


def test_every_script_is_surveyed(tmp_path):
    names = sorted(file.stem for file in SCRIPTS.glob("*.py") if file.stem not in ("networks", "data_generator"))
    for name in names:
        shutil.copytree(SCRIPTS, tmp_path / "scripts" / name)
        (tmp_path / "scripts" / name / f"{name}.py").rename(tmp_path / "scripts" / name / "train.py")
    answers = survey_all(tmp_path / "scripts")
    refused = {name: answer for name, answer in answers.items() if "facts" not in answer}
    assert refused == {}
    found = {name: answer["facts"]["script"] for name, answer in answers.items()}
    assert sorted(found) == names
    assert {name for name in names if found[name]["trains"] == "loop"} == LOOPS
    assert {name for name in names if "batch_size" in found[name]["not_reached"]} == FIXED_BATCH_SIZE


TRAIN = """
import argparse

import keras
import numpy as np
import tensorflow as tf

from .data import examples

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
args = parser.parse_args()
model = keras.Sequential([keras.layers.Dense(16), keras.layers.Dense(1)])  # its first step builds it
model.compile("sgd", "mse")
model.fit(examples().batch(16), epochs=args.epochs, verbose=0)
print("trained", args.epochs, int(model.optimizer.iterations.numpy()))
"""
DATA = """
import numpy as np
import tensorflow as tf


def examples():
    x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(512)
"""


def slices_in(run):
    """How many slices of a run are kept."""
    return sum(len(record.pairs) + len(record.slices) for record in read_trials(RunDirectory(run)))


def test_a_module_is_tuned_resumed_verified_run_and_tuned_again(tmp_path):
    package = tmp_path / "jobs"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "train.py").write_text(TRAIN, encoding="utf-8")
    (package / "data.py").write_text(DATA, encoding="utf-8")
    out = tmp_path / "run"
    tune = ("tune", "-m", "jobs.train", "--out", str(out), "--budget")
    tuned = with_enough_time(lambda budget: autotune(tmp_path, *tune, f"{budget}s", "--", "--epochs", "2"), BUDGET)
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    before = slices_in(out)
    resume = ("tune", "-m", "jobs.train", "--resume", str(out), "--budget")
    resumed = with_enough_time(lambda budget: autotune(tmp_path, *resume, f"{budget}s"), 2 * BUDGET)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert slices_in(out) > before
    recipe = Recipe.load(out / "recipe.json")
    assert recipe.workload.args == ("--epochs", "2")
    verify = ("verify", str(out / "recipe.json"), "jobs.train", "--budget")
    verified = with_enough_time(lambda budget: autotune(tmp_path, *verify, f"{budget}s"), 2 * BUDGET)
    assert verified.returncode in (0, 1), verified.stdout + verified.stderr
    assert verified.stdout.splitlines()[-1].partition(":")[0] in set(ClaimResult)
    run = autotune(tmp_path, "run", str(out / "recipe.json"), "-m", "jobs.train", "--epochs", "3")
    assert run.returncode == 0, run.stderr
    steps = 3 * -(-512 // int(recipe.configuration["batch_size"]))
    assert f"trained 3 {steps}" in run.stdout
    edited = '"""My training."""\n' + TRAIN.replace('"sgd"', "keras.optimizers.SGD(0.02)")
    (package / "train.py").write_text(edited, encoding="utf-8")
    again = ("tune", "-m", "jobs.train", "--out", str(tmp_path / "second"), "--trials", "1", "--budget")
    second = with_enough_time(lambda budget: autotune(tmp_path, *again, f"{budget}s", "--", "--epochs", "2"), BUDGET)
    assert second.returncode == 0, second.stdout + second.stderr
    record = RunDirectory(tmp_path / "second").read_run()
    assert record.workload.parameters == RunDirectory(out).read_run().workload.parameters == 8 * 16 + 16 + 16 + 1
    assert {leader.run for leader in record.leaders} == {"run"}
    assert "starting from the leader" in second.stdout
    (tried,) = [trial for trial in read_trials(RunDirectory(tmp_path / "second")) if trial.phase is Phase.SEARCH]
    baseline = Configuration(record.baseline)
    assert Configuration(tried.asked or tried.configuration).differences(baseline) == record.leaders[0].changes


GENERATOR = """
import keras
import numpy as np
import tensorflow as tf

from autotune.script.fit_call import FitCall
from autotune.script.settings import Settings


def batches():
    while True:
        yield np.zeros((20, 4), "float32"), np.zeros((20, 1), "float32")


given = dict.fromkeys(("y", "sample_weight", "validation_split", "validation_data", "class_weight"))
given |= {"x": batches(), "shuffle": True, "steps_per_epoch": 7}
call = FitCall(model=None, arguments=given, settings=Settings(own={"batch_size": 20}))
dataset, _ = call.training_dataset
print(call.examples(dataset))
held_out = tf.data.Dataset.from_tensor_slices(np.zeros((64, 4))).repeat().batch(8)
given |= {"validation_data": held_out, "validation_steps": 3}
call = FitCall(model=None, arguments=given, settings=Settings())
print(int(call.validation().cardinality()), call.validates_for_ever)
"""


def test_epochs_and_validations_are_as_long_as_their_steps_say():
    told = subprocess.run([sys.executable, "-c", GENERATOR], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["140", "3", "False"]
