"""What can be said of the user's file or module without running it, so that common mistakes are answered at once.

This module reads source and directories only: it imports nothing of the user's, and no TensorFlow.
"""

from __future__ import annotations

import ast
import os
import pkgutil
import shlex
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path

from autotune.errors import WorkloadError
from autotune.space.knobs import nearest

# fmt: off
NEEDED_PACKAGES = frozenset({
    "absl", "astunparse", "autotune", "flatbuffers", "gast", "google", "h5py", "keras", "ml_dtypes",
    "namex", "numpy", "opt_einsum", "optree", "packaging", "pandas", "psutil", "pydantic",
    "pydantic_core", "requests", "rich", "scipy", "six", "tensorflow", "termcolor", "typing_extensions",
    "urllib3", "wrapt",
})
# fmt: on
"""What `import tensorflow`, Keras and a trial load by name, beside the standard library."""


# ---------------------------------------------------------------------------------------------- the source


def check_source(source: bytes, name: str, *, written: str, file: str, by_path: bool) -> None:
    """Refuse source that cannot be imported, or does not bind `name`.

    Args:
        source: The file's content.
        name: The variable that holds the workload.
        written: The file or module as the user wrote it.
        file: The file, for messages about its content.
        by_path: Whether it will be loaded by its path, and so outside of any package.

    Raises:
        WorkloadError: A syntax error, a relative import in a file loaded by its path, or no such name.
    """
    tree = _parse(source, file)
    if by_path:
        _refuse_relative_imports(tree, Path(file), name)
    bound = names_bound_at_top_level(tree)
    if bound is not None and name not in bound:
        public = tuple(each for each in bound if not each.startswith("_"))
        raise WorkloadError(
            f"{written}: no {name!r} in it",
            hint=f"{nearest(name, public)}Write `{name} = autotune.Workload(…)` at the top level, or name "
            f"the variable: {written}:NAME.",
        )


def _parse(source: bytes, file: str) -> ast.Module:
    try:
        return ast.parse(source, filename=file)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise WorkloadError(
            f"{file}{line}: syntax error",
            hint="Mend the file; it must be importable.",
            detail="".join(traceback.format_exception_only(error)).rstrip(),
        ) from error


def names_bound_at_top_level(tree: ast.Module) -> list[str] | None:
    """Names that running the module binds, in order; None when only running it can tell."""
    bound: list[str] = []
    scopes: list[ast.AST] = list(tree.body)
    while scopes:
        node = scopes.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name == "__getattr__":
                return None
            bound.append(node.name)
            bound += [name for each in ast.walk(node) if isinstance(each, ast.Global) for name in each.names]
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if any(alias.name == "*" for alias in node.names):
                return None
            bound += [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
            continue
        if isinstance(node, ast.Name) and node.id in ("globals", "locals", "vars", "exec", "eval", "setattr"):
            return None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.append(node.id)
        if not isinstance(node, ast.Lambda):
            scopes += list(ast.iter_child_nodes(node))
    return bound


def _refuse_relative_imports(tree: ast.Module, file: Path, name: str) -> None:
    """Those that surely run: one under `if TYPE_CHECKING` or in a `try` may be meant for another occasion."""
    levels = [(node.level, node.lineno) for node in tree.body if isinstance(node, ast.ImportFrom)]
    relative = [each for each in levels if each[0]]
    if relative:
        raise WorkloadError(
            f"{file}:{relative[0][1]}: a relative import, in a file that is loaded by its path and so outside of "
            "its package",
            hint=hint_to_name_the_module(file, name, level=max(relative)[0]),
        )


def hint_to_name_the_module(file: Path, name: str, *, level: int = 1) -> str:
    """How to name a file with relative imports as a module of its package.

    Args:
        file: The user's file.
        name: The variable that holds the workload.
        level: How many dots its relative imports begin with.
    """
    file = file.resolve()
    directory, parts = file.parent, [] if file.stem == "__init__" else [file.stem]
    while (level > 0 or (directory / "__init__.py").is_file()) and directory.name:
        parts.insert(0, directory.name)
        directory, level = directory.parent, level - 1
    if level > 0 or not all(part.isidentifier() for part in parts):
        return "Write absolute imports: no module name leads to this file."
    dotted = ".".join(parts) + ("" if name == "workload" else f":{name}")
    change = "" if directory == Path.cwd() else f"cd {shlex.quote(str(directory))} && "
    return f"Name it as a module, from the directory that holds its package: {change}autotune tune {dotted}"


def refuse_shadowing(name: str, shown: str) -> None:
    """Refuse a file or package whose name hides a module that TensorFlow needs.

    The directory of a workload comes first on Python's search path, as with `python train.py`: its helper modules
    must be found before installed ones of the same name, or it would not be the user's training that is measured.

    Args:
        name: The file's or package's name, without `.py`.
        shown: The file or module, for the message.

    Raises:
        WorkloadError: It does. Built-in and frozen modules are found before any path, so nothing hides those.
    """
    standard = name in sys.stdlib_module_names
    found_before_any_path = any(finder.find_spec(name) for finder in (BuiltinImporter, FrozenImporter))
    if (standard or name in NEEDED_PACKAGES) and not found_before_any_path:
        hidden = "Python's standard module" if standard else "the installed package"
        raise WorkloadError(
            f"{shown}: is called like {hidden} {name!r}, and its directory comes first on Python's search path: "
            f"`import {name}`, in TensorFlow too, would find this instead",
            hint=f"Rename it, for example to {name}_workload.",
        )


# ---------------------------------------------------------------------------------------------- the module


def find_module(module: str, directory: Path) -> Path | None:
    """The source file of a module, found as an import would find it, but without importing what is above it.

    Args:
        module: A dotted name.
        directory: Where to look before the directories of `sys.path`.

    Returns:
        The file; None where only importing can tell (extension modules, archives, packages that change their
        own path).

    Raises:
        WorkloadError: There is no such module.
    """
    above: list[str] = []
    path: Sequence[str] = [str(directory), *sys.path]
    spec: ModuleSpec | None = None
    for part in module.split("."):
        holder, spec = spec, PathFinder.find_spec(part, list(path)) if above else _find_first(part, path)
        if spec is None:
            if holder is not None and _may_add_modules(holder):
                return None
            raise _no_module(module, [*above, part], path if above else [str(directory)], directory)
        above.append(part)
        path = list(spec.submodule_search_locations or ())
    assert spec is not None
    return _source_file(spec)


def _find_first(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Ask the finders that an import would ask, those of editable installations among them."""
    for finder in sys.meta_path:
        if finder is PathFinder:
            spec = PathFinder.find_spec(name, list(path))
        else:
            spec = finder.find_spec(name, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None


def _source_file(spec: ModuleSpec) -> Path | None:
    return Path(spec.origin) if spec.has_location and spec.origin and spec.origin.endswith(".py") else None


def _may_add_modules(spec: ModuleSpec) -> bool:
    """Whether running a package could make modules importable that are not in its directories."""
    if spec.origin is None:  # a namespace package is its directories and nothing else
        return False
    file = _source_file(spec)
    try:
        source = b"__path__" if file is None else file.read_bytes()
    except OSError:
        return True
    return any(word in source for word in (b"__path__", b"sys.modules", b"meta_path"))


def _no_module(module: str, parts: list[str], path: Sequence[str], directory: Path) -> WorkloadError:
    *above, missing = parts
    known = tuple(each.name for each in pkgutil.iter_modules(list(path)))
    where = f"in {'.'.join(above)}" if above else f"in {directory} and among the installed packages"
    return WorkloadError(
        f"no module {module!r}", hint=f"{nearest(missing, known)}{missing!r} is looked for {where}."
    )


def shown_path(file: Path) -> str:
    """A file's path from the current directory where it is below that, else in full."""
    return os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)
