"""Errors as the user sees them, on standard error."""

from __future__ import annotations

from rich.console import Console as RichConsole
from rich.text import Text

from autotune.console.text import clean, clean_lines
from autotune.errors import AutotuneError


def show_error(error: AutotuneError) -> None:
    """What is wrong, the next step, and the user's own traceback where there is one; on standard error."""
    console = RichConsole(stderr=True, highlight=False)
    console.print(Text(f"autotune: {clean_lines(error.message)}", style="bold red"), soft_wrap=True)
    if error.hint:
        console.print(Text(clean_lines(error.hint)), soft_wrap=True)
    if error.detail:
        console.print(Text(clean_lines(error.detail), style="dim"), soft_wrap=True)


def show_wrong_usage(message: str) -> None:
    """A wrong command line; on standard error."""
    console = RichConsole(stderr=True, highlight=False)
    console.print(Text(f"autotune: {clean(message)}", style="bold red"), soft_wrap=True)
    console.print(Text("`autotune --help` and `autotune COMMAND --help` say what there is."))
