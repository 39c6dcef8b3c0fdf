"""A second run of a script that was edited elsewhere begins with the first one's leaders."""

from pathlib import Path

from test_end_to_end import with_enough_time
from test_scripts_tuned import autotune

from autotune.data.record import Phase
from autotune.data.run_directory import RunDirectory
from autotune.data.runs_on_disk import find_runs
from autotune.space.configuration import Configuration, read_trials

BUDGET = 50
"""Seconds of a run."""
TRAIN = """
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(0).normal(size=(8192, 8)).astype("float32")
model = keras.Sequential([keras.layers.Dense(16), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse")
dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(512).batch(8)
model.fit(dataset, epochs=2, verbose=0)
"""
PARAMETERS = 8 * 16 + 16 + 16 + 1
"""Of the model, which its first step builds."""


def tune(folder: Path, trials: int) -> tuple[RunDirectory, str]:
    """The run that was made below the usual results directory, and what was printed."""
    command = ("tune", "train.py", "--trials", str(trials), "--budget")
    ended = with_enough_time(lambda budget: autotune(folder, *command, f"{budget}s"), BUDGET)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    newest = max(find_runs(folder / "results"), key=lambda run: run.name)  # names begin with the time
    return newest, " ".join(ended.stdout.split())


def test_a_second_run_begins_with_the_leaders_of_the_first(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    first, _ = tune(tmp_path, 2)
    assert first.read_run().leaders == ()
    edited = '"""My training."""\n' + TRAIN.replace("SGD(0.01)", "SGD(0.02)") + 'print("done")\n'
    (tmp_path / "train.py").write_text(edited, encoding="utf-8")
    second, said = tune(tmp_path, 1)
    assert len(find_runs(tmp_path / "results")) == 2
    record = second.read_run()
    assert record.workload.parameters == first.read_run().workload.parameters == PARAMETERS
    assert record.leaders
    assert {leader.run for leader in record.leaders} == {f"train/{first.name}"}
    assert f"starting from the leader{'s' if record.leaders[1:] else ''} of train/{first.name}: " in said
    (tried,) = [trial for trial in read_trials(second) if trial.phase is Phase.SEARCH]
    baseline = Configuration(record.baseline)
    assert Configuration(tried.asked or tried.configuration).differences(baseline) == record.leaders[0].changes
