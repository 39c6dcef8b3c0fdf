"""Find what ends a training loop of the script's own: its data, or a count of steps. No TensorFlow.

The frames that run when a step ends show which loop drives the steps; the source shows what ends that loop.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from autotune.runtime.sources import parse_source
from autotune.script.call_sites import line_of, name_of, names_called, site_of

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_LOOPS = ast.For | ast.While | _COMPREHENSIONS
_COUNTERS_OF_OTHERS = {"iterations", "global_step"}
"""Attributes that count steps: of Keras's optimizers, and by custom of checkpoints and trainers."""
_CONVERSIONS = {"int", "float", "numpy", "cast", "value", "read_value"}
"""Functions that turn a counter into another number of the same value."""
_OF_UPDATES = {"apply", "apply_gradients", "zip", "zeros_like", "assign"}
"""Calls that end an update, where a loop accumulates gradients over several steps."""
_WRITING = ("print", "format", "debug", "info", "warning", "log", "write", "flush", "scalar")
_SHOWING = ("set_description", "set_postfix", "update", "result", "reset_state", "reset_states")
LOGGING = {*_WRITING, *_SHOWING, "append", "mean", "round", "len", "str", "time"}
"""Calls that only tell how a training goes."""
_NEXT = ("next", "__next__")
_END_OF_DATA = {"StopIteration", "OutOfRangeError"}


@dataclass(frozen=True)
class StepLoop:
    """The loop that drives the steps of a training."""

    line: str  # where it stands: `train.py, line 12`
    counted: str = ""  # where a count of steps ends it; empty if its data does
    is_scaled: bool = False  # a count of steps ends it, which the script takes from the number of batches in its data
    periodic: str = ""  # where it does more than logging at every so many steps; empty if nowhere


def find_step_loop(
    frames: Sequence[FrameType], directory: str, is_batched: Callable[[Any], bool] = lambda data: False
) -> StepLoop | None:
    """Return the loop over steps that these frames run; None where none is found.

    Frames come innermost first. `is_batched` tells a dataset whose number of batches follows the batch size.
    """
    found: StepLoop | None = None
    counters: set[str] = set()
    is_open, below_yields = True, False  # a further loop may drive the steps; the frame below is a generator
    for frame in frames:
        place = functools.partial(line_of, frame.f_code.co_filename, directory=directory)
        loops, by_for = _loops_around(frame), dis.opname[frame.f_code.co_code[frame.f_lasti]] == "FOR_ITER"
        if is_open and below_yields and not by_for and site_of(frame, directory).call not in _NEXT:
            is_open = False  # a call such as `sum` reads the generator to its end
        below_yields = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
        found_ends: list[ast.AST | None] = []
        if is_open and loops:
            steps, *loops = loops
            counters |= _counters_in(steps)
            found_ends.append(_find_count(steps, counters, read_by_for=by_for))
            found = found or StepLoop(place(steps))
            found = replace(found, periodic=found.periodic or place(_find_periodic(steps, counters)))
            is_open = below_yields
        for loop in loops:  # around the loop over steps
            test = loop.test if isinstance(loop, ast.While) and _mentions(loop.test, counters) else None
            found_ends.append(test or _find_exit(loop, counters, conditional=True))
        for end in filter(None, found_ends):
            assert found is not None
            if _is_scaled(end, counters, frame, is_batched):
                found = replace(found, is_scaled=True)
            else:
                found = replace(found, counted=found.counted or place(end))
    return found


def _loops_around(frame: FrameType) -> list[ast.stmt | ast.expr]:
    """Return the loops of a frame's own function around the line that it runs, the innermost first."""
    scope: ast.AST = parse_source(Path(frame.f_code.co_filename))
    for node in ast.walk(scope):  # breadth first: the innermost function comes last
        if isinstance(node, _FUNCTIONS) and node.body[0].lineno <= frame.f_lineno <= (node.end_lineno or 0):
            scope = node
    around: list[ast.stmt | ast.expr] = [
        node
        for node in walk_own(scope)
        if isinstance(node, _LOOPS) and node.lineno <= frame.f_lineno <= (node.end_lineno or 0)
    ]
    return sorted(around, key=lambda loop: (-loop.lineno, -loop.col_offset))


def walk_own(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below one, without those of functions that are defined there."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, _FUNCTIONS | ast.Lambda | ast.ClassDef):
            yield from walk_own(child)


# ------------------------------------------------------------------------------------------------ what ends it


def _find_count(loop: ast.AST, counters: set[str], *, read_by_for: bool) -> ast.AST | None:
    """Return the node that ends a loop over steps by their count; None if its data ends it.

    `read_by_for`: it is a `for` over the data itself. Otherwise something in it reads the next batch.
    """
    if isinstance(loop, ast.While):
        compares = [node for node in ast.walk(loop.test) if isinstance(node, ast.Compare)]
        counts = any(not isinstance(operator, ast.Is | ast.IsNot) for node in compares for operator in node.ops)
        counts = counts or (bool(names_called(loop.test)) and not _reads_to_the_end(loop))
        return loop.test if counts else _find_exit(loop, counters)
    assert isinstance(loop, ast.For | _COMPREHENSIONS)
    iterated = loop.iter if isinstance(loop, ast.For) else loop.generators[0].iter
    if not read_by_for or not names_called(iterated).isdisjoint({"range", "islice"}):  # `islice(data, n)`
        return loop
    return _find_exit(loop, counters)


def _reads_to_the_end(loop: ast.While) -> bool:
    """Return whether a loop handles the end of what it reads."""
    for node in ast.walk(loop):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            if any(name_of(part) in _END_OF_DATA for part in ast.walk(node.type)):
                return True
        elif isinstance(node, ast.Call) and name_of(node.func) == "next" and len(node.args) == 2:
            return True
    return False


def _find_exit(loop: ast.AST, counters: set[str], *, conditional: bool = False) -> ast.AST | None:
    """Return the test, or the statement, by which a loop ends early after a number of steps; None without one.

    `conditional`: an exit without a condition ends no loop of steps.
    """
    for statement, tests in _exits(getattr(loop, "body", ()), (), nested=False):
        counted = next((test for test in tests if _mentions(test, counters)), None)
        if counted is not None:
            return counted
        if not tests and not conditional:
            return statement
    return None


def _exits(
    body: Sequence[ast.AST], tests: tuple[ast.expr, ...], *, nested: bool
) -> Iterator[tuple[ast.AST, tuple[ast.expr, ...]]]:
    """Yield the statements that leave a loop, with the conditions under which they do.

    A handler's exit is left out: it follows an exception, such as the end of the data.
    """
    if not isinstance(body, list):  # a comprehension's
        return
    for statement in body:
        if isinstance(statement, ast.Return) or (isinstance(statement, ast.Break) and not nested):
            yield statement, tests
        elif isinstance(statement, ast.If):
            yield from _exits(statement.body, (*tests, statement.test), nested=nested)
            yield from _exits(statement.orelse, (*tests, statement.test), nested=nested)
        elif isinstance(statement, ast.For | ast.While):
            again = statement.iter if isinstance(statement, ast.For) else statement.test
            yield from _exits(statement.body, (*tests, again), nested=True)
        elif isinstance(statement, ast.With | ast.Try):
            yield from _exits(statement.body, tests, nested=nested)


def _is_scaled(end: ast.AST, counters: set[str], frame: FrameType, is_batched: Callable[[Any], bool]) -> bool:
    """Return whether the count that ends a loop is taken from the number of batches in a dataset."""
    if isinstance(end, ast.For):
        ranges = [node for node in ast.walk(end.iter) if isinstance(node, ast.Call) and name_of(node.func) == "range"]
        bounds = [call.args[min(1, len(call.args) - 1)] for call in ranges if call.args]
    else:
        compares = [node for node in ast.walk(end) if isinstance(node, ast.Compare)]
        sides = [side for node in compares for side in (node.left, *node.comparators)]
        bounds = [side for side in sides if not _mentions(side, counters)]
    tree = parse_source(Path(frame.f_code.co_filename))
    names = {**frame.f_globals, **frame.f_locals}
    return bool(bounds) and all(
        _counts_batches(bound, tree, lambda name: is_batched(names.get(name))) for bound in bounds
    )


def _counts_batches(value: ast.expr, tree: ast.Module, is_batched: Callable[[str], bool], depth: int = 4) -> bool:
    """Return whether an expression is the number of batches in a dataset, or a product of that."""
    again = functools.partial(_counts_batches, tree=tree, is_batched=is_batched, depth=depth - 1)
    if isinstance(value, ast.Call):
        owner = value.func.value if isinstance(value.func, ast.Attribute) else None
        counted = owner if name_of(value.func) == "cardinality" else value.args[0] if value.args else owner
        if name_of(value.func) in ("len", "cardinality"):
            return isinstance(counted, ast.Name) and is_batched(counted.id)
        return depth > 0 and name_of(value.func) in _CONVERSIONS and counted is not None and again(counted)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        return depth > 0 and (again(value.left) or again(value.right))
    if isinstance(value, ast.Name) and depth > 0:
        targets = (
            (target, node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets
        )
        given = [assigned for target, assigned in targets if name_of(target) == value.id]
        return len(given) == 1 and again(given[0])
    return False


def _find_periodic(loop: ast.AST, counters: set[str]) -> ast.AST | None:
    """Return the test by which a loop does something at every so many steps; None without one, or for a log only."""
    for node in walk_own(loop):
        if not isinstance(node, ast.If):
            continue
        remainders = (
            part for part in ast.walk(node.test) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod)
        )
        if any(_mentions(part.left, counters) for part in remainders):
            calls = set[str]().union(*map(names_called, node.body))
            if calls - LOGGING - _CONVERSIONS - _OF_UPDATES:
                return node.test
    return None


# -------------------------------------------------------------------------------------------- what counts steps


def _counters_in(loop: ast.AST) -> set[str]:
    """Return the expressions that count the passes of a loop, as source text."""
    found: set[str] = set()
    if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call):
        is_numbered = name_of(loop.iter.func) == "enumerate" and isinstance(loop.target, ast.Tuple)
        found |= {ast.unparse(loop.target.elts[0])} if is_numbered and isinstance(loop.target, ast.Tuple) else set()
        found |= {ast.unparse(loop.target)} if name_of(loop.iter.func) == "range" else set()
    for node in walk_own(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and _is_whole(node.value):
            found.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and _is_whole(node.value.right):
            target = ast.unparse(node.targets[0])
            found |= {target} if ast.unparse(node.value.left) == target else set()
        elif isinstance(node, ast.Call) and name_of(node.func) == "assign_add":
            found |= {ast.unparse(node.func.value)} if isinstance(node.func, ast.Attribute) else set()
    for node in walk_own(loop):  # `step = int(optimizer.iterations)`
        if isinstance(node, ast.Assign) and _mentions(node.value, found) and names_called(node.value) <= _CONVERSIONS:
            found |= {ast.unparse(target) for target in node.targets}
    return found


def _is_whole(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, int)


def _mentions(node: ast.AST, counters: set[str]) -> bool:
    """Return whether an expression contains a counter of steps."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in _COUNTERS_OF_OTHERS:
            return True
        if isinstance(part, ast.Name | ast.Attribute | ast.Subscript) and ast.unparse(part) in counters:
            return True
    return False
