"""Compare runs: how each one ended, which machine it ran on, and which recipe to use, as a table in pandas."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from autotune.data.errors import RunDirectoryError
from autotune.data.facts import Machine
from autotune.data.models import KnobValue
from autotune.data.printable import one_line
from autotune.data.record import Outcome, Phase, TrialRecord, baseline_with_ceilings
from autotune.data.run_directory import RunDirectory, parse_utc
from autotune.data.runs_on_disk import Paths, find_runs
from autotune.recipe.book import read_book
from autotune.recipe.recipe import Recipe
from autotune.report.history import BOOLEAN, FLOAT, INTEGER, STRING, TIME, table, typed
from autotune.report.machines import changes_of, shared_changes
from autotune.space.configuration import Configuration, baseline_of, read_trials
from autotune.stats.deciding import Verdict

# Outcomes that say nothing against the configuration: nothing ran, or the user ended it.
_NO_FAILURE = frozenset({Outcome.OK, Outcome.PRUNED, Outcome.INFERRED_OOM, Outcome.INTERRUPTED})
COLUMNS = (
    typed(STRING, "run workload machine")
    | typed(TIME, "started_at")
    | typed(STRING, "verdict")
    | typed(FLOAT, "claim low high throughput")
    | typed(STRING, "recommended on_all_machines on_some_machines limited_by then_by differs")
    | typed(BOOLEAN, "use")
    | typed(STRING, "machine_id")
    | typed(INTEGER, "trials failed")
    | typed(STRING, "best")
)


class _Measured(NamedTuple):
    """What must agree where speeds are compared; None is what is not known."""

    machine: Machine
    objective: object
    workload: str | None
    fingerprint: str | None
    baseline: Mapping[str, KnobValue] | None


class _Entry(NamedTuple):
    """A row of the table, with its recipe."""

    row: dict[str, object]
    measured: _Measured
    recipe: Recipe | None


def compare(*runs: Paths) -> pd.DataFrame:
    """Set runs side by side: what each found on which machine, and which recipe to use where.

    Args:
        runs: Run directories, or directories that hold some at any depth, such as `results`; recipes and books. Also as
            one list.

    Returns:
        A row for each run, in the order of the arguments, those found below one by path; then a row for each recipe of
        the files. `trials` ended in any way; `failed` ran and failed. `best` is the trial that looks best in the
        search, where the luckiest one does. `claim` is the speed-up over the run's own baseline, with its interval
        `low` to `high`; `throughput` is the recommended configuration's, in samples per second, as the claim has it;
        `limited_by` is the baseline's bottleneck and `then_by` the recommendation's. `differs` says why a run's speeds
        may not be set against the first run's. `use` is true for the run whose recipe is the fastest of its workload on
        its kind of machine, of those with the verdict `faster`. Configurations are told by their changes to the run's
        baseline. `on_all_machines` are the changes that each kind of machine has of those that recommend any for the
        workload, and `on_some_machines` the run's other ones; NA if fewer than two kinds do. What a run without a
        recipe lacks is NA.

    Raises:
        RunDirectoryError: Nothing was given, no run was found at a path, or a file there is damaged.
        RecipeError: A recipe cannot be read: to take it for missing would hide a verdict.
    """
    paths = [path for given in runs for path in ([given] if isinstance(given, str | os.PathLike) else given)]
    files = [Path(path) for path in paths if os.path.isfile(path)]
    folders = [path for path in paths if not os.path.isfile(path)]
    entries = [_entry_of_run(directory) for directory in (find_runs(folders) if folders or not files else ())]
    entries += [_entry_of_recipe(recipe) for file in files for recipe in read_book(file).recipes]
    rows = [entry.row | {"differs": _differences(entries[0].measured, entry.measured)} for entry in entries]
    frame = table([row | transfer for row, transfer in zip(rows, _transfers(entries), strict=True)], COLUMNS)
    faster = frame[frame["verdict"].eq(str(Verdict.FASTER)).fillna(False)]
    fastest = faster.groupby(["workload", "machine_id"], dropna=False)["throughput"].idxmax()
    return frame.assign(use=pd.Series(frame.index.isin(fastest), dtype=BOOLEAN))


def _entry_of_run(directory: RunDirectory) -> _Entry:
    run = directory.read_run()
    trials = sorted(read_trials(directory), key=lambda record: record.trial)
    baseline = baseline_of(directory, run, trials)
    searched = [trial for trial in trials if trial.outcome is Outcome.OK and trial.phase is Phase.SEARCH]
    best = max(
        (trial for trial in searched if trial.speedup is not None),
        key=lambda trial: trial.speedup.value if trial.speedup else 0.0,
        default=None,
    )
    beside = baseline_with_ceilings(trials)
    recipe = Recipe.load(directory.recipe_file) if os.path.exists(directory.recipe_file) else None
    chosen = None if recipe is None else chosen_trial(recipe, trials)
    row: dict[str, object] = {
        "run": directory.label,
        "workload": one_line(run.workload.name) if run.workload else None,
        "machine": run.machine.describe(),
        "machine_id": run.machine.id,
        "started_at": parse_utc(run.started_at, directory.path / "run.json"),
        "trials": len(trials),
        "failed": sum(trial.outcome not in _NO_FAILURE for trial in trials),
        "best": Configuration(best.configuration).describe(baseline) if best else None,
        "limited_by": beside.bottleneck.name if beside is not None and beside.bottleneck is not None else None,
        "then_by": chosen.bottleneck.name if chosen is not None and chosen.bottleneck is not None else None,
        **({} if recipe is None else _recipe_columns(recipe)),
    }
    measured = _Measured(
        machine=run.machine,
        objective=run.arguments.get("objective", "throughput"),
        workload=None if run.workload is None else run.workload.name,
        fingerprint=None if run.workload is None else run.workload.fingerprint,
        baseline=run.baseline,
    )
    return _Entry(row, measured, recipe)


def _entry_of_recipe(recipe: Recipe) -> _Entry:
    """Return what a recipe in a file or book says of its run."""
    created, workload = recipe.created_by, recipe.workload
    started_at: datetime | None = None
    with contextlib.suppress(RunDirectoryError):
        started_at = parse_utc(created.created_at, Path(created.run))
    row: dict[str, object] = {
        "run": one_line(created.run),
        "workload": one_line(workload.name),
        "machine": one_line(recipe.machine.describe()),
        "machine_id": recipe.machine.id,
        "started_at": started_at,
        "trials": created.trials,
        "limited_by": recipe.evidence.baseline_limited_by,
        "then_by": recipe.evidence.limited_by if recipe.changes else None,
        **_recipe_columns(recipe),
    }
    measured = _Measured(
        recipe.machine, recipe.evidence.objective, workload.name, workload.fingerprint, recipe.baseline
    )
    return _Entry(row, measured, recipe)


def _transfers(entries: Sequence[_Entry]) -> list[dict[str, object]]:
    """Return for each entry which of its changes all kinds of machine recommend for its workload, and which some do."""
    by_workload: dict[str | None, list[Recipe]] = defaultdict(list)
    for entry in entries:
        if entry.recipe is not None:
            by_workload[entry.measured.workload].append(entry.recipe)
    shared = {workload: shared_changes(recipes) for workload, recipes in by_workload.items()}
    columns: list[dict[str, object]] = []
    for entry in entries:
        everywhere = shared.get(entry.measured.workload)
        if entry.recipe is None or not entry.recipe.changes or everywhere is None:
            columns.append({})
            continue
        own = [change for change in changes_of(entry.recipe) if change not in everywhere]
        columns.append({"on_all_machines": " ".join(everywhere), "on_some_machines": " ".join(own)})
    return columns


def _recipe_columns(recipe: Recipe) -> dict[str, object]:
    evidence = recipe.evidence
    return {
        "verdict": str(evidence.verdict),
        "claim": evidence.speedup.value,
        "low": evidence.speedup.low,
        "high": evidence.speedup.high,
        "throughput": evidence.throughput.value,
        "recommended": Configuration(recipe.configuration).describe(Configuration(recipe.baseline)),
    }


def _differences(first: _Measured, other: _Measured) -> str:
    """Say why the speeds of `other` may not be set against those of `first`; empty where they may."""
    if other is first:
        return ""
    reasons = []
    if unlike := first.machine.unlike_facts(other.machine):
        facts = "; ".join(f"{label}: {found}, not {before}" for label, before, found in unlike)
        reasons.append(f"another machine ({facts})")
    if first.objective != other.objective:
        reasons.append(f"another objective ({other.objective}, not {first.objective})")
    if first.workload is None or other.workload is None:
        reasons.append("the workload of one of the runs is not known")
    elif first.workload != other.workload:
        reasons.append(f"another workload ({other.workload}, not {first.workload})")
    elif first.fingerprint != other.fingerprint:
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
