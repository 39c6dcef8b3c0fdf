"""Find what a dataset's functions read and the script changes as it trains: batches read ahead have the old value.

A traced function reads the resources that it captures. A generator or `py_function` reads what its source names.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

from autotune.recipe.tf_private import functions_of, operations_of
from autotune.runtime.sources import parse_source
from autotune.script.call_sites import is_own, line_of, line_of_code, name_of, running_frames
from autotune.script.dataset_trace import upstream

READS_AHEAD = ("persistent_iterator", "prefetch", "num_parallel_calls", "prefetch_to_device", "per_replica_buffer_size")
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_SPECIAL = ("__call__", "__getitem__", "__iter__", "__len__", "__next__")  # called without being named
_BUILDING = ("__init__", "build")
_WRITES = {"Var": re.compile("assign|scatter|set_(value|weights)"), "lookup": re.compile("insert|remove|erase")}
_CHANGES = re.compile("assign|insert|remove|append|extend|update|pop|clear|add$|discard|put|fill|sort|set_|reset")
_CHANGES_ARGUMENT = ("copyto", "put", "set_value", "shuffle")
_RANDOM = re.compile("StateVar|seed_generator_state")  # generators that only the dataset's own functions advance


class OwnSource:
    """The functions in a script's own files; `directory` is the script's."""

    def __init__(self, files: Iterable[Path], directory: str) -> None:
        self._directory, self._paths = directory, list(files)
        self.files: dict[Any, str] = {}  # of each function
        self._at: defaultdict[tuple[str, int], list[Any]] = defaultdict(list)  # functions by file and first line
        self.outer: dict[Any, Any] = {}  # the function around each function
        # By function; whether in a loop that runs now.
        self._nodes: defaultdict[Any, list[tuple[Any, bool]]] = defaultdict(list)
        self._loops: dict[Any, Any] = {}  # those that run now, and the function of each
        self._started: set[Any] = set()  # functions that run now
        self._running = [(os.path.realpath(frame.f_code.co_filename), frame.f_lineno) for frame in running_frames()]
        for file in self._paths:
            self._collect(os.path.realpath(file), parse_source(file), None, in_loop=False)

    def _collect(self, file: str, tree: ast.AST, function: Any, *, in_loop: bool) -> None:
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, _FUNCTIONS):
                first = min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", ()))])
                self._at[file, first].append(node)
                self.files[node] = file
                self.outer[node] = function
                if not isinstance(node, ast.Lambda) and self._is_running(file, node):
                    self._started.add(node)
                self._collect(file, node, node, in_loop=False)
            else:
                self._nodes[function].append((node, in_loop))
                is_loop = isinstance(node, ast.For | ast.While) and self._is_running(file, node)
                self._loops |= {node: function} if is_loop else {}
                self._collect(file, node, function, in_loop=in_loop or is_loop)

    def _is_running(self, file: str, node: Any) -> bool:
        return any(file == where and node.lineno <= line <= node.end_lineno for where, line in self._running)

    def describe_dataset(self, dataset: Any, trained: Iterable[Any]) -> str:
        """Return what a function of a dataset reads that may change; empty if none does. `trained`: variables."""
        wrapped = (variable if callable(variable.value) else variable.value for variable in trained)  # by Keras 3
        written = {id(getattr(variable, "_handle", None)) for variable in wrapped}
        for part in upstream(dataset):
            is_python = any("PyFunc" in name for name in operations_of(part))
            for function in functions_of(part):
                resources = [value for value in function.function.captured_inputs if value.dtype.name == "resource"]
                if why := self.describe([function._func], resources, written, is_python=is_python):
                    return why
        return ""

    def describe(
        self,
        functions: Iterable[Any],
        resources: Iterable[Any] = (),
        written: Collection[int] = (),
        *,
        is_python: bool = True,
    ) -> str:
        """Return what the first of these functions reads that may change; empty if nothing.

        `resources`: what it captures. `written`: the identities of those that the training writes. `is_python`: it
        runs for each batch, and reads what it names.
        """
        code = [found for function in functions for found in code_of(function)]
        readers = self.reached_from(node for found in code for node in self.nodes_at(found))
        names, methods = self.changes(readers)
        read = sorted({name for reader in readers for name in self._names_read(reader)} & names) if is_python else []
        for handle in resources:
            kind = next((kind for kind in _WRITES if f"::{kind}" in str(handle)), "")
            by_script = kind and not _RANDOM.search(str(handle)) and any(map(_WRITES[kind].match, methods))
            read += ["a variable or lookup table"] if by_script or id(handle) in written else []
        if not read:
            return ""
        place = line_of_code(code[0], self._directory) + "," if code else "the dataset"
        late = "which may change during the training, and batches read ahead would have the old value"
        return f"the function in {place} reads {read[0].lstrip('.')}, {late}"

    def reached_from(self, functions: Iterable[Any]) -> list[Any]:
        """Return these functions, and those that they name or contain."""
        reached = list(functions)
        for reader in reached:  # which grow
            named = {name.lstrip(".") for name in self._names_read(reader)}
            found = (
                node for node, outer in self.outer.items() if outer is reader or getattr(node, "name", "") in named
            )
            reached += [node for node in found if node not in reached]
        return reached

    def line_of_store(self, attribute: str) -> str:
        """Return where an attribute is set first; empty if nowhere."""
        nodes = ((file, node) for file in self._paths for node in ast.walk(parse_source(file)))
        stores = (
            (file, node)
            for file, node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == attribute
        )
        return next((line_of(file, node, self._directory) for file, node in stores), "")

    def nodes_at(self, code: CodeType) -> list[Any]:
        """Return the function of some code; of several that begin in its line, the innermost around its first place."""
        found = self._at[os.path.realpath(code.co_filename), code.co_firstlineno]
        place = next(((line, column) for line, _, column, end in code.co_positions() if end), (0, 0))
        begun = [node for node in found if (node.lineno, node.col_offset) < place]
        around = [node for node in begun if place < (node.end_lineno, node.end_col_offset)]
        return [max(around, key=lambda node: (node.lineno, node.col_offset))] if len(found) > 1 and around else found

    def nodes_of(self, function: Any) -> list[Any]:
        """Return the nodes of a function, without those of functions inside."""
        return [node for node, _ in self._nodes[function]]

    def _names_read(self, function: Any) -> set[str]:
        """Return the names from outside of a function that it reads, and `.attributes`."""
        nodes = self.nodes_of(function)
        names = [node for node in nodes if isinstance(node, ast.Name)]
        local = {name.id for name in names if not isinstance(name.ctx, ast.Load)}
        local |= {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
        attributes = {f".{node.attr}" for node in nodes if isinstance(node, ast.Attribute)}
        return {name.id for name in names} - local | attributes

    def changes(self, readers: Collection[Any]) -> tuple[set[str], set[str]]:
        """Return the names and `.attributes` that other functions and loops change, and the methods that they call.

        What prepares the data is over: loops that do not run now, and all outside of loops where none runs around it;
        `__init__` and `build`, and what only such a function calls.
        """
        names: set[str] = set()
        methods: set[str] = set()
        around = {self.outer[reader] for reader in readers}  # whose variables they read
        each = ((of, node) for of, nodes in self._nodes.items() for node, _ in nodes)
        calls = [(name_of(node.func), of) for of, node in each if isinstance(node, ast.Call)]
        later = {name for name, of in calls if getattr(of, "name", "") not in _BUILDING}
        at_start = {*_BUILDING, *(name for name, _ in calls if name not in later and not name.startswith("on_"))}
        for function, nodes in self._nodes.items():
            if function in readers or getattr(function, "name", "") in at_start:
                continue
            shared = {name for node, _ in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
            stored = {node.id for node, _ in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            own = stored - shared if function is not None else set()
            is_once = function is None or (function in self._started and {*self._loops.values()} <= {function})
            for node, in_loop in nodes:
                if is_once and not in_loop:
                    continue
                changed = set[str]()
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    methods |= {node.func.attr} if _target(node.func.value) != "os" else set()  # it removes files
                    changed |= {_target(node.func.value)} if _CHANGES.match(node.func.attr) else set()
                    changed |= set(map(_target, node.args[:1])) if node.func.attr in _CHANGES_ARGUMENT else set()
                elif isinstance(getattr(node, "ctx", None), ast.Store):
                    changed = {_target(node)}
                names |= changed if in_loop and function in around else changed - own
        return names - {"", "self"}, methods


def _target(node: ast.expr) -> str:
    """Return the name or `.attribute` that an expression changes."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return "." * isinstance(node, ast.Attribute) + name_of(node)


def code_of(function: Any) -> list[CodeType]:
    """Return the user's code in a function that `tf.data` calls, whatever wraps it, and in what that names."""
    waiting, seen, found = deque([function]), set(), []
    while waiting:
        part = waiting.popleft()
        if id(part) in seen:
            continue
        seen.add(id(part))
        code, scope = getattr(part, "__code__", None), getattr(part, "__globals__", {})
        if isinstance(code, CodeType) and is_own(code.co_filename):
            found.append(code)
            inner = [code]
            for outer in inner:  # with the functions inside
                inner += [value for value in outer.co_consts if isinstance(value, CodeType)]
            waiting += [scope[name] for names in inner for name in names.co_names if name in scope]
        names = ("__func__", "func", "python_function", "_generator")
        waiting += filter(callable, (getattr(part, name, None) for name in names))
        waiting += [getattr(type(part), name) for name in _SPECIAL if hasattr(type(part), name)]
        for cell in getattr(part, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # it is empty
                waiting.append(cell.cell_contents)
    return found
