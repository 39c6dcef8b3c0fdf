"""Print how a run ends: at most 20 lines of 80 columns that format its answer; and edits, and verifications."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console as RichConsole
from rich.text import Text

from autotune.data.printable import duration, memory_size, one_line
from autotune.front.console import note, ratio, say, terminal
from autotune.recipe.answers import NOT_PROMISED, WORTH_A_LINE_SECONDS, Answer, Change, Command, Side
from autotune.stats.deciding import ClaimResult, Verdict

if TYPE_CHECKING:
    from autotune.recipe.recipe import Recipe
    from autotune.tuning.verify import Verification

MOST_LINES, COLUMNS = 20, 80
COMPILES_SECONDS = 1.0  # shorter compile times are no cost that decides


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
    costs = [(1, ("energy/sample", *map(_energy, sides)))] if any(side.joules_per_sample for side in sides) else []
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


def _energy(side: Side) -> str:
    joules = side.joules_per_sample
    return "–" if joules is None else f"{joules:.3g} J" if joules >= 1 else f"{1e3 * joules:.3g} mJ"


def _unchecked(gaps: Sequence[str], width: int) -> str:
    """Return in one line what was not reached or not checked, as far as it fits."""
    names, more, said = [one_line(gap.split(" (")[0]).replace("; ", ", ") for gap in gaps], "", ""
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
