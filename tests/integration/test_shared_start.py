"""Scripts whose data preparation runs once: trials are forked at the first call of TensorFlow's runtime."""

import os
import signal
import uuid
from pathlib import Path

import psutil
import pytest
from real_trials import PATIENCE_SECONDS, is_gone, until

from autotune.data.errors import WorkloadError
from autotune.data.record import Outcome
from autotune.runtime import containment
from autotune.runtime.executor import TrialFailed

PREPARES = """
import os, random, sys, time
import keras
import numpy as np
import tensorflow as tf
with open({counter!r}, "a") as counter:
    counter.write("x")
random.seed(3)
rows = open("rows.csv")
header = [next(rows) for _ in range(32)]
log = open("log.txt", "w")
log.write("prepared")
{more}
time.sleep(1.5)  # in the place of work
"""
FIT = """
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
log.write(" and trained")
log.flush()
x = np.array([[float(row)] * 4 for row in rows], "float32")
print("drawn", random.random(), len(x), x.sum(), open("log.txt").read(), flush=True)
model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=16, epochs=1000, verbose=0)
"""
LOOP = """
optimizer = keras.optimizers.SGD(0.01)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
x = np.array([[float(row) / 96] * 4 for row in rows], "float32")
batches = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(16)

@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss

for epoch in range(2):
    for x, y in batches:
        step(x, y)
"""


@pytest.fixture
def counter():
    """A file that is the real one in contained processes."""
    path = Path("/dev/shm") / f"autotune-test-{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def work(tmp_path_factory):
    """The script's directory; that of the trial's log is the real one in a trial."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def opened(trials_of_script, counter, tmp_path, work, monkeypatch):
    """Trials of a script that prepares data, and then does what the source says."""
    if why := containment.why_unavailable(tmp_path / "layers"):
        pytest.skip(why)
    monkeypatch.chdir(work)
    (work / "rows.csv").write_text("".join(f"{row}\n" for row in range(96)))
    return lambda source, more="": trials_of_script(PREPARES.format(counter=str(counter), more=more) + source)


def drawn(tmp_path):
    """Return what the last trial has printed of its data."""
    return next(line for line in (tmp_path / "trial.log").read_text().splitlines() if line.startswith("drawn"))


@pytest.mark.fast
def test_the_start_runs_once_and_all_trials_continue_from_it(opened, counter, tmp_path, work):
    trials = opened(FIT)
    assert trials.facts.script.shared_seconds > 1.0
    assert trials.facts.script.before_seconds < trials.facts.script.shared_seconds
    seen = []
    for changes in ({}, {"batch_size": 8, "jit_compile": True, "precision": "mixed_bfloat16", "intra_op_threads": 1}):
        (tmp_path / "trial.log").unlink(missing_ok=True)
        trial = trials.launch(**changes)
        warm = trial.warm_up(PATIENCE_SECONDS)
        trial.kill()
        assert warm.started.in_force == {}
        assert warm.started.jit_compile == changes.get("jit_compile", False)
        assert warm.started.examples == 64
        seen.append(drawn(tmp_path))
    assert seen[0] == seen[1]
    assert seen[0].endswith("64 " + str(float(4 * sum(range(32, 96)))) + " prepared and trained")
    assert counter.read_text() == "x"
    assert not (work / "log.txt").exists()


def test_a_loop_of_the_scripts_own_trains_on_beyond_its_epochs(opened, counter):
    trials = opened(LOOP)
    assert trials.facts.script.shared_seconds > 1.0
    assert trials.facts.script.epochs_range is not None
    trial = trials.launch()
    trial.warm_up(PATIENCE_SECONDS)
    assert trial.measure(1.0, PATIENCE_SECONDS).steps > 2 * 4
    trial.kill()
    assert counter.read_text() == "x"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "trials cannot share that, because a pool of threads is in use when train.py, line 16, starts TensorFlow",
        ),
        ("tf.constant(1)", "train.py, line 13, starts TensorFlow: move it below"),
        (
            "os.register_at_fork(after_in_child=rows.close)",
            "because in a fork of it train.py raised ValueError: I/O operation on closed file",
        ),
        (
            "os.register_at_fork(after_in_child=lambda: setattr(os, 'lseek', None))",
            "because TypeError: 'NoneType' object is not callable when train.py, line 16, starts TensorFlow",
        ),
    ],
)
def test_each_trial_runs_from_the_first_line_where_it_must(opened, counter, tmp_path, more, reason):
    trials = opened(FIT, more)
    assert trials.facts.script.shared_seconds == 0.0
    assert reason in trials.facts.script.repeats_start.replace(f"{tmp_path}/", "")
    before = counter.read_text()
    for _ in range(2):  # the first is the process that has surveyed the script
        trial = trials.launch()
        trial.warm_up(PATIENCE_SECONDS)
        trial.kill()
    assert counter.read_text() == f"{before}x"


def test_an_error_in_the_start_is_reported_as_before(opened):
    with pytest.raises(WorkloadError, match=r"train\.py raised KeyError: 'missing'"):
        opened(FIT, "os.environ['missing']")


def test_a_killed_server_is_replaced_and_the_start_run_again(opened, counter):
    trials = opened(FIT)
    trial = trials.launch()
    trial.warm_up(PATIENCE_SECONDS)
    server = psutil.Process(trial.pid).ppid()
    os.kill(server, signal.SIGKILL)
    with pytest.raises(TrialFailed) as caught:
        trial.measure(1.0, PATIENCE_SECONDS)
    assert caught.value.outcome is Outcome.CRASHED
    assert caught.value.reason == "its template process died (killed by SIGKILL)"
    until(lambda: is_gone(trial.pid), "the trial to end")
    later = trials.launch()
    later.warm_up(PATIENCE_SECONDS)
    assert psutil.Process(later.pid).ppid() != server
    later.kill()
    assert counter.read_text() == "xx"
