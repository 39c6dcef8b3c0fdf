"""Real trials: templates that many tests share, and what tests ask of processes.

The tests' own process never imports TensorFlow, as the tuner's does not.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.space.configuration import Configuration, baseline_configuration
from autotune.space.knobs import Device
from autotune.trial.live import Data, TrialFailed, WarmUp
from autotune.trial.messages import WorkloadReference
from autotune.trial.process import TrialProcess, TrialProcesses

REPOSITORY = Path(__file__).resolve().parents[2]
WORKLOADS = Path(__file__).parent / "workloads"
PATIENCE_SECONDS = 60.0
"""How long something that must happen may take on a slow machine; none of it is asserted."""


@pytest.fixture(scope="session", autouse=True)
def _cpu_only() -> Iterator[None]:
    """The trials here train on the processor, whatever the machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "-1")
        yield


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for `condition()` to be true, and return its value; fail after a minute."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {PATIENCE_SECONDS:.0f} s for {what}")
        time.sleep(0.01)
    return value


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
        """How warming up fails."""
        with pytest.raises(TrialFailed) as caught:
            self.warm_up()
        return caught.value

    def printed(self) -> dict[str, Any]:
        """What the workload printed to the log as JSON objects, one into another."""
        said: dict[str, Any] = {}
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


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cases]:
    """The templates of `workloads/cases.py`."""
    all_cases = Cases(tmp_path_factory.mktemp("templates"))
    yield all_cases
    all_cases.close()


Launch = Callable[..., Case]


@pytest.fixture
def launch(cases: Cases, tmp_path: Path) -> Iterator[Launch]:
    """Starts a trial of a case: `launch("tuples", prefetch=2)`. What still lives afterwards is killed."""
    trials: list[TrialProcess] = []

    def start(
        case: str, batch_size: int = 16, *, workload: str = "workload", data: Data | None = None, **knobs: Any
    ) -> Case:
        folder = tmp_path / str(len(trials))
        folder.mkdir()
        log = folder / f"{case}.log"
        processes = cases.processes(workload)
        trials.append(processes.launch(configuration(batch_size, **knobs), log=str(log), data=data))
        return Case(trials[-1], log)

    yield start
    for trial in trials:
        trial.kill()


@pytest.fixture
def processes_of(tmp_path: Path) -> Iterator[Callable[[str | Path], TrialProcesses]]:
    """Trials of a workload file of its own, or of source text that is written to one."""
    opened: list[TrialProcesses] = []

    def start(source: str | Path) -> TrialProcesses:
        file = source if isinstance(source, Path) else tmp_path / "train.py"
        if isinstance(source, str):
            file.write_text(source, encoding="utf-8")
        logs = tmp_path / "logs"
        logs.mkdir()
        reference = WorkloadReference(file=str(file), search_path=(str(file.parent),))
        opened.append(TrialProcesses(reference, logs=logs))
        return opened[-1]

    yield start
    for processes in opened:
        processes.close()


@pytest.fixture
def environment() -> dict[str, str]:
    """For subprocesses: this checkout's autotune first, no terminal, no colour."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "dumb", "PYTHONWARNINGS": "default"}
