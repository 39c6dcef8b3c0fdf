"""Find what of a training depends on its batch size, or on how many batches and calls it has, besides its data.

autotune replaces the batch size where the script gives it to `batch` or `fit`. A loss that is divided by the script's
own number, or noise of that many rows, would keep it. Such knobs are held at the script's own value, or the dependence
is named.
"""

from __future__ import annotations

import ast
import dis
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.data.facts import Site
from autotune.runtime.sources import is_installed, parse_source
from autotune.script.call_sites import calls_in, line_of, line_of_code, name_of, names_called, with_line
from autotune.script.changing_state import code_of
from autotune.script.dataset_trace import batch_calls, is_endless
from autotune.script.loop_ends import LOGGING, StepLoop
from autotune.script.sandbox import listed_callbacks
from autotune.script.settings import CALLS

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_STEP_METHODS = {"call", "compute_loss", "train_step"}
"""Methods of models, layers and losses that Keras calls in a step."""
_BATCH_SIZE = re.compile(r"_*(global_|train_)?batch_?size(_per_replica)?_*", re.IGNORECASE)
_FIXED_BATCH = {"batch_shape": (), "batch_input_shape": (), "batch_size": ("Input", "InputLayer")}
"""Arguments that give a model's input a batch size of its own, and the calls that take them; any without names."""
_ON_BATCH = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_KERAS_MODELS = re.compile(r"keras\.src\.(engine|trainers|backend|models)\b")  # reset `stop_training` in each `fit`
_SAVING = ("BackupAndRestore", "ModelCheckpoint", "OrbaxCheckpoint")
_EACH_SO_MANY = {**dict.fromkeys(_SAVING, "save_freq"), "TensorBoard": "update_freq"}
"""Callbacks of Keras's that may act after a number of batches, and the attribute that has it."""


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
    names = set[str]()  # expressions that give the batch size, as source text, without plain numbers
    calls = [call for file in files for call in calls_in(str(file), directory).values()]
    for site, call in ((site, call) for site in given_at for known, call in calls if known.key == site.key):
        by_name = [keyword.value for keyword in call.keywords if keyword.arg == "batch_size"]
        by_place = call.args[:1] if site.call in CALLS else []
        names |= {ast.unparse(value) for value in by_name or by_place if not isinstance(value, ast.Constant)}
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
            opened = [(part, item.context_expr) for part in block if isinstance(part, ast.With) for item in part.items]
            taped = [part for part, context in opened if "GradientTape" in names_called(context)]
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
    found, sizes = set[str](), {"shape", "len", "size", "get_shape"}
    for node in (part for top in nodes for part in ast.walk(top)):
        if isinstance(node, ast.Assign) and (not from_shape or sizes & set(map(name_of, ast.walk(node.value)))):
            targets = (part for target in node.targets for part in ast.walk(target))
            found |= {ast.unparse(part) for part in targets if isinstance(part, ast.Name | ast.Attribute)}
    return found


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


# ------------------------------------------------------------------------------- batches that are counted


def count_of_loop(loop: StepLoop | None, dataset: Any) -> str:
    """Return why a loop over this dataset ends by a number of steps rather than with its data; empty if it does not."""
    if loop is not None and loop.counted:
        return f"{loop.counted} ends the training loop by a number of steps"
    if is_endless(dataset) and not (loop is not None and loop.is_scaled):
        where = "the training loop" if loop is None else f"the loop in {loop.line}"
        return f"{where} reads an endless dataset, so a number of steps ends it"
    return ""


def batch_callbacks(callbacks: Any, directory: str) -> Iterator[tuple[str, bool]]:
    """Yield the callbacks of a `fit` that act on batches: each in words, and whether it is not Keras's own."""
    for callback in _flat(callbacks):
        name, own = type(callback).__name__, _own_hook(callback)
        kinds = (kind.__name__ for kind in type(callback).__mro__)
        argument = next((_EACH_SO_MANY[kind] for kind in kinds if kind in _EACH_SO_MANY), "")
        frequency = getattr(callback, argument, None)
        if own is not None:
            hook, function = own
            code = getattr(function, "__code__", None)
            yield f"{name}.{hook}" + (f" ({line_of_code(code, directory)})" if code is not None else ""), True
        elif isinstance(frequency, int) and not isinstance(frequency, bool):
            yield f"{name}({argument}={frequency})", False


def _flat(callbacks: Any) -> list[Any]:
    """Return callbacks as a list; those in a `CallbackList` as well."""
    return [own for given in listed_callbacks(callbacks) for own in getattr(given, "callbacks", None) or [given]]


def _own_hook(callback: Any) -> tuple[str, Callable[..., Any]] | None:
    """Return the method by which a callback acts on each batch, and its name, if Keras does not define it."""
    for name in _ON_BATCH:
        method = getattr(callback, name, None)
        function = getattr(method, "__func__", method)
        module = str(getattr(function, "__module__", None) or "keras")
        if function is not None and module.partition(".")[0] not in ("keras", "tf_keras"):
            return name, function
    return None


def early_ends(callbacks: Any, model: Any, files: Sequence[Path], directory: str) -> str:
    """Return calls that may end a `fit` before its last epoch, with lines; empty for none. `files`: the script's."""
    found = []
    for ender in (*_flat(callbacks), model):
        known = [vars(kind) for kind in type(ender).__mro__ if kind.__name__ != "TerminateOnNaN"]
        values = [value for names in (getattr(ender, "__dict__", {}), *known) for value in list(names.values())]
        functions = [getattr(value, "__func__", value) for value in values]
        code = next((function.__code__ for function in functions if _stops_training(function)), None)
        if code is None:
            continue
        name = type(ender).__name__
        is_own = not is_installed(code.co_filename)  # otherwise the line that makes it says more
        found.append(f"{name} ({line_of_code(code, directory)})" if is_own else with_line(name, files, directory))
    return ", ".join(dict.fromkeys(found))


def _stops_training(function: Any) -> bool:
    """Return whether a function sets `stop_training`, or names a function of the user's that does."""
    if not isinstance(function, types.FunctionType) or _KERAS_MODELS.search(function.__module__ or ""):
        return False
    codes = [function.__code__, *code_of(function)]
    for code in codes:  # with those of the functions inside
        steps = dis.get_instructions(code)
        stores = any(step.opname == "STORE_ATTR" and step.argval == "stop_training" for step in steps)
        if stores or "stop_training" in code.co_consts:
            return True
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return False


def held_steps(callbacks: Any, directory: str) -> str:
    """Return why `steps_per_execution` is not varied beside these callbacks; empty if it may be."""
    found = [words for words, _ in batch_callbacks(callbacks, directory)]
    if not found:
        return ""
    return f"{', '.join(found)} acts on batches, and more steps per execution would call it less often"


def notes_on_batches(
    dataset: Any,
    loop: StepLoop | None,
    callbacks: Any,
    optimizers: Iterable[Any],
    files: Sequence[Path],
    directory: str,
) -> Iterator[str]:
    """Yield other effects of a larger batch size, in sentences without an end. `files`: the script's."""
    if loop is not None and loop.periodic:
        yield f"{loop.periodic} acts at every so many steps: a larger batch size does so less often per epoch"
    for words, is_own in batch_callbacks(callbacks, directory):
        if is_own:
            yield f"{words} acts on each batch: a larger batch size calls it less often per epoch"
    for optimizer in optimizers:
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
        if getattr(inner, "use_ema", False):
            every = getattr(inner, "ema_overwrite_frequency", None)
            overwrites = f", and overwrites the weights every {every} updates" if every else ""
            yield (
                f"{type(inner).__name__} averages the weights over updates{overwrites}: a larger batch size has fewer "
                "updates per epoch"
            )
    calls = [] if dataset is None or is_endless(dataset) else batch_calls(dataset)[0]
    for site in [call.site for call in calls if call.drop_remainder][:1]:
        yield f"{site} drops the remainder: a larger batch size may leave out more examples of each epoch"
    if summed_loss := find_summed_loss(files, directory):
        yield f"{summed_loss} sums the loss over a batch: a larger batch size makes larger updates"
