"""Trials, histories, knobs, search spaces and runs as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console as RichConsole
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from autotune.console.progress import trial_line
from autotune.console.text import clean, duration, ratio, say, size, terminal
from autotune.devices.doctor import Finding, Level, first_thing
from autotune.record import TrialRecord
from autotune.space.configuration import Configuration, format_value
from autotune.space.knobs import KNOBS, Numerics
from autotune.stats.deciding import Verdict

if TYPE_CHECKING:
    import pandas

    from autotune.report.compare import RunSummary
    from autotune.space.search_space import ResolvedSpace


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
    """The main columns of a history, one trial a row; `settled` where a trial was measured before it had settled."""
    console = console or terminal()
    varied = [name for name in KNOBS if name in frame.columns and frame[name].nunique(dropna=False) > 1]
    unsettled = ["settled"] if "settled" in frame.columns and not frame["settled"].fillna(True).all() else []
    columns = ["run", "trial", "phase", "outcome", *varied, *_MEASURED, *unsettled, "reason"]
    say("  ".join(columns), console, style="bold")
    known = frame.notna()
    for index, row in frame.iterrows():
        say("  ".join(_cell(name, row[name]) if known.at[index, name] else "–" for name in columns), console)
    say(f"{len(frame)} trials; each speed-up is over the baseline_throughput that was measured beside it", console)


def _cell(name: str, value: object) -> str:
    if name.endswith("_bytes"):
        return size(int(str(value)))
    if isinstance(value, float):
        return f"{value:,.0f}" if name.endswith("throughput") else f"{value:.3f}"
    return clean(str(value))[:80]


def show_knobs(console: RichConsole | None = None) -> None:
    """All knobs."""
    table = Table("knob", "what", "values", "default", "stage", "numerics", "where", box=box.SIMPLE_HEAD)
    for knob in KNOBS.values():
        table.add_row(
            knob.name,
            knob.summary,
            knob.domain.describe(),
            "the workload's" if knob.default is None else format_value(knob.default),
            knob.stage,
            "same" if knob.numerics is Numerics.SAME else "may change",
            ", ".join(sorted(knob.devices)),
        )
    (console or terminal()).print(table)


def show_space(source: str, space: ResolvedSpace, console: RichConsole | None = None) -> None:
    """A search space as it resolves here, and the file or name it comes from."""
    console = console or terminal()
    table = Table("knob", "choices here", box=box.SIMPLE_HEAD)
    for name, choices in space.choices.items():
        table.add_row(name, " ".join(format_value(each) for each in choices))
    for name, why in space.left_out.items():
        table.add_row(name, Text(f"left out: {clean(why)}", style="dim"))
    console.print(table)
    say(f"{source}: {space.size:,} configurations", console)


def show_comparison(summaries: Iterable[RunSummary], console: RichConsole | None = None) -> None:
    """Runs side by side, one row each."""
    console = console or terminal()
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("run", "workload", "machine", "trials", "failed", "claim", "recommended"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "run")
    notes = []
    for each in summaries:
        claim = "no recipe" if each.verdict is None else str(each.verdict)
        if each.verdict is Verdict.FASTER:
            claim += f" {ratio(each.claimed)}"
        table.add_row(
            Text(clean(each.run)),  # text: a string's square brackets would be taken for colours
            Text(clean(each.workload or "–")),
            Text(clean(each.machine_description)),
            str(each.trials),
            str(each.failed),
            claim,
            Text(clean(_recommended(each))),
        )
        if not each.comparable_with_first:
            notes.append(f"{each.run} cannot be held against the first run: {each.why_not}")
    _print_whole(table, console)
    for note in notes:
        say(note, console, style="yellow")


def _recommended(summary: RunSummary) -> str:
    if summary.recommended_changes is not None:
        return summary.recommended_changes
    return "–" if summary.best_changes is None else f"– (best in the search: {summary.best_changes})"


def _print_whole(table: Table, console: RichConsole) -> None:
    """On a terminal as wide as that is; elsewhere as wide as the table: nothing is cut or folded in a pipe."""
    if not console.is_terminal:
        unbounded = console.options.update(max_width=1 << 16)
        console.width = max(console.width, Measurement.get(console, unbounded, table).maximum)
    console.print(table)


def show_findings(findings: Sequence[Finding], *, as_json: bool, console: RichConsole | None = None) -> None:
    """What a doctor found, a line each with its fix, and the one thing to do first."""
    console = console or terminal()
    if as_json:
        told = {"findings": [each.model_dump(mode="json") for each in findings], "first": first_thing(list(findings))}
        console.print(Text(json.dumps(told, indent=2)), soft_wrap=True)
        return
    styles = {Level.STOPS: "bold red", Level.SLOWS: "yellow", Level.FACT: ""}
    for each in findings:
        fix = f" → {each.fix}" if each.fix else ""
        say(f"{each.level.value:<6} {each.what}{fix}", console, style=styles[each.level])
    if first := first_thing(list(findings)):
        console.print()
        say(f"First: {first}", console, style="bold")
