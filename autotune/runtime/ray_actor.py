"""One seat on a host of a Ray cluster: an actor with a local executor of that seat, and its trials by number.

The actor never forks: it starts the same template process as a local seat, and talks to it over the same pipe. Ray ends
an actor whose driver died or whose host has lost the cluster; then the template's supervisor ends the trials.
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

from autotune.data.errors import AutotuneError
from autotune.data.facts import Machine, WorkloadFacts, WorkloadReference
from autotune.data.files import make_scratch
from autotune.data.run_directory import SCRATCH
from autotune.machine.fingerprint import fingerprint
from autotune.runtime.executor import Isolation, LiveTrial, TrialFailed
from autotune.runtime.local import LocalExecutor
from autotune.runtime.protocol import StartedByImport, TrialRequest
from autotune.runtime.trial_process import Profiled

LARGEST_FILES_BYTES = 256 << 20  # of one trial that go back to the driver


class SeatSettings(NamedTuple):
    """The settings that the driver passes to an actor at its start."""

    reference: WorkloadReference
    directory: str  # the driver's working directory
    uploaded: bool  # Ray has copied that directory to the actor's
    isolation: Isolation
    profile: Profiled
    threads: str | None  # OMP_NUM_THREADS of the driver: Ray sets its own


class Host(NamedTuple):
    """The host of an actor."""

    name: str
    node: str  # Ray's id of it
    pid: int  # of the actor
    machine: Machine
    devices: tuple[str, ...]  # in words, those of this seat
    has_files: bool  # the workload's file is there


class OpenedSeat(NamedTuple):
    """The facts found by importing the workload on a seat."""

    facts: WorkloadFacts
    isolation: Isolation
    started_by_import: StartedByImport | None


class SeatActor:
    """One seat. The driver calls `ask`."""

    def __init__(self, settings: SeatSettings) -> None:
        self._settings = settings
        self._scratch = make_scratch("autotune-seat-")
        self._numbers = itertools.count()
        self._trials: dict[int, LiveTrial] = {}
        self._executor: LocalExecutor | None = None
        os.environ.pop("OMP_NUM_THREADS", None)
        if settings.threads is not None:
            os.environ["OMP_NUM_THREADS"] = settings.threads
        if not settings.uploaded and os.path.isdir(settings.directory):
            os.chdir(settings.directory)
        self._reference = self._relocate(settings.reference)

    def ask(self, method: str, *arguments: Any, trial: int | None = None, **options: Any) -> Any:
        """Return what a method of this seat, or of one of its trials, returns.

        A failure is returned too, which the driver raises: Ray would wrap an exception.
        """
        try:
            return getattr(self if trial is None else self._trials[trial], method)(*arguments, **options)
        except (TrialFailed, AutotuneError) as failure:
            return failure

    def _relocate(self, reference: WorkloadReference) -> WorkloadReference:
        """Return the reference as it is on this host."""

        def moved(path: str) -> str:
            return os.path.normpath(os.path.join(os.getcwd(), os.path.relpath(path, self._settings.directory)))

        update: dict[str, Any] = {}
        if self._settings.uploaded:
            update["search_path"] = tuple(map(moved, reference.search_path))
            if reference.file is not None:
                update["file"] = moved(reference.file)
            if os.path.isabs(reference.called_as):
                update["called_as"] = moved(reference.called_as)
        if reference.script is not None:
            own = {"scratch": str(self._scratch / SCRATCH), "since": time.time()}
            update["script"] = reference.script.model_copy(update=own)
        return reference.model_copy(update=update)

    def describe_host(self) -> Host:
        """Describe the host."""
        import ray

        machine, file = fingerprint(), self._reference.file
        return Host(
            name=platform.node(),
            node=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            machine=machine,
            devices=tuple(gpu.name for gpu in machine.gpus),
            has_files=file is None or os.path.exists(file),
        )

    def open(self) -> OpenedSeat:
        """Import the workload."""
        self._executor = executor = LocalExecutor(
            self._reference, logs=self._scratch, isolation=self._settings.isolation, profile=self._settings.profile
        )
        facts = executor.open()
        return OpenedSeat(facts, executor.isolation, executor.started_by_import)

    def launch(self, request: TrialRequest) -> int:
        """Start a trial, and return its number."""
        number = next(self._numbers)
        folder = self._scratch / str(number)
        folder.mkdir()
        assert self._executor is not None
        own = request.model_copy(update={"log": str(folder / Path(request.log).name)})
        self._trials[number] = self._executor.handle().launch(own)
        return number

    def end(self, number: int) -> dict[str, bytes]:
        """Kill a trial, and return its files: paths below its folder, and their contents."""
        if trial := self._trials.pop(number, None):
            trial.kill()
        found: dict[str, bytes] = {}
        size, folder = 0, self._scratch / str(number)
        for file in filter(Path.is_file, sorted(folder.rglob("*"))):
            size += file.stat().st_size
            if size <= LARGEST_FILES_BYTES:
                found[str(file.relative_to(folder))] = file.read_bytes()
        shutil.rmtree(folder, ignore_errors=True)
        return found

    def close(self) -> None:
        """End everything, and remove the trials' own files."""
        if self._executor is not None:
            self._executor.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
