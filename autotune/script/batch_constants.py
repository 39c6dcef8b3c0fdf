"""Find where the code of a training step uses the batch size as a constant, by its source. No TensorFlow.

autotune replaces the batch size where the script gives it to `batch` or `fit`. A loss that is divided by the script's
own number, or noise of that many rows, would keep it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from autotune.data.facts import Site
from autotune.runtime.sources import parse_source
from autotune.script.call_sites import calls_in, line_of, name_of, names_called
from autotune.script.loop_ends import LOGGING
from autotune.script.settings import CALLS

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_STEP_METHODS = {"call", "compute_loss", "train_step"}
"""Methods of models, layers and losses that Keras calls in a step."""
_BATCH_SIZE = re.compile(r"_*(global_|train_)?batch_?size(_per_replica)?_*", re.IGNORECASE)
_FIXED_BATCH = {"batch_shape": (), "batch_input_shape": (), "batch_size": ("Input", "InputLayer")}
"""Arguments that give a model's input a batch size of its own, and the calls that take them; any without names."""


def find_batch_constant(
    files: Sequence[Path], given_at: Sequence[Site], size: int, directory: str, losses: Collection[str] = ()
) -> str:
    """Return a use of the batch size as a constant in a training step, with its place; empty without one.

    `losses` names functions that compute the loss.
    """
    trees = {file: parse_source(file) for file in files}
    for file, tree in trees.items():
        fixed = next((node for node in ast.walk(tree) if isinstance(node, ast.Call) and _fixes_batch(node)), None)
        if fixed is not None:
            return f"{line_of(file, fixed, directory)} builds the model for one batch size"
    names = _given_names(files, given_at, directory)
    for file, region, computed in _step_code(trees, losses):
        for node in _uses(region, names, size, computed):
            return f"{line_of(file, node, directory)} computes with the batch size in a step of training"
    return ""


def find_summed_loss(files: Sequence[Path], directory: str) -> str:
    """Return where a loss is the sum over a batch; empty without one."""
    for file in files:
        for node in ast.walk(parse_source(file)):
            if isinstance(node, ast.keyword) and node.arg == "reduction":
                value = node.value.value if isinstance(node.value, ast.Constant) else name_of(node.value)
                if str(value).lower() == "sum":
                    return line_of(file, node.value, directory)
    return ""


def _fixes_batch(call: ast.Call) -> bool:
    """Return whether a call builds a layer for batches of one size."""
    for keyword in call.keywords:
        if keyword.arg == "stateful" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True:
            return True
        callers = _FIXED_BATCH.get(keyword.arg or "")
        if callers is not None and (not callers or name_of(call.func) in callers):
            shape = keyword.value
            first = shape.elts[0] if isinstance(shape, ast.Tuple | ast.List) and shape.elts else shape
            return not (isinstance(first, ast.Constant) and first.value is None)
    return False


def _given_names(files: Sequence[Path], given_at: Sequence[Site], directory: str) -> set[str]:
    """Return the expressions that give the batch size at these calls, as source text, without plain numbers."""
    found = set()
    calls = [call for file in files for call in calls_in(str(file), directory).values()]
    for site in given_at:
        for call in (call for known, call in calls if known.key == site.key):
            by_name = [keyword.value for keyword in call.keywords if keyword.arg == "batch_size"]
            by_place = call.args[:1] if site.call in CALLS else []
            found |= {ast.unparse(value) for value in by_name or by_place if not isinstance(value, ast.Constant)}
    return found


# ------------------------------------------------------------------------------------------- the code of a step


def _step_code(
    trees: dict[Path, ast.Module], losses: Collection[str]
) -> Iterator[tuple[Path, list[ast.stmt], set[str]]]:
    """Yield the statements of a training step: around a `GradientTape`, and in the functions that it calls.

    Each comes with its file, and the names whose value its function takes from the batch.
    """
    nodes = [(file, node) for file, tree in trees.items() for node in ast.walk(tree)]
    functions = [(file, node) for file, node in nodes if isinstance(node, _FUNCTIONS)]
    wanted = _STEP_METHODS | set(losses)
    for file, tree in trees.items():
        for block, scope in _blocks(tree, tree):
            taped = [statement for statement in block if isinstance(statement, ast.With) and _opens_tape(statement)]
            if taped:
                region: list[ast.stmt] = [
                    part for part in block if isinstance(part, ast.Assign | ast.Return | ast.With)
                ]
                yield file, region, _assigned(region) | _assigned([scope], from_shape=True)
                wanted = wanted.union(*map(names_called, taped))
    seen: set[str] = set()
    while wanted - seen:
        name = min(wanted - seen)
        seen.add(name)
        for file, function in functions:
            if function.name == name:  # what it is given stands where it is called
                yield file, function.body, _assigned(function.body) | {part.arg for part in function.args.args}
                wanted = wanted.union(*map(names_called, function.body))


def find_counted_calls(files: Sequence[Path], model: object, directory: str) -> str:
    """Return where a model's `train_step` adds up its calls in a number that its class reads; empty if it does not."""
    names = {kind.__name__ for kind in type(model).__mro__}
    for file, tree in ((file, parse_source(file)) for file in files):
        for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in names):
            loaded = (node for node in _walk_computing(owner) if isinstance(getattr(node, "ctx", None), ast.Load))
            read = {ast.unparse(node) for node in loaded}
            steps = [node for node in owner.body if isinstance(node, _FUNCTIONS) and node.name == "train_step"]
            for count in (node for step in steps for node in ast.walk(step) if isinstance(node, ast.AugAssign)):
                if isinstance(count.value, ast.Constant) and ast.unparse(count.target) in read:
                    return line_of(file, count, directory)
    return ""


def _blocks(node: ast.AST, scope: ast.AST) -> Iterator[tuple[list[ast.stmt], ast.AST]]:
    """Yield all lists of statements below a node, each with the function that it stands in."""
    scope = node if isinstance(node, _FUNCTIONS) else scope
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if isinstance(block, list):
            yield block, scope
    for child in ast.iter_child_nodes(node):
        yield from _blocks(child, scope)


def _assigned(nodes: Sequence[ast.AST], *, from_shape: bool = False) -> set[str]:
    """Return the names assigned below these nodes, as source text; with `from_shape` only sizes of tensors."""
    found = set()
    for node in (part for top in nodes for part in ast.walk(top)):
        if isinstance(node, ast.Assign) and (not from_shape or _reads_shape(node.value)):
            targets = (part for target in node.targets for part in ast.walk(target))
            found |= {ast.unparse(part) for part in targets if isinstance(part, ast.Name | ast.Attribute)}
    return found


def _reads_shape(value: ast.expr) -> bool:
    return any(name_of(part) in ("shape", "len", "size", "get_shape") for part in ast.walk(value))


def _opens_tape(statement: ast.With) -> bool:
    return any("GradientTape" in names_called(item.context_expr) for item in statement.items)


# ------------------------------------------------------------------------------------------------- what uses it


def _uses(region: Sequence[ast.stmt], names: set[str], size: int, computed: set[str]) -> Iterator[ast.expr]:
    """Yield the expressions in a region that are the batch size as a constant, and not computed from the batch."""
    for statement in region:
        for node in _walk_computing(statement):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _is_number(node.right, size):
                yield node.right
            elif isinstance(node, ast.keyword) and node.arg == "global_batch_size" and _is_number(node.value, size):
                yield node.value
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                text = ast.unparse(node)
                is_batch_size = text in names or _BATCH_SIZE.fullmatch(name_of(node)) is not None
                if is_batch_size and text not in computed:
                    yield node


def _walk_computing(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it, without arguments of printing and logging."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and name_of(node.func) in LOGGING):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk_computing(child)


def _is_number(node: ast.expr, size: int) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, bool) and node.value == size
