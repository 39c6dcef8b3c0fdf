"""When a training counts as warmed up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.stats.steady_state import (
    MOST_SLOW_CALLS,
    SLOW_CALL_SECONDS,
    WINDOW_SECONDS,
    enough_calls,
    enough_epochs,
    is_steady,
    recent_mean,
    smallest_window,
)

LONG = 0.1
SMALLEST_WINDOW = smallest_window(LONG)
"""Seconds of a step of which the fewest allowed fill a window."""


STEP = 1 / 1024  # exact in binary, so that sums are
IN_WINDOW = int(WINDOW_SECONDS / STEP) + 1


@pytest.mark.parametrize(
    ("times", "steady"),
    [
        pytest.param([], None, id="nothing"),
        pytest.param([LONG] * (2 * SMALLEST_WINDOW - 1), None, id="one step less than two windows"),
        pytest.param([LONG] * (2 * SMALLEST_WINDOW), True, id="two windows of the fewest steps"),
        pytest.param([STEP] * (2 * IN_WINDOW - 1), None, id="too few short steps"),
        pytest.param([STEP] * (2 * IN_WINDOW), True, id="two windows of short steps"),
        pytest.param([0.1, 0.05, 0.05] * 2, True, id="a window that is filled exactly"),
        pytest.param([2 * LONG] * 3 + [LONG] * 3, False, id="steps that still get faster"),
        pytest.param([LONG] * 3 + [2 * LONG] * 3, True, id="steps that got slower"),
        pytest.param([1.05 * LONG] * 3 + [LONG] * 3, True, id="windows within five percent"),
        pytest.param([1.06 * LONG] * 3 + [LONG] * 3, False, id="windows beyond five percent"),
        pytest.param([LONG, 40 * LONG, *[LONG] * 4], True, id="one stalled step"),
        pytest.param([50 * LONG] * 9 + [LONG] * 6, True, id="only the last two windows count"),
        pytest.param([LONG] * 9 + [2 * LONG] * 3 + [LONG] * 3, False, id="the last two windows differ"),
        pytest.param([LONG] * 3 + [4 * LONG] * 2 + [LONG] * 3, False, id="windows do not overlap"),
        pytest.param([0.0, 0.0, 0.3] * 2, True, id="times of zero"),
        pytest.param([LONG] * 3 + [0.0, 0.0, 0.3], False, id="faster by times of zero"),
        pytest.param([SLOW_CALL_SECONDS] * 3, None, id="three slow calls"),
        pytest.param([SLOW_CALL_SECONDS] * 4, True, id="two slow calls are a window"),
        pytest.param([0.9, 0.9, 0.5, 0.5], False, id="slow calls that get faster"),
        pytest.param([5.0], None, id="a call of seconds"),
        pytest.param([5.0, 5.0], True, id="a call of a second is a window"),
        pytest.param([9.0, 5.0], False, id="calls of seconds that get faster"),
    ],
)
def test_two_windows_that_agree_are_steady(times, steady):
    assert is_steady(times) is steady


@settings(max_examples=200, deadline=None)
@given(times=st.lists(st.floats(0, 1e6), max_size=40), factor=st.sampled_from([1, 2, 1024]))
def test_a_training_that_became_slower_is_steady(times, factor):
    slowest = max(factor * max(times, default=0.0), WINDOW_SECONDS / SMALLEST_WINDOW)
    assert is_steady([*times, *[slowest] * SMALLEST_WINDOW]) is not False


# ------------------------------------------------------------------------------------------ when to go on


def over(times, *, cap=1.5):
    """Whether a warm-up of these calls is over."""
    return enough_calls(times, seconds=sum(times), cap_seconds=cap)


def falling(count, ratio, seconds=0.1):
    """Calls of which each takes less than the one before."""
    return [seconds * ratio**call for call in range(count)]


def test_steady_calls_end_a_warm_up_at_once():
    assert not over([0.1] * 5, cap=60.0)
    assert over([0.1] * 6, cap=60.0)


def test_calls_that_still_fall_by_a_tenth_have_twice_the_cap():
    times = falling(100, 0.97)
    ends = next(count for count in range(100) if over(times[:count]))
    assert is_steady(times[: ends - 1], tolerance=1.1) is False
    assert 1.5 < sum(times[:ends]) <= 3.0 + times[0]


@pytest.mark.parametrize("seconds", [0.3, 5.0, 60.0])
def test_slow_calls_are_counted(seconds):
    windows = 2 * smallest_window(seconds)
    assert not over([seconds] * (windows - 1))
    assert over([seconds] * windows)
    unsteady = falling(20, 0.9, seconds=seconds * 0.9**-20)
    assert not over(unsteady[: MOST_SLOW_CALLS - 1])
    assert over(unsteady[:MOST_SLOW_CALLS])


@pytest.mark.parametrize(
    ("epoch", "cap", "enough"), [(0.1, 1.5, 6), (0.3, 1.5, 4), (0.7, 1.5, 2), (0.8, 1.5, 1), (4.0, 9.0, 1)]
)
def test_as_many_epochs_as_fit_the_cap_are_a_warm_up(epoch, cap, enough):
    ends = [enough_epochs([epoch] * count, seconds=(1 + count) * epoch, cap_seconds=cap) for count in range(1, 9)]
    assert ends.index(True) + 1 == enough


def test_long_windows_see_what_changes_slowly():
    times = [0.02] * 50 + [0.018] * 50
    assert is_steady(times)
    assert is_steady(times, window_seconds=0.9) is False
    assert is_steady(times, window_seconds=1.0) is None


def test_the_pace_of_a_warm_training_is_that_of_its_last_window():
    assert recent_mean([1.0] * 20 + [0.25] * 3) == 0.25
    assert recent_mean([0.05, 0.15]) == pytest.approx(0.1)
    assert recent_mean([]) == 0.0
