"""A confirmation's instances: fresh processes of a leader, the baseline and a champion, set against one another."""

import math

import pytest
from simulated import SimulatedTrial
from simulated_runs import BASELINE, FAST, Fresh, faster_by, lose, simulated_trials

from autotune.data.record import Outcome, Pairing
from autotune.runtime.executor import DeviceUnavailable, TrialFailed
from autotune.stats.intervals import claim_interval
from autotune.tuning.confirmation import SlicePlan
from autotune.tuning.run import TimeIsUp
from autotune.tuning.state import USUAL_PRIOR

SPEED = faster_by(jit_compile=1.5, batch_size=1.2)
LARGE = BASELINE.replace(batch_size=64)


def failing(of, outcome=Outcome.CRASHED, times=10**9):
    """One configuration ends badly, so many times."""
    left = [TrialFailed(outcome, "as planned")] * min(times, 100)
    return lambda configuration: left.pop() if configuration == of and left else None


# ------------------------------------------------------------------------------------------------- what it is


def test_each_instance_is_a_fresh_process_of_either_side(tmp_path):
    fresh = Fresh(tmp_path, simulated_trials(SPEED, noise=0.05, instance_noise=0.01, seed=1))
    fresh.trials.samples_per_second = faster_by(jit_compile=1.3)  # the search was lucky
    fresh.measure(6)
    assert [trial.configuration for trial in fresh.launched] == [BASELINE, FAST] * 6
    assert fresh.trials.alive == []
    assert fresh.record.instances == 6
    assert {pair.instance for pair in fresh.record.pairs} == set(range(6))
    assert math.exp(fresh.interval().low) < 1.3 < math.exp(fresh.interval().high) < 1.5
    assert fresh.confirmation.reference.record(Outcome.OK).throughput.value == pytest.approx(4000, rel=0.05)


def test_a_champion_takes_turns_in_the_same_rounds(tmp_path):
    trials = simulated_trials(SPEED)
    fresh = Fresh(tmp_path, trials, champion=LARGE)
    trials.samples_per_second = lambda configuration: (
        SPEED(configuration) * (math.exp(trials.random.gauss(0.0, 0.3)) if configuration == BASELINE else 1.0)
    )
    fresh.measure(4, rounds=6)
    over = claim_interval(fresh.confirmation.over_best_leader, prior=USUAL_PRIOR)
    assert over.value == pytest.approx(math.log(1.5 / 1.2), abs=0.001)
    assert over.half_width < 0.5 * fresh.interval().half_width
    assert len(fresh.launched) == 12
    assert fresh.confirmation.best_leader.record(Outcome.OK).throughput.value == pytest.approx(4800, rel=0.02)


@pytest.mark.parametrize(("boundary_seconds", "own"), [(0.5, [True, False, False]), (0.001, [False, False, False])])
def test_boundary_of_long_epochs_is_measured_once_if_it_matters(tmp_path, boundary_seconds, own):
    fresh = Fresh(tmp_path, simulated_trials(SPEED, examples=40_000))
    fresh.run.boundary = fresh.run.boundary.model_copy(update={"seconds": boundary_seconds})
    fresh.measure(3)
    taken = [live.timing.boundary for live in fresh.launched if live.configuration == FAST]
    assert [boundary is None for boundary in taken] == own
    assert any(own) or {*taken} == {fresh.run.boundary}
    assert {live.timing.boundary for live in fresh.launched if live.configuration == BASELINE} == {fresh.run.boundary}


@pytest.mark.parametrize("decides", [[False, True, True], [False, False, False]])
def test_only_the_deciding_pair_is_asked_for_extra_figures(tmp_path, monkeypatch, decides):
    asked, finish, answers = [], SimulatedTrial.finish, iter(decides)

    def noting(trial, seconds, timeout, *, thorough):
        asked.append((trial.configuration, thorough))
        return finish(trial, seconds, timeout)

    fresh = Fresh(tmp_path, simulated_trials(SPEED))
    monkeypatch.setattr(SimulatedTrial, "finish", noting)
    for _ in decides:
        fresh.pairs.measure(
            fresh.confirmation, SlicePlan(seconds=3.0), seat="simulated", concludes=lambda: next(answers)
        )
    once = int(any(decides))
    assert asked.count((FAST, True)) == asked.count((BASELINE, True)) == once
    assert (fresh.record.input_wait_fraction is None) is not any(decides)


@pytest.mark.parametrize("waiting", [None, BASELINE, FAST])
def test_slices_are_long_if_either_side_waits_on_external_input(tmp_path, waiting):
    gain = lambda configuration: 1.6 if configuration == waiting else 1.0  # noqa: E731  # a formula
    fresh = Fresh(tmp_path, simulated_trials(SPEED, examples=None, freeze_gain=gain))
    fresh.measure(3)
    later = [pair.baseline.seconds for pair in fresh.record.pairs if pair.instance]
    assert min(later) > 1.0 if waiting else max(later) < 0.6


def test_slices_stay_within_their_planned_time(tmp_path):
    gain = {"freeze_gain": lambda configuration: 1.6}
    taken = []
    for most_seconds in (3.0, 12.0, 1000.0):
        trials = simulated_trials(SPEED, examples=None, **gain)
        fresh = Fresh(tmp_path / str(most_seconds), trials)
        fresh.measure(2, rounds=8, most_seconds=most_seconds)
        pairs = [pair for pair in fresh.record.pairs if pair.instance]
        taken.append(sum(pair.baseline.seconds + pair.candidate.seconds for pair in pairs))
        assert len(pairs) > 2
    assert taken[0] <= 3.5 < taken[1] <= 13.0 < taken[2]


# ------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.TIMEOUT, Outcome.NONFINITE], ids=str)
def test_a_leader_that_fails_cannot_be_recommended(tmp_path, outcome):
    fresh = Fresh(tmp_path, simulated_trials(SPEED))
    fresh.measure(2)
    fresh.trials.failure = failing(FAST, outcome)
    fresh.measure()
    assert (fresh.confirmation.failure.outcome, fresh.record.outcome) == (outcome, outcome)
    assert len(fresh.confirmation.measured) == 2
    assert fresh.trials.alive == []


@pytest.mark.parametrize("pairing", list(Pairing))
@pytest.mark.parametrize(("failed", "side"), [(BASELINE, "reference"), (LARGE, "best_leader")])
def test_another_side_that_fails_is_not_the_leaders_fault(tmp_path, pairing, failed, side):
    fresh = Fresh(tmp_path, simulated_trials(SPEED), champion=LARGE, pairing=pairing)
    fresh.trials.failure = failing(failed, times=1)
    with pytest.raises(TrialFailed, match="as planned") as caught:
        fresh.measure()
    assert caught.value.trial == getattr(fresh.confirmation, side).number
    fresh.measure(2)
    assert fresh.confirmation.failure is None
    assert len(fresh.confirmation.measured) == len(fresh.confirmation.over_best_leader) == 2
    assert math.exp(fresh.interval().value) == pytest.approx(1.5, rel=0.01)


def die_once(monkeypatch, fresh, victim, *, after_slices):
    """A process of this configuration dies once, after so many slices of all trials."""
    taken, measure, usual = [], SimulatedTrial.measure, fresh.trials.samples_per_second

    def note(trial, seconds, timeout_seconds):
        taken.append(trial)
        return measure(trial, seconds, timeout_seconds)

    def speed(configuration):
        if configuration == victim and len(taken) > after_slices and None not in taken:
            taken.append(None)
            (own,) = (trial for trial in fresh.trials.alive if trial.configuration == victim)
            lose(own)
            raise TrialFailed(Outcome.CRASHED, "in the midst of its slices")
        return usual(configuration)

    monkeypatch.setattr(SimulatedTrial, "measure", note)
    fresh.trials.samples_per_second = speed


def test_the_others_are_closed_beside_a_leader_that_dies(tmp_path, monkeypatch):
    fresh = Fresh(tmp_path, simulated_trials(SPEED), champion=LARGE)
    die_once(monkeypatch, fresh, FAST, after_slices=5)
    fresh.measure(1, rounds=6)
    assert fresh.confirmation.failure.reason == "in the midst of its slices"
    beside = (fresh.confirmation.reference, fresh.confirmation.best_leader)
    assert all(trial.record(Outcome.OK).peak_host_bytes for trial in beside)


# --------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("champion", [None, LARGE])
def test_what_was_bracketed_in_the_search_is_bracketed_again(tmp_path, champion):
    seen = []
    trials = simulated_trials(
        SPEED,
        fits_together=lambda configurations: seen.append(len(configurations)) or True,
        drift=lambda seconds: math.exp(-0.02 * seconds),
    )
    fresh = Fresh(tmp_path, trials, champion=champion, pairing=Pairing.BRACKETED)
    fresh.measure(4)
    assert max(seen) == 1
    order = [trial.configuration for trial in fresh.launched]
    length = 3 if champion is None else 4
    assert order[::length] == order[length - 1 :: length] == [BASELINE] * 4
    assert order.count(FAST) == order.count(champion) or champion is None
    assert math.exp(fresh.interval().value) == pytest.approx(1.5, rel=0.03)
    if champion is not None:
        over = claim_interval(fresh.confirmation.over_best_leader, prior=USUAL_PRIOR)
        assert math.exp(over.value) == pytest.approx(1.25, rel=0.03)


def test_baseline_oom_beside_a_leader_switches_to_bracketing(tmp_path, monkeypatch):
    fresh = Fresh(tmp_path, simulated_trials(SPEED), champion=LARGE)
    usual = SimulatedTrial.measure

    def starving(trial, seconds, timeout_seconds):
        if trial.configuration == BASELINE and len(fresh.trials.alive) > 1:
            trial.kill()
            raise TrialFailed(Outcome.OOM, "killed by the kernel")
        return usual(trial, seconds, timeout_seconds)

    monkeypatch.setattr(SimulatedTrial, "measure", starving)
    fresh.measure(2)
    assert fresh.record.pairing is Pairing.BRACKETED
    assert len(fresh.confirmation.measured) == 2


# --------------------------------------------------------------------------------------------- a lost device


@pytest.mark.parametrize("lost", [None, FAST, LARGE])
def test_a_card_that_another_process_holds_is_nobodys_fault(tmp_path, lost):
    fresh = Fresh(tmp_path, simulated_trials(SPEED, gpus=("H200",)), champion=LARGE)
    fresh.measure()

    def lose_card(trial):
        fresh.trials.gpus = () if trial.configuration == (lost or fresh.run.baseline) else ("H200",)

    fresh.trials.on_launch = lose_card
    with pytest.raises(DeviceUnavailable):
        fresh.measure()
    fresh.trials.on_launch = lambda trial: None
    fresh.trials.gpus = ("H200",)
    fresh.measure()
    assert fresh.confirmation.failure is None
    assert fresh.record.pairing is Pairing.ALTERNATING


# --------------------------------------------------------------------------------------- stopped, or out of time


def measure_until_it_fails(fresh):
    """Instance after instance; a failure of the leader is raised."""
    while fresh.confirmation.failure is None:
        fresh.measure()
    raise fresh.confirmation.failure


@pytest.mark.parametrize("left", [8.0 + 1.1 * step for step in range(6)])
@pytest.mark.parametrize("pairing", list(Pairing))
@pytest.mark.parametrize("stands_still", [False, True])
def test_whenever_the_time_is_up_nothing_is_waited_for(tmp_path, pairing, left, stands_still):
    fresh = Fresh(tmp_path, simulated_trials(SPEED, noise=0.02), pairing=pairing, left=left)
    if stands_still:
        fresh.trials.drift = lambda at: 1.0 if at < fresh.began + left - 2.0 else 1e-6
    with pytest.raises((TimeIsUp, TrialFailed) if stands_still else TimeIsUp):
        measure_until_it_fails(fresh)
    assert fresh.trials.clock() - fresh.began <= left + 1.1
    assert fresh.trials.alive == []


def test_a_leader_that_measures_its_boundary_has_time_for_it(tmp_path):
    trials = simulated_trials(SPEED, examples=1_000_000)
    fresh = Fresh(tmp_path, trials)
    fresh.run.boundary = fresh.run.boundary.model_copy(update={"seconds": 5.0})

    def slow_down(trial):
        usual = trial.warm_up

        def measure_boundary(timeout, on_started):
            trial._pass(100.0, trial._requested_at + timeout)
            return usual(timeout, on_started)

        if trial.timing.boundary is None:
            trial.warm_up = measure_boundary

    trials.on_launch = slow_down
    fresh.measure()
    assert [trial.timing.boundary is None for trial in fresh.launched] == [False, True]
    assert fresh.confirmation.failure is None
    assert fresh.confirmation.instances
