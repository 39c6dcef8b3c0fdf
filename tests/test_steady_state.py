"""When a training counts as warmed up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.stats.steady_state import (
    SMALLEST_WINDOW,
    WINDOW_SECONDS,
    enough_calls,
    enough_epochs,
    is_steady,
    recent_mean,
)

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


# ------------------------------------------------------------------------------------------ when to go on


def over(times, *, cap=1.5, steps_per_call=1):
    """Whether a warm-up of these calls is over."""
    return enough_calls(times, steps_per_call=steps_per_call, seconds=sum(times), cap_seconds=cap)


def falling(count, ratio, seconds=0.1):
    """Calls of which each takes less than the one before."""
    return [seconds * ratio**call for call in range(count)]


def test_steady_calls_end_a_warm_up_at_once():
    """Two windows are enough, however much of the cap is left."""
    assert not over([0.1] * 5, cap=60.0)
    assert over([0.1] * 6, cap=60.0)


def test_a_warm_up_has_twenty_steps_even_beyond_its_cap():
    """Steps of a quarter of a second that get faster by a little: the cap of 1.5 s holds six."""
    times = falling(40, 0.975, seconds=0.25)
    assert is_steady(times[:20]) is False
    assert not over(times[:19])
    assert over(times[:20])
    assert over(times[:7], steps_per_call=3), "of three steps a call, seven calls"


def test_calls_that_still_fall_by_a_tenth_have_twice_the_cap():
    """Nothing is measured that changes so fast, unless it never ends."""
    times = falling(100, 0.97)
    assert is_steady(times[:21], tolerance=1.1) is False
    assert sum(times[:21]) > 1.5
    assert not over(times[:21])
    assert not over(falling(60, 0.97, seconds=0.2)[:39])
    assert over(falling(60, 0.97, seconds=0.2)[:40])


def test_too_few_calls_to_compare_end_a_warm_up_at_its_cap():
    """Calls of a second with twenty steps each: three are the fewest, and say nothing yet."""
    assert not over([1.0, 1.0], steps_per_call=20)
    assert over([1.0, 0.5, 0.25], steps_per_call=20)


@pytest.mark.parametrize(
    ("epoch", "cap", "enough"), [(0.1, 1.5, 6), (0.3, 1.5, 4), (0.7, 1.5, 2), (0.8, 1.5, 1), (4.0, 9.0, 1)]
)
def test_as_many_epochs_as_fit_the_cap_are_a_warm_up(epoch, cap, enough):
    """Two at least where two fit, one otherwise and of long epochs; six that are steady are always enough."""
    ends = [enough_epochs([epoch] * count, seconds=(1 + count) * epoch, cap_seconds=cap) for count in range(1, 9)]
    assert ends.index(True) + 1 == enough


def test_long_windows_see_what_changes_slowly():
    """Times that fall by a tenth a second are alike within short windows, and not between long ones."""
    times = [0.02] * 50 + [0.018] * 50
    assert is_steady(times)
    assert is_steady(times, window_seconds=0.9) is False
    assert is_steady(times, window_seconds=1.0) is None


def test_the_pace_of_a_warm_training_is_that_of_its_last_window():
    """Slow steps before it do not count, unless there are no others."""
    assert recent_mean([1.0] * 20 + [0.25] * 3) == 0.25
    assert recent_mean([0.05, 0.15]) == pytest.approx(0.1)
    assert recent_mean([]) == 0.0
