"""How did each run end: one summary per run, to be set side by side.

Finished values for whoever draws them. This module may not import pandas or TensorFlow, measure or print.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from autotune.devices.machine import Machine
from autotune.recipe.recipe import Recipe
from autotune.record import Outcome, Phase, TrialRecord
from autotune.report.runs import check_configuration, find_runs, parse_utc
from autotune.run_directory import RunDirectory, RunRecord
from autotune.space.configuration import Configuration
from autotune.stats.deciding import Verdict
from autotune.stats.intervals import Interval

_NO_FAILURE = frozenset({Outcome.OK, Outcome.PRUNED, Outcome.INFERRED_OOM, Outcome.INTERRUPTED})
"""Outcomes that say nothing against the configuration that was run: nothing ran, or the user ended it."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """How one run ended.

    The `best_*` fields are of the search, where the luckiest trial looks best; what the run claims, after
    measuring its finalists again, is `claimed`. Speed-ups are ratios of throughputs over the run's own
    baseline. The last four fields are None until the run has a recipe.

    Args:
        run: The run's id.
        path: Its directory, as it was given or found.
        workload: The workload's name; None when the run ended before it was known.
        machine: The machine's id.
        machine_description: Processor, cores and GPUs, in words.
        started_at: When the run began, UTC.
        trials: How many trials have finished, in whatever way.
        outcomes: How many of them ended in which way; outcomes that did not occur are left out.
        baseline_throughput: Samples per second of the baseline.
        best_trial: The number of the trial of the search with the highest speed-up.
        best_changes: What it sets otherwise than the baseline, as text; `baseline` for nothing.
        best_speedup: Its speed-up.
        comparable_with_first: Whether speeds and speed-ups may be set against those of the first run.
        why_not: Why they may not, as one line; empty when they may.
        verdict: What the recipe says about its configuration, such as `faster`.
        claimed: The speed-up that the recipe claims.
        recommended: The configuration that the recipe recommends.
        recommended_changes: What it sets otherwise than the baseline, as text; `baseline` for nothing.
    """

    run: str
    path: Path
    workload: str | None
    machine: str
    machine_description: str
    started_at: datetime
    trials: int
    outcomes: Mapping[Outcome, int]
    baseline_throughput: Interval | None
    best_trial: int | None
    best_changes: str | None
    best_speedup: Interval | None
    comparable_with_first: bool
    why_not: str
    verdict: Verdict | None
    claimed: Interval | None
    recommended: Configuration | None
    recommended_changes: str | None

    @property
    def failed(self) -> int:
        """How many trials were run and failed: not those that were interrupted, or never run."""
        return sum(count for outcome, count in self.outcomes.items() if outcome not in _NO_FAILURE)


def compare_runs(*runs: str | Path) -> tuple[RunSummary, ...]:
    """One summary per run.

    Args:
        runs: Run directories, or directories that hold some at any depth, such as `results`.

    Returns:
        Summaries in the order of the arguments; runs found below one argument by path.

    Raises:
        RunDirectoryError: Nothing was given, no run was found at a path, or a file there is damaged.
        RecipeError: A run's recipe cannot be read: taking it for missing would hide a verdict.
    """
    directories = find_runs(*runs)
    records = [directory.read_run() for directory in directories]
    return tuple(
        _summary(directory, record, "" if record is records[0] else _why_not(records[0], record))
        for directory, record in zip(directories, records, strict=True)
    )


def _summary(directory: RunDirectory, run: RunRecord, why_not: str) -> RunSummary:
    trials = sorted(directory.read_trials(), key=lambda record: record.trial)
    baseline = _baseline(directory, run, trials)
    best = _best(trials)
    recipe = Recipe.load(directory.recipe_file) if os.path.exists(directory.recipe_file) else None
    return RunSummary(
        run=run.run,
        path=directory.path,
        workload=run.workload.name if run.workload else None,
        machine=run.machine.id,
        machine_description=describe_machine(run.machine),
        started_at=parse_utc(run.started_at, directory.path / "run.json"),
        trials=len(trials),
        outcomes=_count_outcomes(trials),
        baseline_throughput=_baseline_throughput(trials),
        best_trial=best.trial if best else None,
        best_changes=_configuration(directory, best).describe(baseline) if best else None,
        best_speedup=best.speedup if best else None,
        comparable_with_first=not why_not,
        why_not=why_not,
        verdict=recipe.evidence.verdict if recipe else None,
        claimed=recipe.evidence.speedup if recipe else None,
        recommended=Configuration(recipe.configuration) if recipe else None,
        recommended_changes=_recommended_changes(recipe) if recipe else None,
    )


def _recommended_changes(recipe: Recipe) -> str:
    return Configuration(recipe.configuration).describe(Configuration(recipe.baseline))


def _count_outcomes(trials: Sequence[TrialRecord]) -> dict[Outcome, int]:
    counts = Counter(record.outcome for record in trials)
    return {outcome: counts[outcome] for outcome in Outcome if counts[outcome]}


def _configuration(directory: RunDirectory, record: TrialRecord) -> Configuration:
    file = directory.trial_directory(record.trial) / "result.json"
    return check_configuration(record.configuration, file, "configuration")


def _baseline(directory: RunDirectory, run: RunRecord, trials: Sequence[TrialRecord]) -> Configuration | None:
    """The run's baseline; its first baseline trial's configuration where run.json does not say."""
    if run.baseline is not None:
        return check_configuration(run.baseline, directory.path / "run.json", "baseline")
    tried = [record for record in trials if record.phase is Phase.BASELINE]
    return _configuration(directory, tried[0]) if tried else None


def _baseline_throughput(trials: Sequence[TrialRecord]) -> Interval | None:
    """The first figure that a baseline trial has; a baseline that was begun anew has several."""
    measured = (record.throughput for record in trials if record.phase is Phase.BASELINE)
    return next((throughput for throughput in measured if throughput is not None), None)


def _best(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """The trial with the highest speed-up in the search; the earlier one of two that are as fast."""
    speeds = [
        (record.speedup.value, record)
        for record in trials
        if record.outcome is Outcome.OK and record.phase is Phase.SEARCH and record.speedup is not None
    ]
    return max(speeds, key=lambda each: each[0])[1] if speeds else None


def _why_not(first: RunRecord, other: RunRecord) -> str:
    """Why the speeds of `other` may not be set against those of `first`; empty when they may."""
    reasons = []
    if lines := first.machine.differences(other.machine):
        reasons.append(f"another machine ({'; '.join(lines)})")
    if first.workload is None or other.workload is None:
        reasons.append("the workload of one of the runs is not known")
    elif first.workload.name != other.workload.name:
        reasons.append(f"another workload ({other.workload.name}, not {first.workload.name})")
    elif first.workload.fingerprint != other.workload.fingerprint:
        reasons.append("the workload's code has changed")
    # A speed-up says nothing without what it is relative to. A run that ended early has no baseline.
    elif first.baseline and other.baseline and first.baseline != other.baseline:
        reasons.append("another baseline")
    return ", ".join(reasons)


def describe_machine(machine: Machine) -> str:
    """`Intel Xeon × 8 cores, 2 × NVIDIA H200`: processor, cores and GPUs in words."""
    cores = f"{machine.cores} core{'' if machine.cores == 1 else 's'}"
    gpus = Counter(gpu.name for gpu in machine.gpus)
    return ", ".join(
        [
            f"{machine.cpu} × {cores}",
            *(f"{count} × {name}" if count > 1 else name for name, count in gpus.items()),
        ]
    )
