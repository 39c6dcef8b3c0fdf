"""Trials, histories, knobs, search spaces and runs as tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.measure import Measurement
from rich.text import Text

from autotune.data.printable import one_line, plural
from autotune.data.record import TrialRecord
from autotune.front.progress import trial_line
from autotune.front.text import duration, ratio, say, size, table, terminal
from autotune.machine.doctor import Finding, Level, first_fix
from autotune.space.configuration import Configuration, format_value
from autotune.space.knobs import KNOBS, Numerics
from autotune.stats.deciding import Verdict

if TYPE_CHECKING:
    import pandas

    from autotune.report.compare import RunSummary
    from autotune.space.space_file import ResolvedSpace


def show_trials(records: Sequence[TrialRecord], baseline: Configuration, console: RichConsole | None = None) -> None:
    """A run's trials, one line each; the time is what the trial took, not when it ended as in `Progress`."""
    console = console or terminal()
    heading = f"{'took':>5}  {'phase':<8} {'no.':>3}  {'speed-up':<18}  changes"
    say(heading, console, style="bold")
    for record in records:
        changes = Configuration(record.configuration).describe(relative_to=baseline)
        console.print(trial_line(record, changes, stamp=f"{duration(record.seconds):>5}"), soft_wrap=True)


_MEASURED = ("speedup", "throughput", "baseline_throughput", "peak_host_bytes")


def show_history(frame: pandas.DataFrame, console: RichConsole | None = None) -> None:
    """The main columns of a history, one trial a row; `settled` and where they ran only where these differ."""
    console = console or terminal()
    varied = [name for name in KNOBS if name in frame.columns and frame[name].nunique(dropna=False) > 1]
    unsettled = ["settled"] if "settled" in frame.columns and not frame["settled"].fillna(True).all() else []
    places = [name for name in ("seat", "host", "device") if name in frame.columns and frame[name].nunique() > 1]
    columns = ["run", "trial", "phase", "outcome", *varied, *_MEASURED, *unsettled, *places, "reason"]
    say("  ".join(columns), console, style="bold")
    known = frame.notna()
    for index, row in frame.iterrows():
        say("  ".join(_cell(name, row[name]) if known.at[index, name] else "–" for name in columns), console)
    say(
        f"{plural(len(frame), 'trial')}; each speed-up is over the baseline_throughput that was measured beside it",
        console,
    )


def _cell(name: str, value: object) -> str:
    if name.endswith("_bytes"):
        return size(int(str(value)))
    if isinstance(value, float):
        return f"{value:,.0f}" if name.endswith("throughput") else f"{value:.3f}"
    return one_line(value)[:80]


def show_knobs() -> None:
    """All knobs."""
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
    """A search space as it resolves here, and the file or name it comes from."""
    rows: list[tuple[str, str | Text]] = [
        *((name, " ".join(map(format_value, choices))) for name, choices in space.choices.items()),
        *((name, Text(f"left out: {one_line(why)}", style="dim")) for name, why in space.left_out.items()),
    ]
    terminal().print(table(("knob", "choices here"), rows))
    say(f"{source}: {space.size:,} configurations")


def show_comparison(summaries: Sequence[RunSummary], console: RichConsole | None = None) -> None:
    """Runs side by side, one row each."""
    console = console or terminal()
    headings = ("run", "workload", "machine", "trials", "failed", "claim", "recommended")
    shown = table(headings, map(_compared, summaries))
    if not console.is_terminal:  # as wide as the table: nothing is cut or folded in a pipe
        unbounded = console.options.update(max_width=1 << 16)
        console.width = max(console.width, Measurement.get(console, unbounded, shown).maximum)
    console.print(shown)
    for each in summaries:
        if each.differs:
            say(f"{each.run} cannot be held against the first run: {each.differs}", console, style="yellow")


def _compared(run: RunSummary) -> list[Text]:
    """A run's row, as text: a string's square brackets would be taken for colours."""
    claim = "no recipe" if run.verdict is None else str(run.verdict)
    if run.verdict is Verdict.FASTER:
        claim += f" {ratio(run.claimed)}"
    recommended = run.recommended
    if recommended is None:
        recommended = "–" if run.best is None else f"– (best in the search: {run.best})"
    cells = (run.run, run.workload or "–", run.machine, run.trials, run.failed, claim, recommended)
    return [Text(one_line(each)) for each in cells]


def show_findings(findings: Sequence[Finding], *, as_json: bool) -> None:
    """What a doctor found, a line each with its fix, and the one thing to do first."""
    console = terminal()
    first = first_fix(findings)
    if as_json:
        told = {"findings": [each._asdict() for each in findings], "first": first}
        console.print(Text(json.dumps(told, indent=2)), soft_wrap=True)
        return
    styles = {Level.STOPS: "bold red", Level.SLOWS: "yellow", Level.FACT: ""}
    for each in findings:
        fix = f" → {each.fix}" if each.fix else ""
        say(f"{each.level.value:<6} {each.what}{fix}", console, style=styles[each.level])
    if first:
        console.print()
        say(f"First: {first}", console, style="bold")
