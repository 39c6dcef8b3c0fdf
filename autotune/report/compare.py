"""Compare runs: how each one ended, which machine it ran on, and which recipe to use, as a table in pandas."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pandas as pd

from autotune.data.printable import one_line
from autotune.data.record import Outcome, Phase, TrialRecord, baseline_trial
from autotune.data.run_directory import RunDirectory, RunRecord, parse_utc
from autotune.data.runs_on_disk import Paths, find_runs
from autotune.recipe.recipe import Recipe
from autotune.report.history import BOOLEAN, FLOAT, INTEGER, STRING, TIME, table, typed
from autotune.space.configuration import Configuration, baseline_of, read_trials, trial_configuration

# Outcomes that say nothing against the configuration: nothing ran, or the user ended it.
_NO_FAILURE = frozenset({Outcome.OK, Outcome.PRUNED, Outcome.INFERRED_OOM, Outcome.INTERRUPTED})
COLUMNS = (
    typed(STRING, "run workload machine")
    | typed(TIME, "started_at")
    | typed(STRING, "verdict")
    | typed(FLOAT, "claim low high throughput")
    | typed(STRING, "recommended limited_by then_by differs")
    | typed(BOOLEAN, "use")
    | typed(STRING, "machine_id")
    | typed(INTEGER, "trials failed")
    | typed(STRING, "best")
)


def compare(*runs: Paths) -> pd.DataFrame:
    """Set runs side by side: what each found on which machine, and which recipe to use where.

    Args:
        runs: Run directories, or directories that hold some at any depth, such as `results`; also as one list.

    Returns:
        A row for each run, in the order of the arguments, those found below one by path. `trials` ended in any way;
        `failed` ran and failed. `best` is the trial that looks best in the search, where the luckiest one does. `claim`
        is the speed-up over the run's own baseline, with its interval `low` to `high`; `throughput` is the recommended
        configuration's, in samples per second, as the claim has it; `limited_by` is the baseline's bottleneck and
        `then_by` the recommendation's. `differs` says why a run's speeds may not be set against the first run's. `use`
        is true for the run whose recipe is the fastest of its workload on its kind of machine. Configurations are told
        by their changes to the run's baseline; what a run without a recipe lacks is NA.

    Raises:
        RunDirectoryError: Nothing was given, no run was found at a path, or a file there is damaged.
        RecipeError: A run's recipe cannot be read: to take it for missing would hide a verdict.
    """
    directories = find_runs(*runs)
    records = [directory.read_run() for directory in directories]
    rows = [_row(directory, record, records[0]) for directory, record in zip(directories, records, strict=True)]
    frame = table(rows, COLUMNS)
    known = frame[frame["throughput"].notna()]
    fastest = known.groupby(["workload", "machine_id"], dropna=False)["throughput"].idxmax()
    return frame.assign(use=pd.Series(frame.index.isin(fastest), dtype=BOOLEAN))


def _row(directory: RunDirectory, run: RunRecord, first: RunRecord) -> dict[str, object]:
    """Return how one run ended."""
    trials = sorted(read_trials(directory), key=lambda record: record.trial)
    baseline = baseline_of(directory, run, trials)
    searched = [trial for trial in trials if trial.outcome is Outcome.OK and trial.phase is Phase.SEARCH]
    best = max(
        (trial for trial in searched if trial.speedup is not None),
        key=lambda trial: trial.speedup.value if trial.speedup else 0.0,
        default=None,
    )
    beside = baseline_trial(trials)
    return {
        "run": directory.label,
        "workload": one_line(run.workload.name) if run.workload else None,
        "machine": run.machine.describe(),
        "machine_id": run.machine.id,
        "started_at": parse_utc(run.started_at, directory.path / "run.json"),
        "trials": len(trials),
        "failed": sum(trial.outcome not in _NO_FAILURE for trial in trials),
        "best": trial_configuration(directory, best).describe(baseline) if best else None,
        "differs": "" if run is first else _differences(first, run),
        "limited_by": beside.bottleneck.name if beside is not None and beside.bottleneck is not None else None,
        **(_recipe_columns(directory, trials) if os.path.exists(directory.recipe_file) else {}),
    }


def _recipe_columns(directory: RunDirectory, trials: Sequence[TrialRecord]) -> dict[str, object]:
    """Return what a run's recipe claims and recommends."""
    recipe = Recipe.load(directory.recipe_file)
    chosen, evidence = chosen_trial(recipe, trials), recipe.evidence
    return {
        "verdict": str(evidence.verdict),
        "claim": evidence.speedup.value,
        "low": evidence.speedup.low,
        "high": evidence.speedup.high,
        "throughput": evidence.throughput.value,
        "recommended": Configuration(recipe.configuration).describe(Configuration(recipe.baseline)),
        "then_by": chosen.bottleneck.name if chosen is not None and chosen.bottleneck is not None else None,
    }


def _differences(first: RunRecord, other: RunRecord) -> str:
    """Say why the speeds of `other` may not be set against those of `first`; empty where they may."""
    reasons = []
    if lines := first.machine.differences(other.machine):
        reasons.append(f"another machine ({'; '.join(lines)})")
    objectives = [run.arguments.get("objective", "throughput") for run in (first, other)]
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


def chosen_trial(recipe: Recipe, records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the trial that the recipe's claim is from; None if the recipe is the baseline."""
    wanted = recipe.configuration if recipe.changes else None
    same = [
        record
        for record in records
        if record.phase is Phase.CONFIRM and record.pairs and record.configuration == wanted
    ]
    claimed = [record for record in same if record.speedup == recipe.evidence.speedup]
    return (claimed or same)[-1] if same else None
