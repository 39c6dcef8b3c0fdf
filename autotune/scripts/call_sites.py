"""Calls in the user's code, found by the running frame and in the source. No TensorFlow."""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from autotune.scripts.facts import Site

_OWN = str(Path(__file__).resolve().parents[1]) + os.sep
_LIBRARIES = ("tensorflow", "keras", "tf_keras", "wrapt", "absl")


@dataclass(frozen=True)
class FoundCall:
    """A call in a source file."""

    function: str
    name: str
    order: int
    node: ast.Call


def users_frame() -> FrameType | None:
    """The nearest frame outside of TensorFlow, Keras and this package; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@functools.cache
def _is_library(file: str) -> bool:
    if file.startswith((_OWN, "<frozen")):
        return True
    return any(f"{os.sep}{name}{os.sep}" in file and "site-packages" in file for name in _LIBRARIES) or (
        file == "<string>" or os.path.basename(file) in ("contextlib.py", "functools.py")
    )


def site_of(frame: FrameType, directory: str) -> Site:
    """The call that a frame is in."""
    code, positions = frame.f_code, list(frame.f_code.co_positions())
    _, end_line, _, end_column = positions[frame.f_lasti // 2]
    found = calls_in(code.co_filename).get((end_line or 0, end_column or 0))
    name, order = (found.name, found.order) if found else ("", frame.f_lineno)
    function = found.function if found else code.co_qualname
    return Site(file=shown(code.co_filename, directory), function=function, call=name, order=order, line=frame.f_lineno)


def shown(file: str, directory: str) -> str:
    """A file's path from the script's directory; as it is outside of it."""
    path = Path(file)
    return str(path.relative_to(directory)) if path.is_relative_to(directory) else file


@functools.cache
def calls_in(file: str) -> dict[tuple[int, int], FoundCall]:
    """The calls in a source file, by where each ends: a line, and a column in bytes. Empty for what is no source."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    counts: dict[tuple[str, str], int] = {}
    found = {}
    for function, node in sorted(_calls(tree, ""), key=lambda each: _end(each[1])):
        name = _name(node.func)
        order = counts.get((function, name), 0)
        counts[function, name] = order + 1
        found[_end(node)] = FoundCall(function=function, name=name, order=order, node=node)
    return found


def _end(node: ast.Call) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _calls(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.Call]]:
    """The calls below a node, each with the qualified name of its function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield prefix.removesuffix(".<locals>.") or "<module>", child
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{prefix}{child.name}.<locals>."
        elif isinstance(child, ast.ClassDef):
            inner = f"{prefix}{child.name}."
        yield from _calls(child, inner)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def enclosing_ranges(file: str, line: int, directory: str) -> list[Site]:
    """The calls of `range` by which `for` loops run whose bodies hold a line, the innermost loop first."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    sites = {_end(call.node): site for site, call in sites_in(file, directory)}
    loops = [each for each in ast.walk(tree) if isinstance(each, ast.For)]
    around = [each for each in loops if each.body[0].lineno <= line <= (each.body[-1].end_lineno or 0)]
    found = []
    for loop in sorted(around, key=lambda each: -each.lineno):
        iterated: ast.expr = loop.iter
        while isinstance(iterated, ast.Call) and _name(iterated.func) in ("enumerate", "tqdm") and iterated.args:
            iterated = iterated.args[0]
        if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) and iterated.func.id == "range":
            found.append(sites[_end(iterated)])
    return found


def sites_in(file: str, directory: str) -> list[tuple[Site, FoundCall]]:
    """Every call in a source file."""
    return [
        (
            Site(
                file=shown(file, directory),
                function=each.function,
                call=each.name,
                order=each.order,
                line=each.node.lineno,
            ),
            each,
        )
        for each in calls_in(file).values()
    ]
