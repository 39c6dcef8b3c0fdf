"""The options of a recorded run, as the commands that continue it need them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from autotune.data.errors import AutotuneError, RunDirectoryError
from autotune.data.options import Options
from autotune.data.run_directory import RunDirectory, RunRecord

START_ANEW = "Start a new run with another --out."


def options_of(run: RunRecord) -> Options:
    """Return a run's options. Raises RunDirectoryError."""
    known = {field.name for field in fields(Options)}
    given: dict[str, Any] = {name: value for name, value in run.arguments.items() if name in known}
    try:
        return Options(**given)
    except (AutotuneError, TypeError) as error:
        raise RunDirectoryError(f"{run.run}: run.json: arguments: {error}", hint=START_ANEW) from error


def to_repeat(path: Path) -> list[str]:
    """Return the words that the command which resumes a run needs again; see `Options.to_repeat`."""
    try:
        return options_of(RunDirectory(path).read_run()).to_repeat
    except RunDirectoryError:
        return []  # the command that is shown says what is wrong
