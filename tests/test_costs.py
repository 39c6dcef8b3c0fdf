"""What starting and measuring processes takes, as it is expected, and as it then is."""

import itertools
import math

import pytest
from simulated_runs import BASELINE, Fresh, a_record, a_slice, faster_by, simulated_trials

from autotune.data.record import Pairing
from autotune.tuning import costs

SHAPES = {
    "short epochs": {},
    "epochs of two seconds": {"examples": 8_000},
    "long epochs": {"examples": 1_000_000},
    "a minute to compile": {"examples": 1_000_000, "start_seconds": 60.0},
    "endless": {"examples": None},
    "slow steps": {"samples_per_second": faster_by(), "examples": 200},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_fresh_pair_takes_about_what_is_expected(tmp_path, shape):
    fresh = Fresh(tmp_path, simulated_trials(**{"samples_per_second": faster_by(), **SHAPES[shape]}))
    expected = costs.pair_seconds(fresh.records)
    fresh.measure(3)
    assert 0.5 * expected <= fresh.confirmation.trial.instance_seconds[-1] <= 1.1 * expected


@pytest.mark.parametrize("budget", [30.0, 300.0, 3600.0])
@pytest.mark.parametrize("ready", [1.0, 5.0, 25.0])
@pytest.mark.parametrize("is_eager", [False, True])
def test_a_trial_that_hangs_costs_a_share_of_the_budget(budget, ready, is_eager):
    timeout = costs.trial_timeout(budget, first_step=0.8 * ready, ready=ready, is_eager=is_eager)
    least = 1.5 * ready + costs.measured_seconds(ready)
    assert timeout >= least
    assert timeout <= max((0.2 if is_eager else 0.1) * budget, least + 1.0)
    assert not is_eager or timeout >= min(20.0, 0.2 * budget)


def test_processes_that_take_long_to_start_are_asked_more():
    seconds = [costs.measured_seconds(ready) for ready in (0.1, 5.0, 60.0, 600.0)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 1.0
    assert seconds[-1] == seconds[-2] < 60.0


@pytest.mark.parametrize("call", [0.3, 5.0, 60.0])
def test_slow_calls_are_counted_whatever_a_start_takes(call):
    assert costs.measured_seconds(1.0, call) == costs.measured_seconds(600.0, call) <= max(2.5, 8 * call)


def test_rounds_are_few_and_not_too_few():
    records = [
        a_record(first_step_seconds=start, warmup_seconds=1.0, slices=(a_slice(),) * 3, timed_by="steps")
        for start in (0.5, 20.0, 2000.0)
    ]
    rounds = [costs.rounds([record, record]) for record in records]
    assert rounds == sorted(rounds)
    assert 2 < rounds[0] < rounds[1]
    slow = a_record(first_step_seconds=1.0, warmup_seconds=1.0, slices=(a_slice(seconds=60.0),))
    assert costs.rounds([slow, slow]) <= rounds[0]


def test_an_epoch_of_unknown_length_is_no_short_one():
    shapes = itertools.product((None, 100.0), (1.0, None))
    for first, warm in shapes:
        record = a_record(BASELINE, first_step_seconds=first, warmup_seconds=warm)
        assert costs.pair_seconds([record, record]) > 0


def test_baseline_that_brackets_a_block_is_counted_twice():
    records = [
        a_record(first_step_seconds=10.0, warmup_seconds=1.0, slices=(a_slice(),) * 3),
        a_record(first_step_seconds=20.0, warmup_seconds=1.0, slices=(a_slice(),) * 3),
    ]
    blocks = [records[0], records[1].model_copy(update={"pairing": Pairing.BRACKETED})]
    start = costs.start_seconds(records[0])
    assert costs.pair_seconds(blocks, least=True) == pytest.approx(costs.pair_seconds(records, least=True) + start)


def test_a_trial_of_slow_calls_takes_at_least_five_of_them():
    usual = a_slice(rate=64.0, seconds=10.0)
    slow = usual.model_copy(update={"step_seconds": usual.step_seconds.model_copy(update={"p50": 2.0})})
    fast, baseline = (
        a_record(first_step_seconds=4.0, warmup_seconds=2.0, slices=(timed,) * 3, timed_by="steps")
        for timed in (usual, slow)
    )
    larger = BASELINE.replace(batch_size=4 * BASELINE.batch_size)
    start = costs.start_seconds(baseline)
    assert costs.least_trial_seconds(fast, BASELINE, 0.0) == 0.0
    assert costs.least_trial_seconds(baseline, BASELINE, 0.0) == pytest.approx(start + 5 * 2.0)
    assert costs.least_trial_seconds(baseline, larger, 0.0) == pytest.approx(start + 5 * 8.0)
    assert costs.least_trial_seconds(baseline, larger, math.log(4)) == pytest.approx(start + 5 * 2.0)
