"""The clock that cuts a running `fit` into slices, driven by a made-up training in made-up time."""

import inspect
import math
import os
import signal
import statistics
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.data.record import Boundary, Outcome
from autotune.machine.telemetry import Counters
from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import Finish, FirstStep, Measure, Ready, SliceDone
from autotune.training import gauges
from autotune.training.clock import LongEpoch, StepClock
from autotune.training.progress import BetweenEpochs, Progress, Training
from autotune.training.slices import TrainingEnded, finite_loss, freeze_own_group, step_quantiles

FROZEN_SECONDS = 100.0
"""How long the made-up tuner leaves the training frozen, each time."""

# Times below are multiples of powers of two, so that sums are exact.
STEPS = 45
"""In an epoch of 1,437 examples in batches of 32; the last batch has 29."""


SHORT = {"step_seconds": 1 / 512, "boundary_seconds": 1 / 16}
"""Epochs of 0.15 s."""


class Simulation:
    """A training in made-up time, timed by a real `StepClock`, and the tuner at the other end.

    Args:
        commands: What the tuner says, in order; it says `Finish` after that.
        examples: In an epoch; None for a training without an end.
        told: How many the clock is told of instead.
        step_seconds: Of each step, or a function of the number of the call, from 0.
        boundary_seconds: What an epoch takes beyond its steps.
        smaller_batch_seconds: What the first smaller batch takes on top, for it is a new shape.
        synchronise_seconds: How long the device is behind, whenever it is waited for.
        lag_seconds: How long before the device has done a call that comes back: its loss is known, and no more.
        loss: Of each call, or a function of the number of the call.
        epochs_with_data: After so many epochs the dataset yields nothing more.
        counters_seconds: How long it takes to read what the machine counts: a core that is busy for others.
        skips: Whether a loss scale skips the step of this number, from 0; None without one.
        metrics: What a call reports beside the loss, a function of its number.
        boundary: What lies between two epochs, where the clock is told before it begins.
        charged_seconds: An epoch's share of what a further call of `fit` costs.
        longest_boundary_epoch_seconds: The boundary of longer epochs is not measured.
        more_gauges: Besides those of the machine and the loss scale.
        save_after: Steps after which the state is saved.
        saving_seconds: What saving the state takes; it is not saved when None.
    """

    def __init__(
        self,
        *commands,
        examples=1437,
        told=None,
        batch_size=32,
        drop_remainder=False,
        steps_per_call=1,
        step_seconds=1 / 64,
        first_call_seconds=0.0,
        smaller_batch_seconds=0.0,
        boundary_seconds=1 / 8,
        synchronise_seconds=0.0,
        lag_seconds=0.0,
        loss=0.5,
        epochs_with_data=math.inf,
        counters_seconds=0.0,
        skips=None,
        metrics=lambda call: {"accuracy": 0.9},
        boundary=None,
        charged_seconds=0.0,
        warmup_seconds=60.0,
        epoch_seconds=1.5,
        longest_boundary_epoch_seconds=math.inf,
        more_gauges=(),
        save_after=math.inf,
        saving_seconds=None,
    ):
        self.now = 1000.0
        self.events, self.sent, self.frozen_after = [], [], []
        self.counters_seconds = counters_seconds
        self.skips = skips
        self.calls = self.steps = self.updates = 0
        self.commands = list(commands)
        self.epochs_with_data = epochs_with_data
        self.saving_seconds = saving_seconds
        self.step_seconds = step_seconds if callable(step_seconds) else lambda call: step_seconds
        self.loss = loss if callable(loss) else lambda call: loss
        self.metrics = metrics
        self.first_call_seconds = first_call_seconds
        self.smaller_batch_seconds = smaller_batch_seconds
        self.boundary_seconds = boundary_seconds
        self.steps_per_call = steps_per_call
        self.synchronise_seconds = synchronise_seconds
        self.lag_seconds, self.device_done_at = lag_seconds, self.now
        whole = 10**9 if examples is None else examples // batch_size
        rest = 0 if examples is None or drop_remainder else examples % batch_size
        self.steps_in_epoch = whole + (rest > 0)
        self.has_smaller_batch = rest > 0
        measured = [lambda: gauges.measure_machine(self.counters), *more_gauges]
        self.clock = StepClock(
            Progress(
                Training(
                    steps_per_call=steps_per_call,
                    batch_size=batch_size,
                    examples=told or examples,
                    drop_remainder=drop_remainder,
                    synchronise=self.synchronise,
                    charged_per_epoch_seconds=charged_seconds,
                )
            ),
            self,
            warmup_seconds=warmup_seconds,
            epoch_seconds=epoch_seconds,
            between_epochs=boundary,
            longest_boundary_epoch_seconds=longest_boundary_epoch_seconds,
            saves_state=self.save_state,
            save_after=save_after,
            gauges=measured,
            freeze=self.freeze,
            clock=lambda: self.now,
        )
        if skips is not None:
            measured.append(gauges.skipped_steps_gauge(self.clock.progress, lambda: self.updates))

    # The tuner's end.

    def send(self, message):
        """Take a report."""
        self.events.append(message.kind)
        self.sent.append(message)

    def receive(self):
        """Give the next command."""
        command = self.commands.pop(0) if self.commands else Finish()
        self.events.append(command.kind)
        return command

    # What TensorFlow and the operating system would do.

    def freeze(self):
        """Stand still for long."""
        self.events.append("freeze")
        self.frozen_after.append(self.calls)
        self.now += FROZEN_SECONDS

    def save_state(self):
        """Save weights and optimizer."""
        if self.saving_seconds is None:
            return False
        self.events.append(f"saved after {self.steps} steps")
        self.now += self.saving_seconds
        return True

    def counters(self):
        """One core is always busy, and never with this training, which takes a core and a half."""
        self.now += self.counters_seconds
        return Counters(at=self.now, own=1.5 * self.now, cores=4, busy=2.5 * self.now)

    def synchronise(self):
        """Wait until the device has caught up."""
        self.events.append("synchronise")
        self.now = max(self.now, self.device_done_at) + self.synchronise_seconds

    def train(self, iterator):
        """One call of the train function, on `iterator.left` steps."""
        steps = min(self.steps_per_call, iterator.left)
        iterator.left -= steps
        self.device_done_at = max(self.now, self.device_done_at) + steps * self.step_seconds(self.calls)
        self.now = max(self.now, self.device_done_at - self.lag_seconds)
        if self.calls == 0:
            self.now += self.first_call_seconds
        if self.has_smaller_batch and not iterator.left:
            self.now += self.smaller_batch_seconds
            self.smaller_batch_seconds = 0.0
        loss = self.loss(self.calls)
        for step in range(self.steps, self.steps + steps):
            self.updates += not (self.skips and self.skips(step))
        self.calls += 1
        self.steps += steps
        return None if loss is None else {"loss": loss, **self.metrics(self.calls - 1)}

    def fit(self):
        """Epochs, as Keras runs them, until the clock ends it."""
        train = self.clock.wrap(self.train)
        for epoch in range(10_000):
            self.clock.epoch_began()
            self.now += self.boundary_seconds / 2  # a new iterator
            iterator = SimpleNamespace(left=self.steps_in_epoch if epoch < self.epochs_with_data else 0)
            while iterator.left:
                train(iterator)
            self.now = max(self.now, self.device_done_at)  # Keras reads the metrics
            self.now += self.boundary_seconds / 2  # validation
            self.clock.epoch_ended()
        raise AssertionError("the clock never ended the training")

    def run(self, overhead=0.0, counted_calls=None):
        """`fit`, and where it turns out to have long epochs a second one by steps; returns the slices."""
        try:
            self.fit()
        except TrainingEnded:
            pass
        except LongEpoch:
            self.now += 7.0  # measuring the boundary's cost
            self.clock.time_by_steps(
                BetweenEpochs(boundary=Boundary(seconds=overhead, seconds_per_example=1.0), counted_calls=counted_calls)
            )
            with pytest.raises(TrainingEnded):
                self.fit()
        return [message.slice for message in self.sent if isinstance(message, SliceDone)]

    @property
    def ready(self):
        """The one report of being warm."""
        (message,) = [message for message in self.sent if isinstance(message, Ready)]
        return message


BETWEEN = BetweenEpochs(boundary=Boundary(seconds=0.0, seconds_per_example=1.0), taken_over=True)
"""A boundary that costs nothing, taken over."""
EPOCH_SECONDS = STEPS / 64 + 1 / 8
"""Of an epoch of the simulation as it is when nothing is said: 0.828."""
LONG = {"examples": 14_370, "step_seconds": 1 / 32, "warmup_seconds": 3.0}
"""450 steps and 14 seconds to an epoch; the last batch has 2 examples, which is 30 fewer than the others."""
NO_END = {"examples": None, "warmup_seconds": 3.0}


# --------------------------------------------------------------------------------------------- whole epochs


def test_a_slice_that_an_epoch_fills_exactly_ends_with_it():
    (measured,) = Simulation(Measure(seconds=2 * EPOCH_SECONDS)).run()
    assert measured.epochs == 2


@pytest.mark.parametrize("length", [{}, LONG, NO_END])
def test_a_slice_is_charged_its_share_of_a_further_call_of_fit(length):
    (measured,) = Simulation(Measure(seconds=2.0), charged_seconds=0.25, **length).run()
    examples = {"examples": 1437, **length}["examples"]
    assert measured.charged_seconds == (0.25 * measured.examples / examples if examples else 0.0)
    assert measured.seconds >= 2.0


@pytest.mark.parametrize(
    ("sizes", "counted"),
    [
        ({"drop_remainder": True}, (44, 44 * 32)),
        ({"examples": 1440}, (45, 1440)),
        ({"steps_per_call": 8}, (45, 1437)),
        ({"examples": 1280, "told": 1504, "batch_size": 256}, (5, 1280)),
    ],
    ids=["dropped remainder", "full batches", "several steps a call", "fewer batches than told"],
)
def test_an_epoch_is_counted_as_it_was_trained(sizes, counted):
    (measured,) = Simulation(Measure(seconds=0.1), **sizes).run()
    assert (measured.steps / measured.epochs, measured.examples / measured.epochs) == counted


@pytest.mark.parametrize(("examples", "steps"), [(1437, STEPS), (20, 1)])
def test_a_training_of_short_epochs_is_not_frozen_between_them(examples, steps):
    simulation = Simulation(*2 * [Measure(seconds=0.5)], **SHORT, examples=examples)
    slices = simulation.run()
    assert len(simulation.frozen_after) == 3
    assert all(calls % steps == 1 % steps for calls in simulation.frozen_after)
    for measured in slices:
        assert measured.epochs > 1
        assert measured.steps == measured.epochs * steps
        assert measured.seconds == measured.epochs * (steps / 512 + 1 / 16)


def test_the_first_lap_after_a_freeze_is_not_counted():
    def step_seconds(call):
        frozen = simulation.frozen_after
        return (1 / 64 if frozen and call < frozen[-1] + STEPS else 1) / 512

    simulation = Simulation(
        *3 * [Measure(seconds=0.5)],
        **SHORT | {"step_seconds": step_seconds},
        skips=lambda step: bool(simulation.frozen_after) and step < simulation.frozen_after[-1] + STEPS,
    )
    for measured in simulation.run():
        assert measured.seconds == measured.epochs * (STEPS / 512 + 1 / 16)
        assert measured.step_seconds.p50 == 1 / 512
        assert measured.cpu_seconds == pytest.approx(1.5 * measured.seconds)
        assert measured.skipped_steps == 0
    assert simulation.ready.run_in_seconds == simulation.ready.epoch_seconds > 0


def test_epoch_slice_begins_and_ends_with_device_synchronised():
    simulation = Simulation(Measure(seconds=0.1), synchronise_seconds=0.25)
    (measured,) = simulation.run()
    assert measured.seconds == EPOCH_SECONDS + 0.25
    begun = simulation.events.index("measure")
    assert simulation.events[begun : simulation.events.index("slice")].count("synchronise") == 2


@pytest.mark.parametrize("length", [{"boundary_seconds": 0.0}, NO_END], ids=["epochs", "steps"])
def test_device_lag_at_the_end_of_a_slice_counts_as_call_time(length):
    simulation = Simulation(Measure(seconds=0.5), synchronise_seconds=0.25, **length)
    (measured,) = simulation.run()
    calls = measured.steps - measured.epochs  # an epoch's first call is left out
    assert simulation.clock.slices.call_seconds == pytest.approx(1 / 64 + 0.25 / calls)


def test_the_loss_of_epochs_is_that_of_a_whole_one():
    simulation = Simulation(Measure(seconds=0.1), **SHORT, loss=lambda call: 9.0 if call % STEPS == 0 else 0.5)
    (measured,) = simulation.run()
    assert measured.loss == 0.5


def test_step_times_of_a_slice_are_those_of_its_steps():
    (measured,) = Simulation(Measure(seconds=2.0), boundary_seconds=0.5).run()
    assert measured.epochs == 2
    assert measured.step_seconds.p50 == measured.step_seconds.p90 == 1 / 64
    assert measured.step_seconds.max == 1 / 64 + 0.5


def test_times_of_calls_with_several_steps_are_given_per_step():
    simulation = Simulation(Measure(seconds=0.1), steps_per_call=8, examples=1536, boundary_seconds=0.0)
    (measured,) = simulation.run()
    assert measured.step_seconds.p50 == 1 / 64
    assert simulation.ready.call_seconds == 8 / 64


def test_what_a_call_takes_in_the_slices_leaves_boundaries_out():
    for sizes, expected in (({}, 1 / 64), ({"steps_per_call": 64}, None), (LONG, 1 / 32)):
        simulation = Simulation(*2 * [Measure(seconds=0.5)], **sizes)
        simulation.run()
        assert simulation.clock.slices.call_seconds == expected


@settings(max_examples=100, deadline=None)
@given(
    examples=st.integers(33, 3000),
    steps_per_call=st.sampled_from([1, 3, 16]),
    target=st.floats(0.01, 5.0),
    boundary=st.floats(0.0, 0.5),
    drop_remainder=st.booleans(),
)
def test_short_epochs_are_never_cut(examples, steps_per_call, target, boundary, drop_remainder):
    simulation = Simulation(
        *2 * [Measure(seconds=target)],
        examples=examples,
        steps_per_call=steps_per_call,
        boundary_seconds=boundary,
        drop_remainder=drop_remainder,
        step_seconds=1 / 128,
    )
    epoch = simulation.steps_in_epoch / 128 + boundary
    in_epoch = examples // 32 * 32 if drop_remainder else examples
    for measured in simulation.run():
        assert measured.seconds == pytest.approx(measured.epochs * epoch)
        assert measured.examples == measured.epochs * in_epoch
        assert measured.seconds >= target
        assert (measured.epochs - 1) * epoch < target + 1e-6


# ------------------------------------------------------------------------------------------- the tuner's end


def test_reports_precede_freezes_and_commands_follow_them():
    simulation = Simulation(Measure(seconds=0.1))
    simulation.run()
    events = [event for event in simulation.events if event != "synchronise"]
    assert events == ["first_step", "trial_ready", "freeze", "measure", "slice", "freeze", "finish"]
    for report in ("first_step", "trial_ready", "slice"):
        assert simulation.events[simulation.events.index(report) - 1] == "synchronise"


def test_a_trial_freezes_with_its_whole_process_group(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "killpg", lambda *arguments: sent.append(arguments))
    freeze_own_group()
    assert sent == [(0, signal.SIGSTOP)]


def test_finish_ends_the_training_and_is_handed_on():
    with pytest.raises(TrainingEnded) as ended:
        Simulation(Finish(input_wait_seconds=2.5)).fit()
    assert ended.value.finish == Finish(input_wait_seconds=2.5)


def test_the_train_function_is_called_as_before():
    logs, given_to = {"loss": 0.25}, []

    def train(iterator):
        given_to.append(iterator)
        return logs

    assert Simulation().clock.wrap(train)("the iterator") is logs
    assert given_to == ["the iterator"]


@pytest.mark.parametrize("settings", [{}, NO_END, SHORT], ids=["epochs", "no end", "short"])
def test_continuous_slices_follow_without_a_freeze(settings):
    simulation = Simulation(Measure(seconds=1.0, slices=4), Measure(seconds=0.1), **settings)
    *measured, single = simulation.run()
    assert len(measured) == 4
    assert simulation.events.count("freeze") == 3
    run_in = STEPS if single.epochs else 0
    trained = sum(each.steps for each in measured)
    assert simulation.frozen_after[1] - simulation.frozen_after[0] == trained + run_in
    rates = [each.examples / each.seconds for each in (*measured, single)]
    assert rates == pytest.approx([rates[0]] * 5)


# ------------------------------------------------------------------------------------------------- warm-up


def test_what_a_warm_training_reports():
    simulation = Simulation()
    simulation.run()
    ready = simulation.ready
    assert (ready.timed_by, ready.settled) == ("epochs", True)
    assert ready.epoch_seconds == EPOCH_SECONDS
    assert ready.call_seconds == 1 / 64
    assert ready.epoch_overhead_seconds == 1 / 8
    assert ready.compile_seconds == 1 / 16


def test_compiling_is_recorded_apart_and_in_no_slice():
    quick, slow = (
        Simulation(Measure(seconds=0.1), first_call_seconds=first, smaller_batch_seconds=smaller)
        for first, smaller in ((0.0, 0.0), (50.0, 30.0))
    )
    (expected,), (measured,) = quick.run(), slow.run()
    assert slow.ready.timed_by == "epochs"
    assert slow.ready.compile_seconds == quick.ready.compile_seconds + 80.0
    assert slow.ready.warmup_seconds == quick.ready.warmup_seconds + 30.0
    assert measured.seconds == expected.seconds


def test_a_slow_last_call_of_full_size_is_no_compile_time():
    slow = {44: 2.0}
    simulation = Simulation(examples=1440, step_seconds=lambda call: 1 / 64 + slow.get(call, 0.0))
    simulation.run()
    assert simulation.ready.compile_seconds == 1 / 16


def test_warm_up_waits_for_the_steady_state():
    slow_calls = 4 * STEPS
    simulation = Simulation(Measure(seconds=0.1), step_seconds=lambda call: (2 if call < slow_calls else 1) / 128)
    (measured,) = simulation.run()
    assert simulation.ready.settled
    assert measured.seconds == STEPS / 128 + 1 / 8


def test_warm_up_ends_at_its_cap_and_says_that_it_did_not_settle():
    simulation = Simulation(
        Measure(seconds=0.1),
        step_seconds=lambda call: 0.8 ** (call / STEPS) / 64,
        boundary_seconds=0.0,
        warmup_seconds=2.5,
    )
    assert len(simulation.run()) == 1
    assert simulation.ready.settled is False
    assert 2.0 < simulation.ready.warmup_seconds < 2.6


def test_the_epoch_that_compiles_says_nothing_of_the_usual_pace():
    simulation = Simulation(examples=160, step_seconds=lambda call: (2 if call < 5 else 1) / 16)
    simulation.run()
    assert simulation.ready.call_seconds == 1 / 16


@pytest.mark.parametrize(("cap", "epochs"), [(2.2, 2), (2.8, 3)])
def test_epoch_time_is_the_median_after_the_first_epoch(cap, epochs):
    pace = [4, 2, 1]  # of the second epoch to the fourth, in 256ths of a second a step
    simulation = Simulation(
        step_seconds=lambda call: pace[max(0, min((call - 1) // STEPS, 3) - 1)] / 256, warmup_seconds=cap
    )
    simulation.run()
    lengths = [STEPS * steps / 256 + 1 / 8 for steps in pace]
    assert simulation.ready.epoch_seconds == statistics.median(lengths[:epochs])
    assert simulation.calls == (1 + epochs) * STEPS + 1


@pytest.mark.parametrize(("pace", "settled"), [(1.0, True), (1.1, True), (0.9, False)])
def test_warm_up_of_few_epochs_is_judged_by_its_calls(pace, settled):
    simulation = Simulation(step_seconds=lambda call: pace ** (call // STEPS) / 64, warmup_seconds=3.2)
    simulation.run()
    assert simulation.ready.settled is settled


@pytest.mark.parametrize("by_steps", [False, True])
def test_warm_up_of_too_few_steps_leaves_settled_unknown(by_steps):
    steps = {"examples": None, "step_seconds": 0.15, "warmup_seconds": 0.4}
    epochs = {"examples": 20, "step_seconds": 0.8, "warmup_seconds": 2.25}
    simulation = Simulation(**(steps if by_steps else epochs))
    simulation.run()
    assert simulation.ready.timed_by == ("steps" if by_steps else "epochs")
    assert simulation.ready.settled is None


@pytest.mark.parametrize("steps_per_call", [1, 5])
def test_what_is_discarded_as_warm_up_is_reported(steps_per_call):
    simulation = Simulation(Measure(seconds=0.1), Measure(seconds=2.0), steps_per_call=steps_per_call)
    slices = simulation.run()
    assert simulation.ready.warmup_steps == simulation.steps - sum(slice_.steps + STEPS for slice_ in slices)
    assert slices[-1].trained_examples == pytest.approx(32 * simulation.steps, rel=0.01)


def test_warm_up_by_steps_ends_at_twice_its_cap():
    simulation = Simulation(Measure(seconds=0.1), **{**LONG, "warmup_seconds": 1.5}, boundary=BETWEEN)
    began = simulation.now
    simulation.step_seconds = lambda call: 0.5 ** min(4.0, simulation.now - began) / 32
    assert len(simulation.run()) == 1
    assert simulation.ready.settled is False
    assert 3.0 <= simulation.ready.warmup_seconds < 3.2


def test_a_second_fit_has_a_warm_up_of_its_own():
    simulation = Simulation(**{**LONG, "warmup_seconds": 1.5})
    began = simulation.now
    simulation.step_seconds = lambda call: 0.7 ** min(14.0, simulation.now - began) / 8
    simulation.run()
    assert simulation.ready.warmup_seconds > 7.0 + 1.5
    assert simulation.ready.settled is False


# ------------------------------------------------------------------------------------- which epochs are long


def test_as_long_epochs_as_the_tuner_allows_are_timed_whole():
    epoch = {"step_seconds": 5 / 64, "boundary_seconds": 1.0, "warmup_seconds": 3.0}  # of 4.5 s
    whole = Simulation(Measure(seconds=1.0), epoch_seconds=5.0, **epoch)
    (measured,) = whole.run()
    assert whole.ready.timed_by == "epochs"
    assert whole.ready.run_in_seconds == measured.seconds == STEPS * 5 / 64 + 1.0
    by_steps = Simulation(Measure(seconds=1.0), epoch_seconds=1.5, **epoch)
    by_steps.run(overhead=1.0)
    assert by_steps.ready.timed_by == "steps"
    assert by_steps.ready.run_in_seconds == 0


@pytest.mark.parametrize("step_seconds", [1 / 256, 1 / 32])
def test_long_epoch_is_left_once_its_steps_are_steady(step_seconds):
    simulation = Simulation(**{**LONG, "examples": 32 * 600, "step_seconds": step_seconds})
    with pytest.raises(LongEpoch):
        simulation.fit()
    assert 0.4 <= simulation.calls * step_seconds < 0.5


def test_epoch_of_accelerating_steps_is_watched_for_a_warm_up():
    simulation = Simulation(examples=32 * 400, warmup_seconds=1.5, epoch_seconds=1.0)
    began = simulation.now
    simulation.step_seconds = lambda call: 0.75 ** (simulation.now - began) / 205
    with pytest.raises(LongEpoch):
        simulation.fit()
    assert 1.5 <= simulation.now - began < 1.6


def test_an_epoch_somewhat_too_long_is_left_at_its_end():
    simulation = Simulation(step_seconds=1 / 32, boundary_seconds=0.5)  # 1.9 seconds
    with pytest.raises(LongEpoch):
        simulation.fit()
    assert simulation.calls == 2 * STEPS + 1


@pytest.mark.parametrize("slow", [{1: 0.5}, {2 * STEPS + 7: 2.0}], ids=["kernels are chosen", "a stall"])
def test_one_slow_call_makes_no_epoch_long(slow):
    simulation = Simulation(step_seconds=lambda call: slow.get(call, 1 / 512), warmup_seconds=3.0)
    simulation.run()
    assert simulation.ready.timed_by == "epochs"


def test_once_it_is_warm_no_epoch_is_too_long():
    simulation = Simulation(Measure(seconds=0.1), step_seconds=lambda call: (1 if call < 5 * STEPS + 1 else 40) / 64)
    (measured,) = simulation.run()
    assert measured.seconds == STEPS * 40 / 64 + 1 / 8


@pytest.mark.parametrize(("steps_per_call", "timed_by"), [(64, "epochs"), (15, "epochs"), (12, "steps")])
def test_a_long_epoch_is_timed_by_steps_from_four_calls_on(steps_per_call, timed_by):
    simulation = Simulation(Measure(seconds=0.1), steps_per_call=steps_per_call, step_seconds=1 / 8, warmup_seconds=3.0)
    (measured,) = simulation.run(overhead=0.0)
    assert simulation.ready.timed_by == timed_by
    if timed_by == "epochs":
        assert (measured.epochs, measured.examples, measured.seconds) == (1, 1437, STEPS / 8 + 1 / 8)


def test_epoch_of_one_call_has_no_separate_boundary():
    simulation = Simulation(Measure(seconds=0.1), steps_per_call=64, first_call_seconds=1 / 16)
    simulation.run()
    assert simulation.ready.epoch_overhead_seconds is None
    assert simulation.ready.call_seconds == EPOCH_SECONDS
    assert simulation.ready.compile_seconds == 0.0


def test_a_training_without_an_end_is_timed_by_steps_at_once():
    simulation = Simulation(Measure(seconds=0.5), **NO_END)
    (measured,) = simulation.run()
    assert (simulation.ready.timed_by, simulation.ready.epoch_overhead_seconds) == ("steps", None)
    assert simulation.ready.warmup_seconds < 0.5
    assert (measured.seconds, measured.steps, measured.examples) == (0.5, 32, 32 * 32)


def test_a_slice_goes_on_over_a_training_that_begins_anew():
    simulation = Simulation(Measure(seconds=0.5), **NO_END)
    train = simulation.clock.wrap(simulation.train)

    def trainings():
        for _ in range(100):
            iterator = SimpleNamespace(left=16)
            while iterator.left:
                train(iterator)
            simulation.now += 5.0
            simulation.clock.restarted(simulation.now)

    with pytest.raises(TrainingEnded):
        trainings()
    (measured,) = [each.slice for each in simulation.sent if isinstance(each, SliceDone)]
    assert (measured.steps, measured.seconds) == (32, 0.5)


# ------------------------------------------------------------------------------------------------- by steps


SLOW = {"examples": 14_370, "step_seconds": 2.0, "warmup_seconds": 1.5, "epoch_seconds": 1.0}


@pytest.mark.parametrize("step_seconds", [0.25, 5.0, 60.0])
@pytest.mark.parametrize("boundary", [None, BETWEEN])
def test_a_training_with_slow_steps_is_warm_after_few_of_them(step_seconds, boundary):
    simulation = Simulation(Measure(seconds=0.25), **SLOW | {"step_seconds": step_seconds}, boundary=boundary)
    (measured,) = simulation.run()
    assert measured.steps == 1
    assert simulation.ready.settled
    assert simulation.ready.warmup_steps <= 8


def test_unsettled_slow_steps_end_the_warm_up_after_eight():
    simulation = Simulation(Measure(seconds=0.25), **SLOW | {"step_seconds": lambda call: 9.0 * 0.9**call})
    simulation.run()
    assert simulation.ready.settled is False
    assert simulation.ready.warmup_steps <= 1 + 8 + 2  # the first, and those of the `fit` that was left


def test_boundary_of_a_too_long_epoch_is_not_measured():
    simulation = Simulation(Measure(seconds=4.0), **SLOW, longest_boundary_epoch_seconds=600.0)
    (measured,) = simulation.run(overhead=9.0)
    assert measured.seconds == 4.0
    assert not simulation.ready.boundary.measured
    assert simulation.ready.epoch_overhead_seconds == 0.0
    shorter = Simulation(Measure(seconds=4.0), **SLOW, longest_boundary_epoch_seconds=1000.0)
    shorter.run(overhead=9.0)
    assert shorter.ready.boundary.measured
    assert shorter.ready.epoch_overhead_seconds == 9.0


@pytest.mark.parametrize("steps_per_call", [1, 16])
def test_a_slice_of_steps_has_no_boundary_and_no_smaller_call(steps_per_call):
    simulation = Simulation(
        *[Measure(seconds=20.0)] * 3,
        **LONG,
        boundary_seconds=4.0,
        smaller_batch_seconds=9.0,
        steps_per_call=steps_per_call,
    )
    for measured in simulation.run(overhead=4.0):
        assert measured.epochs == 0
        assert measured.seconds == measured.steps / 32 == measured.examples / 32 / 32
        assert measured.step_seconds.max == 1 / 32
        assert measured.cpu_seconds == pytest.approx(1.5 * measured.seconds), "its part of all"


def test_nothing_is_thrown_away_where_all_batches_have_one_size():
    simulation = Simulation(Measure(seconds=30.0), **{**LONG, "examples": 14_400})
    (measured,) = simulation.run(overhead=0.125)
    assert (measured.seconds, measured.steps, measured.examples) == (30.0, 960, 960 * 32)
    assert simulation.calls - measured.steps < 50


def test_what_a_training_timed_by_steps_reports():
    simulation = Simulation(**LONG, first_call_seconds=5.0, boundary_seconds=0.0)
    simulation.run(overhead=0.375)
    ready = simulation.ready
    assert (ready.timed_by, ready.settled) == ("steps", True)
    assert (ready.epoch_overhead_seconds, ready.epoch_seconds) == (0.375, None)
    assert ready.warmup_seconds < 7.0 + 3.0  # the boundary's measuring, and less than the cap
    assert ready.call_seconds == 1 / 32
    assert ready.compile_seconds == 5.0


@pytest.mark.parametrize(("examples", "calls"), [(14_370, 16), (1_437, 2 * STEPS + 2)])
def test_where_the_boundary_is_known_the_fit_is_not_left(examples, calls):
    simulation = Simulation(
        *[Measure(seconds=4.0)] * 4,
        **{**LONG, "examples": examples, "warmup_seconds": 4.0},
        boundary_seconds=1.0,
        smaller_batch_seconds=9.0,
        boundary=BETWEEN,
    )
    slices = simulation.run()
    assert simulation.events.count("first_step") == 1
    assert simulation.ready.timed_by == "steps"
    assert simulation.ready.boundary is None
    assert simulation.frozen_after[0] == calls
    for measured in slices:
        assert (measured.epochs, measured.seconds) == (0, measured.steps / 32)
        assert measured.step_seconds.max == 1 / 32


def test_validation_is_charged_by_the_trials_own_pace():
    boundary = Boundary(seconds=0.5, validation_seconds=3.0, seconds_per_example=1 / 16 / 32)
    charged = []
    for step_seconds in (1 / 16, 1 / 32):
        simulation = Simulation(
            **{**LONG, "step_seconds": step_seconds}, boundary=BetweenEpochs(boundary=boundary, taken_over=True)
        )
        simulation.run()
        charged.append(simulation.ready.epoch_overhead_seconds)
    assert charged == [3.5, 2.0]


def test_boundary_is_reported_at_the_pace_of_warm_training():
    simulation = Simulation(**{**LONG, "step_seconds": lambda call: (1 if call < 20 else 1 / 2) / 32})
    simulation.run(overhead=0.5)
    assert simulation.ready.boundary == Boundary(seconds=0.5, seconds_per_example=1 / 64 / 32)
    assert simulation.ready.epoch_overhead_seconds == 0.5


def test_the_loss_of_steps_is_the_present_one():
    simulation = Simulation(
        Measure(seconds=0.5),
        step_seconds=1 / 32,
        boundary_seconds=0.5,
        boundary=BETWEEN,
        loss=lambda call: 9.0 if call < 2 * STEPS else 0.5,
    )
    (measured,) = simulation.run()
    assert (simulation.ready.timed_by, measured.loss) == ("steps", 0.5)


def test_examples_trained_before_a_fit_was_left_are_counted():
    simulation = Simulation(Measure(seconds=1.0), **LONG)
    (measured,) = simulation.run()
    assert measured.trained_examples == 32 * simulation.calls


def test_epoch_end_covered_by_the_overhead_is_not_counted():
    first_fit = 15  # so many calls tell that the epoch will be long

    def step_seconds(call):
        return 1 / 32 if call < first_fit or (call - first_fit) % 450 < 350 else 1 / 128

    simulation = Simulation(*[Measure(seconds=4.0)] * 8, **{**LONG, "step_seconds": step_seconds})
    slices = simulation.run(overhead=0.125, counted_calls=350)
    assert simulation.calls - first_fit > 2 * 450
    for measured in slices:
        assert measured.seconds == measured.steps / 32 == measured.examples / 32 / 32
        assert measured.step_seconds.max == 1 / 32


@pytest.mark.parametrize("wanted", [2.5, 4.0, 40.0])
@pytest.mark.parametrize("examples", [None, 100 * 320])
def test_what_the_device_has_still_to_do_is_no_ones_speed(wanted, examples):
    simulation = Simulation(
        *[Measure(seconds=wanted)] * 12,
        examples=examples,
        batch_size=320,
        step_seconds=1.0,
        lag_seconds=0.5,
        warmup_seconds=3.0,
    )
    slices = simulation.run()
    assert simulation.ready.timed_by == "steps"
    assert [slice_.examples / slice_.seconds for slice_ in slices] == [320.0] * 12


@pytest.mark.parametrize(
    ("training", "counted", "uncounted"),
    [
        ({}, None, 12.0 + 5.0),
        ({"examples": 14_400}, None, 12.0),
        ({"examples": 14_400}, 350, 12.0 + 2 * 100 / 32),
        ({"examples": 1437, "boundary_seconds": 1.0}, None, 12.0),
    ],
    ids=["smaller", "all alike", "tail", "met"],
)
def test_what_a_slice_may_take_beyond_what_counts_is_told(training, counted, uncounted):
    simulation = Simulation(**{**LONG, "boundary_seconds": 0.0, **training}, first_call_seconds=5.0)
    simulation.run(overhead=12.0, counted_calls=counted)
    assert simulation.ready.timed_by == "steps"
    assert simulation.ready.uncounted_seconds == pytest.approx(uncounted, abs=0.6)


@pytest.mark.parametrize(("examples", "step_seconds"), [(14_370, 2.0), (160, 0.25)])
def test_step_or_epoch_longer_than_a_slice_is_measured_whole(examples, step_seconds):
    simulation = Simulation(*[Measure(seconds=0.5)] * 3, examples=examples, step_seconds=step_seconds)
    slices = simulation.run(overhead=0.0)
    by_steps = simulation.ready.timed_by == "steps"
    for slice_ in slices:
        assert (slice_.steps, slice_.epochs) == ((1, 0) if by_steps else (5, 1))
        assert slice_.seconds == slice_.steps * step_seconds + (0 if by_steps else 1 / 8)


@pytest.mark.parametrize("examples", [320, 1_437_000])
@pytest.mark.parametrize("period", [2, 5, 64])
def test_alternating_fast_and_slow_steps_are_counted_in_turn(examples, period):
    simulation = Simulation(
        *[Measure(seconds=0.5)] * 40,
        examples=examples,
        step_seconds=lambda call: (3 if call // period % 2 else 1) / 128,
        boundary_seconds=0.0,
        warmup_seconds=3.0,
    )
    slices = simulation.run(overhead=0.0)
    steps, seconds = sum(slice_.steps for slice_ in slices), sum(slice_.seconds for slice_ in slices)
    assert abs(seconds - steps / 64) <= period / 128  # half a turn at most is not made up for
    assert sum(slice_.examples for slice_ in slices) == 32 * steps


# -------------------------------------------------------------------------------------------- saving the state


def without_saving(report):
    """A report of being warm, but for what was saved."""
    return report.model_dump(exclude={"state_steps", "saving_seconds"})


@pytest.mark.parametrize("length", [{}, SHORT, LONG, NO_END], ids=["epochs", "short epochs", "steps", "no end"])
@pytest.mark.parametrize("save_after", [20, STEPS, math.inf])
def test_saving_the_state_is_no_time_of_the_training(length, save_after):
    plain, saving = (
        Simulation(Measure(seconds=0.5), **length, **more)
        for more in ({}, {"save_after": save_after, "saving_seconds": 16.0})
    )
    slices, usual = ([part.model_copy(update={"host_bytes": None}) for part in run.run()] for run in (saving, plain))
    assert slices == usual
    assert without_saving(saving.ready) == without_saving(plain.ready)
    assert saving.ready.saving_seconds == 16.0
    assert (plain.ready.saving_seconds, plain.ready.state_steps) == (0.0, None)


def test_the_state_is_saved_once_after_the_steps_asked_for():
    simulation = Simulation(**SHORT, save_after=20, saving_seconds=16.0)
    simulation.run()
    assert [event for event in simulation.events if " after " in event] == ["saved after 20 steps"]
    assert simulation.ready.state_steps == 20


# --------------------------------------------------------------------------------------------------- gauges


@pytest.mark.parametrize("settings", [{}, LONG, NO_END], ids=["epochs", "steps", "no end"])
def test_a_gauge_more_measures_each_slice(settings):
    def gauge():
        before = simulation.calls
        return lambda seconds: {"retraces": simulation.calls - before, "steal_seconds": seconds}

    simulation = Simulation(*3 * [Measure(seconds=1.0)], **settings, more_gauges=[gauge])
    slices = simulation.run()
    assert [slice_.retraces for slice_ in slices] == [slice_.steps for slice_ in slices]
    assert [slice_.steal_seconds for slice_ in slices] == [slice_.seconds for slice_ in slices]


@pytest.mark.parametrize("examples", [1437, None], ids=["by epochs", "by steps"])
def test_reading_what_the_machine_counts_is_not_timed(examples):
    def measured(counters_seconds):
        commands = [Measure(seconds=0.5)] * 3
        return Simulation(*commands, examples=examples, counters_seconds=counters_seconds).run()

    quick, slow = measured(0.0), measured(4.0)
    assert [each.seconds for each in slow] == [each.seconds for each in quick]
    assert [each.step_seconds for each in slow] == [each.step_seconds for each in quick]
    for each in (*quick, *slow):
        assert each.foreign_cpu_seconds == pytest.approx(each.seconds), "one core, and no frozen time"
        assert each.cores == 4


@pytest.mark.parametrize("settings", [{}, LONG, NO_END], ids=["epochs", "steps", "no end"])
@pytest.mark.parametrize("steps_per_call", [1, 4, 7])
@pytest.mark.parametrize(("every", "share"), [(1, 1.0), (4, 0.25), (10**9, 0.0)])
def test_skipped_steps_are_counted_and_cost_what_others_do(settings, steps_per_call, every, share):
    settings = {**settings, "steps_per_call": steps_per_call}
    commands = [Measure(seconds=2.0)] * 3
    slices = Simulation(*commands, skips=lambda step: step % every == every - 1, **settings).run()
    without = Simulation(*commands, **settings).run()
    assert [slice_.examples for slice_ in slices] == [each.examples for each in without]
    for part in slices:
        assert part.skipped_steps == pytest.approx(share * part.steps, abs=steps_per_call + 1)
    assert [each.skipped_steps for each in without] == [None] * 3


# -------------------------------------------------------------------------------------------------- failing


def test_losses_of_first_step_and_slice_end_are_reported():
    simulation = Simulation(Measure(seconds=0.1), loss=lambda call: 2.0 if call == 0 else 0.5)
    (measured,) = simulation.run()
    assert [message.loss for message in simulation.sent if isinstance(message, FirstStep)] == [2.0]
    assert measured.loss == 0.5
    (measured,) = Simulation(Measure(seconds=0.1), loss=None).run()
    assert (measured.loss, measured.epochs) == (None, 1)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_nonfinite_loss_fails_the_trial_at_the_first_step(loss):
    simulation = Simulation(loss=loss)
    with pytest.raises(TrialFailed) as failed:
        simulation.fit()
    assert failed.value.outcome == Outcome.NONFINITE
    assert failed.value.reason == f"the training loss became {loss} by step 1"
    assert not failed.value.input_error
    assert simulation.sent == []


@pytest.mark.parametrize("settings", [{}, NO_END], ids=["epochs", "no end"])
@pytest.mark.parametrize("name", ["loss", "d_loss"])
def test_a_number_that_becomes_nan_while_measured_ends_the_trial(settings, name):
    simulation = Simulation(
        *[Measure(seconds=0.1)] * 2,
        **settings,
        metrics=lambda call: {"g_loss": 0.5, name: math.nan if len(simulation.frozen_after) > 1 else 0.5},
    )
    what = "the training loss" if name == "loss" else "the metric d_loss"
    with pytest.raises(TrialFailed, match=f"{what} became nan by step") as failed:
        simulation.fit()
    assert failed.value.outcome == Outcome.NONFINITE
    assert len([message for message in simulation.sent if isinstance(message, SliceDone)]) == 1


@pytest.mark.parametrize(
    ("logs", "where"),
    [
        ({"losses": {"d": math.nan}}, "losses.d"),
        ({"loss": 0.5, "per_example": np.array([1.0, math.inf])}, "per_example"),
        ({"loss": 0.5, "parts": [0.1, (0.2, -math.inf)]}, "parts.1.1"),
        ([math.nan], "0"),
        (np.float32("nan"), "metric became"),
    ],
)
def test_every_number_that_a_step_returns_must_be_finite(logs, where):
    with pytest.raises(TrialFailed, match=where) as failed:
        finite_loss(logs, step=1)
    assert failed.value.outcome == Outcome.NONFINITE


def test_what_is_no_number_need_not_be_finite():
    assert finite_loss({"loss": 0.5, "note": "nan", "none": None, "of": {"count": 3}}, step=1) == 0.5
    assert finite_loss({"d_loss": 0.5}, step=1) is None


DRY = "the dataset was exhausted", "starts afresh"


@pytest.mark.parametrize(
    ("settings", "reason", "hint"),
    [
        ({"examples": 20, "drop_remainder": True}, "the dataset yields no batch", "at least one batch"),
        *(({"epochs_with_data": epochs}, *DRY) for epochs in (0, 1, 2, 7)),
        ({"examples": 96, "epochs_with_data": 1}, *DRY),
        ({"epochs_with_data": 1, **LONG}, *DRY),
    ],
)
def test_a_dataset_that_is_empty_or_runs_dry_is_the_inputs_fault(settings, reason, hint):
    with pytest.raises(TrialFailed) as failed:
        Simulation(Measure(seconds=100.0), **settings).run()
    assert failed.value.outcome == Outcome.ERROR
    assert failed.value.input_error
    assert reason in failed.value.reason
    assert hint in failed.value.hint


def test_a_training_without_an_end_that_ends_was_exhausted():
    simulation = Simulation(Measure(seconds=100.0), **NO_END)
    simulation.steps_in_epoch = 50
    with pytest.raises(TrialFailed, match="the dataset was exhausted"):
        simulation.fit()


def test_slices_are_timed_by_a_clock_that_nobody_can_set():
    by = inspect.signature(StepClock).parameters["clock"].default.__name__
    found = time.get_clock_info(by)
    assert found.monotonic
    assert not found.adjustable


# ---------------------------------------------------------------------------------------------- arithmetic


@settings(max_examples=200, deadline=None)
@given(
    examples=st.integers(1, 5000),
    batch_size=st.integers(1, 600),
    drop_remainder=st.booleans(),
    steps_per_call=st.integers(1, 64),
)
def test_an_epochs_steps_and_examples_are_those_of_its_batches(examples, batch_size, drop_remainder, steps_per_call):
    batches = [min(batch_size, examples - begin) for begin in range(0, examples, batch_size)]
    if drop_remainder and batches[-1] < batch_size:
        batches.pop()
    told = Training(
        examples=examples,
        batch_size=batch_size,
        drop_remainder=drop_remainder,
        steps_per_call=steps_per_call,
        synchronise=lambda: None,
    )
    calls = [batches[begin : begin + steps_per_call] for begin in range(0, len(batches), steps_per_call)]
    assert told.steps_per_epoch == len(batches)
    assert told.examples_per_epoch == sum(batches)
    assert told.full_calls == sum(call == [batch_size] * steps_per_call for call in calls)
    assert told.has_few_calls == (len(calls) <= 3)


@pytest.mark.parametrize(("share", "expected"), [("p50", 50), ("p90", 90), ("p99", 99), ("max", 100)])
def test_quantiles_are_nearest_ranks(share, expected):
    assert getattr(step_quantiles(list(range(100, 0, -1)), 1), share) == expected
    assert getattr(step_quantiles([8.0], 4), share) == 2.0
