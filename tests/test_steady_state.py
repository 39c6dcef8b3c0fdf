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


def test_nothing_tells_nothing():
    assert is_steady([]) is None


def test_two_windows_of_the_fewest_steps_are_enough_and_one_step_less_is_not():
    assert is_steady([LONG] * (2 * SMALLEST_WINDOW - 1)) is None
    assert is_steady([LONG] * (2 * SMALLEST_WINDOW))


def test_short_steps_need_two_windows_of_time():
    step = 1 / 1024  # exact in binary, so that sums are
    in_window = int(WINDOW_SECONDS / step) + 1
    assert not is_steady([step] * (2 * in_window - 1))
    assert is_steady([step] * (2 * in_window))


def test_a_window_that_is_filled_exactly_is_full():
    assert is_steady([0.1, 0.05, 0.05] * 2)


def test_steps_that_still_get_faster_are_not_steady():
    assert not is_steady([2 * LONG] * 3 + [LONG] * 3)


def test_steps_that_got_slower_are_steady():
    assert is_steady([LONG] * 3 + [2 * LONG] * 3)


@pytest.mark.parametrize(("ratio", "steady"), [(1.0, True), (1.05, True), (1.06, False)])
def test_windows_agree_within_five_percent(ratio, steady):
    assert is_steady([ratio * LONG] * 3 + [LONG] * 3) is steady


def test_one_stalled_step_does_not_unsettle_a_window():
    assert is_steady([LONG, 40 * LONG, LONG, LONG, LONG, LONG])


def test_only_the_last_two_windows_count():
    assert is_steady([50 * LONG] * 9 + [LONG] * 6)
    assert not is_steady([LONG] * 9 + [2 * LONG] * 3 + [LONG] * 3)


def test_the_windows_do_not_overlap():
    assert not is_steady([LONG] * 3 + [4 * LONG, 4 * LONG, LONG, LONG, LONG])


def test_times_of_zero_are_compared_too():
    assert is_steady([0.0, 0.0, 0.3] * 2)
    assert not is_steady([LONG] * 3 + [0.0, 0.0, 0.3])


def test_two_slow_calls_are_a_window():
    assert is_steady([SLOW_CALL_SECONDS] * 3) is None
    assert is_steady([SLOW_CALL_SECONDS] * 4)
    assert not is_steady([0.9, 0.9, 0.5, 0.5])


def test_a_call_of_a_second_is_a_window():
    assert is_steady([5.0]) is None
    assert is_steady([5.0, 5.0])
    assert not is_steady([9.0, 5.0])


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
