"""What a training does where no recipe was measured on this kind of machine, and how that is said."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from autotune.data.printable import LONGEST_MESSAGE, one_line

OnMismatch = Literal["error", "nearest", "baseline", "ignore"]
"""What to do where no recipe was measured on this kind of machine.

`error`: stop. `nearest`: warn, and train with the nearest. `baseline`: warn, and train as the script has it. `ignore`:
train with the nearest, without a warning.
"""


class Selection(NamedTuple):
    """The choice among recipes."""

    fits: bool  # it was measured on this kind of machine
    takes_baseline: bool = False  # the training goes on as the script has it
    text: str = ""  # which recipe and why; empty where nothing is to be said


def describe_changes(changes: Iterable[str], command: str) -> str:
    """Say what has changed since a recipe was measured, and the command that measures its claim again."""
    text = f"changed since the recipe was measured: {'; '.join(changes)}. To measure its claim again: {command}"
    return one_line(text, longest=LONGEST_MESSAGE)
