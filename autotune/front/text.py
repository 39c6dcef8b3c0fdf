"""Figures and strings as they are shown, the screens they are shown on, and errors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console as RichConsole
from rich.table import Column, Table
from rich.text import Text

from autotune.data.errors import AutotuneError
from autotune.data.figures import Interval
from autotune.data.printable import one_line


def ratio(interval: Interval | None) -> str:
    """`×2.57 (2.28 to 2.90)`, or a dash."""
    return "–" if interval is None else interval.shown()


def speed(interval: Interval | None) -> str:
    """`×2.57`, marked where the interval spans a factor of two or more; a dash where nothing is known."""
    if interval is None:
        return "–"
    vague = interval.low <= 0 or interval.high >= 2.0 * interval.low
    return f"×{interval.value:.2f}" + (" (uncertain)" if vague else "")


def size(count: int | None) -> str:
    """Bytes for people: `607 MiB`."""
    if count is None:
        return "–"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Seconds for people: `1:05`."""
    hours, rest = divmod(max(0, round(seconds)), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def rate(value: float) -> str:
    """Return a number of something per second: `12,345`, or `2.4` where it is small."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def table(headings: Iterable[str], rows: Iterable[Sequence[str | Text]], *, show_edge: bool = True) -> Table:
    """A table whose cells are folded where they do not fit, but for a run's name."""
    columns = (Column(each, overflow="fold", no_wrap=each == "run") for each in headings)
    made = Table(*columns, box=box.SIMPLE_HEAD, show_edge=show_edge)
    for row in rows:
        made.add_row(*row)
    return made


def terminal() -> RichConsole:
    """Standard output; 120 columns wide where it is no terminal."""
    if sys.stdout.isatty():
        return RichConsole(highlight=False)
    return RichConsole(highlight=False, width=120, force_terminal=False, color_system=None)


def say(text: object, console: RichConsole | None = None, *, style: str = "") -> None:
    """One plain line, as long as it is: users' strings reach the terminal as text only."""
    (console or terminal()).print(Text(one_line(text), style=style), soft_wrap=True)


def note(text: object) -> None:
    """One plain line on standard error: standard output may be the file that it tells of."""
    say(text, RichConsole(stderr=True, highlight=False))


def show_error(error: AutotuneError) -> None:
    """What is wrong, the next step, and the user's own traceback where there is one; on standard error."""
    console = RichConsole(stderr=True, highlight=False)
    say(f"autotune: {error.message}", console, style="bold red")
    if error.hint:
        say(error.hint, console)
    for line in error.detail.splitlines():
        if line and not line.startswith(" ") and line in error.message:
            continue  # a traceback ends with the exception, which was told; lines of code in it are indented
        say(line, console, style="dim")
