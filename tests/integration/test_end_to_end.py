"""The main job as a user does it: commands and scripts in processes of their own, and what they leave behind."""

import json
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import optuna
import psutil
import pytest
from real_trials import REPOSITORY, until

import autotune

pytestmark = pytest.mark.slow

DIGITS = REPOSITORY / "examples" / "digits_mlp.py"
WAIT_SECONDS = 900.0
BUDGET = 60
"""Seconds for a run. On a busy machine, where an import alone takes more than 20, it is refused as too short."""
MOST_REFUSALS = 4
"""In a row: the machine may have become busier since the last one advised a budget."""

TINY = """
import keras
import numpy as np
import tensorflow as tf

import autotune


def model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def dataset():
    return tf.data.Dataset.from_tensor_slices((np.ones((256, 4)), np.ones((256, 1))))


workload = autotune.Workload(
    model=model, dataset=dataset, compile=lambda: {"loss": "mse", "optimizer": "sgd"}, batch_size=16
)
"""


@pytest.fixture
def run(tmp_path, environment):
    """Runs Python in an empty directory, waits for it to end, and sees that nothing of it is left."""

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        return to_its_end(arguments, environment, tmp_path)

    return start


def to_its_end(
    arguments: Sequence[str], environment: Mapping[str, str], directory: Path
) -> subprocess.CompletedProcess[str]:
    """What Python gave with these arguments, which has left no process."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=directory,
    ) as process:
        try:
            out, err = process.communicate(timeout=WAIT_SECONDS)
        finally:
            process.kill()
    assert templates_of(process.pid) == []
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def with_enough_time(
    start: Callable[[int], subprocess.CompletedProcess[str]],
) -> subprocess.CompletedProcess[str]:
    """A run of the usual budget in seconds, or of what its refusals advise: as a user would go on."""
    budget = BUDGET
    for _ in range(MOST_REFUSALS):
        ended = start(budget)
        enough = re.search(r"--budget (\d+)s or more", ended.stderr)
        if not enough and "Give a larger --budget" not in ended.stderr:
            break
        budget = int(enough[1]) if enough else 3 * budget
    return ended


def templates_of(tuner: int) -> list[psutil.Process]:
    """Templates and trials of a tuner, which stands in their command lines."""
    found = []
    for each in psutil.process_iter(["cmdline"]):
        command = each.info["cmdline"] or []
        if "autotune.trial.template" in command and str(tuner) in command:
            found.append(each)
    return found


def assert_complete(run: Path) -> autotune.Recipe:
    """A run directory has all its files, each readable by what it is for; its recipe."""
    assert not [each for each in run.rglob(".*") if each.name != ".lock"], "temporary files are left"
    recipe = autotune.Recipe.load(run / "recipe.json")
    record = json.loads((run / "run.json").read_text())
    assert record["schema_version"] == 1
    assert record["workload"]["device"] == "cpu"
    assert record["baseline"] == dict(recipe.baseline)
    history = autotune.load_history(run)
    results = sorted((run / "trials").glob("*/result.json"))
    assert len(history) == len(results) >= 3
    assert [json.loads(each.read_text())["trial"] for each in results] == list(history["trial"])
    assert (history["phase"] == "baseline").sum() == 1
    assert history["throughput"].iloc[0] > 0
    for each in results:
        ran = (
            json.loads(each.read_text())["instances"] > 0
        )  # on a busy machine time may end before some began
        assert (each.parent / "log.txt").exists() == ran
    storage = f"sqlite:///{run / 'study.db'}"
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)
    told = [each for each in study.trials if each.state.is_finished()]
    assert told
    assert {each.state.name for each in study.trials} <= {"COMPLETE", "PRUNED"}
    return recipe


def test_tune_from_python_leaves_a_complete_run(run, tmp_path):
    """On real digits: a recipe, a run, a study, a history; and the tuner never imports TensorFlow."""
    script = f"""
        import sys, autotune
        recipe = autotune.tune({str(DIGITS)!r}, budget=sys.argv[1], trials=3, out="run")
        assert "tensorflow" not in sys.modules
        assert "keras" not in sys.modules
        assert recipe == autotune.Recipe.load("run/recipe.json")
    """
    ended = with_enough_time(lambda budget: run("-c", textwrap.dedent(script), str(budget)))
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    recipe = assert_complete(tmp_path / "run")
    assert recipe.workload.name == "digits_mlp"
    assert recipe.workload.examples == 1437
    assert recipe.baseline["batch_size"] == 32
    assert recipe.evidence.verdict in ("faster", "no_significant_gain")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_tune_from_the_command_line(run, tmp_path):
    """Plain lines without control codes, the table, the recipe's path, exit code 0."""
    command = ("-m", "autotune", "tune", str(DIGITS), "--trials", "2", "--out", "run", "--budget")
    ended = with_enough_time(lambda budget: run(*command, f"{budget}s"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    assert_complete(tmp_path / "run")
    assert "\x1b" not in ended.stdout
    assert "\r" not in ended.stdout
    for words in ("digits_mlp", "baseline", "confirm", "samples/s", "speed-up", "Recipe: run/recipe.json"):
        assert words in ended.stdout


def test_a_script_may_tune_the_workload_that_it_holds(run, tmp_path):
    """Called below `__main__` with a Workload object, the file is loaded again by the trials."""
    (tmp_path / "train.py").write_text(
        TINY
        + textwrap.dedent(
            """
            if __name__ == "__main__":
                import sys

                recipe = autotune.tune(workload, budget=sys.argv[1], trials=1, out="run")
                print("verdict", recipe.evidence.verdict)
            """
        )
    )
    ended = with_enough_time(lambda budget: run("train.py", str(budget)))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("verdict ")
    assert assert_complete(tmp_path / "run").workload.name == "train"


def test_a_workload_typed_into_a_session_gets_a_sentence(run, tmp_path):
    """There is no file to load again: what to do is said, and nothing is written."""
    ended = run("-c", TINY + "\nautotune.tune(workload, budget=40, out='run')\n")
    assert ended.returncode == 1
    assert "WorkloadError: the workload was typed into an interactive session" in ended.stderr
    assert "Save it in a file" in ended.stderr
    assert not (tmp_path / "run").exists()


def ends_of_slices(run):
    """When the slices of all trials ended, in seconds of the run."""
    trials = [json.loads(each.read_text()) for each in (run / "trials").glob("*/result.json")]
    pairs = [each[side] for trial in trials for each in trial["pairs"] for side in ("baseline", "candidate")]
    return sorted({each["at"] for each in [*pairs, *(own for trial in trials for own in trial["slices"])]})


def tune_tiny(run, tmp_path, *options, source=TINY):
    """`autotune tune` on a tiny workload that is to fail."""
    (tmp_path / "train.py").write_text(source)
    ended = run("-m", "autotune", "tune", "train.py", *options)
    assert "Traceback (most recent call last)" not in ended.stderr
    assert "\x1b" not in ended.stderr
    return ended


def test_a_budget_too_small_for_the_baseline(run, tmp_path):
    """Exit code 2, a sentence that names a budget, and no run directory."""
    ended = tune_tiny(run, tmp_path, "--budget", "2s", "--out", "runs/one")
    assert ended.returncode == 2
    assert "budget" in ended.stderr.splitlines()[0]
    assert "Give a larger --budget" in ended.stderr or re.search(r"Give --budget \d+s", ended.stderr)
    assert not (tmp_path / "runs").exists()


def test_a_directory_that_cannot_be_written(run, tmp_path):
    """Exit code 2, and the sentence names the directory."""
    (tmp_path / "file").write_text("")
    ended = tune_tiny(run, tmp_path, "--budget", "40s", "--out", "file/run")
    assert ended.returncode == 2
    assert "cannot write to file/run" in ended.stderr


def test_a_run_directory_is_not_overwritten(run, tmp_path):
    """Exit code 2 where --out holds a run already, which stays as it was."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    ended = tune_tiny(run, tmp_path, "--out", "run")
    assert ended.returncode == 2
    assert "holds a run already" in ended.stderr
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["run.json"]


def test_a_baseline_that_crashes(run, tmp_path):
    """Exit code 3; what is known of the trial stays in the run directory."""
    source = TINY.replace("def model():", "def model():\n    __import__('os')._exit(9)")
    ended = tune_tiny(run, tmp_path, "--budget", "40s", "--out", "run", source=source)
    assert ended.returncode == 3
    assert "the baseline itself fails (crashed): ended with exit status 9" in ended.stderr
    history = autotune.load_history(tmp_path / "run")
    assert list(history["outcome"]) == ["crashed"]
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_a_workload_that_cannot_be_used(run, tmp_path):
    """Exit code 2, the sentence, the user's own frames, and nothing half-written."""
    source = TINY.replace("def dataset():", "def dataset():\n    raise OSError('no such table')")
    ended = tune_tiny(run, tmp_path, "--budget", "40s", "--out", "run", source=source)
    assert ended.returncode == 2
    assert "the workload's dataset() raised OSError: no such table" in ended.stderr
    assert "train.py" in ended.stderr
    assert not (tmp_path / "run").exists()


def interrupted(
    tmp_path, environment, *, when: str, budget: int = BUDGET
) -> subprocess.CompletedProcess[str]:
    """`autotune tune` on a tiny workload, told Ctrl-C once it prints `when`; the budget in seconds."""
    (tmp_path / "train.py").write_text(TINY)
    lines = []
    with subprocess.Popen(
        [sys.executable, "-m", "autotune", "tune", "train.py", "--budget", f"{budget}s", "--out", "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if when in line:
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=WAIT_SECONDS)
    assert templates_of(process.pid) == []
    return subprocess.CompletedProcess([], process.returncode, "".join(lines) + out, err)


def test_a_killed_tuner_leaves_no_process_and_its_run_can_be_resumed(tmp_path, environment, run):
    """SIGKILL in the search: its whole family goes, and `--resume` goes on without running a trial again."""
    (tmp_path / "train.py").write_text(TINY)
    with subprocess.Popen(
        [sys.executable, "-m", "autotune", "tune", "train.py", "--budget", "120s", "--out", "run"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert any("probe      1" in line for line in process.stdout)
        family = templates_of(process.pid)
        family += [child for each in family for child in each.children(recursive=True)]
        process.kill()
    assert family
    until(lambda: not any(each.is_running() for each in family), "the killed tuner's family to be gone")
    before, ended_at = autotune.load_history(tmp_path / "run"), ends_of_slices(tmp_path / "run")
    command = ("-m", "autotune", "tune", "train.py", "--resume", "run", "--budget")
    ended = with_enough_time(lambda budget: run(*command, f"{budget}s"))
    assert ended.returncode == 0, ended.stderr
    assert "resumed: " in ended.stdout
    after = autotune.load_history(tmp_path / "run")
    assert set(before["trial"]) <= set(after["trial"])
    assert ends_of_slices(tmp_path / "run")[: len(ended_at)] == ended_at, (
        "later slices come after earlier ones"
    )
    assert (tmp_path / "run" / "recipe.json").exists()
    again = run("-m", "autotune", "tune", "train.py", "--resume", "run")
    assert again.returncode == 2
    assert "has ended: its recipe is" in again.stderr


def test_ctrl_c_during_the_search_winds_up(tmp_path, environment):
    """What was found is confirmed and written (0), or there was nothing yet (130); no process is left."""
    ended = with_enough_time(lambda budget: interrupted(tmp_path, environment, when="search:", budget=budget))
    assert "Traceback (most recent call last)" not in ended.stderr
    assert ended.returncode in (0, 130), ended.stderr
    assert (ended.returncode == 0) == (tmp_path / "run" / "recipe.json").exists()
    assert len(autotune.load_history(tmp_path / "run")) >= 1


@pytest.mark.parametrize("budget", [2, 3 * BUDGET])
def test_ctrl_c_while_the_workload_is_imported(tmp_path, environment, budget):
    """Nothing can be recommended yet: exit code 130 and one sentence, also where the budget is too small."""
    ended = interrupted(tmp_path, environment, when="importing the workload", budget=budget)
    assert "Traceback (most recent call last)" not in ended.stderr
    assert ended.returncode == 130, ended.stdout + ended.stderr
    assert "interrupted" in ended.stderr
    assert not (tmp_path / "run" / "recipe.json").exists()
