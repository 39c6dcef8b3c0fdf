"""Scripts as their users wrote them, tuned unmodified from the command line, and trained with the recipe."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from real_trials import REPOSITORY

from autotune.recipe.recipe import Recipe

SCRIPTS = REPOSITORY / "tests" / "scripts"
BUDGET = "40s"


def digest(folder: Path) -> str:
    """Of all files below a directory."""
    whole = hashlib.sha256()
    for file in sorted(
        each for each in folder.rglob("*") if each.is_file() and "__pycache__" not in each.parts
    ):
        whole.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return whole.hexdigest()


def autotune(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What the command gave."""
    command = [sys.executable, "-m", "autotune", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's directory, with the scripts in it."""
    made = tmp_path / "ünser work"
    made.mkdir()
    for each in SCRIPTS.glob("*.py"):
        shutil.copy(each, made)
    return made


@pytest.mark.parametrize(
    ("name", "arguments", "trains", "reached"),
    [
        # `fit` on arrays, argparse, callbacks that write and one that stops
        pytest.param("mlp_numpy", ["--epochs", "2", "--batch_size", "32"], "fit", {"batch_size"}),
        # a loop with GradientTape, a test loop in each epoch, checkpoints
        pytest.param("gradient_tape_loop", ["--epochs", "2"], "loop", {"batch_size", "jit_compile"}),
        # a PyDataset with workers, in a module of its own
        pytest.param(
            "train_generator", ["--epochs", "1"], "fit", {"batch_size", "workers"}, marks=pytest.mark.slow
        ),
        # two optimizers, networks in a module of its own, no arguments
        pytest.param("gan", [], "loop", {"batch_size", "jit_compile"}, marks=pytest.mark.slow),
        # a strategy over two logical devices, a schedule
        pytest.param("mirrored_fit", ["--epochs", "1"], "fit", {"batch_size"}, marks=pytest.mark.slow),
    ],
)
def test_a_script_is_tuned_as_it_is_and_trains_with_its_recipe(
    folder, tmp_path, name, arguments, trains, reached
):
    """It gets a recipe, its directory stays as it was, no process is left, and `autotune run` trains by the recipe."""
    before = digest(folder)
    tuned = autotune(
        folder, "tune", f"{name}.py", "--budget", BUDGET, "--out", str(tmp_path / "run"), "--", *arguments
    )
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    assert digest(folder) == before
    recipe = Recipe.load(tmp_path / "run" / "recipe.json")
    script = recipe.workload.script
    assert script.trains == trains
    assert reached.isdisjoint(script.not_reached)
    assert recipe.workload.args == tuple(arguments)
    assert not (tmp_path / "run" / "created.txt").exists()
    run = autotune(folder, "run", str(tmp_path / "run" / "recipe.json"), f"{name}.py", *arguments)
    assert run.returncode == 0, run.stderr[-4000:]
