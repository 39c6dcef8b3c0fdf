"""When a training counts as warmed up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.measure.steady_state import SMALLEST_WINDOW, WINDOW_SECONDS, is_steady

LONG = 0.25
"""Seconds of a step of which the fewest allowed fill a window."""


def test_nothing_tells_nothing():
    """Without any times there is nothing to compare."""
    assert is_steady([]) is None


def test_two_windows_of_the_fewest_steps_are_enough_and_one_step_less_is_not():
    """Long steps need as many times as two smallest windows hold; fewer do not say that it is not steady."""
    assert is_steady([LONG] * (2 * SMALLEST_WINDOW - 1)) is None
    assert is_steady([LONG] * (2 * SMALLEST_WINDOW))


def test_short_steps_need_two_windows_of_time():
    """Three steps of a millisecond say nothing: a window lasts, too."""
    step = 1 / 1024  # exact in binary, so that sums are
    in_window = int(WINDOW_SECONDS / step) + 1
    assert not is_steady([step] * (2 * in_window - 1))
    assert is_steady([step] * (2 * in_window))


def test_a_window_that_is_filled_exactly_is_full():
    """The shortest time that a window holds is enough."""
    assert is_steady([0.1, 0.05, 0.05] * 2)


def test_steps_that_still_get_faster_are_not_steady():
    """A later window that is clearly faster means that warm-up goes on."""
    assert not is_steady([2 * LONG] * 3 + [LONG] * 3)


def test_steps_that_got_slower_are_steady():
    """Warm-up never slows steps down, so noise in that direction does not hold up the trial."""
    assert is_steady([LONG] * 3 + [2 * LONG] * 3)


@pytest.mark.parametrize(("ratio", "steady"), [(1.0, True), (1.05, True), (1.06, False)])
def test_windows_agree_within_five_percent(ratio, steady):
    """The tolerance is 0.05 as a log-ratio, a little over five percent."""
    assert is_steady([ratio * LONG] * 3 + [LONG] * 3) is steady


def test_one_stalled_step_does_not_unsettle_a_window():
    """Windows are compared by their medians."""
    assert is_steady([LONG, 40 * LONG, LONG, LONG, LONG, LONG])


def test_only_the_last_two_windows_count():
    """However slow the first steps were, and however many."""
    assert is_steady([50 * LONG] * 9 + [LONG] * 6)
    assert not is_steady([LONG] * 9 + [2 * LONG] * 3 + [LONG] * 3)


def test_the_windows_do_not_overlap():
    """The fewest slow steps before the fewest fast ones are a window of their own."""
    assert not is_steady([LONG] * 3 + [4 * LONG, 4 * LONG, LONG, LONG, LONG])


def test_times_of_zero_are_compared_too():
    """A clock too coarse to see a step leaves zeros, which are no error."""
    assert is_steady([0.0, 0.0, 0.3] * 2)
    assert not is_steady([LONG] * 3 + [0.0, 0.0, 0.3])


@settings(max_examples=200, deadline=None)
@given(times=st.lists(st.floats(0, 1e6), max_size=40), factor=st.sampled_from([1, 2, 1024]))
def test_slower_steps_at_the_end_never_make_a_training_less_steady(times, factor):
    """Any times get an answer; a last window slowed down leaves a steady training steady."""
    last = times[-SMALLEST_WINDOW:]
    if is_steady(times) and sum(last) >= WINDOW_SECONDS:
        assert is_steady(times[: -len(last)] + [factor * seconds for seconds in last])
