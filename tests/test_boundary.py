"""What a boundary between long epochs costs, from what was timed of short ones; nothing here is trained."""

import itertools
import math
from types import SimpleNamespace

import pytest

from autotune.recipe import tf_private
from autotune.training import boundary
from autotune.training.progress import Training


def training(steps, steps_per_call=1, synchronise=lambda: None):
    """One with epochs of so many steps."""
    return Training(
        steps_per_call=steps_per_call, batch_size=32, examples=32 * steps, drop_remainder=False, synchronise=synchronise
    )


class Dataset:
    """As many batches as it says."""

    def __init__(self, batches=100):
        self.batches = batches

    def take(self, batches):
        """Fewer of them."""
        return Dataset(min(batches, self.batches))


class _ShuffleDataset:
    """What `tf.data` calls it."""

    def __init__(self, buffer_size):
        self._buffer_size = buffer_size


class _BatchDataset(Dataset):
    """The same."""

    def __init__(self, source):
        super().__init__()
        self._inputs = lambda: [source]


class Pipeline:
    """A training pipeline that takes so long to start; its old iterator takes so long to go, each in turn."""

    def __init__(self, *, start_seconds=0.0, stalls=(0.0,), buffered=None, steps=100):
        self.start_seconds, self.stalls, self.steps = start_seconds, itertools.cycle(stalls), steps
        self.dataset = _BatchDataset(Dataset() if buffered is None else _ShuffleDataset(32 * buffered))
        self.fit_args = {"x": self}

    def shorter(self, steps):
        """The same, with epochs of fewer steps."""
        fewer = Pipeline(start_seconds=self.start_seconds, steps=steps)
        fewer.stalls = self.stalls
        return fewer


class Model:
    """One whose `fit` goes by a clock of its own: a call takes 10 ms, making an iterator 5.

    A validation takes what it begins with, its calls, and what it ends with; the very first compiles for a second.
    """

    def __init__(self, clock):
        self.now, self.call_seconds, self.epochs = clock, 0.01, 0
        self.validation_begins_in, self.validation_call_seconds, self.compiled = 0.0, 0.0125, False
        self.steps_per_call, self.validated_calls = 1, 0
        self.stalls = itertools.repeat(0.0)
        self.stop_training = False
        self.train_function = lambda start_seconds: self.wait(start_seconds + self.call_seconds)

    def wait(self, seconds):
        """Time passes."""
        self.now[0] += seconds

    def evaluate(self, data, verbose):
        """One validation."""
        calls = math.ceil(data.batches / self.steps_per_call)
        self.validated_calls += calls
        self.wait(self.validation_begins_in + calls * self.validation_call_seconds + next(self.stalls))
        self.wait(0.0 if self.compiled else 1.0)
        self.compiled = True

    def fit(self, x, *, callbacks, epochs, validation_data=None, **_):
        """Calls back as Keras does; the old iterator goes before an epoch's first call."""
        (*own, edges), self.stop_training = callbacks, False
        for epoch in range(epochs):
            edges.on_epoch_begin(epoch)
            self.wait(0.005 + (next(x.stalls) if epoch else 0.0))
            for step in range(x.steps):
                self.train_function(0.0 if step else x.start_seconds)
                for callback in own:
                    callback.on_train_batch_end(step)
            if validation_data is not None:
                self.evaluate(validation_data, 0)
            for callback in own:
                callback.on_epoch_end(epoch)
            edges.on_epoch_end(epoch)
            self.epochs += 1
            if self.stop_training:
                break


@pytest.fixture
def model(monkeypatch):
    """One on a clock of its own."""
    now = [0.0]
    callbacks = SimpleNamespace(LambdaCallback=SimpleNamespace)
    monkeypatch.setattr(boundary, "keras", SimpleNamespace(callbacks=callbacks))
    monkeypatch.setattr(boundary, "tf", SimpleNamespace(data=SimpleNamespace(Iterator=Pipeline)))
    monkeypatch.setattr(boundary.time, "perf_counter", lambda: now[0])
    return Model(now)


def measured(model, pipeline, there=None, *, validation=None, batches=None, callbacks=()):
    """What is measured between two epochs of a hundred steps."""
    return boundary.measure_between_epochs(
        model,
        pipeline,
        validation,
        there or training(100),
        call_seconds=model.call_seconds,
        iterator=None,
        validation_batches=batches,
        fit_args={"callbacks": callbacks},
    )


@pytest.mark.parametrize("start_seconds", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("stall", [0.0, 0.02])
def test_what_every_epoch_takes_beyond_its_steps_is_charged(model, start_seconds, stall):
    found = measured(model, Pipeline(start_seconds=start_seconds, stalls=[stall]))
    assert found.boundary.seconds == pytest.approx(0.005 + start_seconds + stall)
    assert found.boundary.validation_seconds == 0.0
    assert not found.taken_over


class Slow:
    """A callback that takes its time in each batch and at each epoch's end, and would end the training."""

    def __init__(self, model):
        self.model = model

    def on_train_batch_end(self, step):
        """A progress bar, say."""
        self.model.wait(0.002)

    def on_epoch_end(self, epoch):
        """A prediction, say."""
        self.model.wait(0.75)
        self.model.stop_training = True


@pytest.mark.parametrize("validation", [None, Dataset(80)])
def test_what_callbacks_do_at_an_epochs_end_is_charged(model, validation):
    model.validation_begins_in, model.compiled = 0.05, True
    found = measured(model, Pipeline(), validation=validation, batches=80, callbacks=[Slow(model)])
    last_batch = 0.002  # no step follows it
    assert found.boundary.seconds == pytest.approx(0.005 + 0.75 + last_batch)
    assert found.boundary.seconds_per_example == pytest.approx(0.01 / 32)
    assert found.boundary.validation_seconds == pytest.approx(0.05 + 80 * 0.0125 if validation else 0.0)
    assert model.epochs == 3, "two, and one more within two seconds"


def test_one_epoch_that_stalls_is_not_charged_to_all(model):
    assert measured(model, Pipeline(stalls=[0.0, 1.0, 0.0])).boundary.seconds == pytest.approx(0.005)


def test_one_call_that_stalls_is_no_boundary(model):
    calls, usual = itertools.count(), model.call_seconds
    model.train_function = lambda start_seconds: model.wait(5.0 if next(calls) == 9 else usual)
    assert measured(model, Pipeline()).boundary.seconds == pytest.approx(0.005)


def test_what_a_device_has_still_to_do_is_no_boundary(model):
    behind = [0.0]

    def synchronise():
        model.wait(behind[0])
        behind[0] = 0.0

    def call(start_seconds):
        model.wait(start_seconds + 0.001)
        behind[0] += 0.05

    model.train_function = call
    found = measured(model, Pipeline(), training(100, synchronise=synchronise))
    assert found.boundary.seconds == pytest.approx(0.005)
    assert found.boundary.seconds_per_example == pytest.approx(0.051 / 32)


@pytest.mark.parametrize(
    ("steps", "per_call", "buffered", "counted"),
    [(100, 1, 20, 80), (40, 10, 20, 2), (31, 10, 15.5, None), (100, 1, 60, None), (100, 1, None, None)],
)
@pytest.mark.parametrize("kept_seconds", [0.009, None])
def test_what_a_full_shuffle_buffer_saves_is_not_charged(
    monkeypatch, model, steps, per_call, buffered, counted, kept_seconds
):
    """Steps that it feeds do not wait for input: they do not count, and the refill costs less by what they save.

    At least two calls must count, of which the first is no part of a slice; where nothing tells the wait, none is taken
    away.
    """
    monkeypatch.setattr(boundary, "kept_call_seconds", lambda *_: kept_seconds)
    there = training(steps, per_call)
    pipeline = Pipeline(start_seconds=1.0, buffered=buffered, steps=steps)
    found = measured(model, pipeline, there)
    assert found.counted_calls == counted
    saved = 0.0 if counted is None or kept_seconds is None else 0.001 * buffered / per_call
    assert found.boundary.seconds == pytest.approx(1.005 - saved)
    assert found.boundary.seconds_per_example == pytest.approx(0.01 / per_call / 32)
    assert found.boundary.tail_excluded == (counted is not None)
    again = boundary.take_over(found.boundary, pipeline, there)
    assert (again.boundary, again.counted_calls, again.taken_over) == (found.boundary, counted, True)


def test_negligible_boundary_leaves_every_step_counted(model):
    pipeline, there = Pipeline(start_seconds=0.004, buffered=20), training(100)
    found = measured(model, pipeline, there)
    assert (found.counted_calls, found.boundary.seconds) == (None, pytest.approx(0.009))
    assert boundary.take_over(found.boundary, pipeline, there).counted_calls is None


def test_short_epochs_end_in_time(model):
    model.call_seconds = 3.0
    measured(model, Pipeline())
    assert model.epochs == 2
    assert model.now[0] < 13.0


@pytest.mark.parametrize("batches", [1, 5, 21, 80, 3000])
@pytest.mark.parametrize("begins_in", [0.0, 0.05, 3.0])
@pytest.mark.parametrize("call_seconds", [0.0005, 0.0125, 0.7])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_validation_is_charged_whole_by_a_part_of_it(model, batches, begins_in, call_seconds, steps_per_call):
    model.validation_begins_in, model.validation_call_seconds = begins_in, call_seconds
    model.stalls = itertools.cycle([0.4, 0.0])
    model.steps_per_call = steps_per_call
    found = measured(model, Pipeline(), training(1000, steps_per_call), validation=Dataset(batches), batches=batches)
    calls = math.ceil(batches / steps_per_call)
    assert found.boundary.validation_seconds == pytest.approx(begins_in + calls * call_seconds)
    assert model.validated_calls * call_seconds < 6.0, "of each part two runs, and twice as much each time"


def test_validation_of_unknown_length_is_charged_twenty_calls(model):
    found = measured(model, Pipeline(), validation=Dataset(3000))
    assert found.boundary.validation_seconds == pytest.approx(20 * 0.0125)


@pytest.mark.parametrize("kind", ["_AssertCardinalityDataset", "_PaddedBatchDataset", "_DenseToRaggedDataset"])
def test_a_shuffle_buffer_is_found_behind_what_hands_on(kind):
    above = type(kind, (), {"_inputs": lambda self: [_ShuffleDataset(40)]})()
    found = boundary._steps_in_shuffle_buffer(above, 8)
    assert found == (5.0 if "Batch" in kind else 40.0)


def test_shuffle_buffer_is_unknown_without_private_names(monkeypatch, caplog):
    for name in ("keras", "tf"):
        monkeypatch.setattr(tf_private, name, SimpleNamespace(__version__="9.9"))
    for kind in ("_ShuffleDataset", "_PrefetchDataset"):
        assert boundary._steps_in_shuffle_buffer(type(kind, (), {})(), 8) is None
    assert "_ShuffleDataset._buffer_size" in caplog.text
    assert "Dataset._inputs" in caplog.text


# ------------------------------------------------------------------------------------------ between two calls of `fit`


def test_time_between_fits_excludes_epoch_boundaries(model):
    behind = [0.0]

    def synchronise():
        model.wait(behind[0])

    def fit(model, **arguments):
        model.fit(Pipeline(), **arguments)

    refits = boundary.Refits(3, synchronise)
    model.make_train_function = lambda: None
    behind[0] = 0.04
    while not refits.are_measured:
        began = model.epochs
        refits.run(model, fit, {"initial_epoch": 0}, [])
        assert model.epochs - began == 2, "two short epochs"
        model.wait(0.25)  # the script's own lines
    assert refits.seconds == pytest.approx(0.25)
    assert refits.first_call_seconds == pytest.approx(0.05)
