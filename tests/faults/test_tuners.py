"""A tuner that is killed leaves no process."""

import os
import subprocess
import sys
import textwrap

import psutil
import pytest
from fault_table import BASELINE_BATCH_SIZE, BATCH_SIZES, WORKLOAD, witness
from real_trials import REPOSITORY, is_gone, until

TUNER = """
    import sys
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
        while True:
            trial.measure(0.5, 60.0)
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
    """SIGKILL to the tuner; all below it, and the others, must end."""
    family = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
    assert len(family) >= 2
    process.kill()
    until(lambda: all(is_gone(pid) for pid in (*family, *others)), f"{family} and {others} to end")


def test_a_tuner_killed_while_a_template_imports(tuner):
    process = tuner()
    wait_for(process, "importing")
    until(lambda: len(psutil.Process(process.pid).children(recursive=True)) == 2, "supervisor and template")
    kill_and_see(process)


def test_a_tuner_killed_while_a_trial_hangs(tuner, tmp_path):
    process = tuner("hangs_with_a_family")
    entered = until(lambda: witness(tmp_path / "log.txt"), "the hang")
    kill_and_see(process, *entered["family"])
