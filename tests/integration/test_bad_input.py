"""Each mistake in a workload is said in a sentence: what, where, what was expected; with the user's frames only."""

import subprocess
import sys

import pytest
from real_trials import PATIENCE_SECONDS, configuration

from autotune.data.errors import WorkloadError
from autotune.data.record import Outcome
from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import Data
from autotune.runtime.template_process import IMPORT_SECONDS


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
        ("validated_for_ever", "validation() has no end, so the first epoch's validation has none", "take(N)"),
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
    """The sentence names what was found and what was expected, and the hint says what to do."""
    failed = build(case).failed
    assert words in failed.reason
    assert hint in failed.hint
    assert failed.input_error
    assert failed.outcome is Outcome.ERROR


def test_an_input_of_another_shape_is_told_in_keras_words(build):
    """The reason says what was expected and what was found."""
    failed = build("ill_fitting").failed
    assert failed.outcome is Outcome.ERROR
    assert "to have value 4" in failed.reason
    assert "(None, 5)" in failed.reason


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one_pass", "one_pass_ever"])
def test_data_that_is_gone_after_one_pass_is_an_input_error(launch, case):
    """Whether it is made when the file is imported or by each call of dataset(): only a second epoch shows it."""
    failure = launch(case).failure()
    assert "exhausted by its first pass" in failure.reason
    assert "starts afresh each epoch" in failure.hint
    assert failure.input_error


@pytest.mark.slow
def test_validation_that_never_ends_is_an_input_error(launch):
    """Its dataset does not say so, and short epochs are timed with their validation."""
    failure = launch("validated_by_what_never_ends").failure()
    assert "validation(): the validation has unknown length and has not ended after" in failure.reason
    assert "dataset.take(N)" in failure.hint
    assert failure.input_error


def test_a_batch_size_that_is_ignored_is_found_in_every_trial(build):
    """The baseline's size may be the hard-coded one: a candidate's is looked at as well, or it would look faster."""
    known = Data(examples=100, endless=False)
    assert build("wrong_batches", 10, data=known).failed is None
    failed = build("wrong_batches", 20, data=known).failed
    assert "yields batches of 10, expected config.batch_size, which is 20" in failed.reason


@pytest.mark.slow
def test_a_precision_that_no_layer_takes_is_refused(launch):
    """Every layer names its own dtype: the trial would be the baseline under another name."""
    reason = launch("stubborn", precision="mixed_bfloat16").failure().reason
    assert reason == "precision=mixed_bfloat16 does not act: no layer of the model computes in bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "policy"), [("policy_within", "mixed_bfloat16"), ("policy_with_the_data", "mixed_float16")]
)
def test_a_policy_that_the_workloads_functions_set_is_refused(launch, case, policy):
    """The baseline would be called float32, and compute in something else."""
    failure = launch(case).failure()
    assert failure.reason == (
        f"a function of the workload sets precision to '{policy}', which is a knob: this trial's is 'float32'"
    )
    assert "Workload(baseline={'precision': …})" in failure.hint
    assert failure.input_error
    launch(case, precision=policy).warm_up()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["policy_for_a_while", "half_precise"])
def test_float32_that_no_layer_computes_in_is_refused(launch, case):
    """What layers compute in once they are built is what counts, and not the policy before or after."""
    failure = launch(case).failure()
    assert failure.reason == "precision=float32 does not act: no layer of the model computes in float32"
    assert failure.input_error
    launch(case, precision="mixed_bfloat16").warm_up()


def test_fewer_examples_than_one_batch_with_drop_remainder(build):
    """Where dropping the last batch leaves none, that is said."""
    assert "smaller than one batch with drop_remainder" in build("dropping", 128).failed.reason


def test_validation_beside_training_data_without_an_end_is_never_run(build):
    """It may be endless, too."""
    assert build("endless_validated_for_ever").failed is None


@pytest.mark.parametrize("part", ["model", "dataset", "compile"])
def test_an_exception_in_the_users_code_shows_their_frames(build, part):
    """The detail is a traceback of their file alone: none of autotune's, Keras's or Python's frames."""
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


@pytest.mark.slow
def test_an_exception_at_import_shows_the_users_frames(processes_of):
    """Their line, none of the import machinery's."""
    source = USABLE + "\ndef load_table():\n    return {}['labels']\n\nTABLE = load_table()\n"
    with pytest.raises(WorkloadError, match=r"importing .*train\.py raised KeyError: 'labels'") as caught:
        processes_of(source).open()
    frames = [line for line in caught.value.detail.splitlines() if line.startswith('  File "')]
    assert len(frames) == 2
    assert all("train.py" in frame for frame in frames)


@pytest.mark.slow
def test_keras_on_another_backend_is_refused(processes_of):
    """A trial's steps are TensorFlow's: the sentence says what was found, and what to set."""
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


@pytest.mark.slow
def test_in_a_fresh_interpreter_the_frames_are_the_users_too(processes_of, tmp_path):
    """Isolation by spawning changes nothing about what is said."""
    processes = processes_of(STARTS_AND_RAISES)
    processes.open()
    trial = processes.launch(configuration(), log=str(tmp_path / "trial.log"), data=None)
    with pytest.raises(TrialFailed) as caught:
        trial.warm_up(PATIENCE_SECONDS)
    assert caught.value.reason == "the workload's dataset() raised KeyError: 'missing column'"
    assert caught.value.detail.count('  File "') == 1


def test_a_script_that_waits_for_ever_ends_with_the_budget(tmp_path, environment):
    """It is said that it has not begun to train, long before an import would be given up."""
    (tmp_path / "train.py").write_text("import signal\nsignal.pause()\n", encoding="utf-8")
    command = [sys.executable, "-m", "autotune", "tune", "train.py", "--budget", "3s"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=IMPORT_SECONDS / 2
    )
    assert ended.returncode == 2
    assert "train.py did not begin to train within 3 s" in ended.stderr
