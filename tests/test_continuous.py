"""What pauses between slices give, told from legs in which only the first slice has a pause before it."""

import math
import random

import pytest

from autotune.measure import continuous
from autotune.measure.continuous import TELLING
from autotune.measure.intervals import LogInterval, t_quantile


def soaked(legs, baseline_legs, **settings):
    """What legs of these samples per second show, of as many examples in each slice."""
    sides = ([[(rate, 100) for rate in leg] for leg in each] for each in (legs, baseline_legs))
    return continuous.soaked(*sides, **settings)


def legs_of(drawn, *, speed, pause=1.0, legs=4, noise=0.03, drift=0.1):
    """Legs of four slices: the first faster by `pause`, each leg at a pace of its own."""
    found = []
    for _ in range(legs):
        here = speed * math.exp(drawn.gauss(0, drift))
        rates = [here * math.exp(drawn.gauss(0, noise)) for _ in range(4)]
        found.append([rates[0] * pause, *rates[1:]])
    return found


def a_soak(seed=0, *, pause=1.0, baseline_pause=1.0, **settings):
    """A soak of a winner that is half as fast again as the baseline."""
    drawn = random.Random(seed)
    own = legs_of(drawn, speed=150.0, pause=pause, **settings)
    return soaked(own, legs_of(drawn, speed=100.0, pause=baseline_pause, **settings), seconds=10.0)


def interval(value, half_width):
    """A logarithm with its interval."""
    return LogInterval(value=value, low=value - half_width, high=value + half_width, count=8)


def test_what_pauses_give_is_found_and_taken_off():
    """Pauses that raise the winner by 30% and the baseline by 10% are told from noise, and leave the claim."""
    found = a_soak(pause=1.3, baseline_pause=1.1, noise=0.01)
    assert found.contradicts
    assert found.tells
    assert found.pauses.low < math.log(1.3 / 1.1) < found.pauses.high
    claim = found.without_pauses(interval(math.log(1.5 * 1.3 / 1.1), 0.03))
    assert claim.low < math.log(1.5) < claim.high
    assert claim.half_width == pytest.approx(math.hypot(0.03, found.pauses.half_width))


def test_so_much_is_taken_off_as_slices_had_pauses():
    """Of the claim's slices three quarters had one, and half of the baseline's."""
    legs, beside = [[130.0, 100.0, 100.0]] * 2, [[60.0, 50.0, 50.0]] * 2
    found = soaked(legs, beside, seconds=1.0, shares=(0.75, 0.5))
    assert found.pauses.value == pytest.approx(0.75 * math.log(1.3) - 0.5 * math.log(1.2))
    assert found.slices == (((100.0, 100), (100.0, 100)),) * 2


def test_what_pauses_surely_cost_is_given_back():
    """Where they slow the winner down by a fifth, slices have told too little."""
    found = a_soak(pause=0.8, noise=0.01)
    assert found.contradicts
    assert found.without_pauses(interval(math.log(1.2), 0.03)).value > math.log(1.4)


def test_pauses_that_give_both_the_same_leave_the_claim_alone():
    """Both are 30% faster after a pause: the speed-up is what it was."""
    assert not a_soak(pause=1.3, baseline_pause=1.3, noise=0.01).contradicts


def test_the_machines_drift_does_not_enter():
    """Legs at paces tens of percent apart say as much as legs at one pace."""
    steady, drifting = (a_soak(noise=0.02, drift=drift).pauses.half_width for drift in (0.0, 0.5))
    assert drifting == pytest.approx(steady, rel=1e-6)


@pytest.mark.parametrize("legs", [2, 4, 8])
def test_the_interval_covers_the_truth(legs):
    """Of 600 simulated soaks in which pauses give nothing, about one in twenty has an interval without 0."""
    found = [a_soak(seed, legs=legs).pauses for seed in range(600)]
    assert sum(not each.low < 0 < each.high for each in found) <= 0.075 * 600


def test_two_legs_that_agree_by_chance_take_nothing_off():
    """Legs of a real soak: both gains of each side agreed, while slices without any pause differed by half."""
    legs = [[798.0, 823.0, 741.0, 688.0], [1066.0, 1072.0, 659.0, 1054.0]]
    beside = [[295.0, 332.0, 326.0, 328.0], [354.0, 377.0, 357.0, 484.0]]
    found = soaked(legs, beside, seconds=11.8, shares=(0.65, 0.65))
    assert not found.contradicts
    assert not found.tells


@pytest.mark.parametrize(
    ("shares", "of_baseline"), [((1.0, 1.0), 0.1), ((0.5, 0.8), 0.1), ((1.0, 0.5), 0.02)]
)
def test_what_slices_vary_by_is_in_the_interval(shares, of_baseline):
    """Where the legs' gains do not differ at all: each side's own spread, in its share, Student's t after Welch."""
    leg, beside = ([1.0, math.exp(each), math.exp(-each)] for each in (0.1, of_baseline))
    found = soaked([leg] * 2, [beside] * 4, seconds=1.0, shares=shares)
    own = shares[0] ** 2 * 2 * 0.1**2 * 1.5 / 2
    its = shares[1] ** 2 * 2 * of_baseline**2 * 1.5 / 4
    degrees = (own + its) ** 2 / (own**2 / 2 + its**2 / 4)
    expected = t_quantile(0.95, degrees) * math.sqrt(own + its)
    assert found.pauses.half_width == pytest.approx(expected)
    assert found.pauses.count == 6


def test_a_claim_is_raised_by_what_is_sure_by_either_spread():
    """At 99% the gains of two legs tell less than slices do, however close both are at 95%: the wider one counts."""
    legs = [[82.0, 108.0, 93.0, 100.0], [87.0, 108.0, 93.0, 100.0]]
    beside = [[119.0, 108.0, 93.0, 100.0], [111.0, 108.0, 93.0, 100.0]]
    found = soaked(legs, beside, seconds=1.0)
    assert found.pauses.high < 0 < found.surely.high
    assert not found.contradicts
    assert soaked(beside, legs, seconds=1.0).contradicts


@pytest.mark.parametrize("legs", [2, 4, 8])
def test_chance_seldom_raises_a_claim(legs):
    """Of 600 simulated soaks in which pauses give nothing, one in forty lowers the claim, and fewer raise it."""
    wrong = [each.pauses.value for each in (a_soak(n, legs=legs) for n in range(600)) if each.contradicts]
    assert sum(value < 0 for value in wrong) <= 0.015 * 600
    assert sum(value > 0 for value in wrong) <= 0.045 * 600


def test_what_pauses_give_is_mostly_found_on_a_restless_machine():
    """Of 200 soaks with slices that vary by 9%, most that raise the speed-up by 30% are told of."""
    found = [a_soak(n, pause=1.3, noise=0.09) for n in range(200)]
    assert sum(each.contradicts and each.pauses.value > 0 for each in found) > 0.5 * 200


def test_a_short_and_noisy_soak_says_that_it_does_not_tell():
    """Two legs of each with slices that vary by 20%."""
    found = a_soak(legs=2, noise=0.2)
    assert found.pauses.half_width > TELLING
    assert not found.tells


def test_rates_are_those_without_a_pause():
    """Samples per second of the slices that follow, leg by leg."""
    found = soaked([[9.0, 3.0, 3.0]] * 2, [[9.0, 2.0, 2.0]] * 2, seconds=1.0)
    assert found.slices == (((3.0, 100), (3.0, 100)),) * 2
    assert found.baseline_slices == (((2.0, 100), (2.0, 100)),) * 2
