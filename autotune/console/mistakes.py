"""Errors as the user sees them, on standard error."""

from __future__ import annotations

from rich.console import Console as RichConsole
from rich.text import Text

from autotune.console.text import clean
from autotune.errors import AutotuneError


def show_error(error: AutotuneError) -> None:
    """What is wrong, the next step, and the user's own traceback where there is one; on standard error."""
    console = RichConsole(stderr=True, highlight=False)
    console.print(Text(f"autotune: {error.message}", style="bold red"), soft_wrap=True)
    if error.hint:
        console.print(Text(error.hint), soft_wrap=True)
    for line in error.detail.splitlines():
        if line and not line.startswith(" ") and line in error.message:
            continue  # a traceback ends with the exception, which was told; lines of code in it are indented
        console.print(Text(clean(line), style="dim"), soft_wrap=True)
