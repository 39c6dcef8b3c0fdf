"""What to do with a candidate, given what was measured of it."""

import math
import random

import pytest

from autotune.measure.deciding import (
    FEWEST_PAIRS,
    FEWEST_PAIRS_TO_PRUNE,
    MIN_GAIN,
    NARROW,
    Finding,
    Stop,
    Verdict,
    finding,
    stop_measuring,
    verdict,
)
from autotune.measure.intervals import BORROWED_DEGREES, LogInterval, Spread

KNOWN = Spread(deviation=0.05, degrees=100)
"""Of other trials, whose pairs vary as those of `noisy`."""


def around(centre, half_width):
    """An interval."""
    return LogInterval(value=centre, low=centre - half_width, high=centre + half_width, count=5)


def noisy(centre, count, deviation=0.05, seed=0):
    """So many log-ratios about a centre."""
    rng = random.Random(seed)
    return [rng.gauss(centre, deviation) for _ in range(count)]


def test_nothing_is_decided_on_a_few_pairs():
    """However clear it looks, the first pairs decide nothing."""
    values = [-5.0] * (FEWEST_PAIRS - 1)
    assert stop_measuring(values, incumbent_low=1.0) is None
    assert stop_measuring([*values, -5.0], incumbent_low=1.0) is Stop.CANNOT_WIN


def test_a_candidate_far_below_the_best_is_given_up():
    """Its upper bound lies below the best one's lower bound."""
    assert stop_measuring(noisy(-0.5, 6), incumbent_low=0.3) is Stop.CANNOT_WIN


def test_a_candidate_that_may_still_win_is_measured_on():
    """An estimate above the best one's lower bound is no reason to stop."""
    assert stop_measuring(noisy(0.3, 6), incumbent_low=0.25) is None


def test_nobody_is_given_up_where_nothing_may_be_pruned():
    """Without an incumbent even a very slow candidate is measured to the end."""
    assert stop_measuring(noisy(-3.0, 6), incumbent_low=None) is None


def test_measuring_stops_when_the_interval_is_narrow():
    """Once the speed-up is known to about a percent and a half, more slices are wasted."""
    assert stop_measuring(noisy(0.3, 6, deviation=NARROW / 10), incumbent_low=0.2) is Stop.NARROW


def test_the_spread_of_other_trials_lets_the_hopeless_go_at_once():
    """Two pairs far below the best are enough where it is known how much pairs vary, and not where it is not."""
    values = [-0.5] * FEWEST_PAIRS_TO_PRUNE
    hardly = Spread(deviation=0.05, degrees=BORROWED_DEGREES - 1)
    assert stop_measuring(values, incumbent_low=0.3, others=KNOWN) is Stop.CANNOT_WIN
    assert stop_measuring(values[1:], incumbent_low=0.3, others=KNOWN) is None
    assert stop_measuring(values, incumbent_low=0.3, others=hardly) is None


def test_two_pairs_that_agree_by_luck_give_nobody_up():
    """Their own spread is 0, but pairs are known to vary by more than what is missing."""
    assert stop_measuring([0.25, 0.25], incumbent_low=0.3, others=KNOWN) is None


def test_a_candidate_that_is_behind_gets_few_pairs_but_is_not_given_up():
    """Its estimate lies below the best one's lower bound, its upper bound above: the time is for others."""
    values = [0.1, 0.4, 0.2, 0.3, 0.2]
    assert stop_measuring(values[:FEWEST_PAIRS], incumbent_low=0.3) is Stop.BEHIND
    assert stop_measuring(values[: FEWEST_PAIRS - 1], incumbent_low=0.3) is None
    assert stop_measuring(values[:FEWEST_PAIRS], incumbent_low=0.2) is None
    assert stop_measuring(values, incumbent_low=None) is None


@pytest.mark.parametrize("others", [None, KNOWN])
def test_looking_after_each_pair_rarely_gives_up_an_equal(others):
    """A candidate just as fast as the best is given up in few of many trials, though it is looked at often."""
    given_up = 0
    for seed in range(300):
        values = noisy(0.3, 12, seed=seed)
        looks = [stop_measuring(values[:count], incumbent_low=0.3, others=others) for count in range(1, 13)]
        given_up += Stop.CANNOT_WIN in looks
    assert given_up <= 0.05 * 300


@pytest.mark.parametrize(
    ("speedup", "half_width", "expected"),
    [
        (1.5, 0.1, Verdict.FASTER),
        (1.05, 0.01, Verdict.FASTER),
        (1.05, 0.1, Verdict.NO_SIGNIFICANT_GAIN),
        (1.01, 0.001, Verdict.NO_SIGNIFICANT_GAIN),
        (0.5, 0.1, Verdict.NO_SIGNIFICANT_GAIN),
        (1.0, 0.0, Verdict.NO_SIGNIFICANT_GAIN),
    ],
)
def test_faster_needs_a_sure_gain_that_is_worth_it(speedup, half_width, expected):
    """The lower bound lies above 1, and the estimate is at least 2% up; else there is no gain to speak of."""
    assert verdict(around(math.log(speedup), half_width), min_gain=MIN_GAIN) is expected


def test_the_smallest_gain_is_the_users():
    """With another smallest gain, the same figures are judged by it."""
    ratio = around(math.log(1.1), 0.01)
    assert verdict(ratio, min_gain=0.09) is Verdict.FASTER
    assert verdict(ratio, min_gain=0.11) is Verdict.NO_SIGNIFICANT_GAIN


def test_an_unbounded_ratio_is_no_gain():
    """One instance gives no lower bound, so no claim."""
    ratio = LogInterval(value=2.0, low=-math.inf, high=math.inf, count=1)
    assert verdict(ratio, min_gain=0.0) is Verdict.NO_SIGNIFICANT_GAIN


@pytest.mark.parametrize(
    ("now", "min_gain", "expected"),
    [
        (around(0.30, 0.01), 0.02, Finding.WEAKER),
        (around(0.30, 0.01), 0.15, Finding.HOLDS),
        (around(-0.01, 0.02), 0.02, Finding.GONE),
        (around(-0.01, 0.02), 0.60, Finding.UNDECIDED),
    ],
)
def test_what_a_claim_lacks_must_count(now, min_gain, expected):
    """Less than the smallest gain that counts, however surely it is missing, is not held against a claim."""
    assert finding(around(0.40, 0.01), now, min_gain=min_gain) is expected
