"""A standstill is told from a wait: by the time that passed between two looks."""

import pytest

from autotune.executors import standstill
from autotune.executors.standstill import LOOK_SECONDS, STILL_SECONDS, Standstill


@pytest.fixture
def clocks(monkeypatch):
    """Seconds without and with what the machine slept, to be moved by hand."""
    now = [100.0, 500.0]
    monkeypatch.setattr(standstill, "_clocks", lambda: tuple(now))
    return now


def test_looks_in_time_find_nothing(clocks):
    """A wait and a little more is what a busy machine does."""
    looking = Standstill()
    for _ in range(5):
        clocks[:] = [each + LOOK_SECONDS + STILL_SECONDS / 2 for each in clocks]
        assert looking.look() == 0.0
    assert not looking.found


def test_a_stop_is_found_and_its_length_told(clocks):
    """Both clocks went on; later looks in time do not make it unseen."""
    looking = Standstill()
    clocks[:] = [each + 7.0 for each in clocks]
    assert looking.look() == 7.0
    assert looking.look() == 0.0
    assert looking.found


def test_a_sleep_of_the_machine_is_found(clocks):
    """CLOCK_MONOTONIC left it out, so there is nothing to take off deadlines but the moment around it."""
    looking = Standstill()
    clocks[:] = [clocks[0] + 0.1, clocks[1] + 3600.1]
    assert looking.look() == pytest.approx(0.1)
    assert looking.found
