"""Text of others made fit to be shown: on one line, not too long, with nothing in it that a terminal obeys.

File names, damaged files and exceptions of users' code can hold line breaks, escape sequences and characters that turn
the direction of writing around. This module imports nothing of the package.
"""

from __future__ import annotations

import unicodedata

LONGEST_MESSAGE = 1000
"""Characters of a message; a path alone may have more."""


def one_line(what: object, *, longest: int | None = None) -> str:
    r"""`what` as text of one line; what is no printable character stands there as Python would write it.

    Line breaks, tabs and unusual spaces become spaces: `"a\nb\x1b[0m"` is shown as `a b\x1b[0m`.

    Args:
        what: Any text, or what `str` makes text of.
        longest: Longer text is cut in its middle, since what is wrong stands at one of its ends.
    """
    text = _without_middle(str(what), longest)  # it may have millions of characters
    return _without_middle("".join(map(_shown, text)), longest)


def short(value: object) -> str:
    """A value out of a file in at most 60 characters, as it is shown in a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of 5,000 digits, tables 1,000 deep
        text = "too large to show"
    return text if len(text) <= 60 else text[:57] + "…"


def first_line(text: str) -> str:
    """The first line of a text; empty where there is none."""
    return next(iter(text.splitlines()), "")


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    if char in "\n\r\t" or unicodedata.category(char) == "Zs":
        return " "
    return char.encode("unicode_escape").decode()


def _without_middle(text: str, longest: int | None) -> str:
    if longest is None or len(text) <= longest:
        return text
    left = longest // 2
    return f"{text[:left]}…{text[len(text) - (longest - left - 1) :]}"
