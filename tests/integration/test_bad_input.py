"""Each mistake in a workload is said in a sentence: what, where, what was expected; with the user's frames only."""

import subprocess
import sys

import pytest
from real_trials import PATIENCE_SECONDS, configuration

from autotune.data.errors import WorkloadError
from autotune.data.record import Outcome
from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import Data
from autotune.runtime.trial_process import IMPORT_SECONDS


@pytest.mark.parametrize(
    ("case", "words", "hint"),
    [
        ("empty", "it is empty", "filter that feeds it"),
        ("already_batched", "yields batches already", "Leave .batch() out"),
        ("scalars_already_batched", "yields batches already", "Leave .batch() out"),
        ("unbuilt_already_batched", "yields batches already", "Leave .batch() out"),
        ("unbuilt_full_batches", "yields batches already", "Leave .batch() out"),
        ("unbuilt_from_python", "yields batches already", "Leave .batch() out"),
        ("four_parts", "tuples of 4, expected (x, y) or (x, y, sample_weight)", "Several inputs go into x"),
        ("generator", "dataset() returned a generator", "from_generator"),
        ("validated_on_a_generator", "validation() returned a list_iterator", "from_generator"),
        ("arrays", "dataset() returned a tuple, expected a tf.data.Dataset", "from_tensor_slices"),
        ("wrong_batches", "yields batches of 10, expected config.batch_size, which is 16", "config.batch_size"),
        ("batched_by_file", "yields batches of 14.0 on average before its last, expected", "Batch last"),
        ("small_files_at_the_end", "yields batches of 14.8 on average before its last", "Batch last"),
        ("validated_for_ever", "validation() is infinite, so validation never ends", "take(N)"),
        ("compiled", "compiled already", "Workload(compile=None)"),
        ("compiled_with_a_knob", "model() compiles with steps_per_execution=8", '{"steps_per_execution": 8}'),
        ("of_keras_2", "a Sequential of Keras 2 (tf_keras), expected a model of Keras 3", "TF_USE_LEGACY_KERAS"),
        ("not_compiled", "not compiled, and Workload(compile=None) leaves that to it", "model.compile()"),
        ("no_model", "model() returned a str, expected a keras.Model", ""),
        ("compile_names_a_knob", "compile() names jit_compile, which is a knob", "'jit_compile': True"),
        ("compile_no_dict", "compile() returned a list", ""),
        ("compile_misspelt", "optimiser", ""),
        ("raising_while_read", "the workload's dataset() raised", ""),
    ],
)
def test_an_unusable_workload_is_an_input_error(build, case, words, hint):
    failed = build(case).failed
    assert words in failed.reason
    assert hint in failed.hint
    assert failed.input_error
    assert failed.outcome is Outcome.ERROR


def test_an_input_of_another_shape_is_told_in_keras_words(build):
    failed = build("ill_fitting").failed
    assert failed.outcome is Outcome.ERROR
    assert "to have value 4" in failed.reason
    assert "(None, 5)" in failed.reason


EXHAUSTED = "the dataset was exhausted by its first pass: the second got nothing"
STRATEGY = "model() builds the model under a {}, but autotune opens the strategy scope itself"


@pytest.mark.parametrize(
    ("case", "knobs", "reason", "hint"),
    [
        *((case, {}, EXHAUSTED, "starts afresh each epoch") for case in ("one_pass", "one_pass_ever")),
        ("three_steps_ever", {}, EXHAUSTED, "starts afresh each epoch"),
        ("validated_by_what_never_ends", {}, "has unknown length and has not ended after", "dataset.take(N)"),
        ("trains_in_model", {}, ": trains a model in model()", ""),
        ("in_a_mirrored_scope", {}, STRATEGY.format("MirroredStrategy"), "tf.distribute"),
        ("in_a_scope_of_one_device", {}, STRATEGY.format("OneDeviceStrategy"), "tf.distribute"),
        ("in_a_global_scope", {}, STRATEGY.format("OneDeviceStrategy"), "tf.distribute"),
        (
            "distributed_already",
            {},
            "dataset() returned a dataset that a tf.distribute strategy has distributed, but autotune opens "
            "the strategy scope itself",
            "tf.distribute",
        ),
    ],
)
def test_what_only_a_training_shows_is_an_input_error_too(launch, case, knobs, reason, hint):
    failure = launch(case, **knobs).failure()
    assert reason in failure.reason
    assert hint in failure.hint
    assert failure.input_error


def test_data_of_unknown_length_gone_after_one_pass_is_refused(launch):
    failure = launch("three_steps_ever", data=Data(examples=None, endless=False)).failure()
    assert (failure.reason, failure.input_error) == (EXHAUSTED, True)


def test_a_batch_size_that_is_ignored_is_found_in_every_trial(build):
    known = Data(examples=100, endless=False)
    assert build("wrong_batches", 10, data=known).failed is None
    failed = build("wrong_batches", 20, data=known).failed
    assert "yields batches of 10, expected config.batch_size, which is 20" in failed.reason


def test_a_precision_that_no_layer_takes_is_refused(launch):
    reason = launch("stubborn", precision="mixed_bfloat16").failure().reason
    assert reason == "precision=mixed_bfloat16 does not act: no layer of the model computes in bfloat16"


@pytest.mark.parametrize(
    ("case", "policy"), [("policy_within", "mixed_bfloat16"), ("policy_with_the_data", "mixed_float16")]
)
def test_a_policy_that_the_workloads_functions_set_is_refused(launch, case, policy):
    failure = launch(case).failure()
    assert failure.reason == (
        f"a function of the workload sets precision to '{policy}', which is a knob: this trial's is 'float32'"
    )
    assert "Workload(baseline={'precision': …})" in failure.hint
    assert failure.input_error
    launch(case, precision=policy).warm_up()


@pytest.mark.parametrize("case", ["policy_for_a_while", "half_precise"])
def test_float32_that_no_layer_computes_in_is_refused(launch, case):
    failure = launch(case).failure()
    assert failure.reason == "precision=float32 does not act: no layer of the model computes in float32"
    assert failure.input_error
    launch(case, precision="mixed_bfloat16").warm_up()


def test_fewer_examples_than_one_batch_with_drop_remainder(build):
    assert "smaller than one batch with drop_remainder" in build("dropping", 128).failed.reason


def test_validation_beside_endless_training_data_is_never_run(build):
    assert build("endless_validated_for_ever").failed is None


@pytest.mark.parametrize("part", ["model", "dataset", "compile"])
def test_an_exception_in_the_users_code_shows_their_frames(build, part):
    failed = build(f"{part}_raises").failed
    assert failed.reason == f"the workload's {part}() raised KeyError: 'missing column'"
    assert failed.input_error
    frames = [line for line in failed.detail.splitlines() if line.startswith('  File "')]
    assert all("workloads/cases.py" in frame for frame in frames)
    assert "in raising" in frames[-2]
    assert "in users_own_function" in frames[-1]
    assert failed.detail.endswith("KeyError: 'missing column'")


USABLE = """
import autotune

def nothing():
    pass

workload = autotune.Workload(model=nothing, dataset=nothing, compile=nothing, batch_size=8)
"""


def test_keras_on_another_backend_is_refused(processes_of):
    source = 'import os\nos.environ["KERAS_BACKEND"] = "numpy"\n' + USABLE
    with pytest.raises(WorkloadError, match=r"Keras uses the backend numpy") as caught:
        processes_of(source).open()
    assert "KERAS_BACKEND=tensorflow" in caught.value.hint


STARTS_AND_RAISES = """
import tensorflow as tf
import autotune

ONE = tf.constant(1.0) + 1

def broken():
    raise KeyError("missing column")

workload = autotune.Workload(model=broken, dataset=broken, compile=broken, batch_size=8)
"""


def test_in_a_fresh_interpreter_the_frames_are_the_users_too(processes_of, tmp_path):
    processes = processes_of(STARTS_AND_RAISES)
    processes.open()
    trial = processes.launch(configuration(), log=str(tmp_path / "trial.log"), data=None)
    with pytest.raises(TrialFailed) as caught:
        trial.warm_up(PATIENCE_SECONDS)
    assert caught.value.reason == "the workload's dataset() raised KeyError: 'missing column'"
    assert caught.value.detail.count('  File "') == 1


def test_a_script_that_waits_for_ever_ends_with_the_budget(tmp_path, environment):
    (tmp_path / "train.py").write_text("import signal\nsignal.pause()\n", encoding="utf-8")
    command = [sys.executable, "-m", "autotune", "tune", "train.py", "--budget", "3s"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=IMPORT_SECONDS / 2
    )
    assert ended.returncode == 2
    assert "train.py did not begin to train within 3 s" in ended.stderr
