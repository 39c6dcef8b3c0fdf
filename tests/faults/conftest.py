"""Trials that go wrong: one template that many tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_table import BASELINE_BATCH_SIZE, BATCH_SIZES, BY_NAME, WORKLOAD, memory_cgroup
from real_trials import QUICK, Case, configuration

from autotune.data.facts import WorkloadReference
from autotune.runtime.local import LocalExecutor
from autotune.runtime.protocol import Data
from autotune.runtime.trial_process import TrialProcess

DATA = Data(examples=128, endless=False)
REFERENCE = WorkloadReference(file=str(WORKLOAD), search_path=(str(WORKLOAD.parent),))


@pytest.fixture(scope="session")
def cgroup() -> Iterator[Path | None]:
    """Where trials go whose memory is limited; None where that takes rights that are not there."""
    with memory_cgroup() as group:
        yield group


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory, cgroup: Path | None) -> Iterator[LocalExecutor]:
    """Where the trials of `faulty.py` come from; they train on the processor, whatever the machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "-1")
        with LocalExecutor(REFERENCE, logs=tmp_path_factory.mktemp("templates")) as trials:
            trials.open()
            yield trials


@pytest.fixture
def launch(processes: LocalExecutor, tmp_path: Path) -> Iterator[Callable[..., Case]]:
    """Starts a trial with a fault, or none: `launch("segfaults")`. What still lives afterwards is killed."""
    trials: list[TrialProcess] = []

    def start(fault: str = "") -> Case:
        folder = tmp_path / f"{len(trials):04d}"
        folder.mkdir()
        log = folder / "log.txt"
        compiled = fault in BY_NAME and BY_NAME[fault].compiled
        wanted = configuration(BATCH_SIZES.get(fault, BASELINE_BATCH_SIZE), jit_compile=compiled)
        trials.append(processes.launch(wanted, log=str(log), data=DATA, timing=QUICK))
        return Case(trials[-1], log)

    yield start
    for trial in trials:
        trial.kill()
