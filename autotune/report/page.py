"""A run as one self-contained page, `report.html`. It shows other people's text as text.

Text and tables are written into the page. Its charts are drawn by the page itself, from figures in it as JSON.
"""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from xml.etree.ElementTree import Element

from autotune.data.errors import AutotuneError, RunDirectoryError
from autotune.data.files import write_atomically
from autotune.data.printable import one_line
from autotune.data.record import Phase, TrialRecord, baseline_with_ceilings
from autotune.data.run_directory import RunDirectory, left_out
from autotune.recipe.answers import describe_factor
from autotune.recipe.learning_rate import factor_of
from autotune.recipe.recipe import Recipe
from autotune.recipe.waterfall import waterfall
from autotune.report.markup import to_html
from autotune.report.sections import PageData, describe_changes, kind_of_point, sections, title_of
from autotune.space.configuration import Configuration, baseline_of, read_trials
from autotune.stats.same_loss import (
    NOT_REACHED,
    ExamplesNeeded,
    Losses,
    examples_needed,
    probe_examples,
    whole_trainings,
)

T = TypeVar("T")
NAME = "report.html"
MARK = b'<meta name="generator" content="autotune">'  # of every page of autotune, see report.html
MOST_COLOURS = 3  # of the learning-rate rules that are not chosen
PARTS = Path(__file__).parent  # of the page: report.html, its style and its script


def write_page(path: str | Path) -> Path:
    """Write a run's `report.html`, whatever is there of the run, and return the file.

    Raises RunDirectoryError where there is no run, or the page cannot be written.
    """
    directory = RunDirectory(path)
    data = page_data(directory)
    drawn = {
        "search": [_point(record, data.baseline) for record in data.points],
        "waterfall": [
            {**asdict(step), "gain": step.gain.model_dump(), "ends_at": step.ends_at} for step in data.waterfall
        ],
        "learning": data.learning,
    }
    write_atomically(directory.path / NAME, whole_page(title_of(data.run), sections(data), drawn))
    return directory.path / NAME


def whole_page(title: str, body: Iterable[Element], drawn: Mapping[str, Any] | None = None) -> str:
    """Return a page of these elements, with what its script draws."""
    parts = {
        "TITLE": html.escape(f"{title} · autotune"),
        "STYLE": (PARTS / "report.css").read_text(encoding="utf-8"),
        "BODY": to_html(body),
        "DATA": json.dumps(drawn, allow_nan=False).replace("<", "\\u003c"),
        "SCRIPT": "" if drawn is None else (PARTS / "report.js").read_text(encoding="utf-8"),
    }
    skeleton = (PARTS / NAME).read_text(encoding="utf-8")
    # In one pass: what others have written may hold such a mark, too.
    return re.sub(r"<!--([A-Z]+)-->", lambda mark: parts[mark[1]], skeleton)


def page_data(directory: RunDirectory) -> PageData:
    """Read what the page shows. Raises RunDirectoryError where there is no run.json to read."""
    missing: list[str] = []

    def read(name: str, how: Callable[[], T], otherwise: T) -> T:
        try:
            return how()
        except (AutotuneError, OSError) as error:
            missing.append(f"{name}: {one_line(error)}")
            return otherwise

    run = directory.read_run()
    damaged: list[RunDirectoryError] = []
    records: list[TrialRecord] = read("trials", lambda: [*map(_keep_one_pair, read_trials(directory, damaged))], [])
    records = [record for record in records if not record.is_repeat]
    if damaged:
        missing.append(f"trials: {left_out(damaged)}")
    recipe: Recipe | None = None
    if directory.recipe_file.exists():
        recipe = read("recipe", lambda: Recipe.load(directory.recipe_file), None)
    else:
        missing.append("recipe: the run has not ended, or was cut off")
    baseline = read("baseline", lambda: baseline_of(directory, run, records), None)
    first, chosen = baseline_with_ceilings(records), None if recipe is None else _chosen_trial(recipe, records)
    return PageData(
        path=directory.path,
        run=run,
        records=records,
        recipe=recipe,
        baseline=baseline,
        sides=[side for side in (first, chosen) if side is not None],
        waterfall=() if recipe is None else waterfall(recipe),
        learning=read("learning", lambda: loss_charts(records, baseline), []),
        missing=missing,
    )


def _keep_one_pair(record: TrialRecord) -> TrialRecord:
    """Keep one pair of a search's slices: those of a thousand trials take hundreds of megabytes."""
    return record.model_copy(update={"pairs": record.pairs[:1]}) if record.phase is Phase.SEARCH else record


def _point(record: TrialRecord, baseline: Configuration | None) -> dict[str, Any]:
    speedup = record.speedup
    assert speedup is not None
    said = f"trial {record.trial} ({record.phase}, {record.outcome}): {speedup.shown()}"
    return {
        "at": record.ended_at_seconds,
        "kind": kind_of_point(record),
        "tip": f"{said} · {describe_changes(record, baseline)}",
        **speedup.model_dump(),
    }


def try_write_page(path: Path) -> str:
    """Write the page; return why that failed, or an empty string: it fails no run."""
    try:
        write_page(path)
    except (RunDirectoryError, OSError, ValueError) as error:
        return f"report.html was not written: {one_line(error)}"
    return ""


def _chosen_trial(recipe: Recipe, records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the trial that the recipe's claim is from; None if the recipe is the baseline."""
    wanted = recipe.configuration if recipe.changes else None
    same = [
        record
        for record in records
        if record.phase is Phase.CONFIRM and record.pairs and record.configuration == wanted
    ]
    claimed = [record for record in same if record.speedup == recipe.evidence.speedup]
    return (claimed or same)[-1] if same else None


# --------------------------------------------------------------------------------------------- its loss charts


def average_losses(at: Sequence[float], trainings: Sequence[Losses]) -> list[dict[str, float]]:
    """Return a point for each probe; none for a probe at which the loss of a seed was not finite.

    A point has the examples trained since the branch, the mean over seeds, and the lowest and the highest loss of one.
    """
    points = []
    for place, examples in enumerate(at):
        probed = [losses[place] for losses in trainings if place < len(losses)]
        finite = [loss for loss in probed if loss is not None]
        if finite and len(finite) == len(trainings):
            mean = sum(loss / len(finite) for loss in finite)
            points.append({"examples": examples, "mean": mean, "low": min(finite), "high": max(finite)})
    return points


def loss_charts(records: Iterable[TrialRecord], baseline: Configuration | None) -> list[dict[str, Any]]:
    """Return a chart for each leader whose learning was compared with the baseline's, or was to be.

    A chart has a heading, what was found in a sentence, and curves; none where nothing was measured. The first curve is
    the baseline's. The `chosen` kind is of the learning-rate rule that needs fewest examples to the baseline's losses;
    none is chosen where no rule reaches them with every seed.
    """
    if baseline is None:
        return []
    return [_chart(record, baseline) for record in records if record.branch is not None]


def _chart(record: TrialRecord, baseline: Configuration) -> dict[str, Any]:
    branch, size = record.branch, Configuration(record.configuration).update_size
    assert branch is not None
    heading = f"Batch {size} beside {baseline.update_size} (trial {record.trial})"
    if branch.not_measured:
        return {"heading": heading, "found": f"Not measured: {one_line(branch.not_measured)}.", "curves": []}
    (own, by_rule), needed = whole_trainings(branch), examples_needed(branch)
    at = probe_examples(branch)
    curves = [_curve(f"batch {baseline.update_size}, the baseline", "baseline", at, own)]
    others = itertools.count()
    found = f"Batch {size}: {NOT_REACHED if isinstance(needed, ExamplesNeeded) else needed}."
    for rule, trainings in by_rule.items():
        rate = describe_factor(rule, factor_of(rule, size / baseline.update_size))
        is_chosen = isinstance(needed, ExamplesNeeded) and needed.rule == rule
        kind = "chosen" if is_chosen else f"other{min(next(others), MOST_COLOURS - 1)}"
        curves.append(_curve(f"batch {size}, learning rate {rate}", kind, at, trainings))
        if isinstance(needed, ExamplesNeeded) and is_chosen and (factor := needed.log_ratio.ratio) is not None:
            found = f"With the learning rate {rate}, it needs {factor.shown()} the examples of the baseline."
    branched = f"Both branched from the baseline after {branch.after_steps:,} steps"
    return {"heading": heading, "found": f"{branched}. {found}", "curves": curves if own else []}


def _curve(name: str, kind: str, at: Sequence[float], trainings: Sequence[Losses]) -> dict[str, Any]:
    return {"name": name, "kind": kind, "points": average_losses(at, trainings)}
