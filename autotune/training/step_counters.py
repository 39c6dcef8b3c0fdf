"""Find what depends on the number of steps in a training: a loss that it weighs learns otherwise in larger batches.

Such as the weight of a loss that is annealed. Four times fewer steps of a larger batch anneal it less, so losses of an
equal number of examples do not compare. A variable counts steps if the user's code reads it while the training step is
traced, and it changes alike from step to step at two batch sizes.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from traceback import FrameSummary
from typing import Any

import numpy as np

from autotune.recipe.keras_api import KERAS_PACKAGES
from autotune.recipe.tf_private import keras, say_missing, tf
from autotune.runtime.failures import select_user_frames
from autotune.runtime.sources import describe_line

COUNTED_STEPS = 4
LARGEST_VALUE = 16  # elements of a variable that may count
_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_WRITES = {"assign", "assign_add", "assign_sub", "set_value", "set_weights"}
_WEIGHTS = {"set_weights", "weights", "variables", "trainable_variables", "trainable_weights"}
Counted = dict[str, tuple[float, ...]]  # by the variable's name and line: by how much each element changes at each step


class ReadVariables:
    """The variables that the user's code reads in a training step, by the name and the line of each."""

    def __init__(self, model: keras.Model) -> None:
        self._read: dict[int, tuple[Any, ...]] = {}  # by the id of its handle: that, its type, and the line
        of_metrics = (variable for metric in model.metrics for variable in metric.variables)
        others = (*model.trainable_variables, *of_metrics)
        self._others = {id(handle) for variable in others for handle in handles_of(variable)}
        paths = ((str(getattr(of, "path", of.name)), handle) for of in model.variables for handle in handles_of(of))
        self._names = {id(handle): path.partition(":")[0] for path, handle in paths}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Collect them from functions traced meanwhile."""
        try:
            from tensorflow.python.ops import gen_resource_variable_ops as ops
            from tensorflow.python.util.tf_stack import extract_stack

            usual, outer = ops.read_variable_op, len(extract_stack()) - 2  # frames around the step
        except (ImportError, AttributeError):
            say_missing("read_variable_op", "variables that count steps are not found")
            yield
            return

        traced: list[tuple[Any, ...]] = []

        def read(handle: Any, dtype: Any, *rest: Any, **named: Any) -> Any:
            value = usual(handle, dtype, *rest, **named)
            if id(handle) not in self._others and (line := _reader(extract_stack()[outer:])):
                traced.append((value, handle, dtype, line))
            return value

        ops.read_variable_op = read
        try:
            yield
        finally:
            ops.read_variable_op = usual
        for value, *known in traced:
            if id(known[0]) not in self._read and _is_used(value):
                self._read[id(known[0])] = tuple(known)

    def includes(self, variables: Sequence[Any]) -> bool:
        """Return whether the user's own part of a step reads one of these, or any where there are none."""
        handles = self._read if not variables else [id(of) for variable in variables for of in handles_of(variable)]
        return any(handle in self._read for handle in handles)

    def values(self) -> dict[str, list[float]]:
        """Return the elements of each small one now."""
        found = {}
        for known, (handle, dtype, line) in self._read.items():
            if not (dtype.is_floating or dtype.is_integer) or not hasattr(handle, "numpy"):
                continue  # of another graph, such as that of a dataset
            value = np.asarray(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype), np.float64)
            if value.size <= LARGEST_VALUE:
                found[f"{self._names.get(known, 'a variable')} ({line})"] = [float(element) for element in value.flat]
        return found


def handles_of(variable: Any) -> list[Any]:
    """Return the handles of a variable of Keras or TensorFlow, one for each device."""
    value = getattr(variable, "_value", variable)
    return [part.handle for part in getattr(value, "values", None) or [value]]


def _is_used(value: Any) -> bool:
    """Return whether a value that was read goes anywhere but into its variable's next one, as a mere counter does."""
    if hasattr(value, "numpy"):  # it was computed, and not traced
        return True
    own, waiting, seen = value.op.inputs[0], [value], {id(value)}
    for tensor in waiting:  # which grows by what follows from it
        if any(tensor is output for output in getattr(tensor.graph, "outputs", ())):
            return True
        for operation in tensor.consumers():
            if operation.type == "AssignVariableOp" and operation.inputs[0] is own:
                continue
            if operation.op_def.is_stateful:
                return True
            waiting += [output for output in operation.outputs if id(output) not in seen]
            seen.update(map(id, operation.outputs))
    return False


def _reader(stack: Sequence[Any]) -> str:
    """Return the user's line that reads a variable; empty where Keras or a metric reads it for itself."""
    # Keras's optimizers read `iterations`, and a schedule or a metric of the user's does so for Keras.
    inner = [f"{os.sep}{package}{os.sep}src{os.sep}" for package in KERAS_PACKAGES]
    own = [frame for frame in stack if any(part in frame.filename for part in inner)]
    for_themselves = tuple(f"{os.sep}{part}{os.sep}" for part in ("optimizers", "metrics"))
    if any(part in frame.filename for frame in own for part in for_themselves):
        return ""
    users = select_user_frames(stack)
    if any(frame.name in ("update_state", "result") for frame in users):  # of the user's own metric
        return ""
    last = users[-1] if users else None
    between = stack[[*stack].index(last) + 1 :] if last is not None else stack
    passes_on = (f"{os.sep}backend{os.sep}", f"{os.sep}ops{os.sep}")
    if last is None or any(frame in own and not any(part in frame.filename for part in passes_on) for frame in between):
        return ""
    return os.path.basename(describe_line(last.filename, last.lineno))


def changing(values: Sequence[Mapping[str, Sequence[float]]]) -> Counted:
    """Return by how much each variable changed from step to step, of those that changed at every step."""
    found = {}
    for name in values[-1]:
        states = [step[name] for step in values if name in step]
        changes = [tuple(np.subtract(after, before).tolist()) for before, after in itertools.pairwise(states)]
        if len(states) == len(values) and all(map(any, changes)):
            found[name] = tuple(change for step in changes for change in step)
    return found


def writing_hooks(callbacks: Sequence[Any], is_read: Callable[[Sequence[Any]], bool]) -> list[str]:
    """Return the user's batch hooks that write variables, such as a copy of weights each 500 steps; no learning rates.

    The few steps that are counted may be too few to see such a write. A variable that the user's own part of a step
    does not read, as `is_read` says, counts nothing unless it is a weight.
    """
    found = []
    for callback, name in itertools.product(callbacks, _BATCH_HOOKS):
        method: Any = getattr(callback, name, None)
        hook = getattr(method, "__code__", None)
        if hook is None or not select_user_frames([FrameSummary(hook.co_filename, hook.co_firstlineno, name)]):
            continue
        called = [inspect.getattr_static(type(callback), name, None) for name in hook.co_names]
        names = {name for part in (hook, *called) for name in getattr(getattr(part, "__code__", part), "co_names", ())}
        owners = (getattr(owner, "__dict__", {}) for owner in (callback, getattr(callback, "model", None)))
        known = [scope[own] for scope in (method.__globals__, *owners) for own in names & scope.keys()]
        variables = [value for value in known if isinstance(getattr(value, "_value", value), tf.Variable)]
        counts = names & _WEIGHTS or is_read(variables)
        if names & _WRITES and counts and not names & {"lr", "learning_rate"}:
            line = os.path.basename(describe_line(hook.co_filename, hook.co_firstlineno))
            found.append(f"{hook.co_qualname} ({line})")
    return found
