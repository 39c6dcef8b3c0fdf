"""Whether a process stands still, by what the kernel says of its threads."""

import os
import signal
import subprocess
import sys

import pytest
from real_trials import until

from autotune.runtime.trial_process import is_stopped

STARTS_A_PROGRAM = """
import ctypes, signal, threading

libc = ctypes.CDLL(None)
stack = ctypes.create_string_buffer(1 << 16)
top = ctypes.c_void_p(ctypes.addressof(stack) + (1 << 16) - 64)
clone_vfork = 0x4000  # the thread waits in the kernel until its child begins a program, which this one never does
flags = clone_vfork | signal.SIGCHLD
threading.Thread(target=lambda: libc.clone(libc.pause, top, flags, None), daemon=True).start()
signal.pause()
"""


@pytest.fixture
def process():
    """One of whose two threads is starting a program, in a group of its own that is killed in the end."""
    with subprocess.Popen([sys.executable, "-c", STARTS_A_PROGRAM], start_new_session=True) as started:
        try:
            yield started.pid
        finally:
            os.killpg(started.pid, signal.SIGKILL)


def states(pid):
    """Of each thread, as a letter."""
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/stat", encoding="ascii") as file:
            found.append(file.read().rpartition(")")[2].split()[0])
    return sorted(found)


def test_process_stopped_while_spawning_counts_as_stopped(process):
    until(lambda: states(process) == ["D", "S"], "a thread to wait for its child")
    assert not is_stopped(process)
    os.killpg(process, signal.SIGSTOP)
    until(lambda: states(process) == ["D", "T"], "the other thread to stop")
    assert is_stopped(process)
    os.killpg(process, signal.SIGCONT)
    until(lambda: "S" in states(process), "it to go on")
    assert not is_stopped(process)
