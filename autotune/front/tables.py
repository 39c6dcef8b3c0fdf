"""Print tables: trials, runs side by side, knobs, search spaces, and what the doctor found.

Trials and runs fit a terminal of 80 columns: a table has the columns in which its rows differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.table import Column, Table
from rich.text import Text

from autotune.data.figures import Interval
from autotune.data.printable import one_line, plural
from autotune.data.record import Outcome
from autotune.front.console import print_table, rate, ratio, say, table, terminal
from autotune.machine.doctor import Finding, Level, first_fix
from autotune.space.configuration import format_value
from autotune.space.knobs import KNOBS, Numerics
from autotune.stats.deciding import Verdict

if TYPE_CHECKING:
    import pandas

    from autotune.space.space_file import ResolvedSpace
    from autotune.tuning.self_test import SelfTest

_NUMBERS = ("no.", "samples/s")
_PLACES = ("seat", "host", "device")
_OF_RUNS = ("workload", "machine", "trials", "failed", "limited by")
_GAP = 3  # columns of a terminal between those of a table
_LEAST_LAST = 20  # columns in which the last column of a table can be read


def show_history(frame: pandas.DataFrame, console: RichConsole | None = None) -> None:
    """Print a table for each run, one trial a row; places, and whether a speed was steady, only where they differ."""
    from autotune.report.history import rows_of

    console = console or terminal()
    rows = rows_of(frame)
    varied = [name for name in _PLACES if len({row[name] for row in rows}) > 1]
    if any(row["settled"] is False for row in rows):
        varied.append("settled")
    for run, trials in groupby(rows, key=itemgetter("run")):
        names = ("no.", "phase", "speed-up", "samples/s", *varied, "changes")
        columns = [Column(name, justify="right" if name in _NUMBERS else "left", overflow="fold") for name in names]
        shown = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        workload, lines = "", []
        for trial in trials:
            workload = trial["workload"] or ""
            cells = (trial["trial"], trial["phase"], _result(trial), _rate(trial), *(trial[name] for name in varied))
            texts = ["–" if cell is None else str(cell) for cell in cells]
            lines.append([*texts, _changes(trial)])
            shown.add_row(*_texts(lines[-1]), style="dim" if trial["duplicate"] else "")
        say(f"run {run}  {workload}", console, style="bold")
        if _is_too_narrow(console, names, lines):
            _print_blocks(names, lines, console)
        else:
            print_table(shown, console)
    say(
        f"{plural(len(rows), 'trial')}. A speed-up is over the baseline measured with the trial; of those that are not "
        "confirmed, the luckiest look best. --csv, --parquet and --json write every column.",
        console,
    )


def _texts(cells: Sequence[object]) -> list[Text]:
    """Return cells as text: the square brackets of a string would be taken for colours."""
    return [Text(one_line(cell)) for cell in cells]


def _result(trial: dict[str, Any]) -> str:
    """Return a trial's speed-up and its standing, or how it failed."""
    if not Outcome(trial["outcome"]).measured:
        return str(trial["outcome"])
    speedup = "–" if trial["speedup"] is None else f"×{trial['speedup']:.2f}"
    if trial["confirmed"]:
        return f"{speedup} confirmed"
    return f"{speedup} pruned" if trial["outcome"] == Outcome.PRUNED else speedup


def _rate(trial: dict[str, Any]) -> str | None:
    return None if trial["throughput"] is None else rate(trial["throughput"])


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
    """Print a comparison, one run a row; what all runs share, why some may not be compared, and which recipe to use."""
    from autotune.report.history import rows_of

    console = console or terminal()
    rows = rows_of(frame)
    shown = [_compared(row) for row in rows]
    varied = [name for name in _OF_RUNS if len({cells[name] for cells in shown}) > 1]
    for name in ("workload", "machine"):
        if name not in varied:
            say(f"{name}: {shown[0][name]}", console)
    headings = ("run", *varied, "claim", "recommended")
    _print_rows(headings, [[cells[name] for name in headings] for cells in shown], console)
    for row in rows:
        if row["differs"]:
            say(f"{row['run']} cannot be compared with the first run: {row['differs']}", console, style="yellow")
    comparable = [row for row in rows if row["on_all_machines"] is not None]
    shared_by_workload = {row["workload"]: row["on_all_machines"] for row in comparable}
    for workload, shared in shared_by_workload.items():
        say(f"Carries over to each machine with a recommendation for {workload}: {shared or 'nothing'}", console)
    for row in comparable:
        if row["on_some_machines"]:
            say(f"Does not carry over from {row['run']}: {row['on_some_machines']}", console)
    for row in rows if len(rows) > 1 else ():
        if row["use"]:
            say(f"Fastest recipe of {row['workload']} on {row['machine']}: {row['run']}", console)


def _print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]], console: RichConsole) -> None:
    """Print a table; where a terminal is too narrow for all but its last column, print a block for each row."""
    if _is_too_narrow(console, headings, rows):
        _print_blocks(headings, rows, console)
    else:
        print_table(table(headings, [_texts(row) for row in rows]), console)


def _is_too_narrow(console: RichConsole, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return whether a terminal is too narrow for all but a table's last column."""
    widths = [max(map(len, column)) + _GAP for column in zip(headings, *rows, strict=True)]
    return console.is_terminal and sum(widths[:-1]) + _LEAST_LAST > console.width


def _print_blocks(headings: Sequence[str], rows: Sequence[Sequence[str]], console: RichConsole) -> None:
    """Print a block for each row, with a line for each cell."""
    for row in rows:
        say(f"{headings[0]} {row[0]}", console, style="bold")
        block = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
        for name, cell in zip(headings[1:], _texts(row[1:]), strict=True):
            block.add_row(f"  {name}", cell)
        console.print(block)


def _compared(row: dict[str, Any]) -> dict[str, str]:
    """Return a run's row as cells, by heading."""
    claim = row["verdict"] or "no recipe"
    if claim == Verdict.FASTER:
        claim = f"{claim} {Interval(value=row['claim'], low=row['low'], high=row['high']).shown()}"
    recommended = row["recommended"]
    if recommended is None:
        recommended = f"– (best in the search: {row['best']})" if row["best"] else "–"
    limit = None if row["limited_by"] is None else str(row["limited_by"]).replace("_", " ")
    cells = {"claim": claim, "recommended": recommended, "limited by": limit}
    of_run = {name: row[name] for name in ("run", "workload", "machine", "trials", "failed")}
    return {name: "–" if cell is None else str(cell) for name, cell in {**cells, **of_run}.items()}


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
    _print_rows(("knob", "what", "values", "default", "stage", "numerics", "where"), rows, terminal())


def show_space(source: str, space: ResolvedSpace) -> None:
    """Print a search space as it resolves here, and the file or name that it comes from."""
    rows: list[tuple[str, str | Text]] = [
        *((name, " ".join(map(format_value, choices))) for name, choices in space.choices.items()),
        *((name, Text(f"omitted: {one_line(why)}", style="dim")) for name, why in space.left_out.items()),
    ]
    terminal().print(table(("knob", "choices here"), rows))
    say(f"{source}: {space.size:,} configurations")


def show_findings(findings: Sequence[Finding]) -> None:
    """Print what the doctor found, a line each with its fix, and the one thing to do first."""
    console = terminal()
    styles = {Level.STOPS: "bold red", Level.SLOWS: "yellow", Level.FACT: ""}
    for finding in findings:
        fix = f" → {finding.fix}" if finding.fix else ""
        say(f"{finding.level.value:<6} {finding.text}{fix}", console, style=styles[finding.level])
    if first := first_fix(findings):
        console.print()
        say(f"First: {first}", console, style="bold")


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
