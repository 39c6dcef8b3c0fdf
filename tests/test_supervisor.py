"""Families of processes, known by a mark in their environment."""

import contextlib
import os
import subprocess
import sys

import psutil
import pytest
from real_trials import is_gone

from autotune.runtime.supervisor import kill_family


@pytest.fixture
def start():
    """Starts a shell in a session of its own, with a child whose parent has gone; its process id and the child's."""
    begun = []

    def shell(**variables):
        script = "trap '' TERM INT HUP; setsid sh -c 'sleep 1000 & echo $!'; wait; read forever"
        process = subprocess.Popen(
            ["sh", "-c", script],
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        child = int(process.stdout.readline())
        begun.append((process, psutil.Process(child)))
        return process.pid, child

    yield shell
    for process, child in begun:
        with process:
            process.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def alive(*pids):
    """Those that have not ended; zombies have."""
    return [pid for pid in pids if not is_gone(pid)]


def test_a_family_is_killed_wherever_its_members_are(start):
    mine, others = start(AUTOTUNE_FAMILY="mine"), start(AUTOTUNE_FAMILY="others")
    kill_family("mine")
    assert alive(*mine, *others) == list(others)


def test_a_name_within_another_name_is_not_it(start):
    members = [
        *start(AUTOTUNE_FAMILY="mine2"),
        *start(AUTOTUNE_FAMILY_2="mine"),
        *start(OTHER="mine:AUTOTUNE_FAMILY=mine"),
    ]
    kill_family("mine")
    assert alive(*members) == members


SUPERVISED = """
import os, signal, socket, subprocess, sys
from autotune.runtime import supervisor

ours, theirs = socket.socketpair()
supervisor.fork_supervisor(theirs.fileno())
script = "setsid sleep 1000 > /dev/null & echo $!"
print(subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout.strip(), flush=True)
{ends}
"""


@pytest.mark.parametrize(
    ("ends", "status"), [("os._exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137)], ids=["exits", "is killed"]
)
def test_supervisor_exits_like_its_child_and_kills_orphans(ends, status):
    command = [sys.executable, "-c", SUPERVISED.format(ends=ends)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        orphan = int(supervisor.stdout.readline())
        assert supervisor.wait() == status
        assert is_gone(orphan)


def test_orphans_are_killed_but_for_the_groups_of_living_trials():
    script = """
import os, subprocess
from autotune.runtime.supervisor import kill_orphans

def start(group):
    return subprocess.Popen(["sleep", "1000"], process_group=group, stdout=subprocess.DEVNULL).pid

trial = start(0)
processes = trial, start(trial), start(0)
kill_orphans({trial})
print([os.path.exists(f"/proc/{pid}") for pid in processes])
kill_orphans()
print([os.path.exists(f"/proc/{pid}") for pid in processes])
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["[True, True, False]", "[False, False, False]"]
