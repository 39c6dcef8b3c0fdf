"""A script's own files: which they are, and what can be read in them without running it. No TensorFlow."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import WorkloadError


def binds_workload(file: Path, name: str) -> bool:
    """Whether a source file binds a name at its top level; False for what cannot be parsed."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return False
    return any(name in _bound(node) for node in _top_level(tree.body))


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also those in `if`, `try` and `with`."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _top_level(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _top_level(handler.body)


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {each.asname or each.name for each in node.names}
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return {name.id for each in targets if each is not None for name in ast.walk(each) if isinstance(name, ast.Name)}


def own_files(file: Path, directory: Path) -> list[Path]:
    """The script and the modules of its own that it imports, found in their sources."""
    found, waiting = [], [file]
    while waiting:
        each = waiting.pop()
        if each in found:
            continue
        found.append(each)
        for name in imported_names(each):
            parts = name.split(".")
            for end, place in itertools.product(range(1, len(parts) + 1), (directory, each.parent)):
                stem = place.joinpath(*parts[:end])
                waiting += [path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()]
    return found


def imported_names(file: Path) -> set[str]:
    """The modules that a source file imports, wherever in it, by dotted name."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.ImportFrom):
            names |= {each.name for each in node.names}
    return names


def installed_packages(files: list[Path]) -> list[str]:
    """The installed packages that these files import, by top-level name: not Python's own, not the user's."""
    names = {name.partition(".")[0] for file in files for name in imported_names(file)}
    found = []
    for name in sorted(names - set(sys.stdlib_module_names)):
        spec = importlib.util.find_spec(name)
        if spec is not None and "site-packages" in str(spec.origin or spec.submodule_search_locations):
            found.append(name)
    return found


def calls_of(files: list[Path], method: str) -> int:
    """How many calls of a method of that name stand in these files."""
    count = 0
    for file in files:
        nodes = ast.walk(ast.parse(file.read_bytes()))
        calls = (each.func for each in nodes if isinstance(each, ast.Call))
        count += sum(isinstance(each, ast.Attribute) and each.attr == method for each in calls)
    return count


def fingerprint(files: list[Path]) -> str:
    """A hash of a script's own files. Raises `OSError` if one cannot be read."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + bytes(1) + file.read_bytes())
    return f"sha256:{digest.hexdigest()}"


def refuse_broken(file: Path) -> None:
    """Raise `WorkloadError` for a script that Python cannot read."""
    try:
        compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise WorkloadError(f"{file}{line}: {error}", hint="Mend the script; Python cannot run it.") from error
