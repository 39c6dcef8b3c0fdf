"""A recipe book: the recipes of one training on several kinds of machine, in one file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from autotune.data.errors import ArgumentError, RecipeError
from autotune.data.files import write_atomically
from autotune.data.printable import one_line
from autotune.machine.kind import Kind, kind_of
from autotune.recipe.recipe import MOST_RECIPES, Book, Recipe, load_recipes
from autotune.recipe.same_workload import first_difference

MOST_FILES = 1000  # of a folder


class Merged(NamedTuple):
    """A merged book, and notes on the recipes that were left out."""

    book: Book
    notes: list[str]


class _Found(NamedTuple):
    """A recipe, and the file that it was found in."""

    recipe: Recipe
    file: Path


def read_book(path: str | Path) -> Book:
    """Read a book; a recipe is a book of one. Raises `RecipeError`."""
    loaded = load_recipes(path)
    return loaded if isinstance(loaded, Book) else Book(recipes=(loaded,))


def merge_recipes(paths: Sequence[Path]) -> Merged:
    """Make one book of recipes and books, in the order given. Of the recipes of one kind of machine the newest counts.

    Args:
        paths: Recipes, books, run directories, and folders, of which each `.json` file counts.

    Raises:
        ArgumentError: A folder has no such file, or there are too many recipes.
        RecipeError: A file is no recipe, or its recipe is of another training than the first one.
    """
    found = [_Found(recipe, file) for path in paths for file in _files_of(path) for recipe in read_book(file).recipes]
    newest: dict[Kind, _Found] = {}
    notes = []
    for entry in found:
        if difference := _difference(found[0], entry):
            raise RecipeError(
                one_line(f"{found[0].file} and {entry.file} are of unlike trainings: {difference}"),
                hint="Merge the recipes of each training into a book of its own.",
            )
        kind = kind_of(entry.recipe.machine)
        before = newest.setdefault(kind, entry)
        if before is entry:
            continue
        older, newer = sorted((before, entry), key=lambda known: known.recipe.created_by.created_at)
        newest[kind] = newer
        if older.recipe != newer.recipe:
            notes.append(one_line(f"{older.file} is left out: {newer.file} has a newer recipe of {kind}"))
    if len(newest) > MOST_RECIPES:
        raise ArgumentError(f"these are recipes of {len(newest)} kinds of machine", hint=f"A book has {MOST_RECIPES}.")
    return Merged(Book(recipes=tuple(entry.recipe for entry in newest.values())), notes)


def save_book(book: Book, path: Path) -> None:
    """Write a book, in the place of an older book or recipe only.

    Raises:
        ArgumentError: The path holds another file.
        RunDirectoryError: It cannot be written.
    """
    if os.path.isfile(path):
        try:
            load_recipes(path)
        except RecipeError as error:
            raise ArgumentError(f"{path} exists and is no recipe book", hint="Give -o another path.") from error
    write_atomically(path, book.to_json(), hint="Give -o a path that you may write to.")


def _difference(first: _Found, other: _Found) -> str:
    return "" if first is other else first_difference(first.recipe.workload, other.recipe.workload)


def _files_of(path: Path) -> list[Path]:
    """Return the files that a path stands for; of a run directory its recipe. Raises ArgumentError."""
    if not os.path.isdir(path):
        return [path]
    if os.path.isfile(path / "recipe.json"):
        return [path / "recipe.json"]
    files = sorted(islice(path.glob("*.json"), MOST_FILES + 1))
    if not files or len(files) > MOST_FILES:
        raise ArgumentError(
            f"{path} holds {'too many' if files else 'no'} .json files", hint="Give the recipes themselves."
        )
    return files
