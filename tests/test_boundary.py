"""What a boundary between long epochs costs, from what was timed of short ones; nothing here is trained."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autotune.worker import boundary
from autotune.worker.training import Training


def training(steps, steps_per_call, synchronise=lambda: None):
    """One with epochs of so many steps."""
    return Training(
        steps_per_call=steps_per_call,
        batch_size=32,
        examples=32 * steps,
        drop_remainder=False,
        synchronise=synchronise,
    )


class Pipeline:
    """A training pipeline that takes so long to start; its old iterator takes so long to go, each in turn."""

    def __init__(self, *, start_seconds=0.0, stalls=(0.0,), steps=100):
        self.start_seconds, self.stalls, self.steps = start_seconds, itertools.cycle(stalls), steps
        self.dataset, self.fit_args = "batches", {"x": self}

    def shorter(self, steps):
        """The same, with epochs of fewer steps."""
        fewer = Pipeline(start_seconds=self.start_seconds, steps=steps)
        fewer.stalls = self.stalls
        return fewer


class Model:
    """One whose `fit` goes by a clock of its own: a call takes 10 ms, making an iterator 5.

    A validation's first call waits for what it begins with, and the very first one compiles for a second.
    """

    def __init__(self, clock, *, call_seconds=0.01):
        self.now, self.call_seconds, self.epochs = clock, call_seconds, 0
        self.validation_begins_in = self.validation_ends_in = 0.0
        self.validation_call_seconds, self.validated_calls, self.steps_per_call = 0.0125, 0, 1
        self.stalls_after_validations = itertools.repeat(0.0)
        self.calls_back, self.own_loop, self.test_function = True, None, None
        self.stop_training = False
        self.train_function = lambda start_seconds: self.wait(start_seconds + self.call_seconds)

    def make_test_function(self):
        """As Keras does before it validates, once."""
        self.test_function = self.test_function or self.validate_on

    def validate_on(self, batches):
        """One call of the test function."""
        begins_in = next(batches) * self.validation_begins_in
        self.wait(begins_in + self.validation_call_seconds + (0.0 if self.validated_calls else 1.0))
        self.validated_calls += 1

    def evaluate(self, data, edges):
        """One validation."""
        self.make_test_function()
        if self.calls_back:
            edges.on_test_begin()
        batches = iter(data)
        for _ in range(math.ceil(data.batches / self.steps_per_call)):
            (self.own_loop or self.test_function)(batches)
        self.wait(self.validation_ends_in)
        if self.calls_back:
            edges.on_test_end()

    def wait(self, seconds):
        """Time passes."""
        self.now[0] += seconds

    def fit(self, x, *, validation_data, callbacks, epochs, **_):
        """Calls back as Keras does; the old iterator goes before an epoch's first call."""
        (edges,), self.stop_training = callbacks, False
        edges.set_model(self)
        for epoch in range(epochs):
            edges.on_epoch_begin(epoch)
            self.wait(0.005 + (next(x.stalls) if epoch else 0.0))
            for step in range(x.steps):
                self.train_function(0.0 if step else x.start_seconds)
            if validation_data is not None:
                self.evaluate(validation_data, edges)
                self.wait(next(self.stalls_after_validations))
            edges.on_epoch_end(epoch)
            self.epochs += 1
            if self.stop_training:
                break


@pytest.fixture
def model(monkeypatch):
    """One on a clock of its own, whose dataset is not shuffled."""
    now = [0.0]
    monkeypatch.setattr(boundary.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(boundary, "_steps_in_shuffle_buffer", lambda *_: None)
    return Model(now)


def measured(model, pipeline, validation=None, *, steps=100, **changes):
    """What is measured between two epochs of so many steps."""
    told = replace(training(steps, 1), **changes)
    return boundary.measure_between_epochs(model, pipeline, validation, told, model.call_seconds)


@pytest.mark.parametrize("start_seconds", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("stall", [0.0, 0.02])
def test_what_every_epoch_takes_beyond_its_steps_is_charged(model, start_seconds, stall):
    """A new iterator, its first batch, and an old iterator that takes its time at every end."""
    found = measured(model, Pipeline(start_seconds=start_seconds, stalls=[stall]))
    assert found.boundary.seconds == pytest.approx(0.005 + start_seconds + stall)
    assert found.boundary.validation_seconds == 0.0
    assert found.uncounted_seconds == pytest.approx(found.boundary.seconds)
    assert not found.taken_over


def test_one_epoch_that_stalls_is_not_charged_to_all(model):
    """The median of the epochs counts."""
    assert measured(model, Pipeline(stalls=[0.0, 1.0, 0.0])).boundary.seconds == pytest.approx(0.005)


def test_one_call_that_stalls_is_no_boundary(model):
    """It is part of its epoch's steps."""
    calls, usual = itertools.count(), model.call_seconds
    model.train_function = lambda start_seconds: model.wait(5.0 if next(calls) == 9 else usual)
    assert measured(model, Pipeline()).boundary.seconds == pytest.approx(0.005)


def test_what_a_device_has_still_to_do_is_no_boundary(model):
    """Calls that come back before their work is done: it is waited for, as the end of an epoch waits for it."""
    behind = [0.0]

    def synchronise():
        model.wait(behind[0])
        behind[0] = 0.0

    def call(start_seconds):
        model.wait(start_seconds + 0.001)
        behind[0] += 0.05

    model.train_function = call
    found = measured(model, Pipeline(), synchronise=synchronise)
    assert found.boundary.seconds == pytest.approx(0.005)
    assert found.boundary.seconds_per_example == pytest.approx(0.051 / 32)


@pytest.mark.parametrize(
    ("steps", "per_call", "buffered", "counted"),
    [(100, 1, 20, 80), (40, 10, 20, 2), (31, 10, 15.5, None), (100, 1, 60, None), (100, 1, None, None)],
)
def test_calls_that_count_are_enough_to_end_a_slice(monkeypatch, steps, per_call, buffered, counted):
    """Of a single one that counts nothing would be timed: an epoch's first call is no part of a slice."""
    short = boundary._ShortEpochs(start=1.0, call=0.5, validation=0.25)
    monkeypatch.setattr(boundary, "_short_epochs", lambda *_: short)
    monkeypatch.setattr(boundary, "_steps_in_shuffle_buffer", lambda *_: buffered)
    monkeypatch.setattr(boundary, "_kept_call_seconds", lambda *_: 0.49)
    there = training(steps, per_call)
    found = boundary.measure_between_epochs(None, Pipeline(), None, there, call_seconds=0.5)
    assert found.counted_calls == counted
    # The boundary itself, and at half a second each the calls of the epoch's end that are not counted.
    rest = 0.0 if counted is None else 0.5 * (steps / per_call - counted)
    assert found.uncounted_seconds == pytest.approx(1.0 + rest)
    saved = 0.0 if counted is None else 0.01 * buffered / per_call
    assert found.boundary.model_dump() == pytest.approx(
        {
            "seconds": 1.0 - saved,
            "validation_seconds": 0.25,
            "seconds_per_example": 0.5 / per_call / 32,
            "tail_excluded": counted is not None,
        }
    )
    again = boundary.take_over(found.boundary, Pipeline(), there)
    assert (again.boundary, again.counted_calls, again.taken_over) == (found.boundary, counted, True)
    assert again.uncounted_seconds >= found.uncounted_seconds - saved


def test_a_boundary_that_hardly_costs_anything_leaves_every_step_in(monkeypatch):
    """Less than one percent of an epoch: its last steps count, and no step is timed for what they save."""
    short = boundary._ShortEpochs(start=0.4, call=0.5, validation=0.0)
    monkeypatch.setattr(boundary, "_short_epochs", lambda *_: short)
    monkeypatch.setattr(boundary, "_steps_in_shuffle_buffer", lambda *_: 20)
    there = training(100, 1)
    found = boundary.measure_between_epochs(None, Pipeline(), None, there, call_seconds=0.5)
    assert (found.counted_calls, found.boundary.seconds) == (None, 0.4)
    assert boundary.take_over(found.boundary, Pipeline(), there).counted_calls is None


class HeldOut:
    """A dataset that says how many batches it has, or does not."""

    def __init__(self, batches, *, says=True):
        self.batches, self.says = batches, says

    def cardinality(self):
        """A tensor."""
        return SimpleNamespace(numpy=lambda: self.batches if self.says else -2)

    def take(self, batches):
        """Fewer of them."""
        return HeldOut(min(batches, self.batches))

    def __iter__(self):
        """Whether each is the first."""
        return iter([True] + [False] * (self.batches - 1))


def charged_for(model, validation):
    """Seconds that a validation adds to each epoch."""
    found, without = (measured(model, Pipeline(), each).boundary for each in (validation, None))
    assert without.validation_seconds == 0.0
    return found.seconds + found.validation_seconds - without.seconds


@pytest.mark.parametrize("batches", [5, 20, 21, 80])
@pytest.mark.parametrize(
    ("begins_in", "ends_in"), [(0.0, 0.0), (0.05, 0.0), (0.4, 0.0), (0.0, 0.2), (0.1, 0.3)]
)
def test_a_validation_is_charged_whole_and_begins_and_ends_once(model, batches, begins_in, ends_in):
    """Each of its calls is charged, seen or not; what lies before and after them once, and compiling never."""
    model.validation_begins_in, model.validation_ends_in = begins_in, ends_in
    model.make_test_function()
    own = model.test_function
    assert charged_for(model, HeldOut(batches)) == pytest.approx(begins_in + ends_in + batches * 0.0125)
    assert model.test_function == own


def test_a_stall_after_one_validation_is_not_charged_to_every_epoch(model):
    """The median of the epochs counts; what each of them takes is charged."""
    model.stalls_after_validations = itertools.cycle([0.01, 0.01, 0.4, 0.01])
    assert charged_for(model, HeldOut(80)) == pytest.approx(80 * 0.0125 + 0.01)


def test_a_model_that_validates_by_another_function_is_charged_whole(model):
    """As one whose own `evaluate` has a loop of its own: its calls are not seen, what they take on average is."""
    model.own_loop = lambda batches: model.wait(0.02)
    assert charged_for(model, HeldOut(80)) == pytest.approx(80 * 0.02)


def test_a_model_that_calls_nobody_back_while_it_validates_is_charged_for_what_is_seen(model):
    """As one whose own `evaluate` leaves callbacks out: no call can be told from another, and nothing breaks."""
    model.calls_back, model.validation_call_seconds = False, 0.02
    assert charged_for(model, HeldOut(80)) == pytest.approx(20 * 0.02)


@pytest.mark.parametrize(
    ("batches", "says", "examples", "call_seconds", "taken", "unseen"),
    [
        (160, True, None, 0.1, 40, 60.0),
        (
            160,
            False,
            160 * 64 - 5,
            0.1,
            40,
            60.0,
        ),  # it does not say, and was counted; the last batch is smaller
        (30, True, None, 0.1, 30, 0.0),
        (30, False, 30 * 64, 0.1, 30, 0.0),  # all of it
        (160, False, None, 0.001, 40, 0.0),  # nobody knows: no more than what was seen
        (2_000, True, None, 0.003, 168, 916.0),  # quick calls: a quarter of a second of them
        (160, True, None, 0.003, 160, 0.0),
    ],
)
def test_of_a_long_validation_a_part_is_run_and_the_whole_is_charged(
    monkeypatch, model, batches, says, examples, call_seconds, taken, unseen
):
    """Twenty calls of two steps, more where calls are quick; the rest is charged, be it said or counted how much it is.

    Its batches are its own: they need not be the training's.
    """
    monkeypatch.setattr(boundary, "_examples_per_batch", lambda validation: 64)
    model.validation_call_seconds, model.steps_per_call = call_seconds, 2
    held_out = boundary._held_out(model, HeldOut(batches, says=says), training(100, 2), examples)
    assert (held_out.dataset.batches, held_out.unseen) == (taken, unseen)


@pytest.mark.parametrize("begins_in", [0.0, 3.0])
def test_a_validation_that_is_slower_than_training_takes_no_more_than_some_calls(model, begins_in):
    """Calls of 0.7 s each, or many at once after three seconds: some 20 for each of two epochs, and a few before."""
    model.validation_call_seconds, model.validation_begins_in = (0.001, 3.0) if begins_in else (0.7, 0.0)
    measured(model, Pipeline(), HeldOut(900))
    assert model.validated_calls <= 2 * boundary.VALIDATION_CALLS + 3


def test_devices_have_done_their_work_when_the_first_and_the_last_call_are_noted(model):
    """On a GPU calls come back before: 20 of 5 ms, whose 50 ms of work are waited for, tell what 60 more take."""
    behind = [0]

    def synchronise():
        model.wait(0.045 * behind[0])
        behind[0] = 0

    def call(batches):
        model.wait(0.005)
        behind[0] += 1

    model.test_function = call
    training_there = replace(training(100, 1), synchronise=synchronise)
    held_out = boundary._held_out(model, HeldOut(80), training_there, None)
    assert held_out.calls == boundary.VALIDATION_CALLS, "not as many as calls come back in the time"
    seen = boundary._train(model, Pipeline(steps=1), held_out, 3, most_seconds=10.0, synchronise=lambda: None)
    assert [each.validation.call for each in seen] == pytest.approx([0.05] * 3)


def test_short_epochs_end_in_time(model):
    """Calls of three seconds: two epochs of two calls, the fewest that show a boundary."""
    model.call_seconds = 3.0
    measured(model, Pipeline())
    assert model.epochs == 2
    assert model.now[0] < 13.0


@pytest.mark.parametrize(
    "kind", ["_AssertCardinalityDataset", "_PaddedBatchDataset", "_DenseToRaggedDataset"]
)
def test_a_shuffle_buffer_is_found_behind_what_hands_on(kind):
    """Forty examples of it are as many steps, or, behind what batches them by eight, five."""
    shuffled = type("_ShuffleDataset", (), {"_buffer_size": 40})()
    above = type(kind, (), {"_inputs": lambda self: [shuffled]})()
    found = boundary._steps_in_shuffle_buffer(above, 8)
    assert found == (5.0 if "Batch" in kind else 40.0)
