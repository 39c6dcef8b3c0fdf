"""Each mistake in a workload is said in a sentence: what, where, what was expected; with the user's frames only."""

import pytest
from real_trials import configuration

from autotune.errors import WorkloadError
from autotune.executors.executor import Data, TrialFailed
from autotune.record import Outcome

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("case", "words", "hint"),
    [
        ("empty", "it is empty", "filter that feeds it"),
        ("one_pass", "exhausted by its first pass", "starts afresh each epoch"),
        ("one_pass_ever", "exhausted by its first pass", "starts afresh each epoch"),
        ("already_batched", "yields batches already", "Leave .batch() out"),
        ("scalars_already_batched", "yields batches already", "Leave .batch() out"),
        ("four_parts", "tuples of 4, expected (x, y) or (x, y, sample_weight)", "Several inputs go into x"),
        ("arrays", "dataset() returned a tuple, expected a tf.data.Dataset", "from_tensor_slices"),
        ("compiled", "compiled already", "Workload(compile=…)"),
        ("no_model", "model() returned a str, expected a keras.Model", ""),
        ("compile_names_a_knob", "compile() names jit_compile, which is a knob", "'jit_compile': True"),
        ("compile_no_dict", "compile() returned a list", ""),
        ("compile_misspelt", "optimiser", ""),
    ],
)
def test_an_unusable_workload_is_an_input_error(launch, case, words, hint):
    """The sentence names what was found and what was expected, and the hint says what to do."""
    failure = launch(case).failure()
    assert words in failure.reason
    assert hint in failure.hint
    assert failure.input_error
    assert failure.outcome is Outcome.ERROR


def test_an_input_of_another_shape_is_told_in_keras_words(launch):
    """The reason says what was expected and what was found."""
    failure = launch("ill_fitting").failure()
    assert failure.outcome is Outcome.ERROR
    assert "to have value 4" in failure.reason
    assert "(None, 5)" in failure.reason


def test_a_dataset_that_ignores_the_batch_size_is_an_input_error(launch):
    """With `batched=True`, batches of another size than config.batch_size are refused."""
    failure = launch("wrong_batches", workload="batched").failure()
    assert "yields batches of 10, expected config.batch_size, which is 16" in failure.reason
    assert failure.input_error


def test_a_batch_size_that_is_ignored_is_found_in_every_trial(launch):
    """The baseline's size may be the hard-coded one: a candidate's is looked at as well, or it would look faster."""
    known = Data(examples=100, endless=False)
    launch("wrong_batches", 10, workload="batched", data=known).warm_up()
    failure = launch("wrong_batches", 20, workload="batched", data=known).failure()
    assert "yields batches of 10, expected config.batch_size, which is 20" in failure.reason


def test_one_batch_of_it_all_may_be_smaller_than_was_asked_for(launch):
    """100 examples by 128 are one batch of 100, and no mistake of the dataset's."""
    trial = launch("batches", 128, workload="batched", data=Data(examples=100, endless=False))
    trial.warm_up()
    part = trial.measure()
    assert part.examples == 100 * part.epochs


def test_a_precision_that_no_layer_takes_is_refused(launch):
    """Every layer names its own dtype: the trial would be the baseline under another name."""
    failure = launch("stubborn", precision="mixed_bfloat16").failure()
    assert (
        failure.reason == "precision=mixed_bfloat16 does not act: no layer of the model computes in bfloat16"
    )
    launch("stubborn").warm_up()


def test_fewer_examples_than_one_batch_with_drop_remainder(launch):
    """Where dropping the last batch leaves none, that is said."""
    failure = launch("pairs", 128, workload="dropping").failure()
    assert "smaller than one batch with drop_remainder" in failure.reason


@pytest.mark.parametrize(("case", "mean"), [("batched_by_file", 14.0), ("small_files_at_the_end", 14.8)])
def test_batches_of_several_sizes_are_refused(launch, case, mean):
    """Steps count for a whole batch each: files that are batched one by one would look faster at larger batches."""
    failure = launch(case, workload="batched").failure()
    assert failure.reason.startswith(
        f"dataset(config) with batched=True yields batches of {mean} on average before its last, expected "
    )
    assert failure.input_error


def test_a_few_small_batches_are_no_reason_to_refuse(launch):
    """Where they hardly change what a step holds, as with data that is sorted into buckets by length."""
    assert launch("a_few_small_ones", workload="batched").warm_up().started.examples == 3_000


def test_a_validation_without_an_end_is_refused(launch):
    """The training would never see its second epoch; beside training data without an end it is never run."""
    failure = launch("pairs", workload="validated_for_ever").failure()
    assert failure.reason == "validation() has no end, so the first epoch's validation has none either"
    assert failure.input_error
    launch("endless", workload="validated_for_ever").warm_up()


@pytest.mark.parametrize("part", ["model", "dataset", "compile"])
def test_an_exception_in_the_users_code_shows_their_frames(launch, part):
    """The detail is a traceback of their file alone: none of autotune's, Keras's or Python's frames."""
    failure = launch(f"{part}_raises").failure()
    assert failure.reason == f"the workload's {part}() raised KeyError: 'missing column'"
    assert failure.input_error
    frames = [line for line in failure.detail.splitlines() if line.startswith('  File "')]
    assert all("workloads/cases.py" in frame for frame in frames)
    assert "in raising" in frames[-2]
    assert "in users_own_function" in frames[-1]
    assert failure.detail.endswith("KeyError: 'missing column'")


def test_an_exception_while_the_data_is_read_shows_the_cause(launch):
    """A generator that fails half-way is the user's to mend, and their exception is named."""
    failure = launch("raising_while_read").failure()
    assert failure.input_error
    assert "missing column" in failure.reason + failure.detail
    assert "dataset() raised" in failure.reason


USABLE = """
import autotune

def nothing():
    pass

workload = autotune.Workload(model=nothing, dataset=nothing, compile=nothing, batch_size=8)
"""


def test_a_syntax_error_in_a_file_that_the_users_file_imports(processes_of, tmp_path):
    """The file is named, and its line."""
    (tmp_path / "layers.py").write_text("def broken(:\n")
    with pytest.raises(WorkloadError, match=r"raised SyntaxError") as caught:
        processes_of("import layers\n" + USABLE).open()
    assert "layers.py" in caught.value.detail


def test_an_exception_at_import_shows_the_users_frames(processes_of):
    """Their line, none of the import machinery's."""
    source = USABLE + "\ndef load_table():\n    return {}['labels']\n\nTABLE = load_table()\n"
    with pytest.raises(WorkloadError, match=r"importing .*train\.py raised KeyError: 'labels'") as caught:
        processes_of(source).open()
    frames = [line for line in caught.value.detail.splitlines() if line.startswith('  File "')]
    assert len(frames) == 2
    assert all("train.py" in frame for frame in frames)


def test_a_file_that_exits_at_import_is_said_to(processes_of):
    """`sys.exit()` at the top level ends the template, not the tuner."""
    with pytest.raises(WorkloadError, match="raised SystemExit"):
        processes_of("import sys\n" + USABLE + "\nsys.exit(3)\n").open()


def test_keras_on_another_backend_is_refused(processes_of):
    """A trial's steps are TensorFlow's: the sentence says what was found, and what to set."""
    source = 'import os\nos.environ["KERAS_BACKEND"] = "numpy"\n' + USABLE
    with pytest.raises(WorkloadError, match=r"Keras runs on numpy here, expected tensorflow") as caught:
        processes_of(source).open()
    assert "KERAS_BACKEND=tensorflow" in caught.value.hint


def test_a_file_that_tunes_when_imported_is_refused(processes_of):
    """Each trial would start a tuner: the sentence says where the call belongs."""
    with pytest.raises(WorkloadError, match=r"calls autotune\.tune\(\) while it is being imported") as caught:
        processes_of(USABLE + "\nautotune.tune(workload, budget=60)\n").open()
    assert '__name__ == "__main__"' in caught.value.hint


def test_a_name_that_holds_something_else(processes_of):
    """The type that was found and the one that was expected."""
    with pytest.raises(WorkloadError, match=r"is a int, expected an autotune\.Workload"):
        processes_of("workload = 3\n").open()


STARTS_AND_RAISES = """
import tensorflow as tf
import autotune

ONE = tf.constant(1.0) + 1

def broken():
    raise KeyError("missing column")

workload = autotune.Workload(model=broken, dataset=broken, compile=broken, batch_size=8)
"""


def test_in_a_fresh_interpreter_the_frames_are_the_users_too(processes_of, tmp_path):
    """Isolation by spawning changes nothing about what is said."""
    processes = processes_of(STARTS_AND_RAISES)
    processes.open()
    trial = processes.launch(configuration(), log=str(tmp_path / "trial.log"), data=None)
    with pytest.raises(TrialFailed) as caught:
        trial.warm_up(60.0)
    assert caught.value.reason == "the workload's dataset() raised KeyError: 'missing column'"
    assert caught.value.detail.count('  File "') == 1
