"""How did each run end: one summary per run, to be set side by side; and the same as a table in pandas."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.devices.machine import Machine
from autotune.recipe.recipe import Recipe
from autotune.record import Outcome, Phase, TrialRecord
from autotune.report.runs import baseline_of, find_runs, parse_utc, trial_configuration
from autotune.run_directory import RunDirectory, RunRecord
from autotune.space.configuration import Configuration
from autotune.stats.deciding import Verdict
from autotune.stats.intervals import Interval

if TYPE_CHECKING:
    import pandas as pd

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
    recommended_throughput: float | None = None  # samples per second, as the claim has it
    limited_by: str | None = None  # the baseline's bottleneck
    then_by: str | None = None  # the recommendation's

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


def compare(*runs: str | Path) -> pd.DataFrame:
    """Runs side by side: what each found on which machine, and which recipe to use where.

    Args:
        runs: Run directories, or directories that hold some at any depth, such as `results`.

    Returns:
        A row for each run, in the order of the arguments. `claim` is the speed-up over the run's own baseline, with
        its interval `low` to `high`; `throughput` is the recommended configuration's, in samples per second, as the
        claim has it; `limited_by` is the baseline's bottleneck and `then_by` the recommendation's. `differs` says why
        a run's speeds may not be set against the first run's. `use` is true for the run whose recipe is the fastest
        of its workload on its kind of machine.

    Raises:
        RunDirectoryError: Nothing was given, no run was found at a path, or a file there is damaged.
        RecipeError: A run's recipe cannot be read.
    """
    import pandas as pd

    summaries = compare_runs(*runs)
    best: dict[tuple[str | None, str], tuple[float, str]] = {}
    for each in summaries:
        if each.recommended_throughput is not None:
            rated = (each.recommended_throughput, each.run)
            best[each.workload, each.machine] = max(best.get((each.workload, each.machine), rated), rated)
    text, number = pd.StringDtype(), pd.Float64Dtype()
    columns: dict[str, tuple[list[object], Any]] = {
        "run": ([each.run for each in summaries], text),
        "workload": ([each.workload for each in summaries], text),
        "machine": ([each.machine_description for each in summaries], text),
        "started_at": ([each.started_at for each in summaries], pd.DatetimeTZDtype("us", "UTC")),
        "verdict": ([each.verdict and str(each.verdict) for each in summaries], text),
        "claim": ([each.claimed and each.claimed.value for each in summaries], number),
        "low": ([each.claimed and each.claimed.low for each in summaries], number),
        "high": ([each.claimed and each.claimed.high for each in summaries], number),
        "throughput": ([each.recommended_throughput for each in summaries], number),
        "recommended": ([each.recommended_changes for each in summaries], text),
        "limited_by": ([each.limited_by for each in summaries], text),
        "then_by": ([each.then_by for each in summaries], text),
        "differs": ([each.why_not for each in summaries], text),
        "use": (
            [best.get((each.workload, each.machine), (0, ""))[1] == each.run for each in summaries],
            pd.BooleanDtype(),
        ),
    }
    return pd.DataFrame({name: pd.Series(values, dtype=dtype) for name, (values, dtype) in columns.items()})


def _summary(directory: RunDirectory, run: RunRecord, why_not: str) -> RunSummary:
    trials = sorted(directory.read_trials(), key=lambda record: record.trial)
    counts = Counter(record.outcome for record in trials)
    baseline = baseline_of(directory, run, trials)
    best = _best(trials)
    limits = [each.bottleneck.name if each.bottleneck else None for each in trials[:1]]
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
        recommended_throughput=recipe.evidence.throughput.value if recipe else None,
        limited_by=limits[0] if limits else None,
        then_by=_then_by(trials) if recipe and recipe.changes else None,
    )


def _then_by(trials: Sequence[TrialRecord]) -> str | None:
    """What limits the leader that was confirmed last."""
    confirmed = [each for each in trials if each.phase is Phase.CONFIRM and each.pairs and each.bottleneck]
    return confirmed[-1].bottleneck.name if confirmed and confirmed[-1].bottleneck else None


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
