"""Find calls in the user's code, by the running frame and in the source. No TensorFlow."""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from autotune.data.facts import Site
from autotune.runtime.sources import cell_at, is_installed, parse_source

_OWN = str(Path(__file__).resolve().parents[1]) + os.sep
_LIBRARIES = {"tensorflow", "keras", "tf_keras", "wrapt", "absl"}
_LOOPS = ast.For | ast.While | ast.ListComp | ast.DictComp | ast.SetComp | ast.GeneratorExp


def users_frame() -> FrameType | None:
    """Return the nearest frame outside of TensorFlow, Keras and this package; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def running_frames() -> list[FrameType]:
    """Return the running frames of the user's code, the innermost first, up to the script itself."""
    found: list[FrameType] = []
    frame = users_frame()
    while frame is not None:
        file = frame.f_code.co_filename
        if is_own(file):
            found.append(frame)
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            break
        frame = frame.f_back
    return found


def is_own(file: str) -> bool:
    """Return whether code is the user's, and not that of an installed package such as a progress bar."""
    return not _is_library(file) and not is_installed(file)


@functools.cache
def _is_library(file: str) -> bool:
    if file.startswith((_OWN, "<frozen")) or file == "<string>":
        return True
    *folders, name = file.split(os.sep)
    return name in ("contextlib.py", "functools.py") or (is_installed(file) and not _LIBRARIES.isdisjoint(folders))


def site_of(frame: FrameType, directory: str) -> Site:
    """Return the call that a frame is in."""
    code, line = frame.f_code, frame.f_lineno
    _, end_line, _, end_column = list(code.co_positions())[frame.f_lasti // 2]
    found = calls_in(code.co_filename, directory).get((end_line or 0, end_column or 0))
    if found is not None:
        return found[0].model_copy(update={"line": place_of(code.co_filename, line, directory)["line"]})
    return Site(function=code.co_qualname, call="", order=line, **place_of(code.co_filename, line, directory))


def shown(file: str, directory: str) -> str:
    """Return a file's path from the script's directory, links resolved; the path itself for a file outside."""
    for path in (Path(os.path.realpath(file)), Path(file)):
        if path.is_relative_to(directory):
            return str(path.relative_to(directory))
    return file


def place_of(file: str, line: int, directory: str) -> dict[str, Any]:
    """Return what a `Site` says of a line: `file` and `line`; those of its cell and the `cell` in a notebook."""
    cell = cell_at(file, line)
    if cell is None:
        return {"file": shown(file, directory), "line": line}
    return {"file": cell.shown, "line": line - cell.first_line + 1, "cell": cell.id}


def line_of(file: str | Path, at: ast.AST | int | None, directory: str) -> str:
    """Return where a node or line of a file stands: `train.py, line 12`; empty for None."""
    place = place_of(str(file), at if isinstance(at, int) else getattr(at, "lineno", 0), directory)
    return "" if at is None else f"{place['file']}, line {place['line']}"


def line_of_code(code: CodeType, directory: str) -> str:
    """Return where some code begins: `train.py, line 12`."""
    return line_of(code.co_filename, code.co_firstlineno, directory)


class _Call(NamedTuple):
    node: ast.Call
    function: str  # qualified name of the function that it stands in; empty outside of any
    in_loop: bool  # of that function

    @property
    def name(self) -> str:
        return name_of(self.node.func)


def _scoped_nodes(node: ast.AST, prefix: str = "", in_loop: bool = False) -> Iterator[tuple[ast.AST, str, bool]]:
    """Yield the nodes below one, with what precedes a qualified name there, and whether a loop of the function does."""
    in_loop = in_loop or isinstance(node, _LOOPS)
    for child in ast.iter_child_nodes(node):
        yield child, prefix, in_loop
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _scoped_nodes(child, f"{prefix}{child.name}.<locals>.")
        else:
            inner = f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix
            yield from _scoped_nodes(child, inner, in_loop)


def _calls(tree: ast.AST) -> Iterator[_Call]:
    for node, prefix, in_loop in _scoped_nodes(tree):
        if isinstance(node, ast.Call):
            yield _Call(node, prefix.removesuffix(".").removesuffix(".<locals>"), in_loop)


def functions_in(tree: ast.Module, file: str, directory: str) -> Iterator[tuple[Site, ast.FunctionDef]]:
    """Yield the functions of a file, with their sites: the order counts those of the same qualified name."""
    counts: Counter[tuple[str, str]] = Counter()
    for node, prefix, _ in _scoped_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            place, name = place_of(file, node.lineno, directory), f"{prefix}{node.name}"
            yield Site(function=name, call=node.name, order=counts[place["file"], name], **place), node
            counts[place["file"], name] += 1


def name_of(node: ast.AST) -> str:
    """Return the name of a variable or an attribute; empty for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def names_called(node: ast.AST) -> set[str]:
    """Return the names of the functions that are called in a node."""
    return {name_of(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)}


def _end(node: ast.Call) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


@functools.cache
def calls_in(file: str, directory: str) -> dict[tuple[int, int], tuple[Site, ast.Call]]:
    """Return the calls in a source file, by where each ends: a line, and a column in bytes."""
    counts: Counter[tuple[str, str, str]] = Counter()
    found = {}
    for call in sorted(_calls(parse_source(Path(file))), key=lambda call: _end(call.node)):
        function, name = call.function or "<module>", call.name
        place = place_of(file, call.node.lineno, directory)
        order = counts[place["file"], function, name]
        counts[place["file"], function, name] += 1
        site = Site(function=function, call=name, order=order, **place)
        found[_end(call.node)] = site, call.node
    return found


def with_line(name: str, files: Sequence[Path], directory: str) -> str:
    """Return a name with the line of the only call of it in these files; the name alone without one, or of several."""
    sites = [site for file in files for site, _ in calls_in(str(file), directory).values() if site.call == name]
    return f"{name} ({sites[0].file}, line {sites[0].line})" if len(sites) == 1 else name


def enclosing_ranges(file: str, line: int, directory: str) -> list[Site]:
    """Return the calls of `range` that drive the `for` loops around a line, the innermost loop first."""
    loops = [node for node in ast.walk(parse_source(Path(file))) if isinstance(node, ast.For)]
    around = [loop for loop in loops if loop.body[0].lineno <= line <= (loop.body[-1].end_lineno or 0)]
    found = []
    for loop in sorted(around, key=lambda loop: -loop.lineno):
        iterated: ast.expr = loop.iter
        while isinstance(iterated, ast.Call) and name_of(iterated.func) in ("enumerate", "tqdm") and iterated.args:
            iterated = iterated.args[0]
        if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) and iterated.func.id == "range":
            found.append(calls_in(file, directory)[_end(iterated)][0])
    return found


def count_method_calls(files: Sequence[Path], method: str) -> int:
    """Return how many calls of a method of that name stand in these files, without those of scikit-learn's objects."""
    count = 0
    for file in files:
        tree = parse_source(file)
        theirs = _names_from(tree, "sklearn")
        called = (call.node.func for call in _calls(tree) if call.name == method)
        count += sum(isinstance(func, ast.Attribute) and _called_name(func.value) not in theirs for func in called)
    return count


def _names_from(tree: ast.Module, package: str) -> set[str]:
    """Return the names that a file imports from a package, and those that it assigns only what these make."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level)
    of_package = (node for node in imports if (node.module or "").partition(".")[0] == package)
    names = {alias.asname or alias.name for node in of_package for alias in node.names}
    assigned: defaultdict[str, set[str]] = defaultdict(set)
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    known = {id(target) for assignment in assignments for target in assignment.targets}
    for assignment in assignments:
        for target in assignment.targets:
            assigned[name_of(target)].add(_called_name(assignment.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            assigned[node.arg].add("")
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store) and id(node) not in known:
            assigned[name_of(node)].add("")  # part of a tuple, of a loop or of `with`
    return names | {name for name, makers in assigned.items() if name and makers <= names}


def _called_name(node: ast.expr) -> str:
    """Return the name of a variable or attribute, or of the function that is called."""
    return name_of(node.func if isinstance(node, ast.Call) else node)


def is_called_in_loop(files: Sequence[Path], method: str) -> bool:
    """Return whether a call of that name, or of a function that leads to one, stands in a loop in these files."""
    calls: defaultdict[str, list[_Call]] = defaultdict(list)
    for file in files:
        for call in _calls(parse_source(file)):
            calls[call.name].append(call)
    seen, waiting = set(), [method]
    while waiting:
        name = waiting.pop()
        if name and name not in seen:
            seen.add(name)
            if any(call.in_loop for call in calls[name]):
                return True
            waiting += [call.function.rpartition(".")[2] for call in calls[name]]
    return False


def uses_shapes(tree: ast.Module) -> bool:
    """Return whether a file reads sizes such as `x.shape[0]`, which are None once `reduce_retracing` has acted."""
    read = (node.value for node in ast.walk(tree) if isinstance(node, ast.Subscript | ast.Starred))
    return any(isinstance(node, ast.Attribute) and node.attr == "shape" for node in read)
