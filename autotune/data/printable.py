"""Make other people's text fit to print: on one line, not too long, without control characters."""

from __future__ import annotations

import re
import unicodedata

LONGEST_MESSAGE = 1000  # characters


def one_line(value: object, *, longest: int | None = None) -> str:
    r"""Return `value` as one line, cut in its middle to `longest` characters: `"a\nb\x1b[0m"` becomes `a b\x1b[0m`."""
    text = _without_middle(str(value), longest)  # it may have millions of characters
    return _without_middle("".join(map(_shown, text)), longest)


def short(value: object) -> str:
    """Return a value from a file in at most 60 characters, for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of 5,000 digits, tables 1,000 deep
        text = "too large to show"
    return text if len(text) <= 60 else text[:57] + "…"


def with_article(noun: str) -> str:
    """Return `an int` for `int`, and `a list` for `list`."""
    begins = noun.lower()
    is_vowel = begins.startswith(tuple("aeiou")) and not begins.startswith(("one", "uni", "use", "eu"))
    return f"{'an' if is_vowel else 'a'} {noun}"


def plural(count: int, noun: str) -> str:
    """Return `1 trial` or `2 trials`, with separators from a thousand on."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def time_in_words(seconds: float) -> str:
    """Return a length of time in a unit that suits it: `0.3 s`, `45 s`, `12 min`, `3.4 hours`."""
    if seconds < 119.5:
        return f"{seconds:.1g} s" if 0 < seconds < 0.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7170 else f"{seconds / 3600:,.1f} hours"


def rate_text(value: float) -> str:
    """Return a number of something per second: `12,345`, or `2.4` if it is small."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def memory_size(count: int | None) -> str:
    """Return bytes for people: `607 MiB`; a dash where they are not known."""
    if count is None:
        return "–"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Return seconds as on a clock: `1:05`."""
    hours, rest = divmod(max(0, round(seconds)), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def first_line(text: str) -> str:
    """Return the first line of a text; empty if there is none."""
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


_UNPRINTABLE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return `text` without control sequences, in UTF-8; each state of a progress bar is a line."""
    return _UNPRINTABLE.sub("", text.replace("\r", "\n")).encode("utf-8", "backslashreplace").decode()
