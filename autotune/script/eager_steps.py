"""Find a custom loop's eager step function, and the side effects that tf.function would run only at trace time.

The function is the innermost one around both the tape and the update. A graph repeats what TensorFlow did while the
function was traced. Values that Python changes, draws or reads anew in each call are not part of it.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import os
import re
import sys
from collections import ChainMap, Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType, ModuleType
from typing import Any

from autotune.data.facts import Site
from autotune.runtime.sources import is_installed
from autotune.script.call_sites import functions_in, is_own, line_of, line_of_code, name_of, running_frames
from autotune.script.changing_state import OwnSource, code_of
from autotune.script.inline_steps import is_moved

_STDLIB = os.path.dirname(os.__file__) + os.sep
_ONCE = "tf.function would run it only once, at trace time"
_EFFECTS = {
    "print",
    "next",
    "input",
    "open",
    "exec",
    "eval",
    "setattr",
    "delattr",
    "vars",
    "globals",
    "locals",
    "getattr",
}
_TO_PYTHON = {"float", "int", "bool", "complex", "numpy", "item", "tolist", "format", "str", "repr"}
_OF_SHAPE = {"shape", "dtype", "ndim", "rank"}
"""Attributes of tensors that a graph has, too."""
_MUTATORS = re.compile(
    "append(left)?|pop(left|item)?|add|put|extend|insert|remove|clear|discard|update|setdefault|sort|reverse|write|fill"
)
_OUTSIDE = re.compile(r"on_\w+|save(_weights)?|[gs]et_weights|set_(random_)?seed")
"""Functions of Keras's and TensorFlow's that act in Python."""
_ASKS = re.compile(r"(executing_eagerly|inside_function|isinstance.*\b(ndarray|EagerTensor)|hasattr.*\bnumpy)\b")
"""Calls that a graph answers otherwise."""
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
        self._updates: dict[CodeType, tuple[FrameType, Any]] = {}  # the last one of each function, and its batch
        self._counts = Counter[CodeType]()  # updates of each function
        self._loops: dict[CodeType, int] = {}  # functions that make several steps in a call, with the line
        self._scopes: dict[CodeType, Mapping[str, Any]] = {}  # the names that a function saw when it was last called
        self._calls: defaultdict[CodeType, set[CodeType]] = defaultdict(set)
        self._awaited: set[tuple[str, int]] = set()  # functions with a tape that the loop calls: files and lines
        self.draws = list[str]()  # lines of steps that can be compiled, and draw TensorFlow's random numbers
        self.compiled = set[CodeType]()  # functions that are, by `tf.function`: they are not awaited
        self._is_users = functools.cache(lambda file: is_own(file) and not file.startswith(_STDLIB))

    def note_tape(self, usual: Callable[..., Any], *arguments: Any) -> Any:
        """Note that a `GradientTape` begins to record."""
        frames = running_frames()
        self._tapes.append(frames)
        known = self._updates.keys() & {frame.f_code for frame in frames}
        if self._awaited and not known:  # a round of functions may be long, and the profile function makes it longer
            self._scopes = {frame.f_code: _scope_of(frame) for frame in frames} | self._scopes
            sys.setprofile(self._note_call)
        return usual(*arguments)

    def note_update(self, optimizer: Any, element: Any) -> None:
        """Note an eager update. `element`: what was last read from a dataset, None without one."""
        tapes, self._tapes = self._tapes, []
        frame = next((found for found in running_frames() if all(found in around for around in tapes)), None)
        if frame is None:
            return
        inner: FrameType | None = sys._getframe(1)
        while inner is not None and inner is not frame and inner.f_code.co_filename != "<string>":
            inner = inner.f_back
        frame = inner or frame  # what `exec` made is in no file
        code, batch = frame.f_code, (id(optimizer), frame.f_lasti) if element is None else element
        last, before = self._updates.get(code, (None, None))
        is_next_step = batch == before if element is None else batch is not before
        if code.co_name == "<module>" or (last is frame and is_next_step):
            self._loops[code] = frame.f_lineno
        self._updates[code] = frame, batch
        self._counts[code] += 1
        is_whole = min(self._counts.values()) > 1  # what a function calls before its tape shows in its second call
        sys.setprofile(None if self._awaited and is_whole else self._note_call)

    def _note_call(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_generated = code.co_filename == "<string>"  # by `exec`; a data class has such special methods
        file = frame.f_globals.get("__file__") if is_generated else code.co_filename
        is_inner = code.co_name.startswith("__" if is_generated else "<") and code.co_name != "<lambda>"
        if event != "call" or is_inner or not file or not self._is_users(file):
            return
        self._scopes[code] = _scope_of(frame)
        caller = frame.f_back
        while caller is not None and caller.f_code not in self._scopes:
            caller = caller.f_back
        if caller is not None:
            self._calls[caller.f_code].add(code)

    def find_sites(
        self, source: OwnSource, parts: Collection[Any], *, reseeds: bool = False
    ) -> tuple[tuple[Site, ...], list[str]]:
        """Return the functions that can be compiled, and why each other one cannot be.

        `parts`: layers and optimizers of the training; `reseeds`: the training sets TensorFlow's seed, maybe often.
        """
        sys.setprofile(None)
        sites, reasons = [], []
        _, _, called = source.changes(())
        self._awaited = {
            place
            for place, functions in source.functions_at.items()
            for node in functions
            if isinstance(node, ast.FunctionDef) and not node.decorator_list and node.name in called
            if any(name_of(part) == "GradientTape" for part in source.nodes_of(node))
        }
        for code in self._updates:
            draws = list[str]()
            if why := self._why_not(code, source, parts, reseeds, draws):
                reasons.append(why)
                continue
            self.draws += draws
            line, file = source.nodes_at(code)[0].lineno, code.co_filename
            known = functions_in(source.tree_of(file), file, self._directory)
            sites.append(next(site for site, node in known if node.lineno == line))
        return tuple(sites), reasons

    @property
    def are_all_seen(self) -> bool:
        """True if each function with a tape that the loop calls was called, or is compiled, and each updated twice."""
        called = {*self._scopes, *self._updates, *self.compiled}
        if min(self._counts.values(), default=2) < 2:
            return False
        return self._awaited <= {(os.path.realpath(code.co_filename), code.co_firstlineno) for code in called}

    def _why_not(
        self, step: CodeType, source: OwnSource, parts: Collection[Any], reseeds: bool, draws: list[str]
    ) -> str:
        """Return why a function cannot be compiled, with the line; empty if it can be."""
        if step in self._loops:
            line = line_of(step.co_filename, self._loops[step], self._directory)
            return f"{line}: the eager step stands in its loop; move it into a function of one batch to tune this"
        if self._counts[step] < 2:
            name = "the step" if any(map(is_moved, source.nodes_at(step))) else f"{step.co_name}()"
            return f"{line_of_code(step, self._directory)}: {name} was called once only while it was looked at"
        functions: dict[CodeType, Mapping[str, Any]] = {step: {}}
        scopes: dict[Any, Mapping[str, Any]] = {}
        while functions:
            code, scope = functions.popitem()
            nodes = source.nodes_at(code)
            if len(nodes) != 1 or (code is step and not isinstance(nodes[0], ast.FunctionDef)):
                return f"{line_of_code(code, self._directory)}: the source of {code.co_name}() cannot be found"
            if nodes[0] in scopes:
                continue
            scopes[nodes[0]] = scope = self._scopes.get(code, scope)
            functions |= _functions_called(source.nodes_of(nodes[0]), scope, self._is_users)
            functions |= {called: self._scopes[called] for called in self._calls[code]}
        return _first_obstacle(scopes, source, parts, self._directory, reseeds, draws, source.nodes_at(step)[0])


def _scope_of(frame: FrameType) -> Mapping[str, Any]:
    return ChainMap(dict(frame.f_locals), frame.f_globals)


def _functions_called(
    nodes: Iterable[ast.AST], scope: Mapping[str, Any], is_users: Callable[[str], bool]
) -> dict[CodeType, Mapping[str, Any]]:
    """Return the user's functions that some nodes call, in branches that were not taken as well, and their names."""
    found: dict[CodeType, Mapping[str, Any]] = {}
    for node in nodes:
        if isinstance(node, ast.Call) and callable(value := _value_of(node.func, scope)):
            function = inspect.unwrap(getattr(value, "__func__", value))
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType) and is_users(code.co_filename):
                found[code] = ChainMap({"self": getattr(value, "__self__", _UNKNOWN)}, function.__globals__)
    return found


def find_obstacle_of_fit(
    parts: Collection[Any], source: OwnSource, directory: str, reseeds: bool, draws: list[str]
) -> str:
    """Return what a graph would not repeat of what the user wrote for the steps of a `fit`; empty for nothing.

    `parts`: its model, layers, losses and metrics; `reseeds`: see `EagerSteps.find_sites`; `draws`: see below.
    """
    scopes: dict[Any, Mapping[str, Any]] = {}
    for part in parts:
        names = ("train_step", "call", "compute_loss", "update_state")
        for function in (part, *(getattr(type(part), name, None) for name in names)):
            scope = ChainMap({"self": part}, getattr(function, "__globals__", {}))
            scopes |= {node: scope for code in code_of(function) for node in source.nodes_at(code)}
    scopes = {node: {} for node in source.reached_from(scopes)} | scopes
    return _first_obstacle(scopes, source, parts, directory, reseeds, draws)


def _first_obstacle(
    scopes: Mapping[Any, Mapping[str, Any]],
    source: OwnSource,
    parts: Collection[Any],
    directory: str,
    reseeds: bool,
    draws: list[str],
    step: ast.FunctionDef | None = None,
) -> str:
    """Return the first obstacle in some functions, with its line. `scopes`: the names that each of them sees.

    `step`: the one that is compiled, where Keras does not call it. Lines that draw random numbers are added to `draws`.
    """
    stored, changed, calls = source.changes(scopes)
    for name, (function, node) in ((name, place) for name, places in stored.items() for place in places):
        receiver: Any = node.args[0] if isinstance(node, ast.Call) else getattr(node, "value", node)
        owner = name_of(receiver)
        known = source.names.get(owner) if owner != "self" else None
        is_no_layer = owner == "self" and function not in source.hooks
        able = [part for part in parts if not is_no_layer and (known is None or part is known)]
        is_kept = any(_is_number(vars(part).get(name[1:])) for part in able)  # as a rate of dropout
        if name == ".trainable" or (name.startswith(".") and is_kept):
            where = line_of(source.files[function], node, directory)
            return f"{where}: sets {name} as it trains: a graph would keep the first value"
    if step is not None:
        for kind in {type(part).__name__ for part in parts if hasattr(part, "apply_gradients")} & calls.keys():
            caller, call = calls[kind][0]
            where = line_of(source.files[caller], call, directory)
            return f"{where}: makes an optimizer as it trains: a graph would keep the first one"
        for node, what in _find_signature_obstacles(step, scopes[step], source, calls[step.name], {*stored, *changed}):
            name = "the step" if is_moved(step) else f"{step.name}()"
            return f"{line_of(source.files[step], node, directory)}: {name} {what}"
    for function, scope in scopes.items():
        theirs, outer = dict.fromkeys(changed, False) | dict.fromkeys(stored, True), source.outer.get(function)
        while outer in scopes:  # whose variables each call makes anew
            theirs = {name: is_set for name, is_set in theirs.items() if name not in source.names_bound(outer)}
            outer = source.outer.get(outer)
        name = "the step" if is_moved(function) else f"{getattr(function, 'name', 'a lambda')}()"
        found = find_obstacles(function, source, scope, theirs)
        for node, what in found:
            line = line_of(source.files[function], node, directory)
            if reseeds or not what.startswith("draws"):
                return f"{line}: {name} {what}"
            draws.append(line)
    return ""


def _find_signature_obstacles(
    function: ast.FunctionDef,
    scope: Mapping[str, Any],
    source: OwnSource,
    calls: Sequence[tuple[Any, Any]],
    changed: Collection[str],
) -> Iterator[tuple[ast.AST, str]]:
    """Yield what of a step's decorators and arguments keeps it from a graph. `calls`: those of it, with the caller."""
    for decorator in function.decorator_list:
        if name_of(decorator) not in ("staticmethod", "classmethod"):
            yield decorator, f"is decorated by {ast.unparse(decorator)}, which may replace it"
    usual = {default.value for default in function.args.defaults if isinstance(default, ast.Constant)}
    names = [argument.arg for argument in function.args.args if scope.get("self") is None or argument.arg != "self"]
    for argument in (*function.args.args, *function.args.kwonlyargs):
        value = scope.get(argument.arg)
        if not _is_number(value) or value in usual:
            continue
        for caller, call in calls:
            own = source.names_bound(caller) if isinstance(caller, ast.FunctionDef) else set[str]()
            given = dict(zip(names, call.args, strict=False)) | {word.arg: word.value for word in call.keywords}
            parts = list(_chains(given.get(argument.arg, argument)))
            read = {f".{node.attr}" if isinstance(node, ast.Attribute) else name_of(node) for node in parts}
            if argument.arg not in given or read & {*changed, *own}:
                yield argument, f"is given {argument.arg} as a Python number, for each of which a graph would be made"


def find_obstacles(
    function: Any, source: OwnSource, scope: Mapping[str, Any], changed: Mapping[str, bool]
) -> Iterator[tuple[ast.AST, str]]:
    """Yield what in a function would not happen at each step if it were compiled: the node, and words for it.

    `scope`: the names that it sees; `changed`: names and `.attributes` that other functions and loops change,
    and whether they set them.
    """
    nodes = [_as_attribute(node) for node in source.nodes_of(function)]
    pairs = [(node.targets, node.value) for node in nodes if isinstance(node, ast.Assign)]
    pairs += [([node.target], node.value) for node in nodes if isinstance(node, ast.AnnAssign) and node.value]
    made: dict[str, bool] = {}  # variables, and whether they are collections of its own
    for target, value in ((target, value) for targets, value in pairs for target in targets):
        is_new = isinstance(value, _NEW) or (isinstance(value, ast.Call) and name_of(value.func) in _MAKERS)
        made[name_of(target)] = is_new and made.get(name_of(target), True)
    own = {name for name, is_new in made.items() if is_new}
    own |= {"self"} if getattr(function, "name", "") == "__init__" else set()
    arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    local = source.names_bound(function) - arguments
    known = {name: scope[name] for name in scope if name not in local}
    find = functools.partial(_value_of, scope=known)
    known |= _imported_in(nodes)
    assigned = ((name_of(target), find(value)) for targets, value in pairs for target in targets)
    known |= {name: value for name, value in assigned if isinstance(value, ModuleType) or callable(value)}
    messages = {part for node in nodes if isinstance(node, ast.Raise | ast.Assert) for part in ast.walk(node)}

    def depends(node: ast.AST) -> bool:
        chains = (
            part for part in _chains(node) if name_of(part) not in _OF_SHAPE and not hasattr(builtins, name_of(part))
        )
        return not all(isinstance(find(part), int | float | str | ModuleType | None) for part in chains)

    for node in nodes:
        is_read = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if isinstance(node, ast.Global | ast.Nonlocal):
            yield node, f"changes {node.names[0]} of an outer scope: {_ONCE}"
        elif isinstance(node, ast.Yield | ast.YieldFrom | ast.Await):
            yield node, "is a generator, which no graph can be made of"
        elif isinstance(node, ast.ExceptHandler):
            yield node, "has an except clause, to which no error of a graph leads"
        elif isinstance(node, ast.JoinedStr) and node not in messages and depends(node):
            yield node, f"formats a value in {ast.unparse(node)}: a graph has no such value"
        elif isinstance(node, ast.Assert) and depends(node.test):
            yield node, f"asserts {ast.unparse(node.test)}: a graph has no such value"
        elif isinstance(node, ast.Call) and node not in messages and (what := _describe_call(node, find, own)):
            yield node, what
        elif isinstance(node, ast.Attribute | ast.Subscript) and not is_read and _root(node) not in own:
            yield node, f"changes {ast.unparse(node)}: {_ONCE}"
        elif isinstance(node, ast.Attribute | ast.Name) and is_read:
            name, value = f".{node.attr}" if isinstance(node, ast.Attribute) else node.id, find(node)
            if hasattr(type(value), "__next__"):
                yield node, f"reads the iterator {ast.unparse(node)}: {_ONCE}"
            is_kept = _is_python(value) or (changed.get(name, False) and hasattr(value, "variables"))
            if (name in changed or name == ".__dict__") and name not in arguments and is_kept:
                yield node, f"reads {ast.unparse(node)}, which the script changes: a graph would keep the first value"


def _as_attribute(node: ast.AST) -> ast.AST:
    """Return `x.y` for `getattr(x, "y")`, and any other node as it is."""
    if isinstance(node, ast.Call) and name_of(node.func) == "getattr" and len(node.args) > 1:
        owner, name = node.args[:2]
        if isinstance(name, ast.Constant):
            return ast.copy_location(ast.Attribute(owner, str(name.value), ast.Load()), node)
    return node


def _imported_in(nodes: Iterable[ast.AST]) -> dict[str, Any]:
    """Return the imports inside a function, by the names that it gives."""
    found: dict[str, Any] = {}
    for node in nodes:
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            path = alias.name if alias.asname or isinstance(node, ast.ImportFrom) else alias.name.partition(".")[0]
            of = vars(sys.modules.get(node.module or "", builtins)) if isinstance(node, ast.ImportFrom) else sys.modules
            found[alias.asname or path] = of.get(path, _UNKNOWN)
    return found


def _describe_call(call: ast.Call, find: Callable[[ast.AST], Any], own: set[str]) -> str:
    """Return the effect of a call that a graph would not repeat at each step; empty for none."""
    name, shown_call = name_of(call.func), ast.unparse(call.func)
    owner = find(call.func.value) if isinstance(call.func, ast.Attribute) else None
    bound = getattr(function := find(call.func), "__self__", None)
    if bound is not None and not isinstance(bound, ModuleType | type(owner)):  # a method by another name
        name, owner = function.__name__, bound
    kind = function if owner is None else owner if isinstance(owner, ModuleType) else type(owner)
    module = str(getattr(kind, "__name__" if kind is owner else "__module__", None) or "")
    package = module.partition(".")[0]
    values = [find(part) for given in (*call.args, *call.keywords) for part in _chains(given)]
    is_constant = all(isinstance(value, int | float | str | tuple | ModuleType) for value in values)
    if (name in _TO_PYTHON and kind is not owner and not (call.args and is_constant)) or _ASKS.search(
        ast.unparse(call)
    ):
        return f"calls {shown_call}(): a graph has no such value"
    is_draw = package == "tensorflow" and _DRAWS.match(f"{module}.{name}")
    if is_draw and any(given.arg == "seed" and getattr(given.value, "value", 0) is not None for given in call.keywords):
        return f"gives {shown_call}() a seed: two such calls draw the same numbers in a graph"
    if is_draw:
        return f"draws by {shown_call}() from a seed that the script sets in a loop: a graph would not begin again"
    is_effect = name in _EFFECTS if owner is None else bool(_OUTSIDE.fullmatch(name))
    is_numpy = package == "numpy" and (not is_constant or "random" in module)
    is_change = owner is not None and kind is not owner and _MUTATORS.fullmatch(name) and _root(call.func) not in own
    is_change = is_change and (package not in _FRAMEWORKS or isinstance(owner, list | dict | set))
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    is_impure = package not in _PURE and (package in sys.stdlib_module_names or is_installed(file))
    return f"calls {shown_call}(): {_ONCE}" if is_effect or is_numpy or is_change or is_impure else ""


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
