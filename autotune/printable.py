"""Text of others made fit to be shown: on one line, not too long, with nothing in it that a terminal obeys.

File names, names in damaged files, what users' code raised: all of it can hold line breaks, escape sequences and
characters that turn the direction of writing around. This module imports nothing of the package.
"""

from __future__ import annotations

import unicodedata

LONGEST_MESSAGE = 1000
"""Characters of a message; a path alone may have more."""
LONGEST_VALUE = 60


def one_line(what: object, *, longest: int | None = None) -> str:
    r"""`what` as text of one line; what is no printable character stands there as Python would write it.

    Line breaks, tabs and unusual spaces become spaces: `"a\nb\x1b[0m"` is shown as `a b\x1b[0m`.

    Args:
        what: Any text, or what `str` makes text of.
        longest: Cut longer text in its middle, since what is wrong stands at one of its ends.
    """
    text = str(what)
    if longest is not None and len(text) > longest:
        text = _without_middle(text, longest)  # before its characters are looked at: it may have millions
    if not text.isprintable():
        text = "".join(map(_shown, text))
    return text if longest is None else _without_middle(text, longest)


def short(value: object) -> str:
    """A value out of a file, as it is shown in a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of 5,000 digits, tables 1,000 deep
        text = "too large to show"
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "…"


def first_line(text: str) -> str:
    """The first line of a text of several; of none, nothing."""
    return next(iter(text.splitlines()), "")


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    if char in "\n\r\t" or unicodedata.category(char) == "Zs":
        return " "
    return char.encode("unicode_escape").decode()


def _without_middle(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    left = longest // 2
    return f"{text[:left]}…{text[len(text) - (longest - left - 1) :]}"
