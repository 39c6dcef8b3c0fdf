"""What to do with a candidate, given what was measured of it."""

import math
import random

import pytest

from autotune.data.figures import LogInterval
from autotune.data.options import MIN_GAIN
from autotune.stats.deciding import ClaimResult, Stop, is_faster, judge_claim, stop_measuring
from autotune.stats.intervals import Spread

KNOWN = Spread(deviation=0.05, degrees=100)
"""Of other trials, whose pairs vary as those of `noisy`."""


def around(centre, half_width):
    """An interval."""
    return LogInterval(value=centre, low=centre - half_width, high=centre + half_width, count=5)


def noisy(centre, count, deviation=0.05, seed=0):
    """So many log-ratios about a centre."""
    rng = random.Random(seed)
    return [rng.gauss(centre, deviation) for _ in range(count)]


LEADER = LogInterval(value=0.35, low=0.3, high=0.4, count=8)


def test_nothing_is_decided_on_a_few_pairs():
    for value in (-5.0, 5.0):
        assert stop_measuring([value] * 2, leader=LEADER) is None
        assert stop_measuring([value] * 3, leader=LEADER) is None
        assert stop_measuring([value] * 4, leader=LEADER) is not None


@pytest.mark.parametrize(
    ("centre", "expected"), [(-0.5, Stop.CANNOT_WIN), (0.28, Stop.BEHIND), (0.35, None), (0.9, Stop.AHEAD)]
)
def test_a_candidate_is_told_from_the_leader_and_no_more(centre, expected):
    assert stop_measuring(noisy(centre, 6), leader=LEADER) is expected


def test_without_a_leader_each_is_measured_until_it_is_known():
    assert stop_measuring(noisy(-3.0, 6), leader=None) is None
    assert stop_measuring(noisy(0.3, 6, deviation=0.001), leader=None) is Stop.NARROW


def test_the_spread_of_other_trials_lets_the_hopeless_go_at_once():
    values = [-0.5] * 2
    hardly = Spread(deviation=0.05, degrees=2)
    assert stop_measuring(values, leader=LEADER, pooled_spread=KNOWN) is Stop.CANNOT_WIN
    assert stop_measuring(values[1:], leader=LEADER, pooled_spread=KNOWN) is None
    assert stop_measuring(values, leader=LEADER, pooled_spread=hardly) is None


def test_two_pairs_that_agree_by_luck_give_nobody_up():
    assert stop_measuring([0.25, 0.25], leader=LEADER, pooled_spread=KNOWN) is None


@pytest.mark.parametrize("others", [None, KNOWN])
def test_looking_after_each_pair_rarely_gives_up_an_equal(others):
    given_up = 0
    for seed in range(300):
        values = noisy(0.3, 12, seed=seed)
        looks = [stop_measuring(values[:count], leader=LEADER, pooled_spread=others) for count in range(1, 13)]
        given_up += Stop.CANNOT_WIN in looks
    assert given_up <= 0.05 * 300


@pytest.mark.parametrize(
    ("speedup", "half_width", "min_gain", "expected"),
    [
        (1.5, 0.1, 0.02, True),
        (1.05, 0.01, 0.02, True),
        (1.05, 0.1, 0.02, False),
        (1.01, 0.001, 0.02, False),
        (1.01, 0.001, 0.005, True),
        (1.1, 0.01, 0.11, False),
        (0.5, 0.1, 0.02, False),
        (1.0, 0.0, 0.0, False),
        (7.0, math.inf, 0.0, False),
    ],
)
def test_faster_needs_a_sure_gain_that_is_worth_it(speedup, half_width, min_gain, expected):
    assert is_faster(around(math.log(speedup), half_width), min_gain=min_gain) is expected


@pytest.mark.parametrize(
    ("claim", "now", "min_gain", "expected"),
    [
        ((1.5, 0.05), (1.45, 0.05), MIN_GAIN, ClaimResult.HOLDS),
        ((1.5, 0.05), (2.0, 0.01), MIN_GAIN, ClaimResult.HOLDS),
        ((1.5, 0.05), (1.3, 0.05), MIN_GAIN, ClaimResult.WEAKER),
        ((1.5, 0.005), (1.48, 0.005), MIN_GAIN, ClaimResult.HOLDS),
        ((1.5, 0.30), (1.3, 0.05), MIN_GAIN, ClaimResult.HOLDS),
        ((1.5, 0.05), (1.5, 0.21), MIN_GAIN, ClaimResult.UNDECIDED),
        ((1.5, 0.05), (1.5, 0.20), MIN_GAIN, ClaimResult.HOLDS),
        ((1.5, 0.25), (1.5, 0.24), MIN_GAIN, ClaimResult.HOLDS),
        ((8.32, 0.06), (5.0, 1.5), MIN_GAIN, ClaimResult.UNDECIDED),
        ((1.10, 0.027), (2.0, 0.077), MIN_GAIN, ClaimResult.HOLDS),
        ((1.5, 0.05), (1.02, 0.05), MIN_GAIN, ClaimResult.GONE),
        ((1.05, 0.04), (1.02, 0.05), MIN_GAIN, ClaimResult.UNDECIDED),
        ((1.5, 0.05), (0.7, 0.05), MIN_GAIN, ClaimResult.GONE),
        ((1.492, 0.01), (1.350, 0.01), 0.02, ClaimResult.WEAKER),  # what a claim lacks must count
        ((1.492, 0.01), (1.350, 0.01), 0.15, ClaimResult.HOLDS),
        ((1.492, 0.01), (0.99, 0.02), 0.02, ClaimResult.GONE),
        ((1.492, 0.01), (0.99, 0.02), 0.60, ClaimResult.UNDECIDED),
    ],
)
def test_two_intervals_are_held_against_each_other(claim, now, min_gain, expected):
    then, later = (around(math.log(ratio), half_width) for ratio, half_width in (claim, now))
    assert judge_claim(then, later, min_gain=min_gain) is expected
