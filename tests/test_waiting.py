"""Waits that end with the time there is."""

import pytest
from simulated import SimulatedClock

from autotune.data.record import Outcome
from autotune.runtime.executor import TrialFailed
from autotune.tuning.run import Deadline, TimeIsUp


def deadline(*, left):
    """A deadline so many seconds away, on a clock that has run before."""
    clock = SimulatedClock()
    clock.advance(50.0)
    return Deadline(clock=clock, at=50.0 + left)


def in_vain(left, *, expected, cap, outcome=Outcome.TIMEOUT, **settings):
    """Wait for what fails in the end; returns what is made of it."""
    with (
        pytest.raises((TimeIsUp, TrialFailed)) as caught,
        deadline(left=left).time_limit(expected, cap=cap, **settings),
    ):
        raise TrialFailed(outcome, "no answer in time")
    return caught.value


def test_with_time_enough_the_wait_is_as_long_as_it_may_be():
    with deadline(left=100.0).time_limit(2.0, cap=20.0) as timeout:
        assert timeout == 20.0
    with Deadline(clock=SimulatedClock()).time_limit(2.0, cap=20.0) as timeout:
        assert timeout == 20.0


def test_no_wait_goes_beyond_the_deadline():
    with deadline(left=7.0).time_limit(2.0, cap=20.0) as timeout:
        assert timeout == 7.0


def test_what_cannot_end_is_not_begun():
    began = []
    with pytest.raises(TimeIsUp) as caught, deadline(left=1.9).time_limit(2.0, cap=20.0):
        began.append(True)
    assert began == []
    assert not caught.value.begun


def test_a_wait_that_was_cut_short_is_nobodys_fault():
    found = in_vain(2 * 2.0 - 0.1, expected=2.0, cap=20.0)
    assert isinstance(found, TimeIsUp)
    assert found.begun


@pytest.mark.parametrize("left", [2 * 2.0, 100.0])
def test_a_hang_is_the_trials_own(left):
    assert in_vain(left, expected=2.0, cap=20.0).outcome is Outcome.TIMEOUT
    assert in_vain(left, expected=2.0, cap=1.0).outcome is Outcome.TIMEOUT


def test_who_is_never_to_blame_never_is():
    assert isinstance(in_vain(19.0, expected=2.0, cap=20.0, timeout_factor=float("inf")), TimeIsUp)
    assert isinstance(in_vain(20.0, expected=2.0, cap=20.0, timeout_factor=float("inf")), TrialFailed)


def test_what_may_come_on_top_is_waited_for_twice_over():
    with deadline(left=100.0).time_limit(2.0, cap=20.0, extra_seconds=30.0) as timeout:
        assert timeout == 20.0 + 2 * 30.0
    enough = 2 * 2.0 + 30.0
    assert isinstance(in_vain(enough - 0.1, expected=2.0, cap=20.0, extra_seconds=30.0), TimeIsUp)
    assert isinstance(in_vain(enough, expected=2.0, cap=20.0, extra_seconds=30.0), TrialFailed)


def test_a_crash_is_a_crash_however_late_it_is():
    assert in_vain(2.1, expected=2.0, cap=20.0, outcome=Outcome.CRASHED).outcome is Outcome.CRASHED


def test_closing_figures_get_a_moment():
    assert deadline(left=100.0).closing(30.0) == 30.0
    assert deadline(left=10.0).closing(30.0) == 10.0
    assert deadline(left=0.0).closing(30.0) == deadline(left=-5.0).closing(30.0) == 1.0
