"""Every kind of input that a workload may have is trained on, and its examples are counted exactly.

What building the pipeline shows is checked in one process for all cases (`build`), the rest in trials (`launch`).
"""

import shutil
import time

import pytest
from real_trials import PATIENCE_SECONDS

from autotune.runtime.protocol import Data

STEPS_PER_EPOCH = 7
"""100 examples in batches of 16."""
SLICE_SECONDS = 0.5
INPUT_WAIT_SECONDS = 0.3


def assert_whole_epochs(warm, part, *, examples=100, steps=STEPS_PER_EPOCH):
    """Whole epochs were timed, each of so many examples and optimizer steps."""
    assert warm.ready.timed_by == "epochs"
    assert part.epochs >= 1
    assert (part.examples, part.steps) == (part.epochs * examples, part.epochs * steps)


# ----------------------------------------------------------------------------------- built, and its first step


@pytest.mark.parametrize(
    ("case", "batch_size", "examples", "per_epoch"),
    [
        *((each, 16, 100, 100) for each in ("pairs", "tuples", "dicts", "in_another_order", "accumulating")),
        *((each, 16, 100, 100) for each in ("pictures_with_a_channel", "scalars", "without_targets")),
        ("dropping", 16, 100, 96),
        ("scalars_dropping", 16, 100, 96),
        ("batches", 30, 100, 100),
        ("full_batches", 16, 96, 96),
        ("full_batches_of_unknown_number", 16, 96, 96),
        ("a_few_small_ones", 16, 3_000, 3_000),
        ("graphs", 16, 100, 100),
        ("generated", 16, 100, 100),
        ("filtered", 16, 50, 50),
        ("endless", 16, None, None),
        *((each, 16, 100, 100) for each in ("rows_in_pairs", "unbuilt", "text")),
        ("signals", 4, 10, 10),
    ],
)
def test_every_kind_of_element_is_trained_on_and_counted(build, case, batch_size, examples, per_epoch):
    built = build(case, batch_size)
    assert built.failed is None
    assert built.first_step.loss >= 0
    assert (built.started.examples, built.started.examples_per_epoch) == (examples, per_epoch)
    assert built.started.endless is (case == "endless")


@pytest.mark.parametrize(
    ("case", "batch_size", "told", "examples"),
    [("graphs", 40, 100, 100), ("full_batches", 60, 96, 60), ("generated", 16, 100, 100)],
)
def test_what_one_trial_learned_holds_for_other_batch_sizes(build, case, batch_size, told, examples):
    built = build(case, batch_size, data=Data(examples=told, endless=False))
    assert built.failed is None
    assert built.started.examples == examples


@pytest.mark.parametrize("case", ["own_compile", "strict_compile", "compiled_by_model"])
def test_knobs_reach_a_model_that_compiles_itself(build, case):
    for on in (True, False):
        built = build(case, jit_compile=on, steps_per_execution=7)
        assert built.failed is None
        assert built.started.jit_compile is on
        assert built.printed["steps_per_execution"] == 7
    assert build("compiled_by_model").started.jit_compile, "as it was compiled"


def test_sample_weights_reach_the_loss(build):
    assert build("weighted").first_step.loss == 0.0


@pytest.mark.parametrize(("knob", "told"), [(0, None), (3, 3), ("autotune", -1)])
def test_the_dataset_is_told_the_parallel_calls(build, knob, told):
    said = build("told", 20, num_parallel_calls=knob, deterministic=False).printed
    assert said["num_parallel_calls"] == told
    assert (said["batch_size"], said["ordered"]) == (20, False)


def test_what_the_dataset_sets_itself_is_told(build):
    own = {"data_threads": 3, "deterministic": False, "data_autotune": False}
    assert build("with_options").started.set_by_dataset == own
    assert build("pairs", data_threads=2, deterministic=False).started.set_by_dataset == {}


def test_a_dataset_that_reads_what_changes_is_told(build):
    assert "cases.py" in (read := build("scaled").started.reads_changing)
    assert "reads a variable or lookup table, which may change" in read
    assert build("pairs").started.reads_changing == ""


def test_an_epoch_that_cannot_be_counted_in_time_is_not_endless(build):
    started = build("slow_generator").started
    assert (started.examples, started.endless) == (None, False)
    assert started.counting_seconds >= 1.0


def test_batches_not_counted_in_time_are_as_large_as_the_first(build):
    started = build("slow_batches").started
    assert (started.examples, started.endless) == (16 * 5_000, False)


def test_validation_too_long_to_count_is_not_counted_again(build):
    known = Data(examples=1_000_000, validation_uncounted=True, endless=False)
    assert Data.from_started(build("long_and_validated", 8, data=known).started) == known
    counted = Data.from_started(build("long_and_validated", 8).started)
    assert counted.validation_examples == 8
    assert Data.from_started(build("long_and_validated", 8, data=counted).started) == counted


# ------------------------------------------------------------------------------------------------ whole epochs


@pytest.mark.fast
def test_a_trial_trains_on_whole_epochs_and_their_validation(launch):
    trial = launch("validated", steps_per_execution=2)
    passes = trial.log.parent / "validations"
    warm = trial.warm_up()
    before = passes.stat().st_size
    part = trial.measure()
    assert_whole_epochs(warm, part)
    assert passes.stat().st_size - before == part.epochs + 1, "and one before the slice counts"
    finished = trial.trial.finish(0.2, PATIENCE_SECONDS)
    assert finished.peak_host_bytes > 50 << 20
    assert finished.peak_device_bytes is None
    assert 0 <= finished.input_wait_fraction <= 1


def test_steps_are_counted_where_gradients_are_accumulated(launch):
    trial = launch("accumulating_for_ever")
    trial.warm_up()
    part = trial.measure()
    assert 0.3 * part.seconds < part.step_seconds.p50 * part.steps < 1.5 * part.seconds
    assert part.examples == 16 * part.steps


UNKNOWN = Data(examples=None, endless=False)


@pytest.mark.parametrize(
    ("case", "batch_size", "data", "knobs", "examples", "steps"),
    [
        *((case, 16, None, {}, 100, 7) for case in ("validated_on_arrays", "validated_on_batches")),
        ("batched_validated_on_single_ones", 16, None, {}, 100, 7),
        ("full_batches", 30, None, {"persistent_iterator": True, "steps_per_execution": 2}, 90, 3),
        ("full_batches_of_unknown_number", 30, Data(examples=96, endless=False), {}, 90, 3),
        ("batches", 128, Data(examples=100, endless=False), {}, 100, 1),
    ],
)
def test_whole_epochs_are_trained_on(launch, case, batch_size, data, knobs, examples, steps):
    trial = launch(case, batch_size, data=data, **knobs)
    assert_whole_epochs(trial.warm_up(), trial.measure(), examples=examples, steps=steps)


@pytest.mark.parametrize(
    ("case", "data", "steps_per_execution", "endless"), [("generated", UNKNOWN, 1, False), ("endless", None, 8, True)]
)
def test_data_without_a_known_end_is_timed_by_steps(launch, case, data, steps_per_execution, endless):
    trial = launch(case, 16, data=data, steps_per_execution=steps_per_execution)
    warm, part = trial.warm_up(), trial.measure()
    assert (warm.started.examples, warm.started.endless) == (None, endless)
    assert (warm.ready.timed_by, warm.ready.epoch_overhead_seconds) == ("steps", None)
    assert (part.epochs, part.steps % steps_per_execution, part.examples) == (0, 0, part.steps * 16)


# -------------------------------------------------------------------------------------------- steps, boundaries


def test_a_long_epoch_is_timed_by_steps_and_its_boundary_apart(launch):
    trial = launch("long_and_validated", 8)
    warm = trial.warm_up()
    part = trial.measure()
    assert (warm.started.examples, warm.ready.timed_by) == (1_000_000, "steps")
    assert warm.ready.epoch_overhead_seconds is not None
    assert (part.epochs, part.examples) == (0, part.steps * 8)
    assert (trial.log.parent / "validations").stat().st_size >= 3


def test_a_long_epoch_of_one_iterator_is_timed_by_steps(launch):
    trial = launch("long_epoch", 8, persistent_iterator=True, steps_per_execution=12)
    warm, part = trial.warm_up(), trial.measure()
    assert warm.started.in_force == {"steps_per_execution": 10, "prefetch": 1}
    assert warm.ready.timed_by == "steps"
    assert warm.ready.boundary is not None
    assert (part.steps % 10, part.examples) == (0, part.steps * 8)


def test_a_long_validation_is_run_in_part_and_charged_whole(launch):
    warm = launch("long_and_validated_for_long", 8).warm_up()
    assert warm.ready.timed_by == "steps"
    assert warm.started.validation_examples is None, "it says so itself"
    assert warm.ready.epoch_overhead_seconds > warm.ready.warmup_seconds


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_that_is_not_trained_on_any_more_is_gone(launch, persistent):
    trial = launch("passes_that_end", persistent_iterator=persistent)
    assert trial.warm_up().ready.timed_by == "steps"
    trial.measure()
    passes = (trial.log.parent / "passes").read_text()
    assert passes.count("+") > 3
    assert passes.count("+") - passes.count("-") == 1


def test_a_shuffle_buffer_paid_back_at_the_end_is_not_charged(launch):
    """Where steps wait for each example, those that fill the buffer are not waited for again when it is emptied.

    It rests on a few epochs of a second: one trial in eight is off on a machine that is busy otherwise.
    """

    def charged():
        trial = launch("refills", data_autotune=False)
        warm, part = trial.warm_up(), trial.measure()
        trial.trial.kill()
        return warm.ready.epoch_overhead_seconds / (400 * part.seconds / part.examples)

    assert any(charged() < 0.5 for _ in range(6))


def test_a_shuffle_buffer_is_charged_where_the_pipeline_is_ahead(launch):
    def charged():
        trial = launch("keeps_ahead", prefetch=2, data_autotune=False)
        overhead = trial.warm_up().ready.epoch_overhead_seconds
        trial.trial.kill()
        return overhead

    assert any(charged() > 0.5 * 400 * 0.002 for _ in range(3))


# -------------------------------------------------------------------------------------------------- what is kept


def produced(trial):
    """How many elements a case of those that mark them has produced so far."""
    marks = trial.log.parent / "elements"
    return marks.stat().st_size if marks.exists() else 0


@pytest.mark.parametrize(("case", "persistent"), [("more_than_is_kept", False), ("kept", True)])
def test_what_a_dataset_keeps_is_kept_before_anything_is_timed(launch, case, persistent):
    trial = launch(case, persistent_iterator=persistent)
    assert trial.warm_up().ready.timed_by == "steps"
    before = produced(trial)
    assert 2_000 <= before < 2_300
    trial.measure()
    assert produced(trial) == before


def test_what_is_kept_in_a_file_is_not_produced_again(launch):
    first = launch("kept_in_a_file")
    first.warm_up()
    assert 2_000 <= produced(first) < 2_300
    first.trial.kill()
    again = launch("kept_in_a_file")
    for file in first.log.parent.glob("kept.*"):
        shutil.copy(file, again.log.parent)
    again.warm_up()
    assert produced(again) == 0


def test_what_is_never_kept_whole_is_produced_in_every_epoch(launch):
    trial = launch("part_of_what_is_kept")
    trial.warm_up()
    before = produced(trial)
    trial.measure()
    assert produced(trial) > before


# ------------------------------------------------------------------------------------------------ uneven steps


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
    trial = launch("slow_steps")
    assert trial.warm_up().ready.timed_by == "steps"
    part, turns, waited = measure_beside_marks(trial, SLICE_SECONDS)
    assert SLICE_SECONDS < 0.7 <= part.seconds <= waited
    assert (part.steps, part.examples, len(turns)) == (1, 16, 1)


@pytest.mark.parametrize(("case", "run_in"), [("uneven_steps", 0), ("uneven_epochs", STEPS_PER_EPOCH)])
def test_fast_and_slow_steps_in_turn_are_both_counted(launch, case, run_in):
    trial = launch(case)
    trial.warm_up()
    part, turns, waited = measure_beside_marks(trial, 1.0, run_in=run_in)
    pauses = [(0.01, 0.06)[turn] for turn in turns]
    assert part.steps == len(turns) > 1
    assert part.examples == (part.epochs * 100 if run_in else part.steps * 16)
    assert sum(pauses) <= part.seconds <= waited
    assert part.step_seconds.p50 >= min(pauses)
    assert part.step_seconds.max >= max(pauses)
    assert set(turns) == {0, 1}


# ----------------------------------------------------------------------------------------------- input wait


def test_the_wait_is_measured_without_another_pipeline(launch):
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
