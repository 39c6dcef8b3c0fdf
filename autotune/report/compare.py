"""How did each run end: one summary per run, to be set side by side; and the same as a table in pandas."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.data.figures import Interval
from autotune.data.hardware import Machine, gpu_names
from autotune.data.record import Outcome, Phase, TrialRecord, baseline_trial
from autotune.data.run_directory import RunDirectory, RunRecord, parse_utc
from autotune.recipe.recipe import Recipe
from autotune.report.runs import baseline_of, find_runs
from autotune.space.configuration import Configuration, read_trials, trial_configuration
from autotune.stats.deciding import Verdict

if TYPE_CHECKING:
    import pandas as pd

# Outcomes that say nothing against the configuration: nothing ran, or the user ended it.
_NO_FAILURE = frozenset({Outcome.OK, Outcome.PRUNED, Outcome.INFERRED_OOM, Outcome.INTERRUPTED})


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """How one run ended. Speed-ups are over the run's own baseline; changes are relative to it, as text."""

    run: str
    workload: str | None  # None when the run ended before its name was known
    machine: str  # in words
    machine_id: str
    started_at: datetime  # UTC
    trials: int  # those that have finished, in whatever way
    failed: int  # that ran and failed: not those that were interrupted, or never run
    best: str | None  # the changes of the trial that looks best in the search, where the luckiest one does
    differs: str  # why its figures cannot be set against those of the first run; empty when they can
    limited_by: str | None  # the baseline's bottleneck
    # The rest is None until the run has a recipe.
    verdict: Verdict | None = None
    claimed: Interval | None = None
    throughput: float | None = None  # samples per second of what is recommended, as the claim has it
    recommended: str | None = None  # its changes
    then_by: str | None = None  # its bottleneck


def compare_runs(*runs: str | Path) -> tuple[RunSummary, ...]:
    """One summary per run, in the order of the arguments, those found below one by path; see `compare`."""
    directories = find_runs(*runs)
    records = [directory.read_run() for directory in directories]
    return tuple(_summary(*each, first=records[0]) for each in zip(directories, records, strict=True))


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
        RecipeError: A run's recipe cannot be read: taking it for missing would hide a verdict.
    """
    from autotune.report.history import BOOLEAN, FLOAT, STRING, TIME, table, typed

    summaries = compare_runs(*runs)
    rated = sorted(summaries, key=lambda each: (each.throughput or 0.0, each.run))
    fastest = {(each.workload, each.machine_id): each.run for each in rated if each.throughput is not None}
    rows = [
        {
            **vars(each),
            **(each.claimed.model_dump() if each.claimed else {}),
            "claim": each.claimed.value if each.claimed else None,
            "use": fastest.get((each.workload, each.machine_id)) == each.run,
        }
        for each in summaries
    ]
    before, after = typed(STRING, "run workload machine"), typed(STRING, "recommended limited_by then_by differs")
    figures = typed(TIME, "started_at") | typed(STRING, "verdict") | typed(FLOAT, "claim low high throughput")
    return table(rows, before | figures | after | typed(BOOLEAN, "use"))


def _summary(directory: RunDirectory, run: RunRecord, *, first: RunRecord) -> RunSummary:
    trials = sorted(read_trials(directory), key=lambda record: record.trial)
    baseline = baseline_of(directory, run, trials)
    searched = [each for each in trials if each.outcome is Outcome.OK and each.phase is Phase.SEARCH and each.speedup]
    best = max(searched, key=lambda each: each.speedup.value if each.speedup else 0.0, default=None)
    searched_beside = baseline_trial(trials)
    limited = None if searched_beside is None else searched_beside.bottleneck
    recipe = Recipe.load(directory.recipe_file) if os.path.exists(directory.recipe_file) else None
    of_recipe: dict[str, Any] = {}
    if recipe is not None:
        chosen = chosen_trial(recipe, trials)
        of_recipe = {
            "verdict": recipe.evidence.verdict,
            "claimed": recipe.evidence.speedup,
            "throughput": recipe.evidence.throughput.value,
            "recommended": Configuration(recipe.configuration).describe(Configuration(recipe.baseline)),
            "then_by": chosen.bottleneck.name if chosen and chosen.bottleneck else None,
        }
    return RunSummary(
        run=run.run,
        workload=run.workload.name if run.workload else None,
        machine=describe_machine(run.machine),
        machine_id=run.machine.id,
        started_at=parse_utc(run.started_at, directory.path / "run.json"),
        trials=len(trials),
        failed=sum(each.outcome not in _NO_FAILURE for each in trials),
        best=trial_configuration(directory, best).describe(baseline) if best else None,
        differs="" if run is first else _differs(first, run),
        limited_by=limited.name if limited is not None else None,
        **of_recipe,
    )


def _differs(first: RunRecord, other: RunRecord) -> str:
    """Why the speeds of `other` may not be set against those of `first`; empty when they may."""
    reasons = []
    if lines := first.machine.differences(other.machine):
        reasons.append(f"another machine ({'; '.join(lines)})")
    objectives = [each.arguments.get("objective", "throughput") for each in (first, other)]
    if objectives[0] != objectives[1]:
        reasons.append(f"another objective ({objectives[1]}, not {objectives[0]})")
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
    return ", ".join(filter(None, [f"{machine.cpu} × {cores}", gpu_names(machine.gpus)]))


def chosen_trial(recipe: Recipe, records: Sequence[TrialRecord]) -> TrialRecord | None:
    """The trial that the recipe's claim is from; None where it is the baseline."""
    wanted = recipe.configuration if recipe.changes else None
    same = [each for each in records if each.phase is Phase.CONFIRM and each.pairs and each.configuration == wanted]
    claimed = [each for each in same if each.speedup == recipe.evidence.speedup]
    return (claimed or same)[-1] if same else None
