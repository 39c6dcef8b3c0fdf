"""The main job as a user does it: commands and scripts in processes of their own, and what they leave behind."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
import psutil
import pytest
from real_trials import REPOSITORY, until

import autotune
from autotune import cli

pytestmark = pytest.mark.slow

DIGITS = REPOSITORY / "examples" / "digits_mlp.py"
WAIT_SECONDS = 300.0
COMMAND = """
import sys
from autotune.cli import main

code = main(sys.argv[1:])
assert not {"tensorflow", "keras"} & set(sys.modules), "the tuner's own process imports TensorFlow"
sys.exit(code)
"""
"""`autotune`, which fails where it has loaded TensorFlow."""

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


def start(arguments: Sequence[str], environment: Mapping[str, str], directory: Path) -> subprocess.Popen[str]:
    """Python with these arguments, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=directory,
        start_new_session=True,
    )


def to_its_end(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    *,
    at: str = "",
    number: signal.Signals | None = None,
) -> subprocess.CompletedProcess[str]:
    """What Python gave with these arguments, which has left no process.

    Args:
        arguments: Of Python.
        environment: Its variables.
        directory: Where it runs.
        at: A pattern of a printed line.
        number: The signal that it is sent at that line; None for none.
    """
    lines: list[str] = []
    with start(arguments, environment, directory) as process:
        try:
            if number is not None:
                assert process.stdout is not None
                for line in process.stdout:
                    lines.append(line)
                    if re.search(at, line):
                        process.send_signal(number)
                        break
            out, err = process.communicate(timeout=WAIT_SECONDS)
        finally:
            process.kill()
    assert templates_of(process.pid) == []
    return subprocess.CompletedProcess(arguments, process.returncode, "".join(lines) + out, err)


def templates_of(tuner: int) -> list[psutil.Process]:
    """Templates and trials of a tuner, which stands in their command lines."""
    found = []
    for each in psutil.process_iter(["cmdline"]):
        command = each.info["cmdline"] or []
        if "autotune.trial.template" in command and str(tuner) in command:
            found.append(each)
    return found


def printed_by(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command that reads results prints."""
    assert cli.main([str(each) for each in arguments]) == 0
    return capsys.readouterr().out


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A finished run on real digits."""

    ended: subprocess.CompletedProcess[str]
    directory: Path
    run: Path
    recipe: autotune.Recipe


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, environment) -> Tuned:
    """`autotune tune` on real digits for a minute, in an empty directory."""
    directory = tmp_path_factory.mktemp("digits")
    arguments = ("tune", str(DIGITS), "--budget", "60s", "--out", "run")
    ended = to_its_end(("-c", COMMAND, *arguments), environment, directory)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = directory / "run"
    return Tuned(ended=ended, directory=directory, run=run, recipe=autotune.Recipe.load(run / "recipe.json"))


def test_a_minute_finds_a_faster_configuration(tuned):
    """The verdict is `faster`, in the recipe and in plain lines without control codes; nothing else is written."""
    evidence = tuned.recipe.evidence
    assert evidence.verdict == "faster"
    assert evidence.speedup.ci95[0] > 1 + evidence.min_gain
    assert evidence.confirmation.processes >= 3
    assert tuned.recipe.workload.name == "digits_mlp"
    assert tuned.recipe.workload.examples == 1437
    assert tuned.recipe.baseline["batch_size"] == 32
    assert tuned.ended.stderr == ""
    assert not set(tuned.ended.stdout) & {"\x1b", "\r"}
    for words in ("digits_mlp", "baseline", "search", "confirm", "samples/s", "Recipe: run/recipe.json"):
        assert words in tuned.ended.stdout
    assert [each.name for each in tuned.directory.iterdir()] == ["run"]


def test_a_run_leaves_all_its_files(tuned):
    """A record of the run, a result and a log for each trial, the sampler's study; no temporary file."""
    run = tuned.run
    assert not [each for each in run.rglob(".*") if each.name != ".lock"], "temporary files are left"
    record = json.loads((run / "run.json").read_text())
    assert record["workload"]["device"] == "cpu"
    assert record["baseline"] == dict(tuned.recipe.baseline)
    results = [json.loads(each.read_text()) for each in sorted((run / "trials").glob("*/result.json"))]
    history = autotune.load_history(run)
    assert [each["trial"] for each in results] == list(history["trial"])
    assert list(history["phase"]).count("baseline") == 1
    for each in results:
        assert (run / "trials" / f"{each['trial']:04}" / "log.txt").exists() == (each["instances"] > 0)
    storage = f"sqlite:///{run / 'study.db'}"
    (name,) = optuna.get_all_study_names(storage)
    states = {each.state.name for each in optuna.load_study(study_name=name, storage=storage).trials}
    assert "COMPLETE" in states
    assert states <= {"COMPLETE", "PRUNED", "FAIL"}


TRAINING = """
import json, sys
import autotune
{recipe}
{apply}
sys.path.insert(0, {examples!r})
import digits_mlp

model, dataset = digits_mlp.network(), digits_mlp.training_examples()
arguments = digits_mlp.compile_arguments()
optimizer, loss = arguments["optimizer"], arguments["loss"]
{compile}
history = {fit}
print(json.dumps([model.jit_compile, model.steps_per_execution, history.history["loss"]]))
"""


def test_the_printed_lines_apply_the_recipe(tuned, environment):
    """Pasted into a training in a fresh process, they compile the model as recommended, and it learns."""
    _, lines = tuned.ended.stdout.split("In your training code:\n")
    recipe, apply, compile_, fit = (line.strip() for line in lines.splitlines())
    script = TRAINING.format(
        recipe=recipe,
        apply=apply,
        compile=compile_,
        fit=fit.replace("epochs=…", "epochs=10, verbose=0"),
        examples=str(DIGITS.parent),
    )
    ended = to_its_end(("-W", "error::UserWarning:autotune", "-c", script), environment, tuned.directory)
    assert ended.returncode == 0, ended.stderr
    jit_compile, steps_per_execution, losses = json.loads(ended.stdout)
    assert jit_compile is tuned.recipe.configuration["jit_compile"]
    assert steps_per_execution == tuned.recipe.configuration["steps_per_execution"]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


def test_a_run_is_shown_listed_and_compared(tuned, capsys):
    """`show`, `history` and `compare` read what the run has written."""
    trials = len(autotune.load_history(tuned.run))
    assert f"{trials} trials" in printed_by(capsys, "history", tuned.run)
    assert re.search(r"\bfaster ×\d", printed_by(capsys, "compare", tuned.run))
    assert "×" in printed_by(capsys, "show", tuned.run)


def test_a_finished_run_goes_on_with_more_time(tuned, environment, tmp_path):
    """Its trials stay, none is tried again, and its claim stands or gives way to a faster one."""
    run = shutil.copytree(tuned.run, tmp_path / "run")
    before = autotune.load_history(run)
    arguments = ("tune", str(DIGITS), "--resume", "run", "--budget", "30s")
    ended = to_its_end(("-m", "autotune", *arguments), environment, tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"resumed: {len(before)} trials were finished before" in ended.stdout
    assert set(before["trial"]) <= set(autotune.load_history(run)["trial"])
    assert_nothing_tried_twice(run)
    recipe = autotune.Recipe.load(run / "recipe.json")
    assert recipe.evidence.verdict == "faster"
    assert recipe.evidence.candidates >= tuned.recipe.evidence.candidates


def searched(run: Path) -> list[dict]:
    """The records of the search that were not interrupted."""
    records = [json.loads(each.read_text()) for each in sorted((run / "trials").glob("*/result.json"))]
    return [each for each in records if each["phase"] == "search" and each["outcome"] != "interrupted"]


def assert_nothing_tried_twice(run: Path) -> None:
    """No two trials of the search have the same configuration."""
    tried = [json.dumps(each["configuration"], sort_keys=True) for each in searched(run)]
    assert len(set(tried)) == len(tried)


def test_a_killed_run_goes_on_where_it_was(tmp_path, environment):
    """SIGKILL takes its whole family; `--resume` runs no finished trial again; Ctrl-C ends it with its verdict."""
    script = "\nif __name__ == '__main__':\n    autotune.tune(workload, budget=90, out='run')\n"
    (tmp_path / "train.py").write_text(TINY + script)  # a script may hold the workload that it tunes
    run = tmp_path / "run"
    with start(("train.py",), environment, tmp_path) as process:
        until(
            lambda: process.poll() is not None or (run / "trials" / "0001" / "result.json").exists(),
            "the first candidate",
        )
        family = templates_of(process.pid)
        family += [child for each in family for child in each.children(recursive=True)]
        process.kill()
        _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    assert family
    until(lambda: not any(each.is_running() for each in family), "the killed tuner's family to be gone")
    assert not (run / "recipe.json").exists()
    before = searched(run)

    arguments = ("-m", "autotune", "tune", "train.py", "--resume", "run")
    ended = to_its_end(arguments, environment, tmp_path, at=r" search +\d+ ", number=signal.SIGINT)
    assert "resumed: " in ended.stdout, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    recipe = autotune.Recipe.load(run / "recipe.json")
    assert recipe.evidence.ended_by == "interrupted"
    assert ended.returncode == (0 if recipe.changes else 130)
    assert_nothing_tried_twice(run)
    after = {each["trial"]: each for each in searched(run)}
    for each in before:
        assert after[each["trial"]]["pairs"][: len(each["pairs"])] == each["pairs"]
    assert len(after) > len(before)


def test_a_run_that_is_told_to_end_says_where_it_is(tmp_path, environment):
    """SIGTERM while the workload is imported: exit code 130, and the run directory is named."""
    (tmp_path / "train.py").write_text(TINY)
    arguments = ("-m", "autotune", "tune", "train.py", "--budget", "60s", "--out", "run")
    ended = to_its_end(arguments, environment, tmp_path, at="importing", number=signal.SIGTERM)
    assert ended.returncode == 130, ended.stdout + ended.stderr
    assert "the run is in run, and --resume goes on with it" in ended.stdout
    assert "Traceback" not in ended.stderr
    evidence = autotune.Recipe.load(tmp_path / "run" / "recipe.json").evidence
    assert (evidence.verdict, evidence.ended_by) == ("undecided", "interrupted")


MISTAKES = {
    "a budget that holds no baseline": (
        "__import__('time').sleep(600)",
        ("--budget", "2s", "--out", "runs/one"),
        2,
        "before the baseline was timed",
    ),
    "a directory that cannot be written": ("", ("--out", "train.py/run"), 2, "cannot write to train.py/run"),
    "a directory that holds a run": ("", ("--out", "old"), 2, "holds a run already"),
    "a baseline that crashes": (
        "__import__('os')._exit(9)",
        ("--out", "run"),
        3,
        "the baseline itself fails (crashed): ended with exit status 9",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.replace(" ", "-"))
def test_what_cannot_be_tuned_gets_a_sentence(tmp_path, environment, mistake):
    """The exit code, one sentence, and no run directory; of a baseline that crashed, its record."""
    first_line, options, code, words = MISTAKES[mistake]
    source = TINY.replace("def model():", f"def model():\n    {first_line or 'pass'}")
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text("{}")
    ended = to_its_end(("-m", "autotune", "tune", "train.py", *options), environment, tmp_path)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert words in ended.stderr.splitlines()[0]
    assert "Traceback" not in ended.stderr
    if code == 3:
        assert list(autotune.load_history(tmp_path / "run")["outcome"]) == ["crashed"]
        shutil.rmtree(tmp_path / "run")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["old", "train.py"]
    assert [each.name for each in (tmp_path / "old").iterdir()] == ["run.json"]


def test_a_workload_typed_into_a_session_gets_a_sentence(tmp_path, environment):
    """There is no file to load again: the message says what to do, and nothing is written."""
    script = TINY + "\nautotune.tune(workload, budget=40, out='run')\n"
    ended = to_its_end(("-c", script), environment, tmp_path)
    assert ended.returncode == 1
    assert "WorkloadError: the workload was typed into an interactive session" in ended.stderr
    assert "Save it in a file" in ended.stderr
    assert list(tmp_path.iterdir()) == []
