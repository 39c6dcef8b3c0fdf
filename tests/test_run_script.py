"""`autotune run RECIPE SCRIPT`, for a script that trains nothing: what is checked before it runs, and how it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from autotune.data.errors import MachineMismatchError
from autotune.data.facts import ScriptFacts, Trains
from autotune.recipe.recipe import Recipe

RECORDED = Path(__file__).parent.parent / "results" / "digits_mlp_command_one" / "recipe.json"


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe of `train.py` from another machine, and the script, which writes that it ran."""
    recorded = Recipe.load(RECORDED)
    script = ScriptFacts(trains=Trains.FIT, baseline=dict(recorded.baseline))
    recipe = recorded.model_copy(
        update={
            "configuration": dict(recorded.baseline),
            "workload": recorded.workload.model_copy(update={"name": "train", "script": script, "args": ()}),
            "machine": recorded.machine.model_copy(update={"cpu": "Intel 4004"}),
            "learning_rate_rule": None,
        }
    )
    monkeypatch.chdir(tmp_path)
    recipe.save(tmp_path / "recipe.json")
    (tmp_path / "train.py").write_text("print('ran')\n", encoding="utf-8")
    return tmp_path / "recipe.json"


def run(recipe, *options):
    """Run the script by its recipe."""
    command = [sys.executable, "-m", "autotune", "run", str(recipe), *options, "train.py"]
    return subprocess.run(command, cwd=recipe.parent, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [(), ("--on-mismatch", "nearest")])
def test_another_machine_is_warned_of_and_trains(recipe, options):
    ended = run(recipe, *options)
    assert (ended.returncode, ended.stdout) == (0, "ran\n")
    assert "measured on another machine" in ended.stderr
    assert "Intel 4004" in ended.stderr


def test_another_machine_can_be_an_error(recipe):
    ended = run(recipe, "--on-mismatch", "error")
    assert ended.returncode == MachineMismatchError.exit_code
    assert ended.stdout == ""
    assert "measured on another machine" in ended.stderr


def test_another_machine_can_be_ignored(recipe):
    ended = run(recipe, "--on-mismatch", "ignore")
    assert (ended.returncode, ended.stdout) == (0, "ran\n")
    assert "another machine" not in ended.stderr
