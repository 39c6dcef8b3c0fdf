"""A run as one self-contained page, `report.html`. It shows other people's text as text.

Text and tables are written into the page. Its charts are drawn by the page itself, from figures in it as JSON.
"""

from __future__ import annotations

import html
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
from autotune.recipe.answers import answer_of
from autotune.recipe.recipe import Recipe
from autotune.report.charts import draw_losses, map_space, to_html, waterfall
from autotune.report.sections import PageData, sections, title_of
from autotune.space.configuration import baseline_of, read_trials

T = TypeVar("T")
NAME = "report.html"
MARK = b'<meta name="generator" content="autotune">'  # of every page of autotune, see report.html
PARTS = Path(__file__).parent  # of the page: report.html, its style and its script


def write_page(path: str | Path) -> Path:
    """Write a run's `report.html`, whatever is there of the run, and return the file.

    Raises RunDirectoryError where there is no run, or the page cannot be written.
    """
    directory = RunDirectory(path)
    data = page_data(directory)
    drawn = {
        "losses": data.losses,
        "waterfall": [
            {**asdict(step), "gain": step.gain.model_dump(), "ends_at": step.ends_at} for step in data.waterfall
        ],
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
    every: list[TrialRecord] = read("trials", lambda: [*map(_keep_one_pair, read_trials(directory, damaged))], [])
    records = [record for record in every if not record.is_repeat]
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
        losses=None if recipe is None else draw_losses(records, recipe, answer_of(recipe)),
        waterfall=() if recipe is None else waterfall(recipe),
        space=map_space(run, every, recipe.configuration if recipe is not None and recipe.changes else None),
        missing=missing,
    )


def _keep_one_pair(record: TrialRecord) -> TrialRecord:
    """Keep one pair of a search's slices: those of a thousand trials take hundreds of megabytes."""
    return record.model_copy(update={"pairs": record.pairs[:1]}) if record.phase is Phase.SEARCH else record


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
