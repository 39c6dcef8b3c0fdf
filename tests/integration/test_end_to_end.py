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

DIGITS = REPOSITORY / "examples" / "digits_mlp.py"
WAIT_SECONDS = 900.0
BUDGET, SHORT_BUDGET = 40, 20
"""Seconds of a run on real digits, and of one on a tiny workload."""
"""How long the processes of a tuner that has ended may live."""
MOST_REFUSALS = 4
"""Budgets in a row that do not hold the baseline, each thrice the one before."""

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
    assert_nothing_left(process.pid)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def with_enough_time(
    start: Callable[[int], subprocess.CompletedProcess[str]],
    budget: int,
    *,
    enough: Callable[[subprocess.CompletedProcess[str]], bool] = lambda ended: True,
) -> subprocess.CompletedProcess[str]:
    """A run with this budget in seconds, or with more where a busy machine takes longer over the baseline, or it all.

    `enough` tells whether a run that was not refused had time for what is asked of it.
    """
    for _ in range(MOST_REFUSALS):
        ended = start(budget)
        if not re.search(r"Give (a larger )?--budget", ended.stderr) and enough(ended):
            break
        budget *= 3
    return ended


def assert_nothing_left(tuner: int) -> None:
    """No process of a tuner that has ended is there any more, soon after its end."""
    until(lambda: templates_of(tuner) == [], "the tuner's processes to end")


def templates_of(tuner: int) -> list[psutil.Process]:
    """Templates and trials of a tuner, which stands in their command lines."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "autotune.runtime.template" in command and str(tuner) in command:
            found.append(process)
    return found


@pytest.fixture
def run(tmp_path, environment):
    """Runs Python in an empty directory, waits for it to end, and sees that nothing of it is left."""

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        return to_its_end(arguments, environment, tmp_path)

    return start


# ------------------------------------------------------------------------------------------------- one run

TUNE = """
    import sys
    from autotune.front.cli import main

    code = main(["tune", {workload!r}, "--trials", "2", "--out", "run", "--budget", sys.argv[1]])
    assert not {{"tensorflow", "keras"}} & set(sys.modules)
    sys.exit(code)
"""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, environment):
    """One run of the command on real digits, which all tests of this part look at: what it gave, and where."""
    folder = tmp_path_factory.mktemp("tuned")
    script = textwrap.dedent(TUNE.format(workload=str(DIGITS)))
    ended = with_enough_time(lambda budget: to_its_end(("-c", script, f"{budget}s"), environment, folder), BUDGET)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended, folder


@pytest.mark.fast
def test_the_command_prints_lines_a_table_and_the_recipes_path(tuned):
    ended, folder = tuned
    assert ended.stderr == ""
    assert "\x1b" not in ended.stdout
    assert "\r" not in ended.stdout
    for words in ("digits_mlp", "baseline", "search", "samples/s", "Page: run/report.html"):
        assert words in ended.stdout
    assert [path.name for path in folder.iterdir()] == ["run"]


@pytest.mark.fast
def test_a_run_leaves_a_recipe_a_study_and_a_history(tuned):
    _, folder = tuned
    recipe = assert_complete(folder / "run")
    assert recipe.workload.name == "digits_mlp"
    assert recipe.workload.examples == 1437
    assert recipe.baseline["batch_size"] == 32


def assert_complete(run: Path) -> autotune.Recipe:
    """A run directory has all its files, each readable by what it is for; its recipe."""
    assert not [path for path in run.rglob(".*") if path.name != ".lock"], "temporary files are left"
    recipe = autotune.Recipe.load(run / "recipe.json")
    record = json.loads((run / "run.json").read_text())
    assert record["schema_version"] == 1
    assert record["workload"]["device"] == "cpu"
    assert record["baseline"] == dict(recipe.baseline)
    history = autotune.load_history(run)
    results = sorted((run / "trials").glob("*/result.json"))
    assert len(history) == len(results) >= 2
    assert [json.loads(result.read_text())["trial"] for result in results] == list(history["trial"])
    assert (history["phase"] == "baseline").sum() == 1
    assert history["throughput"].iloc[0] > 0
    for result in results:
        started = json.loads(result.read_text())["instances"] > 0
        assert (result.parent / "log.txt").exists() == started
    storage = f"sqlite:///{run / 'study.db'}"
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)
    assert {trial.state.name for trial in study.trials} <= {"COMPLETE", "PRUNED", "FAIL"}
    return recipe


def test_its_recipe_trains(tuned, environment):
    _, folder = tuned
    script = REPOSITORY / "examples" / "train_with_recipe.py"
    ended = to_its_end((str(script), "run/recipe.json"), environment, folder)
    assert ended.returncode == 0, ended.stderr
    assert "MachineMismatchWarning" not in ended.stderr
    assert re.search(r"samples/s \d+", ended.stdout)
    accuracy = re.search(r"held-out accuracy (\S+)", ended.stdout)
    assert accuracy
    assert float(accuracy[1]) >= 0.95


# ------------------------------------------------------------------------------------------------ from Python


def test_a_script_may_tune_the_workload_that_it_holds(run, tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys\n"
        + TINY.replace("def model():", "def model():\n    print('arguments', sys.argv[1:], flush=True)")
        + textwrap.dedent(
            """
            if __name__ == "__main__":
                recipe = autotune.tune(workload, budget=sys.argv[1], trials=1, out="run")
                assert recipe == autotune.Recipe.load("run/recipe.json")
                print("verdict", recipe.evidence.verdict)
            """
        )
    )
    ended = with_enough_time(lambda budget: run("train.py", f"{budget}s"), SHORT_BUDGET)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("verdict ")
    log = (tmp_path / "run" / "trials" / "0000" / "log.txt").read_text(errors="replace")
    assert re.search(r"arguments \['\d+s'\]", log), "trials have the program's own arguments"
    assert assert_complete(tmp_path / "run").workload.name == "train"


# ---------------------------------------------------------------------------------------- ended from outside


@pytest.fixture
def tuner(tmp_path, environment):
    """Starts `autotune tune` on a tiny workload, and reads what it prints up to a line that holds some words."""
    (tmp_path / "train.py").write_text(TINY)
    started = []

    def start(words: str, budget: str) -> tuple[subprocess.Popen[str], str]:
        command = ("tune", "train.py", "--budget", budget, "--out", "run")
        process = subprocess.Popen(
            [sys.executable, "-m", "autotune", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tmp_path,
            start_new_session=True,
        )
        started.append(process)
        printed = ""
        for line in process.stdout:
            printed += line
            if words in line:
                return process, printed
        pytest.fail(f"the tuner ended without printing {words!r}: {printed}{process.stderr.read()}")

    yield start
    for process in started:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[str], printed: str, number: signal.Signals) -> tuple[str, str]:
    """All that a tuner prints that is sent a signal, on both channels; it has left no process."""
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_SECONDS)
    assert_nothing_left(process.pid)
    assert "Traceback (most recent call last)" not in err
    return printed + out, err


def test_a_run_that_is_told_to_stop_gives_the_verdict_it_has(tuner, tmp_path):
    process, printed = tuner("search ", "10m")
    out, err = told(process, printed, signal.SIGTERM)
    assert "the measurements are in run" in out
    assert "--resume" in out
    recipe = autotune.Recipe.load(tmp_path / "run" / "recipe.json")
    assert recipe.evidence.ended_by == "interrupted"
    assert recipe.evidence.verdict in ("undecided", "faster")
    assert process.returncode == (0 if recipe.changes else 130), out + err


def test_ctrl_c_while_the_workload_is_imported(tuner, tmp_path):
    process, printed = tuner("importing the workload", "10m")
    _, err = told(process, printed, signal.SIGINT)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Nothing was measured yet" in err
    assert not (tmp_path / "run").exists()


def test_a_killed_run_keeps_what_it_finished_and_can_be_resumed(tuner, tmp_path, run):
    process, _ = tuner("search     1", "10m")
    family = templates_of(process.pid)
    family += [child for each in family for child in each.children(recursive=True)]
    process.kill()
    assert family
    until(lambda: not any(each.is_running() for each in family), "the killed tuner's family to be gone")
    before, ended_at = autotune.load_history(tmp_path / "run"), ends_of_slices(tmp_path / "run")
    assert list(before["phase"]) == ["baseline", "search"]
    command = ("-m", "autotune", "tune", "train.py", "--resume", "run", "--budget")
    ended = with_enough_time(lambda budget: run(*command, f"{budget}s"), SHORT_BUDGET)
    assert ended.returncode == 0, ended.stderr
    assert "resumed: " in ended.stdout
    after = assert_complete(tmp_path / "run")
    assert after.evidence.candidates >= 1
    assert ends_of_slices(tmp_path / "run")[: len(ended_at)] == ended_at, "later slices come later"


def ends_of_slices(run: Path) -> list[float]:
    """When the slices of all trials ended, in seconds of the run."""
    trials = [json.loads(path.read_text()) for path in (run / "trials").glob("*/result.json")]
    pairs = [pair[side] for trial in trials for pair in trial["pairs"] for side in ("baseline", "candidate")]
    return sorted({each["at"] for each in [*pairs, *(own for trial in trials for own in trial["slices"])]})
