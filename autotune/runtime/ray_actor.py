"""What runs on a seat's host under Ray: a local executor, and its trials by number.

The actor never forks: it starts the same template process as a local seat, and talks to it over the same pipe. When
the driver has not been heard of for a lease, it ends its trials; when the actor ends, the template's keeper does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from autotune.data.errors import AutotuneError
from autotune.data.facts import WorkloadFacts, WorkloadReference
from autotune.data.hardware import Machine
from autotune.data.record import Outcome, Place
from autotune.machine.fingerprint import fingerprint
from autotune.runtime import protocol
from autotune.runtime.created_files import remove_created
from autotune.runtime.executor import SeatLost, TrialFailed
from autotune.runtime.local import TrialProcesses
from autotune.runtime.places import cut_cores
from autotune.runtime.trial_process import Profiled, TrialProcess
from autotune.space.configuration import Configuration

SCRATCH_PREFIX, LOCK = "autotune-seat-", "lock"
LARGEST_FILES_BYTES = 256 << 20  # of one trial that go back to the driver
T = TypeVar("T")


def sweep_scratch(place: Path) -> None:
    """Remove what actors that were killed have left: directories of this user's whose lock nobody holds."""
    for directory in place.glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = directory.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(descriptor)


def _hold(directory: Path) -> int:
    """Hold the lock of a scratch directory, and return its descriptor; the file has its name once it is locked."""
    unnamed = directory / f"{LOCK}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unnamed.rename(directory / LOCK)
    return descriptor


class SeatSettings(NamedTuple):
    """What the driver tells an actor at its start."""

    reference: WorkloadReference
    directory: str  # the driver's working directory
    uploaded: bool  # whether Ray has copied that directory to the actor's
    isolation: Any
    profile: Profiled
    lease_seconds: float
    threads: str | None  # OMP_NUM_THREADS of the driver: Ray sets its own


class Host(NamedTuple):
    """What an actor tells of its host."""

    name: str
    node: str  # Ray's id of it
    machine: Machine
    devices: tuple[str, ...]  # in words, those of this seat
    files_are_there: bool  # whether the workload's file is


class SeatActor:
    """One seat. Every method returns its answer or the failure, which the driver raises."""

    def __init__(self, settings: SeatSettings) -> None:
        self._settings = settings
        sweep_scratch(Path(tempfile.gettempdir()))
        self._scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))
        self._held = _hold(self._scratch)  # the lock is the kernel's to free, however this process ends
        self._trials: dict[int, TrialProcess] = {}
        self._folders: dict[int, Path] = {}
        self._processes: TrialProcesses | None = None
        self._heard = time.monotonic()
        os.environ.pop("OMP_NUM_THREADS", None)
        if settings.threads is not None:
            os.environ["OMP_NUM_THREADS"] = settings.threads
        if not settings.uploaded and os.path.isdir(settings.directory):
            os.chdir(settings.directory)
        self._reference = self._here(settings.reference)
        threading.Thread(target=self._watch, daemon=True).start()

    def _here(self, reference: WorkloadReference) -> WorkloadReference:
        """The reference as it is on this host."""

        def moved(path: str) -> str:
            return os.path.join(os.getcwd(), os.path.relpath(path, self._settings.directory))

        update: dict[str, Any] = {}
        if self._settings.uploaded:
            update["search_path"] = tuple(map(moved, reference.search_path))
            if reference.file is not None:
                update["file"] = moved(reference.file)
            if os.path.isabs(reference.called_as):
                update["called_as"] = moved(reference.called_as)
        if reference.script is not None:
            created = {"created": str(self._scratch / "created.txt")}
            update["script"] = reference.script.model_copy(update=created)
        return reference.model_copy(update=update)

    def hello(self) -> Host:
        """What the host is."""
        import ray

        machine = fingerprint()
        file = self._reference.file
        return Host(
            name=platform.node(),
            node=ray.get_runtime_context().get_node_id(),
            machine=machine,
            devices=tuple(gpu.name for gpu in machine.gpus),
            files_are_there=file is None or os.path.exists(file),
        )

    def open(self, slot: int, of: int) -> WorkloadFacts | Exception:
        """Import the workload on the slot-th of so many parts of the host's cores."""

        def opened() -> WorkloadFacts:
            self._processes = TrialProcesses(
                self._reference,
                logs=self._scratch,
                isolation=self._settings.isolation,
                profile=self._settings.profile,
                places=(cut_cores(of)[slot] if of > 1 else Place(seat="cpu0", host=platform.node()),),
            )
            return self._processes.open()

        return self._answer(opened)

    def state(self) -> tuple[str, protocol.StartedByImport | None, Place, str | None]:
        """Isolation, what importing started, where trials run, and the name of the seat with all cores."""
        processes = self._processes
        assert processes is not None
        return (processes.isolation, processes.started_by_import, processes.place(processes.seats[0]), processes.whole)

    def launch(
        self, number: int, configuration: Mapping[str, Any], *, whole: bool, how: Mapping[str, Any]
    ) -> Exception | None:
        """Start a trial; the driver's number of it is used once."""

        def start() -> None:
            processes = self._processes
            assert processes is not None
            self._folders[number] = folder = self._scratch / str(number)
            folder.mkdir()
            seat = (processes.whole if whole else None) or processes.seats[0]
            self._trials[number] = processes.launch(
                Configuration(configuration), seat=seat, log=str(folder / "log.txt"), **how
            )

        return self._answer(start)

    def ask(self, number: int, method: str, arguments: tuple[Any, ...], how: Mapping[str, Any]) -> Any:
        """Call a method of a trial."""
        lost = SeatLost(Outcome.CRASHED, "its trials were ended: the driver was not heard of for the lease")
        trial = self._trials.get(number)
        if trial is None:
            return lost
        answer = self._answer(lambda: getattr(trial, method)(*arguments, **how))
        return lost if isinstance(answer, TrialFailed) and number not in self._trials else answer

    def end(self, number: int) -> dict[str, bytes]:
        """Kill a trial, and hand over its files: paths below its folder, and what they hold."""
        if trial := self._trials.pop(number, None):
            trial.kill()
        found: dict[str, bytes] = {}
        if (folder := self._folders.pop(number, None)) is None:
            return found
        size = 0
        for file in filter(Path.is_file, sorted(folder.rglob("*"))):
            size += file.stat().st_size
            if size <= LARGEST_FILES_BYTES:
                found[str(file.relative_to(folder))] = file.read_bytes()
        shutil.rmtree(folder, ignore_errors=True)
        return found

    def beat(self) -> None:
        """The driver lives."""
        self._heard = time.monotonic()

    def close(self) -> None:
        """End everything, and remove what the script's trials have made."""
        if self._processes is not None:
            self._processes.close()
        script = self._reference.script
        if script is not None and script.created is not None:
            with contextlib.suppress(OSError):
                remove_created(Path(script.created), [os.getcwd(), *self._reference.search_path])
        shutil.rmtree(self._scratch, ignore_errors=True)

    def pid(self) -> int:
        """Of the actor."""
        return os.getpid()

    @staticmethod
    def _answer(call: Callable[[], T]) -> T | Exception:
        try:
            return call()
        except (TrialFailed, AutotuneError) as failure:
            return failure

    def _watch(self) -> None:
        lease = self._settings.lease_seconds
        while True:
            time.sleep(lease / 10)
            if time.monotonic() - self._heard > lease:
                for number in list(self._trials):
                    if trial := self._trials.pop(number, None):
                        trial.kill()
