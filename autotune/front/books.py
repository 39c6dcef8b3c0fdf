"""Print a recipe book: the claim and the recommendation of each kind of machine, and which recipe this one takes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console as RichConsole
from rich.text import Text

from autotune.data.printable import one_line
from autotune.front.console import ratio, say, table, terminal
from autotune.machine.kind import kind_of
from autotune.recipe.recipe import Book, Recipe, choose_recipe
from autotune.space.configuration import Configuration
from autotune.stats.deciding import Verdict


def show_book(book: Book, path: Path, console: RichConsole | None = None) -> None:
    """Print a line for each recipe, and what a training does here."""
    console = console or terminal()
    rows = [[Text(one_line(cell)) for cell in _row(number, recipe)] for number, recipe in enumerate(book.recipes, 1)]
    console.print("", table(("", "measured on", "claim", "recommended"), rows, show_edge=False), "", sep="\n")
    _, selection = choose_recipe(book, None, source=str(path))
    say(f"Here: {selection.text}", console)
    say(f"Book: {path}", console)


def _row(number: int, recipe: Recipe) -> tuple[str, ...]:
    verdict = recipe.evidence.verdict
    claim = ratio(recipe.evidence.speedup) if verdict is Verdict.FASTER else verdict.value.replace("_", " ")
    changes = Configuration(recipe.configuration).describe(Configuration(recipe.baseline))
    return str(number), str(kind_of(recipe.machine)), claim, changes if recipe.changes else "the baseline"
