"""Estimates and confidence intervals."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.data.figures import Interval, LogInterval
from autotune.stats.intervals import (
    LEAST_DEVIATION,
    NOISY_DEVIATION,
    TEMPLATE_DEGREES,
    TEMPLATE_DEVIATION,
    ProcessPrior,
    Spread,
    claim_interval,
    mean_interval,
    pooled_spread,
    process_prior,
    t_quantile,
)

NOISE = 0.1
"""Standard deviation of one log-ratio, as on a shared machine."""
WORLDS = 2000


def share_covered(intervals, truth=0.3):
    """How many of the intervals hold the truth, as a share."""
    covered = [interval.low <= truth <= interval.high for interval in intervals]
    return sum(covered) / len(covered)


def measured(rng, *, instances, pairs, between, truth=0.3):
    """Log-ratios of instances that differ by `between`, each of noisy pairs."""
    values = []
    for _ in range(instances):
        centre = rng.gauss(truth, between)
        values.append([rng.gauss(centre, NOISE) for _ in range(pairs)])
    return values


@pytest.mark.parametrize(
    ("confidence", "degrees", "expected"),
    [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 7, 2.365), (0.99, 3, 5.841), (0.95, 1e9, 1.960)],
)
def test_quantiles_are_students(confidence, degrees, expected):
    assert t_quantile(confidence, degrees) == pytest.approx(expected, abs=0.001)


def test_the_mean_interval_is_students():
    found = mean_interval([0.1, 0.2, 0.3])
    assert found.value == pytest.approx(0.2)
    assert found.half_width == pytest.approx(4.303 * 0.1 / math.sqrt(3), abs=1e-4)
    assert found.high - found.value == pytest.approx(found.value - found.low)
    assert found.count == 3


def test_one_value_bounds_nothing():
    for found in (mean_interval([0.5]), claim_interval([[0.4, 0.6]], prior=ProcessPrior(deviation=0.1, degrees=8))):
        assert (found.value, found.low, found.high) == (0.5, -math.inf, math.inf)


def test_more_confidence_is_wider():
    values = [0.1, 0.25, 0.2, 0.4]
    assert mean_interval(values, confidence=0.99).half_width > mean_interval(values).half_width


def test_the_mean_interval_covers_as_it_says():
    rng = random.Random(1)
    intervals = [mean_interval([rng.gauss(0.3, NOISE) for _ in range(6)]) for _ in range(WORLDS)]
    assert 0.94 <= share_covered(intervals) <= 0.96


def prior_of(rng, *, processes_differ=0.0, trials=6, pairs=6):
    """What a run's other trials tell: each has two processes."""
    others = [measured(rng, instances=2, pairs=pairs, between=processes_differ, truth=0.0) for _ in range(trials)]
    return process_prior(others, rounds=pairs)


@pytest.mark.parametrize("between", [0.0, 0.02, 0.1], ids="processes-differ-by-{}".format)
@pytest.mark.parametrize("count", [2, 3, 6])
def test_claims_cover_whether_processes_differ_or_not(between, count):
    rng = random.Random(2)
    found = [
        claim_interval(
            measured(rng, instances=count, pairs=6, between=between), prior=prior_of(rng, processes_differ=between)
        )
        for _ in range(WORLDS // 4)
    ]
    assert share_covered(found) >= 0.93


@pytest.mark.parametrize("compilations", [1, 2])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_claims_cover_the_luck_of_compilations_that_pairs_share(compilations, count):
    rng, found = random.Random(2), []
    for _ in range(WORLDS // 4):
        luck = [rng.gauss(0.3, 0.03) for _ in range(compilations)]
        pairs = [[rng.gauss(luck[place % compilations], 0.02)] for place in range(count)]
        found.append(claim_interval(pairs, prior=ProcessPrior(deviation=0.02, degrees=4), compilations=compilations))
    assert share_covered(found) >= 0.93


def test_claims_cover_candidates_noisier_than_the_prior():
    rng = random.Random(2)
    found = []
    for _ in range(WORLDS // 4):
        restless = [[0.3 + 2 * rng.gauss(0.0, NOISE) for _ in range(6)] for _ in range(2)]
        found.append(claim_interval(restless, prior=prior_of(rng)))
    assert share_covered(found) >= 0.93


def test_the_variance_is_weighed_by_degrees_of_freedom():
    found = claim_interval([[0.1, 0.1], [0.3, 0.3]], prior=ProcessPrior(deviation=0.1, degrees=4, disturbed=0.0))
    variance = (4 * 0.01 + 1 * 0.02) / 5
    assert found.value == pytest.approx(0.2)
    assert found.half_width == pytest.approx(t_quantile(0.95, 5) * math.sqrt(variance / 2))


@pytest.mark.parametrize("deviation", [0.02, 0.1, 0.2, 0.4])
def test_repeated_looks_on_a_noisy_machine_claim_nothing_false(deviation):
    """Eleven looks at 99.5% stand for 97.5%; the prior expects a quiet machine."""
    rng, prior, worlds = random.Random(5), ProcessPrior(deviation=0.04, degrees=4), WORLDS // 4
    false = 0
    for _ in range(worlds):
        means = [[rng.gauss(0.0, deviation)] for _ in range(12)]
        false += any(
            claim_interval(means[:count], prior=prior, confidence=0.995).low > 0 for count in range(2, len(means) + 1)
        )
    assert false <= 0.05 * worlds


def test_two_pairs_of_a_disturbed_machine_still_bound_a_gain():
    prior = ProcessPrior(deviation=0.04, degrees=4)
    found = claim_interval([[math.log(5)], [math.log(26)]], prior=prior, confidence=0.975)
    assert found.low > math.log(2)
    assert found.high < math.log(60)


def test_repeated_pairs_distinguish_quiet_and_noisy_machines():
    quiet, disturbed = (process_prior([[[0.0, 0.01], [of, of]]] * 4, rounds=2) for of in (0.01, 0.5))
    unknown = process_prior([], rounds=2)
    assert quiet.disturbed < unknown.disturbed < disturbed.disturbed
    assert quiet.half_width(2, 0.995) < unknown.half_width(2, 0.995)


def test_processes_that_agree_by_chance_keep_the_prior_width():
    prior = ProcessPrior(deviation=0.02, degrees=8, least=0.05, least_degrees=6)
    found = claim_interval([[0.3], [0.3]], prior=prior)
    assert found.half_width == pytest.approx(t_quantile(0.95, 7) * 0.05 / math.sqrt(2))


def test_varying_slices_widen_intervals_of_agreeing_processes():
    noisy = [[0.0, 0.4], [0.4, 0.0]]
    found = claim_interval(noisy, prior=ProcessPrior(deviation=0.01, degrees=8, disturbed=0.0))
    assert found.half_width == pytest.approx(t_quantile(0.95, 9) * math.sqrt(0.08 / 2 / 2))


def test_templates_of_either_side_widen_an_interval():
    steady = [[0.1, 0.1]] * 8
    prior = ProcessPrior(deviation=0.01, degrees=8)
    narrow = claim_interval(steady, prior=prior)
    found, surer = (
        claim_interval(steady, prior=prior, confidence=level, different_template=True) for level in (0.95, 0.99)
    )
    luck = t_quantile(0.95, TEMPLATE_DEGREES) * TEMPLATE_DEVIATION * math.sqrt(2)
    assert math.sqrt(found.half_width**2 - narrow.half_width**2) == pytest.approx(luck)
    assert surer.half_width > found.half_width
    unknown = claim_interval([[0.1]], prior=prior, different_template=True)
    assert (unknown.value, unknown.low, unknown.high) == (0.1, -math.inf, math.inf)


def test_every_process_counts_alike():
    found = claim_interval([[0.0] * 50, [1.0]], prior=ProcessPrior(deviation=0.1, degrees=8))
    assert found.value == pytest.approx(0.5)


@given(st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=6), min_size=2, max_size=6))
def test_an_interval_holds_its_estimate(processes):
    prior = ProcessPrior(deviation=0.05, degrees=8)
    found = claim_interval(processes, prior=prior)
    inverse = claim_interval([[-value for value in values] for values in processes], prior=prior)
    assert found.low <= found.value <= found.high
    assert inverse.low == pytest.approx(-found.high)
    assert found.count == len(processes)


# ---------------------------------------------------------------------------------------------- the prior


def test_slices_tell_how_much_processes_should_vary():
    rng = random.Random(1)
    trials = [measured(rng, instances=1, pairs=200, between=0.0)]
    few, many = (process_prior(trials, rounds=rounds) for rounds in (4, 16))
    assert few.deviation == pytest.approx(math.hypot(NOISE / 2, LEAST_DEVIATION), rel=0.15)
    assert many.deviation == pytest.approx(math.hypot(NOISE / 4, LEAST_DEVIATION), rel=0.15)
    assert few.degrees < 10, "slices are no degrees of freedom for the spread between processes"
    assert few.least == 0.0


def test_other_trials_processes_add_what_slices_do_not_explain():
    rng = random.Random(1)
    alike, different = (prior_of(rng, processes_differ=differ, trials=40) for differ in (0.0, 0.2))
    assert different.least == pytest.approx(math.hypot(NOISE / math.sqrt(6), 0.2), rel=0.15)
    assert different.deviation > 2 * alike.deviation
    assert different.degrees == alike.degrees > process_prior([], rounds=6).degrees


def test_prior_without_data_assumes_the_noisiest_machine():
    found = process_prior([], rounds=4)
    assert found.deviation > NOISY_DEVIATION / 2
    assert found.degrees > 0


def test_pooled_spread_measures_trials_around_their_own_means():
    found = pooled_spread([[1.0, 3.0], [10.0, 10.0, 13.0], [5.0]])
    assert found.deviation == pytest.approx(math.sqrt((1 + 1 + 1 + 1 + 4) / (1 + 2)))
    assert found.degrees == 1 + 2


@pytest.mark.parametrize("groups", [[], [[]], [[1.0]], [[1.0], [2.0]]])
def test_without_a_pair_of_pairs_there_is_no_deviation(groups):
    assert pooled_spread(groups) == Spread(deviation=0.0, degrees=0)


@pytest.mark.parametrize("pairs", [1, 2, 3, 10])
def test_intervals_of_few_values_cover_with_pooled_spread(pairs):
    rng = random.Random(3)
    others = Spread(deviation=NOISE, degrees=50)
    found = [mean_interval([rng.gauss(0.3, NOISE) for _ in range(pairs)], pooled_spread=others) for _ in range(WORLDS)]
    assert 0.94 <= share_covered(found) <= 0.98


def test_a_trial_that_scatters_more_than_the_others_shows_it():
    rng = random.Random(4)
    own = [rng.gauss(0.0, 10 * NOISE) for _ in range(30)]
    found = mean_interval(own, pooled_spread=Spread(deviation=NOISE, degrees=1000))
    assert found.half_width >= 0.8 * mean_interval(own).half_width


def test_nothing_is_borrowed_from_trials_that_know_nothing():
    nothing = Spread(deviation=0.0, degrees=0)
    assert mean_interval([0.1, 0.3], pooled_spread=nothing) == mean_interval([0.1, 0.3])
    assert mean_interval([0.1], pooled_spread=nothing).half_width == math.inf


def test_half_width_is_half_the_distance():
    assert LogInterval(value=1.0, low=-1.0, high=3.0, count=2).half_width == 2.0


@pytest.mark.parametrize(("low", "high", "shown"), [(0.0, 7.6e15, False), (1.1, 120.0, False), (3.5, 38.0, True)])
def test_bounds_that_read_like_a_fault_are_not_shown(low, high, shown):
    text = Interval(value=11.4, low=low, high=high).shown()
    assert text == (f"×11.40 ({low:.2f} to {high:.2f})" if shown else "×11.40 (too uncertain to tell)")


@given(st.floats(0.01, 100.0), st.floats(0.0, 0.9), st.floats(1.0, 10.0))
def test_what_is_written_is_the_ratio_of_what_is_computed(value, below, above):
    written = Interval(value=value, low=below * value, high=above * value)
    if below > 0.001:
        assert written.log.ratio.model_dump() == pytest.approx(written.model_dump())
    for wide in (math.inf, 400.0):
        assert LogInterval(value=0.0, low=-wide, high=wide, count=2).ratio is None
