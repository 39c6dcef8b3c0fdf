"""Real trials of small workloads, and what tests ask of processes.

The tests' own process never imports TensorFlow, as the tuner's does not.
"""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from autotune.data.facts import WorkloadFacts
from autotune.runtime import protocol
from autotune.runtime.executor import SEARCH_TIMING, TrialFailed, WarmUp
from autotune.runtime.local import LocalExecutor
from autotune.runtime.protocol import Data, Trainings
from autotune.runtime.trial_process import TrialProcess
from autotune.space.configuration import Configuration, baseline_configuration
from autotune.space.knobs import Device
from autotune.tuning.events import silent
from autotune.tuning.run_setup import baseline_of

REPOSITORY = Path(__file__).resolve().parents[2]
WORKLOADS = Path(__file__).parent / "workloads"
QUICK = dataclasses.replace(SEARCH_TIMING, warmup_seconds=0.3)
"""Of trials whose speed nobody asks for: they hardly warm up."""
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


def is_gone(pid: int) -> bool:
    """Whether a process has ended: it is not there, or a zombie that its parent has yet to reap."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def configuration(batch_size: int = 16, **knobs: Any) -> Configuration:
    """A configuration on the processor: TensorFlow's defaults, and `knobs`."""
    return baseline_configuration(batch_size, knobs, Device.CPU, where="test")


def json_in(text: str) -> dict[str, Any]:
    """The lines of a text that are JSON objects, one merged into another."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def autotune(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What the command gave in a directory."""
    command, environment = [sys.executable, "-m", "autotune", *arguments], {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


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
        return json_in(self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else "")


def survey_all(folder: Path, sources: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """What surveying the `train.py` in each directory of a folder gave, by name; those with sources are made first."""
    for name, source in (sources or {}).items():
        (folder / name).mkdir(parents=True)
        (folder / name / "train.py").write_text(textwrap.dedent(source), encoding="utf-8")
    answers = folder.parent / "answers.jsonl"
    command = [sys.executable, str(Path(__file__).with_name("surveys.py")), str(folder), str(answers)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    found = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    assert len(found) == len(list(folder.iterdir())), ended.stderr[-4000:]
    return {answer["name"]: answer for answer in found}


def facts_of(folder: Path, sources: Mapping[str, str]) -> dict[str, WorkloadFacts]:
    """What is known of scripts that can all be tuned."""
    found = survey_all(folder, sources)
    assert {name: answer for name, answer in found.items() if "facts" not in answer} == {}
    return {name: WorkloadFacts.model_validate(answer["facts"]) for name, answer in found.items()}


class ScriptTrials:
    """Trials of a script, and the facts that its survey found."""

    facts: WorkloadFacts

    def __init__(self, processes: LocalExecutor, log: Path) -> None:
        self.processes = processes
        self._log = str(log)

    def launch(self, *, losses: Trainings | None = None, save_state: str = "", **changes: Any) -> TrialProcess:
        """A trial of the script as it is, with some changes."""
        baseline = baseline_of(self.facts, "train.py", Device.CPU, silent)
        timing = dataclasses.replace(QUICK, save_state=save_state)
        return self.processes.launch(
            baseline.replace(**changes), log=self._log, data=None, timing=timing, losses=losses
        )


class Built:
    """What building a case, and its first step, gave: the messages of a trial, None where they did not come."""

    def __init__(self, told: dict[str, Any], printed: str) -> None:
        self.started = _message(protocol.Started, told.get("started"))
        self.first_step = _message(protocol.FirstStep, told.get("first_step"))
        self.failed = _message(protocol.Failed, told.get("failed"))
        self.printed = json_in(printed)


def _message(kind: type[Any], told: dict[str, Any] | None) -> Any:
    return None if told is None else kind.model_validate(told)


class Builder:
    """A process that builds case after case: see `workloads/build.py`."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(WORKLOADS / "build.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._count = 0

    def __enter__(self) -> Self:
        """The process runs."""
        return self

    def __exit__(self, *error: object) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def build(self, folder: Path, case: str, batch_size: int = 16, *, data: Data | None = None, **knobs: Any) -> Built:
        """Build a case, told what an earlier trial learned of its data, if any."""
        self._count += 1
        log = folder / str(self._count) / f"{case}.log"
        log.parent.mkdir()
        request = protocol.TrialRequest(
            configuration=dict(configuration(batch_size, **knobs)),
            log=str(log),
            data=data,
            count_seconds=1.0,
            timing=QUICK,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(request.model_dump_json() + "\n")
        self._process.stdin.flush()
        return Built(*json.loads(self._process.stdout.readline()))
