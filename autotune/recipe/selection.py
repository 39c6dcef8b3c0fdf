"""Which recipe a training takes on this machine, and what it does where none was measured on such a machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from autotune.data.errors import ArgumentError, MachineMismatchError
from autotune.data.facts import Machine
from autotune.data.printable import one_line
from autotune.machine.kind import find_nearest, kind_differences, kind_of

OnMismatch = Literal["error", "nearest", "baseline", "ignore"]
"""What to do where no recipe was measured on this kind of machine.

`error`: stop. `nearest`: warn, and train with the nearest. `baseline`: warn, and train as the script has it. `ignore`:
train with the nearest, without a warning.
"""
LONGEST_FACT = 300  # characters: a machine's model comes from a file


class Selection(NamedTuple):
    """The choice among recipes.

    Args:
        position: Of the recipe, from 0.
        fits: It was measured on this kind of machine.
        takes_baseline: The training goes on as the script has it.
        text: Which recipe and why; empty where nothing is to be said.
    """

    position: int
    fits: bool
    takes_baseline: bool
    text: str


def select_recipe(
    measured: Sequence[Machine], here: Machine, on_mismatch: OnMismatch, *, source: str, is_book: bool
) -> Selection:
    """Choose among the recipes that were measured on these machines.

    Args:
        measured: The machine of each recipe.
        here: This machine.
        on_mismatch: What to do where none fits.
        source: The file of the recipes, for messages.
        is_book: They are a book's. A single recipe is said to be taken only where it does not fit.

    Raises:
        ArgumentError: `on_mismatch` is none of its words.
        MachineMismatchError: None fits, and `on_mismatch` is `error`.
    """
    check_wish(on_mismatch, get_args(OnMismatch))
    index = find_nearest(measured, here)[0]
    name = one_line(f"recipe {index + 1} of {len(measured)} in {source}")
    differences = _differences(measured[index], here)
    if not differences:
        text = f"{name} was measured on this kind of machine: {_shown(kind_of(measured[index]))}" if is_book else ""
        return Selection(position=index, fits=True, takes_baseline=False, text=text)
    if on_mismatch == "ignore":
        text = f"{name} is the nearest to this machine" if is_book else ""
        return Selection(position=index, fits=False, takes_baseline=False, text=text)
    mismatch = describe_mismatch(measured[index], here)
    if is_book:
        mismatch = f"no recipe of this kind of machine; nearest is {name}: {differences}"
    command = one_line(f"autotune tune … --book {source}")
    if on_mismatch == "error":
        raise MachineMismatchError(mismatch, hint=f"Tune here: {command}")
    then = "training as the script has it" if on_mismatch == "baseline" else "training with it all the same"
    text = f"{mismatch}; {then}. To tune here, beginning with what is known: {command}"
    return Selection(position=index, fits=False, takes_baseline=on_mismatch == "baseline", text=text)


def check_wish(word: object, words: Sequence[str]) -> None:
    """Raise `ArgumentError` where an `on_mismatch` is none of these words."""
    if word not in words:
        *first, last = (repr(known) for known in words)
        raise ArgumentError(f"on_mismatch={word!r}", hint=f"It is {', '.join(first)} or {last}.")


def describe_mismatch(measured: Machine, here: Machine) -> str:
    """Return why a recipe's machine is of another kind than this one; empty where it is not."""
    differences = _differences(measured, here)
    return differences and f"the recipe was measured on another machine: {differences}"


def describe_changes(changes: Iterable[str], command: str) -> str:
    """Say what has changed since a recipe was measured, and the command that measures its claim again."""
    shown = "; ".join(map(_shown, changes))
    return f"changed since the recipe was measured: {shown}. To measure its claim again: {command}"


def _differences(measured: Machine, here: Machine) -> str:
    return "; ".join(map(_shown, kind_differences(measured, here)))


def _shown(value: object) -> str:
    return one_line(value, longest=LONGEST_FACT)
