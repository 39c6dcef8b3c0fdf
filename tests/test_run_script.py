"""`autotune run RECIPE SCRIPT`, for a script that trains nothing: what is checked before it runs, and how it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from autotune.data.errors import ArgumentError, MachineMismatchError
from autotune.data.facts import ScriptFacts, Site, Trains
from autotune.data.figures import Interval
from autotune.front import cli
from autotune.recipe.evidence import BestConfiguration, LearningRateRule
from autotune.recipe.recipe import Recipe

RECORDED = Path(__file__).parent.parent / "results" / "recorded" / "digits_mlp_command_one" / "recipe.json"
LAST_LINE = "autotune: the speed is not compared: the tuned training did not run"


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


def test_another_machine_is_warned_of_and_the_baseline_is_said(recipe):
    ended = run(recipe)
    assert (ended.returncode, ended.stdout) == (0, "ran\n")
    for words in ("measured on another machine", "Intel 4004", "the recipe is the baseline: the script runs as it is"):
        assert words in ended.stderr
    assert ended.stderr.splitlines()[-1] == LAST_LINE


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        (["--strict"], MachineMismatchError, "measured on another machine"),
        (["--scale-learning-rate", "linear", "--keep-learning-rate"], ArgumentError, "exclude one another"),
        (["--candidate", "--larger-batch"], ArgumentError, "exclude one another"),
    ],
)
def test_what_is_refused_runs_nothing(recipe, capsys, options, error, why):
    assert cli.main(["run", str(recipe), *options, "train.py"]) == error.exit_code
    out, err = capsys.readouterr()
    assert (out, why in err) == ("", True)


def test_a_script_that_would_lose_its_recipe_names_the_command(recipe):
    changed = Recipe.load(recipe).model_copy(update={"configuration": {**Recipe.load(recipe).baseline, "prefetch": 3}})
    changed.save(recipe)
    restart = "import os, sys\nif 'SEEN' not in os.environ:\n    os.environ['SEEN'] = '1'\n"
    restart += "    os.execv(sys.executable, [sys.executable] + sys.argv)\nos.execlp('echo', 'echo', 'trained')\n"
    (recipe.parent / "train.py").write_text(restart, encoding="utf-8")
    options = ["--same-training", "--skip-missing", "--scale-learning-rate", "sqrt"]
    ended = run(recipe, *options)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "train.py, line 4: starts the script again in place of its process" in ended.stderr
    assert f"SEEN=1 autotune run {' '.join(options)} {recipe} train.py" in ended.stderr


def save_with_fit(recipe, file):
    """Make the recipe one with a change, of a `fit` in this file."""
    changed = Recipe.load(recipe)
    site = Site(file=file, function="<module>", call="fit", order=0, line=7)
    facts = changed.workload.script.model_copy(update={"fit_site": site})
    workload = changed.workload.model_copy(update={"script": facts})
    changes = {"configuration": {**changed.baseline, "prefetch": 3}, "workload": workload}
    changed.model_copy(update=changes).save(recipe)


def test_a_fit_that_is_gone_is_an_error_before_the_script_runs(recipe, capsys):
    save_with_fit(recipe, "train.py")
    script = recipe.parent / "train.py"
    script.write_text("def train():\n    model.fit()\nprint('ran')\n", encoding="utf-8")
    assert cli.main(["run", str(recipe), "train.py"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "fit() in train.py, line 7 was tuned, and the script has no such call any more" in err
    assert "autotune tune train.py" in err
    assert run(recipe, "--skip-missing").stdout == "ran\n"
    script.write_text("print('ran')\nif False:\n    model.fit()\n", encoding="utf-8")
    assert run(recipe).stdout == "ran\n"


def test_a_fit_in_a_module_found_at_run_time_is_not_gone(recipe):
    save_with_fit(recipe, "job.py")
    (recipe.parent / "job.py").write_text("print('ran')\nif False:\n    model.fit()\n", encoding="utf-8")
    script = "import importlib\nimportlib.import_module('j' + 'ob')\n"
    (recipe.parent / "train.py").write_text(script, encoding="utf-8")
    assert run(recipe).stdout == "ran\n"


def test_a_recipe_without_changes_has_no_edit(recipe, capsys):
    assert cli.main(["show", str(recipe), "--diff", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert (out, "The recipe is the baseline: run the script as it is." in err) == ("", True)


def test_what_is_not_known_of_the_larger_batch_is_said(recipe):
    recorded, reason = Recipe.load(recipe), "no time was left for it"
    batch = 2 * int(recorded.baseline["batch_size"])
    larger = BestConfiguration(
        configuration={**recorded.baseline, "batch_size": batch},
        speedup=Interval(value=1.5, low=1.2, high=1.8),
        throughput=recorded.evidence.throughput,
        confirmed=False,
        learning_rate_rule=LearningRateRule(batch_ratio=2.0, not_measured=reason),
    )
    recorded.model_copy(update={"larger_batch": larger}).save(recipe)
    ended = run(recipe, "--larger-batch")
    assert (ended.returncode, ended.stdout) == (0, "ran\n")
    assert f"batch {batch} is not confirmed: ×1.50 (1.20 to 1.80)" in ended.stderr
    assert f"how it learns was not measured: {reason}" in ended.stderr


@pytest.mark.parametrize(("ending", "code"), [("raise SystemExit(3)", 3), ("raise ValueError", 1)])
def test_however_a_script_ends_the_last_line_is_of_its_speed(recipe, ending, code):
    (recipe.parent / "train.py").write_text(ending, encoding="utf-8")
    ended = run(recipe)
    assert ended.returncode == code
    assert ended.stderr.splitlines()[-1] == LAST_LINE
