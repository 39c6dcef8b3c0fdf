"""The self-test on simulated trials: what is known must be found, and what is not so must show."""

import math

import pytest
from simulated_runs import an_invocation, on_disk, simulated_trials

from autotune.data.figures import Interval, LogInterval
from autotune.front import cli
from autotune.front.documents import DOCUMENTS
from autotune.script.self_test_workload import TICK_SECONDS
from autotune.tuning.events import TrialBegan, TrialEnded
from autotune.tuning.self_test import Judgement, KnownDifference, SelfTest, judge_interval, self_test_with

HOLDS, CANNOT_TELL, WRONG = Judgement.HOLDS, Judgement.CANNOT_TELL, Judgement.WRONG

STEP_SECONDS = 0.008


def speeds(delay=1.0, other=1.0):
    """Steps of 8 ms, and the planted delay times `delay`; what should change nothing takes `other` times as long."""

    def samples_per_second(configuration):
        planted = TICK_SECONDS * configuration["num_parallel_calls"] * delay
        slower = 1.0 if configuration["deterministic"] else other
        return configuration.batch_size / (STEP_SECONDS * slower + planted)

    return samples_per_second


def self_tested(path, budget=100.0, observe=lambda event: None, **changes):
    """The self-test on simulated trials."""
    trials = simulated_trials(speeds(**changes), noise=0.02, seed=4)
    with on_disk(path / "run") as directory:
        found = self_test_with(an_invocation(trials, directory, budget=budget, observe=observe))
    assert trials.alive == []
    assert trials.clock() <= 1.1 * budget
    return found


def judgements(found):
    return found.same.judgement, found.delayed.judgement


def test_self_test_finds_only_the_planted_delay(tmp_path):
    events = []
    found = self_tested(tmp_path, observe=events.append)
    told = {event.changes for event in events if isinstance(event, TrialBegan | TrialEnded)}
    assert told == {"baseline", "the same training", "a planted delay"}
    assert judgements(found) == (HOLDS, HOLDS)
    assert (found.same.true, found.delayed.true) == (1.0, pytest.approx(1 / 1.2, rel=0.01))
    assert min(found.same.processes, found.delayed.processes) >= 2
    assert (found.fails, found.advice) == (False, "")
    gains = [found.gains[minutes] for minutes in (2, 5, 10)]
    assert gains == sorted(gains, reverse=True)
    assert 0.02 <= gains[-1] < 0.2


@pytest.mark.parametrize(("wrong", "judged"), [({"other": 1.3}, (WRONG, HOLDS)), ({"delay": 3.0}, (HOLDS, WRONG))])
def test_self_test_fails_on_unplanted_or_wrong_differences(tmp_path, wrong, judged):
    found = self_tested(tmp_path, **wrong)
    assert judgements(found) == judged
    assert found.fails


def test_self_test_too_short_to_decide_asks_for_more_time(tmp_path):
    found = self_tested(tmp_path, budget=12.0)
    assert judgements(found) == (CANNOT_TELL, CANNOT_TELL)
    assert not found.fails
    assert found.advice == "Repeat it with --self-test 30s."


def test_a_contradiction_on_a_busy_machine_is_no_alarm(tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.tuning.self_test.load_of", lambda part: 0.43)
    found = self_tested(tmp_path, other=1.3, delay=3.0)
    assert judgements(found) == (CANNOT_TELL, CANNOT_TELL)
    assert not found.fails
    assert found.advice == (
        "Repeat it with --self-test 200s while nothing else runs: other programs took 43% of the processors."
    )


DELAY = math.log(1 / 1.2)


@pytest.mark.parametrize(
    ("low", "high", "sure", "judgement"),
    [
        (-0.02, 0.03, (-0.05, 0.06), HOLDS),
        (-0.3, 0.3, (-0.6, 0.6), CANNOT_TELL),  # the delay would not have shown either
        (0.01, 0.06, (-0.02, 0.09), CANNOT_TELL),  # chance does that once in twenty times
        (0.05, 0.10, (0.03, 0.12), WRONG),
    ],
)
def test_an_interval_is_judged_by_what_is_known(low, high, sure, judgement):
    middle = (low + high) / 2
    interval, wide = (LogInterval(value=middle, low=a, high=b, count=4) for a, b in ((low, high), sure))
    assert judge_interval(interval, wide, true=0.0, other=DELAY, quiet=True) is judgement
    on_busy = judge_interval(interval, wide, true=0.0, other=DELAY, quiet=False)
    assert on_busy is (CANNOT_TELL if judgement is WRONG else judgement)


@pytest.mark.parametrize(
    ("judgement", "code", "told"),
    [
        (HOLDS, 0, "from 4 fresh processes a side: no difference, as it should be"),
        (CANNOT_TELL, 0, "from 4 fresh processes a side: too uncertain to tell"),
        (WRONG, 1, "from 4 fresh processes a side: a difference where there is none"),
    ],
)
def test_the_doctor_tells_what_it_found_and_leaves_by_it(capsys, monkeypatch, judgement, code, told):
    def measured(true, value, processes, judgement):
        interval = Interval(value=value, low=value - 0.03, high=value + 0.03)
        return KnownDifference(true=true, measured=interval, processes=processes, judgement=judgement)

    found = SelfTest(
        same=measured(1.0, 1.0, 4, judgement),
        delayed=measured(0.83, 0.84, 1, HOLDS),
        others_share=0.02,
        gains={2: 0.081, 5: 0.05, 10: 0.03},
        advice="Repeat it." if judgement is CANNOT_TELL else "",
    )
    budgets = []
    monkeypatch.setattr("autotune.machine.doctor.look", lambda _: None)
    monkeypatch.setattr("autotune.machine.doctor.diagnose", lambda state: ())
    monkeypatch.setattr(
        "autotune.tuning.self_test.run_self_test", lambda budget, observe: budgets.append(budget) or found
    )
    assert cli.main(["doctor", "--self-test", "1m"]) == code
    out = capsys.readouterr().out
    assert f"A against A: ×1.00 (0.97 to 1.03) {told}" in out
    assert "A planted delay of ×0.83: ×0.84 (0.81 to 0.87) from 1 fresh process a side: it is found" in out
    assert "9% in 2 minutes, 5% in 5 minutes, 3% in 10 minutes" in out
    assert ("Repeat it." in out) == (judgement is CANNOT_TELL)
    cli.main(["doctor", "--self-test", "1m", "--json"])
    document = DOCUMENTS.validate_json(capsys.readouterr().out)
    assert document.self_test == found
    assert budgets == [60.0, 60.0]
