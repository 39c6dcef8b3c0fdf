"""Find the numbers in a script's source that are its learning rate. No TensorFlow."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from autotune.data.facts import Site
from autotune.runtime.sources import parse_source
from autotune.script.call_sites import calls_in, shown

_OPTIMIZERS = {  # of Keras
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "Ftrl"),
    *("Lamb", "Lion", "Muon", "Nadam", "RMSprop", "SGD"),
}
_WRAPPER = "LossScaleOptimizer"
_SCHEDULES = {  # the arguments that are rates, with their positions; a factor must scale all of them
    "CosineDecay": {"initial_learning_rate": 0, "warmup_target": 4},
    "CosineDecayRestarts": {"initial_learning_rate": 0},
    "ExponentialDecay": {"initial_learning_rate": 0},
    "InverseTimeDecay": {"initial_learning_rate": 0},
    "PolynomialDecay": {"initial_learning_rate": 0, "end_learning_rate": 2},
}
_NONE_BY_DEFAULT = "warmup_target"
_RATES = ("learning_rate", "lr")
_LONGEST_CHAIN = 5  # of names that stand for one another


class RateNumber(NamedTuple):
    """A number in a script's source that is a learning rate."""

    file: Path
    node: ast.Constant
    value: float


class RateLiterals(NamedTuple):
    """The numbers that are the learning rate; or where the rate comes from, in words."""

    numbers: tuple[RateNumber, ...] = ()
    elsewhere: str = ""  # such as `at compile() in train.py, line 8, where optimizer="adam" has Keras's own rate`


class _Unclear(Exception):
    """No number is surely the learning rate; the message says where the rate comes from."""


def find_rate_literals(files: Sequence[Path], compile_site: Site | None, directory: str) -> RateLiterals:
    """Return the numbers that are the learning rate of the tuned training, where they can be found surely.

    Args:
        files: The script's own.
        compile_site: Where the tuned model is compiled; None for a custom training loop.
        directory: The script's.
    """
    try:
        for file in files:
            _refuse_later_changes(file, directory)
        file, made = _find_optimizer(files, compile_site, directory)
        return RateLiterals(tuple(_rates_of(file, made, directory)))
    except _Unclear as unclear:
        return RateLiterals(elsewhere=str(unclear))


def _refuse_later_changes(file: Path, directory: str) -> None:
    """Refuse a script that sets the rate while it runs: what its optimizer begins with is not all then."""
    for site, call in calls_in(str(file), directory).values():
        changed: ast.expr | None = None
        if site.call == "assign" and isinstance(call.func, ast.Attribute):
            changed = call.func.value
        elif site.call == "set_value" and call.args:
            changed = call.args[0]
        if site.call == "LearningRateScheduler" or _is_rate(changed):
            raise _Unclear(f"at {site}, which sets it while the script runs")
    for node in ast.walk(parse_source(file)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_rate(node):
            place = f"{shown(str(file), directory)}, line {node.lineno}"
            raise _Unclear(f"in {place}, which sets it while the script runs")


def _is_rate(node: ast.expr | None) -> bool:
    """Return whether an expression is the learning rate of an optimizer, and not of a class of the script's own."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return isinstance(node, ast.Attribute) and node.attr in _RATES and not is_own


def _find_optimizer(files: Sequence[Path], compile_site: Site | None, directory: str) -> tuple[Path, ast.Call]:
    """Return the call that makes the tuned training's optimizer, and its file."""
    calls = [(file, site, call) for file in files for site, call in calls_in(str(file), directory).values()]
    makers = [(file, call) for file, site, call in calls if _makes_optimizer(file, site, call)]
    if compile_site is None:
        if len(makers) == 1:
            return makers[0]
        raise _Unclear("where the script makes its optimizer")
    compiled = next(((file, site, call) for file, site, call in calls if site.key == compile_site.key), None)
    if compiled is None:
        raise _Unclear(f"at {compile_site}")
    file, site, call = compiled
    given = _argument(call, "optimizer", 0, site)
    if given is None:
        raise _Unclear(f"at {site}, where the optimizer and its rate are Keras's own")
    value = _follow(file, given)[0]
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        raise _Unclear(f'at {site}, where optimizer="{value.value}" has Keras\'s own rate')
    if isinstance(value, ast.Call) and _site(file, value, directory).call == _WRAPPER:
        inner = _argument(value, "inner_optimizer", 0, site)
        value = value if inner is None else _follow(file, inner)[0]
    if isinstance(value, ast.Call):
        maker = _site(file, value, directory)
        if _makes_optimizer(file, maker, value):
            return file, value
        if len(makers) == 1 and maker.call in {name for own in files for name in _functions(own)}:
            return makers[0]
    raise _Unclear(f"at {site}")


def _makes_optimizer(file: Path, site: Site, call: ast.Call) -> bool:
    """Return whether a call makes an optimizer of Keras."""
    if isinstance(call.func, ast.Attribute):
        return site.call in _OPTIMIZERS
    imports = [node for node in ast.walk(parse_source(file)) if isinstance(node, ast.ImportFrom)]
    return any(
        (alias.asname or alias.name) == site.call and alias.name in _OPTIMIZERS
        for node in imports
        if "optimizers" in (node.module or "").split(".")
        for alias in node.names
    )


def _functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(parse_source(file)) if isinstance(node, ast.FunctionDef)}


def _rates_of(file: Path, made: ast.Call, directory: str) -> list[RateNumber]:
    """Return the numbers that are the rate of an optimizer, or of the schedule that it is given."""
    site = _site(file, made, directory)
    given = [_argument(made, name, place, site) for name, place in zip(_RATES, (0, len(made.args)), strict=True)]
    rate = next((value for value in given if value is not None), None)
    if rate is None:
        raise _Unclear(f"at {site}, which has Keras's own rate")
    value = _follow(file, rate)[0]
    if not isinstance(value, ast.Call):
        return [_number(file, rate, site)]
    schedule = _site(file, value, directory)
    if schedule.call not in _SCHEDULES:
        raise _Unclear(f"at {schedule}")
    numbers = []
    for name, place in _SCHEDULES[schedule.call].items():
        argument = _argument(value, name, place, schedule)
        if argument is not None or name != _NONE_BY_DEFAULT:
            numbers.append(_number(file, argument, schedule))
    return numbers


def _number(file: Path, node: ast.expr | None, site: Site) -> RateNumber:
    """Return the number that an argument is, by itself or by a name that is used only there."""
    if node is not None:
        value, is_shared = _follow(file, node)
        number = value.value if isinstance(value, ast.Constant) and not is_shared else None
        if isinstance(value, ast.Constant) and isinstance(number, int | float) and not isinstance(number, bool):
            return RateNumber(file, value, number)
    raise _Unclear(f"at {site}")


def _argument(call: ast.Call, name: str, place: int, site: Site) -> ast.expr | None:
    """Return an argument of a call by its keyword or position; None where the call has none."""
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if named is not None:
        return named
    is_starred = any(isinstance(argument, ast.Starred) for argument in call.args[: place + 1])
    if is_starred or (place >= len(call.args) and any(keyword.arg is None for keyword in call.keywords)):
        raise _Unclear(f"at {site}")
    return call.args[place] if place < len(call.args) else None


def _follow(file: Path, node: ast.expr) -> tuple[ast.expr, bool]:
    """Return the value of a name that is bound once in its file, and whether the name is read more than once."""
    tree, is_shared = parse_source(file), False
    for _ in range(_LONGEST_CHAIN):
        if not isinstance(node, ast.Name | ast.Attribute):
            break
        values, reads = _uses(tree, ast.unparse(node))
        if len(values) != 1 or values[0] is None:
            break
        is_shared = is_shared or reads > 1
        node = values[0]
    return node, is_shared


def _uses(tree: ast.Module, name: str) -> tuple[list[ast.expr | None], int]:
    """Return what a dotted name is bound to, None where that is no expression, and how often it is read."""
    assigned: dict[int, ast.expr | None] = {}
    values: list[ast.expr | None] = []
    reads = 0
    for node in ast.walk(tree):  # an assignment comes before its targets
        if isinstance(node, ast.Assign):
            assigned |= {id(target): node.value for target in node.targets}
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            assigned[id(node.target)] = node.value
        elif isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) == name:
            if isinstance(node.ctx, ast.Load):
                reads += 1
            else:
                values.append(assigned.get(id(node)))
        elif (isinstance(node, ast.arg) and node.arg == name) or (
            isinstance(node, ast.alias) and (node.asname or node.name) == name
        ):
            values.append(None)
    return values, reads


def _site(file: Path, call: ast.Call, directory: str) -> Site:
    return calls_in(str(file), directory)[call.end_lineno or 0, call.end_col_offset or 0][0]
