"""Find a script's own files and a notebook's cells, and read in them without running them. No TensorFlow.

`script.notebook` writes the translation of a notebook, and the file that lists its cells.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from autotune.data.errors import WorkloadError
from autotune.data.facts import KerasVersion, WorkloadReference
from autotune.space.keras_in_use import uses_legacy_keras

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.comprehension)
"""Nodes of a syntax tree that bind names of their own."""
SUFFIX = ".autotune-cells.json"  # of the file beside a translation that lists its cells


def parse_source(file: Path) -> ast.Module:
    """Return the syntax tree of a source file; an empty one if it cannot be read or parsed."""
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def binds_workload(file: Path, name: str) -> bool:
    """Return whether a source file binds a name at its top level."""
    waiting: list[ast.AST] = [parse_source(file)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.alias) and (node.asname or node.name) == name:
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
        if not isinstance(node, _SCOPES):
            waiting += ast.iter_child_nodes(node)
    return False


def own_files(file: Path, directory: Path) -> list[Path]:
    """Return the script and the modules of its own that it imports, found in their sources."""
    found, waiting = [], [file]
    while waiting:
        source = waiting.pop()
        if source in found:
            continue
        found.append(source)
        for name in _imported_names(source):
            parts = name.split(".")
            for end, folder in itertools.product(range(1, len(parts) + 1), (directory, source.parent)):
                stem = folder.joinpath(*parts[:end])
                waiting += [path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()]
    return found


def _imported_names(file: Path) -> set[str]:
    """Return the dotted names of the modules that a source file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(parse_source(file)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names |= {f"{module}.{alias.name}" if module else alias.name for alias in node.names}
            names |= {module} if module else set()
    return names


def is_installed(file: str) -> bool:
    """Return whether a file is of an installed package, and so not the user's.

    Containers have packages in dist-packages, clusters in folders of PYTHONPATH: TensorFlow's neighbors are packages.
    """
    if any(f"{os.sep}{folder}{os.sep}" in file for folder in ("site-packages", "dist-packages")):
        return True
    for folder in getattr(sys.modules.get("tensorflow"), "__path__", ()):
        if file.startswith(os.path.dirname(folder) + os.sep):
            return True
    return False


def installed_packages(files: Sequence[Path]) -> list[str]:
    """Return the top-level names of the installed packages that these files import, without Python's own."""
    names = {name.partition(".")[0] for file in files for name in _imported_names(file)}
    found = []
    for name in sorted(names - set(sys.stdlib_module_names)):
        spec = importlib.util.find_spec(name)
        if spec is not None and is_installed(str(spec.origin or spec.submodule_search_locations)):
            found.append(name)
    return found


def refuse_broken(file: Path) -> None:
    """Raise `WorkloadError` for a script that Python cannot compile."""
    try:
        compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        where = describe_line(str(file), getattr(error, "lineno", None))
        raise WorkloadError(f"{where}: {error}", hint="Fix the script; Python cannot run it.") from error


def directory_of(reference: WorkloadReference) -> str:
    """Return the directory that comes first on the script's search path."""
    return reference.search_path[0]


def file_of(reference: WorkloadReference) -> Path:
    """Return the script's file; of a module, the one that Python would find. Raises `WorkloadError`."""
    if reference.file is not None:
        return Path(reference.file)
    parts = str(reference.module).split(".")
    for entry in (*reference.search_path, *sys.path):
        stem = Path(entry or ".", *parts)
        for file in (stem / "__main__.py", stem.with_suffix(".py")):
            if file.is_file():
                return file.resolve()
    raise WorkloadError(
        f"no module {reference.module!r} that can be run",
        hint="It is looked for in the current directory and among the installed packages.",
    )


def main_file_of(reference: WorkloadReference) -> str:
    """Return the path that `python script.py` gives `__file__`: absolute, with symbolic links as the user wrote them.

    The working directory must be the one in which the script starts.
    """
    if reference.is_notebook or not reference.called_as:
        return str(file_of(reference))
    return os.path.join(os.getcwd(), reference.called_as)


def fingerprint_of_script(reference: WorkloadReference) -> str:
    """Return a hash of the script's own files. Raises `OSError` if one cannot be read."""
    digest = hashlib.sha256()
    for file in sorted(own_files(file_of(reference), Path(directory_of(reference)))):
        digest.update(file.name.encode() + bytes(1) + file.read_bytes())
    return f"sha256:{digest.hexdigest()}"


def fingerprint_of(file: str | None, name: str) -> str:
    """Return a hash of a file, where there is one, and a name in it. Raises `OSError` if it cannot be read."""
    content = Path(file).read_bytes() if file else b""
    return f"sha256:{hashlib.sha256(content + bytes(1) + name.encode()).hexdigest()}"


def keras_of_sources(files: Sequence[Path], variables: Mapping[str, str]) -> KerasVersion:
    """Return the Keras that source files import, or that `tf.keras` is with these environment variables.

    A package that the files import may train with the other one.
    """
    names = {name.partition(".")[0] for file in files for name in _imported_names(file)}
    if KerasVersion.KERAS_2.package in names:
        return KerasVersion.KERAS_2
    is_legacy = uses_legacy_keras(variables) and KerasVersion.KERAS_3.package not in names
    return KerasVersion.KERAS_2 if is_legacy else KerasVersion.KERAS_3


# -------------------------------------------------------------------------------------------------- cells of notebooks


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
