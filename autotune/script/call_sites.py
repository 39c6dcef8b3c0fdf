"""Calls in the user's code, found by the running frame and in the source. No TensorFlow."""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from autotune.data.facts import Site
from autotune.runtime.sources import parsed

_OWN = str(Path(__file__).resolve().parents[1]) + os.sep
_LIBRARIES = {"tensorflow", "keras", "tf_keras", "wrapt", "absl"}


def users_frame() -> FrameType | None:
    """The nearest frame outside of TensorFlow, Keras and this package; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@functools.cache
def _is_library(file: str) -> bool:
    if file.startswith((_OWN, "<frozen")) or file == "<string>":
        return True
    *folders, name = file.split(os.sep)
    return name in ("contextlib.py", "functools.py") or ("site-packages" in file and not _LIBRARIES.isdisjoint(folders))


def site_of(frame: FrameType, directory: str) -> Site:
    """The call that a frame is in."""
    code, line = frame.f_code, frame.f_lineno
    _, end_line, _, end_column = list(code.co_positions())[frame.f_lasti // 2]
    found = calls_in(code.co_filename, directory).get((end_line or 0, end_column or 0))
    if found is not None:
        return found[0].model_copy(update={"line": line})
    return Site(file=shown(code.co_filename, directory), function=code.co_qualname, call="", order=line, line=line)


def shown(file: str, directory: str) -> str:
    """Return a file's path from the script's directory, links resolved; the path itself for a file outside."""
    for path in (Path(os.path.realpath(file)), Path(file)):
        if path.is_relative_to(directory):
            return str(path.relative_to(directory))
    return file


@functools.cache
def calls_in(file: str, directory: str) -> dict[tuple[int, int], tuple[Site, ast.Call]]:
    """The calls in a source file, by where each ends: a line, and a column in bytes. Empty for what is no source."""
    counts: Counter[tuple[str, str]] = Counter()
    found = {}
    for function, node in sorted(_calls(parsed(Path(file)), ""), key=lambda each: _end(each[1])):
        name = _name(node.func)
        order, line = counts[function, name], node.lineno
        counts[function, name] += 1
        site = Site(file=shown(file, directory), function=function, call=name, order=order, line=line)
        found[_end(node)] = site, node
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
    loops = [each for each in ast.walk(parsed(Path(file))) if isinstance(each, ast.For)]
    around = [each for each in loops if each.body[0].lineno <= line <= (each.body[-1].end_lineno or 0)]
    found = []
    for loop in sorted(around, key=lambda each: -each.lineno):
        iterated: ast.expr = loop.iter
        while isinstance(iterated, ast.Call) and _name(iterated.func) in ("enumerate", "tqdm") and iterated.args:
            iterated = iterated.args[0]
        if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) and iterated.func.id == "range":
            found.append(calls_in(file, directory)[_end(iterated)][0])
    return found
