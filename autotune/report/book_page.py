"""A recipe book as one self-contained page. Other people's text is shown as text."""

from __future__ import annotations

from pathlib import Path

from autotune.data.errors import ArgumentError
from autotune.data.files import read_at_most, write_atomically
from autotune.data.printable import one_line, plural
from autotune.recipe.book import read_book
from autotune.report.machines import describe_transfer, row_of
from autotune.report.markup import element
from autotune.report.page import MARK, whole_page
from autotune.report.sections import table

_MARK = MARK.replace(b"autotune", b"autotune book")  # of books: no page of a run is written over
_HEADINGS = ("machine", "measured on", "claim", "recommended", "limited by")


def write_book_page(path: Path) -> Path:
    """Write the page of a book or recipe beside it, and return the page's file.

    Raises:
        RecipeError: The book cannot be read.
        ArgumentError: Another file has the page's name.
        RunDirectoryError: The page cannot be written.
    """
    book, page = read_book(path), path.with_suffix(".html")
    if page.is_file() and _MARK not in read_at_most(page, 4096):
        raise ArgumentError(f"{page} is here already, and is no page of a book", hint="Move it, or rename the book.")
    title = one_line(f"{book.recipes[0].workload.name} on {plural(len(book.recipes), 'kind')} of machine")
    rows = []
    for recipe in book.recipes:
        shown, day = row_of(recipe), recipe.created_by.created_at.partition("T")[0]
        cells = shown.machine, day, shown.claim, shown.recommended, shown.limited_by or "not known"
        rows.append([one_line(cell) for cell in cells])
    transfer = [element("p", one_line(line)) for line in describe_transfer(book.recipes)]
    text = whole_page(title, [element("h1", title), table(_HEADINGS, rows), *transfer])
    text = text.replace(MARK.decode(), _MARK.decode(), 1)
    write_atomically(page, text, hint="Copy the book to a directory that you may write to.")
    return page
