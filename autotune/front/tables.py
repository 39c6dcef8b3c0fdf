"""Print tables: trials, runs side by side, folders of recipes, knobs, search spaces, and what the doctor found.

Trials and runs fit a terminal of 80 columns: a table has the columns in which its rows differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.text import Text

from autotune.data.figures import Interval
from autotune.data.printable import one_line, plural, rate_text
from autotune.data.record import Outcome
from autotune.front.console import print_table, ratio, say, terminal
from autotune.machine.doctor import Finding, Level, first_fix
from autotune.machine.fingerprint import kind_of
from autotune.recipe.recipe import Recipe, RecipeSource, select_recipe
from autotune.space.configuration import Configuration, format_value
from autotune.space.knobs import KNOBS, Numerics
from autotune.stats.deciding import Verdict

if TYPE_CHECKING:
    import pandas

    from autotune.space.space_file import ResolvedSpace
    from autotune.tuning.self_test import SelfTest


_NUMBERS = ("no.", "samples/s")
_PLACES = ("seat", "host", "device")
_OF_RUNS = ("workload", "machine", "trials", "limited by")


def show_history(frame: pandas.DataFrame, console: RichConsole | None = None) -> None:
    """Print a table for each run, one trial a row; places, and whether a speed was steady, only where they differ."""
    from autotune.report.history import rows_of

    console = console or terminal()
    rows = [row for row in rows_of(frame) if row["speedup"] or row["outcome"] != Outcome.PRUNED]  # no repeats
    varied = [name for name in _PLACES if len({row[name] for row in rows}) > 1]
    if any(row["settled"] is False for row in rows):
        varied.append("settled")
    for run, trials in groupby(rows, key=itemgetter("run")):
        names = ("no.", "phase", "speed-up", "samples/s", *varied, "changes")
        workload, lines = "", []
        for trial in trials:
            workload = trial["workload"] or ""
            rate = None if trial["throughput"] is None else rate_text(trial["throughput"])
            cells = (trial["trial"], trial["phase"], _result(trial), rate, *(trial[name] for name in varied))
            texts = ["–" if cell is None else str(cell) for cell in cells]
            style = "dim" if trial["duplicate"] else ""
            lines.append([Text(one_line(text), style=style) for text in (*texts, _changes(trial))])
        say(f"run {run}  {workload}", console, style="bold")
        print_table(names, lines, console, ruled=False, numbers=_NUMBERS)
    say(
        f"{plural(len(rows), 'trial')}. A speed-up is over the baseline measured with the trial; of those that are not "
        "confirmed, the luckiest look best. --csv, --parquet and --json write every column.",
        console,
    )


def _result(trial: dict[str, Any]) -> str:
    if not Outcome(trial["outcome"]).measured:
        return str(trial["outcome"])
    speedup = "–" if trial["speedup"] is None else f"×{trial['speedup']:.2f}"
    if trial["confirmed"]:
        return f"{speedup} confirmed"
    return f"{speedup} pruned" if trial["outcome"] == Outcome.PRUNED else speedup


def _changes(trial: dict[str, Any]) -> str:
    """Return what a trial changes, how that learns, and why it failed."""
    said = str(trial["changes"])
    if trial["gain"] is not None:
        said += f" (without {trial['left_out']}, which gives ×{trial['gain']:.2f})"
    if trial["same_loss_speedup"] is not None:
        rule = trial["learning_rate_rule"]
        said += f" (same losses ×{trial['same_loss_speedup']:.2f} sooner, learning rate {rule})"
    return said if trial["reason"] is None else f"{said} ({one_line(trial['reason'], longest=80)})"


def show_comparison(frame: pandas.DataFrame, console: RichConsole | None = None) -> None:
    """Print a comparison, one run or recipe a row; what all of them share, and why some may not be compared."""
    from autotune.report.history import rows_of

    console = console or terminal()
    rows = rows_of(frame)
    shown = [_compared(row) for row in rows]
    varied = [name for name in _OF_RUNS if len({cells[name] for cells in shown}) > 1]
    for name in ("workload", "machine"):
        if name not in varied:
            say(f"{name}: {shown[0][name]}", console)
    headings = ("run", *varied, "claim", "recommended")
    print_table(headings, [[cells[name] for name in headings] for cells in shown], console)
    for row in rows:
        if row["differs"]:
            say(f"{row['run']} cannot be compared with the first run: {row['differs']}", console, style="yellow")


def _compared(row: dict[str, Any]) -> dict[str, str]:
    claim = row["verdict"] or "no recipe"
    if claim == Verdict.FASTER:
        claim = f"{claim} {Interval(value=row['claim'], low=row['low'], high=row['high']).shown()}"
    limit = None if row["limited_by"] is None else row["limited_by"].replace("_", " ")
    cells = {"claim": claim, "limited by": limit}
    of_run = {name: row[name] for name in ("run", "workload", "machine", "trials", "recommended")}
    return {name: "–" if cell is None else str(cell) for name, cell in {**cells, **of_run}.items()}


def show_folder(source: RecipeSource, console: RichConsole | None = None) -> None:
    """Print a line for each recipe, what carries over between the machines, and what a training does here."""
    console = console or terminal()
    rows = []
    for path, recipe in source.files:
        verdict, changes, answer = recipe.evidence.verdict, Configuration(recipe.configuration), recipe.answer
        is_faster = verdict is Verdict.FASTER
        claim = f"{answer.speedup.shown()} {answer.unit}" if is_faster else verdict.value.replace("_", " ")
        recommended = changes.describe(Configuration(recipe.baseline)) if recipe.changes else "the baseline"
        rows.append((path.name, kind_of(recipe.machine), claim, recommended))
    console.print()
    print_table(("recipe", "measured on", "claim", "recommended"), rows, console)
    console.print()
    for line in (*describe_transfer(source.recipes), *source.notes):
        say(line, console)
    say(f"Here: {select_recipe(source).text}", console)


def show_knobs() -> None:
    """Print all knobs."""
    rows = [
        (
            knob.name,
            knob.summary,
            knob.domain.describe(),
            "the workload's" if knob.default is None else format_value(knob.default),
            knob.stage,
            "same" if knob.numerics is Numerics.SAME else "may change",
            ", ".join(sorted(knob.devices)),
        )
        for knob in KNOBS.values()
    ]
    print_table(("knob", "what", "values", "default", "stage", "numerics", "where"), rows, terminal())


def show_space(source: str, space: ResolvedSpace) -> None:
    """Print a search space as it resolves here, and the file or name that it comes from."""
    rows: list[tuple[object, ...]] = [
        *((name, " ".join(map(format_value, choices))) for name, choices in space.choices.items()),
        *((name, Text(f"omitted: {one_line(why)}", style="dim")) for name, why in space.left_out.items()),
    ]
    print_table(("knob", "choices here"), rows, terminal())
    say(f"{source}: {space.size:,} configurations")


def show_findings(findings: Sequence[Finding]) -> None:
    """Print what the doctor found, a line each with its fix, and the one thing to do first."""
    console = terminal()
    styles = {Level.STOPS: "bold red", Level.SLOWS: "yellow", Level.FACT: ""}
    for finding in findings:
        fix = f" → {finding.fix}" if finding.fix else ""
        say(f"{finding.level.value:<6} {finding.text}{fix}", console, style=styles[finding.level])
    console.print()
    first = first_fix(findings)
    say(
        f"First: {first}" if first else "Nothing found that keeps TensorFlow from a device or slows it.",
        console,
        style="bold",
    )


def show_self_test(tested: SelfTest) -> None:
    """Print what a self-test found, and what that means."""
    from autotune.tuning.self_test import Judgement

    terminal().print()
    for name, side, holds, wrong in (
        ("A against A", tested.same, "no difference, as it should be", "a difference where there is none"),
        (f"A planted delay of ×{tested.delayed.true:.2f}", tested.delayed, "it is found", "another size is found"),
    ):
        said, style = {
            Judgement.HOLDS: (holds, "green"),
            Judgement.CANNOT_TELL: ("too uncertain to tell", "yellow"),
            Judgement.WRONG: (wrong, "bold red"),
        }[side.judgement]
        processes = f"{side.processes} fresh process{'' if side.processes == 1 else 'es'} a side"
        say(f"{name}: {ratio(side.measured)} from {processes}: {said}", style=style)
    if tested.gains:
        gains = ", ".join(f"{math.ceil(100 * gain)}% in {minutes} minutes" for minutes, gain in tested.gains.items())
        say(f"The smallest gain that a run of such a training can show here: {gains}.")
    if tested.advice:
        say(tested.advice)


def describe_transfer(recipes: Sequence[Recipe]) -> list[str]:
    """Say which changes carry over between the machines, and which do not; nothing where there is none to compare."""
    recommending = [recipe for recipe in recipes if recipe.changes]
    kinds = [kind_of(recipe.machine) for recipe in recommending]
    if len(set(kinds)) < 2:
        return []
    changes = [[f"{name}={format_value(value)}" for name, value in recipe.changes.items()] for recipe in recommending]
    shared = [change for change in changes[0] if all(change in others for others in changes)]
    are_devices_unlike = len({kind.device for kind in kinds}) == len(kinds)
    own: dict[str, list[str]] = {}
    for made, kind in zip(changes, kinds, strict=True):
        for change in made:
            if change not in shared:
                own.setdefault(change, []).append(kind.device if are_devices_unlike else str(kind))
    where = f"each of the {len(recommending)} machines with a recommendation"
    lines = [f"Carries over to {where}: {' '.join(shared) or 'nothing'}"]
    if own:
        places = "; ".join(f"{change} (only {', and '.join(devices)})" for change, devices in own.items())
        lines.append(f"Does not carry over: {places}")
    return lines
