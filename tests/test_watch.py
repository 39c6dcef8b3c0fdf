"""The watch over the winner at the end of a run (`--soak`), on simulated trials."""

import itertools

import pytest
from simulated import SimulatedTrial
from simulated_runs import FAST, Fresh, faster_by, quick_tune, simulated_trials, space

from autotune.data.record import Outcome, Phase
from autotune.runtime.executor import TrialFailed
from autotune.stats.deciding import Verdict
from autotune.tuning.rules import Limits
from autotune.tuning.run import Deadline
from autotune.tuning.tune import soak

ROOMY = Limits(host_bytes=8 << 30, device_bytes=80 << 30)
SPEED = faster_by(jit_compile=1.5)
ONE_KNOB = space(jit_compile=[False, True])


def watched(tmp_path, seconds=60.0, *, stops_after=10**9, **settings):
    """What a watch over a confirmed configuration has shown, its record and the seconds that it took."""
    asked = itertools.count()
    began = []
    interruptions = lambda: int(bool(began) and next(asked) >= stops_after)  # noqa: E731  # a word
    trials = simulated_trials(SPEED, noise=0.02, **settings.pop("machine", {}))
    fresh = Fresh(tmp_path, trials, interruptions=interruptions)
    fresh.measure(2, rounds=12)
    for name, value in settings.items():
        setattr(trials, name, value)
    began.append(trials.clock())
    fresh.run.limits = ROOMY
    fresh.run.deadline = Deadline(clock=trials.clock, at=trials.clock())  # of the search, whose time is over
    found = soak(fresh.run, fresh.record, seat="simulated", seconds=seconds)
    assert trials.alive == []
    records = fresh.run.directory.trials
    return found, records[max(records)], trials.clock() - began[0]


def passed(found):
    """By the name of each check, whether it passed."""
    return {check.name: check.passed for check in found.checks}


def test_a_sound_winner_trains_for_the_time_and_passes(tmp_path):
    found, record, took = watched(tmp_path)
    assert found.failure == ""
    assert all(passed(found).values())
    assert set(passed(found)) >= {"host_memory_growth", "hangs"}
    assert found.throughput.value == pytest.approx(6000.0, rel=0.02)
    assert 45.0 < found.seconds < took < 65.0
    assert (record.phase, record.outcome, record.instances) == (Phase.SOAK, Outcome.OK, 1)
    assert len(record.slices) > 50
    ends = [slice_.at for slice_ in record.slices]
    assert ends == sorted(set(ends))


def every(count, seconds):
    """A call that takes so much longer in each so-manieth slice."""
    slices = itertools.count(1)
    return lambda configuration: seconds if next(slices) % count == 0 else 0.0


@pytest.mark.parametrize(
    ("behaviour", "broken"),
    [
        ({"leak": lambda configuration: 2000.0}, "host_memory_growth"),
        ({"machine": {"gpus": ("H200",)}, "device_leak": lambda configuration: 2000.0}, "device_memory_growth"),
        ({"slow_calls": every(4, 30.0)}, "hangs"),
    ],
)
def test_what_leaks_or_hangs_is_found(tmp_path, behaviour, broken):
    found, *_ = watched(tmp_path, **behaviour)
    assert [name for name, well in passed(found).items() if not well] == [broken]


def test_weights_that_are_ruined_at_its_end_fail_it(tmp_path, monkeypatch):
    def finish(live, *given, whole=SimulatedTrial.finish, **how):
        if hasattr(live._trials, "ruined"):
            raise TrialFailed(Outcome.NONFINITE, "weights are not finite")
        return whole(live, *given, **how)

    monkeypatch.setattr(SimulatedTrial, "finish", finish)
    found, record, _ = watched(tmp_path, ruined=True)
    assert (found.failure, record.outcome) == ("weights are not finite", Outcome.NONFINITE)


def test_a_leak_of_the_workloads_own_refuses_nobody(tmp_path):
    found, *_ = watched(tmp_path, machine={"leak": lambda configuration: 2000.0})
    (growth,) = [check for check in found.checks if check.name == "host_memory_growth"]
    assert growth.passed
    assert "the workload that leaks" in growth.detail


@pytest.mark.parametrize("outcome", [Outcome.OOM, Outcome.CRASHED], ids=str)
def test_a_process_that_fails_is_told_with_its_reason(tmp_path, outcome):
    found, record, _ = watched(tmp_path, failure=lambda configuration: TrialFailed(outcome, "as planned"))
    assert (found.failure, found.throughput, found.checks) == ("as planned", None, ())
    assert record.outcome is outcome


def test_who_stops_it_has_what_was_seen(tmp_path):
    found, record, took = watched(tmp_path, seconds=600.0, stops_after=2)
    assert took < 60.0
    assert found.failure == ""
    assert record.slices


# ------------------------------------------------------------------------------------------------ whole runs


def tuned(tmp_path, **settings):
    """The recipe of a run that watches its winner."""
    options = {"budget": 200.0, "soak": 30.0, "space": ONE_KNOB, **settings.pop("options", {})}
    trials = simulated_trials(SPEED, noise=0.02, **settings)
    recipe, directory = quick_tune(trials, tmp_path, **options)
    assert trials.clock() <= 1.1 * options["budget"]
    return recipe, [each.phase for each in directory.trials.values()]


def test_the_recipe_says_what_was_watched(tmp_path):
    recipe, phases = tuned(tmp_path / "watched")
    assert recipe.evidence.verdict is Verdict.FASTER
    assert phases[-1] is Phase.SOAK
    assert recipe.evidence.watch.seconds > 10.0
    assert {check.name for check in recipe.evidence.watch.checks} >= {"hangs"}
    without, phases = tuned(tmp_path / "not", options={"soak": None})
    assert without.evidence.watch is None
    assert Phase.SOAK not in phases
    assert any("--soak" in each for each in without.evidence.stability.not_checked)
    assert not any("--soak" in each for each in recipe.evidence.stability.not_checked)


def test_its_time_is_kept_from_the_search(tmp_path):
    trials = simulated_trials(SPEED, noise=0.02)
    recipe, _ = quick_tune(trials, tmp_path, budget=150.0, soak=60.0)
    assert recipe.evidence.watch.seconds > 30.0
    assert trials.clock() <= 155.0


def test_winner_that_fails_during_the_watch_is_not_recommended(tmp_path):
    fast_starts = itertools.count()
    limit = {}

    def slow_calls(each):
        trial = next(fast_starts)
        return 30.0 if each == FAST and limit.get("watching") and trial % 4 == 0 else 0.0

    trials = simulated_trials(SPEED, noise=0.02, slow_calls=slow_calls)

    def observe(event):
        if "watching" in getattr(event, "text", ""):
            limit["watching"] = True

    recipe, _ = quick_tune(trials, tmp_path, budget=200.0, soak=30.0, space=ONE_KNOB, observe=observe)
    assert limit
    assert recipe.evidence.verdict is Verdict.UNSTABLE
    assert recipe.configuration == recipe.baseline
    assert recipe.candidate.configuration == dict(FAST)
    assert recipe.evidence.watch is not None


def test_nothing_is_watched_where_nothing_is_recommended(tmp_path):
    trials = simulated_trials(noise=0.02)
    recipe, directory = quick_tune(trials, tmp_path, budget=200.0, soak=30.0, space=ONE_KNOB)
    assert recipe.evidence.watch is None
    assert Phase.SOAK not in {each.phase for each in directory.trials.values()}


def test_a_watch_that_saw_nothing_is_none(tmp_path):
    trials = simulated_trials(SPEED, noise=0.02)
    asked = []
    fresh = Fresh(tmp_path, trials, interruptions=lambda: len(asked))
    fresh.measure(2)
    asked.append(True)
    assert soak(fresh.run, fresh.record, seat="simulated", seconds=60.0) is None
    assert trials.alive == []
