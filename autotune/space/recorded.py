"""Read recorded configurations: each knob and value must exist in this version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from autotune.data.errors import ConfigurationError, RunDirectoryError
from autotune.data.record import TrialRecord, baseline_trial
from autotune.data.run_directory import RunDirectory, RunRecord
from autotune.space.configuration import Configuration


def read_trials(directory: RunDirectory, problems: list[RunDirectoryError] | None = None) -> Iterator[TrialRecord]:
    """Yield a run's trials that have a result, by number; see `RunDirectory.read_trials`."""
    return directory.read_trials(problems, check=_check_configurations)


def _check_configurations(record: TrialRecord, file: Path) -> None:
    check_configuration(record.configuration, file, "configuration")
    check_configuration(record.asked or {}, file, "asked")


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
    """Return a run's baseline, checked; that of its first baseline trial where run.json has none."""
    if run.baseline is not None:
        return check_configuration(run.baseline, directory.path / "run.json", "baseline")
    tried = baseline_trial(trials)
    return trial_configuration(directory, tried) if tried is not None else None
