"""The self-test on simulated trials: what is known must be found, and what is not so must show."""

import pytest
from simulated_runs import an_invocation, on_disk, simulated_trials

from autotune.data.errors import ArgumentError
from autotune.data.figures import Interval
from autotune.front import cli
from autotune.front.documents import DOCUMENTS
from autotune.script.self_test_workload import TICK_SECONDS
from autotune.tuning.self_test import SelfTest, self_test_with

STEP_SECONDS = 0.008


def speeds(delay=1.0, other=1.0):
    """Steps of 8 ms, and the planted delay times `delay`; what should change nothing takes `other` times as long."""

    def samples_per_second(configuration):
        planted = TICK_SECONDS * configuration["num_parallel_calls"] * delay
        slower = 1.0 if configuration["deterministic"] else other
        return configuration.batch_size / (STEP_SECONDS * slower + planted)

    return samples_per_second


def self_tested(path, budget=100.0, **changes):
    """The self-test on simulated trials."""
    trials = simulated_trials(speeds(**changes), noise=0.02, seed=4)
    with on_disk(path / "run") as directory:
        found = self_test_with(an_invocation(trials, directory, budget=budget))
    assert trials.alive == []
    assert trials.clock() <= 1.1 * budget
    return found


def test_no_difference_is_found_where_there_is_none_and_the_delay_is(tmp_path):
    found = self_tested(tmp_path)
    assert found.holds_one
    assert found.finds_delay
    assert found.planted == pytest.approx(1 / 1.2, rel=0.01)
    assert min(found.instances) >= 2
    gains = [found.gains[minutes] for minutes in (2, 5, 10)]
    assert gains == sorted(gains, reverse=True)
    assert 0.02 <= gains[-1] < 0.2


def test_a_difference_that_is_not_planted_shows(tmp_path):
    found = self_tested(tmp_path, other=1.3)
    assert (found.holds_one, found.finds_delay) == (False, True)


def test_a_delay_of_another_size_shows(tmp_path):
    found = self_tested(tmp_path, delay=3.0)
    assert (found.holds_one, found.finds_delay) == (True, False)


def test_too_short_a_time_is_said_with_a_longer_one(tmp_path):
    with pytest.raises(ArgumentError) as caught:
        self_tested(tmp_path, budget=12.0)
    assert "12 s are too short" in caught.value.message
    assert caught.value.hint == "Give --self-test 30s."


@pytest.mark.parametrize("measured", [1.0, 1.1])
def test_the_doctor_tells_what_it_found_and_leaves_by_it(capsys, monkeypatch, measured):
    def interval(value):
        return Interval(value=value, low=value - 0.03, high=value + 0.03)

    found = SelfTest(
        same=interval(measured),
        planted=0.83,
        found=interval(0.84),
        instances=(4, 3),
        gains={2: 0.081, 5: 0.05, 10: 0.03},
    )
    budgets = []
    monkeypatch.setattr("autotune.front.doctor_report.look", lambda: None)
    monkeypatch.setattr("autotune.front.commands.diagnose", lambda state: ())
    monkeypatch.setattr(
        "autotune.tuning.self_test.run_self_test", lambda budget, observe: budgets.append(budget) or found
    )
    assert cli.main(["doctor", "--self-test", "1m"]) == (0 if measured == 1.0 else 1)
    out = capsys.readouterr().out
    assert "A planted delay of ×0.83: ×0.84 (0.81 to 0.87): it is found" in out
    assert "9% in 2 minutes, 5% in 5 minutes, 3% in 10 minutes" in out
    assert ("a difference where there is none" in out) == (measured != 1.0)
    cli.main(["doctor", "--self-test", "1m", "--json"])
    document = DOCUMENTS.validate_json(capsys.readouterr().out)
    assert document.self_test == found
    assert budgets == [60.0, 60.0]
