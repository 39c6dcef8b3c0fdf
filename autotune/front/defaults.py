"""Defaults of commands where no file is named: the newest run, a run's recipe, a recipe's script, the demo's."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.data.errors import ArgumentError, RunDirectoryError
from autotune.data.files import shipped_directory, write_atomically
from autotune.data.run_directory import RESULTS, RunDirectory, follow_latest, newest_runs
from autotune.front.console import note
from autotune.recipe.recipe import read_recipes, select_nearest

EXAMPLE = "train_shapes.py"


def run_or_newest(run: Path | None) -> Path:
    """Return the run directory that was given; else the newest one below `results`, and say which that is."""
    if run is not None:
        return follow_latest(run)
    newest = _newest()
    note(f"the newest run is {newest}")
    return newest


def runs_or_all(runs: list[Path] | None) -> list[Path]:
    """Return the runs that were given; else the directory of all results."""
    if runs:
        return runs
    _newest()  # there is one
    return [Path(RESULTS)]


def _newest() -> Path:
    found = newest_runs(Path(RESULTS), most=1)
    if not found:
        raise RunDirectoryError(
            f"no run was given, and {RESULTS}/ in this directory holds none",
            hint="Give a run directory, or change to the directory in which you ran `autotune tune`.",
        )
    return found[0].path


def script_of(path: Path, args: list[str] | None) -> tuple[str, list[str]]:
    """Return the script that the recipe at a path was tuned with, and these arguments; its own arguments when None.

    Raises:
        ArgumentError: No `run.json` beside the recipe names the script, or the recipe masks one of the arguments.
        RecipeError: The recipe cannot be read.
    """
    selection = select_nearest(read_recipes(path))
    recipe, recipe_file = selection.recipe, selection.path
    try:
        workload = RunDirectory(recipe_file.parent).read_run().workload
    except RunDirectoryError:
        workload = None
    if workload is None or workload.fingerprint != recipe.workload.fingerprint:
        raise ArgumentError(
            f"SCRIPT is missing: no run.json beside {recipe_file} names the script that the recipe was tuned with",
            hint=f"Name the script: autotune run {path} train.py",
        )
    return workload.reference, [*recipe.workload.arguments] if args is None else args


def copy_example() -> str:
    """Copy the demo's training to the current directory, unless it is there, and return its name.

    Raises:
        ArgumentError: Another file has its name.
        RunDirectoryError: The directory cannot be written.
    """
    source, copy = shipped_directory("examples") / EXAMPLE, Path(EXAMPLE)
    if not os.path.lexists(copy):  # nothing is written through a link that leads nowhere yet
        write_atomically(copy, source.read_bytes(), hint="Change to a directory that you may write to.")
    elif not copy.is_file() or copy.read_bytes() != source.read_bytes():
        raise ArgumentError(f"{EXAMPLE} is here already, and is not the demo's", hint="Change to another directory.")
    return EXAMPLE
