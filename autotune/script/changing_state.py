"""Find state that map functions read and the script changes during training: prefetched batches would be stale.

A traced function reads the resources that it captures. A generator or `py_function` reads what its source names.
"""

from __future__ import annotations

import ast
import contextlib
import math
import os
import re
from collections import ChainMap, defaultdict, deque
from collections.abc import Collection, Iterable
from itertools import chain
from pathlib import Path
from types import CodeType
from typing import Any

from autotune.recipe.tf_private import functions_of, operations_of
from autotune.runtime.sources import parse_source
from autotune.script.call_sites import is_own, line_of_code, name_of, running_frames
from autotune.script.dataset_trace import upstream
from autotune.script.inline_steps import move_inline_steps

READS_AHEAD = ("persistent_iterator", "prefetch", "num_parallel_calls", "prefetch_to_device", "per_replica_buffer_size")
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_SPECIAL = ("__call__", "__getitem__", "__iter__", "__len__", "__next__")  # called without being named
_BUILDING = ("__init__", "build", "compile")
_WRITES = {"Var": re.compile("assign|scatter|set_(value|weights)"), "lookup": re.compile("insert|remove|erase")}
_CHANGES = re.compile("assign|insert|remove|append|extend|update|pop|clear|add$|discard|put|fill|sort|set_|reset")
_CHANGES_ARGUMENT = ("copyto", "put", "set_value", "shuffle")
_Place = tuple[Any, Any]  # a function or module, and a node in it
_RANDOM = re.compile("StateVar|seed_generator_state")  # generators that only the dataset's own functions advance


class OwnSource:
    """The functions in a script's own files; `directory` is the script's."""

    def __init__(self, files: Iterable[Path], directory: str) -> None:
        self._directory = directory
        self.files: dict[Any, str] = {}  # of each function and module
        self._modules: dict[Any, str] = {}  # files by tree
        self.functions_at: defaultdict[tuple[str, int], list[Any]] = defaultdict(list)  # by file and first line
        self.outer: dict[Any, Any] = {}  # the function, or module, around each function
        # By function or module; whether in a loop that runs now, and whether below what runs now.
        self._nodes: defaultdict[Any, list[tuple[Any, bool, bool]]] = defaultdict(list)
        self._loops: dict[Any, Any] = {}  # those that run now, and the function of each
        self._started: set[Any] = set()  # functions that run now
        self.hooks: set[Any] = set()  # functions that a package may call
        frames = running_frames()
        self._running = {
            (os.path.realpath(each.f_code.co_filename), each.f_code.co_name): each.f_lineno for each in frames
        }
        self.names = ChainMap(*(dict(frame.f_locals) for frame in frames))  # what they see, without its changes
        for path in files:
            file, tree = os.path.realpath(path), parse_source(path)
            move_inline_steps(tree)
            self._modules[tree] = self.files[tree] = file
            self._collect(file, tree, tree, in_loop=False)

    def _collect(self, file: str, tree: ast.AST, function: Any, *, in_loop: bool) -> None:
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, _FUNCTIONS):
                first = min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", ()))])
                self.functions_at[file, first].append(node)
                self.files[node] = file
                self.outer[node] = function
                name = getattr(node, "name", "")
                is_private = name.startswith("_") and not name.startswith("__")
                overrides = isinstance(tree, ast.ClassDef) and tree.bases and not is_private
                if not name or name.startswith(("on_", "__")) or overrides:
                    self.hooks.add(node)
                if name and self._is_running(file, node):
                    self._started.add(node)
                self._collect(file, node, node, in_loop=False)
            else:
                line = self._running.get((file, getattr(function, "name", "<module>")), math.inf)
                self._nodes[function].append((node, in_loop, getattr(node, "lineno", 0) > line))
                is_loop = isinstance(node, ast.For | ast.While) and self._is_running(file, node)
                self._loops |= {node: function} if is_loop else {}
                self._collect(file, node, function, in_loop=in_loop or is_loop)

    def _is_running(self, file: str, node: Any) -> bool:
        lines = (line for (where, _), line in self._running.items() if where == file)
        return any(node.lineno <= line <= node.end_lineno for line in lines)

    def describe_dataset(self, dataset: Any, trained: Iterable[Any]) -> str:
        """Return the changing state that a function of a dataset reads; empty for none. `trained`: variables."""
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
        """Return the changing state that the first of these functions reads; empty for none.

        `resources`: what it captures. `written`: the identities of those that the training writes. `is_python`: it
        runs for each batch, and reads what it names.
        """
        code = [found for function in functions for found in code_of(function)]
        readers = self.reached_from(node for found in code for node in self.nodes_at(found))
        stored, changed, calls = self.changes(readers)
        names = {name for reader in readers for name in self._names_read(reader)} & {*stored, *changed}
        read = sorted(names) if is_python else []
        for handle in resources:
            kind = next((kind for kind in _WRITES if f"::{kind}" in str(handle)), "")
            by_script = kind and not _RANDOM.search(str(handle)) and any(map(_WRITES[kind].match, calls))
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

    def tree_of(self, file: str) -> Any:
        """Return the syntax tree of a file, in which inline steps are functions."""
        return next(tree for tree, known in self._modules.items() if known == os.path.realpath(file))

    def nodes_at(self, code: CodeType) -> list[Any]:
        """Return the function of some code; of several that begin in its line, the innermost around its first place."""
        found = self.functions_at[os.path.realpath(code.co_filename), code.co_firstlineno]
        place = next(((line, column) for line, _, column, end in code.co_positions() if end), (0, 0))
        begun = [node for node in found if (node.lineno, node.col_offset) < place]
        around = [node for node in begun if place < (node.end_lineno, node.end_col_offset)]
        return [max(around, key=lambda node: (node.lineno, node.col_offset))] if len(found) > 1 and around else found

    def nodes_of(self, function: Any) -> list[Any]:
        """Return the nodes of a function, without those of functions inside."""
        return [node for node, *_ in self._nodes[function]]

    def names_bound(self, function: Any) -> set[str]:
        """Return the names of a function's arguments, and of the variables that it sets."""
        stores = (node for node in self.nodes_of(function) if isinstance(node, ast.Name))
        arguments = ast.walk(function.args) if function not in self._modules else ()
        names = {node.id for node in stores if not isinstance(node.ctx, ast.Load)}
        return names | {node.arg for node in arguments if isinstance(node, ast.arg)}

    def _names_read(self, function: Any) -> set[str]:
        """Return the names from outside of a function that it reads, and `.attributes`."""
        nodes = self.nodes_of(function)
        attributes = {f".{node.attr}" for node in nodes if isinstance(node, ast.Attribute)}
        return {node.id for node in nodes if isinstance(node, ast.Name)} - self.names_bound(function) | attributes

    def changes(self, readers: Collection[Any]) -> tuple[dict[str, list[_Place]], set[str], dict[str, list[_Place]]]:
        """Return the names and `.attributes` that others than the readers set, and change; and their calls, by name.

        Only what may still run counts: of what runs once its loops, and what follows them where the readers are called
        again; of the functions those that it names, that are passed on, or that a package calls.
        """
        once = {*self._modules, *(function for function in self._started if {*self._loops.values()} <= {function})}
        later = [node for function in once for node, _, below in self._nodes[function] if below]
        again = not {*readers, *self._started}.isdisjoint(self._named_in(later))
        live = {of: [node for node, loops, below in self._nodes[of] if loops or (again and below)] for of in once}
        every = [node for nodes in self._nodes.values() for node, *_ in nodes]
        called = {id(node.func) for node in every if isinstance(node, ast.Call)}
        passed_on = (node for node in every if id(node) not in called)
        roots = self._named_in(chain(passed_on, *live.values()))
        building = {function for function in self.outer if getattr(function, "name", "") in _BUILDING}
        for function in self.reached_from((roots | self.hooks | self._started) - once - building):
            if function not in once | building:
                live[function] = self.nodes_of(function)
        stored, changed, calls = defaultdict[str, list[_Place]](list), set[str](), defaultdict[str, list[_Place]](list)
        around = once & {*self._modules, *(self.outer.get(reader) for reader in readers)}  # whose variables they read
        for function in live.keys() - {*readers}:
            nodes = live[function]
            shared = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
            own = {"", "self"} if function in around else self.names_bound(function) - shared | {"", "self"}
            for node in nodes:
                if isinstance(node, ast.Call):
                    name, owner = name_of(node.func), getattr(node.func, "value", None)
                    if owner is None or _target(owner) != "os":  # it removes files
                        calls[name].append((function, node))
                    changed |= {_target(owner)} - own if owner is not None and _CHANGES.match(name) else set()
                    changed |= {*map(_target, node.args[:1])} - own if name in _CHANGES_ARGUMENT else set()
                    if name == "setattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                        stored[f".{node.args[1].value!s}"].append((function, node))
                elif isinstance(getattr(node, "ctx", None), ast.Store) and (name := _target(node)) not in own:
                    stored[name].append((function, node))
        return stored, changed, calls

    def _named_in(self, nodes: Iterable[Any]) -> set[Any]:
        """Return the functions with a name that these nodes read."""
        names = {name_of(node) for node in nodes} - {""}
        return {function for function in self.outer if getattr(function, "name", "") in names}


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
        names = ("__func__", "__wrapped__", "func", "python_function", "_generator")
        waiting += filter(callable, (getattr(part, name, None) for name in names))
        waiting += [getattr(type(part), name) for name in _SPECIAL if hasattr(type(part), name)]
        for cell in getattr(part, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # it is empty
                waiting.append(cell.cell_contents)
    return found
