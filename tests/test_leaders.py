"""Leaders that are confirmed at the same time, on several seats: which of them is recommended."""

from types import SimpleNamespace

from simulated_runs import BASELINE, FAST, LIMITS, a_record, run_on, simulated_trials

from autotune.data.figures import LogInterval
from autotune.data.record import Looks, Phase, Standing
from autotune.stats.deciding import EndedBy
from autotune.tuning.confirmation import LeaderTrials
from autotune.tuning.knowledge import View
from autotune.tuning.leaders import Leaders
from autotune.tuning.loop import Loop
from autotune.tuning.trial import Trial

LARGE = BASELINE.replace(batch_size=64)


def begun(path):
    """A run, what it knows, and the confirmations of two leaders that were begun one after the other."""
    run = run_on(simulated_trials(), path)
    view = View(run, measured_seconds=1.0)
    leaders = Leaders(run, view, None, limits=LIMITS, min_gain=0.02)
    for number, configuration in ((11, FAST), (21, LARGE)):
        trial = Trial(number, Phase.CONFIRM, configuration)
        trial.looks = (Looks(leader=number // 10, candidate=number - 10, error=0.025, most=12, reference=number + 1),)
        run.records[number - 10] = a_record(configuration, trial=number - 10)
        view.confirmations[number] = LeaderTrials(
            reference=Trial(number + 1, Phase.CONFIRM, BASELINE),
            trial=trial,
            champion=None,
            in_search=run.records[number - 10],
        )
    return run, view, leaders


def test_the_one_that_was_confirmed_last_is_recommended_whichever_was_begun_first(tmp_path):
    """It has beaten the other; so it is after a resumption, too."""
    run, view, leaders = begun(tmp_path)
    first, second = view.confirmations.values()
    for each in (second, first):
        run.executor.clock.advance(1.0)
        leaders._conclude(each, Standing.CONFIRMED)
    assert view.champion() is first
    _, again, restored = begun(tmp_path)
    again.confirmations.clear()
    restored._run = run
    restored.restore([first.trial, second.trial])
    assert again.champion().trial is first.trial


def test_a_leader_that_beats_an_earlier_champion_must_beat_the_present_one(tmp_path, monkeypatch):
    """What it showed beside another is no comparison."""
    _, view, leaders = begun(tmp_path)
    first, second = view.confirmations.values()
    leaders._conclude(first, Standing.CONFIRMED)
    second.champion = Trial(30, Phase.CONFIRM, BASELINE.replace(prefetch=2))
    monkeypatch.setattr(view, "over_champion", lambda *_: LogInterval(value=0.2, low=0.1, high=0.3, count=4))
    assert not leaders._beats_champion(second)
    second.champion = Trial(31, Phase.CONFIRM, FAST)
    assert leaders._beats_champion(second)


def test_all_leaders_that_are_open_when_the_time_is_over_are_looked_at(tmp_path):
    """With several seats there may be more than one."""
    seen = []
    state = SimpleNamespace(opened=[SimpleNamespace(number=11), SimpleNamespace(number=21)])
    loop = SimpleNamespace(
        _leaders=SimpleNamespace(last_look=seen.append, checks={}),
        _view=SimpleNamespace(confirmations={11: "one", 21: "other"}),
        state=lambda: state,
    )
    Loop._ended(loop, state, EndedBy.BUDGET)
    assert seen == ["one", "other"]
