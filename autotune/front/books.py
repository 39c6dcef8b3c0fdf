"""Print a recipe book: the claim and the recommendation of each kind of machine, and which recipe this one takes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console as RichConsole
from rich.text import Text

from autotune.data.printable import one_line
from autotune.front.console import say, table, terminal
from autotune.recipe.recipe import Book, choose_recipe
from autotune.report.machines import describe_transfer, row_of


def show_book(book: Book, path: Path, console: RichConsole | None = None) -> None:
    """Print a line for each recipe, what carries over between the machines, and what a training does here."""
    console = console or terminal()
    rows = []
    for number, recipe in enumerate(book.recipes, start=1):
        shown = row_of(recipe)
        cells = (str(number), shown.machine, shown.claim, shown.recommended)
        rows.append([Text(one_line(cell)) for cell in cells])
    console.print("", table(("", "measured on", "claim", "recommended"), rows, show_edge=False), "", sep="\n")
    for line in describe_transfer(book.recipes):
        say(line, console)
    _, selection = choose_recipe(book, None, source=str(path))
    say(f"Here: {selection.text}", console)
    say(f"Book: {path}", console)
