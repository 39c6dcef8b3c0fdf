"""A script's own files: which they are, and what can be read in them without running it. No TensorFlow."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import itertools
import os
import sys
from pathlib import Path

from autotune.data.errors import WorkloadError
from autotune.data.facts import WorkloadReference

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.comprehension)
"""What binds names of its own."""


def parsed(file: Path) -> ast.Module:
    """The syntax tree of a source file; an empty one for what cannot be read or parsed."""
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def binds_workload(file: Path, name: str) -> bool:
    """Whether a source file binds a name at its top level; False for what cannot be parsed."""
    waiting: list[ast.AST] = [parsed(file)]
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
    """The script and the modules of its own that it imports, found in their sources."""
    found, waiting = [], [file]
    while waiting:
        each = waiting.pop()
        if each in found:
            continue
        found.append(each)
        for name in _imported_names(each):
            parts = name.split(".")
            for end, place in itertools.product(range(1, len(parts) + 1), (directory, each.parent)):
                stem = place.joinpath(*parts[:end])
                waiting += [path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()]
    return found


def _imported_names(file: Path) -> set[str]:
    """The modules that a source file imports, wherever in it, by dotted name."""
    names: set[str] = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names |= {f"{module}.{each.name}" if module else each.name for each in node.names}
            names |= {module} if module else set()
    return names


def installed_packages(files: list[Path]) -> list[str]:
    """The installed packages that these files import, by top-level name: not Python's own, not the user's."""
    names = {name.partition(".")[0] for file in files for name in _imported_names(file)}
    found = []
    for name in sorted(names - set(sys.stdlib_module_names)):
        spec = importlib.util.find_spec(name)
        if spec is not None and "site-packages" in str(spec.origin or spec.submodule_search_locations):
            found.append(name)
    return found


def calls_of(files: list[Path], method: str) -> int:
    """How many calls of a method of that name stand in these files."""
    nodes = (node for file in files for node in ast.walk(parsed(file)))
    calls = (each.func for each in nodes if isinstance(each, ast.Call))
    return sum(isinstance(each, ast.Attribute) and each.attr == method for each in calls)


def is_called_in_loop(files: list[Path], method: str) -> bool:
    """Return whether a call of that name, or of a function that leads to one, stands in a loop in these files."""
    found: dict[str, list[tuple[str, bool]]] = {}  # by name: the function of each call, and whether a loop is around it
    for file in files:
        _note_calls(parsed(file), "", False, found)
    names, waiting = set(), [method]
    while waiting:
        name = waiting.pop()
        if name in names:
            continue
        names.add(name)
        for function, in_loop in found.get(name, ()):
            if in_loop:
                return True
            waiting.append(function)
    return False


def _note_calls(node: ast.AST, function: str, in_loop: bool, found: dict[str, list[tuple[str, bool]]]) -> None:
    """Note the calls below a node, by the name that is called."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        found.setdefault(name, []).append((function, in_loop))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function, in_loop = node.name, False
    loops = isinstance(node, ast.For | ast.While | ast.ListComp | ast.DictComp | ast.SetComp | ast.GeneratorExp)
    for child in ast.iter_child_nodes(node):
        _note_calls(child, function, in_loop or loops, found)


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


def directory_of(reference: WorkloadReference) -> str:
    """The directory that comes first on the script's search path."""
    return reference.search_path[0]


def file_of(reference: WorkloadReference) -> Path:
    """The script's file; of a module's, as Python would find it. Imports nothing. Raises `WorkloadError`."""
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
    return os.path.join(os.getcwd(), reference.called_as) if reference.called_as else str(file_of(reference))


def fingerprint_of_script(reference: WorkloadReference) -> str:
    """A hash of the script's own files. Raises `OSError` if one cannot be read."""
    return fingerprint(own_files(file_of(reference), Path(directory_of(reference))))


def fingerprint_of(file: str | None, name: str) -> str:
    """A hash of the file, where there is one, and the name in it. Raises `OSError` if it cannot be read."""
    content = Path(file).read_bytes() if file else b""
    return f"sha256:{hashlib.sha256(content + bytes(1) + name.encode()).hexdigest()}"
