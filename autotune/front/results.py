"""Print results: tables of trials, runs, recipes and knobs, findings, how a run ends, edits, verifications.

Trials and runs fit a terminal of 80 columns: a table has the columns in which its rows differ. A run ends with at most
20 lines of 80 columns that format its answer.
"""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console as RichConsole
from rich.text import Text

from autotune.data.figures import Interval
from autotune.data.printable import duration, memory_size, one_line, plural, rate_text
from autotune.data.record import Outcome
from autotune.front.console import note, print_table, ratio, say, terminal
from autotune.machine.doctor import Finding, Level, first_fix
from autotune.machine.fingerprint import kind_of
from autotune.recipe.answer import NOT_PROMISED, WORTH_A_LINE_SECONDS, Answer, Change, Command
from autotune.recipe.recipe import Recipe, RecipeSource, select_recipe
from autotune.space.configuration import Configuration, format_value
from autotune.space.knobs import KNOBS, Numerics
from autotune.stats.deciding import ClaimResult, Verdict

if TYPE_CHECKING:
    import pandas

    from autotune.space.space_file import ResolvedSpace
    from autotune.tuning.self_test import SelfTest
    from autotune.tuning.verify import Verification


_NUMBERS = ("no.", "samples/s")
_PLACES = ("seat", "host", "device")
_OF_RUNS = ("workload", "machine", "trials", "limited by")
MOST_LINES, COLUMNS = 20, 80
COMPILES_SECONDS = 1.0  # shorter compile times are no cost that decides


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
            speedup = "–" if trial["speedup"] is None else f"×{trial['speedup']:.2f}"
            speedup += " confirmed" if trial["confirmed"] else " pruned" if trial["outcome"] == Outcome.PRUNED else ""
            result = speedup if Outcome(trial["outcome"]).measured else trial["outcome"]
            rate = None if trial["throughput"] is None else rate_text(trial["throughput"])
            cells = (trial["trial"], trial["phase"], result, rate, *(trial[name] for name in varied))
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


def _changes(trial: dict[str, Any]) -> str:
    """Return a trial's changes, its learning, and why it failed."""
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
        processes = plural(side.processes, "fresh process")
        say(f"{name}: {ratio(side.measured)} from {processes} a side: {said}", style=style)
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


# ---------------------------------------------------------------------------------------------------- the end of a run


class _Part(NamedTuple):
    """Lines that belong together; of those that do not fit, the highest rank is left out first, and never 0."""

    rank: int
    lines: Sequence[str]


def show_answer(answer: Answer, path: Path, console: RichConsole | None = None) -> None:
    """Print a run's end. `path`: of its recipe."""
    console = console or terminal()
    width = min(COLUMNS, console.width)
    parts = list(_parts(answer, path, width))
    if sum(len(part.lines) for part in parts if not part.rank) > MOST_LINES:
        parts = list(_parts(answer, path, width, changes_apart=False))
    while sum(len(part.lines) for part in parts) > MOST_LINES and any(part.rank for part in parts):
        parts.remove(max(parts, key=lambda part: part.rank))
    first, *rest = (line for part in parts for line in part.lines)
    console.print()
    say(first, console, style="bold green" if answer.verdict is Verdict.FASTER else "bold")
    for line in rest:
        console.print(Text(line), soft_wrap=True)


def _parts(answer: Answer, path: Path, width: int, *, changes_apart: bool = True) -> Iterator[_Part]:
    """Yield headline, cause, both answers, changes, what to do, and what was not checked."""
    yield _Part(0, _fold(answer.headline, width))
    yield _Part(0, _fold(answer.diagnosis, width))
    if answer.candidate:
        yield _Part(0, _fold(f"{answer.candidate}.", width, "Best so far: "))
    for choice in answer.choices:
        figure, *others = choice.said[:3]  # the page has the rest
        recommended = " (recommended)" if choice.recommended else ""
        yield _Part(0, _fold("; ".join((figure + recommended, *others)), width, f"{choice.kind.capitalize()}: "))
    rests_on = f"; {answer.rests_on}" if answer.rests_on else ""
    yield _Part(2, _fold(f"{answer.baseline_is}{rests_on}.", width, "Baseline: "))
    yield _Part(9, [""])
    if not changes_apart:
        changes = " ".join(f"{change.knob}={change.recommended}" for change in answer.changes)
        yield _Part(0, _fold(changes, width, "Changes: "))
    yield from _table(answer, answer.changes if changes_apart else ())
    yield _Part(9, [""])
    training = answer.training
    if training is not None and training.before_seconds >= WORTH_A_LINE_SECONDS:
        times = f"{duration(training.before_seconds)} → {duration(training.after_seconds)}"
        said = f"{training.of}: {times} (tuning took {duration(training.tuning_seconds)})"
        yield _Part(0, _fold("; ".join(filter(None, (said, training.note))), width))
    for caveat in answer.caveats:
        yield _Part(3 if caveat == NOT_PROMISED else 1, _fold(caveat, width))
    if answer.unchecked:
        yield _Part(0, [_unchecked(answer.unchecked, width)])
    page = path.parent / "report.html"
    yield _Part(0, [f"Page: {one_line(page)}"]) if page.exists() else _Part(1, [f"Recipe: {one_line(path)}"])
    for command in answer.commands:
        yield _Part({"other": 4, "edit": 1}.get(command.name, 0), _command(command, width))


def _table(answer: Answer, shown: Sequence[Change]) -> Iterator[_Part]:
    """Yield the shown changes and what each of them gives, then the speed, then what it costs."""
    sides = (answer.baseline, answer.after)
    changes = [
        (
            change.knob,
            change.baseline,
            f"{change.recommended}{f' (gives ×{change.gain.value:.2f})' if change.gain else ''}",
        )
        for change in shown
    ]
    rates = (side.throughput.shown("", ",.0f" if side.throughput.value >= 10 else ".2g") for side in sides)
    costs, joules = list[tuple[int, tuple[str, ...]]](), [side.joules_per_sample for side in sides]
    if any(joules):
        energy = ("–" if used is None else f"{used:.3g} J" if used >= 1 else f"{1e3 * used:.3g} mJ" for used in joules)
        costs.append((1, ("energy/sample", *energy)))
    for rank, place in ((5, "host"), (5, "device")):
        sizes = [getattr(side.peak_memory, place) for side in sides]
        costs += [(rank, (f"peak {place} memory", *map(memory_size, sizes)))] if any(sizes) else []
    seconds = [side.compile_seconds for side in sides]
    if any(known and known >= COMPILES_SECONDS for known in seconds):
        costs.append((6, ("compile time", *("–" if known is None else f"{known:.1f} s" for known in seconds))))
    rows = [("", "now", "recommended"), *changes, (f"{answer.samples}/s", *rates), *(row for _, row in costs)]
    if not answer.changes:
        rows = [row[:2] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{one_line(cell):<{wide}}" for cell, wide in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    yield _Part(0, lines[: len(lines) - len(costs)])
    yield from (_Part(rank, [line]) for (rank, _), line in zip(costs, lines[-len(costs) :], strict=False))


def _unchecked(gaps: Sequence[str], width: int) -> str:
    """Return in one line what was not reached or not checked, as far as it fits."""
    names, more, said = list(dict.fromkeys(one_line(gap.split(" (")[0]).replace("; ", ", ") for gap in gaps)), "", ""
    for count in range(len(names), 0, -1):
        more = f"; {len(names) - count} more on the page" if count < len(names) else ""
        said = f"Not checked: {'; '.join(names[:count])}"
        if len(said) + len(more) <= width:
            return said + more
    return said[: width - len(more) - 1] + "…" + more


def _command(command: Command, width: int) -> list[str]:
    """Return a next step: a command with its name, folded as a shell reads it; lines of code below their heading."""
    if not command.lines:
        return _fold(command.heading, width)
    if not command.lines[0].startswith("autotune "):
        return [command.heading, *(f"    {one_line(line)}" for line in command.lines)]
    lines = [f"{command.name.capitalize()}:"]
    for word in shlex.split(command.lines[0]):
        quoted = one_line(shlex.quote(word))
        if len(lines[-1]) + len(quoted) + 3 > width:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {quoted}"
    return lines


def _fold(text: str, width: int, heading: str = "") -> list[str]:
    """Return a sentence as three lines of this width at most; the page has all of it."""
    return textwrap.wrap(
        one_line(text),
        width,
        initial_indent=heading,
        subsequent_indent=" " * len(heading),
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=3,
        placeholder=" …",
    )


def show_diff(recipe: Recipe, diff: str, rest: Sequence[str]) -> None:
    """Print an edit of a script, as `patch` reads it; what it omits and what that gave, and the speed of the rest."""
    for line in diff.splitlines():
        terminal().print(Text(line), soft_wrap=True)
    if not diff and not rest:
        say("The script itself needs no change.")
    for omitted in rest:
        knob = omitted.partition("=")[0]
        shown = recipe.describe_change(knob) if knob in recipe.changes else omitted
        note(f"this edit omits {shown}: `autotune run` sets it, and no line of the script does")
    rule = recipe.learning_rate_rule
    with_rate = " The speed was measured with that rate." if rule is not None and rule.rule != "as is" else ""
    with_rest = f" That is with {', '.join(rest)}, which this edit omits." if rest else ""
    note(f"{recipe.answer.headline}.{with_rate}{with_rest}")


def show_verification(verification: Verification) -> None:
    """Print the finding, the claim, and what was measured."""
    console = terminal()
    found = verification.finding
    console.print()
    if verification.claimed is not None:
        say(f"claimed   {ratio(verification.claimed)}", console)
        processes = f" from {verification.instances} fresh processes a side" if verification.instances else ""
        say(f"measured  {ratio(verification.measured)}{processes}", console)
    style = "bold green" if found is ClaimResult.HOLDS else "bold red"
    say(f"{found}: {verification.reason}.", console, style=style)
