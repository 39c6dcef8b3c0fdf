"""Leaders that are confirmed at the same time, on several seats: which of them is recommended, and at what error."""

import itertools
from types import SimpleNamespace

import pytest
from simulated_runs import BASELINE, FAST, a_pair, a_record, run_on, simulated_trials

from autotune.data.figures import Check, LogInterval
from autotune.data.record import InterimAnalysis, Outcome, Pairing, Phase, ProcessLog, Standing
from autotune.stats.deciding import EndedBy
from autotune.stats.stability import PARITY
from autotune.tuning import costs
from autotune.tuning import standings as standings_module
from autotune.tuning.leaders import Leaders
from autotune.tuning.loop import Loop
from autotune.tuning.policy import error_of
from autotune.tuning.standings import Standings, parity_checks
from autotune.tuning.state import State
from autotune.tuning.trial import Trial

LARGE = BASELINE.replace(batch_size=64)


def begun(path):
    """A run, what it knows, and the confirmations of two leaders that were begun one after the other."""
    run = run_on(simulated_trials(), path)
    run.numbers = itertools.count(100)
    run.trials[0] = Trial(0, Phase.BASELINE, BASELINE)
    run.records[0] = a_record(BASELINE, trial=0, phase=Phase.BASELINE)
    standings = Standings(run, measured_seconds=1.0)
    leaders = Leaders(run, standings, None)
    for number, configuration in ((11, FAST), (21, LARGE)):
        run.trials[number] = trial = Trial(number, Phase.CONFIRM, configuration)
        trial.looks = (
            InterimAnalysis(leader=number // 10, candidate=number // 10, error=0.025, most=12, reference=number + 1),
        )
        run.records[number // 10] = a_record(configuration, trial=number // 10)
        run.trials[number // 10] = Trial.from_record(run.records[number // 10])
    return run, standings, leaders


def test_last_confirmed_leader_is_recommended(tmp_path):
    """The order in which the leaders began does not matter."""
    run, standings, leaders = begun(tmp_path)
    for number in (21, 11):
        run.executor.clock.advance(1.0)
        leaders._conclude(standings.leader(number), Standing.CONFIRMED)
    assert standings.best_leader_beside(FAST).trial.number == 11
    for number in (11, 21):  # and so it is by the records, after a resumption
        run.trials[number] = Trial.from_record(run.records[number])
    assert standings.best_leader_beside(FAST).trial.number == 11


@pytest.mark.parametrize("apart", [True, False])
def test_a_claim_knows_the_luck_that_pairs_share(tmp_path, monkeypatch, apart):
    """How often the baseline was compiled, and whether the sides have templates of their own."""
    run, known, _ = begun(tmp_path)
    run.trials[11].pairs = tuple(a_pair(1.5, instance=number) for number in range(3))
    leader, told = known.leader(11), []
    leader.reference.processes = tuple(ProcessLog.model_construct(saved_seconds=saved) for saved in (None, 3.0, 3.0))
    monkeypatch.setattr(standings_module, "claim_interval", lambda _, **how: told.append(how))
    monkeypatch.setattr(run.executor, "needs_different_template", lambda *sides: apart)
    known.claim(leader)
    assert [(how["compilations"], how["different_template"]) for how in told] == [(1, apart)]


def test_leader_must_beat_the_current_champion(tmp_path, monkeypatch):
    run, standings, leaders = begun(tmp_path)
    leaders._conclude(standings.leader(11), Standing.CONFIRMED)
    monkeypatch.setattr(standings, "over_best_leader", lambda *_: LogInterval(value=0.2, low=0.1, high=0.3, count=4))
    for beside, beats in ((BASELINE.replace(prefetch=2), False), (FAST, True)):
        run.trials[30] = Trial(30, Phase.CONFIRM, beside)
        leaders._update_looks(run.trials[21], champion=30)
        assert leaders._beats(standings.leader(21), standings.best_leader_beside(FAST)) is beats


def test_replanned_leader_spends_an_error_of_its_own(tmp_path):
    run, standings, leaders = begun(tmp_path)
    state = lambda: State(left=1.0, budget=1.0, leaders=tuple(map(standings.weigh_leader, standings.leaders())))  # noqa: E731
    for planned in (3, 4):
        assert state().next_leader == planned
        leaders.begin(run.trials[1], error=error_of(state().next_leader))
    assert [(looks.leader, looks.error) for looks in run.trials[11].looks[1:]] == [(3, error_of(3)), (4, error_of(4))]
    assert error_of(4) < error_of(3)


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.OOM, Outcome.INTERRUPTED])
def test_an_interrupted_trial_was_not_tried(tmp_path, outcome):
    run, standings, _ = begun(tmp_path)
    running = run.new_trial(Phase.SEARCH, BASELINE.replace(prefetch=2))
    run.records[1] = run.records[1].model_copy(update={"outcome": outcome})
    assert (FAST in standings.tried()) is (outcome is not Outcome.INTERRUPTED)
    assert running.requested in standings.tried()
    assert running not in standings.ended()


def test_all_open_leaders_get_a_last_look_when_time_is_up(tmp_path):
    seen = []
    state = SimpleNamespace(open_leaders=[SimpleNamespace(number=11), SimpleNamespace(number=21)])
    loop = SimpleNamespace(
        _leaders=SimpleNamespace(last_look=seen.append),
        _standings=SimpleNamespace(leaders=list),
        _untried=tuple,
        state=lambda: state,
    )
    Loop._ended(loop, state, EndedBy.BUDGET)
    assert seen == [11, 21]


def test_another_look_in_blocks_costs_a_baseline_start(tmp_path):
    run, standings, _ = begun(tmp_path)
    beside = standings.candidates()[0].look_seconds
    run.records[1] = run.records[1].model_copy(update={"pairing": Pairing.BRACKETED})
    assert standings.candidates()[0].look_seconds == pytest.approx(beside + costs.start_seconds(run.records[0]))


def test_inconclusive_loss_comparison_hides_no_conclusive_one():
    unknown = Check(name=PARITY, passed=True, detail="cannot tell: no time")
    alike = Check(name=PARITY, passed=True, value=0.01, limit=0.05, detail="alike")
    apart = Check(name=PARITY, passed=False, value=0.5, limit=0.05, detail="apart")
    for checks in itertools.permutations([unknown, alike, apart], 2):
        records = [a_record(FAST, trial=number, checks=(check,)) for number, check in enumerate(checks)]
        (found,) = parity_checks(records).values()
        assert found == (apart if apart in checks else alike)
