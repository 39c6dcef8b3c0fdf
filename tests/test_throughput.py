"""Samples per second of a long training."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.stats.intervals import long_run_rate, mean_interval, overall_log_ratios


def test_without_boundaries_it_is_examples_over_seconds():
    assert long_run_rate(1000, 0.5) == 2000.0
    assert long_run_rate(1000, 0.5, examples_per_epoch=None, epoch_overhead_seconds=3.0) == 2000.0
    assert long_run_rate(1000, 0.5, examples_per_epoch=4000, epoch_overhead_seconds=None) == 2000.0


def test_an_epochs_boundary_is_paid_in_proportion():
    assert long_run_rate(1000, 0.5, examples_per_epoch=4000, epoch_overhead_seconds=1.0) == pytest.approx(4000 / 3)


def test_the_slices_length_does_not_matter():
    settings = {"examples_per_epoch": 4000, "epoch_overhead_seconds": 0.7}
    assert long_run_rate(1000, 0.5, **settings) == pytest.approx(long_run_rate(2000, 1.0, **settings))


def test_stalls_count_for_the_time_they_take():
    steady, stalling = [(2000.0, 1000)] * 4, [(2000.0, 1000), (1000.0, 1000)] * 2
    found = overall_log_ratios(steady, stalling)
    assert statistics.fmean(found) == pytest.approx(math.log(2 / 3))
    assert found[0] > found[1]


SIDES = st.lists(st.tuples(*[st.tuples(st.floats(1.0, 1e6), st.integers(1, 10_000))] * 2), min_size=1, max_size=20)


@given(SIDES)
def test_pairs_say_what_all_their_time_says(pairs):
    baseline, candidate = zip(*pairs, strict=True)
    totals = [sum(n for _, n in side) / sum(n / rate for rate, n in side) for side in (baseline, candidate)]
    found = overall_log_ratios(baseline, candidate)
    assert statistics.fmean(found) == pytest.approx(math.log(totals[1] / totals[0]), abs=1e-9)


@given(st.lists(st.tuples(st.floats(0.98, 1.02), st.floats(0.98, 1.02)), min_size=2, max_size=20))
def test_nearly_steady_pairs_say_what_each_of_them_says(speeds):
    pairs = [[(1000 * speed, 500) for speed in each] for each in speeds]
    found = overall_log_ratios(*zip(*pairs, strict=True))
    assert found == pytest.approx([math.log(own / other) for other, own in speeds], abs=0.01)


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=20), st.booleans())
def test_what_slows_both_down_cancels_out(speeds, by_time):
    pairs = [[(speed, 1000 * speed if by_time else 1000)] * 2 for speed in speeds]
    baseline, candidate = zip(*pairs, strict=True)
    twice = [(2 * rate, 2 * count if by_time else count) for rate, count in candidate]
    assert overall_log_ratios(baseline, twice) == pytest.approx([math.log(2)] * len(speeds))


def test_the_spread_is_the_one_of_the_mean():
    rng, held = random.Random(0), 0
    for _ in range(1000):
        slow, quick = ([(math.exp(rng.gauss(0, 0.4)), 1000) for _ in range(25)] for _ in range(2))
        interval = mean_interval(overall_log_ratios(slow, quick))
        held += interval.low <= 0 <= interval.high
    assert held > 930
