"""Find the function of a custom loop's eager step, and what in it a graph would do once instead of at each step.

The function is the innermost one around both the tape and the update. A graph repeats what TensorFlow did while the
function was traced. What Python changes, draws or reads anew in each call is not part of it.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import sys
from collections import ChainMap, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from autotune.data.facts import Site
from autotune.runtime.sources import is_installed, parse_source
from autotune.script.call_sites import functions_in, is_own, line_of, line_of_code, name_of, running_frames, shown
from autotune.script.changing_state import OwnSource

_STDLIB = os.path.dirname(os.__file__) + os.sep
_ONCE = "a graph would do that once"
_NO_VALUE = "a graph has no such value"
_EFFECTS = {"print", "next", "input", "open", "exec", "eval", "setattr", "delattr"}
_TO_PYTHON = {"float", "int", "bool", "complex", "numpy", "item", "tolist"}
_MUTATORS = re.compile(
    "append(left)?|pop(left|item)?|add|put|extend|insert|remove|clear|discard|update|setdefault|sort|reverse|write|fill"
)
_FRAMEWORKS = {"tensorflow", "keras", "tf_keras"}
_PURE = {"_operator", "abc", "builtins", "collections", "contextlib", "copy", "dataclasses", "enum", "functools"}
_PURE |= {"itertools", "math", "numpy", "operator", "tensorflow_probability", "types", "typing", *_FRAMEWORKS}
"""Packages whose calls a graph contains, or may make once."""
_DRAWS = re.compile(
    r"tensorflow\b.*\brandom(_ops)?\.(?!stateless|[A-Z]|fold_in|split|create|get)|.*\.(dropout|random_)"
)
"""Names of functions of TensorFlow that draw from its global generator."""
_NEW = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
_MAKERS = {"list", "dict", "set", "defaultdict", "OrderedDict"}
_UNKNOWN = object()


class EagerSteps:
    """Notes which functions update weights eagerly, and what these call."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._tapes: list[list[FrameType]] = []  # the frames around each tape since the last update
        self._updates: dict[CodeType, tuple[FrameType, int, Any]] = {}  # the last one of each function
        self._loops: dict[CodeType, int] = {}  # functions that make several steps in a call, with the line
        self._scopes: dict[CodeType, Mapping[str, Any]] = {}  # the names that a function saw when it was last called
        self._calls: defaultdict[CodeType, set[CodeType]] = defaultdict(set)
        self._is_users = functools.cache(lambda file: is_own(file) and not file.startswith(_STDLIB))

    def note_tape(self, usual: Callable[..., Any], *arguments: Any) -> Any:
        """Note that a `GradientTape` begins to record."""
        self._tapes.append(running_frames())
        return usual(*arguments)

    def note_update(self, optimizer: Any, element: Any) -> None:
        """Note an eager update. `element`: what was last read from a dataset, None without one."""
        tapes, self._tapes = self._tapes, []
        frame = next((found for found in running_frames() if all(found in around for around in tapes)), None)
        if frame is None:
            return
        code = frame.f_code
        last, *before = self._updates.get(code, (None, 0, None))
        is_next_step = element is not before[1] or (element is None and before[0] == id(optimizer))
        if code.co_name == "<module>" or (last is frame and is_next_step):
            self._loops[code] = frame.f_lineno
        self._updates[code] = frame, id(optimizer), element
        sys.setprofile(self._note_call)

    def _note_call(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        file = frame.f_globals.get("__file__") if code.co_filename == "<string>" else code.co_filename  # by `exec`
        is_inner = code.co_name.startswith("<") and code.co_name != "<lambda>"
        if event != "call" or is_inner or not file or not self._is_users(file):
            return
        self._scopes[code] = ChainMap(dict(frame.f_locals), frame.f_globals)
        caller = frame.f_back
        while caller is not None and caller.f_code not in self._scopes:
            caller = caller.f_back
        if caller is not None:
            self._calls[caller.f_code].add(code)

    def find_sites(self, source: OwnSource) -> tuple[tuple[Site, ...], str]:
        """Return the functions that can be compiled, and why another one cannot be; empty if none is left out."""
        sys.setprofile(None)
        sites, reasons = [], []
        for code in self._updates:
            if why := self._why_not(code, source):
                reasons.append(why)
                continue
            node, name = source.nodes_at(code)[0], code.co_qualname
            alike = [found for known, found in functions_in(parse_source(Path(code.co_filename))) if known == name]
            order, file = [found.lineno for found in alike].index(node.lineno), shown(code.co_filename, self._directory)
            sites.append(Site(file=file, function=name, call=code.co_name, order=order, line=node.lineno))
        return tuple(sites), next(iter(reasons), "")

    def _why_not(self, step: CodeType, source: OwnSource) -> str:
        """Return why a function cannot be compiled, with the line; empty if it can be."""
        if step in self._loops:
            line = f"{shown(step.co_filename, self._directory)}, line {self._loops[step]}"
            return f"{line}: the eager step stands in its loop; move it into a function of one batch to tune this"
        codes = [step]
        for code in codes:  # which grow by the functions that they call
            codes += [called for called in self._calls[code] if called not in codes]
        nodes = {code: source.nodes_at(code) for code in codes}
        changed = source.changes([node for found in nodes.values() for node in found])[0]
        for code, found in nodes.items():
            if len(found) != 1:
                return f"{line_of_code(code, self._directory)}: the source of {code.co_name}() cannot be found"
            scope = self._scopes.get(code, {})
            signature = _find_signature_obstacles(found[0], scope) if code is step else ()
            inside = find_obstacles(found[0], source.nodes_of(found[0]), scope, changed)
            for node, what in itertools.chain(signature, inside):
                return f"{line_of(code.co_filename, node, self._directory)}: {code.co_name}() {what}"
        return ""


def _find_signature_obstacles(function: Any, scope: Mapping[str, Any]) -> Iterator[tuple[ast.AST, str]]:
    """Yield what of a step's decorators and arguments keeps it from a graph."""
    for decorator in getattr(function, "decorator_list", ()):
        if name_of(decorator) not in ("staticmethod", "classmethod"):
            yield decorator, f"is decorated by {ast.unparse(decorator)}, which may replace it"
    given = function.args.args[len(function.args.args) - len(function.args.defaults) :]
    usual = {argument.arg: default for argument, default in zip(given, function.args.defaults, strict=True)}
    for argument in (*function.args.args, *function.args.kwonlyargs):
        value, default = scope.get(argument.arg), usual.get(argument.arg)
        is_default = isinstance(default, ast.Constant) and default.value == value
        if isinstance(value, int | float) and not isinstance(value, bool) and not is_default:
            yield argument, f"is given {argument.arg} as a Python number, for each of which a graph would be made"


def find_obstacles(
    function: Any, nodes: Sequence[ast.AST], scope: Mapping[str, Any], changed: Collection[str]
) -> Iterator[tuple[ast.AST, str]]:
    """Yield what in a function would not happen at each step if it were compiled: the node, and words for it.

    `nodes`: those of its body; `scope`: the names that it sees; `changed`: names and `.attributes` that other functions
    and loops change.
    """
    stored = [node for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
    arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    made = [node for node in nodes if isinstance(node, ast.Assign) and _makes_collection(node.value)]
    own = {name_of(target) for node in made for target in node.targets}
    local = {node.id for node in stored}
    find = functools.partial(_value_of, scope={name: scope[name] for name in scope if name not in local - arguments})
    if ".trainable" in changed:
        yield function, "trains variables that the script chooses by .trainable as it trains: a graph would keep them"
    for node in nodes:
        context = getattr(node, "ctx", None)
        if isinstance(node, ast.Global | ast.Nonlocal):
            yield node, f"changes {node.names[0]} of an outer scope: {_ONCE}"
        elif isinstance(node, ast.Yield | ast.YieldFrom | ast.Await):
            yield node, "is a generator, which no graph can be made of"
        elif isinstance(node, ast.Call):
            for what in _describe_call(node, find, own):
                yield node, what
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(context, ast.Load):
            if isinstance(node, ast.Attribute) or _root(node) not in own:
                yield node, f"changes {ast.unparse(node)}: {_ONCE}"
        elif isinstance(node, ast.Attribute | ast.Name):
            name = f".{node.attr}" if isinstance(node, ast.Attribute) else node.id
            if name in changed and name not in arguments and _is_python(find(node)):
                yield node, f"reads {ast.unparse(node)}, which the script changes: a graph would keep the first value"


def _describe_call(call: ast.Call, find: Callable[[ast.AST], Any], own: set[str]) -> Iterator[str]:
    """Yield what a call does that a graph would not do at each step."""
    name, text, owner = name_of(call.func), f"calls {ast.unparse(call.func)}()", _UNKNOWN
    if isinstance(call.func, ast.Attribute):
        owner = find(call.func.value)
    is_module = isinstance(owner, ModuleType)
    callee = find(call.func) if owner is _UNKNOWN else None if is_module else type(owner)
    module = str(owner.__name__ if isinstance(owner, ModuleType) else getattr(callee, "__module__", None) or "")
    package = module.partition(".")[0]
    values = [find(part) for given in (*call.args, *call.keywords) for part in _chains(given)]
    is_constant = all(isinstance(value, int | float | str | ModuleType) for value in values)
    is_plain = package not in _FRAMEWORKS or isinstance(owner, list | dict | set)
    is_change = _MUTATORS.fullmatch(name) and isinstance(call.func, ast.Attribute) and not is_module and is_plain
    is_change = is_change and _root(call.func) not in own
    if isinstance(call.func, ast.Name) and name in _EFFECTS:
        yield f"{text}: {_ONCE}"
    elif name in _TO_PYTHON and not is_module and not (call.args and is_constant):
        yield f"{text}: {_NO_VALUE}"
    elif _DRAWS.match(f"{module}.{name}") and package == "tensorflow":
        yield f"draws by {ast.unparse(call.func)}() other numbers than a graph would: there @tf.function is advice only"
    elif (package == "numpy" and (not is_constant or "random" in module)) or _is_impure(module) or is_change:
        yield f"{text}: {_ONCE}"


def _is_impure(module: str) -> bool:
    """Return whether a module is of a package that is not the user's, and may do or draw something at each call."""
    package = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return package not in _PURE and (package in sys.stdlib_module_names or is_installed(file))


def _makes_collection(value: ast.expr) -> bool:
    return isinstance(value, _NEW) or (isinstance(value, ast.Call) and name_of(value.func) in _MAKERS)


def _chains(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the names in an expression, each with its attributes."""
    if isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _root(node)):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _chains(child)


def _root(node: ast.AST) -> str:
    """Return the name that attributes and items are taken of; empty for another expression."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _value_of(node: ast.AST, scope: Mapping[str, Any]) -> Any:
    """Return the value of a name with its attributes, as far as it is known before the function runs."""
    if isinstance(node, ast.Attribute):
        owner = _value_of(node.value, scope)
        try:
            return _UNKNOWN if owner is _UNKNOWN else getattr(owner, node.attr)
        except Exception:  # a property of the user's may raise anything
            return _UNKNOWN
    return scope.get(node.id, _UNKNOWN) if isinstance(node, ast.Name) else _UNKNOWN


def _is_python(value: Any) -> bool:
    """Return whether a graph would keep a value as it was: a number, text, collection or tensor."""
    kind = type(value)
    is_plain = isinstance(value, int | float | complex | str | list | tuple | dict | set) or value is None
    return is_plain or kind.__module__ == "numpy" or kind.__name__ == "EagerTensor"
