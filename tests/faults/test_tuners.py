"""A tuner that is killed leaves no process; one that stands still takes no wrong timing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from fault_table import BASELINE_BATCH_SIZE, BATCH_SIZES, WORKLOAD, witness
from real_trials import REPOSITORY, Awake, is_gone, until

from autotune.runtime.trial_process import is_stopped

pytestmark = pytest.mark.slow

KILL_SECONDS = 5.0
TUNER = """
    import json, os, signal, sys, time
    from pathlib import Path

    sys.path[:0] = sys.argv[3:]
    from conftest import DATA, REFERENCE
    from real_trials import configuration
    from autotune.runtime.local import LocalExecutor

    folder, batch_size = Path(sys.argv[1]), int(sys.argv[2])
    print("importing", flush=True)
    with LocalExecutor(REFERENCE, logs=folder) as processes:
        processes.open()
        trial = processes.launch(configuration(batch_size), log=str(folder / "log.txt"), data=DATA)
        print("launched", trial.pid, flush=True)
        trial.warm_up(60.0)
        print("frozen", flush=True)
        if "AUTOTUNE_TEST_STAND_STILL" in os.environ:
            thaw = trial.thaw

            def thaw_and_stand_still():
                trial.thaw = thaw
                thaw()
                os.kill(trial.pid, signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)

            trial.thaw = thaw_and_stand_still
        while True:
            part = trial.measure(0.5, 60.0)
            told = {"seconds": part.seconds, "standstills": part.standstills, "wall_clock": time.time()}
            print(json.dumps(told), flush=True)
"""


@pytest.fixture
def tuner(tmp_path):
    """Starts a tuner of one trial with a fault, or none, in a process of its own that says what it is at."""
    started = []
    places = [str(WORKLOAD.parent), str(REPOSITORY / "tests" / "integration")]

    def start(fault="", **variables):
        batch_size = str(BATCH_SIZES.get(fault, BASELINE_BATCH_SIZE))
        command = [sys.executable, "-c", textwrap.dedent(TUNER), str(tmp_path), batch_size, *places]
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**environ(), **variables}, cwd=REPOSITORY)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def environ():
    """This checkout first; the processor only."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "-1"}


def wait_for(process, word):
    """Read what the tuner says up to a line that begins so."""
    for line in process.stdout:
        if line.startswith(word):
            return line
    pytest.fail(f"the tuner ended without saying {word!r}")


def kill_and_see(process, *others):
    """SIGKILL to the tuner; all below it, and the others, must be gone in time."""
    family = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
    assert len(family) >= 2
    process.kill()
    with Awake() as awake:
        until(lambda: all(is_gone(pid) for pid in (*family, *others)), f"{family} and {others} to end")
    assert awake.seconds < KILL_SECONDS


def test_a_tuner_killed_while_a_template_imports(tuner):
    process = tuner()
    wait_for(process, "importing")
    until(lambda: len(psutil.Process(process.pid).children(recursive=True)) == 2, "supervisor and template")
    kill_and_see(process)


def test_a_tuner_killed_while_a_trial_hangs(tuner, tmp_path):
    process = tuner("hangs_with_a_family")
    entered = until(lambda: witness(tmp_path / "log.txt"), "the hang")
    kill_and_see(process, *entered["family"])


STANDSTILL_SECONDS = 4.0
"""Eight times a slice: what stood still for so long is told from what was slow."""
INTO_A_SLICE_SECONDS = 0.1
"""Of processor time, which a trial spends in its slices only: one of 0.5 s is not over then."""
MOST_STANDSTILLS = 5
"""One may meet the moment between two slices, where it harms none."""


def test_a_standstill_enters_no_timing(tuner):
    process = tuner()
    trial = psutil.Process(int(wait_for(process, "launched").split()[1]))
    wait_for(process, "{")
    thrown_away = 0
    for _ in range(MOST_STANDSTILLS):
        spent = trial.cpu_times().user
        until(lambda spent=spent: trial.cpu_times().user > spent + INTO_A_SLICE_SECONDS, "a slice to go on")
        for pid in (process.pid, trial.pid):
            os.kill(pid, signal.SIGSTOP)
        thrown_away += standstills_after(process, trial.pid)
        if thrown_away:
            break
    assert thrown_away >= 1  # and that is in the record


def test_a_standstill_as_a_slice_begins_enters_no_timing(tuner):
    process = tuner(AUTOTUNE_TEST_STAND_STILL="at a slice's beginning")
    trial = int(wait_for(process, "launched").split()[1])
    wait_for(process, "frozen")
    assert standstills_after(process, trial) == 1


def standstills_after(process, trial):
    """Let tuner and trial, which are being stopped, go on later; how often a slice of the next was thrown away."""
    until(lambda: is_stopped(process.pid) and is_stopped(trial), "all to stand still")
    time.sleep(STANDSTILL_SECONDS)
    for pid in (trial, process.pid):
        os.kill(pid, signal.SIGCONT)
    slices = [json.loads(wait_for(process, "{")) for _ in range(3)]
    assert max(each["seconds"] for each in slices) < STANDSTILL_SECONDS
    return sum(each["standstills"] for each in slices)


JUMPING_CLOCK = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <stdlib.h>
    #include <string.h>
    #include <time.h>
    #include <unistd.h>
    static int is_pythons(char *caller) {
        static char *known[4096];  /* callers, shifted by one where they are not Python's: dladdr takes long */
        char **slot = &known[(unsigned long)caller % 4096];
        if (*slot == caller || *slot == caller + 1) return *slot == caller;
        Dl_info who;
        int yes = dladdr(caller, &who) && (strstr(who.dli_fname, "bin/python") || strstr(who.dli_fname, "libpython"));
        *slot = yes ? caller : caller + 1;
        return yes;
    }
    int clock_gettime(clockid_t id, struct timespec *at) {
        static int (*real)(clockid_t, struct timespec *);
        if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
        int result = real(id, at);
        if (id == CLOCK_REALTIME && is_pythons(__builtin_return_address(0))) {
            const char *file = getenv("JUMP_FILE");
            if (file && !access(file, F_OK)) at->tv_sec += 3600;
        }
        return result;
    }
"""
"""Jumps for Python alone: C++ that waits for a moment of the wall clock would wait for the kernel's, which stays."""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build a clock with")
def test_a_jump_of_the_clock_enters_no_timing(tuner, tmp_path):
    source, library, jump = tmp_path / "clock.c", tmp_path / "clock.so", tmp_path / "jump"
    source.write_text(textwrap.dedent(JUMPING_CLOCK))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    process = tuner(LD_PRELOAD=str(library), JUMP_FILE=str(jump))
    trial = int(wait_for(process, "launched").split()[1])
    slices = [json.loads(wait_for(process, "{"))]
    for move in (jump.touch, jump.unlink, jump.touch):
        until(lambda: not is_stopped(trial), "a slice to begin")
        move()
        slices += [json.loads(wait_for(process, "{")) for _ in range(2)]
    clock = [each["wall_clock"] for each in slices]
    assert max(clock) - min(clock) > 3000  # it did jump
    assert all(0 < each["seconds"] < 3000 for each in slices)
