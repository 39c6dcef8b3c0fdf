"""A run as one self-contained page, `report.html`. It shows other people's text as text.

Text and tables are written into the page. Its charts are drawn by the page itself, from figures in it as JSON.
"""

from __future__ import annotations

import html
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from autotune.data.errors import AutotuneError, RunDirectoryError
from autotune.data.figures import Interval
from autotune.data.files import write_atomically
from autotune.data.printable import one_line, printable
from autotune.data.record import Outcome, Phase, TrialRecord, baseline_with_ceilings
from autotune.data.run_directory import RunDirectory, RunRecord, left_out
from autotune.data.run_options import to_repeat
from autotune.recipe.advice import advice, describe_candidate, learning_caveats, verdict_in_words
from autotune.recipe.answers import NOT_PROMISED
from autotune.recipe.next_steps import next_steps, resume_command
from autotune.recipe.recipe import Recipe
from autotune.recipe.waterfall import Step, waterfall
from autotune.report.compare import chosen_trial
from autotune.report.effects import effects_in
from autotune.report.loss_charts import loss_charts
from autotune.report.markup import to_html
from autotune.report.sections import MOST_EFFECTS, sections
from autotune.space.configuration import Configuration, baseline_of, format_value, read_trials
from autotune.stats.deciding import Verdict
from autotune.stats.disturbance import gpu_figures

T = TypeVar("T")
NAME = "report.html"
PARTS = Path(__file__).parent  # of the page: report.html, its style and its script
LONGEST_LOG = 2000
_OF_SIDE = {
    *("peak_host_bytes", "peak_device_bytes", "compile_seconds", "first_step_seconds", "input_wait_fraction"),
    *("outside_fraction", "bottleneck", "ceilings"),
}
_CHARTS = ("search", "effects", "waterfall", "learning")


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
    page = page_data(directory)
    drawn = {
        **{name: page[name] for name in _CHARTS},
        "effects": page["effects"][:MOST_EFFECTS],
        "waterfall": [_bar(step) for step in page["waterfall"]],
    }
    parts = {
        "TITLE": html.escape(f"{page['title']} · autotune"),
        "STYLE": (PARTS / "report.css").read_text(encoding="utf-8"),
        "BODY": to_html(sections(page)),
        "DATA": json.dumps(drawn, allow_nan=False).replace("<", "\\u003c"),
        "SCRIPT": (PARTS / "report.js").read_text(encoding="utf-8"),
    }
    skeleton = (PARTS / NAME).read_text(encoding="utf-8")
    # In one pass: what others have written may hold such a mark, too.
    text = re.sub(r"<!--([A-Z]+)-->", lambda mark: parts[mark[1]], skeleton)
    write_atomically(directory.path / NAME, text)
    return directory.path / NAME


def page_data(directory: RunDirectory) -> dict[str, Any]:
    """Return what the page shows, as finished figures. Raises RunDirectoryError where there is no run.json to read."""
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
        "started": f"{one_line(run.started_at)[:16].replace('T', ' ')} UTC",
        "tuned": _reference_of(run),
        "ratio": "samples per joule" if run.arguments.get("objective") == "energy" else "speed-up",
        "unit": "samples" if script is None else script.unit,
        "missing": missing,
        "answer": _unfinished(run, directory) if recipe is None else _answer(recipe, run, directory),
        "advice": [one_line(said) for said in ([] if first is None else advice(first, chosen, script))],
        "sides": [
            {**side.model_dump(include=_OF_SIDE), **gpu_figures(side), "throughput": throughput}
            for side, throughput in zip(sides, _rates(recipe, sides), strict=True)
        ],
        "waterfall": () if recipe is None else waterfall(recipe),
        "search": [_point(record, baseline) for record in records if record.speedup and record.ended_at_seconds],
        "trials": [_trial(record, baseline) for record in records],
        "learning": {"charts": charts, "not_promised": NOT_PROMISED},
        "effects": effects,
        "profiles": [(side.trial, side.profile) for side in sides if side.profile is not None],
        "machine": _machine(run),
    }


def _reference_of(run: RunRecord) -> str:
    """Return the workload as commands name it."""
    return one_line(shlex.quote(run.workload.reference)) if run.workload is not None else "SCRIPT"


def _rates(recipe: Recipe | None, sides: Sequence[TrialRecord]) -> list[Interval | None]:
    """Return the throughputs of baseline and recommendation in the claim; without a claim the records' own stand."""
    evidence = None if recipe is None or not recipe.changes else recipe.evidence
    if evidence is None:
        return [side.throughput for side in sides]
    claimed: list[Interval | None] = [evidence.baseline_throughput, evidence.throughput]
    return claimed[: len(sides)]


# ----------------------------------------------------------------------------------------------- the answer

_WORDS = {
    Verdict.FASTER: "Faster",
    Verdict.NO_SIGNIFICANT_GAIN: "No significant gain",
    Verdict.UNDECIDED: "Undecided",
    Verdict.UNSTABLE: "Unstable",
}


def _answer(recipe: Recipe, run: RunRecord, directory: RunDirectory) -> dict[str, Any]:
    """Return the verdict with its figure, both answers, what to change, and how to go on."""
    file, name = directory.recipe_file, _reference_of(run)
    reference = run.workload.reference if run.workload is not None else ""
    steps = next_steps(recipe, file, reference, to_repeat(directory.path))
    if recipe.workload.script is not None and recipe.changes:
        steps.append(("To make it permanent:", [f"autotune show {shlex.quote(str(file))} --diff {name}"]))
    best, caveats = recipe.candidate, learning_caveats(recipe)
    if not caveats and recipe.larger_batch is not None:
        caveats = [NOT_PROMISED]
    candidate = "" if best is None else describe_candidate(best, Configuration(recipe.baseline))
    return {
        "verdict": recipe.evidence.verdict.value,
        "word": _WORDS[recipe.evidence.verdict],
        "figure": _figure(recipe),
        "headline": one_line(verdict_in_words(recipe)),
        "candidate": one_line(candidate),
        "answers": [(heading, one_line(text)) for heading, text in recipe.answers],
        "caveats": [one_line(caveat) for caveat in caveats],
        "changes": [
            (knob, format_value(recipe.baseline[knob]), format_value(value)) for knob, value in recipe.changes.items()
        ],
        "steps": [(heading, [one_line(line) for line in lines]) for heading, lines in steps],
        "not_checked": [one_line(gap) for gap in recipe.evidence.stability.not_checked],
    }


def _figure(recipe: Recipe) -> tuple[str, str, str] | None:
    """Return the speed-up that was claimed, its interval, and what it is of; None without a claim."""
    evidence, rule = recipe.evidence, recipe.learning_rate_rule
    if evidence.verdict is not Verdict.FASTER:
        return None
    speedup, meaning = evidence.speedup, f"in {recipe.unit} per second"
    if evidence.objective == "energy":
        meaning = "less energy per sample"
    elif rule is not None and rule.same_loss is not None:
        speedup, meaning = rule.same_loss.speedup, "sooner to the same losses"
    bounds = f"{speedup.low:.2f} to {speedup.high:.2f} with 95% confidence"
    return f"×{speedup.value:.2f}", bounds, meaning


def _unfinished(run: RunRecord, directory: RunDirectory) -> dict[str, Any]:
    """Return how to continue a run without a recipe."""
    reference = run.workload.reference if run.workload is not None else "SCRIPT"
    command = resume_command(reference, directory.path, to_repeat(directory.path))
    nothing: dict[str, Any] = dict.fromkeys(("answers", "caveats", "changes", "not_checked"), ())
    return {
        **nothing,
        "verdict": "none",
        "word": "Unfinished",
        "figure": None,
        "headline": "This run has no recipe.",
        "candidate": "",
        "steps": [("To continue it with everything measured so far:", [command])],
    }


# ---------------------------------------------------------------------------------------- charts and trials


def _keep_one_pair(record: TrialRecord) -> TrialRecord:
    """Keep one pair of a search's slices: those of a thousand trials take hundreds of megabytes."""
    return record.model_copy(update={"pairs": record.pairs[:1]}) if record.phase is Phase.SEARCH else record


def _point(record: TrialRecord, baseline: Configuration | None) -> dict[str, Any]:
    """Return a trial as a point of the chart of the search."""
    kind = "confirmation" if record.phase is Phase.CONFIRM else "candidate"
    if record.outcome is not Outcome.OK:
        kind = "pruned" if record.outcome is Outcome.PRUNED else "failed"
    changes = Configuration(record.configuration).describe(relative_to=baseline)
    speedup = record.speedup
    assert speedup is not None
    return {
        "at": record.ended_at_seconds,
        "kind": kind,
        "tip": f"trial {record.trial} ({record.phase}, {record.outcome}): {speedup.shown()} · {changes}",
        **speedup.model_dump(),
    }


def _bar(step: Step) -> dict[str, Any]:
    """Return a step of the waterfall as its chart draws it."""
    return {**asdict(step), "gain": step.gain.model_dump(), "ends_at": step.ends_at}


def _trial(record: TrialRecord, baseline: Configuration | None) -> dict[str, Any]:
    """Return a trial as a row of the table."""
    changes = Configuration(record.configuration).describe(relative_to=baseline)
    if record.ablation is not None:
        gives = "" if record.ablation.gain is None else f", which gives {record.ablation.gain.shown()}"
        changes = f"{changes} (without {record.ablation.knob}{gives})"
    return {
        "trial": record.trial,
        "phase": str(record.phase),
        "outcome": str(record.outcome),
        "speedup": record.speedup,
        "throughput": record.throughput,
        "bottleneck": "" if record.bottleneck is None else record.bottleneck.name,
        "changes": one_line(changes),
        "reason": one_line(record.reason),
        "log": "" if record.outcome.measured else printable(record.log_tail[-LONGEST_LOG:]),
    }


def _machine(run: RunRecord) -> list[tuple[str, str]]:
    machine = run.machine
    rows: Mapping[str, str | None] = {
        "machine": machine.describe(),
        "memory": f"{machine.memory_bytes / 2**30:.0f} GiB",
        "system": machine.platform,
        "Python": machine.python,
        **machine.packages,
        "driver": machine.driver,
        "CUDA": machine.cuda,
        "workload": run.workload.reference if run.workload is not None else None,
    }
    return [(one_line(name), one_line(value)) for name, value in rows.items() if value]


def try_write_page(path: Path) -> str:
    """Write the page; return why that failed, or an empty string: it fails no run."""
    try:
        write_page(path)
    except (RunDirectoryError, OSError, ValueError) as error:
        return f"report.html was not written: {one_line(error)}"
    return ""
