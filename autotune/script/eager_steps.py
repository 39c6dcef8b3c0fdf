"""Find the function of a custom loop's eager step, and what in it a graph would do once instead of at each step.

The function is the innermost one around both the tape and the update. A graph repeats what TensorFlow did while the
function was traced. What Python changes, draws or reads anew in each call is not part of it.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from collections import ChainMap, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from autotune.data.facts import Site
from autotune.runtime.sources import is_installed, parse_source
from autotune.script.call_sites import functions_in, is_own, line_of, line_of_code, name_of, running_frames, shown
from autotune.script.changing_state import OwnSource, code_of

_STDLIB = os.path.dirname(os.__file__) + os.sep
_ONCE = "a graph would do that once"
_EFFECTS = {"print", "next", "input", "open", "exec", "eval", "setattr", "delattr"}
_TO_PYTHON = {"float", "int", "bool", "complex", "numpy", "item", "tolist"}
_MUTATORS = re.compile(
    "append(left)?|pop(left|item)?|add|put|extend|insert|remove|clear|discard|update|setdefault|sort|reverse|write|fill"
)
_OUTSIDE = re.compile(r"on_\w+|save(_weights)?|[gs]et_weights")
"""Methods of Keras's that act in Python."""
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
        is_generated = code.co_filename == "<string>"  # by `exec`; a data class has such special methods
        file = frame.f_globals.get("__file__") if is_generated else code.co_filename
        is_inner = code.co_name.startswith("__" if is_generated else "<") and code.co_name != "<lambda>"
        if event != "call" or is_inner or not file or not self._is_users(file):
            return
        self._scopes[code] = ChainMap(dict(frame.f_locals), frame.f_globals)
        caller = frame.f_back
        while caller is not None and caller.f_code not in self._scopes:
            caller = caller.f_back
        if caller is not None:
            self._calls[caller.f_code].add(code)

    def find_sites(self, source: OwnSource, parts: Collection[Any]) -> tuple[tuple[Site, ...], str]:
        """Return the functions that can be compiled, and why another one cannot be; empty if none is left out.

        `parts`: layers and optimizers of the training.
        """
        sys.setprofile(None)
        sites, reasons = [], []
        for code in self._updates:
            if why := self._why_not(code, source, parts):
                reasons.append(why)
                continue
            line, file = source.nodes_at(code)[0].lineno, shown(code.co_filename, self._directory)
            known = functions_in(parse_source(Path(code.co_filename)))
            name, order, _ = next(found for found in known if found[2].lineno == line)
            sites.append(Site(file=file, function=name, call=code.co_name, order=order, line=line))
        return tuple(sites), next(iter(reasons), "")

    def _why_not(self, step: CodeType, source: OwnSource, parts: Collection[Any]) -> str:
        """Return why a function cannot be compiled, with the line; empty if it can be."""
        if step in self._loops:
            line = f"{shown(step.co_filename, self._directory)}, line {self._loops[step]}"
            return f"{line}: the eager step stands in its loop; move it into a function of one batch to tune this"
        codes = [step]
        for code in codes:  # which grow by the functions that they call
            codes += [called for called in self._calls[code] if called not in codes]
        scopes: dict[Any, Mapping[str, Any]] = {}
        for code in codes:
            nodes, scope = source.nodes_at(code), self._scopes.get(code, {})
            if len(nodes) != 1 or (code is step and not isinstance(nodes[0], ast.FunctionDef)):
                return f"{line_of_code(code, self._directory)}: the source of {code.co_name}() cannot be found"
            scopes[nodes[0]] = scope
            for node, what in _find_signature_obstacles(nodes[0], scope) if code is step else ():
                return f"{line_of(code.co_filename, node, self._directory)}: {code.co_name}() {what}"
        return _first_obstacle(scopes, source, parts, self._directory)


def find_obstacle_of_fit(parts: Collection[Any], source: OwnSource, directory: str) -> str:
    """Return what a graph would not repeat of what the user wrote for the steps of a `fit`; empty for nothing.

    `parts`: its model, layers, losses and metrics.
    """
    scopes: dict[Any, Mapping[str, Any]] = {}
    for part in parts:
        names = ("train_step", "call", "compute_loss", "update_state")
        for function in (part, *(getattr(type(part), name, None) for name in names)):
            scope = ChainMap({"self": part}, getattr(function, "__globals__", {}))
            scopes |= {node: scope for code in code_of(function) for node in source.nodes_at(code)}
    scopes = {node: {} for node in source.reached_from(scopes)} | scopes
    return _first_obstacle(scopes, source, parts, directory)


def _first_obstacle(
    scopes: Mapping[Any, Mapping[str, Any]], source: OwnSource, parts: Collection[Any], directory: str
) -> str:
    """Return the first obstacle in some functions, with its line. `scopes`: the names that each of them sees."""
    changed = source.changes(scopes)[0]
    for attribute in sorted(name[1:] for name in changed if name.startswith(".")):
        is_kept = any(_is_number(vars(part).get(attribute)) for part in parts)  # as a rate of dropout
        if (is_kept or attribute == "trainable") and (line := source.line_of_store(attribute)):
            return f"{line}: sets .{attribute} as it trains: a graph would keep the first value"
    for function, scope in scopes.items():
        theirs, outer = set(changed), source.outer[function]
        while outer in scopes:  # whose variables each call makes anew
            theirs -= _names_bound(outer, source.nodes_of(outer))
            outer = source.outer[outer]
        for node, what in find_obstacles(function, source.nodes_of(function), scope, theirs):
            name = getattr(function, "name", "a lambda")
            return f"{line_of(source.files[function], node, directory)}: {name}() {what}"
    return ""


def _find_signature_obstacles(function: Any, scope: Mapping[str, Any]) -> Iterator[tuple[ast.AST, str]]:
    """Yield what of a step's decorators and arguments keeps it from a graph."""
    for decorator in getattr(function, "decorator_list", ()):
        if name_of(decorator) not in ("staticmethod", "classmethod"):
            yield decorator, f"is decorated by {ast.unparse(decorator)}, which may replace it"
    usual = {default.value for default in function.args.defaults if isinstance(default, ast.Constant)}
    for argument in (*function.args.args, *function.args.kwonlyargs):
        value = scope.get(argument.arg)
        if _is_number(value) and value not in usual:
            yield argument, f"is given {argument.arg} as a Python number, for each of which a graph would be made"


def find_obstacles(
    function: Any, nodes: Sequence[ast.AST], scope: Mapping[str, Any], changed: Collection[str]
) -> Iterator[tuple[ast.AST, str]]:
    """Yield what in a function would not happen at each step if it were compiled: the node, and words for it.

    `nodes`: those of its body; `scope`: the names that it sees; `changed`: names and `.attributes` that other functions
    and loops change.
    """
    pairs = [(node.targets, node.value) for node in nodes if isinstance(node, ast.Assign)]
    pairs += [([node.target], node.value) for node in nodes if isinstance(node, ast.AnnAssign) and node.value]
    targets = [(target, value) for given, value in pairs for target in given]
    others = {name_of(target) for target, value in targets if not _makes_collection(value)}
    own = {name_of(target) for target, _ in targets} - others
    own |= {"self"} if getattr(function, "name", "") == "__init__" else set()
    arguments = _names_bound(function, ())
    local = _names_bound(function, nodes) - arguments
    find = functools.partial(_value_of, scope={name: scope[name] for name in scope if name not in local})
    for node in nodes:
        is_read = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if isinstance(node, ast.Global | ast.Nonlocal):
            yield node, f"changes {node.names[0]} of an outer scope: {_ONCE}"
        elif isinstance(node, ast.Yield | ast.YieldFrom | ast.Await):
            yield node, "is a generator, which no graph can be made of"
        elif isinstance(node, ast.Call) and (what := _describe_call(node, find, own)):
            yield node, what
        elif isinstance(node, ast.Attribute | ast.Subscript) and not is_read and _root(node) not in own:
            yield node, f"changes {ast.unparse(node)}: {_ONCE}"
        elif isinstance(node, ast.Attribute | ast.Name) and is_read:
            name = f".{node.attr}" if isinstance(node, ast.Attribute) else node.id
            if name in changed and name not in arguments and _is_python(find(node)):
                yield node, f"reads {ast.unparse(node)}, which the script changes: a graph would keep the first value"


def _describe_call(call: ast.Call, find: Callable[[ast.AST], Any], own: set[str]) -> str:
    """Return what a call does that a graph would not do at each step; empty for nothing."""
    name, shown_call = name_of(call.func), ast.unparse(call.func)
    owner = find(call.func.value) if isinstance(call.func, ast.Attribute) else None
    kind = find(call.func) if owner is None else owner if isinstance(owner, ModuleType) else type(owner)
    module = str(getattr(kind, "__name__" if kind is owner else "__module__", None) or "")
    package = module.partition(".")[0]
    values = [find(part) for given in (*call.args, *call.keywords) for part in _chains(given)]
    is_constant = all(isinstance(value, int | float | str | ModuleType) for value in values)
    if name in _TO_PYTHON and kind is not owner and not (call.args and is_constant):
        return f"calls {shown_call}(): a graph has no such value"
    if package == "tensorflow" and _DRAWS.match(f"{module}.{name}"):
        return f"draws by {shown_call}() other numbers than a graph would: there @tf.function is advice only"
    is_effect = name in _EFFECTS if owner is None else bool(_OUTSIDE.fullmatch(name))
    is_numpy = package == "numpy" and (not is_constant or "random" in module)
    is_change = (
        owner is not None and kind is not owner and bool(_MUTATORS.fullmatch(name)) and _root(call.func) not in own
    )
    is_change = is_change and (package not in _FRAMEWORKS or isinstance(owner, list | dict | set))
    return f"calls {shown_call}(): {_ONCE}" if is_effect or is_numpy or is_change or _is_impure(module) else ""


def _is_impure(module: str) -> bool:
    """Return whether a module is of a package that is not the user's, and may do or draw something at each call."""
    package = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return package not in _PURE and (package in sys.stdlib_module_names or is_installed(file))


def _names_bound(function: Any, nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of a function's arguments, and of the variables that these nodes of it set."""
    variables = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return variables | {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def _makes_collection(value: ast.expr | None) -> bool:
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_python(value: Any) -> bool:
    """Return whether a graph would keep a value as it was: a number, text, collection or tensor."""
    kind = type(value)
    is_plain = isinstance(value, int | float | complex | str | list | tuple | dict | set) or value is None
    return is_plain or kind.__module__ == "numpy" or kind.__name__ == "EagerTensor"
