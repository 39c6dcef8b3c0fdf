"""Move a step that stands in its training loop into a function of one batch, which `graph_step` can compile.

The step is what a loop's body does from its first tape to its last update, with the metrics that follow. What the loop
sets becomes the function's arguments; what is read elsewhere becomes its results. The function stands outside of the
user's functions where it can: there it is made once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

from autotune.script.call_sites import name_of, names_called
from autotune.script.loop_ends import walk_own

NAME = "train_step"
_UPDATES = {"apply", "apply_gradients", "minimize"}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_LOOPS = ast.For | ast.AsyncFor | ast.While
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
_UNMOVABLE = _DEFINITIONS | ast.Return | ast.Yield | ast.YieldFrom | ast.Await | ast.Global | ast.Nonlocal | ast.Match
_UNMOVABLE |= ast.NamedExpr
"""Nodes that no step may have."""
_LEAVES = ast.Break | ast.Continue | ast.Raise | ast.Return
_READS_SCOPE = {"locals", "globals", "vars", "exec", "eval", "super"}
_PRIVATE = re.compile(r"__class__|__\w*(?<!__)")
"""Names that mean something else outside of their class."""


@dataclass(frozen=True, kw_only=True)
class InlineStep:
    """A step that stands in a loop, and the function that it can be moved into."""

    name: str  # of the function
    arguments: Sequence[str]
    results: Sequence[str]
    statements: Sequence[ast.stmt]
    body: list[ast.stmt]  # with these statements
    before: ast.stmt  # the statement that the function is defined before
    around: list[ast.stmt]  # with that statement

    @property
    def header(self) -> str:
        """The function's first line."""
        return f"def {self.name}({', '.join(self.arguments)}):"

    @property
    def footer(self) -> str:
        """The function's last line."""
        return f"return {', '.join(self.results)}".rstrip()

    @property
    def call(self) -> str:
        """The statement that takes the step's place."""
        return f"{', '.join(self.results)} = ".removeprefix(" = ") + self.header.removeprefix("def ").rstrip(":")


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A list of statements, and what is around it."""

    body: list[ast.stmt]
    scopes: Sequence[ast.Module | ast.FunctionDef | ast.AsyncFunctionDef]  # the innermost last
    recorders: frozenset[str]  # names of the script's functions that open a tape for their caller's update
    top: ast.stmt | None = None  # the statement of the module
    loop: ast.stmt | None = None  # the outermost loop of the innermost scope
    around: list[ast.stmt] | None = None  # the statements with that loop


def find_inline_steps(tree: ast.Module) -> list[InlineStep]:
    """Return the steps of a file that can be moved."""
    taken = {name_of(node) or getattr(node, "name", "") or getattr(node, "arg", "") for node in ast.walk(tree)}
    names = (NAME if number == 1 else f"{NAME}_{number}" for number in count(1))
    free = (name for name in names if name not in taken)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    recorders = frozenset(
        known.name
        for known in functions
        if any(map(_is_tape, walk_own(known))) and _UPDATES.isdisjoint(names_called(known))
    )
    places = [*_find(_Place(body=tree.body, scopes=(tree,), recorders=recorders))]
    found = (_describe(place, statements, places, tree) for place, statements in places)
    return [replace(step, name=next(free)) for step in found if step is not None]


def move_inline_steps(tree: ast.Module, *_: object) -> None:
    """Move the inline steps of a file into functions. All nodes keep their positions."""
    for step in find_inline_steps(tree):
        first, last = step.statements[0], step.statements[-1]
        function, call = ast.parse(f"{step.header}\n    {step.footer}\n{step.call}").body
        assert isinstance(function, ast.FunctionDef)
        for node in (*ast.walk(function), *ast.walk(call)):
            ast.copy_location(node, last if isinstance(node, ast.Return) else first)
        function.end_lineno, function.end_col_offset = last.end_lineno, last.end_col_offset
        function.body[:0] = step.statements
        begin = step.body.index(first)
        step.body[begin : begin + len(step.statements)] = [call]
        step.around.insert(step.around.index(step.before), function)


def is_moved(function: ast.AST) -> bool:
    """Return whether a function was made of an inline step: it begins where its first statement does."""
    if not isinstance(function, ast.FunctionDef):
        return False
    first = function.body[0]
    return (first.lineno, first.col_offset) == (function.lineno, function.col_offset)


def _find(place: _Place) -> Iterator[tuple[_Place, list[ast.stmt]]]:
    """Yield the steps below some statements, with their places."""
    tapes = [index for index, statement in enumerate(place.body) if _records(statement, place.recorders)]
    updates = [index for index, statement in enumerate(place.body) if _updates(statement)]
    if place.loop is not None and tapes and updates and tapes[0] <= updates[-1]:
        end = updates[-1] + 1
        while end < len(place.body) and _goes_along(place.body[end], place.loop):
            end += 1
        part = place.body[tapes[0] : end]
        whole = [statement for statement in part if _records(statement, place.recorders) and _updates(statement)]
        if all(_is_tape(statement) or not hasattr(statement, "body") for statement in whole):
            yield place, part
            return
    for statement in place.body:
        inner = replace(place, top=place.top or statement)
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = replace(inner, scopes=(*place.scopes, statement), loop=None, around=None)
        elif isinstance(statement, _LOOPS) and place.loop is None:
            inner = replace(inner, loop=statement, around=place.body)
        if isinstance(statement, ast.ClassDef):  # whose variables no function sees
            inner = replace(inner, body=[part for part in statement.body if isinstance(part, _FUNCTIONS)])
            yield from _find(inner)
            continue
        for parent in (statement, *getattr(statement, "handlers", ())):
            for name in ("body", "orelse", "finalbody"):
                yield from _find(replace(inner, body=getattr(parent, name, [])))


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    yield statement
    if not isinstance(statement, _FUNCTIONS | ast.ClassDef):
        yield from walk_own(statement)


def _is_tape(node: ast.AST) -> bool:
    items = node.items if isinstance(node, ast.With) else ()
    calls = (item.context_expr for item in items)
    return any(isinstance(call, ast.Call) and name_of(call.func) == "GradientTape" for call in calls)


def _records(statement: ast.stmt, recorders: frozenset[str]) -> bool:
    """Return whether a statement opens a tape, or calls a function that does."""
    return any(map(_is_tape, _own_nodes(statement))) or not recorders.isdisjoint(_called(statement))


def _updates(statement: ast.stmt) -> bool:
    return not _UPDATES.isdisjoint(_called(statement))


def _goes_along(statement: ast.stmt, loop: ast.stmt) -> bool:
    """Return whether what follows an update is part of it: a metric that lives on, or the end of a persistent tape."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        metric = statement.value.func.value if isinstance(statement.value.func, ast.Attribute) else statement
        made = {name for name, _ in _stores(loop)}
        return name_of(statement.value.func) == "update_state" and made.isdisjoint(map(name_of, ast.walk(metric)))
    return isinstance(statement, ast.Delete)


def _called(statement: ast.stmt) -> Iterator[str]:
    return (name_of(node.func) for node in _own_nodes(statement) if isinstance(node, ast.Call))


def _describe(
    place: _Place, statements: Sequence[ast.stmt], places: Sequence[tuple[_Place, Sequence[ast.stmt]]], tree: ast.Module
) -> InlineStep | None:
    """Return how a step can be moved, still without a name; None where it cannot be. `places`: of all steps."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    called = {name_of(node.func) for node in nodes if isinstance(node, ast.Call)}
    if any(isinstance(node, _UNMOVABLE) for node in nodes) or called & _READS_SCOPE or _leaves_loop(statements):
        return None
    if any(map(_PRIVATE.fullmatch, map(name_of, nodes))) or _reads_all_names(place.scopes[-1]):
        return None
    assert place.loop is not None
    assert place.top is not None
    assert place.around is not None
    scope, names = place.scopes[-1], _Names(statements)
    steps = [step for other, step in places if other.scopes == place.scopes]
    functions = [known for known in place.scopes if not isinstance(known, ast.Module)]
    own = {name for function in functions for name, _ in _stores(function)}
    passed = {argument.arg for function in functions for argument in _arguments(function)}
    varying = {name for name, _ in _stores(place.loop)}
    given = [name for name in names.read if name in varying]
    constant = [name for name in names.read if name in (own | passed) - varying]
    is_nested = not own.isdisjoint(constant)  # which it sees there
    given += [] if is_nested else constant
    earlier = {name for name, line in _stores(scope) if line < statements[0].lineno} | passed
    sets, elsewhere = [*dict.fromkeys([*names.sets, *names.may_set])], _names_read(scope, [*chain(*steps)])
    elsewhere |= {name for step in steps for name in _Names(step).read}
    results = [name for name in sets if name in elsewhere]
    items = [item for node in nodes if isinstance(node, ast.With) and _is_tape(node) for item in node.items]
    tapes = {name_of(item.optional_vars) for item in items if item.optional_vars is not None}
    shared = {name for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    shared |= _names_read(scope, statements, in_functions=True) & {*sets}  # also while the step runs
    shared |= _names_read_on_error(scope, statements) & {*sets}
    before = _Names(
        [*_arguments(scope), *scope.body] if not isinstance(scope, ast.Module) else scope.body, until=statements[0]
    )
    unsure = {*given} & varying - {*names.surely_read}  # which must be set nevertheless
    is_known = earlier.issuperset(given) and before.known.issuperset(unsure)  # when it begins
    is_known = is_known and {*given, *names.sets}.issuperset(results)  # when it ends
    is_known = is_known and {*given, *sets}.issuperset(names.deleted)
    if not is_known or not {*tapes, *names.deleted}.isdisjoint(results) or not shared.isdisjoint({*given, *sets}):
        return None
    return InlineStep(
        name="",
        arguments=given,
        results=results,
        statements=statements,
        body=place.body,
        before=place.loop if is_nested else place.top,
        around=place.around if is_nested else tree.body,
    )


def _leaves_loop(statements: Sequence[ast.stmt]) -> bool:
    """Return whether `break` or `continue` of an outer loop is among some statements: no function can have it."""
    module = ast.parse("def step():\n    pass")
    assert isinstance(module.body[0], ast.FunctionDef)
    module.body[0].body = [*statements]
    try:
        compile(module, "", "exec", dont_inherit=True)
    except SyntaxError:
        return True
    return False


def _reads_all_names(scope: ast.AST) -> bool:
    """Return whether what a scope calls may read its variables by text."""
    calls = (node for node in ast.walk(scope) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    return any(name_of(call.func) in _READS_SCOPE - {"super", *(["vars"] if call.args else [])} for call in calls)


def _names_read_on_error(scope: ast.AST, statements: Sequence[ast.stmt]) -> set[str]:
    """Return the names that handlers of errors in some statements read."""
    tries = (node for node in walk_own(scope) if isinstance(node, ast.Try | ast.TryStar))
    around = (node for node in tries if any(statements[0] in ast.walk(part) for part in node.body))
    parts = ((*node.handlers, *node.finalbody) for node in around)
    return {name for part in chain(*parts) for name in _names_read(part, ())}


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Iterator[ast.arg]:
    return (node for node in ast.walk(function.args) if isinstance(node, ast.arg))


def _stores(scope: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that are set in a scope or loop, without those of functions inside, and the lines."""
    clauses = (node for node in walk_own(scope) if isinstance(node, ast.comprehension))
    inner = {part for clause in clauses for part in ast.walk(clause.target)}
    for node in walk_own(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in inner:
            yield node.id, node.lineno
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name, node.lineno
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest, node.lineno
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (((alias.asname or alias.name).partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name:
            yield node.name, node.lineno


def _bound(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """Return the names of a function's own."""
    outer = (node.names for node in walk_own(function) if isinstance(node, ast.Global | ast.Nonlocal))
    own = {name for name, _ in _stores(function)} - {*chain(*outer)}
    return {argument.arg for argument in _arguments(function)} | own


def _names_read(scope: ast.AST, without: Sequence[ast.stmt], *, in_functions: bool = False) -> set[str]:
    """Return the names of a scope that are read in it and in functions inside, but for some statements.

    `in_functions`: only there.
    """
    found = set[str]()
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, _FUNCTIONS):
            body = [node.body] if isinstance(node, ast.Lambda) else node.body
            found |= _names_read(_together(body), without) - _bound(node)
            around = [node.args, *getattr(node, "decorator_list", ())]
            found |= _names_read(_together(around), without, in_functions=in_functions)
        elif node not in without:
            target = node.target if isinstance(node, ast.AugAssign) else node
            is_read = target is not node or not isinstance(getattr(node, "ctx", None), ast.Store)
            found |= {target.id} if isinstance(target, ast.Name) and is_read and not in_functions else set()
            found |= _names_read(node, without, in_functions=in_functions)
    return found


def _together(nodes: Sequence[ast.AST]) -> ast.AST:
    return ast.Module([*nodes], [])  # type: ignore[list-item]


class _Names:
    """The names that some statements read before they surely set them, and those that they set, in order.

    `until`: one of them, or within; `known` are the names that are surely set when it begins.
    """

    def __init__(self, statements: Iterable[ast.AST], until: ast.stmt | None = None) -> None:
        self.read: dict[str, None] = {}
        self.surely_read: dict[str, None] = {}
        self.sets: dict[str, None] = {}
        self.may_set: dict[str, None] = {}  # in a branch
        self.deleted = set[str]()
        self._until, self._depth, self._known = until, 0, set[str]()
        self._visit(*statements)

    @property
    def known(self) -> set[str]:
        """The names that are surely set when `until` begins."""
        return self._known - self.deleted

    def _visit(self, *nodes: ast.AST | None) -> None:
        for node in nodes:
            if node is not None and node is self._until:
                self._known = {*self.sets}
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    self.sets[name] = None
                case ast.Name(id=name):
                    self._note_read(name)
                case ast.Delete(targets=targets):
                    self._visit(*targets)
                    self.deleted |= {target.id for target in targets if isinstance(target, ast.Name)}
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom():
                    self.sets |= {name: None for name, _ in _stores(_together([node]))}
                case ast.Assign(targets=targets, value=value):
                    self._visit(value, *targets)
                case ast.AnnAssign(target=ast.Name(id=name), value=None):
                    self.may_set[name] = None
                case ast.AnnAssign(target=target, value=value):
                    self._visit(value, target)
                case ast.AugAssign(target=ast.Name(id=name) as target, value=value):
                    self._note_read(name)
                    self._visit(value, target)
                case ast.With(items=items, body=body) if any("suppress" in ast.unparse(item) for item in items):
                    self._visit(*items)
                    self._branch(body)
                case ast.If(test=test, body=body, orelse=orelse):
                    self._visit(test)
                    self._one_of(body, orelse)
                case ast.While(test=test, body=body, orelse=orelse):
                    self._visit(test)
                    self._branch(body)
                    self._branch(orelse)
                case ast.BoolOp(values=[first, *others]):
                    self._visit(first)
                    self._branch(others)
                case ast.IfExp(test=test, body=value, orelse=other):
                    self._visit(test)
                    self._one_of([value], [other])
                case ast.For(iter=iterated, target=target, body=body, orelse=orelse):
                    self._visit(iterated)
                    self._branch([target, *body])
                    self._branch(orelse)
                case ast.Try() | ast.TryStar():
                    self._branch(handler.type for handler in node.handlers if handler.type)
                    self._one_of([*node.body, *node.orelse], *(handler.body for handler in node.handlers))
                    self._branch(node.finalbody)
                case ast.Match(subject=subject, cases=cases):
                    self._visit(subject)
                    for case in cases:
                        self._branch([case])
                case ast.Lambda(args=arguments, body=value):
                    self._visit(*arguments.defaults, *arguments.kw_defaults)
                    self._branch([*_arguments(node), value], own=True)
                case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                    *made, clauses = [getattr(node, name) for name in node._fields]
                    parts = [part for clause in clauses for part in (clause.iter, clause.target, *clause.ifs)]
                    self._branch([*parts, *made], own=True)
                case ast.AST():
                    self._visit(*ast.iter_child_nodes(node))

    def _note_read(self, name: str) -> None:
        if name not in self.sets:
            self.read[name] = None
            self.surely_read |= {} if self._depth else {name: None}

    def _one_of(self, *blocks: Sequence[ast.AST]) -> None:
        """Visit statements of which one list runs: what each sets is set, but for those that lead elsewhere."""
        found = [(block, self._branch(block)) for block in blocks]
        common = [names for block, names in found if not block or not isinstance(block[-1], _LEAVES)]
        self.sets |= dict.fromkeys(sorted(set[str].intersection(*common)) if common else ())

    def _branch(self, nodes: Iterable[ast.AST], *, own: bool = False) -> set[str]:
        """Visit what may not run, and return what it sets; `own`: that are variables of its own."""
        before, self._depth = dict(self.sets), self._depth + 1
        self._visit(*nodes)
        found = self.sets.keys() - before.keys()
        if not own:
            self.may_set |= {name: None for name in self.sets if name in found}
        self.sets, self._depth = before, self._depth - 1
        return found
