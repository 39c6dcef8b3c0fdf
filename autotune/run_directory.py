"""One run's directory: where its files are, how they are written and read.

    results/<file or variable>/<YYYYmmdd-HHMMSS>-<id>/
      run.json      machine, workload, search space, arguments; written first
      study.db      the Optuna study
      trials/0007/  result.json  log.txt
      logs/         of the templates, and of the processes that trained for their losses
      recipe.json   written last

Version history of run.json: 1, the first. This module does no measuring and no printing.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import filelock
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
)

from autotune.devices.machine import Machine
from autotune.errors import RunDirectoryError
from autotune.files import is_utf8, read_at_most, write_atomically
from autotune.mistakes import first_mistake
from autotune.record import TrialRecord
from autotune.space.knobs import Value

LARGEST_RUN_BYTES = 1 << 20
LARGEST_TRIAL_BYTES = 32 << 20
"""More than 20,000 pairs of slices."""


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _escaped(text: str) -> str:
    """Without the halves of characters that the names of files that are not UTF-8 have: JSON cannot hold them."""
    return text.encode(errors="backslashreplace").decode()


Text = Annotated[str, AfterValidator(_escaped)]
Argument = (
    StrictBool
    | StrictInt
    | Annotated[FiniteFloat, Field(strict=True)]
    | Annotated[StrictStr, AfterValidator(_escaped)]
    | None
)


class WorkloadRecord(_Data):
    """What is known of the workload; the last six fields only once the baseline has started.

    Args:
        name: The workload's name.
        reference: Where it was loaded from, as `file.py:name`.
        fingerprint: `sha256:…` over its source.
        batch_size: Its baseline batch size.
        batched: Whether its dataset does its own batching.
        drop_remainder: Whether a smaller last batch is dropped.
        takes_config: Whether its dataset() is told the configuration.
        examples: Per epoch; None when endless or unknown.
        endless: Whether its dataset has no end.
        element: What a batch is, in words.
        batch_ranks: How many axes each tensor of a batch has; None where it varies.
        parameters: The model's weights, as a count.
        device: `cpu` or `gpu`.
    """

    name: str
    reference: str
    fingerprint: str
    batch_size: Annotated[int, Field(ge=1)]
    batched: bool = False
    drop_remainder: bool = False
    takes_config: bool = False
    examples: Annotated[int, Field(ge=0)] | None = None
    endless: bool | None = None
    element: str | None = None
    batch_ranks: Annotated[tuple[int | None, ...], Field(fail_fast=True)] | None = None
    parameters: Annotated[int, Field(ge=0)] | None = None
    device: Literal["cpu", "gpu"] | None = None


class SearchSpaceRecord(_Data):
    """The search space as resolved for the machine: its source, choices, and what was left out and why."""

    source: Text
    choices: dict[str, Annotated[tuple[Value, ...], Field(fail_fast=True)]]
    left_out: dict[str, Text]


class Resumption(_Data):
    """When a run was gone on with (ISO 8601), and how many seconds it had taken until it was stopped."""

    at: str
    spent_seconds: Annotated[FiniteFloat, Field(ge=0)]


class RunRecord(_Data):
    """`run.json`: everything about a run that is not a trial. `arguments` are those of `tune`."""

    schema_version: Literal[1] = 1
    run: str
    started_at: str
    machine: Machine
    workload: WorkloadRecord | None = None
    search_space: SearchSpaceRecord | None = None
    baseline: dict[str, Value] | None = None
    isolation: Literal["template", "spawn"] = "template"
    arguments: dict[str, Argument]
    resumed: Annotated[tuple[Resumption, ...], Field(fail_fast=True)] = ()


class RunDirectory:
    """The files of one run.

    Args:
        path: The directory; it need not exist for reading methods to fail with a clear message.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = filelock.FileLock(self.path / ".lock", blocking=False)

    @property
    def study_file(self) -> Path:
        """The Optuna study, SQLite."""
        return self.path / "study.db"

    @property
    def recipe_file(self) -> Path:
        """The recipe; exists once the run has ended well."""
        return self.path / "recipe.json"

    @property
    def log_directory(self) -> Path:
        """Where the template processes log."""
        return self.path / "logs"

    @property
    def name(self) -> str:
        """The run's id: the directory's name."""
        return self.path.resolve().name

    def trial_directory(self, trial: int) -> Path:
        """Where one trial's files are."""
        return self.path / "trials" / f"{trial:04d}"

    # ------------------------------------------------------------------------------------------- writing

    def create(self) -> None:
        """Make the directory and take its lock.

        Raises:
            RunDirectoryError: It cannot be written, or holds a run already.
        """
        if not is_utf8(self.path):
            raise RunDirectoryError(
                f"cannot write to {self.path}: its path is not UTF-8", hint="Give --out another directory."
            )
        with self._being_taken("Give --out another directory.", "Give --out a directory you may write to."):
            self.path.mkdir(parents=True, exist_ok=True)
            if (self.path / "run.json").exists():
                raise RunDirectoryError(
                    f"{self.path} holds a run already", hint="Give --out another directory."
                )
            (self.path / "trials").mkdir(exist_ok=True)
            self.log_directory.mkdir(exist_ok=True)
            self._lock.acquire()

    @contextlib.contextmanager
    def reopened(self) -> Iterator[None]:
        """The lock of a run that is gone on with.

        Raises:
            RunDirectoryError: Another process has it, or the directory cannot be written.
        """
        with self._being_taken("Wait for it, or end it.", "Make it writable, or start a new run."):
            self._lock.acquire()
            self.log_directory.mkdir(exist_ok=True)
        try:
            yield
        finally:
            self.release()

    @contextlib.contextmanager
    def _being_taken(self, when_in_use: str, when_not_writable: str) -> Iterator[None]:
        """What prevents it, as an error whose hint is one of these."""
        try:
            yield
        except filelock.Timeout as error:
            raise RunDirectoryError(
                f"{self.path} is in use by another autotune process", hint=when_in_use
            ) from error
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write to {self.path}: {error.strerror}", hint=when_not_writable
            ) from error

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def write_run(self, record: RunRecord) -> None:
        """Write run.json."""
        write_atomically(self.path / "run.json", record.model_dump_json(indent=2) + "\n")

    def write_trial(self, record: TrialRecord) -> None:
        """Write a trial's result.json."""
        directory = self.prepare_trial(record.trial)
        write_atomically(directory / "result.json", record.model_dump_json(indent=1) + "\n")

    def prepare_trial(self, trial: int) -> Path:
        """Make a trial's directory, and return it."""
        directory = self.trial_directory(trial)
        try:
            directory.mkdir(exist_ok=True)  # not its parents: a run that was deleted is not begun again
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write to {directory}: {error.strerror}",
                hint="What was finished before stays readable.",
            ) from error
        return directory

    # ------------------------------------------------------------------------------------------- reading

    def read_run(self) -> RunRecord:
        """What run.json says.

        Raises:
            RunDirectoryError: This is no run directory, or the file is damaged or newer.
        """
        return _read(self.path / "run.json", RunRecord, self.path, LARGEST_RUN_BYTES)

    def read_trials(self) -> Iterator[TrialRecord]:
        """The trials that have a result, by number.

        Raises:
            RunDirectoryError: A result is damaged or newer.
        """
        for file in sorted((self.path / "trials").glob("*/result.json")):
            yield _read(file, TrialRecord, self.path, LARGEST_TRIAL_BYTES)


Record = TypeVar("Record", bound=BaseModel)


def _read(file: Path, kind: type[Record], run: Path, most_bytes: int) -> Record:
    try:
        content = read_at_most(file, most_bytes)
        if len(content) > most_bytes:
            raise RunDirectoryError(
                f"{file}: larger than {most_bytes} bytes", hint="The file is damaged: take it away."
            )
        return kind.model_validate_json(content)
    except OSError as error:
        if file.parent != run:  # a trial's result: what holds it may well be a run directory
            raise RunDirectoryError(
                f"cannot read {file}: {error.strerror}",
                hint="Make it a file that you may read, or take its trial's directory away.",
            ) from error
        raise RunDirectoryError(
            f"{run} is not a run directory: {file.name}: {error.strerror}",
            hint="Give the directory that `autotune tune` printed, such as results/digits_mlp/20261120-191001-1a2b3c.",
        ) from error
    except ValidationError as error:
        where, mistake = first_mistake(error)
        if where == "schema_version":
            raise RunDirectoryError(
                f"{file}: written by another version of autotune", hint="Upgrade autotune to read it."
            ) from error
        raise damaged(file, f"{where or 'the file'}: {mistake}") from error


def damaged(file: Path, what: str) -> RunDirectoryError:
    """The error of a file that holds what no run has written."""
    return RunDirectoryError(
        f"{file} is damaged: {what}", hint="Take the run's directory away, or name the other runs only."
    )


def new_run_directory(results: Path, workload: str) -> RunDirectory:
    """A directory for a new run below `results`: by workload, then by time."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "_", workload).strip(".") or "workload"
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return RunDirectory(results / safe / f"{stamp}-{secrets.token_hex(3)}")
