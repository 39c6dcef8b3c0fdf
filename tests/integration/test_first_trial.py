"""A script with a single `fit` runs once for its survey and the baseline: the survey's process becomes the trial."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_trials import PATIENCE_SECONDS, is_gone, until

from autotune.runtime.executor import WarmUp

SCRIPT = """
import os

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(7)
x = np.random.default_rng(7).normal(size=(96, 4)).astype("float32")
y = x[:, :1] ** 2


def batches():
    while True:
        for start in range(0, 96, 16):
            yield x[start : start + 16], y[start : start + 16]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return x[16 * index : 16 * index + 16], y[16 * index : 16 * index + 16]


model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("sgd", "mse")
with open({runs!r}, "a") as stream:  # not contained, and behind the start, which may run once more
    print(os.getpid(), file=stream)
print("the script trains")
{fit}
"""
FITS = {
    "arrays": "model.fit(x, y, batch_size=16, verbose=0)",
    "dataset": "model.fit(tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96).batch(16).prefetch(2), verbose=0)",
    "generator": "model.fit(batches(), steps_per_epoch=6, verbose=0)",
}
TWO_FITS = "model.fit(x, y, verbose=0)\nmodel.fit(x, y, batch_size=16, epochs=2, verbose=0)"
DRIVER = """
import pathlib, time
from autotune.data.facts import ScriptSettings, WorkloadReference
from autotune.runtime.local import LocalExecutor

script = ScriptSettings(scratch=str(pathlib.Path("scratch").resolve()))
here = pathlib.Path.cwd()
reference = WorkloadReference(file=str(here / "train.py"), search_path=(str(here),), script=script)
executor = LocalExecutor(reference, logs=here)
executor.open()
pathlib.Path("opened").touch()
time.sleep(600)
"""


@pytest.fixture
def runs() -> Iterator[Path]:
    """A file that takes a line from each run of a script: nothing contains what is written there."""
    path = Path(f"/dev/shm/autotune-test-{os.getpid()}.txt")
    path.unlink(missing_ok=True)
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def opened(runs: Path, trials_of_script: Callable[..., Any]) -> Callable[..., Any]:
    """Surveys a script that calls `fit` so."""
    return lambda fit, **options: trials_of_script(SCRIPT.format(runs=str(runs), fit=fit), **options)


def pids(runs: Path) -> list[int]:
    """The processes that have run the script."""
    return [int(line) for line in runs.read_text().splitlines()]


def warm_up(trial: Any) -> WarmUp:
    warm: WarmUp = trial.warm_up(PATIENCE_SECONDS)
    return warm


@pytest.mark.fast
@pytest.mark.parametrize(
    "data", ["arrays", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dataset", "generator"))]
)
def test_the_surveying_process_is_the_first_trial(opened, runs, tmp_path, data):
    trials = opened(FITS[data], profile="all")
    first = trials.launch()
    assert pids(runs) == [first.pid]
    warm = warm_up(first)
    assert pids(runs) == [first.pid]
    assert warm.first_step_seconds >= trials.facts.script.before_seconds
    assert first.measure(0.2, PATIENCE_SECONDS).examples > 0
    assert first.finish(0.1, PATIENCE_SECONDS).peak_host_bytes > 0
    assert is_gone(first.pid)
    assert (tmp_path / "profile").is_dir()
    log = (tmp_path / "trial.log").read_text()
    assert log.count("the script trains") == 1
    second = trials.launch()
    again = warm_up(second)
    assert pids(runs) == [first.pid, second.pid]
    assert warm.started == again.started.model_copy(update={"counting_seconds": warm.started.counting_seconds})
    assert warm.ready.timed_by == again.ready.timed_by
    assert warm.first_loss == pytest.approx(again.first_loss, rel=1e-4)


TRACED = """
def loss(y, predicted):
    print("the loss is traced", flush=True)
    return tf.reduce_mean((y - predicted) ** 2)

model.compile("sgd", loss)
model.fit(x, y, batch_size=16, validation_data=(x[:24], y[:24]), verbose=0)
"""


def test_the_survey_makes_the_first_trial_trace_nothing_twice(opened, tmp_path):
    trials, log, counts = opened(TRACED), tmp_path / "trial.log", []
    for _ in ("the survey's process", "one of its own"):
        trial = trials.launch()
        warm_up(trial)
        trial.kill()
        counts.append(log.read_text().count("the loss is traced"))
        log.unlink()
    assert counts[0] == counts[1] > 0


def test_other_values_are_tried_in_a_fork_of_their_own(opened, runs):
    trials = opened(FITS["arrays"])
    (surveyed,) = pids(runs)
    assert not is_gone(surveyed)
    trial = trials.launch(batch_size=32)
    assert is_gone(surveyed)
    warm_up(trial)
    assert pids(runs) == [surveyed, trial.pid]


@pytest.mark.parametrize(("workers", "count"), [(1, 1), (2, 2)])
def test_batches_of_workers_are_made_in_a_process_of_their_own(opened, runs, workers, count):
    trials = opened(f"model.fit(Batches(workers={workers}), verbose=0)")
    first = trials.launch()
    assert warm_up(first).started.examples == 96
    assert len(pids(runs)) == count


def test_a_process_that_is_killed_while_it_waits_is_replaced(opened, runs):
    trials = opened(FITS["arrays"])
    (surveyed,) = pids(runs)
    os.kill(surveyed, signal.SIGKILL)
    trial = trials.launch()
    warm_up(trial)
    assert pids(runs) == [surveyed, trial.pid]


@pytest.mark.parametrize(("settings", "count"), [({}, 2), ({"fit": 2}, 1)])
def test_of_several_fits_the_wanted_one_is_reached_once(opened, runs, settings, count):
    trials = opened(TWO_FITS, settings=settings)
    assert trials.facts.script.fit == 2
    assert warm_up(trials.launch()).started.examples == 96
    assert len(pids(runs)) == count


def test_it_ends_with_its_driver(runs, tmp_path, environment):
    (tmp_path / "train.py").write_text(SCRIPT.format(runs=str(runs), fit=FITS["arrays"]))
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], cwd=tmp_path, env=environment)
    try:
        until((tmp_path / "opened").exists, "the survey")
        (surveyed,) = pids(runs)
        assert not is_gone(surveyed)
    finally:
        driver.kill()
        driver.wait()
    until(lambda: is_gone(surveyed), "the process that waits to end")
