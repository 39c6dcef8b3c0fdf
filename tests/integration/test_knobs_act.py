"""Each knob really acts in the trial: what the workload sees there is what the configuration says."""

import pytest
from real_trials import PATIENCE_SECONDS, WORKLOADS, configuration

from autotune.errors import WorkloadError
from autotune.executors.executor import Data, TrialFailed
from autotune.executors.process import TrialProcesses
from autotune.record import Outcome
from autotune.space.knobs import Device
from autotune.tuning.opening import baseline_of
from autotune.tuning.progress import silent
from autotune.workloads.workload import WorkloadReference

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Trials of a workload file with this source, imported once for all tests that ask for it."""
    known = {}

    def trials_of(source):
        if source not in known:
            folder = tmp_path_factory.mktemp("workload")
            (folder / "train.py").write_text(source)
            reference = WorkloadReference(file=str(folder / "train.py"), search_path=(str(folder),))
            processes = TrialProcesses(reference, logs=folder)
            known[source] = processes, processes.open()
        return known[source]

    yield trials_of
    for processes, _ in known.values():
        processes.close()


def test_the_defaults_leave_tensorflow_alone(launch):
    """The baseline sets nothing: TensorFlow's own threads, no prefetch, no options, no XLA on the processor."""
    trial = launch("telling")
    assert trial.warm_up().started.jit_compile is False
    assert trial.printed() == {
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


def test_every_knob_of_the_fork_acts_at_once(launch):
    """Threads, precision, prefetch, data threads, order and steps per call arrive where they act."""
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
        jit_compile=False,
    )
    trial.warm_up()
    said = trial.printed()
    assert (said["intra_op_threads"], said["inter_op_threads"]) == (3, 5)
    assert (said["compute_dtype"], said["variable_dtype"]) == ("bfloat16", "float32")
    assert (said["steps_per_execution"], said["jit_compile"]) == (4, False)
    assert (said["prefetch"], said["data_threads"]) == (6, 7)
    assert (said["deterministic"], said["data_autotune"]) == (False, False)


def test_a_persistent_iterator_is_trained_on(launch):
    """The trial repeats the batches and tells which knobs have another value in force; epochs stay whole."""
    trial = launch("telling", 10, persistent_iterator=True, steps_per_execution=4)
    assert trial.warm_up().started.in_force == {"steps_per_execution": 2, "prefetch": 1}
    said = trial.printed()
    assert (said["steps_per_epoch"], said["steps_per_execution"], said["last"]) == (10, 2, "PrefetchDataset")
    part = trial.measure()
    assert (part.steps, part.examples) == (part.epochs * 10, part.epochs * 100)


@pytest.mark.parametrize("case", ["endless", "generated"])
def test_a_persistent_iterator_cannot_act_without_a_known_length(launch, case):
    """The trial trains as without it, and tells that it is off."""
    trial = launch(case, persistent_iterator=True, steps_per_execution=4)
    assert trial.warm_up().started.in_force == {"persistent_iterator": False}


@pytest.mark.parametrize(("calls", "threads", "at_once"), [(5, 16, 5), (16, 6, 6)])
def test_parallel_calls_run_on_the_private_pool(launch, calls, threads, at_once):
    """As many calls of the user's map run at once as `num_parallel_calls` and `data_threads` both allow."""
    known = Data(examples=32, endless=False)  # counting runs the dataset without the knobs
    trial = launch("crowded", data=known, num_parallel_calls=calls, data_threads=threads)
    trial.warm_up()
    assert trial.printed()["calls_at_once"] == at_once


def test_prefetch_autotune_is_tensorflows_own(launch):
    """`prefetch="autotune"` hands `tf.data.AUTOTUNE` over."""
    trial = launch("telling", prefetch="autotune")
    trial.warm_up()
    assert trial.printed()["prefetch"] == -1


def test_jit_compile_compiles_with_xla(launch):
    """A Python function in the graph trains without XLA, and cannot be compiled with it."""
    assert launch("python_inside", jit_compile=False).warm_up().started.jit_compile is False
    failure = launch("python_inside", jit_compile=True).failure()
    assert failure.outcome is Outcome.ERROR
    assert not failure.input_error
    assert "XLA" in failure.reason + failure.detail + failure.log_tail


def test_jit_compile_is_recorded_as_resolved(launch):
    """True stays true; "auto" means Keras's rule for this model on this device."""
    assert launch("pairs", jit_compile=True).warm_up().started.jit_compile is True
    assert launch("pairs", jit_compile="auto").warm_up().started.jit_compile is False


def test_onednn_is_set_before_tensorflow_is_imported(launch):
    """`onednn=False` gets a template of its own, whose environment says so before the import."""
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


def test_a_file_that_starts_the_runtime_gets_a_fresh_interpreter_per_trial(opened, tmp_path):
    """It is noticed, and the knobs of every stage act all the same."""
    processes, facts = opened(SPAWNED)
    assert (processes.started_by_import, processes.isolation) == ("runtime", "spawn")
    assert facts.batch_size == 16
    assert not processes.apart(configuration(), configuration(onednn=False))  # no parents whose luck they had
    log = tmp_path / "trial.log"
    trial = processes.launch(configuration(intra_op_threads=3, onednn=False), log=str(log), data=None)
    assert trial.warm_up(PATIENCE_SECONDS).started.examples == 64
    part = trial.measure(0.2, PATIENCE_SECONDS)
    assert part.examples == part.epochs * 64
    trial.kill()
    assert "threads 3 0" in log.read_text()


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


def test_a_file_that_starts_a_thread_gets_a_fresh_interpreter_per_trial(processes_of, tmp_path):
    """A fork has none of its parent's threads: who waits for one would wait for ever."""
    processes = processes_of(THREADED)
    processes.open()
    assert (processes.started_by_import, processes.isolation) == ("threads", "spawn")
    trial = processes.launch(configuration(), log=str(tmp_path / "trial.log"), data=None)
    assert trial.warm_up(PATIENCE_SECONDS).started.examples == 64
    trial.kill()


STARTED = "STARTED = tf.constant(1.0) + 1"
SETS = """
import os
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # before TensorFlow, as its documentation says
import keras
import numpy as np
import tensorflow as tf
import autotune

keras.config.set_dtype_policy("mixed_bfloat16")
tf.config.threading.set_intra_op_parallelism_threads(1)
{more}

def model():
    dense = keras.layers.Dense(1)
    print(dense.compute_dtype, tf.config.threading.get_intra_op_parallelism_threads(), flush=True)
    return keras.Sequential([keras.Input((4,)), dense])

def dataset():
    return tf.data.Dataset.from_tensor_slices((np.ones((64, 4)), np.ones((64, 1))))

workload = autotune.Workload(model=model, dataset=dataset, compile=lambda: {{"loss": "mse"}}, batch_size=16)
"""


def test_what_the_file_sets_is_found(opened):
    """Policy, threads and what TensorFlow read while it was imported, as the user would run it."""
    processes, facts = opened(SETS.format(more=""))
    found = facts.in_force
    assert processes.started_by_import is None
    assert (found["precision"], found["intra_op_threads"]) == ("mixed_bfloat16", 1)
    assert (found["inter_op_threads"], found["onednn"]) == (0, False)


def test_a_trial_runs_what_its_configuration_says(opened, tmp_path):
    """Whatever the file sets by being imported: the knobs come after it."""
    processes, _ = opened(SETS.format(more=""))
    log = tmp_path / "trial.log"
    wanted = configuration(precision="float32", intra_op_threads=1, onednn=False)
    trial = processes.launch(wanted, log=str(log), data=None)
    trial.warm_up(PATIENCE_SECONDS)
    trial.kill()
    assert "float32 1" in log.read_text()


def test_what_the_workload_alone_names_is_the_baselines(processes_of, tmp_path):
    """Its file sets nothing, which denies nothing: the baseline, and the trial that runs it, have what it names."""
    named = SETS.format(more="").replace('keras.config.set_dtype_policy("mixed_bfloat16")\n', "")
    named = named.replace(
        "batch_size=16)", "batch_size=16, baseline={'precision': 'mixed_bfloat16', 'onednn': False})"
    )
    processes = processes_of(named)
    facts = processes.open()
    assert facts.in_force["precision"] == "float32"
    baseline = baseline_of(facts, str(tmp_path / "train.py"), Device.CPU, silent)
    log = tmp_path / "trial.log"
    trial = processes.launch(baseline, log=str(log), data=None)
    trial.warm_up(PATIENCE_SECONDS)
    trial.kill()
    assert "bfloat16 1" in log.read_text()


def test_a_file_that_ignores_how_its_children_end_is_trained_all_the_same(processes_of, tmp_path):
    """As one that starts programs may: its trials end, the template learns of it, and goes on to the next."""
    processes = processes_of(SETS.format(more="import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"))
    processes.open()
    assert processes.isolation == "template"
    for _ in range(2):
        trial = processes.launch(configuration(onednn=False), log=str(tmp_path / "trial.log"), data=None)
        trial.warm_up(PATIENCE_SECONDS)
        trial.kill()


def test_threads_that_the_file_has_fixed_cannot_be_had_otherwise(opened, tmp_path):
    """It sets them and starts the runtime: a trial of other threads fails, and is not timed under a wrong name."""
    processes, _ = opened(SETS.format(more=STARTED))
    wanted = configuration(intra_op_threads=2, onednn=False)
    trial = processes.launch(wanted, log=str(tmp_path / "trial.log"), data=None)
    with pytest.raises(TrialFailed, match="intra_op_threads=2 cannot act any more"):
        trial.warm_up(PATIENCE_SECONDS)


def test_a_variable_that_the_file_overwrites_cannot_be_had_otherwise(opened, tmp_path):
    """A trial with oneDNN, of a file that turns it off, fails and says why."""
    processes, _ = opened(SETS.format(more=""))
    trial = processes.launch(configuration(onednn=True), log=str(tmp_path / "trial.log"), data=None)
    with pytest.raises(TrialFailed, match="TF_ENABLE_ONEDNN_OPTS=1"):
        trial.warm_up(PATIENCE_SECONDS)


def test_a_file_that_changes_is_refused_by_fresh_interpreters_too(processes_of, tmp_path):
    """Each of them would read it anew, and candidates be other code than the baseline."""
    processes = processes_of(SPAWNED)
    processes.open()
    (tmp_path / "train.py").write_text(SPAWNED + "\n# changed\n")
    with pytest.raises(WorkloadError, match="the file has changed since the run began"):
        processes.launch(configuration(onednn=False), log=str(tmp_path / "trial.log"), data=None)


def test_layers_at_the_top_of_the_file_keep_their_precision(processes_of, tmp_path):
    """No training code could apply what such a trial would measure: it fails and says why; float32 goes on."""
    processes = processes_of(
        SPAWNED.replace(
            "STARTED = tf.constant(1.0) + 1  # starts the runtime", "LAYER = keras.layers.Rescaling(0.5)"
        )
    )
    processes.open()
    assert processes.isolation == "template"
    trial = processes.launch(
        configuration(precision="mixed_bfloat16"), log=str(tmp_path / "a.log"), data=None
    )
    with pytest.raises(TrialFailed, match="precision=mixed_bfloat16 cannot act any more: layers were built"):
        trial.warm_up(PATIENCE_SECONDS)
    trial = processes.launch(configuration(), log=str(tmp_path / "b.log"), data=None)
    trial.warm_up(PATIENCE_SECONDS)
    trial.kill()


def test_a_file_that_starts_nothing_is_forked(cases):
    """Importing layers and making arrays leaves the runtime alone."""
    processes = cases.processes()
    assert (processes.started_by_import, processes.isolation) == (None, "template")


def test_what_tensorflow_reads_when_imported_asks_for_templates_of_its_own(cases):
    """Their luck stays in a comparison; where only other knobs differ, both are forks of one."""
    processes = cases.processes()
    assert processes.apart(configuration(), configuration(onednn=False))
    assert not processes.apart(configuration(onednn=False), configuration(onednn=False, batch_size=64))


def test_the_shipped_workload_can_be_forked(processes_of):
    """The digits example starts no runtime by being imported."""
    processes = processes_of(WORKLOADS.parents[2] / "examples" / "digits_mlp.py")
    assert processes.open().name == "digits_mlp"
    assert processes.started_by_import is None
