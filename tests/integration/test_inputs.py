"""Every kind of input that a workload may have is trained on, and its examples are counted exactly."""

import subprocess
import sys
import time

import pytest
from real_trials import PATIENCE_SECONDS

from autotune.executors.executor import Data
from autotune.tuning.seat import INPUT_WAIT_SECONDS
from autotune.tuning.slicing import SLICE_SECONDS
from autotune.worker.messages import TrialRequest

pytestmark = pytest.mark.slow

STEPS_PER_EPOCH = 7
"""100 examples in batches of 16."""


def assert_whole_epochs(warm, part, *, examples=100, steps=STEPS_PER_EPOCH):
    """Whole epochs were timed, each of so many examples and optimizer steps."""
    assert warm.ready.timed_by == "epochs"
    assert part.epochs >= 1
    assert (part.examples, part.steps) == (part.epochs * examples, part.epochs * steps)


@pytest.mark.parametrize(
    "case",
    [
        *("pairs", "tuples", "dicts", "weighted"),
        *("in_another_order", "pictures_with_a_channel", "scalars"),
    ],
)
def test_the_shape_of_an_element_does_not_matter(launch, case):
    """Several inputs as a tuple, a dict, by name; a last axis of 1 more or less; sample weights: what Keras takes."""
    trial = launch(case)
    warm = trial.warm_up()
    assert (warm.started.examples, warm.started.endless) == (100, False)
    assert_whole_epochs(warm, trial.measure())


def test_shapes_that_are_known_to_the_batch_do_not_matter_either(launch):
    """With `drop_remainder` they have 16 where they had None: Keras's last axis of 1 comes and goes all the same."""
    trial = launch("scalars", workload="dropping")
    assert_whole_epochs(trial.warm_up(), trial.measure(), examples=96, steps=6)


def test_a_batch_may_hold_what_is_not_of_its_examples(launch):
    """Nodes of all graphs, a table for all: what has one row for each example is the batch's size."""
    trial = launch("graphs", workload="batched")
    warm = trial.warm_up()
    assert warm.started.examples == 100
    assert_whole_epochs(warm, trial.measure())
    trial = launch("graphs", 40, workload="batched", data=Data(examples=100, endless=False))
    assert_whole_epochs(trial.warm_up(), trial.measure(), steps=3)


def test_steps_are_counted_where_gradients_are_accumulated(launch):
    """An optimizer that updates once in four steps trains on every example all the same."""
    trial = launch("accumulating")
    assert_whole_epochs(trial.warm_up(), trial.measure())


def test_steps_without_an_end_are_counted_where_gradients_are_accumulated(launch):
    """Where no epoch says how many there were, the optimizer's count of updates is not taken for it."""
    trial = launch("accumulating_for_ever")
    trial.warm_up()
    for part in (trial.measure(), trial.measure()):
        rounded = part.step_seconds.p50 * part.steps
        assert 0.3 * part.seconds < rounded < 1.5 * part.seconds
        assert part.examples == 16 * part.steps


@pytest.mark.parametrize("case", ["full_batches", "full_batches_of_unknown_number"])
def test_what_a_dataset_drops_by_itself_is_never_trained_on(launch, case):
    """Counted in batches of 16, of which 96 of 100 examples are; in batches of 60 an epoch has one, and 60 examples."""
    first = launch(case, workload="batched")
    told = Data.found_by(first.warm_up().started)
    assert told.examples == 96
    for batch_size, examples in ((60, 60), (30, 90)):
        trial = launch(case, batch_size, workload="batched", data=told)
        assert_whole_epochs(trial.warm_up(), trial.measure(), examples=examples, steps=examples // batch_size)


def test_elements_may_have_no_targets(launch):
    """Of a model that makes its own loss."""
    trial = launch("without_targets")
    assert_whole_epochs(trial.warm_up(), trial.measure())


def test_sample_weights_reach_the_loss(launch):
    """With every weight at zero there is no loss."""
    trial = launch("weighted")
    assert trial.warm_up().first_loss == 0.0
    assert trial.measure().loss == 0.0


@pytest.mark.parametrize(("case", "examples"), [("batches", 100), ("full_batches", 90)])
def test_a_persistent_iterator_has_the_epochs_of_a_dataset_that_batches_itself(launch, case, examples):
    """Its cardinality says how many steps an epoch has, also where it drops what fills no batch."""
    trial = launch(case, 30, workload="batched", persistent_iterator=True, steps_per_execution=2)
    assert_whole_epochs(trial.warm_up(), trial.measure(), examples=examples, steps=-(-examples // 30))


@pytest.mark.parametrize("batch_size", [16, 30])
def test_a_dataset_may_do_its_own_batching(launch, batch_size):
    """With `batched=True` the dataset's batches are the steps, of the trial's batch size."""
    trial = launch("batches", batch_size, workload="batched")
    warm = trial.warm_up()
    assert warm.started.examples == 100
    assert "shape=(None, 4)" in warm.started.element
    assert_whole_epochs(warm, trial.measure(), steps=-(-100 // batch_size))


@pytest.mark.parametrize(("knob", "told"), [(0, None), (3, 3), ("autotune", -1)])
def test_the_dataset_is_told_the_parallel_calls(launch, knob, told):
    """`config.num_parallel_calls` is what `map` takes: None for serial, -1 for TensorFlow's choice."""
    trial = launch("told", 20, num_parallel_calls=knob, deterministic=False)
    trial.warm_up()
    said = trial.printed()
    assert said["num_parallel_calls"] == told
    assert (said["batch_size"], said["ordered"]) == (20, False)


def test_what_the_dataset_sets_itself_is_told(launch):
    """Its own threads, order and tuning are the user's; what a configuration asks for is not."""
    own = {"data_threads": 3, "deterministic": False, "data_autotune": False}
    trial = launch("with_options")
    assert trial.warm_up().started.set_by_dataset == own
    trial = launch("pairs", data_threads=2, deterministic=False, data_autotune=False)
    assert trial.warm_up().started.set_by_dataset == {}


def test_an_endless_dataset_is_timed_by_steps(launch):
    """`repeat()` has no epochs, so no boundary costs anything: every step counts a full batch."""
    trial = launch("endless")
    warm = trial.warm_up()
    part = trial.measure()
    assert (warm.started.examples, warm.started.endless) == (None, True)
    assert (warm.ready.timed_by, warm.ready.epoch_overhead_seconds) == ("steps", None)
    assert part.epochs == 0
    assert part.examples == part.steps * 16


@pytest.mark.parametrize(("case", "examples"), [("generated", 100), ("filtered", 50)])
def test_a_dataset_of_unknown_length_is_counted(launch, case, examples):
    """A generator's or a filter's examples are counted, and timed in whole epochs."""
    trial = launch(case)
    warm = trial.warm_up()
    assert (warm.started.examples, warm.started.endless) == (examples, False)
    assert_whole_epochs(warm, trial.measure(), examples=examples, steps=-(-examples // 16))


@pytest.mark.parametrize("workload", ["workload", "validated"])
def test_a_long_epoch_is_timed_by_steps_and_its_boundary_apart(launch, workload):
    """A million examples take longer than a slice may: steps are timed, and what a boundary costs is measured."""
    trial = launch("long_epoch", 8, workload=workload)
    warm = trial.warm_up()
    part = trial.measure()
    assert warm.started.examples == 1_000_000
    assert warm.ready.timed_by == "steps"
    assert warm.ready.epoch_overhead_seconds is not None
    assert part.epochs == 0
    assert part.examples == part.steps * 8
    if workload == "validated":  # which is part of what a boundary costs
        assert warm.started.validation_examples == 8
        told = launch("long_epoch", 8, workload=workload, data=Data.found_by(warm.started)).warm_up().started
        assert told.validation_examples == 8, "later trials do not count again"
        assert (trial.log.parent / "validations").stat().st_size >= 3


def test_a_long_epoch_of_a_persistent_iterator_is_timed_by_steps_and_its_boundary_apart(launch):
    """Steps per execution divide the long epoch's 125,000 steps, and the short ones that show the boundary."""
    trial = launch("long_epoch", 8, persistent_iterator=True, steps_per_execution=12)
    warm, part = trial.warm_up(), trial.measure()
    assert warm.started.in_force == {"steps_per_execution": 10, "prefetch": 1}
    assert warm.ready.timed_by == "steps"
    assert warm.ready.boundary is not None
    assert part.steps % 10 == 0
    assert part.examples == part.steps * 8


def test_an_epoch_that_cannot_be_counted_in_time_is_timed_by_steps(launch):
    """Its length stays unknown, which is not endless. The time to start is told without the time of counting."""
    launch("pairs").warm_up()  # its template has imported everything
    began = time.monotonic()
    warm = launch("slow_generator").warm_up()
    took = time.monotonic() - began
    assert (warm.started.examples, warm.started.endless) == (None, False)
    assert warm.ready.timed_by == "steps"
    assert warm.started.counting_seconds >= TrialRequest.model_fields["count_seconds"].default
    assert warm.first_step_seconds < warm.ready_seconds <= took - warm.started.counting_seconds


@pytest.mark.parametrize("batch_size", [16, 128])
def test_data_that_was_not_counted_in_time_is_trained_on_without_an_end(launch, batch_size):
    """Batches go on over the end of the data, so that there is no smaller last one; what lies there is left out."""
    trial = launch("generated", batch_size, data=Data(examples=None, endless=False))
    warm, part = trial.warm_up(), trial.measure()
    assert (warm.started.examples, warm.started.endless) == (None, False)
    assert (warm.ready.timed_by, warm.ready.epoch_overhead_seconds) == ("steps", None)
    assert part.examples == part.steps * batch_size


def test_batches_that_cannot_be_counted_in_time_are_as_large_as_the_first(launch):
    """A dataset that batches by itself says how many batches it has, not how many examples."""
    warm = launch("slow_batches", workload="batched").warm_up()
    assert (warm.started.examples, warm.started.endless) == (16 * 5_000, False)


def produced(trial):
    """How many elements a case of those that mark them has produced so far."""
    marks = trial.log.parent / "elements"
    return marks.stat().st_size if marks.exists() else 0


@pytest.mark.parametrize(
    ("case", "persistent"),
    [("kept_in_a_file", False), ("more_than_is_kept", False), ("kept", True)],
)
def test_what_a_dataset_keeps_is_kept_before_anything_is_timed(launch, case, persistent):
    """A training reads what `.cache()` keeps from its second epoch on; a trial may see less of one."""
    trial = launch(case, persistent_iterator=persistent)
    warm = trial.warm_up()
    assert warm.ready.timed_by == "steps"
    assert (warm.started.filling_seconds < 0.05) == (case == "kept_in_a_file")
    before = produced(trial)
    assert 2_000 <= before < 2_300
    trial.measure()
    assert produced(trial) == before


def test_what_is_kept_in_a_file_is_not_produced_again(launch):
    """Once it is complete the next trial reads what it trains on, as the next training does."""
    first = launch("kept_in_a_file")
    first.warm_up()
    first.trial.kill()
    index = next(first.log.parent.glob("kept.index"))
    again = launch("kept_in_a_file")
    for file in index.parent.glob("kept.*"):
        (again.log.parent / file.name).write_bytes(file.read_bytes())
    again.warm_up()
    assert produced(again) == 0


def test_what_is_never_kept_whole_is_produced_in_every_epoch(launch):
    """Where only a part is taken no training ever completes the cache, and no trial does it for it."""
    trial = launch("part_of_what_is_kept")
    trial.warm_up()
    before = produced(trial)
    trial.measure()
    assert produced(trial) > before


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_that_is_not_trained_on_any_more_is_gone(launch, persistent):
    """Of a long epoch's first `fit`, or it would hold its buffers beside those of the one that is timed."""
    trial = launch("passes_that_end", persistent_iterator=persistent)
    assert trial.warm_up().ready.timed_by == "steps"
    trial.measure()
    passes = (trial.log.parent / "passes").read_text()
    assert passes.count("+") > 3
    assert passes.count("+") - passes.count("-") == 1


def test_a_shuffle_buffer_that_the_epochs_end_pays_back_is_not_charged(launch):
    """Where steps wait for each example, those that fill the buffer are not waited for again when it is emptied.

    It rests on a few epochs of a second: one trial in eight is off on a machine that is busy otherwise.
    """

    def charged():
        trial = launch("refills", data_autotune=False)
        warm, part = trial.warm_up(), trial.measure()
        trial.trial.kill()
        return warm.ready.epoch_overhead_seconds / (400 * part.seconds / part.examples)

    assert any(charged() < 0.5 for _ in range(6))


def test_a_shuffle_buffer_is_charged_where_the_pipeline_keeps_ahead(launch):
    """Where steps wait for nothing, the epoch's end is no quicker, and filling the buffer costs what it takes."""

    def charged():
        trial = launch("keeps_ahead", prefetch=2, data_autotune=False)
        overhead = trial.warm_up().ready.epoch_overhead_seconds
        trial.trial.kill()
        return overhead

    assert any(charged() > 0.5 * 400 * 0.002 for _ in range(3))


def test_validation_runs_in_every_epoch(launch):
    """A slice of whole epochs holds as many passes over the validation data, and one more before it counts."""
    trial = launch("pairs", workload="validated")
    passes = trial.log.parent / "validations"
    warm = trial.warm_up()
    before = passes.stat().st_size
    part = trial.measure()
    assert_whole_epochs(warm, part)
    assert passes.stat().st_size - before == part.epochs + 1


def test_drop_remainder_drops_the_last_batch(launch):
    """100 examples in batches of 16 are six steps and 96 examples with `drop_remainder=True`."""
    trial = launch("pairs", workload="dropping")
    warm = trial.warm_up()
    assert (warm.started.examples, warm.started.examples_per_epoch) == (100, 96)
    assert_whole_epochs(warm, trial.measure(), examples=96, steps=6)


@pytest.mark.parametrize("steps_per_execution", [2, 64])
def test_steps_per_execution_need_not_divide_the_epoch(launch, steps_per_execution):
    """Optimizer steps are counted, not calls: an epoch stays 7 steps and 100 examples."""
    trial = launch("pairs", steps_per_execution=steps_per_execution)
    assert_whole_epochs(trial.warm_up(), trial.measure())


def test_steps_per_execution_on_an_endless_dataset(launch):
    """Every call is so many steps of a full batch."""
    trial = launch("endless", steps_per_execution=8)
    trial.warm_up()
    part = trial.measure()
    assert part.steps % 8 == 0
    assert part.examples == part.steps * 16


def steps_of(trial):
    """The turns of the steps that a case of `slow_steps` has taken so far."""
    marks = trial.log.parent / "steps"
    return [int(each) for each in marks.read_text()] if marks.exists() else []


def measure_beside_marks(trial, seconds, *, run_in=0):
    """A slice, the turns of its steps without those that run in, and the seconds that it was waited for."""
    before, began = len(steps_of(trial)), time.monotonic()
    part = trial.measure(seconds)
    return part, steps_of(trial)[before + run_in :], time.monotonic() - began


def test_a_step_that_takes_longer_than_a_slice_is_timed_whole(launch):
    """A slice holds one step, from its beginning to its end, where less was asked for than that takes."""
    trial = launch("slow_steps")
    assert trial.warm_up().ready.timed_by == "steps"
    for _ in range(2):
        part, turns, waited = measure_beside_marks(trial, SLICE_SECONDS)
        assert SLICE_SECONDS < 0.7 <= part.seconds <= waited
        assert (part.steps, part.examples, len(turns)) == (1, 16, 1)


@pytest.mark.parametrize(("case", "run_in"), [("uneven_steps", 0), ("uneven_epochs", STEPS_PER_EPOCH)])
def test_of_steps_that_are_fast_and_slow_in_turn_both_are_counted(launch, case, run_in):
    """The rate is all examples over all the time that they took: no step is taken for an exception and left out."""
    trial = launch(case)
    trial.warm_up()
    kinds = set()
    for _ in range(2):
        part, turns, waited = measure_beside_marks(trial, 1.0, run_in=run_in)
        pauses = [(0.01, 0.06)[turn] for turn in turns]
        kinds |= set(turns)
        assert part.steps == len(turns) > 1
        assert part.examples == (part.epochs * 100 if run_in else part.steps * 16)
        assert sum(pauses) <= part.seconds <= waited
        assert part.step_seconds.p50 >= min(pauses)
        assert part.step_seconds.max >= max(pauses)
    assert kinds == {0, 1}


def test_epochs_of_three_steps_are_timed_whole(launch):
    """A training may be as short as that where its data begins afresh."""
    trial = launch("three_steps")
    assert_whole_epochs(trial.warm_up(), trial.measure(), examples=48, steps=3)


@pytest.mark.parametrize(
    "data",
    [None, Data(examples=48, endless=False), Data(examples=None, endless=False)],
    ids=["counted", "told", "unknown"],
)
def test_a_training_of_three_steps_in_all_is_refused(launch, data):
    """However much is known of its length: the reason says that its second pass got nothing, the hint what to do."""
    trial = launch("three_steps_ever", data=data)
    failure = trial.failure()
    assert failure.input_error
    assert failure.reason == "the dataset was exhausted by its first pass: the second got nothing"
    assert "starts afresh each epoch" in failure.hint


THREE_STEPS = """
import autotune
import keras
import numpy as np
import tensorflow as tf

ONCE = zip(np.ones((48, 4), "float32"), np.ones((48, 1), "float32"))

def model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

def dataset():
    element = (tf.TensorSpec((4,)), tf.TensorSpec((1,)))
    return tf.data.Dataset.from_generator(lambda: ONCE, output_signature=element)

workload = autotune.Workload(
    model=model, dataset=dataset, compile=lambda: {"optimizer": "sgd", "loss": "mse"}, batch_size=16
)
"""


def test_tuning_a_training_of_three_steps_says_what_to_do(tmp_path, environment):
    """Exit code 2, what was found, what to do, and no run directory."""
    (tmp_path / "train.py").write_text(THREE_STEPS)
    ended = subprocess.run(
        [sys.executable, "-m", "autotune", "tune", "train.py", "--budget", "10m", "--out", "run"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    found, what_to_do, *more = ended.stderr.splitlines()
    assert found == "autotune: the dataset was exhausted by its first pass: the second got nothing"
    assert what_to_do.startswith("dataset() must return a Dataset that starts afresh each epoch")
    assert more == []
    assert not (tmp_path / "run").exists()


def test_what_the_first_trial_learned_need_not_be_found_out_again(launch):
    """Told the number of examples, a later trial neither counts nor examines, and measures the same."""
    first = launch("generated")
    known = first.warm_up().started
    later = launch("generated", data=known_data(known))
    warm = later.warm_up()
    assert warm.started.examples == 100
    assert_whole_epochs(warm, later.measure())


def test_a_long_validation_is_run_in_part_and_charged_whole(launch):
    """Of 125,000 batches so few that the trial is warm in less time than they are charged with."""
    warm = launch("long_epoch", 8, workload="validated_for_long").warm_up()
    assert warm.ready.timed_by == "steps"
    assert warm.started.validation_examples is None, "it says so itself"
    assert warm.ready.epoch_overhead_seconds > warm.ready.warmup_seconds


def known_data(started):
    """What the study remembers of a first trial."""
    return Data(examples=started.examples, endless=started.endless)


def test_later_trials_know_that_validation_took_too_long_to_count(launch):
    """The record that becomes the recipe's is one of theirs."""
    known = Data(examples=1_000_000, validation_uncounted=True, endless=False)
    told = launch("long_epoch", 8, workload="validated", data=known).warm_up().started
    assert told.validation_uncounted
    assert Data.found_by(told) == known


def test_the_closing_figures(launch):
    """`finish` brings peak memory and the share of the step that waits for input; the process ends."""
    trial = launch("pairs")
    trial.warm_up()
    trial.measure()
    finished = trial.trial.finish(0.2, 60.0)
    assert finished.peak_host_bytes > 50 << 20
    assert finished.peak_device_bytes is None
    assert 0 <= finished.input_wait_fraction <= 1
    trial.trial.kill()  # once more does nothing


def test_the_wait_is_measured_without_another_pipeline(launch):
    """A pipeline that nobody may begin again: the wait is that of the training's own iterator."""
    trial = launch("shut")
    trial.warm_up()
    trial.measure()
    (trial.log.parent / "shut").touch()
    assert trial.trial.finish(INPUT_WAIT_SECONDS, PATIENCE_SECONDS).input_wait_fraction > 0


@pytest.mark.parametrize(("batch_size", "least", "most"), [(8, 0.25, 0.65), (2, 0.0, 0.15)])
def test_a_wait_behind_buffers_is_seen(launch, batch_size, least, most):
    """Sixteen answers arrive in 250 ms, a step takes 70: with 8 of them to a step it waits for 44% of its time.

    A slice holds few calls, and one that the machine delays decides: a wait is missed by every process.
    """
    knobs = {"num_parallel_calls": 16, "data_threads": 16, "prefetch": 8}

    def waited():
        trial = launch("waits_and_works", batch_size, **knobs)
        trial.warm_up()
        trial.measure()
        return trial.trial.finish(INPUT_WAIT_SECONDS, PATIENCE_SECONDS).input_wait_fraction

    assert any(least <= waited() <= most for _ in range(3))
