"""An executor with two seats, in memory: the loop keeps both at work, without an edit."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from simulated import SimulatedTrials
from simulated_runs import (
    BASELINE,
    FACTS,
    SMALL_SPACE,
    Searching,
    Watcher,
    a_candidate,
    a_leader,
    a_slice,
    a_state,
    faster_by,
    quick_tune,
    simulated_trials,
)

from autotune.data.errors import NoStableConfigurationError
from autotune.data.record import Outcome, Phase
from autotune.runtime.executor import DeviceUnavailable, SeatLost
from autotune.stats.deciding import Verdict
from autotune.tuning.events import Notice, TrialBegan
from autotune.tuning.loop import Loop
from autotune.tuning.policy import Confirm, Wait, next_action

WAIT_SECONDS = 60.0
SPEED = faster_by(jit_compile=1.5, batch_size=1.2)
CHOICES = {"jit_compile": "[true, false]", "prefetch": "[1, 2]"}


class TwoSeats(SimulatedTrials):
    """Two seats. The first candidates of both meet: neither is measured before the other has been launched."""

    def __init__(self, **settings):
        super().__init__(facts=FACTS, seats=("left", "right"), on_launch=self.meet, **settings)
        self.meeting = threading.Barrier(2)
        self.met = set()

    def meet(self, trial):
        """Wait for the other seat with the first candidate of each."""
        if trial.configuration != BASELINE and trial.seat not in self.met:
            self.met.add(trial.seat)
            self.meeting.wait(WAIT_SECONDS)


def test_both_seats_are_at_work_at_the_same_time(tmp_path):
    trials = TwoSeats(samples_per_second=SPEED, noise=0.02)
    recipe, directory = quick_tune(trials, tmp_path, budget=400.0, trials=8)
    assert trials.met == {"left", "right"}
    for seat in trials.seats:
        own = [trial.configuration for trial in trials.launched if trial.seat == seat]
        assert own[0] == BASELINE
        assert set(own) - {BASELINE}
    assert recipe.evidence.verdict is Verdict.FASTER
    assert recipe.configuration["jit_compile"] is True
    records = list(directory.trials.values())
    assert sorted(record.trial for record in records) == list(range(len(records)))
    assert [record.phase for record in records].count(Phase.BASELINE) == 2
    assert [record.phase for record in records].count(Phase.SEARCH) == 8  # what runs counts
    assert trials.alive == []


def test_no_configuration_runs_twice_and_no_leader_on_two_seats(tmp_path):
    watcher = Watcher()
    trials = TwoSeats(samples_per_second=SPEED, noise=0.05)
    _, directory = quick_tune(trials, tmp_path, budget=400.0, observe=watcher, space=SMALL_SPACE)
    searched = [
        tuple(each.configuration.items())
        for each in directory.trials.values()
        if each.phase is Phase.SEARCH and each.outcome is Outcome.OK
    ]
    assert len(set(searched)) == len(searched)
    for record in directory.trials.values():
        instances = [pair.instance for pair in record.pairs]
        assert instances == sorted(instances)
    assert watcher.of(TrialBegan)


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_seat_that_cannot_train_is_dropped_and_others_go_on(tmp_path, when):
    watcher = Watcher()
    trials = simulated_trials(SPEED, seats=("left", "right"), noise=0.02)

    def fail_on_the_right(trial):
        if trial.seat == "right" and (when == "at the start" or trial.configuration != BASELINE):
            raise DeviceUnavailable(Outcome.ERROR, "no card", hint="See nvidia-smi.")

    trials.on_launch = fail_on_the_right
    recipe, _ = quick_tune(trials, tmp_path, budget=400.0, trials=8, observe=watcher)
    assert trials.seats == ("left",)
    assert any("seat right is dropped" in notice.text and "no card" in notice.text for notice in watcher.of(Notice))
    assert recipe.evidence.verdict is Verdict.FASTER


def test_seat_lost_in_another_look_keeps_earlier_pairs(tmp_path):
    trials = simulated_trials(SPEED, noise=0.02)
    trials.elastic = True
    searching = Searching(tmp_path, trials)
    trial, _ = searching.measure()
    first = len(trial.pairs)

    def lose_after_a_round(live):
        measure, slices = live.measure_continuously, []

        def measured(*given):
            slices.append(given)
            if len(slices) > 1:
                raise SeatLost(Outcome.CRASHED, "gone")
            return measure(*given)

        live.measure_continuously = measured

    trials.on_launch = lose_after_a_round
    with pytest.raises(SeatLost):
        searching.measure(trial=trial)
    record = searching.run.records[trial.number]
    assert record.outcome is Outcome.OK
    assert len(record.pairs) == first + 1


def test_seat_of_a_resumed_run_uses_its_own_baseline(tmp_path):
    trials = simulated_trials(SPEED, seats=("simulated", "other"), noise=0.002)
    searching = Searching(tmp_path, trials)
    earlier = searching.seat.baseline.trial
    searching.seat.end_baseline()
    earlier.slices = [a_slice(8000.0)] * 3
    searching.seat.start_baseline(600.0, earlier)
    _, record = searching.measure()
    assert record.outcome is Outcome.OK


class Losing(SimulatedTrials):
    """Seats that are lost: a number of times each, when a candidate is launched there."""

    def __init__(self, losses, **settings):
        usual = {"samples_per_second": SPEED, "noise": 0.02, "on_launch": self.lose}
        super().__init__(facts=FACTS, seats=("left", "right"), **{**usual, **settings})
        self.losses, self.restarted = losses, []

    def lose(self, trial):
        """Lose the seat of a candidate."""
        if trial.configuration != BASELINE and self.losses.get(trial.seat, 0) > 0:
            self.losses[trial.seat] -= 1
            raise SeatLost(Outcome.CRASHED, f"{trial.seat} is gone")

    def restart(self, seat):
        """Noted."""
        self.restarted.append(seat)


def test_trial_of_a_lost_seat_is_rerun_and_the_seat_restarted(tmp_path):
    watcher = Watcher()
    trials = Losing({"right": 1})
    recipe, directory = quick_tune(trials, tmp_path, budget=400.0, trials=8, observe=watcher)
    (lost,) = [each for each in directory.trials.values() if each.outcome is Outcome.INTERRUPTED]
    again = [each for each in directory.trials.values() if each.configuration == lost.configuration]
    assert any(each.outcome.measured for each in again if each is not lost)
    assert trials.restarted == ["right"]
    assert trials.seats == ("left", "right")
    assert recipe.evidence.verdict is Verdict.FASTER
    assert any("was lost; restarting it" in notice.text for notice in watcher.of(Notice))


def test_seat_lost_twice_is_dropped_and_the_run_finishes(tmp_path):
    watcher = Watcher()
    trials = Losing({"right": 2})
    recipe, directory = quick_tune(trials, tmp_path, budget=400.0, trials=8, observe=watcher)
    assert trials.seats == ("left",)
    assert any("seat right is dropped: it was lost twice" in notice.text for notice in watcher.of(Notice))
    assert recipe.evidence.verdict is Verdict.FASTER
    assert {each.seat for each in directory.trials.values() if each.outcome is Outcome.OK} == {"left", "right"}


def test_run_that_lost_every_seat_says_so(tmp_path):
    with pytest.raises(NoStableConfigurationError, match="every seat was lost"):
        quick_tune(Losing({"left": 9, "right": 9}), tmp_path, budget=400.0, trials=8)


def test_seats_that_come_are_used_from_the_next_trial_on(tmp_path):
    watcher = Watcher()

    class Growing(SimulatedTrials):
        def refresh(self):
            if len(self.launched) > 5:
                self.seats = ("first", "second")

    trials = Growing(facts=FACTS, seats=("first",), samples_per_second=SPEED, noise=0.02)
    trials.elastic = True
    _, directory = quick_tune(trials, tmp_path, budget=400.0, trials=12, observe=watcher)
    second = [each for each in directory.trials.values() if each.seat == "second"]
    assert {each.phase for each in second} >= {Phase.BASELINE, Phase.SEARCH}
    assert any("new seat: second" in notice.text for notice in watcher.of(Notice))


@pytest.mark.parametrize(("waits", "gains"), [(True, "jit_compile"), (False, "prefetch"), (False, "jit_compile")])
def test_host_neighbours_rest_while_input_leader_is_confirmed(tmp_path, waits, gains):
    class OneHost(SimulatedTrials):
        def place(self, seat):
            return super().place(seat).model_copy(update={"host": "one"})

    def count_neighbours(trial):
        if loops and Path(trial.log).parent.name.isdecimal():
            beside.append((int(Path(trial.log).parent.name), len(loops[0]._seats.busy)))

    beside, loops = [], []
    gain = {"freeze_gain": lambda configuration: 1.5 if waits else 1.0, "on_launch": count_neighbours}
    space = f'schema_version = 1\n[knobs.{gains}]\nkind = "categorical"\nchoices = {CHOICES[gains]}\n'
    speed = faster_by(**{gains: 1.5})
    trials = OneHost(facts=FACTS, seats=("left", "right"), samples_per_second=speed, noise=0.02, **gain)
    with pytest.MonkeyPatch.context() as patch:
        run = Loop.run
        patch.setattr(Loop, "run", lambda loop: (loops.append(loop), run(loop))[1])
        _, directory = quick_tune(trials, tmp_path, budget=400.0, trials=8, space=space)
    confirmed = {number for number, each in directory.trials.items() if each.phase is Phase.CONFIRM}
    together = {busy for number, busy in beside if number in confirmed}
    assert together
    if waits or gains == "prefetch":
        assert together == {0}


def test_seat_lost_during_loss_comparison_rejects_nothing(tmp_path):
    lost = []

    def lose_once(trial):
        if not trial.timed and trial.configuration["jit_compile"] and not lost:
            lost.append(trial)
            raise SeatLost(Outcome.CRASHED, "gone")

    recipe, directory = quick_tune(Losing({}, on_launch=lose_once), tmp_path, budget=400.0, trials=8)
    assert lost
    assert recipe.configuration["jit_compile"] is True
    assert not [each for each in directory.trials.values() if each.outcome is Outcome.UNSTABLE]


def test_losses_are_compared_on_one_seat_at_a_time(tmp_path):
    comparing, most, meeting = set(), [], threading.Condition()

    def watch(trial):
        curves = trial.loss_curves

        def watched(*given):
            with meeting:  # the other seat has time to come
                comparing.add(trial.seat)
                most.append(len(comparing))
                meeting.notify_all()
                meeting.wait_for(lambda: len(comparing) > 1, timeout=0.5)
            try:
                return curves(*given)
            finally:
                comparing.discard(trial.seat)

        trial.loss_curves = watched

    for folder in map(str, range(2)):
        trials = simulated_trials(SPEED, seats=("left", "right"), noise=0.02, on_launch=watch)
        quick_tune(trials, tmp_path / folder, budget=400.0, trials=8)
    assert set(most) == {1}


@pytest.mark.parametrize(("host", "share", "told"), [("one", 0.92, 1), ("one", 0.99, 0), ("", 0.92, 0)])
def test_a_seat_that_others_of_its_host_slow_down_is_said_once(tmp_path, host, share, told):
    class Shared(SimulatedTrials):
        def place(self, seat):
            return super().place(seat).model_copy(update={"host": host or seat})

    def slow_down(trial):
        pace = trial._pace
        trial._pace = lambda: pace() * (share if len(trials.launched) > 1 else 1.0)

    watcher, seats = Watcher(), ("left", "right")
    trials = Shared(facts=FACTS, seats=seats, samples_per_second=SPEED, noise=0.002, on_launch=slow_down)
    quick_tune(trials, tmp_path, budget=120.0, trials=6, observe=watcher)
    said = [notice.text for notice in watcher.of(Notice) if "they share its cores" in notice.text]
    assert len(said) == told
    assert all("seat left trains 8% slower since other seats of one began" in text for text in said)


def test_leaders_are_confirmed_on_several_seats_at_the_same_time():
    first, second = a_candidate(1, 0.7), a_candidate(2, 0.68)
    busy = a_leader(1, number=10)
    state = a_state(first, second, leaders=(busy,), busy=frozenset({10}), more_candidates=False)
    assert isinstance(next_action(replace(state, confirms_at_once=2)), Confirm)
    assert isinstance(next_action(state), Wait)
