"""Compare runs and recipes: what each found, on which machine, and whether their speeds may be compared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from autotune.data.facts import Machine
from autotune.data.models import KnobValue
from autotune.data.printable import one_line
from autotune.data.run_directory import Paths, RunDirectory, find_runs
from autotune.recipe.recipe import Recipe, holds_recipes, read_recipes
from autotune.report.history import FLOAT, INTEGER, STRING, table, typed
from autotune.space.configuration import Configuration

COLUMNS = (
    typed(STRING, "run workload machine verdict headline")
    | typed(FLOAT, "claim low high throughput baseline_throughput")
    | typed(STRING, "recommended limited_by")
    | typed(INTEGER, "trials")
    | typed(STRING, "differs")
)


class _Compared(NamedTuple):
    """A row of the table, and what must agree where speeds are compared; None is what is not known."""

    row: dict[str, object]
    machine: Machine
    objective: object
    workload: str | None
    fingerprint: str | None
    baseline: Mapping[str, KnobValue] | None


def compare(*runs: Paths) -> pd.DataFrame:
    """Compare runs and recipes: what each found on which machine, and whether their speeds may be compared.

    Args:
        runs: Run directories, or directories that hold some at any depth, such as `results`; recipe files, and
            folders of them. Also as one list.

    Returns:
        A row for each run, in the order of the arguments, those found below one by path; then a row for each recipe
        file; of a folder of recipes, the newest of each kind of machine. `claim` is the speed-up over the run's own
        baseline with its interval `low` to `high`, of what `headline` says; `throughput` is the recommended
        configuration's, in samples per second, and `baseline_throughput` the baseline's; `limited_by` is what limits
        the baseline. `recommended` is told by its changes to the run's baseline.
        `differs` says why a row's speeds may not be compared with the first row's; it is empty where they may. What a
        run without a recipe lacks is NA.

    Raises:
        RunDirectoryError: Nothing was given, no run was found at a path, or a file there is damaged.
        RecipeError: A recipe cannot be read.
    """
    paths = [Path(path) for given in runs for path in ([given] if isinstance(given, str | os.PathLike) else given)]
    of_recipes = [path for path in paths if holds_recipes(path)]
    of_runs = [path for path in paths if path not in of_recipes]
    found = [_read_run(directory) for directory in (find_runs(of_runs) if of_runs or not of_recipes else ())]
    found += [_of_recipe(recipe, recipe.created_by.run) for path in of_recipes for recipe in read_recipes(path).recipes]
    return table([other.row | {"differs": _differences(found[0], other)} for other in found], COLUMNS)


def _read_run(directory: RunDirectory) -> _Compared:
    run = directory.read_run()
    if os.path.exists(directory.recipe_file):
        return _of_recipe(Recipe.load(directory.recipe_file), directory.label)
    name = None if run.workload is None else run.workload.name
    row: dict[str, object] = {
        "run": directory.label,
        "workload": None if name is None else one_line(name),
        "machine": one_line(run.machine.describe()),
        "trials": len(directory.trial_numbers("result.json")),
    }
    objective = run.arguments.get("objective", "throughput")
    fingerprint = None if run.workload is None else run.workload.fingerprint
    return _Compared(row, run.machine, objective, name, fingerprint, run.baseline)


def _of_recipe(recipe: Recipe, label: str) -> _Compared:
    evidence, workload, answer = recipe.evidence, recipe.workload, recipe.answer
    row: dict[str, object] = {
        "run": one_line(label),
        "workload": one_line(workload.name),
        "machine": one_line(recipe.machine.describe()),
        "verdict": str(evidence.verdict),
        "headline": one_line(answer.headline),
        "claim": answer.speedup.value,
        "low": answer.speedup.low,
        "high": answer.speedup.high,
        "throughput": answer.after.throughput.value,
        "baseline_throughput": answer.baseline.throughput.value,
        "recommended": Configuration(recipe.configuration).describe(Configuration(recipe.baseline)),
        "limited_by": evidence.baseline_limited_by,
        "trials": recipe.created_by.trials,
    }
    return _Compared(row, recipe.machine, evidence.objective, workload.name, workload.fingerprint, recipe.baseline)


def _differences(first: _Compared, other: _Compared) -> str:
    """Say why the speeds of `other` may not be compared with those of `first`; empty where they may."""
    reasons = []
    if unlike := first.machine.unlike_facts(other.machine):
        facts = "; ".join(f"{label}: {found}, not {before}" for label, before, found in unlike)
        reasons.append(f"another machine ({facts})")
    if first.objective != other.objective:
        reasons.append(f"another objective ({other.objective}, not {first.objective})")
    if other is first:
        pass
    elif first.workload is None or other.workload is None:
        reasons.append("the workload of one of the runs is not known")
    elif first.workload != other.workload:
        reasons.append(f"another workload ({other.workload}, not {first.workload})")
    elif first.fingerprint != other.fingerprint:
        reasons.append("the workload's code has changed")
    # A speed-up says nothing without what it is relative to. A run that ended early has no baseline.
    elif first.baseline and other.baseline and first.baseline != other.baseline:
        reasons.append("another baseline")
    return ", ".join(reasons)
