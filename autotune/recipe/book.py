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
from autotune.data.run_directory import LATEST
from autotune.machine.kind import Kind, kind_of
from autotune.recipe.recipe import LARGEST_FILE_BYTES, MOST_RECIPES, Book, Recipe, load_recipes
from autotune.recipe.same_workload import first_difference
from autotune.stats.deciding import Verdict

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
    """Make one book of recipes, books, run directories, and folders, of which each `.json` file counts.

    Of the recipes of one kind of machine the newest counts, an undecided one only where no other is decided.

    Raises:
        ArgumentError: A folder has no such file, or there are too many recipes.
        RecipeError: A file is no recipe, or its recipe is of another training than the first one.
    """
    found = [_Found(recipe, file) for path in paths for file in _files_of(path) for recipe in read_book(file).recipes]
    newest: dict[Kind, _Found] = {}
    notes = []
    for entry in found:
        if entry is not found[0] and (difference := first_difference(found[0].recipe.workload, entry.recipe.workload)):
            raise RecipeError(
                one_line(f"{found[0].file} and {entry.file} are of unlike trainings: {difference}"),
                hint="Merge the recipes of each training into a book of its own.",
            )
        kind = kind_of(entry.recipe.machine)
        before = newest.setdefault(kind, entry)
        if before is entry:
            continue
        dropped, kept = sorted((before, entry), key=_rank)
        newest[kind] = kept
        if dropped.recipe != kept.recipe:
            why = "an answer" if _rank(dropped)[0] < _rank(kept)[0] else "a newer recipe"
            notes.append(one_line(f"{dropped.file} is left out: {kept.file} has {why} for {kind}"))
    if len(newest) > MOST_RECIPES:
        raise ArgumentError(f"these are recipes of {len(newest)} kinds of machine", hint=f"A book has {MOST_RECIPES}.")
    return Merged(Book(recipes=tuple(entry.recipe for entry in newest.values())), notes)


def save_book(book: Book, path: Path) -> None:
    """Write a book. It may replace an older book or recipe, of whose machines it has recipes too.

    Raises:
        ArgumentError: The path holds another file, or recipes that would be lost. Or the book is too large to be read.
        RunDirectoryError: It cannot be written.
    """
    if os.path.isfile(path):
        try:
            older = read_book(path)
        except RecipeError as error:
            raise ArgumentError(f"{path} exists and is no recipe book", hint="Give -o another path.") from error
        _refuse_loss(older, book, path)
    text = book.to_json()
    if len(text.encode()) > LARGEST_FILE_BYTES:
        raise ArgumentError(
            f"the book would have {len(text.encode()) >> 20} MiB, and {LARGEST_FILE_BYTES >> 20} MiB can be read",
            hint="Merge fewer recipes.",
        )
    write_atomically(path, text, hint="Give -o a path that you may write to.")


def _refuse_loss(older: Book, book: Book, path: Path) -> None:
    """Raise ArgumentError where a book lacks a machine, answer or training of the one that it replaces."""
    kept = {kind_of(recipe.machine): recipe for recipe in book.recipes}
    kinds = {kind_of(recipe.machine): recipe for recipe in older.recipes}
    lost = [kind for kind, recipe in kinds.items() if kind not in kept or _is_answer(recipe) > _is_answer(kept[kind])]
    if first_difference(older.recipes[0].workload, book.recipes[0].workload):
        raise ArgumentError(f"{path} is of another training, and would be lost", hint="Give -o another path.")
    if lost:
        raise ArgumentError(
            f"{path} has {'an answer' if lost[0] in kept else 'a recipe'} for {lost[0]}, which would be lost",
            hint=f"Merge it as well: autotune merge {path} RECIPE… -o {path}",
        )


def _rank(entry: _Found) -> tuple[bool, str]:
    """Return by what the recipes of one kind of machine are ordered: an answer before none, then the newer one."""
    return _is_answer(entry.recipe), entry.recipe.created_by.created_at


def _is_answer(recipe: Recipe) -> bool:
    return recipe.evidence.verdict is not Verdict.UNDECIDED


def _files_of(path: Path) -> list[Path]:
    """Return the files that a path stands for; of a run directory its recipe. Raises ArgumentError."""
    if not os.path.isdir(path):
        return [path]
    if os.path.isfile(path / "recipe.json"):
        return [path / "recipe.json"]
    if os.path.isfile(path / "run.json"):
        hint = f"Continue it: autotune tune … --resume {path}"
        raise ArgumentError(f"{path} is a run without a recipe: it has not ended", hint=hint)
    runs = (file for file in path.glob("*/recipe.json") if file.parent.name != LATEST)  # a link to one of the others
    for found in (path.glob("*.json"), runs):
        files = sorted(islice(found, MOST_FILES + 1))
        if len(files) > MOST_FILES:
            raise ArgumentError(f"{path} holds too many recipes", hint="Give the recipes themselves.")
        if files:
            return files
    raise ArgumentError(f"{path} holds no .json files and no runs", hint="Give the recipes themselves.")
