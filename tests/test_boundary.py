"""What a boundary between long epochs costs, from what was timed of short ones; nothing here is trained."""

import itertools
import math
import random
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autotune.measure.epoch_ends import stall_seconds
from autotune.trial import boundary
from autotune.trial.step_clock import Training


def untuned():
    """A dataset, as far as it is asked whether `tf.data` tunes it."""
    return SimpleNamespace(options=lambda: SimpleNamespace(autotune=SimpleNamespace(enabled=False)))


def training(steps, steps_per_call):
    """One with epochs of so many steps."""
    return Training(
        steps_per_call=steps_per_call,
        batch_size=32,
        examples=32 * steps,
        drop_remainder=False,
        iterations=None,
        synchronise=lambda: None,
    )


@pytest.mark.parametrize(
    ("steps", "per_call", "buffered", "counted"),
    [(100, 1, 20, 80), (40, 10, 20, 2), (31, 10, 15.5, None), (100, 1, 60, None), (100, 1, None, None)],
)
def test_calls_that_count_are_enough_to_end_a_slice(monkeypatch, steps, per_call, buffered, counted):
    """Of a single one that counts nothing would be timed: an epoch's first call is no part of a slice."""
    short = boundary._ShortEpochs(
        start=1.0, call=0.5, validating=0.25, validated_call=0.1, ends=[], usual_gap=math.inf
    )
    monkeypatch.setattr(boundary, "_short_epochs", lambda *_: short)
    monkeypatch.setattr(boundary, "_steps_in_shuffle_buffer", lambda *_: buffered)
    monkeypatch.setattr(boundary, "_kept_call_seconds", lambda *_: 0.25)
    found = boundary.boundary(None, untuned(), None, training(steps, per_call), call_seconds=0.5)
    assert found.counted_calls == counted
    # The boundary itself, and at half a second each the calls of the epoch's end that are not counted.
    rest = 0.0 if counted is None else 0.5 * (steps / per_call - counted)
    assert found.uncounted_seconds == pytest.approx(1.0 + rest)
    if counted is None:
        assert found.seconds == 1.25


class Pipeline:
    """A dataset that takes so long to start, and whose iterators go at once, or when their threads awake."""

    def __init__(self, *, start_seconds=0.0, stalls=(), steps=100, tuned=True):
        self.start_seconds, self.stalls, self.steps, self.tuned = start_seconds, stalls, steps, tuned

    def options(self):
        """Whether `tf.data` tunes it."""
        return SimpleNamespace(autotune=SimpleNamespace(enabled=None if self.tuned else False))

    def take(self, steps):
        """Fewer steps of it."""
        return Pipeline(start_seconds=self.start_seconds, stalls=self.stalls, steps=steps, tuned=self.tuned)


class Model:
    """One whose `fit` goes by a clock of its own: a call takes 10 ms, making an iterator 2, of a tuned one 5.

    A validation's first call waits for what it begins with, and the very first one compiles for a second.
    """

    def __init__(self, clock, *, call_seconds=0.01):
        self.now, self.call_seconds, self.epochs = clock, call_seconds, 0
        self.tuned_gap = 0.005
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

    def fit(self, dataset, *, validation_data, callbacks, epochs, **_):
        """Calls back as Keras does; the old iterator goes before an epoch's first call."""
        (edges,), self.stop_training, used = callbacks, False, None
        edges.set_model(self)
        for epoch in range(epochs):
            edges.on_epoch_begin(epoch)
            self.wait(self.tuned_gap if dataset.tuned else 0.002)
            if used is not None and dataset.tuned and next(dataset.stalls):
                self.wait(stall_seconds(self.now[0] - used))
            used = self.now[0]
            for step in range(dataset.steps):
                self.train_function(0.0 if step else dataset.start_seconds)
            if validation_data is not None:
                self.evaluate(validation_data, edges)
                self.wait(next(self.stalls_after_validations))
            edges.on_epoch_end(epoch)
            self.epochs += 1
            if self.stop_training:
                break


@pytest.fixture
def model(monkeypatch):
    """One on a clock of its own."""
    now = [0.0]
    monkeypatch.setattr(boundary.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(
        boundary, "_untuned", lambda data: Pipeline(start_seconds=data.start_seconds, tuned=False)
    )
    monkeypatch.setattr(boundary, "_steps_in_shuffle_buffer", lambda *_: None)
    return Model(now)


def some(share):
    """So many of all ends stall, by chance."""
    draw = random.Random(2)
    return (draw.random() < share for _ in itertools.count())


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("start_seconds", [0.0, 0.05, 0.13])
def test_the_share_of_stalls_is_what_short_epochs_have_on_average(model, share, start_seconds):
    """Whatever their ages are; and what a boundary costs beyond its steps holds none of them."""
    data = Pipeline(start_seconds=start_seconds, stalls=some(share))
    found = [boundary.boundary(model, data, None, training(100, 1), call_seconds=0.01) for _ in range(60)]
    assert statistics.fmean(each.stalled_ends for each in found) == pytest.approx(share, abs=0.06)
    # Making a tuned iterator takes 5 ms every time, which is charged; where every end seen stalls, nothing shows more
    # than the 2 ms of an untuned one.
    assert all(start_seconds + 0.0019 <= each.seconds <= start_seconds + 0.0051 for each in found)
    if share == 0.0:
        assert all(each.seconds == pytest.approx(start_seconds + 0.005) for each in found)


@pytest.mark.parametrize("call_seconds", [0.001, 0.002, 0.005, 0.01])
@pytest.mark.parametrize("tuned_gap", [0.005, 0.02, 0.05])
def test_what_a_tuned_pipeline_takes_longer_every_time_is_charged(model, call_seconds, tuned_gap):
    """Also where a stall would be as short: the longer of the short epochs tell that there is none."""
    model.call_seconds, model.tuned_gap = call_seconds, tuned_gap
    found = boundary.boundary(
        model, Pipeline(stalls=some(0.0)), None, training(100, 1), call_seconds=call_seconds
    )
    assert (found.seconds, found.stalled_ends) == (pytest.approx(tuned_gap), 0.0)


def test_a_pipeline_that_is_not_tuned_has_no_stalls(model):
    """And nobody trains epochs to see them: only those that show what a boundary costs."""
    found = boundary.boundary(model, Pipeline(tuned=False), None, training(100, 1), call_seconds=0.01)
    assert (found.stalled_ends, model.epochs) == (0.0, boundary.BOUNDARY_EPOCHS)


@pytest.mark.parametrize(("steps", "longest"), [(100, 1.0), (100_000, boundary.LONGEST_STALL_SECONDS)])
def test_a_slice_may_be_held_up_by_a_stall(model, steps, longest):
    """It takes as long as its epoch, a minute at most; a pipeline that is not tuned has none."""
    tuned, untuned_one = (
        boundary.boundary(model, data, None, training(steps, 1), call_seconds=0.01).uncounted_seconds
        for data in (Pipeline(stalls=some(0.0)), Pipeline(tuned=False))
    )
    assert tuned - untuned_one == pytest.approx(longest, abs=0.01)


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
    data = Pipeline(stalls=some(0.0))
    found, without = (
        boundary.boundary(model, data, each, training(100, 1), call_seconds=0.01)
        for each in (validation, None)
    )
    return found.seconds - without.seconds


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
    """Of three ends of validations one tells little; what each of them takes is charged."""
    for stalls in ([0.01, 0.01, 0.4, 0.01], [0.01, 0.4, 0.01, 0.4]):
        model.stalls_after_validations = itertools.cycle(stalls)
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
    boundary.boundary(model, Pipeline(stalls=some(0.0)), HeldOut(900), training(100, 1), call_seconds=0.001)
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
    seen = boundary._train(model, Pipeline(steps=1, tuned=False), held_out, 3, most_seconds=10.0)
    assert [each.call for each in seen.validations] == pytest.approx([0.05] * 3)


@pytest.mark.parametrize("slow", ["steps", "start"])
def test_where_epochs_of_one_call_are_slow_nothing_is_said_of_stalls(model, slow):
    """They would take a trial's time: no more are trained than for the boundary."""
    model.call_seconds = 3.0 if slow == "steps" else 0.01
    data = Pipeline(start_seconds=3.0 if slow == "start" else 0.0, stalls=some(1.0))
    found = boundary.boundary(model, data, None, training(100, 1), call_seconds=model.call_seconds)
    assert found.stalled_ends is None
    assert model.epochs <= boundary.BOUNDARY_EPOCHS


def test_looking_for_stalls_ends_in_time(model):
    """Epochs of three quarters of a second: after two seconds there is no other length."""
    data = Pipeline(start_seconds=0.75, stalls=some(0.0))
    boundary.boundary(model, data, None, training(100, 1), call_seconds=0.01)
    assert model.now[0] < 8.5


@pytest.mark.parametrize(
    "kind", ["_AssertCardinalityDataset", "_PaddedBatchDataset", "_DenseToRaggedDataset"]
)
def test_a_shuffle_buffer_is_found_behind_what_hands_on(kind):
    """Forty examples of it are as many steps, or, behind what batches them by eight, five."""
    shuffled = type("_ShuffleDataset", (), {"_buffer_size": 40})()
    above = type(kind, (), {"_inputs": lambda self: [shuffled]})()
    found = boundary._steps_in_shuffle_buffer(above, 8)
    assert found == (5.0 if "Batch" in kind else 40.0)
