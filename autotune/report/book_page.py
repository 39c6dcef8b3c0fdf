"""A recipe book as one self-contained page. Other people's text is shown as text."""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path

from autotune.data.errors import ArgumentError
from autotune.data.files import read_at_most, write_atomically
from autotune.data.printable import one_line, plural
from autotune.recipe.book import read_book
from autotune.recipe.recipe import Book
from autotune.report.machines import describe_transfer, row_of

_MARK = '<meta name="generator" content="autotune book">'
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{mark}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0 auto; max-width: 1160px; padding: 20px; font: 15px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.5rem; overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: 5px 10px 5px 0; border-bottom: 1px solid #8a93a0; }}
td {{ overflow-wrap: anywhere; }}
</style>
</head>
<body>
<h1>{title}</h1>
<table>
{rows}
</table>
{lines}
</body>
</html>
"""
_HEADINGS = ("machine", "measured on", "claim", "recommended", "limited by")


def write_book_page(path: Path) -> Path:
    """Write the page of a book or recipe beside it, and return the page's file.

    Raises:
        RecipeError: The book cannot be read.
        ArgumentError: Another file has the page's name.
        RunDirectoryError: The page cannot be written.
    """
    text, page = book_page(read_book(path)), path.with_suffix(".html")
    if page.is_file() and _MARK.encode() not in read_at_most(page, 4096):
        raise ArgumentError(f"{page} is here already, and is no page of a book", hint="Move it, or rename the book.")
    write_atomically(page, text, hint="Copy the book to a directory that you may write to.")
    return page


def book_page(book: Book) -> str:
    """Return the page of a book."""
    title = f"{book.recipes[0].workload.name} on {plural(len(book.recipes), 'kind')} of machine"
    rows = [_row(_HEADINGS, "th")]
    for recipe in book.recipes:
        shown = row_of(recipe)
        day = recipe.created_by.created_at.partition("T")[0]
        rows.append(_row((shown.machine, day, shown.claim, shown.recommended, shown.limited_by or "not known"), "td"))
    lines = "\n".join(f"<p>{_safe(line)}</p>" for line in describe_transfer(book.recipes))
    return _PAGE.format(mark=_MARK, title=_safe(title), rows="\n".join(rows), lines=lines)


def _row(cells: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{_safe(cell)}</{tag}>' for cell in cells)}</tr>"


def _safe(text: str) -> str:
    return html.escape(one_line(text))
