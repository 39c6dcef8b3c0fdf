"""A session that is timed for the tuner: how it is announced, closed and profiled; and what is measured of weights."""

import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest

from autotune.data.record import Boundary, Outcome
from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import Data, Finish, Finished, FirstStep, Started, TrialRequest, TrialTiming
from autotune.training import gauges, losses, session
from autotune.training.clock import LongEpoch
from autotune.training.gauges import Weights, check_finite_weights
from autotune.training.progress import Training
from autotune.training.session import TimedTrial, TrainingSession


class Shape(tuple):
    """The shape of a tensor."""

    def num_elements(self):
        return math.prod(self)


NUMPY = SimpleNamespace(
    as_dtype=lambda dtype: SimpleNamespace(is_floating=np.issubdtype(dtype, np.floating)),
    convert_to_tensor=lambda variable: variable.value,
    reduce_any=np.any,
    TensorShape=lambda shape: Shape(shape),
    math=SimpleNamespace(is_nan=np.isnan, is_inf=np.isinf),
)


class Variable:
    """A weight, or another variable of a training."""

    def __init__(self, *numbers, path="dense/kernel"):
        self.value, self.path = np.array(numbers), path

    dtype = property(lambda self: self.value.dtype)
    shape = property(lambda self: self.value.shape)

    def numpy(self):
        return self.value

    def assign(self, value):
        self.value = np.array(value)


@pytest.fixture(autouse=True)
def _numpy(monkeypatch):
    monkeypatch.setattr(gauges, "tf", NUMPY)


# ------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_trained_weight_that_is_not_finite_ends_the_trial(number):
    weight = Variable(1.0, number)
    with pytest.raises(TrialFailed, match="dense/kernel is not finite after 7 steps") as caught:
        check_finite_weights(Weights([Variable(1.0), weight], [weight]), step=7)
    assert caught.value.outcome is Outcome.NONFINITE


def test_what_is_not_trained_may_be_infinite_and_never_nan():
    check_finite_weights(Weights([Variable(0.0, -np.inf), Variable(3)], []), step=7)
    with pytest.raises(TrialFailed):
        check_finite_weights(Weights([Variable(np.nan)], []), step=7)


# ------------------------------------------------------------------------------------------ a timed trial


class Made(TrainingSession):
    """A session that nobody trains."""

    def __init__(self, weight=1.0):
        training = Training(
            steps_per_call=2, batch_size=8, examples=100, drop_remainder=False, synchronise=lambda: None
        )
        super().__init__(training, Data(examples=100, endless=False))
        self.variables = [Variable(weight)]

    def facts(self):
        return {"jit_compile": False, "element": "x" * 5000}

    def weights(self):
        return Weights(self.variables, self.variables)

    def gauges(self):
        return []

    def close(self, finish, clock):
        yield 7
        return {"input_wait_fraction": 0.25}


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """A trial of a session, and what it sends."""
    for name, value in {
        "gpu_names": tuple,
        "device_limit_bytes": lambda: None,
        "build_versions": dict,
        "cards_in_use": lambda strategy: [],
        "device_bytes": lambda which: None,
    }.items():
        monkeypatch.setattr(gauges, name, value)
    monkeypatch.setattr(session, "list_devices", lambda: ("CPU:0",))
    monkeypatch.setattr(session, "not_knobs", lambda: ("TF_XLA_FLAGS=--x",))
    profiled = []
    monkeypatch.setattr(session, "_profile", lambda folder, **sizes: profiled.append(sizes) or iter([0, 1]))
    log = tmp_path / "trial" / "log.txt"
    log.parent.mkdir()

    def make(timing=None, **settings):
        sent = []
        timing = TrialTiming(epoch_seconds=1.0, warmup_seconds=1.0, **(timing or {}))
        request = TrialRequest(configuration={"batch_size": 8}, log=str(log), timing=timing)
        trial = TimedTrial(Made(**settings), request, SimpleNamespace(send=sent.append), between_epochs=None)
        return SimpleNamespace(trial=trial, sent=sent, profiled=profiled, folder=log.parent)

    return make


def test_a_session_is_announced_with_its_facts(timed):
    (started,) = timed().sent
    assert isinstance(started, Started)
    assert (started.examples, started.examples_per_epoch) == (100, 100)
    assert (started.element, started.not_knobs) == ("x" * 2000, ("TF_XLA_FLAGS=--x",))


@pytest.mark.parametrize(
    ("baselines", "longest", "measures"),
    [
        (None, 1000.0, True),
        (None, 10.0, False),
        (Boundary(seconds=1.0, seconds_per_example=1.0), 10.0, True),
        (Boundary(seconds=0.0, seconds_per_example=1.0, measured=False), 1000.0, False),
    ],
)
def test_boundary_is_skipped_as_in_baseline_or_in_long_epochs(timed, baselines, longest, measures):
    clock = timed({"boundary": baselines, "longest_boundary_epoch_seconds": longest}).trial.clock
    clock.warm_up.call_seconds.extend([5.0] * 3)  # an epoch takes a minute
    with pytest.raises(LongEpoch) if measures else contextlib.nullcontext():
        clock.change_to_steps()


def test_weights_are_reported_after_the_first_step(timed):
    """Some models are built by their first step."""
    made = timed()
    made.trial._session.variables += [Variable(1.0, 2.0, 3.0), Variable(4.0)]
    made.trial.clock.call_ended({"loss": 2.5})
    assert made.sent[1] == FirstStep(loss=2.5, parameters=5, shapes=("(1,)", "(1,)", "(3,)"))


def test_closing_figures_come_at_once_and_again_when_complete(timed):
    made = timed()
    assert list(made.trial.close(Finish(input_wait_seconds=1.0))) == [7]
    first, last = made.sent[1:]
    assert isinstance(first, Finished)
    assert (first.input_wait_fraction, last.input_wait_fraction) == (None, 0.25)
    assert first.peak_host_bytes == last.peak_host_bytes > 0


def test_what_takes_time_is_left_out_where_it_is_not_asked_for(timed):
    made = timed()
    assert not list(made.trial.close(Finish(profile=True)))
    assert [type(message) for message in made.sent] == [Started, Finished]


def test_a_profile_is_taken_before_the_last_figures(timed):
    made = timed()
    steps = made.trial.close(Finish(input_wait_seconds=1.0, profile=True))
    assert list(steps) == [7, 0, 1]
    assert made.profiled[0]["steps_per_call"] == 2
    assert len(made.sent) == 3
    made.trial.send_final(RuntimeError("\x1b[1mno CUPTI" + "!" * 1000))
    assert made.sent[-1].no_profile.startswith("RuntimeError: ")
    assert "\x1b" not in made.sent[-1].no_profile
    assert len(made.sent[-1].no_profile) == 300
    assert made.sent[-1].input_wait_fraction == 0.25


def test_a_folder_that_holds_a_profile_is_not_written_to(timed):
    made = timed()
    (made.folder / "profile").mkdir()
    assert list(made.trial.close(Finish(input_wait_seconds=1.0, profile=True))) == [7]
    assert not made.profiled


def test_ruined_weights_send_no_closing_figures(timed):
    made = timed(weight=np.nan)
    with pytest.raises(TrialFailed):
        made.trial.close(Finish())
    assert len(made.sent) == 1


# ------------------------------------------------------------------------------------------ losses


class Momentum:
    """Its state grows with each step."""

    def __init__(self):
        self.rate, self.state = Variable(), Variable(0.0)
        self.learning_rate = 0.5

    variables = property(lambda self: [self.rate, self.state])
    learning_rate = property(lambda self: self.rate, lambda self, value: self.rate.assign(value))

    def build(self, variables):
        """Nothing."""


class Trained:
    """A model whose loss tells its weight, its optimizer's state and its learning rate."""

    built = True

    def __init__(self, weight=0.0):
        self.weight, self.optimizer = Variable(weight), Momentum()
        strategy = SimpleNamespace(
            scope=contextlib.nullcontext, experimental_distribute_dataset=lambda batches: batches
        )
        self.distribute_strategy = strategy

    weights = trainable_variables = property(lambda self: [self.weight])

    def make_train_function(self):
        """It has one."""

    reset_metrics = make_train_function

    def train_function(self, iterator):
        next(iterator)
        state, rate = self.optimizer.state.value[0], self.optimizer.learning_rate.value
        loss = self.weight.value[0] + 10 * state + 100 * rate
        self.optimizer.state.assign([state + 1])
        self.weight.assign(self.weight.value + 1)
        return {"loss": loss}


@pytest.fixture
def curves(monkeypatch):
    """The curves of two steps with these seeds."""
    monkeypatch.setattr(losses, "keras", SimpleNamespace(utils=SimpleNamespace(set_random_seed=lambda seed: None)))
    monkeypatch.setattr(losses, "_record", lambda batches, *_: batches())
    monkeypatch.setattr(losses, "describe_losses", lambda model, curves: curves)

    def train(seeds, fresh_model=None, seconds=60.0):
        runs = SimpleNamespace(seeds=seeds, most_steps=2, seconds=seconds)
        return losses.loss_curves(
            Trained, lambda: [1, 2, 3], runs, batch_size=1, examples=None, fresh_model=fresh_model
        )

    return train


def test_every_training_starts_with_the_first_weights_and_state(curves):
    first, second = curves((0, 1))
    assert first == (50.0, 61.0)
    assert second == pytest.approx(first, abs=0.02)


def test_compiling_takes_nothing_of_the_time_for_steps(curves, monkeypatch):
    clock = [0.0]
    step = Trained.train_function

    def compiled_first(model, iterator):
        clock[0] += 1000.0 if model.weight.value[0] == 0.0 else 1.0
        return step(model, iterator)

    monkeypatch.setattr(Trained, "train_function", compiled_first)
    monkeypatch.setattr(losses, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert [len(curve) for curve in curves((0, 1))] == [2, 2]
    assert [len(curve) for curve in curves((0, 1), seconds=-1.0)] == [1, 1]


def test_a_fresh_model_gives_each_seed_its_weights(curves):
    weights = iter((3.0, 5.0))
    assert curves((0, 1), fresh_model=lambda: Trained(next(weights))) == ((53.0, 64.0), (55.0, 66.0))
