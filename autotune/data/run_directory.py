"""The directories of runs: where they are, and how their files are written and read.

    results/<file or variable>/<YYYYmmdd-HHMMSS>-<id>/
      run.json      machine, workload, search space, arguments; written first
      study.db      the Optuna study
      trials/0007/  result.json  log.txt
      logs/         of the templates, and of the processes that trained for their losses
      recipe.json   written last
      compiled/     what XLA compiled for the recipe on a GPU
    results/<file or variable>/latest → the run that was started or continued last

Version history of run.json: 1, the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import os
import re
import secrets
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import filelock
from pydantic import AfterValidator, FiniteFloat, ValidationError

from autotune.data.errors import AutotuneError, DamagedRunWarning, InputError, RunDirectoryError, WorkloadError
from autotune.data.facts import KnownWorkload, Machine
from autotune.data.files import TEMPORARY, is_utf8, read_whole, write_atomically
from autotune.data.models import Amount, Count, Frozen, Many, Number, Value, first_mistake
from autotune.data.options import Options
from autotune.data.printable import one_line, short
from autotune.data.record import Place, TrialRecord

LARGEST_FILE_BYTES = 32 << 20  # more than a trial's 20,000 pairs of slices
SCRATCH = "script-scratch"  # files of a script's trials, such as those of caches; removed at the end
STATE = "state.npz"  # of the baseline's training, in its directory while the run lasts
STATES = (STATE, "state.part")  # the second while it is written
SPACE = "space.toml"  # a copy of the search-space file that was given
COMPILED = "compiled"  # what XLA compiled for the recipe, see `recipe.compiled`
FAILED_LOG = "failed.log"  # of a workload that did not train: all that is left of its run
START_ANEW = "Start a new run with another --out."
STAYS = "Finished trials stay readable."
LATEST = "latest"  # a link to the run of a workload that was started or continued last
OWN_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
SHARED = "scratch-compiled"  # what XLA compiles in the search, while the run lasts
SCRATCH_FOLDERS = (SCRATCH, "scratch-*")
LAYERS = "layers"  # in the directory of logs: what contained trials have written. A run that was killed leaves them
OWN_FILES = (
    *("run.json", "study.db", "study.db-journal", "recipe.json", SPACE, "report.html", ".lock"),
    f"{COMPILED}/*",
    *(f"trials/[0-9]*/{name}" for name in STATES),
    *("trials/[0-9]*/result.json", "trials/[0-9]*/log.txt", "logs/template-*.log", "logs/losses-*.log"),
)
"""Files that a run writes, and removes when it is refused. Other files in its directory belong to others."""

# Names of files that are not UTF-8 have halves of characters, which JSON cannot hold.
Text = Annotated[str, AfterValidator(lambda text: text.encode(errors="backslashreplace").decode())]
RESULTS = "results"  # below the current directory, where runs are written and looked for
RECORDED = "recorded"  # below `results`: recorded figures of this repository, which are read only where they are named
Paths = str | Path | Iterable[str | Path]
"""The path of a run or of a directory that holds some, or several such paths."""


class WorkloadRecord(KnownWorkload):
    """The facts of the workload; `examples` to `settings` only once the baseline has started."""

    reference: str  # where it was loaded from, as `file.py:name`
    batch_size: Number  # the baseline's
    endless: bool | None = None  # its dataset is infinite
    device: Literal["cpu", "gpu"] | None = None


class SearchSpaceRecord(Frozen):
    """The search space as resolved for the machine: its source, choices, and what was left out and why."""

    source: Text
    choices: dict[str, Many[Value]]
    left_out: dict[str, Text]


class EarlierLeader(Frozen):
    """A leader of an earlier run or a recipe of the same workload, which this run tries first."""

    run: Text  # its directory, from the results directory; or `the recipe of …` a kind of machine
    changes: dict[str, Value]  # from the baseline
    confirmed: bool = False  # there, on whatever kind of machine
    led_over: Count = 0  # candidates that it was confirmed ahead of, on this kind of machine; 0 where it was not


class Resumption(Frozen):
    """The time a run was resumed (ISO 8601), and the seconds it had taken until it was stopped."""

    at: str
    spent_seconds: Amount


class RunRecord(Frozen):
    """`run.json`: everything about a run that is not a trial. `arguments` are those of `tune`."""

    schema_version: Literal[1] = 1
    run: str
    started_at: str
    machine: Machine
    workload: WorkloadRecord | None = None
    search_space: SearchSpaceRecord | None = None
    baseline: dict[str, Value] | None = None
    isolation: Literal["template", "spawn"] = "template"
    seats: Many[Place] = ()  # at the start
    leaders: Many[EarlierLeader] = ()  # in the order in which they are tried
    arguments: dict[str, bool | int | FiniteFloat | Text | Many[Text] | None]
    resumed: Many[Resumption] = ()


class RunDirectory:
    """The files of one run, which need not exist."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.study_file = self.path / "study.db"
        self.recipe_file = self.path / "recipe.json"  # exists once the run has ended well
        self.log_directory = self.path / "logs"
        self.space_file = self.path / SPACE
        self._lock = filelock.FileLock(self.path / ".lock", blocking=False)
        self._is_self_contained = False
        self.label = ""  # of the run among those that were found with it, see `find_runs`

    @property
    def name(self) -> str:
        """The run's id: the directory's name."""
        return self.path.resolve().name

    def trial_directory(self, trial: int) -> Path:
        """Return the directory of a trial's files."""
        return self.path / "trials" / f"{trial:04d}"

    def create(self) -> None:
        """Make the directory and take its lock. Raises `RunDirectoryError`, also if it holds a run already."""
        if not is_utf8(self.path):
            raise RunDirectoryError(f"cannot write to {self.path}: its path is not UTF-8")
        with _explain_refusal(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.refuse_links()
            if (self.path / "run.json").exists():
                raise RunDirectoryError(f"{self.path} holds a run already", hint="Give --out another directory.")
            for name in sorted({pattern.partition("/")[0] for pattern in OWN_FILES}):
                path = self.path / name  # an empty directory holds nothing, nor does an empty file such as a lock
                if any(path.iterdir()) if path.is_dir() else os.path.lexists(path) and path.lstat().st_size:
                    raise RunDirectoryError(
                        f"{self.path} holds {name} already, where a run would write its own",
                        hint="Give --out another directory.",
                    )
            (self.path / "trials").mkdir(exist_ok=True)
            self.log_directory.mkdir(exist_ok=True)
            self._lock.acquire()

    @contextlib.contextmanager
    def create_and_lock(self) -> Iterator[None]:
        """Create the directory and hold its lock; empty it again if the input is wrong before anything was tried."""
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.create()
        try:
            yield
        except RunDirectoryError:
            raise  # what was finished before stays
        except (InputError, KeyboardInterrupt) as error:
            self.release()
            first_kept = 0 if isinstance(error, KeyboardInterrupt) else 1
            if not (self.trial_directory(first_kept) / "result.json").exists():
                if isinstance(error, WorkloadError):
                    self._keep_log(error)
                self.remove_own_files()
                for folder in made:
                    with contextlib.suppress(OSError):
                        folder.rmdir()  # stays where it holds others' files
            raise
        finally:
            self.release()

    def _keep_log(self, error: WorkloadError) -> None:
        """Keep what the workload's last process printed, with the error, and name that file in the error."""
        logs = [*self.path.glob("logs/template-*.log"), *self.path.glob("trials/[0-9]*/log.txt")]
        printed = max(logs, key=lambda log: (log.stat().st_size > 0, log.stat().st_mtime), default=None)
        if printed is not None and (printed.stat().st_size or error.detail):
            kept = printed.replace(self.path / FAILED_LOG)
            with kept.open("a") as log:
                log.write(f"{error}\n")
            error.hint = f"Its log is {kept}. {error.hint}".strip()

    @contextlib.contextmanager
    def reopen(self) -> Iterator[None]:
        """Hold the lock of a run that is resumed. Raises `RunDirectoryError` if another process has it."""
        self.refuse_links()
        with _explain_refusal(self.path):
            self._lock.acquire()
            self._remove_leftovers()
            self.log_directory.mkdir(exist_ok=True)
        try:
            yield
        finally:
            self.release()

    def refuse_links(self) -> None:
        """Raise `RunDirectoryError` where it holds a link, a pipe or a device: it may come from somebody else."""
        if not self._is_self_contained:
            self._refuse_links_below(self.path)
            self._is_self_contained = True

    def _refuse_links_below(self, folder: Path) -> None:
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return  # whoever reads it says so
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RunDirectoryError(f"cannot read {folder}: {reason}") from error
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                patterns = {self.path: SCRATCH_FOLDERS, self.log_directory: (LAYERS,)}.get(folder, ())
                if not any(fnmatch(entry.name, pattern) for pattern in patterns):
                    self._refuse_links_below(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False) and os.path.lexists(entry.path):
                kind = "a link" if entry.is_symlink() else "a pipe or a device"
                raise RunDirectoryError(
                    f"{entry.path} is {kind}, and a run directory holds only files of its own",
                    hint="Name another directory, or put the file itself in its place.",
                )

    def _remove_leftovers(self) -> None:
        """Remove what an invocation that was killed has left: half-written files, scratch, compilations.

        Compilations may be another user's, and would be sealed as this user's at the end. Raises OSError where they
        cannot be removed.
        """
        for folder in self.path.glob(f"trials/*/{COMPILED}-*"):
            shutil.rmtree(folder)
        for pattern in SCRATCH_FOLDERS:
            for folder in self.path.glob(pattern):
                shutil.rmtree(folder, ignore_errors=True)
        for pattern in ("", "trials/[0-9]*/"):
            for file in self.path.glob(f"{pattern}.*"):
                if TEMPORARY.fullmatch(file.name):
                    file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def report_removal(self) -> Iterator[None]:
        """Say that the directory is gone if an error comes from that."""
        try:
            yield
        except (AutotuneError, OSError) as error:
            if self.path.is_dir():
                raise
            problem = f"the run directory is gone: {self.path} was removed or renamed during the run"
            raise RunDirectoryError(problem) from error

    def remove_state(self) -> None:
        """Remove files that only a running run needs: the state of the baseline's training, shared compilations."""
        for name in STATES:
            (self.trial_directory(0) / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / SHARED, ignore_errors=True)

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def remove_own_files(self) -> None:
        """Remove what runs write, file by file, and the directories below this one that are empty then."""
        for pattern in OWN_FILES:
            for file in self.path.glob(pattern):
                file.unlink(missing_ok=True)
        for folder in (*self.path.glob("trials/[0-9]*"), self.path / "trials", self.log_directory):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def write_run(self, record: RunRecord) -> None:
        """Write run.json."""
        write_atomically(self.path / "run.json", record.model_dump_json(indent=2) + "\n")

    def link_latest(self) -> None:
        """Point `latest`, beside this directory, to it; only where autotune itself has named the directory."""
        latest = self.path.parent / LATEST
        if not OWN_NAME.fullmatch(self.path.name) or (os.path.lexists(latest) and not latest.is_symlink()):
            return
        temporary = latest.with_name(f".{LATEST}.{secrets.token_hex(8)}")
        try:
            temporary.symlink_to(self.path.name)
            temporary.replace(latest)
        except OSError:  # a file system without links
            temporary.unlink(missing_ok=True)

    def write_trial(self, record: TrialRecord) -> None:
        """Write a trial's result.json."""
        file = self.prepare_trial(record.trial) / "result.json"
        write_atomically(file, record.model_dump_json(indent=1) + "\n", hint=STAYS)

    def prepare_trial(self, trial: int) -> Path:
        """Make a trial's directory, and return it."""
        directory = self.trial_directory(trial)
        with _explain_refusal(directory, hint=STAYS):
            directory.mkdir(exist_ok=True)  # not its parents: a run that was deleted is not begun again
        return directory

    def read_run(self) -> RunRecord:
        """Read run.json. Raises `RunDirectoryError` if it is missing, damaged or newer."""
        self.refuse_links()
        return _read(self.path / "run.json", RunRecord, hint="Give the directory that `autotune tune` printed.")

    def trial_numbers(self, holding: str = "") -> set[int]:
        """Return the numbers of all trials that have a directory, or such a file in it."""
        names = (path.relative_to(self.path).parts[1] for path in self.path.glob(f"trials/*/{holding}"))
        return {int(name) for name in names if re.fullmatch("[0-9]{4,9}", name)}

    def read_trials(
        self, problems: list[RunDirectoryError] | None = None, *, check: Callable[[TrialRecord, Path], object]
    ) -> Iterator[TrialRecord]:
        """Yield the trials that have a result, by number. Raises RunDirectoryError where the directory holds a link.

        A result that cannot be read, or for which `check` raises RunDirectoryError, is left out. `problems` takes these
        errors; a warning says them where there is no such list.
        """
        self.refuse_links()
        found = [] if problems is None else problems
        for file in sorted((self.path / "trials").glob("*/result.json")):
            try:
                record = _read(file, TrialRecord, hint="Make it readable, or remove its trial's directory.")
                parse_utc(record.started_at, file)
                if file.parent.name != f"{record.trial:04d}":
                    problem = f"{file} is damaged: trial: {record.trial}, expected the number of its directory"
                    raise RunDirectoryError(problem)
                check(record, file)
                yield record
            except RunDirectoryError as problem:
                found.append(problem)
        if problems is None and found:
            warnings.warn(left_out(found), DamagedRunWarning, stacklevel=2)


def left_out(problems: Sequence[RunDirectoryError]) -> str:
    """Say in one sentence which trials are left out, and why."""
    others = f"this trial and {len(problems) - 1} others are" if len(problems) > 1 else "this trial is"
    return f"{problems[0].message}: {others} omitted"


@contextlib.contextmanager
def _explain_refusal(path: Path, *, hint: str = "") -> Iterator[None]:
    """Raise `RunDirectoryError` where a directory cannot be written to, or another process has its lock."""
    try:
        yield
    except filelock.Timeout as error:
        raise RunDirectoryError(f"{path} is in use by another autotune process") from error
    except OSError as error:
        raise RunDirectoryError(f"cannot write to {path}: {error.strerror}", hint=hint) from error


Record = TypeVar("Record", bound=Frozen)


def _read(file: Path, kind: type[Record], *, hint: str) -> Record:
    try:
        return kind.model_validate_json(read_whole(file, LARGEST_FILE_BYTES, RunDirectoryError, hint))
    except ValidationError as error:
        mistake = first_mistake(error)
        if mistake.startswith("schema_version:"):
            raise RunDirectoryError(f"{file}: written by another version of autotune") from error
        raise RunDirectoryError(f"{file} is damaged: {mistake}") from error


def parse_utc(text: str, file: Path) -> datetime:
    """Parse an ISO 8601 time of `file`; without a zone it is in UTC. Raises RunDirectoryError."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise RunDirectoryError(f"{file} is damaged: started_at: {short(text)} is not a time") from error


def new_run_directory(results: Path, workload: str) -> RunDirectory:
    """Name a directory for a new run below `results`: by workload, then by time."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "_", workload).strip(".") or "workload"
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return RunDirectory(results / safe / f"{stamp}-{secrets.token_hex(3)}")


def options_of(run: RunRecord) -> Options:
    """Return a run's options. Raises RunDirectoryError."""
    known = {field.name for field in dataclasses.fields(Options)}
    given: dict[str, Any] = {name: value for name, value in run.arguments.items() if name in known}
    try:
        return Options(**given)
    except AutotuneError as error:
        raise RunDirectoryError(f"{run.run}: run.json: arguments: {error}", hint=START_ANEW) from error


# -------------------------------------------------------------------------------------------------------- finding runs


def find_runs(*paths: Paths) -> tuple[RunDirectory, ...]:
    """Return the runs at or below `paths`, once each: in the order of the arguments, those below one by path.

    The label of each is its run's id; with its path, where several runs have that id.

    Warns of a run below a path that cannot be read, and leaves it out. Raises RunDirectoryError if nothing was given,
    or if a path holds no run that can be read.
    """
    single = [path for given in paths for path in ([given] if isinstance(given, str | os.PathLike) else given)]
    if not single:
        raise RunDirectoryError("no run was given")
    found: dict[Path, RunDirectory] = {}
    for path in single:
        readable, problems = [], []
        for folder in _directories_at(Path(path)):
            directory = RunDirectory(folder)
            try:
                directory.label = one_line(directory.read_run().run)
            except RunDirectoryError as problem:
                problems.append(problem)
            else:
                readable.append(directory)
        if not readable:
            raise problems[0]
        for error in problems:
            warnings.warn(f"{error.message}: this run is omitted", DamagedRunWarning, stacklevel=3)
        for directory in readable:
            found.setdefault(directory.path.resolve(), directory)
    ids = Counter(directory.label for directory in found.values())
    for directory in found.values():
        if ids[directory.label] > 1:
            directory.label += f" ({one_line(directory.path)})"
    return tuple(found.values())


def _directories_at(path: Path) -> list[Path]:
    found: list[Path] = []
    problems: list[str] = []
    try:
        for folder, below, files in os.walk(path, onerror=lambda error: problems.append(str(error.strerror))):
            if Path(folder).name == RECORDED and Path(folder) != path:
                below[:] = filter(OWN_NAME.fullmatch, below)  # a script of this name has runs there, too
            if "run.json" in files:
                found.append(Path(folder))
                below.clear()  # a run holds no runs, and its trials may be thousands
    except ValueError as error:  # a null character in the path
        problems.append(str(error))
    if not found:
        problem = problems[0] if problems else "there is no run.json in it or below it"
        raise RunDirectoryError(
            f"{path} is not a run directory: {problem}",
            hint="Give the directory that `autotune tune` printed, or one that holds some of these.",
        )
    return sorted(found)


def newest_runs(results: Path, *, most: int) -> list[RunDirectory]:
    """Return the runs in a directory and in its directories that were written to last, the newest first."""
    found: list[tuple[float, Path]] = []
    for file in (*results.glob("*/run.json"), *results.glob("*/*/run.json")):
        with contextlib.suppress(OSError):  # it may be removed meanwhile
            folder = file.parent
            recorded = folder.parent.name == RECORDED and not OWN_NAME.fullmatch(folder.name)
            if not (recorded or folder.is_symlink()):
                found.append((file.lstat().st_mtime, folder))
    return [RunDirectory(folder) for _, folder in heapq.nlargest(most, found)]


def follow_latest(path: Path) -> Path:
    """Return the run that a link `latest` leads to; any other path as it is.

    A command that is printed must name the run itself, because the link moves on with the next run.
    """
    with contextlib.suppress(OSError, ValueError):
        if path.name == LATEST and OWN_NAME.fullmatch(target := os.readlink(path)):
            return path.with_name(target)
    return path
