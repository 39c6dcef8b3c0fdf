"""Figures and strings as they are shown, and the screen they are shown on."""

from __future__ import annotations

import sys

from rich.console import Console as RichConsole
from rich.text import Text

from autotune.printable import one_line
from autotune.stats.intervals import Interval


def clean(text: object) -> str:
    """`text` on one line and without control characters: users' strings reach the terminal as text only."""
    return one_line(text)


def ratio(interval: Interval | None) -> str:
    """`×2.57 (2.28 to 2.90)`, or a dash; bounds that are the figure itself are no interval."""
    if interval is None:
        return "–"
    bounds = f" ({interval.low:.2f} to {interval.high:.2f})" if interval.low < interval.high else ""
    return f"×{interval.value:.2f}{bounds}"


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


def terminal() -> RichConsole:
    """Standard output; 120 columns wide where it is no terminal."""
    if sys.stdout.isatty():
        return RichConsole(highlight=False)
    return RichConsole(highlight=False, width=120, force_terminal=False, color_system=None)


def say(text: object, console: RichConsole | None = None, *, style: str = "") -> None:
    """One plain line, as long as it is."""
    (console or terminal()).print(Text(clean(text), style=style), soft_wrap=True)


def note(text: object) -> None:
    """One plain line on standard error: standard output may be the file that it tells of."""
    say(text, RichConsole(stderr=True, highlight=False))
