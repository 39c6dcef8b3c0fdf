"""Each knob really acts in the trial: what the workload sees there is what the configuration says."""

import pytest
from real_trials import PATIENCE_SECONDS, configuration
from test_long_run import ARRAYS

from autotune.data.errors import WorkloadError
from autotune.data.record import Outcome
from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import Data


def test_the_defaults_leave_tensorflow_alone(build):
    built = build("telling")
    assert built.started.jit_compile is False
    assert built.printed == {
        "intra_op_threads": 0,
        "inter_op_threads": 0,
        "onednn": None,
        "onednn_at_import": None,
        "jit_compile": "auto",
        "steps_per_execution": 1,
        "prefetch": None,
        "data_threads": None,
        "deterministic": None,
        "data_autotune": None,
        "last": "BatchDataset",
        "steps_per_epoch": None,
        "compute_dtype": "float32",
        "variable_dtype": "float32",
    }


@pytest.mark.fast
def test_every_knob_of_the_fork_acts_at_once(launch):
    trial = launch(
        "telling",
        intra_op_threads=3,
        inter_op_threads=5,
        precision="mixed_bfloat16",
        steps_per_execution=4,
        prefetch=6,
        data_threads=7,
        deterministic=False,
        data_autotune=False,
        jit_compile=True,
    )
    assert trial.warm_up().started.jit_compile is True
    said = trial.printed()
    assert (said["intra_op_threads"], said["inter_op_threads"]) == (3, 5)
    assert (said["compute_dtype"], said["variable_dtype"]) == ("bfloat16", "float32")
    assert (said["steps_per_execution"], said["jit_compile"]) == (4, True)
    assert (said["prefetch"], said["data_threads"]) == (6, 7)
    assert (said["deterministic"], said["data_autotune"]) == (False, False)


def test_prefetch_autotune_is_tensorflows_own(build):
    assert build("telling", prefetch="autotune").printed["prefetch"] == -1


def test_a_persistent_iterator_reads_arrays(trials_of_script):
    trial = trials_of_script(ARRAYS).launch(persistent_iterator=True, steps_per_execution=2)
    started = trial.warm_up(PATIENCE_SECONDS).started
    assert "persistent_iterator" not in started.in_force
    assert started.examples == 96


@pytest.mark.parametrize(("calls", "threads", "at_once"), [(5, 16, 5), (16, 6, 6)])
def test_parallel_calls_run_on_the_private_pool(launch, calls, threads, at_once):
    known = Data(examples=32, endless=False)  # counting runs the dataset without the knobs
    trial = launch("crowded", data=known, num_parallel_calls=calls, data_threads=threads)
    trial.warm_up()
    assert trial.printed()["calls_at_once"] == at_once


def test_jit_compile_compiles_with_xla(launch):
    assert launch("python_inside", jit_compile=False).warm_up().started.jit_compile is False
    failure = launch("python_inside", jit_compile=True).failure()
    assert failure.outcome is Outcome.ERROR
    assert not failure.input_error
    assert "XLA" in failure.reason + failure.detail + failure.log_tail


def test_onednn_is_set_before_tensorflow_is_imported(launch):
    trial = launch("telling", onednn=False)
    trial.warm_up()
    assert (trial.printed()["onednn"], trial.printed()["onednn_at_import"]) == ("0", "0")


SPAWNED = """
import os, sys
import keras
import numpy as np
import tensorflow as tf
import autotune

STARTED = tf.constant(1.0) + 1  # starts the runtime

def model():
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    print("threads", threads, os.environ.get("TF_ENABLE_ONEDNN_OPTS"), flush=True)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

def dataset():
    return tf.data.Dataset.from_tensor_slices((np.ones((64, 4)), np.ones((64, 1))))

workload = autotune.Workload(model=model, dataset=dataset, compile=lambda: {"loss": "mse"}, batch_size=16)
"""


def test_a_file_that_starts_the_runtime_gets_fresh_interpreters(processes_of, tmp_path):
    processes = processes_of(SPAWNED)
    facts = processes.open()
    assert (processes.started_by_import, processes.isolation) == ("runtime", "spawn")
    assert facts.batch_size == 16
    assert not processes.needs_different_template(configuration(), configuration(onednn=False))  # none has a parent
    log = tmp_path / "trial.log"
    trial = processes.launch(configuration(intra_op_threads=3, onednn=False), log=str(log), data=None)
    assert trial.warm_up(PATIENCE_SECONDS).started.examples == 64
    part = trial.measure(0.2, PATIENCE_SECONDS)
    assert part.examples == part.epochs * 64
    trial.kill()
    assert "threads 3 0" in log.read_text()
    (tmp_path / "train.py").write_text(SPAWNED + "\n# changed\n")
    with pytest.raises(WorkloadError, match="the file has changed since the run began"):
        processes.launch(configuration(onednn=False), log=str(log), data=None)


THREADED = """
import queue, threading
import keras, numpy as np, tensorflow as tf, autotune

READ = queue.Queue(maxsize=1)

def read():
    while True:
        READ.put(np.ones((64, 4)))

threading.Thread(target=read, daemon=True).start()

def model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

def dataset():
    return tf.data.Dataset.from_tensor_slices((READ.get(), np.ones((64, 1))))

workload = autotune.Workload(model=model, dataset=dataset, compile=lambda: {"loss": "mse"}, batch_size=16)
"""


def test_a_file_that_starts_a_thread_gets_fresh_interpreters(processes_of, tmp_path):
    processes = processes_of(THREADED)
    processes.open()
    assert (processes.started_by_import, processes.isolation) == ("threads", "spawn")
    trial = processes.launch(configuration(), log=str(tmp_path / "trial.log"), data=None)
    assert trial.warm_up(PATIENCE_SECONDS).started.examples == 64
    trial.kill()


SETS = """
import os, signal
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # before TensorFlow, as its documentation says
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as what starts programs may
import keras
import numpy as np
import tensorflow as tf
import autotune

keras.config.set_dtype_policy("mixed_bfloat16")
tf.config.threading.set_intra_op_parallelism_threads(1)

def model():
    dense = keras.layers.Dense(1)
    print(dense.compute_dtype, tf.config.threading.get_intra_op_parallelism_threads(), flush=True)
    return keras.Sequential([keras.Input((4,)), dense])

def dataset():
    return tf.data.Dataset.from_tensor_slices((np.ones((64, 4)), np.ones((64, 1))))

workload = autotune.Workload(model=model, dataset=dataset, compile=lambda: {"loss": "mse"}, batch_size=16)
"""


def test_settings_of_the_file_are_in_force_in_trials(processes_of, tmp_path):
    processes = processes_of(SETS)
    found = processes.open().in_force
    assert (processes.started_by_import, processes.isolation) == (None, "template")
    assert (found["precision"], found["intra_op_threads"]) == ("mixed_bfloat16", 1)
    assert (found["inter_op_threads"], found["onednn"]) == (0, False)
    log = tmp_path / "trial.log"
    for precision, computes_in in (("float32", "float32"), ("mixed_bfloat16", "bfloat16")):
        wanted = configuration(precision=precision, intra_op_threads=1, onednn=False)
        trial = processes.launch(wanted, log=str(log), data=None)
        trial.warm_up(PATIENCE_SECONDS)
        trial.kill()
        assert f"{computes_in} 1" in log.read_text()
    trial = processes.launch(configuration(onednn=True), log=str(log), data=None)
    with pytest.raises(TrialFailed, match="TF_ENABLE_ONEDNN_OPTS=1"):
        trial.warm_up(PATIENCE_SECONDS)


def test_layers_at_the_top_of_the_file_keep_their_precision(processes_of, tmp_path):
    processes = processes_of(
        SPAWNED.replace("STARTED = tf.constant(1.0) + 1  # starts the runtime", "LAYER = keras.layers.Rescaling(0.5)")
    )
    processes.open()
    assert processes.isolation == "template"
    trial = processes.launch(configuration(precision="mixed_bfloat16"), log=str(tmp_path / "a.log"), data=None)
    with pytest.raises(TrialFailed, match="precision=mixed_bfloat16 cannot act any more: the layer Rescaling"):
        trial.warm_up(PATIENCE_SECONDS)
    trial = processes.launch(configuration(), log=str(tmp_path / "b.log"), data=None)
    trial.warm_up(PATIENCE_SECONDS)
    trial.kill()


@pytest.mark.fast
def test_variables_read_at_import_have_templates_of_their_own(cases):
    assert (cases.started_by_import, cases.isolation) == (None, "template")
    assert cases.needs_different_template(configuration(), configuration(onednn=False))
    assert not cases.needs_different_template(configuration(onednn=False), configuration(onednn=False, batch_size=64))
