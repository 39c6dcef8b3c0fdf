"""Real trials of small workloads, and what tests ask of processes.

The tests' own process never imports TensorFlow, as the tuner's does not.
"""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from autotune.executors.executor import TrialFailed, WarmUp
from autotune.executors.process import TrialProcess, TrialProcesses
from autotune.executors.standstill import LOOK_SECONDS, AwakeClock
from autotune.space.configuration import Configuration, baseline_configuration
from autotune.space.knobs import Device
from autotune.workloads.workload import WorkloadReference

REPOSITORY = Path(__file__).resolve().parents[2]
WORKLOADS = Path(__file__).parent / "workloads"
PATIENCE_SECONDS = 150.0
"""How long something that must happen may take on a slow machine; none of it is asserted."""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for `condition()` to be true, and return its value; fail where that takes too long."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {PATIENCE_SECONDS:.0f} s for {what}")
        time.sleep(0.01)
    return value


class Awake:
    """Counts seconds, without those in which this machine stood still, from `with` on."""

    def __enter__(self) -> Self:
        """Begin."""
        self._clock, self._over = AwakeClock(), threading.Event()
        self._began = self._clock()
        self._looking = threading.Thread(target=self._look, daemon=True)
        self._looking.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Look no more."""
        self._over.set()
        self._looking.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self._clock.look()
        self._clock.look()

    @property
    def seconds(self) -> float:
        """So far."""
        return self._clock() - self._began


def is_gone(pid: int) -> bool:
    """Whether a process has ended: it is not there, or a zombie that its parent has yet to reap."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def configuration(batch_size: int = 16, **knobs: Any) -> Configuration:
    """A configuration on the processor: TensorFlow's defaults, and `knobs`."""
    return baseline_configuration(batch_size, knobs, Device.CPU, where="test")


class Case:
    """One trial of a case in `workloads/cases.py`, and its log."""

    def __init__(self, trial: TrialProcess, log: Path) -> None:
        self.trial = trial
        self.log = log

    def warm_up(self) -> WarmUp:
        """Until it is warm and frozen."""
        return self.trial.warm_up(PATIENCE_SECONDS)

    def measure(self, seconds: float = 0.2) -> Any:
        """A slice."""
        return self.trial.measure(seconds, PATIENCE_SECONDS)

    def failure(self) -> TrialFailed:
        """How warming up, or a slice after it, fails."""
        try:
            self.warm_up()
            self.measure(1.0)
        except TrialFailed as failure:
            return failure
        pytest.fail("the trial did not fail")

    def printed(self) -> dict[str, Any]:
        """What the workload printed to the log as JSON objects, one into another."""
        said: dict[str, Any] = {}
        if not self.log.exists():
            return said
        for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("{"):
                said |= json.loads(line)
        return said


class Cases:
    """Trials of the cases in `workloads/cases.py`.

    A trial's case is named by its log file, which the workload looks at: so the templates, one for each
    workload object, serve all tests of the session.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._processes: dict[str, TrialProcesses] = {}

    def processes(self, workload: str = "workload") -> TrialProcesses:
        """Where the trials of one workload object come from."""
        if workload not in self._processes:
            reference = WorkloadReference(
                file=str(WORKLOADS / "cases.py"), name=workload, search_path=(str(WORKLOADS),)
            )
            logs = self._logs / workload
            logs.mkdir()
            self._processes[workload] = TrialProcesses(reference, logs=logs)
            self._processes[workload].open()
        return self._processes[workload]

    def close(self) -> None:
        """End them all."""
        for processes in self._processes.values():
            processes.close()
