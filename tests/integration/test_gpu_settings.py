"""Settings of GPUs, as far as TensorFlow takes them on a processor: flags, variables, passes, prefetch to a device."""

import mmap
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

from autotune.machine.gpu import missing_xla_flags
from autotune.space.knobs import GPU_KNOBS, KNOBS, Domain, Knob, Stage
from autotune.space.variables import NOT_READ, REFUSED, variable_fields


@pytest.fixture
def run(run_code):
    """Runs code with these variables; returns the lines that it printed, and its errors."""

    def start(script: str, **variables: str) -> tuple[list[str], str]:
        ended = run_code(script, TF_CPP_MIN_LOG_LEVEL="0", **variables)
        return ended.stdout.splitlines(), ended.stderr

    return start


def test_the_installed_binary_is_asked_for_its_flags():
    unknown = Knob(
        name="xla_gpu_of_another_version",
        summary="none",
        domain=Domain(booleans=True),
        stage=Stage.START,
        **variable_fields("XLA_FLAGS", {False: "false", True: "true"}, False, flag="xla_gpu_of_another_version"),
    )
    names = [knob.name for knob in GPU_KNOBS if knob.variable == "XLA_FLAGS"]
    with mock.patch.dict(KNOBS, {unknown.name: unknown}):
        assert list(missing_xla_flags([*names, unknown.name])) == [unknown.name]


def test_the_variables_of_the_table_stand_in_the_binary():
    spec = find_spec("tensorflow")
    assert spec is not None
    assert spec.origin is not None
    names = {knob.variable for knob in GPU_KNOBS if knob.variable} | {
        name for name in REFUSED if name.startswith("TF_")
    }
    found = set()
    for library in Path(spec.origin).parent.glob("libtensorflow_*.so.*"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            found |= {each for each in (*names, *NOT_READ) if content.find(each.encode()) >= 0}
    assert found == names


CLUSTERS = """
import tensorflow as tf
from autotune.recipe import apply

apply.apply_before_build({{"xla_auto_clustering": {on}}})
function = tf.function(lambda x: tf.reduce_sum(tf.tanh(tf.matmul(x, x) + x) * x))
for _ in range(3):
    print(float(function(tf.ones((8, 8)))))
"""


@pytest.mark.parametrize("on", [False, True])
def test_auto_clustering_acts_beside_the_users_flags(run, on):
    printed, errors = run(CLUSTERS.format(on=on), TF_XLA_FLAGS="--tf_xla_cpu_global_jit")
    assert len(printed) == 3
    assert ("Compiled cluster using XLA" in errors) is on


def test_passes_of_grappler_are_accepted(run):
    names = [knob.name for knob in GPU_KNOBS if knob.stage is Stage.RUNTIME]
    printed, _ = run(
        f"""
        import tensorflow as tf
        from autotune.recipe import apply
        from autotune.space.knobs import KNOBS
        names = {names!r}
        print([KNOBS[name].read(tf) for name in names])
        apply.apply_before_build(dict.fromkeys(names, False))
        print([KNOBS[name].read(tf) for name in names])
        """
    )
    assert printed == [str([True] * len(names)), str([False] * len(names))]


def test_batches_are_prefetched_to_a_device_and_trained_on(run):
    printed, _ = run(
        """
        import dataclasses
        import keras, numpy as np, tensorflow as tf
        from autotune.recipe import apply
        from autotune.space.configuration import Configuration
        from autotune.space.knobs import KNOBS

        knob = KNOBS["prefetch_to_device"]  # on the only device that there is
        depths = []

        def to_processor(batches, depth):
            depths.append(depth)
            return knob.set(batches, depth, "/CPU:0")

        KNOBS[knob.name] = dataclasses.replace(knob, set=to_processor)
        x = np.arange(96.0).reshape(24, 4)
        for persistent in (False, True):
            configuration = Configuration(
                {"batch_size": 4, "prefetch": 2, "prefetch_to_device": 2, "persistent_iterator": persistent}
            )
            train = apply.training_pipeline(tf.data.Dataset.from_tensor_slices((x, x[:, :1])), configuration)
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            model.fit(**train.fit_args, epochs=2, verbose=0)
            print(int(model.optimizer.iterations), depths)
        """
    )
    assert printed == ["12 []", "12 [2]"]


def test_a_users_cache_of_autotuning_is_not_taken_over(processes_of, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_per_fusion_autotune_cache_dir={tmp_path} --xla_gpu_autotune_level=4")
    processes = processes_of(SAYS)
    processes.open()
    from real_trials import PATIENCE_SECONDS, configuration

    log = tmp_path / "trial.log"
    trial = processes.launch(configuration(), log=str(log), data=None)
    trial.warm_up(PATIENCE_SECONDS)
    trial.kill()
    said = log.read_text().splitlines()
    assert "flags --xla_gpu_autotune_level=4" in said
    assert [line for line in said if line.startswith("traced")][-1] == "traced ''"


SAYS = """
import os
os.environ["TF_XLA_FLAGS"] = "--tf_xla_persistent_cache_directory=/nowhere"  # as a user's file may
import keras, numpy as np, tensorflow as tf, autotune

def seen(values):
    print("traced", repr(os.environ["TF_XLA_FLAGS"]), flush=True)
    return values

def model():
    print("flags", os.environ["XLA_FLAGS"], flush=True)
    return keras.Sequential([keras.Input((4,)), keras.layers.Lambda(seen), keras.layers.Dense(1)])

def dataset():
    return tf.data.Dataset.from_tensor_slices((np.ones((64, 4)), np.ones((64, 1))))

workload = autotune.Workload(model=model, dataset=dataset, compile=lambda: {"loss": "mse"}, batch_size=16)
"""
