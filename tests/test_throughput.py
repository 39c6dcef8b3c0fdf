"""Samples per second of a long training."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import a_slice

from autotune.stats.intervals import mean_interval, overall_log_ratios
from autotune.stats.ratios import EpochCost, rate


def test_without_boundaries_it_is_examples_over_seconds():
    for cost in (EpochCost(), EpochCost(seconds=3.0), EpochCost(examples=4000)):
        assert rate(a_slice(2000.0), cost) == 2000.0
    assert rate(a_slice(2000.0, epochs=1), EpochCost(examples=4000, seconds=1.0)) == 2000.0


def test_an_epochs_boundary_is_paid_in_proportion():
    assert rate(a_slice(2000.0), EpochCost(examples=4000, seconds=1.0)) == pytest.approx(4000 / 3)


def test_the_slices_length_does_not_matter():
    cost = EpochCost(examples=4000, seconds=0.7)
    assert rate(a_slice(2000.0), cost) == pytest.approx(rate(a_slice(2000.0, seconds=1.0), cost))


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
