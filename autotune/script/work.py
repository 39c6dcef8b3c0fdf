"""Find what of a training depends on how many batches or calls it has, besides its data.

Such knobs are held at the script's own value, or the dependence is named.
"""

from __future__ import annotations

import dis
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.runtime.sources import is_installed
from autotune.script.call_sites import line_of_code, with_line
from autotune.script.changing_state import code_of
from autotune.script.dataset_trace import batch_calls
from autotune.script.loop_ends import StepLoop
from autotune.script.sandbox import listed_callbacks

_ON_BATCH = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_KERAS_MODELS = re.compile(r"keras\.src\.(engine|trainers|backend|models)\b")  # reset `stop_training` in each `fit`
_SAVING = ("BackupAndRestore", "ModelCheckpoint", "OrbaxCheckpoint")
_EACH_SO_MANY = {**dict.fromkeys(_SAVING, "save_freq"), "TensorBoard": "update_freq"}
"""Callbacks of Keras's that may act after a number of batches, and the attribute that has it."""


def count_of_loop(loop: StepLoop | None, dataset: Any) -> str:
    """Return why a loop over this dataset ends by a number of steps rather than with its data; empty if it does not."""
    if loop is not None and loop.counted:
        return f"{loop.counted} ends the training loop by a number of steps"
    if is_endless(dataset) and not (loop is not None and loop.is_scaled):
        where = "the training loop" if loop is None else f"the loop in {loop.line}"
        return f"{where} reads an endless dataset, so a number of steps ends it"
    return ""


def is_batched(data: Any) -> bool:
    """Return whether a value is a finite dataset that the script's own `batch` batches."""
    import tensorflow as tf

    return isinstance(data, tf.data.Dataset) and not is_endless(data) and bool(batch_calls(data)[0])


def is_endless(dataset: Any) -> bool:
    """Return whether a dataset is known to have no end."""
    import tensorflow as tf

    return isinstance(dataset, tf.data.Dataset) and int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY


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
    dataset: Any, loop: StepLoop | None, callbacks: Any, optimizers: Iterable[Any], summed_loss: str, directory: str
) -> Iterator[str]:
    """Yield other effects of a larger batch size, in sentences without an end.

    `summed_loss`: where a loss is the sum over a batch.
    """
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
    if summed_loss:
        yield f"{summed_loss} sums the loss over a batch: a larger batch size makes larger updates"
