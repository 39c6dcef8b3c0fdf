"""Between its slices a trial is frozen whole: no thread runs, no processor time passes, no buffer fills."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from real_trials import until

from autotune.runtime.trial_process import is_stopped


def processor_time(pid):
    """Clock ticks that all threads of a process have used so far."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return int(fields[11]) + int(fields[12])


def elements(trial):
    """How many elements the slow generator has yielded."""
    return (trial.log.parent / "elements").stat().st_size


@pytest.mark.fast
def test_a_frozen_trial_stands_still_while_another_is_measured(launch):
    frozen, other = launch("endless", prefetch=4), launch("endless")
    frozen.warm_up()
    other.warm_up()
    assert len(os.listdir(f"/proc/{frozen.trial.pid}/task")) > 4
    assert is_stopped(frozen.trial.pid)
    before = processor_time(frozen.trial.pid)
    turn = processor_time(other.trial.pid)
    other.measure(0.5)
    assert is_stopped(frozen.trial.pid)
    assert processor_time(frozen.trial.pid) == before
    assert processor_time(other.trial.pid) > turn
    assert frozen.measure().steps > 0
    assert is_stopped(frozen.trial.pid)


# The pipelines and how many elements each may have in flight; all are slower than the training they feed.
SLOW_PIPELINES = [("slow_generator", 1, {}), ("waits", 16, {"num_parallel_calls": 16, "data_threads": 16})]


@pytest.mark.parametrize(("case", "in_flight", "knobs"), SLOW_PIPELINES)
def test_no_buffer_fills_while_a_trial_is_frozen(launch, case, in_flight, knobs):
    """While another trains, the pipeline begins no element; a slice trains on what was produced in it.

    Let go on without a command, the trial waits inside its callback, and the buffer fills: this is what a trial
    that is only blocked does between slices. The next slice then trains on what nobody timed.
    """
    frozen, other = launch(case, 1, prefetch=512, **knobs), launch("endless")
    frozen.warm_up()
    other.warm_up()
    surplus = []
    for _ in range(3):  # a slice's own end may be late, and leave some behind: a buffer fills in every pause
        frozen.measure(0.5)
        before = elements(frozen)
        other.measure(0.5)
        assert elements(frozen) == before
        surplus.append(frozen.measure(1.0).examples - (elements(frozen) - before))
        if surplus[-1] <= 2 * in_flight + 1:
            break
    assert min(surplus) <= 2 * in_flight + 1, surplus

    before = elements(frozen)
    frozen.trial.thaw()
    other.measure(0.5)
    until(lambda: elements(frozen) > before + 60, "the buffer to fill once the trial goes on")


def test_children_of_the_trial_are_frozen_with_it(launch):
    trial = launch("with_child")
    trial.warm_up()
    (child,) = psutil.Process(trial.trial.pid).children()
    until(lambda: child.status() == psutil.STATUS_STOPPED, "the child to be stopped")
    assert os.getpgid(child.pid) == trial.trial.pid


def test_a_stop_from_outside_is_told_from_a_hang(launch):
    trial = launch("endless")
    trial.warm_up()
    os.kill(trial.trial.pid, signal.SIGCONT)  # it waits for a command now, running
    until(lambda: not is_stopped(trial.trial.pid), "the trial to run")
    trial.measure()
    assert is_stopped(trial.trial.pid)


def test_a_continuous_run_is_not_frozen_between_its_slices(launch):
    case = launch("endless")
    case.warm_up()
    slices = case.trial.measure_continuously(0.2, 3, 60.0)
    assert is_stopped(case.trial.pid)
    assert len(slices) == 3
    assert all(slice_.host_bytes > 50 << 20 for slice_ in slices)
    assert slices[2].steps > 0


def test_what_others_take_during_a_slice_is_told(launch):
    trial = launch("endless")
    trial.warm_up()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        before, began = processor_time(spinning.pid), time.monotonic()
        part = trial.measure(1.0)
        taken = (processor_time(spinning.pid) - before) / os.sysconf("SC_CLK_TCK")
        elapsed = time.monotonic() - began  # of two slices where the machine stood still in the first
        spinning.kill()
    if part.foreign_cpu_seconds is None:
        pytest.skip("this machine does not tell how busy it is")
    assert part.cores == len(os.sched_getaffinity(0))
    assert taken > 0
    assert part.foreign_cpu_seconds / part.seconds > 0.5 * taken / elapsed
