"""How the table of expectations is made of records and literature."""

import math

import pytest
from expectations import Seen, differences, make_row, merge
from simulated_runs import BASELINE, a_record

from autotune.data.record import Outcome, Phase
from autotune.tuning.beliefs import Expectation

KEY = ("batch_size", "up", "cpu", "", "")


def seen_in(*tried):
    """What a run's trials show: configurations with their speed-ups, or an outcome."""
    records = [a_record(BASELINE, trial=0, phase=Phase.BASELINE, first_step_seconds=1.0)]
    for configuration, shown in tried:
        figures = {"outcome": shown} if isinstance(shown, Outcome) else {"speedup": shown}
        records.append(a_record(configuration, first_step_seconds=2.0, **figures))
    return {(name, before, after): seen for name, before, after, seen in differences(records)}


def test_two_trials_unlike_in_one_knob_tell_what_it_gains():
    compiled, both = BASELINE.replace(jit_compile=True), BASELINE.replace(jit_compile=True, batch_size=64)
    found = seen_in((compiled, 1.2), (both, 1.8))
    assert found["jit_compile", False, True].gains == [pytest.approx(math.log(1.2))]
    assert found["jit_compile", False, True].starts == [pytest.approx(math.log(2.0))]
    assert found["batch_size", 32, 64].gain == pytest.approx(math.log(1.5))
    assert len(found) == 2


def test_knobs_that_a_change_names_together_are_one_change():
    found = seen_in((BASELINE.replace(num_parallel_calls=16, data_threads=16), 1.5))
    assert [name for name, *_ in found] == ["num_parallel_calls"]


def test_a_failure_counts_for_the_knob_that_alone_was_changed():
    crashed = BASELINE.replace(precision="mixed_bfloat16")
    found = seen_in((crashed, Outcome.CRASHED), (crashed.replace(batch_size=64), Outcome.OOM))
    assert [(name, seen.failures, seen.gains) for (name, *_), seen in found.items()] == [("precision", 1, [])]


def test_a_stopped_trial_tells_nothing():
    assert seen_in((BASELINE.replace(jit_compile=True), Outcome.INTERRUPTED)) == {}


def test_a_row_is_the_median_of_workloads_not_of_trials():
    slow, fast = (Seen(gains=[gain] * count, sizes=[1.0] * count) for gain, count in ((0.0, 9), (0.4, 1)))
    row = make_row(KEY, {"slow": slow, "fast": fast}, "of 2 runs")
    assert row.gain == pytest.approx(0.2, abs=1e-3)
    assert row.trials == 10
    assert row.source == "recorded: fast, slow; of 2 runs"


@pytest.mark.parametrize(("workloads", "trials"), [(2, 4), (1, 4), (2, 1)])
def test_literature_stands_until_enough_was_recorded(workloads, trials):
    written = Expectation(knob="batch_size", change="up", device="cpu", speedup=3.0, spread=0.1, source="literature: x")
    seen = Seen(gains=[0.0] * trials, sizes=[1.0] * trials)
    (row,) = merge({KEY: {str(name): seen for name in range(workloads)}}, [written], "of 2 runs")
    assert (row.speedup == 1.0) is (workloads == 2 and trials == 4)


def test_a_limit_with_few_records_has_no_row():
    seen, once = Seen(gains=[0.1] * 4, sizes=[1.0] * 4), Seen(gains=[1.0], sizes=[1.0])
    found = {("batch_size", "up", "cpu", "input", ""): {"one": once}, KEY: {"one": seen, "other": seen}}
    assert [row.limit for row in merge(found, [], "of 2 runs")] == [""]
