"""A claim against what continuous runs show."""

import math
import random

import pytest

from autotune.measure.continuous import after_the_lead, continuous_ratio, contradicts
from autotune.measure.intervals import LogInterval


def interval(value, half_width):
    """A logarithm with its interval."""
    return LogInterval(value=value, low=value - half_width, high=value + half_width, count=8)


def test_the_lead_of_a_leg_does_not_count():
    """A quarter of the slices, one at least."""
    assert list(after_the_lead([9.0, 1.0, 2.0])) == [1.0, 2.0]
    assert list(after_the_lead([9.0, 9.0, *range(6)])) == list(range(6))


def test_what_a_pause_gives_the_first_slice_is_left_out():
    """Legs whose first slice is twice as fast have the ratio of the others."""
    legs = [([12.0, 3.0, 3.0], [4.0, 2.0, 2.0])] * 4
    assert continuous_ratio(legs).value == pytest.approx(math.log(1.5))


def test_the_interval_covers_the_truth():
    """Of 400 simulated soaks of eight legs, 93% or more of the intervals hold the true ratio."""
    drawn, covered = random.Random(1), 0
    for _ in range(400):
        legs = []
        for _ in range(4):
            here = drawn.gauss(0, 0.03)
            legs.append(
                tuple(
                    [speed * math.exp(here + drawn.gauss(0, 0.03) + level) for _ in range(5)]
                    for speed, level in ((150.0, drawn.gauss(0, 0.02)), (100.0, drawn.gauss(0, 0.02)))
                )
            )
        found = continuous_ratio(legs)
        covered += found.low <= math.log(1.5) <= found.high
    assert covered >= 0.93 * 400


def test_two_that_differ_by_more_than_their_errors_contradict():
    """Ten percent apart with errors of three each; not with errors of eight."""
    assert contradicts(interval(0.5, 0.03), interval(0.4, 0.03))
    assert not contradicts(interval(0.5, 0.08), interval(0.4, 0.08))
    assert not contradicts(interval(0.5, 0.03), interval(0.4, math.inf))
