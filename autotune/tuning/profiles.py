"""Profiles of a run's trials: read once the search is over, and what they say of each trial's limit."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from autotune.data.figures import Profile
from autotune.data.record import Outcome, TrialRecord
from autotune.stats.bottleneck import NOT_INSTALLED
from autotune.tuning.run import Run
from autotune.tuning.trial import limit_of

READ_SECONDS = 60.0
FOLDER = "profile"  # of a trial's directory


def note_profiles(run: Run) -> None:
    """Read what trials have profiled, and judge them anew by it."""
    folders = {number: run.directory.trial_directory(number) / FOLDER for number in run.records}
    profiled = [number for number, folder in folders.items() if folder.is_dir() and not _known(run.records[number])]
    read = read_profiles([folders[number] for number in profiled])
    for number, profile in zip(profiled, read, strict=True):
        record = run.records[number]
        record = record.model_copy(update={"profile": profile})
        if record.outcome is Outcome.OK:
            record = record.model_copy(update={"bottleneck": limit_of(record)})
        run.records[number] = record
        run.directory.write_trial(run.records[number])


def _known(record: TrialRecord) -> bool:
    return record.profile is not None and record.profile.steps > 0


def read_profiles(folders: Sequence[Path]) -> list[Profile]:
    """Return the profiles in these folders, each with a reason where it cannot be read."""
    if not folders:
        return []
    if importlib.util.find_spec("xprof") is None:
        return [Profile(reason=NOT_INSTALLED)] * len(folders)
    command = [sys.executable, "-P", "-m", "autotune.report.xprof_reader"]
    given = json.dumps([str(folder.resolve()) for folder in folders])
    try:
        ended = subprocess.run(command, input=given, capture_output=True, text=True, timeout=READ_SECONDS, check=True)
        read = [Profile.model_validate_json(line) for line in ended.stdout.splitlines()]
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        return [Profile(reason=f"xprof failed: {type(error).__name__}")] * len(folders)
    missing = len(folders) - len(read)
    return [*read, *[Profile(reason="xprof ended before it")] * missing][: len(folders)]
