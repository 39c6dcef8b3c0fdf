"""Find runs on disk: those at or below given paths, and the newest ones below a results directory."""

from __future__ import annotations

import contextlib
import heapq
import os
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from autotune.data.errors import DamagedRunWarning, RunDirectoryError
from autotune.data.printable import one_line
from autotune.data.run_directory import LATEST, OWN_NAME, RunDirectory

RESULTS = "results"  # below the current directory, where runs are written and looked for
RECORDED = "recorded"  # below `results`: recorded figures of this repository, which are read only where they are named
Paths = str | Path | Iterable[str | Path]
"""The path of a run or of a directory that holds some, or several such paths."""


def find_runs(*paths: Paths) -> tuple[RunDirectory, ...]:
    """Return the runs at or below `paths`, once each: in the order of the arguments, those below one by path.

    The label of each is its run's id; with its path, where several runs have that id.

    Warns of a run below a path that cannot be read, and leaves it out. Raises RunDirectoryError if nothing was given,
    or if a path holds no run that can be read.
    """
    single = [path for given in paths for path in ([given] if isinstance(given, str | os.PathLike) else given)]
    if not single:
        raise RunDirectoryError("no run was given", hint="Give run directories, or a directory that holds some.")
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
