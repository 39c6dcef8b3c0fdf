"""What a user's file does beside defining a workload: arguments, trainings, pools of processes."""

import pytest
from real_trials import PATIENCE_SECONDS, configuration
from test_end_to_end import TINY

from autotune.data.errors import WorkloadError
from autotune.data.record import Outcome
from autotune.runtime.executor import TrialFailed

WIDE = TINY.replace(
    "def model():",
    """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=1)
ARGS, _ = parser.parse_known_args()


def model():
    print("width", ARGS.width, flush=True)
""",
)


def started(processes, tmp_path):
    """A trial of the workload, warm; returns what it printed."""
    log = tmp_path / "trial.log"
    processes.launch(configuration(), log=str(log), data=None).warm_up(PATIENCE_SECONDS)
    return log.read_text(errors="replace")


def failure(processes, tmp_path):
    """How a trial of the workload fails."""
    with pytest.raises(TrialFailed) as caught:
        started(processes, tmp_path)
    return caught.value


# ------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("place", ["at the top", "in dataset()"])
def test_the_line_of_argparse_is_shown(processes_of, tmp_path, place):
    call = "parser.parse_args()"
    source = WIDE.replace("parser.parse_known_args()", "parser.parse_args(), 0")
    if place == "in dataset()":
        source = WIDE.replace("def dataset():", f"def dataset():\n    {call}")
    processes = processes_of(source, args=("--wdith", "3"))
    if place == "in dataset()":
        processes.open()
        error = failure(processes, tmp_path)
        assert error.input_error
        text = error.reason
    else:
        with pytest.raises(WorkloadError) as caught:
            processes.open()
        error, text = caught.value, caught.value.message
    assert "raised SystemExit: 2 in" in text
    assert "train.py, line " in text
    assert "after `--`" in error.hint
    assert error.detail.splitlines()[-1] == "train.py: error: unrecognized arguments: --wdith 3"


# ------------------------------------------------------------------------------------------------- trainings

TRAINS = {
    "fit": "net.fit(np.ones((8, 4)), np.ones((8, 1)), epochs=10**6, verbose=0)",
    "train_on_batch": "while True:\n    net.train_on_batch(np.ones((8, 4)), np.ones((8, 1)))",
    "a custom loop": """
@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(net(x) ** 2)
    net.optimizer.apply_gradients(zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables))

while True:
    step(tf.ones((8, 4)))
""",
    "a fit whose errors are caught": """
try:
    net.fit(np.ones((8, 4)), np.ones((8, 1)), epochs=10**6, verbose=0)
except Exception as error:
    print("failed", error)
""",
}


@pytest.mark.parametrize("how", TRAINS)
def test_a_training_while_the_file_is_imported_is_refused(processes_of, tmp_path, how):
    source = TINY + '\nnet = model()\nnet.compile("sgd", "mse")\n' + TRAINS[how]
    with pytest.raises(WorkloadError) as caught:
        processes_of(source).open()
    line = caught.value.message.removeprefix(f"{tmp_path / 'train.py'}, line ").partition(":")[0]
    code = source.splitlines()[int(line) - 1]
    assert any(word in code for word in ("fit(", "train_on_batch(", "step(tf.ones"))
    assert caught.value.message.endswith(": trains a model while the file is imported")
    assert '`if __name__ == "__main__":`' in caught.value.hint


def test_training_below_main_and_prediction_are_left_alone(processes_of, tmp_path):
    prepares = """
scale = keras.layers.Normalization()
scale.adapt(np.ones((8, 4)))
net = model()
net.predict(np.ones((8, 4)), verbose=0)
if __name__ == "__main__":
    net.fit(np.ones((8, 4)), np.ones((8, 1)))
"""
    processes = processes_of(TINY + prepares)
    processes.open()
    started(processes, tmp_path)


# ---------------------------------------------------------------------------------------- pools of processes

POOL = """
import multiprocessing


def square(x):
    return x * x


def squares():
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        return pool.map(square, range(4))
"""


@pytest.mark.parametrize(
    ("name", "method"), [("train.py", "forkserver"), ("train.v2.py", "spawn"), ("types.py", "spawn")]
)
def test_processes_that_the_users_code_spawns_find_its_functions(processes_of, tmp_path, method, name):
    source = POOL.format(method=method) + TINY.replace(
        "def dataset():", "def dataset():\n    assert squares() == [0, 1, 4, 9]"
    )
    file = tmp_path / name
    file.write_text(source)
    processes = processes_of(file)
    processes.open()
    started(processes, tmp_path)


def test_want_of_memory_in_a_fresh_interpreter_is_an_outcome(processes_of, tmp_path):
    marker = tmp_path / "marker"
    allocates = f"import os\ntf.constant(1.0) + 1\nif os.path.exists({str(marker)!r}):\n    np.ones(1 << 50)\n"
    processes = processes_of(TINY + allocates)
    processes.open()
    marker.touch()
    error = failure(processes, tmp_path)
    assert (error.outcome, error.input_error) == (Outcome.OOM, False)
