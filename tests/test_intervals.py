"""Estimates and confidence intervals."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.stats.intervals import (
    Interval,
    LogInterval,
    Spread,
    instance_interval,
    mean_interval,
    pooled_spread,
    t_quantile,
)

NOISE = 0.1
"""Standard deviation of one log-ratio, as on a shared machine."""
WORLDS = 2000


def share_covered(intervals, truth=0.3):
    """How many of the intervals hold the truth, as a share."""
    covered = [each.low <= truth <= each.high for each in intervals]
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
    """The two-sided quantiles that tables of the t distribution give."""
    assert t_quantile(confidence, degrees) == pytest.approx(expected, abs=0.001)


def test_the_mean_interval_is_students():
    """Mean plus or minus the quantile times the standard error."""
    found = mean_interval([0.1, 0.2, 0.3])
    assert found.value == pytest.approx(0.2)
    assert found.half_width == pytest.approx(4.303 * 0.1 / math.sqrt(3), abs=1e-4)
    assert found.high - found.value == pytest.approx(found.value - found.low)
    assert found.count == 3


def test_one_value_bounds_nothing():
    """From a single pair, or a single instance, there is an estimate but no interval."""
    for found in (mean_interval([0.5]), instance_interval([[0.4, 0.6]])):
        assert (found.value, found.low, found.high) == (0.5, -math.inf, math.inf)


def test_more_confidence_is_wider():
    """The interval of 99% holds the one of 95%."""
    values = [0.1, 0.25, 0.2, 0.4]
    assert mean_interval(values, confidence=0.99).half_width > mean_interval(values).half_width
    groups = [values, values[::-1], [0.3, 0.5]]
    assert instance_interval(groups, confidence=0.99).half_width > instance_interval(groups).half_width


def test_the_mean_interval_covers_as_it_says():
    """Of many small samples, about 95% of the intervals hold the truth."""
    rng = random.Random(1)
    intervals = [mean_interval([rng.gauss(0.3, NOISE) for _ in range(6)]) for _ in range(WORLDS)]
    assert 0.94 <= share_covered(intervals) <= 0.96


@pytest.mark.parametrize("between", [0.0, 0.02, 0.1], ids=lambda each: f"instances-differ-by-{each}")
@pytest.mark.parametrize("pairs", [3, 8])
def test_four_instances_cover_at_least_as_they_say(between, pairs):
    """Whether processes differ or not, at least 93% of the intervals over four instances hold the truth."""
    rng = random.Random(2)
    intervals = [instance_interval(measured(rng, instances=4, pairs=pairs, between=between)) for _ in range(WORLDS)]
    assert share_covered(intervals) >= 0.93


def test_slices_of_few_processes_do_not_make_up_for_more_processes():
    """Two processes that differ by 0.2 leave a wide interval, however many slices each of them gave."""
    few = instance_interval([[0.2, 0.2001] * 500, [0.4, 0.4001] * 500])
    many = instance_interval([[0.2, 0.2001], [0.4, 0.4001]] * 4)
    assert few.half_width == pytest.approx(12.706 * 0.1, rel=1e-3)
    assert many.half_width < few.half_width / 10


def test_where_instances_differ_their_spread_is_the_error():
    """Means of 0.1, 0.2 and 0.3 from sharp slices: Student's interval of the three means, nothing else."""
    found = instance_interval([[0.0999, 0.1001], [0.1999, 0.2001], [0.2999, 0.3001]])
    assert found.value == pytest.approx(0.2)
    assert found.half_width == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3)


def test_where_instances_agree_the_slices_are_the_error():
    """Equal means from slices with a variance of 0.02: the interval is that of the slices, and the usual deviation."""
    instances = [[-0.1, 0.1], [0.1, -0.1], [-0.1, 0.1], [0.1, -0.1]]
    found = instance_interval(instances).half_width / t_quantile(0.95, 4)
    assert found == pytest.approx(math.sqrt(4 * 0.02 / 2 / 16 + 0.01**2 / 4))


def test_single_slices_that_agree_by_chance_do_not_narrow_the_interval_to_nothing():
    """Where each instance has one pair there is no spread within: the usual deviation is allowed for all the same."""
    found = instance_interval([[0.03], [0.0301]])
    assert found.half_width > 0.06
    assert instance_interval([[0.1]] * 3).low < 0.1


def test_an_instance_of_one_pair_has_the_spread_of_the_others():
    """Its own is not known, and it is the noisiest of all: it counts as one slice of those, not as an exact value."""
    noisy = [-0.2, 0.2, -0.2, 0.2, 0.0]
    found = instance_interval([noisy, noisy, noisy, [0.0]])
    within = statistics.variance(noisy) * (3 / 5 + 1) / 4**2
    error = math.sqrt(within + 0.01**2 / 4)
    assert found.half_width == pytest.approx(t_quantile(0.95, 12) * error)


def test_templates_of_either_side_widen_an_interval():
    """By what their luck may be, in quadrature; with more confidence by more, and nothing is known of one process."""
    steady = [[0.1, 0.1]] * 8
    narrow = instance_interval(steady)
    found, surer = (instance_interval(steady, confidence=each, apart=True) for each in (0.95, 0.99))
    assert 0.03 < math.sqrt(found.half_width**2 - narrow.half_width**2) < 0.1
    assert surer.half_width > found.half_width
    assert found.value == narrow.value
    unknown = instance_interval([[0.1]], apart=True)
    assert (unknown.value, unknown.low, unknown.high) == (0.1, -math.inf, math.inf)


def test_instances_that_agree_by_chance_do_not_narrow_the_interval_to_nothing():
    """Equal means of noisy instances are luck: what the slices say keeps the interval open."""
    found = instance_interval([[0.0, 0.2], [-0.1, 0.3], [0.3, -0.1]])
    assert found.value == pytest.approx(0.1)
    assert found.half_width > 0.1


def test_every_instance_counts_alike():
    """An instance with many pairs weighs no more than one with few."""
    assert instance_interval([[0.0] * 50, [1.0]]).value == pytest.approx(0.5)


@given(st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=6), min_size=2, max_size=6))
def test_an_interval_holds_its_estimate(instances):
    """Whatever was measured: `low <= value <= high`, and the mirror image for the inverse ratios."""
    found = instance_interval(instances)
    inverse = instance_interval([[-value for value in each] for each in instances])
    assert found.low <= found.value <= found.high
    assert inverse.low == pytest.approx(-found.high)
    assert found.count == len(instances)


def test_the_pooled_deviation_is_that_of_all_trials_about_their_own_means():
    """Squared distances from each trial's mean, over the degrees of freedom that are left."""
    found = pooled_spread([[1.0, 3.0], [10.0, 10.0, 13.0], [5.0]])
    assert found.deviation == pytest.approx(math.sqrt((1 + 1 + 1 + 1 + 4) / (1 + 2)))
    assert found.degrees == 1 + 2


@pytest.mark.parametrize("groups", [[], [[]], [[1.0]], [[1.0], [2.0]]])
def test_without_a_pair_of_pairs_there_is_no_deviation(groups):
    """Single values do not scatter."""
    assert pooled_spread(groups) == Spread(deviation=0.0, degrees=0)


@pytest.mark.parametrize("pairs", [1, 2, 3, 10])
def test_with_the_spread_of_other_trials_few_values_cover_as_they_say(pairs):
    """Borrowed from trials that scatter alike, the spread makes intervals that hold the truth as often as they say."""
    rng = random.Random(3)
    others = Spread(deviation=NOISE, degrees=50)
    found = [mean_interval([rng.gauss(0.3, NOISE) for _ in range(pairs)], others=others) for _ in range(WORLDS)]
    assert 0.94 <= share_covered(found) <= 0.98


def test_a_trial_that_scatters_more_than_the_others_shows_it():
    """What is borrowed counts as a few values: thirty of its own make up for it."""
    rng = random.Random(4)
    own = [rng.gauss(0.0, 10 * NOISE) for _ in range(30)]
    found = mean_interval(own, others=Spread(deviation=NOISE, degrees=1000))
    assert found.half_width >= 0.8 * mean_interval(own).half_width


def test_nothing_is_borrowed_from_trials_that_know_nothing():
    """With no degrees of freedom among the others, the interval is the trial's own."""
    nothing = Spread(deviation=0.0, degrees=0)
    assert mean_interval([0.1, 0.3], others=nothing) == mean_interval([0.1, 0.3])
    assert mean_interval([0.1], others=nothing).half_width == math.inf


def test_half_width_is_half_the_distance():
    """From -1 to 3 it is 2."""
    assert LogInterval(value=1.0, low=-1.0, high=3.0, count=2).half_width == 2.0


@given(st.floats(0.01, 100.0), st.floats(0.0, 0.9), st.floats(1.0, 10.0))
def test_what_is_written_is_the_ratio_of_what_is_computed(value, below, above):
    """Both ways; what is unbounded, or too wide for numbers, is not written."""
    written = Interval(value=value, low=below * value, high=above * value)
    if below > 0.001:
        assert written.log.ratio.model_dump() == pytest.approx(written.model_dump())
    for wide in (math.inf, 400.0):
        assert LogInterval(value=0.0, low=-wide, high=wide, count=2).ratio is None


@pytest.mark.parametrize(("instances", "pairs", "between"), [(2, 12, 0.1), (3, 6, 0.06)])
def test_few_instances_cover_as_they_say(instances, pairs, between):
    """Two or three instances that differ: at least 93% of the intervals hold the truth."""
    rng = random.Random(2)
    found = [instance_interval(measured(rng, instances=instances, pairs=pairs, between=between)) for _ in range(WORLDS)]
    assert share_covered(found) >= 0.93
