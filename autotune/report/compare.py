"""How did each run end: one summary per run, to be set side by side. No pandas here."""

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
from autotune.report.runs import baseline_of, find_runs, parse_utc, trial_configuration
from autotune.run_directory import RunDirectory, RunRecord
from autotune.space.configuration import Configuration
from autotune.stats.deciding import Verdict
from autotune.stats.intervals import Interval

# Outcomes that say nothing against the configuration: nothing ran, or the user ended it.
_NO_FAILURE = frozenset({Outcome.OK, Outcome.PRUNED, Outcome.INFERRED_OOM, Outcome.INTERRUPTED})


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """How one run ended.

    The `best_*` fields are of the search, where the luckiest trial looks best. `claimed` is what the run claims after
    it measured its finalists again. Speed-ups are over the run's own baseline; changes are relative to it, as text.
    """

    run: str
    path: Path  # the run directory, as it was given or found
    workload: str | None  # None when the run ended before its name was known
    machine: str  # its id
    machine_description: str
    started_at: datetime  # UTC
    trials: int  # those that have finished, in whatever way
    outcomes: Mapping[Outcome, int]  # without those that did not occur
    baseline_throughput: Interval | None  # samples per second
    best_trial: int | None
    best_changes: str | None
    best_speedup: Interval | None
    why_not: str  # why its figures cannot be set against those of the first run; empty when they can
    # The rest is None until the run has a recipe.
    verdict: Verdict | None
    claimed: Interval | None
    recommended: Configuration | None
    recommended_changes: str | None

    @property
    def comparable_with_first(self) -> bool:
        """Whether its speeds and speed-ups may be set against those of the first run."""
        return not self.why_not

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
    counts = Counter(record.outcome for record in trials)
    baseline = baseline_of(directory, run, trials)
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
        outcomes={outcome: counts[outcome] for outcome in Outcome if counts[outcome]},
        baseline_throughput=_baseline_throughput(trials),
        best_trial=best.trial if best else None,
        best_changes=trial_configuration(directory, best).describe(baseline) if best else None,
        best_speedup=best.speedup if best else None,
        why_not=why_not,
        verdict=recipe.evidence.verdict if recipe else None,
        claimed=recipe.evidence.speedup if recipe else None,
        recommended=Configuration(recipe.configuration) if recipe else None,
        recommended_changes=Configuration(recipe.configuration).describe(Configuration(recipe.baseline))
        if recipe
        else None,
    )


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
    counts = Counter(gpu.name for gpu in machine.gpus)
    gpus = (f"{count} × {name}" if count > 1 else name for name, count in counts.items())
    return ", ".join([f"{machine.cpu} × {cores}", *gpus])
