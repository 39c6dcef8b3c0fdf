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
    found = []
    problem = ""
    pending = [path]
    while pending:  # os.walk calls itself for each level, and a tree may be thousands deep
        folder = pending.pop()
        try:
            with os.scandir(folder) as listed:
                entries = {entry.name: entry for entry in listed}
        except (OSError, ValueError) as error:  # ValueError: a null character in the path
            problem = problem or getattr(error, "strerror", "") or str(error)
            continue
        if "run.json" in entries and not _is_directory(entries["run.json"]):
            found.append(folder)  # a run holds no runs, and its trials may be thousands
        else:
            pending += [folder / each.name for each in entries.values() if _is_directory(each, links=False)]
    if not found:
        raise RunDirectoryError(
            f"{path} is not a run directory: {problem or 'there is no run.json in it or below it'}",
            hint="Give the directory that `autotune tune` printed, or one that holds some of these.",
        )
    return sorted(found)


def _is_directory(entry: os.DirEntry[str], *, links: bool = True) -> bool:
    try:
        return entry.is_dir(follow_symlinks=links)
    except OSError:
        return False  # a link that leads to itself


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
    if record.phase is Phase.CONFIRM:
        for each in reversed(records):
            if each.phase is Phase.CONFIRM and each.slices and each.trial <= record.trial:
                return each
    return records[0]


def parse_utc(text: str, file: Path) -> datetime:
    """An ISO 8601 time of `file`, in UTC, also where it names no zone. Raises RunDirectoryError where it is none."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise damaged(file, f"started_at: {short(text)} is not a time") from error
