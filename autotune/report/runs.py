"""Find run directories and check their values. No pandas here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from autotune.errors import ConfigurationError, RunDirectoryError
from autotune.printable import short
from autotune.record import Phase, TrialRecord
from autotune.run_directory import RunDirectory, RunRecord, damaged
from autotune.space.configuration import Configuration


def find_runs(*paths: str | Path) -> tuple[RunDirectory, ...]:
    """The runs at or below `paths`, each once: in the order of the arguments, those below one by path.

    Raises RunDirectoryError where nothing was given, or there is no run at one of the paths.
    """
    if not paths:
        raise RunDirectoryError("no run was given", hint="Give run directories, or a directory that holds some.")
    found: dict[Path, RunDirectory] = {}
    for path in paths:
        for directory in _directories_at(Path(path)):
            found.setdefault(directory.resolve(), RunDirectory(directory))
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


def check_configuration(values: Mapping[str, object], file: Path, key: str) -> Configuration:
    """The configuration under `key` of `file`. Raises RunDirectoryError where a knob or value does not exist here."""
    try:
        return Configuration(values, where=f"{file}: {key}")
    except ConfigurationError as error:
        raise RunDirectoryError(error.message, hint=error.hint) from error


def trial_configuration(directory: RunDirectory, record: TrialRecord) -> Configuration:
    """A trial's configuration, checked as by `check_configuration`."""
    file = directory.trial_directory(record.trial) / "result.json"
    return check_configuration(record.configuration, file, "configuration")


def baseline_of(directory: RunDirectory, run: RunRecord, trials: Sequence[TrialRecord]) -> Configuration | None:
    """A run's baseline, checked; that of its first baseline trial where run.json has none."""
    if run.baseline is not None:
        return check_configuration(run.baseline, directory.path / "run.json", "baseline")
    tried = [record for record in trials if record.phase is Phase.BASELINE]
    return trial_configuration(directory, tried[0]) if tried else None


def reference_of(record: TrialRecord, records: Sequence[TrialRecord]) -> TrialRecord:
    """The record of the baseline that a trial stood beside; a confirmation has its own."""
    if record.phase is not Phase.CONFIRM:
        return records[0]
    told = [looks.reference for each in records for looks in each.looks if record.trial in (each.trial, looks.champion)]
    for each in reversed(records):
        own = not told and each.phase is Phase.CONFIRM and each.slices and each.trial <= record.trial
        if own or each.trial in told[-1:]:
            return each
    return records[0]


def parse_utc(text: str, file: Path) -> datetime:
    """An ISO 8601 time of `file`, in UTC, also where it names no zone. Raises RunDirectoryError where it is none."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise damaged(file, f"started_at: {short(text)} is not a time") from error
