"""Real trials: templates that many tests share."""

import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from real_trials import QUICK, REPOSITORY, WORKLOADS, Builder, Case, ScriptTrials, configuration

from autotune.data.facts import ScriptSettings, WorkloadReference
from autotune.runtime.local import LocalExecutor
from autotune.runtime.protocol import Data, Trainings
from autotune.runtime.trial_process import TrialProcess


@pytest.fixture(scope="session", autouse=True)
def _cpu_only() -> Iterator[None]:
    """The trials here train on the processor, whatever the machine has, in a shell that silences TensorFlow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "-1")
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")  # as users do who want no lines but their own
        yield


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalExecutor]:
    """The template of `workloads/cases.py`, which serves the whole session: a trial's log file names its case."""
    reference = WorkloadReference(file=str(WORKLOADS / "cases.py"), search_path=(str(WORKLOADS),))
    with LocalExecutor(reference, logs=tmp_path_factory.mktemp("templates")) as processes:
        processes.open()
        yield processes


@pytest.fixture
def launch(cases: LocalExecutor, tmp_path: Path) -> Iterator[Callable[..., Case]]:
    """Starts a trial of a case: `launch("endless", prefetch=2)`. What still lives afterwards is killed."""
    trials: list[TrialProcess] = []

    def start(
        case: str,
        batch_size: int = 16,
        *,
        data: Data | None = None,
        losses: Trainings | None = None,
        save_state: str = "",
        **knobs: Any,
    ) -> Case:
        folder = tmp_path / str(len(trials))
        folder.mkdir()
        log = folder / f"{case}.log"
        wanted = configuration(batch_size, **knobs)
        state = str(folder / save_state) if save_state else ""  # a trial can write beside its log
        trials.append(
            cases.launch(wanted, log=str(log), data=data, timing=replace(QUICK, save_state=state), losses=losses)
        )
        return Case(trials[-1], log)

    yield start
    for trial in trials:
        trial.kill()


@pytest.fixture(scope="session")
def _builder(environment: dict[str, str]) -> Iterator[Builder]:
    with Builder(environment) as builder:
        yield builder


@pytest.fixture
def build(_builder: Builder, tmp_path: Path) -> Callable[..., Any]:
    """Builds a case and takes its first step, in a process that all tests share: `build("tuples").started`."""
    return functools.partial(_builder.build, tmp_path)


@pytest.fixture
def processes_of(tmp_path: Path) -> Iterator[Callable[..., LocalExecutor]]:
    """Trials of a workload file of its own, or of source text that is written to one, with arguments."""
    opened: list[LocalExecutor] = []

    def start(source: str | Path, args: tuple[str, ...] = ()) -> LocalExecutor:
        file = source if isinstance(source, Path) else tmp_path / "train.py"
        if isinstance(source, str):
            file.write_text(source, encoding="utf-8")
        logs = tmp_path / "logs"
        logs.mkdir()
        reference = WorkloadReference(file=str(file), search_path=(str(file.parent),), args=args)
        opened.append(LocalExecutor(reference, logs=logs))
        return opened[-1]

    yield start
    for processes in opened:
        processes.close()


@pytest.fixture
def trials_of_script(tmp_path: Path) -> Iterator[Callable[..., ScriptTrials]]:
    """Trials of a script with this source, once its survey has ended."""
    opened: list[ScriptTrials] = []

    def start(source: str, settings: dict[str, Any] | None = None, **options: Any) -> ScriptTrials:
        (tmp_path / "train.py").write_text(source, encoding="utf-8")
        script = ScriptSettings(scratch=str(tmp_path / "scratch"), **(settings or {}))
        reference = WorkloadReference(file=str(tmp_path / "train.py"), search_path=(str(tmp_path),), script=script)
        opened.append(ScriptTrials(LocalExecutor(reference, logs=tmp_path, **options), tmp_path / "trial.log"))
        opened[-1].facts = opened[-1].processes.open()
        return opened[-1]

    yield start
    for trials in opened:
        trials.processes.close()


@pytest.fixture
def run_code(environment: dict[str, str], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python code that must end well, in a process of its own and in the test's directory."""

    def start(source: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", textwrap.dedent(source)]
        env = {**environment, **variables}
        ended = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return ended

    return start


@pytest.fixture(scope="session")
def environment(_cpu_only: None) -> dict[str, str]:
    """For subprocesses: this checkout's autotune first, output buffered as usual."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**inherited, "PYTHONPATH": str(REPOSITORY)}
