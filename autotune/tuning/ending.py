"""Measure the winner after the search: a soak, and the cost of its batch size."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from autotune.data.figures import Check, Interval, Profile
from autotune.data.record import Outcome, Phase, TrialRecord
from autotune.recipe.evidence import Watch
from autotune.runtime.executor import DeviceUnavailable, TrialFailed
from autotune.space.configuration import Configuration
from autotune.stats.bottleneck import NOT_INSTALLED
from autotune.stats.stability import DEVICE_GROWTH, HOST_GROWTH, check_hangs, check_memory_growth
from autotune.tuning.comparison import MeasuredProcess
from autotune.tuning.costs import slice_length
from autotune.tuning.events import Began
from autotune.tuning.loop import SearchResult
from autotune.tuning.opening import Invocation, Opened
from autotune.tuning.rules import Limits, call_seconds, memory_of, memory_samples
from autotune.tuning.run import Deadline, Run
from autotune.tuning.seat import BASELINE_SECONDS
from autotune.tuning.trial import Trial, limit_of

SLICES_AT_ONCE = 8  # of a watch, between which the user may stop it
READ_SECONDS = 60.0
FOLDER = "profile"  # of a trial's directory


def watch_winner(found: SearchResult, opened: Opened, invocation: Invocation) -> Watch | None:
    """Watch what would be recommended, where that was asked for."""
    run, champion, seconds = opened.run, found.state.recommended, invocation.options.soak
    if not seconds or champion is None or run.interrupted():
        return None
    run.observe(Began(text=f"watching the winner for {seconds:.0f} s"))
    if not run.executor.seats:  # all were lost
        return None
    return soak(run, run.records[champion.number], seat=run.executor.seats[0], seconds=seconds, limits=opened.limits)


def soak(run: Run, confirmed: TrialRecord, *, seat: str, seconds: float, limits: Limits) -> Watch | None:
    """Train one process of the winner without a pause, and keep its slices as a trial; None where nothing was seen."""
    trial = run.new_trial(Phase.SOAK, Configuration(confirmed.configuration))
    failure = None
    try:
        _train(run, trial, seat, seconds)
    except TrialFailed as failed:
        failure = failed
    record = run.keep(trial.record(Outcome.OK, failure=failure))
    if isinstance(failure, DeviceUnavailable) or (failure is None and not trial.slices):
        return None
    return Watch(
        seconds=math.fsum(timed.seconds for timed in trial.slices),
        throughput=record.throughput,
        checks=_checks(trial, confirmed, limits, record.throughput, run.records.values()),
        failure="" if failure is None else failure.reason or str(failure.outcome),
    )


def _train(run: Run, trial: Trial, seat: str, seconds: float) -> None:
    process = MeasuredProcess(
        run=run,
        deadline=Deadline(clock=run.clock),
        trial=trial,
        seat=seat,
        start_timeout=max(BASELINE_SECONDS, seconds),
    )
    try:
        process.start()
        ends, length = run.clock() + seconds, slice_length(process.warm)
        while run.clock() < ends and not run.interrupted():
            count = max(1, min(SLICES_AT_ONCE, int((ends - run.clock()) / length)))
            trial.add_slices(process.slices_without_pause(length, count))
        process.close(0.0)
    finally:
        process.kill()


def _checks(
    trial: Trial, confirmed: TrialRecord, limits: Limits, throughput: Interval | None, searched: Collection[TrialRecord]
) -> tuple[Check, ...]:
    if throughput is None:
        return ()
    found = []
    for of, limit in ((HOST_GROWTH, limits.host_bytes), (DEVICE_GROWTH, limits.device_bytes)):
        samples = memory_samples(trial.slices, of)
        if samples and limit:
            found.append(
                check_memory_growth(
                    [samples],
                    memory_of(confirmed, of, candidate=False, searched=searched),
                    name=of,
                    examples_per_second=throughput.value,
                    held_bytes=round(max(held for _, held in samples)),
                    limit_bytes=limit,
                    margin=limits.margin,
                )
            )
    steps = int(trial.configuration["steps_per_execution"])
    calls = [call_seconds(timed, steps) for timed in trial.slices]
    boundary = trial.epoch_cost.seconds or 0.0
    found.append(check_hangs(calls, calls[:1], boundary_seconds=boundary))
    return tuple(found)


def note_profiles(run: Run) -> None:
    """Read what trials have profiled, and judge them anew by it."""
    folders = {number: run.directory.trial_directory(number) / FOLDER for number in run.records}
    known = [number for number, record in run.records.items() if record.profile is not None and record.profile.steps]
    profiled = [number for number, folder in folders.items() if folder.is_dir() and number not in known]
    read = read_profiles([folders[number] for number in profiled])
    for number, profile in zip(profiled, read, strict=True):
        record = run.records[number]
        record = record.model_copy(update={"profile": profile})
        if record.outcome is Outcome.OK:
            record = record.model_copy(update={"bottleneck": limit_of(record)})
        run.records[number] = record
        run.directory.write_trial(run.records[number])


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
