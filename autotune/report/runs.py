"""Find run directories and check their values. No pandas here."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from autotune.data.errors import DamagedRunWarning, RunDirectoryError
from autotune.data.record import TrialRecord, baseline_trial
from autotune.data.run_directory import RunDirectory, RunRecord
from autotune.space.configuration import Configuration, check_configuration, trial_configuration


def find_runs(*paths: str | Path) -> tuple[RunDirectory, ...]:
    """The runs at or below `paths`, each once: in the order of the arguments, those below one by path.

    A run below a path that cannot be read is left out, with a warning. Raises RunDirectoryError where nothing was
    given, there is no run at one of the paths, or none of those there can be read.
    """
    if not paths:
        raise RunDirectoryError("no run was given", hint="Give run directories, or a directory that holds some.")
    found: dict[Path, RunDirectory] = {}
    for path in paths:
        readable, problems = [], []
        for folder in _directories_at(Path(path)):
            directory = RunDirectory(folder)
            try:
                directory.read_run()
            except RunDirectoryError as problem:
                problems.append(problem)
            else:
                readable.append(directory)
        if not readable:
            raise problems[0]
        for error in problems:
            warnings.warn(f"{error.message}: this run is left out", DamagedRunWarning, stacklevel=3)
        for directory in readable:
            found.setdefault(directory.path.resolve(), directory)
    return tuple(found.values())


def _directories_at(path: Path) -> list[Path]:
    found: list[Path] = []
    problems: list[str] = []
    try:
        for folder, below, files in os.walk(path, onerror=lambda error: problems.append(str(error.strerror))):
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


def baseline_of(directory: RunDirectory, run: RunRecord, trials: Sequence[TrialRecord]) -> Configuration | None:
    """A run's baseline, checked; that of its first baseline trial where run.json has none."""
    if run.baseline is not None:
        return check_configuration(run.baseline, directory.path / "run.json", "baseline")
    tried = baseline_trial(trials)
    return trial_configuration(directory, tried) if tried is not None else None
