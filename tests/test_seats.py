"""An executor with two seats, in memory: the loop keeps both at work, without an edit."""

import threading

import pytest
from simulated import SimulatedTrials
from simulated_runs import BASELINE, FACTS, SMALL_SPACE, Watcher, faster_by, quick_tune

from autotune.executors.executor import TrialFailed
from autotune.record import Outcome, Phase
from autotune.stats.deciding import Verdict
from autotune.tuning.progress import TrialBegan

WAIT_SECONDS = 60.0
SPEED = faster_by(jit_compile=1.5, batch_size=1.2)


class TwoSeats(SimulatedTrials):
    """Two seats. The first candidates of both meet: neither is measured before the other has been launched."""

    def __init__(self, **settings):
        super().__init__(facts=FACTS, seats=("left", "right"), **settings)
        self.launched_on = []
        self.meeting = threading.Barrier(2)
        self.met = set()

    def launch(self, configuration, *, seat="", **how):
        """As one machine; the first candidates of both seats meet here."""
        trial = super().launch(configuration, seat=seat, **how)
        self.launched_on.append((seat, trial.configuration))
        if trial.configuration != BASELINE and seat not in self.met:
            self.met.add(seat)
            self.meeting.wait(WAIT_SECONDS)
        return trial


def test_both_seats_are_at_work_at_the_same_time(tmp_path):
    """Each has a live baseline of its own, and the answer is the one that a single seat gives."""
    trials = TwoSeats(samples_per_second=SPEED, noise=0.02)
    recipe, directory = quick_tune(trials, tmp_path, budget=400.0, trials=8)
    assert trials.met == {"left", "right"}
    for seat in trials.seats:
        own = [each for on, each in trials.launched_on if on == seat]
        assert own[0] == BASELINE
        assert set(own) - {BASELINE}
    assert recipe.evidence.verdict is Verdict.FASTER
    assert recipe.configuration["jit_compile"] is True
    records = list(directory.trials.values())
    assert sorted(each.trial for each in records) == list(range(len(records)))
    assert [each.phase for each in records].count(Phase.BASELINE) == 2
    assert trials.alive == []


def test_no_configuration_is_tried_twice_and_no_leader_measured_on_two_seats_at_once(tmp_path):
    """What runs on the other seat is known to whoever decides."""
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


def test_a_baseline_that_fails_on_one_seat_ends_the_run_with_no_process_left(tmp_path):
    """Nothing of the run is trusted then; it is told as that of a single seat."""
    trials = TwoSeats(samples_per_second=SPEED, noise=0.02)
    launch = trials.launch

    def fail_on_the_right(configuration, *, seat="", **how):
        if seat == "right":
            raise TrialFailed(Outcome.CRASHED, "no such seat")
        return launch(configuration, seat=seat, **how)

    trials.met.add("left")
    trials.launch = fail_on_the_right
    with pytest.raises(Exception, match="no such seat"):
        quick_tune(trials, tmp_path, budget=400.0)
