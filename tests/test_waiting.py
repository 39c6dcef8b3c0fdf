"""Waits that end with the time there is."""

import pytest
from simulated import SimulatedClock

from autotune.data.record import Outcome
from autotune.runtime.executor import TrialFailed
from autotune.tuning.waiting import Deadline, TimeIsUp


def deadline(*, left):
    """A deadline so many seconds away, on a clock that has run before."""
    clock = SimulatedClock()
    clock.advance(50.0)
    return Deadline(clock=clock, at=50.0 + left)


def in_vain(left, *, usual, at_most, outcome=Outcome.TIMEOUT, **settings):
    """Wait for what fails in the end; returns what is made of it."""
    with pytest.raises((TimeIsUp, TrialFailed)) as caught, deadline(left=left).wait(usual, at_most=at_most, **settings):
        raise TrialFailed(outcome, "no answer in time")
    return caught.value


def test_with_time_enough_the_wait_is_as_long_as_it_may_be():
    """The deadline plays no part while it is far away."""
    with deadline(left=100.0).wait(2.0, at_most=20.0) as timeout:
        assert timeout == 20.0
    with Deadline(clock=SimulatedClock()).wait(2.0, at_most=20.0) as timeout:
        assert timeout == 20.0


def test_no_wait_goes_beyond_the_deadline():
    """Near it, what is left is what there is."""
    with deadline(left=7.0).wait(2.0, at_most=20.0) as timeout:
        assert timeout == 7.0


def test_what_cannot_end_is_not_begun():
    """With less time than it usually takes, nothing is started."""
    began = []
    with pytest.raises(TimeIsUp) as caught, deadline(left=1.9).wait(2.0, at_most=20.0):
        began.append(True)
    assert began == []
    assert not caught.value.begun


def test_a_wait_that_was_cut_short_is_nobodys_fault():
    """Less than twice the usual time proves nothing: the time was up, and the process that was begun is gone."""
    found = in_vain(2 * 2.0 - 0.1, usual=2.0, at_most=20.0)
    assert isinstance(found, TimeIsUp)
    assert found.begun


@pytest.mark.parametrize("left", [2 * 2.0, 100.0])
def test_a_hang_is_the_trials_own(left):
    """Twice the usual time without an answer, or all that was allowed: it failed."""
    assert in_vain(left, usual=2.0, at_most=20.0).outcome is Outcome.TIMEOUT
    assert in_vain(left, usual=2.0, at_most=1.0).outcome is Outcome.TIMEOUT


def test_who_is_never_to_blame_never_is():
    """The baseline has run before: a wait for it that the deadline cut says nothing about it."""
    assert isinstance(in_vain(19.0, usual=2.0, at_most=20.0, generous=float("inf")), TimeIsUp)
    assert isinstance(in_vain(20.0, usual=2.0, at_most=20.0, generous=float("inf")), TrialFailed)


def test_what_may_come_on_top_is_waited_for_twice_over():
    """A wait that was cut short is no fault until it had all of that once, and twice the usual time."""
    with deadline(left=100.0).wait(2.0, at_most=20.0, beyond=30.0) as timeout:
        assert timeout == 20.0 + 2 * 30.0
    enough = 2 * 2.0 + 30.0
    assert isinstance(in_vain(enough - 0.1, usual=2.0, at_most=20.0, beyond=30.0), TimeIsUp)
    assert isinstance(in_vain(enough, usual=2.0, at_most=20.0, beyond=30.0), TrialFailed)


def test_a_crash_is_a_crash_however_late_it_is():
    """Only timeouts can be a matter of time."""
    assert in_vain(2.1, usual=2.0, at_most=20.0, outcome=Outcome.CRASHED).outcome is Outcome.CRASHED


def test_closing_figures_get_a_moment():
    """What time there is, at most what they may take, and a second where there is none left."""
    assert deadline(left=100.0).closing(30.0) == 30.0
    assert deadline(left=10.0).closing(30.0) == 10.0
    assert deadline(left=0.0).closing(30.0) == deadline(left=-5.0).closing(30.0) == 1.0
