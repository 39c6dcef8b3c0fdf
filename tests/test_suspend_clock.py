"""A standstill is told from a wait: by the time that passed between two looks."""

from types import SimpleNamespace

import pytest

from autotune.runtime import trial_process
from autotune.runtime.trial_process import AwakeClock


@pytest.fixture
def passes(monkeypatch):
    """Lets time pass: seconds without, and with, what the machine slept."""
    now = [100.0, 500.0]

    def let_pass(ran, passed):
        now[:] = [now[0] + ran, now[1] + passed]

    clock = SimpleNamespace(monotonic=lambda: now[0], clock_gettime=lambda _: now[1], CLOCK_BOOTTIME=7)
    monkeypatch.setattr(trial_process, "time", clock)
    return let_pass


def test_looks_in_time_find_nothing(passes):
    clock = AwakeClock()
    began = clock()
    for _ in range(5):
        passes(0.3, 0.3)
        clock.look()
    assert clock.standstills == 0
    assert clock() - began == pytest.approx(1.5)


def test_a_stop_is_found_and_left_out(passes):
    clock = AwakeClock()
    began = clock()
    for seconds in (0.1, 7.0, 0.1):
        passes(seconds, seconds)
        clock.look()
    assert clock.standstills == 1
    assert clock() - began == pytest.approx(0.2)


def test_a_sleep_of_the_machine_is_found(passes):
    clock = AwakeClock()
    began = clock()
    passes(0.1, 3600.1)
    clock.look()
    assert clock.standstills == 1
    assert clock() - began == pytest.approx(0.0)


def test_a_time_without_looks_is_no_standstill(passes):
    clock = AwakeClock()
    began = clock()
    passes(60.0, 60.0)
    clock.watch()
    clock.look()
    assert clock.standstills == 0
    assert clock() - began == pytest.approx(60.0)
