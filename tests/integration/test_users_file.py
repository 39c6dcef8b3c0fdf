"""What a user's file does beside defining a workload: arguments, trainings, pools of processes, want of memory."""

import json
import subprocess

import pytest
from real_trials import PATIENCE_SECONDS, configuration
from test_end_to_end import SHORT_BUDGET, TINY, to_its_end, with_enough_time

from autotune.data.errors import NoStableConfigurationError, WorkloadError
from autotune.data.record import Outcome
from autotune.runtime.executor import TrialFailed

pytestmark = pytest.mark.slow

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


def test_trials_see_the_files_arguments_in_every_invocation(tmp_path, environment):
    (tmp_path / "train.py").write_text(WIDE)

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return to_its_end(("-m", "autotune", *arguments), environment, tmp_path)

    tune = ("tune", "train.py", "--trials", "1", "--out", "run", "--budget")
    ended = with_enough_time(lambda budget: command(*tune, f"{budget}s", "--", "--width", "3"), SHORT_BUDGET)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["arguments"]["args"] == ["--width", "3"]
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert recipe["workload"]["args"] == ["--width", "3"]
    again = command("tune", "train.py", "--resume", "run", "--budget", "20s")
    assert again.returncode == 0, again.stderr
    logs = [each.read_text(errors="replace") for each in (tmp_path / "run" / "trials").glob("*/log.txt")]
    assert logs
    assert all("width 3" in each for each in logs)
    verified = command("verify", "run/recipe.json", "train.py", "--budget", "60s")
    assert "the file's arguments are --width 3" in verified.stdout


def test_a_program_that_tunes_hands_on_its_own_arguments(tmp_path, environment):
    tunes = f'autotune.tune(workload, budget={SHORT_BUDGET}, trials=1, out="run")'
    below_main = f'\nif __name__ == "__main__":\n    {tunes}\n'
    (tmp_path / "train.py").write_text(WIDE + below_main)
    to_its_end(("train.py", "--width", "3"), environment, tmp_path)
    assert "width 3" in (tmp_path / "run" / "trials" / "0000" / "log.txt").read_text(errors="replace")


@pytest.mark.parametrize("place", ["at the top", "in dataset()"])
def test_the_line_of_argparse_is_shown(processes_of, tmp_path, place):
    call = "parser.parse_args()"
    source = WIDE.replace("parser.parse_known_args()", "parser.parse_args(), 0")
    if place == "in dataset()":
        source = WIDE.replace("def dataset():", f"def dataset():\n    {call}")
    processes = processes_of(source)
    processes._reference = processes._reference.model_copy(update={"args": ("--wdith", "3")})
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


def test_a_training_in_model_is_refused(processes_of, tmp_path):
    trains = "net.fit(np.ones((8, 4)), np.ones((8, 1)), epochs=10**6)"
    source = TINY.replace(
        "    return keras",
        f'    net = keras.Sequential([keras.layers.Dense(1)])\n    net.compile("sgd", "mse")\n    {trains}\n'
        "    return keras",
    )
    processes = processes_of(source)
    processes.open()
    error = failure(processes, tmp_path)
    assert error.reason.endswith(": trains a model in model()")
    assert error.input_error


def test_what_trains_below_main_and_what_only_predicts_is_left_alone(processes_of, tmp_path):
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
    ("name", "method"),
    [
        ("train.py", "spawn"),
        ("train.py", "forkserver"),
        ("my-train.py", "spawn"),
        ("train.v2.py", "spawn"),
        ("train.v2.py", "forkserver"),
        ("types.py", "spawn"),
    ],
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


# -------------------------------------------------------------------------------------------- want of memory

LIMIT = "import resource\nresource.setrlimit(resource.RLIMIT_AS, ({bytes}, {bytes}))\n"


@pytest.mark.parametrize(
    "source",
    [
        LIMIT.format(bytes=700 << 20) + TINY,
        TINY + "\nTABLE = np.ones(1 << 50)\n",
        TINY + "\nraise OSError(12, 'Cannot allocate memory')\n",
    ],
    ids=["TensorFlow does not fit", "the data do not fit", "a library says so"],
)
def test_want_of_memory_while_importing_is_named(processes_of, source):
    with pytest.raises(NoStableConfigurationError) as caught:
        processes_of(source).open()
    assert caught.value.exit_code == 3
    assert caught.value.message.startswith("memory ran out")
    assert "ulimit -v" in caught.value.hint


def test_want_of_memory_in_a_fresh_interpreter_is_an_outcome(processes_of, tmp_path):
    marker = tmp_path / "marker"
    allocates = f"import os\ntf.constant(1.0) + 1\nif os.path.exists({str(marker)!r}):\n    np.ones(1 << 50)\n"
    processes = processes_of(TINY + allocates)
    processes.open()
    marker.touch()
    error = failure(processes, tmp_path)
    assert (error.outcome, error.input_error) == (Outcome.OOM, False)


# ---------------------------------------------------------------------------------------------- tf.distribute


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (
            "return keras",
            'with tf.distribute.MirroredStrategy(["CPU:0"]).scope():\n        return keras',
            "model() builds the model under a MirroredStrategy, and trials open a strategy's scope by themselves",
        ),
        (
            "return keras",
            'with tf.distribute.OneDeviceStrategy("CPU:0").scope():\n        return keras',
            "model() builds the model under a OneDeviceStrategy, and trials open a strategy's scope by themselves",
        ),
        (
            "return keras",
            'tf.distribute.experimental_set_strategy(tf.distribute.OneDeviceStrategy("CPU:0"))\n    return keras',
            "model() builds the model under a OneDeviceStrategy, and trials open a strategy's scope by themselves",
        ),
        (
            "return tf.data.Dataset.from_tensor_slices((np.ones((256, 4)), np.ones((256, 1))))",
            'return tf.distribute.MirroredStrategy(["CPU:0"]).experimental_distribute_dataset('
            "tf.data.Dataset.range(8).batch(2))",
            "dataset() returned a dataset that a tf.distribute strategy has distributed, and trials open a "
            "strategy's scope by themselves",
        ),
    ],
)
def test_a_strategy_in_the_workload_is_refused_in_one_sentence(processes_of, tmp_path, before, after, reason):
    processes = processes_of(TINY.replace(before, after))
    processes.open()
    error = failure(processes, tmp_path)
    assert error.reason == reason
    assert error.input_error
    assert "tf.distribute" in error.hint
