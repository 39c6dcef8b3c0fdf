"""Print trials, histories, comparisons, knobs, search spaces and a doctor's findings as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.measure import Measurement
from rich.text import Text

from autotune.data.figures import Interval
from autotune.data.printable import one_line, plural
from autotune.data.record import TrialRecord
from autotune.front.console import duration, say, size, table, terminal, trial_line
from autotune.machine.doctor import Finding, Level, first_fix
from autotune.space.configuration import Configuration, format_value
from autotune.space.knobs import KNOBS, Numerics
from autotune.stats.deciding import Verdict

if TYPE_CHECKING:
    import pandas

    from autotune.space.space_file import ResolvedSpace


def show_trials(records: Sequence[TrialRecord], baseline: Configuration, console: RichConsole | None = None) -> None:
    """Print a run's trials, one line each; the time is what the trial took, not when it ended as in `Progress`."""
    console = console or terminal()
    heading = f"{'took':>5}  {'phase':<8} {'no.':>3}  {'speed-up':<18}  changes"
    say(heading, console, style="bold")
    for record in records:
        changes = Configuration(record.configuration).describe(relative_to=baseline)
        console.print(trial_line(record, changes, stamp=f"{duration(record.seconds):>5}"), soft_wrap=True)


_MEASURED = ("speedup", "throughput", "baseline_throughput", "peak_host_bytes")


def show_history(frame: pandas.DataFrame, console: RichConsole | None = None) -> None:
    """Print the main columns of a history, one trial a row; knobs, `settled` and places only where they differ."""
    console = console or terminal()
    varied = [name for name in KNOBS if name in frame.columns and frame[name].nunique(dropna=False) > 1]
    unsettled = ["settled"] if "settled" in frame.columns and not frame["settled"].fillna(True).all() else []
    places = [name for name in ("seat", "host", "device") if name in frame.columns and frame[name].nunique() > 1]
    columns = ["run", "trial", "phase", "outcome", *varied, *_MEASURED, *unsettled, *places, "reason"]
    say("  ".join(columns), console, style="bold")
    for row in _cells(frame, columns):
        say("  ".join(row), console)
    say(f"{plural(len(frame), 'trial')}; each speed-up is relative to the trial's own baseline_throughput", console)


def _cells(frame: pandas.DataFrame, columns: Iterable[str]) -> list[list[str]]:
    """Return columns of a table as text, row by row."""
    known = frame.notna()
    return [
        [_cell(name, frame.at[index, name]) if known.at[index, name] else "–" for name in columns]
        for index in frame.index
    ]


def _cell(name: str, value: object) -> str:
    if name.endswith("_bytes"):
        return size(int(str(value)))
    if isinstance(value, float):
        return f"{value:,.0f}" if name.endswith("throughput") else f"{value:.3f}"
    return one_line(value)[:80]


def show_comparison(frame: pandas.DataFrame, console: RichConsole | None = None) -> None:
    """Print a comparison, one run a row, and why a run may not be set against the first."""
    console = console or terminal()
    headings = ("run", "workload", "machine", "trials", "failed", "claim", "recommended")
    known = frame.astype(object).where(frame.notna(), None)
    rows = [{str(name): value for name, value in row.items()} for row in known.to_dict("records")]
    shown = table(headings, map(_compared, rows))
    if not console.is_terminal:  # as wide as the table: nothing is cut or folded in a pipe
        unbounded = console.options.update(max_width=1 << 16)
        console.width = max(console.width, Measurement.get(console, unbounded, shown).maximum)
    console.print(shown)
    for row in rows:
        if row["differs"]:
            say(f"{row['run']} cannot be compared with the first run: {row['differs']}", console, style="yellow")


def _compared(row: dict[str, Any]) -> list[Text]:
    """Return a run's row as text: the square brackets of a string would be taken for colours."""
    claim = row["verdict"] or "no recipe"
    if claim == Verdict.FASTER:
        claim = f"{claim} {Interval(value=row['claim'], low=row['low'], high=row['high']).shown()}"
    recommended = row["recommended"]
    if recommended is None:
        recommended = f"– (best in the search: {row['best']})" if row["best"] else "–"
    cells = (row["run"], row["workload"] or "–", row["machine"], row["trials"], row["failed"], claim, recommended)
    return [Text(one_line(cell)) for cell in cells]


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
    headings = ("knob", "what", "values", "default", "stage", "numerics", "where")
    terminal().print(table(headings, rows))


def show_space(source: str, space: ResolvedSpace) -> None:
    """Print a search space as it resolves here, and the file or name that it comes from."""
    rows: list[tuple[str, str | Text]] = [
        *((name, " ".join(map(format_value, choices))) for name, choices in space.choices.items()),
        *((name, Text(f"omitted: {one_line(why)}", style="dim")) for name, why in space.left_out.items()),
    ]
    terminal().print(table(("knob", "choices here"), rows))
    say(f"{source}: {space.size:,} configurations")


def show_findings(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print what the doctor found, a line each with its fix, and the one thing to do first."""
    console = terminal()
    first = first_fix(findings)
    if as_json:
        document = {"findings": [finding._asdict() for finding in findings], "first": first}
        console.print(Text(json.dumps(document, indent=2)), soft_wrap=True)
        return
    styles = {Level.STOPS: "bold red", Level.SLOWS: "yellow", Level.FACT: ""}
    for finding in findings:
        fix = f" → {finding.fix}" if finding.fix else ""
        say(f"{finding.level.value:<6} {finding.text}{fix}", console, style=styles[finding.level])
    if first:
        console.print()
        say(f"First: {first}", console, style="bold")
