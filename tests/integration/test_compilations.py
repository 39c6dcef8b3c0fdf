"""What XLA compiles in a trial is kept in a folder of that process alone, and loaded by the long training."""

import os
from dataclasses import replace

import pytest
from real_trials import PATIENCE_SECONDS, QUICK
from test_long_run import LOOP, recipe_of, trained

from autotune.machine.fingerprint import fingerprint
from autotune.machine.gpu import can_keep_compilations
from autotune.recipe.compiled import keep_compiled, open_folder
from autotune.recipe.recipe import Recipe
from autotune.space.knobs import Device
from autotune.tuning.events import silent
from autotune.tuning.run_setup import baseline_of

FOUND = "Loading cached entry for"
VERBOSE = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "device_executable_persistor=1"}
TRAIN = """
import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0)
print("steps", int(model.optimizer.iterations.numpy()))
"""
SCRIPTS = {"fit": TRAIN, "loop": LOOP}
APPLIED = TRAIN.replace("model.compile(", "keras.layers.Dense(2).build((None, 9))\nrecipe.compile(model, ").replace(
    "model.fit(", "recipe.fit(model, "
)


def test_the_installed_tensorflow_has_the_flags():
    assert can_keep_compilations(["xla_gpu_enable_cublaslt"])


@pytest.fixture(params=SCRIPTS)
def programs_of(request, trials_of_script, tmp_path):
    """Runs a process of trial 5 under XLA to its first slice, and returns the names of the programs that it kept."""
    script = trials_of_script(SCRIPTS[request.param])
    folder = tmp_path / "run" / "trials" / "0005"
    folder.mkdir(parents=True)
    baseline = baseline_of(script.facts, "train.py", Device.CPU, silent)

    def run(process):
        kept = open_folder(folder, process)
        trial = script.processes.launch(
            baseline.replace(jit_compile=True),
            log=str(folder / "log.txt"),
            data=None,
            timing=replace(QUICK, compiled=kept),
        )
        trial.warm_up(PATIENCE_SECONDS)
        trial.kill()
        return {name for name in os.listdir(kept) if name.endswith(".pb")}

    run.facts = script.facts
    return run


def test_what_a_trial_compiled_is_loaded_by_the_long_training(programs_of, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first, second = programs_of(0), programs_of(1)
    assert first == second != set()
    run = tmp_path / "run"
    recipe = Recipe.load(recipe_of(programs_of.facts, run, jit_compile=True))
    confirmation = recipe.evidence.confirmation.model_copy(update={"trials": (4, 5)})
    evidence = recipe.evidence.model_copy(update={"confirmation": confirmation})
    recipe = recipe.model_copy(update={"machine": fingerprint(), "evidence": evidence})
    recipe.save(run / "recipe.json")
    assert keep_compiled(recipe, run) == ""

    def train():
        command = ["-m", "autotune", "run", str(run / "recipe.json"), "train.py"]
        ended = trained(tmp_path, command, environment=VERBOSE)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.startswith("steps ")
        return ended.stderr

    said = train()
    assert "loading what XLA compiled when the recipe was measured" in said
    assert FOUND in said
    if "fit(" in (tmp_path / "train.py").read_text():
        (tmp_path / "applied.py").write_text(
            f"import autotune\nrecipe = autotune.Recipe.load('run').apply()\n{APPLIED}"
        )
        assert FOUND in trained(tmp_path, ["applied.py"], environment=VERBOSE).stderr
    spoiled = run / "compiled" / min(first)
    spoiled.write_bytes(spoiled.read_bytes()[:-1] + b"?")
    said = train()
    assert "is not used: no run of yours made it as it is" in said
    assert FOUND not in said


LAYERS = """
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(5)
x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
batches = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(16)
"""
OWN_XLA = {
    "fit": LAYERS + 'model.compile("adam", "mse", jit_compile=True)\nmodel.fit(batches, epochs=2, verbose=0)',
    "loop": LOOP.replace("model =", "keras.utils.set_random_seed(5)\nmodel =").replace(
        "@tf.function", "@tf.function(jit_compile=True)"
    ),
}


@pytest.mark.parametrize("kind", OWN_XLA)
def test_trials_with_other_pipelines_load_what_one_has_compiled(trials_of_script, tmp_path, kind):
    script = trials_of_script(OWN_XLA[kind])
    folder, found, losses, notes = tmp_path / "shared", [], [], set()
    folder.mkdir()
    baseline = baseline_of(script.facts, "train.py", Device.CPU, silent)
    kept = {}, {"compiled": str(folder), "compiled_use": "shared"}
    pipelines = ({}, {"prefetch": 4}, {"data_threads": 2, "prefetch": "autotune"})
    for changes, timing in [*((changes, kept[1]) for changes in pipelines), (pipelines[0], kept[0])]:
        wanted, log = baseline.replace(**changes), str(tmp_path / "trial.log")
        trial = script.processes.launch(wanted, log=log, data=None, timing=replace(QUICK, **timing))
        warm = trial.warm_up(PATIENCE_SECONDS)
        trial.kill()
        notes |= set(warm.started.not_knobs)
        losses.append(warm.first_loss)
        found.append({file.name: file.stat().st_mtime_ns for file in folder.iterdir()})
    assert notes == set()
    assert found[0] == found[1] == found[2] == found[3] != {}
    assert len(set(losses)) == 1
