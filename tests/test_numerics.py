"""The rule that tells a curve that learns as float32 does from one that does not."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.stats.stability import FEWEST_STEPS, LEAST_TOLERANCE, check_parity

STEPS = 60


def curve(seed=0, *, start=2.3, rate=0.05, spread=0.05, steps=STEPS, noise=0.02):
    """A loss that falls; the seed moves where it ends, and each step by a little."""
    lucky = random.Random(seed)
    level = 1 + lucky.gauss(0, spread)
    return [start * level * math.exp(-rate * step) * math.exp(lucky.gauss(0, noise)) for step in range(steps)]


REFERENCE = [curve(seed) for seed in range(5)]


def test_the_reference_itself_passes():
    check = check_parity(REFERENCE, REFERENCE[0])
    assert check.passed
    assert check.conclusive
    assert check.value == 0.0


def test_a_loss_that_stalls_fails():
    check = check_parity(REFERENCE, [2.3] * STEPS)
    assert not check.passed
    assert check.value > check.limit > 0
    assert "in float32 without XLA" in check.detail


def test_a_loss_that_falls_further_passes():
    assert check_parity(REFERENCE, [loss / 2 for loss in REFERENCE[0]]).passed


def test_a_loss_that_is_lost_midway_fails():
    check = check_parity(REFERENCE, [*REFERENCE[0][:20], None, *REFERENCE[0][21:]])
    assert not check.passed
    assert check.conclusive
    assert check.detail == "no finite loss at step 21"


def test_the_limit_is_how_far_two_trainings_may_end_apart():
    ends = (1.0, 1.1, 1.2, 1.3, 1.4)
    reference = [[9.0] * 20 + [end] * 10 for end in ends]
    limit = check_parity(reference, reference[0]).limit
    assert limit == pytest.approx(2.776445 * statistics.stdev(ends) * math.sqrt(2))


def test_curve_is_compared_with_the_run_of_equal_first_weights():
    reference = [[9.0] * 20 + [end] * 10 for end in (1.0, 1.1, 1.2, 1.3, 1.4)]
    assert check_parity(reference, reference[0]).value == 0.0


def test_seeds_that_make_no_difference_leave_some_tolerance():
    same = [curve(0, noise=0.0)] * 5
    fall = same[0][0] - same[0][-1]
    assert check_parity(same, [loss + 0.02 * fall for loss in same[0]]).passed
    assert not check_parity(same, [loss + 3 * LEAST_TOLERANCE * fall for loss in same[0]]).passed


@pytest.mark.parametrize(
    ("reference", "own", "words"),
    [
        (REFERENCE, [], "0 steps were seen"),
        (REFERENCE, REFERENCE[0][:1], "1 step was seen"),
        (REFERENCE, REFERENCE[0][: FEWEST_STEPS - 1], f"{FEWEST_STEPS - 1} steps were seen"),
        ([[None] * STEPS, *REFERENCE[1:]], REFERENCE[0], "itself has a loss that is not finite"),
        ([[2.3] * STEPS] * 5, [2.3] * STEPS, "float32 falls by 0"),
        ([curve(seed, rate=0.0, spread=0.3) for seed in range(5)], [2.3] * STEPS, "float32 falls by"),
    ],
)
def test_where_too_little_was_seen_nothing_is_claimed(reference, own, words):
    check = check_parity(reference, own)
    assert check.passed
    assert not check.conclusive
    assert check.detail.startswith("cannot tell: ")
    assert words in check.detail


def test_innocent_curves_pass_in_nineteen_of_twenty():
    passed = 0
    for repeat in range(400):
        seeds = range(1000 * repeat, 1000 * repeat + 6)
        curves = [curve(seed) for seed in seeds]
        passed += check_parity(curves[:5], curves[5]).passed
    assert passed >= 0.95 * 400


@given(
    st.lists(st.lists(st.none() | st.floats(-1e6, 1e6), max_size=30), max_size=6),
    st.lists(st.none() | st.floats(-1e6, 1e6), max_size=30),
)
def test_any_curves_give_a_check(reference, own):
    check = check_parity(reference, own)
    assert check.detail
    assert check.passed or check.conclusive
