"""Which runs do these paths stand for, and are their values sane.

This module may not import pandas, measure or print.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from autotune.errors import ConfigurationError, RunDirectoryError
from autotune.run_directory import RunDirectory
from autotune.space.configuration import Configuration


def find_runs(*paths: str | Path) -> tuple[RunDirectory, ...]:
    """The runs that `paths` stand for, each once.

    Args:
        paths: Run directories, or directories that hold some at any depth, such as `results`.

    Returns:
        Runs in the order of the arguments; those below one argument by path.

    Raises:
        RunDirectoryError: Nothing was given, or there is no run at one of the paths.
    """
    if not paths:
        raise RunDirectoryError(
            "no run was given", hint="Give run directories, or a directory that holds some."
        )
    found: dict[Path, RunDirectory] = {}
    for path in paths:
        for directory in _directories_at(Path(path)):
            found.setdefault(directory.resolve(), RunDirectory(directory))
    return tuple(found.values())


def _directories_at(path: Path) -> list[Path]:
    """`path` itself when it is a run directory, else all run directories below it, sorted."""
    found = []
    unreadable: list[OSError] = []
    for folder, below, files in os.walk(path, onerror=unreadable.append):
        if "run.json" in files:
            found.append(Path(folder))
            below.clear()  # a run holds no runs, and its trials may be thousands
    if not found:
        problem = unreadable[0].strerror if unreadable else "there is no run.json in it or below it"
        raise RunDirectoryError(
            f"{path} is not a run directory: {problem}",
            hint="Give the directory that `autotune tune` printed, or one that holds some of these.",
        )
    return sorted(found)


def check_configuration(values: Mapping[str, object], file: Path, key: str) -> Configuration:
    """The configuration that stands in `file` under `key`.

    Raises:
        RunDirectoryError: A knob does not exist here or cannot take its value. Leaving the knob out
            instead would make different configurations look the same.
    """
    try:
        return Configuration(values, where=f"{file}: {key}")
    except ConfigurationError as error:
        raise RunDirectoryError(error.message, hint=error.hint) from error


def parse_utc(text: str, file: Path) -> datetime:
    """The time that `file` gives as `text`, ISO 8601, in UTC; UTC too where it names no zone.

    Raises:
        RunDirectoryError: It is no time.
    """
    try:
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise RunDirectoryError(f"{file} is damaged: started_at: {text!r} is not a time") from error
