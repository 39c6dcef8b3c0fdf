"""A run as one self-contained page, `report.html`. It shows other people's text as text.

The page is a fixed document with the run's data in it as JSON; what it shows is drawn from that by the page itself.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from autotune.data.errors import AutotuneError, RunDirectoryError
from autotune.data.facts import describe_machine
from autotune.data.files import write_atomically
from autotune.data.printable import one_line
from autotune.data.record import Phase, TrialRecord, baseline_with_ceilings
from autotune.data.run_directory import RunDirectory, RunRecord, left_out
from autotune.recipe.advice import advice, usage, verdict_in_words
from autotune.recipe.answers import NOT_PROMISED
from autotune.recipe.recipe import Recipe
from autotune.report.compare import chosen_trial
from autotune.report.effects import effects_in
from autotune.report.loss_charts import loss_charts
from autotune.space.configuration import Configuration, baseline_of, format_value, read_trials
from autotune.stats.disturbance import gpu_figures

T = TypeVar("T")
NAME = "report.html"
TEMPLATE = Path(__file__).with_name("report.html")
LONGEST_LOG = 2000
_OF_SIDE = {
    *("trial", "throughput", "peak_host_bytes", "peak_device_bytes", "compile_seconds", "first_step_seconds"),
    *("input_wait_fraction", "outside_fraction", "bottleneck", "ceilings"),
}
_OF_TRIAL = {"trial", "phase", "outcome", "ended_at_seconds", "speedup", "throughput"}


def write_page(path: str | Path) -> Path:
    """Write a run's `report.html`, whatever is there of the run.

    Args:
        path: The run directory.

    Returns:
        The page's file, in the run directory.

    Raises:
        RunDirectoryError: There is no run, or the page cannot be written.
    """
    directory = RunDirectory(path)
    data = json.dumps(page_data(directory), allow_nan=False).replace("<", "\\u003c")
    text = TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/null", data)
    write_atomically(directory.path / NAME, text)
    return directory.path / NAME


def page_data(directory: RunDirectory) -> dict[str, Any]:
    """Return what the page shows, as JSON can hold it. Raises RunDirectoryError where there is no run.json to read."""
    missing: list[str] = []

    def read(name: str, how: Callable[[], T], otherwise: T) -> T:
        try:
            return how()
        except (AutotuneError, OSError) as error:
            missing.append(f"{name}: {one_line(error)}")
            return otherwise

    run = directory.read_run()

    damaged: list[RunDirectoryError] = []
    found: list[TrialRecord] = read("trials", lambda: [*map(_keep_one_pair, read_trials(directory, damaged))], [])
    if damaged:
        missing.append(f"trials: {left_out(damaged)}")
    records = sorted(found, key=lambda record: record.trial)
    recipe: Recipe | None = None
    if directory.recipe_file.exists():
        recipe = read("recipe", lambda: Recipe.load(directory.recipe_file), None)
    else:
        missing.append("recipe: the run has not ended, or was cut off")
    baseline = read("baseline", lambda: baseline_of(directory, run, records), None)
    effects: list[dict[str, Any]] = read("effects of knobs", lambda: effects_in(directory, records), [])
    effects.sort(key=lambda row: -abs(math.log(row["effect"])))
    charts: list[dict[str, Any]] = read("learning", lambda: loss_charts(records, baseline), [])
    chosen = None if recipe is None else chosen_trial(recipe, records)
    first = baseline_with_ceilings(records)
    sides = [record for record in (first, chosen) if record is not None]
    script = run.workload.script if run.workload is not None else None
    return {
        "title": one_line(run.workload.name if run.workload else run.run),
        "run": one_line(run.run),
        "started": run.started_at,
        "ratio": "samples per joule" if run.arguments.get("objective") == "energy" else "speed-up",
        "missing": missing,
        "answer": _answer(recipe, run, directory.recipe_file),
        "advice": [] if first is None else advice(first, chosen, script),
        "sides": [
            {**side.model_dump(mode="json", include=_OF_SIDE), **gpu_figures(side), **rate}
            for side, rate in zip(sides, _rates(recipe), strict=False)
        ],
        "trials": [_trial(record, baseline) for record in records],
        "learning": {"charts": charts, "not_promised": NOT_PROMISED},
        "effects": effects,
        "profiles": [{"trial": side.trial, **side.profile.model_dump()} for side in sides if side.profile is not None],
        "machine": _machine(run),
    }


def _rates(recipe: Recipe | None) -> list[dict[str, Any]]:
    """Return the throughputs of baseline and recommendation in the claim; without a claim the records' own stand."""
    if recipe is None or not recipe.changes:
        return [{}, {}]
    both = recipe.evidence.baseline_throughput, recipe.evidence.throughput
    return [{"throughput": rate.model_dump()} for rate in both]


def _answer(recipe: Recipe | None, run: RunRecord, file: Path) -> dict[str, Any]:
    """Return the verdict, what to change, and how to use it."""
    if recipe is None:
        nothing: dict[str, Any] = dict.fromkeys(("answers", "changes", "use", "not_checked"), ())
        return {"verdict": "none", "headline": "This run has no recipe.", **nothing}
    name = run.workload.reference if run.workload is not None else ""
    use = usage(recipe, file, name)
    if recipe.workload.script is not None:
        use.append(f"autotune show {shlex.quote(str(file))} --diff {shlex.quote(name)}")
    return {
        "verdict": recipe.evidence.verdict.value,
        "headline": verdict_in_words(recipe),
        "answers": [(heading, one_line(text)) for heading, text in recipe.answers],
        "changes": [
            (knob, format_value(recipe.baseline[knob]), format_value(value)) for knob, value in recipe.changes.items()
        ],
        "use": [one_line(line) for line in use] if recipe.changes else [],
        "not_checked": [one_line(gap) for gap in recipe.evidence.stability.not_checked],
    }


def _keep_one_pair(record: TrialRecord) -> TrialRecord:
    """Keep one pair of a search's slices: those of a thousand trials take hundreds of megabytes."""
    return record.model_copy(update={"pairs": record.pairs[:1]}) if record.phase is Phase.SEARCH else record


def _trial(record: TrialRecord, baseline: Configuration | None) -> dict[str, Any]:
    return {
        **record.model_dump(mode="json", include=_OF_TRIAL),
        "bottleneck": "" if record.bottleneck is None else record.bottleneck.name,
        "changes": Configuration(record.configuration).describe(relative_to=baseline),
        "reason": one_line(record.reason),
        "log": "" if record.outcome.measured else record.log_tail[-LONGEST_LOG:],
    }


def _machine(run: RunRecord) -> list[list[str]]:
    machine = run.machine
    rows: Mapping[str, str | None] = {
        "machine": describe_machine(machine),
        "memory": f"{machine.memory_bytes / 2**30:.0f} GiB",
        "system": machine.platform,
        "Python": machine.python,
        **machine.packages,
        "driver": machine.driver,
        "CUDA": machine.cuda,
        "workload": run.workload.reference if run.workload is not None else None,
    }
    return [[one_line(name), one_line(value)] for name, value in rows.items() if value]


def try_write_page(path: Path) -> str:
    """Write the page; return why that failed, or an empty string: it fails no run."""
    try:
        write_page(path)
    except (RunDirectoryError, OSError, ValueError) as error:
        return f"report.html was not written: {one_line(error)}"
    return ""
