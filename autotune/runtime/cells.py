"""Find the cell of a notebook that a line of its translation comes from; `script.notebook` writes translations."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".autotune-cells.json"  # of the file beside a translation that lists its cells


class Cell(NamedTuple):
    """A code cell of a notebook, and where it stands in the translation."""

    first_line: int  # in the translation, from 1
    shown: str  # `train.ipynb, cell 7`, with `(In [9])` where the notebook shows another number
    id: str  # a digest of its code without constants, and its count among equal cells
    source: str  # as the notebook has it


@functools.cache
def cells_of(file: str) -> tuple[Cell, ...]:
    """Return the cells that a file was translated from; none where it is no translation."""
    try:
        content = Path(file).with_suffix(SUFFIX).read_bytes()
    except (OSError, ValueError):
        return ()
    return tuple(Cell(*fields) for fields in json.loads(content))


def cell_at(file: str, line: int) -> Cell | None:
    """Return the cell in which a line of a translation stands; None in any other file."""
    return next((cell for cell in reversed(cells_of(file)) if cell.first_line <= line), None)


def describe_line(file: str, line: int | None) -> str:
    """Return `train.py, line 12`; of a translation the line in its cell: `train.ipynb, cell 7, line 3`."""
    cell = cell_at(file, line or 0)
    shown, first = (file, 1) if cell is None else (cell.shown, cell.first_line)
    return f"{shown}, line {line - first + 1}" if line else shown


def describe_frames(text: str) -> str:
    """Return a traceback that names cells in place of a translation's lines."""
    found = re.compile(r'File "([^"\n]+)", line (\d+)')
    return found.sub(lambda at: describe_line(at[1], int(at[2])) if cells_of(at[1]) else at[0], text)
