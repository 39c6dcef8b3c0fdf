"""Compile the eager steps of a script by `tf.function`, and prove in trials that they train as before.

A decorator is put into the syntax tree, so that methods, closures and nested functions need nothing of their own.
"""

from __future__ import annotations

import ast
import builtins
import functools
import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotune.data.facts import Site
from autotune.data.record import Outcome
from autotune.recipe.tf_private import draws_constants, keras, operations_in, patched_random_ops, tf
from autotune.runtime import failures
from autotune.runtime.executor import TrialFailed
from autotune.script.call_sites import functions_in, line_of_code, place_of, uses_shapes
from autotune.script.execute import edit_trees
from autotune.script.inline_steps import is_moved, move_inline_steps
from autotune.script.settings import Settings

_DECORATOR = "__autotune_graph_step__"
PROVEN_STEPS = 2  # with the arguments of each function's first call, and of its last one
MOST_TRACES = 2  # of all functions, after their first calls
CHANGE_SHARE = 1e-5
"""Largest difference between both sides, as a share of what a step changes: some hundred roundings to float32."""
AMPLIFIED = 10.0  # times the difference that rounded weights make: Adam divides gradients that are all rounding
_ROUNDING = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


class StepCompiler:
    """Compiles the functions at some sites, in a script that has not begun.

    With `obey`, the first call of each is proven: `obey` acts, and ends the trial where that fails.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        settings: Settings,
        directory: str,
        obey: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._sites, self._settings, self._directory, self._obey = sites, settings, directory, obey
        self._last: dict[Any, tuple[_ProvenStep, Any, Any]] = {}  # the last call of each compiled function
        self._called: set[tuple[str, str]] = set()  # files and qualified names, also of what others call
        self._traces = 0  # in the first calls
        self._is_proving = False
        self._fixed: set[str] = set()  # files whose functions need the sizes of shapes
        self._moved: set[str] = set()  # names of functions that are made of steps in their loops
        setattr(builtins, _DECORATOR, self._compile)
        edit_trees(self._decorate, {Path(directory, site.file).resolve() for site in sites})

    def _decorate(self, tree: ast.Module, file: str) -> None:
        wanted = {site.key for site in self._sites}
        if uses_shapes(tree):
            self._fixed.add(os.path.realpath(file))
        move_inline_steps(tree)
        for site, node in functions_in(tree, file, self._directory):
            if site.key in wanted:
                self._moved |= {node.name} if is_moved(node) else set()
                node.decorator_list.append(ast.copy_location(ast.Name(_DECORATOR, ast.Load()), node))

    def _compile(self, function: Any) -> Any:
        jit_compile = self._settings.changes.get("jit_compile")
        self._settings.reached |= {site.key for site in self._sites if site.call == function.__name__}
        relaxed = os.path.realpath(function.__code__.co_filename) not in self._fixed
        compiled = tf.function(
            function,
            reduce_retracing=relaxed,
            jit_compile=jit_compile or None,
            autograph=function.__name__ not in self._moved,  # which reads a source that these have not
        )
        return compiled if self._obey is None else _ProvenStep(function, compiled, self.call)

    def call(self, step: _ProvenStep, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a compiled function; prove its first call."""
        assert self._obey is not None
        if self._is_proving:  # within the function that is proven
            return step.plain(*arguments, **named)
        code = step.plain.__code__
        file = place_of(code.co_filename, code.co_firstlineno, self._directory)["file"]
        self._called.add((file, code.co_qualname))
        if tf.inside_function():  # it is part of the function that is traced, and proven with that
            return step.compiled(*arguments, **named)
        is_first = step.compiled not in self._last
        try:
            result = step.compiled(*arguments, **named)
        except Exception as error:
            if not is_first or failures.is_out_of_memory(error):
                raise
            why = f"cannot be compiled: {failures.summarize_error(error)}"
            self._obey(functools.partial(self._refuse, step, why, Outcome.ERROR))
        self._last[step.compiled] = step, arguments, named
        if is_first:
            self._obey(functools.partial(self._prove, step, arguments, named))
            self._traces = self._count_traces()
        return result

    def finish(self) -> None:
        """Prove the last call of each function. Raises TrialFailed where it trains otherwise, or is traced often."""
        for last in self._last.values():
            self._prove(*last)
        for site in (site for site in self._sites if (site.file, site.function) not in self._called):
            why = f"graph_step: {site}, was not called in the trial, so that nothing proves it"
            raise TrialFailed(Outcome.UNSTABLE, why)
        if (traces := self._count_traces() - self._traces) > MOST_TRACES:
            why = f"graph_step: {self._sites[0]}, was compiled {traces} times more, as its arguments change"
            raise TrialFailed(Outcome.UNSTABLE, why)

    def _count_traces(self) -> int:
        return sum(compiled.experimental_get_tracing_count() for compiled in self._last)

    def _refuse(self, step: _ProvenStep, why: str, outcome: Outcome = Outcome.UNSTABLE) -> None:
        code = step.plain.__code__
        name = "the step" if code.co_name in self._moved else f"{code.co_name}()"
        where = f"{name} in {line_of_code(code, self._directory)}"
        raise TrialFailed(outcome, f"graph_step: {where}, {why}")

    def _prove(self, step: _ProvenStep, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._is_proving = True
        try:
            if why := find_difference(step.plain, step.compiled, *arguments, **named):
                self._refuse(step, why)
        finally:
            self._is_proving = False


def prove_fit(model: keras.Model, dataset: tf.data.Dataset, compiled: Any, where: str) -> None:
    """Prove that a compiled `train_step` does what the plain one does. Raises TrialFailed where it does not."""
    if why := find_difference(model.train_step, compiled, next(iter(dataset))):
        raise TrialFailed(Outcome.UNSTABLE, f"graph_step: {where}, {why}")


def find_difference(plain: Callable[..., Any], compiled: Any, *arguments: Any, **named: Any) -> str:
    """Return how steps of a compiled function differ from the plain one's, which begin at the same variables.

    Empty if rounding explains it. The variables stay as they are. Both draw the same random numbers.
    """
    alive = [found for found in gc.get_objects() if issubclass(type(found), tf.Variable)]
    variables = [found for found in alive if not tf.is_symbolic_tensor(found.handle) and found.is_initialized()]
    before, others, drawn = [np.asarray(variable.numpy()) for variable in variables], set[str](), list[None]()

    def run(function: Callable[..., Any], beginning: Sequence[Any] = before) -> list[Any]:
        for variable, value in zip(variables, beginning, strict=True):
            variable.assign(value)
        for _ in range(PROVEN_STEPS):
            with patched_random_ops() as draws:
                results = function(*arguments, **named)
            drawn.extend(draws)
        returned = [result for result in tf.nest.flatten(results) if result is not None]
        others.update(type(result).__name__ for result in returned if not tf.is_tensor(result))
        after = [*variables, *filter(tf.is_tensor, returned)]
        values = [np.asarray(tensor.numpy()) for tensor in after]
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        return values

    values, again = run(plain), run(plain)
    if others:
        return f"returns a Python {min(others)}, of which a graph makes a tensor"
    own = compiled.get_concrete_function(*arguments, **named).graph if compiled._jit_compile else None
    if drawn or (own is not None and "Random" in str(operations_in(own))):
        # XLA draws other numbers, which matters where they are constants of the training.
        jit_compile = (own is not None and draws_constants(own)) or None
        compiled = tf.function(plain, reduce_retracing=True, jit_compile=jit_compile, autograph=compiled._autograph)
    graph = run(compiled)
    starts = [*before, *map(np.zeros_like, values[len(before) :])]
    bounds = [
        CHANGE_SHARE * _distance(value, start) + 4 * _ROUNDING["float32"] * _distance(value, np.zeros_like(value))
        for value, start in zip(values, starts, strict=True)
    ]
    if not _are_alike(values, again, bounds):
        return "gives other weights or results from the same ones: it reads what no variable holds"
    if not _are_alike(values, graph, bounds):
        rounding = _ROUNDING[str(keras.mixed_precision.global_policy().compute_dtype)]
        rounded = run(plain, [_perturb(value, rounding) for value in before])
        differences = map(_distance, values, rounded)
        bounds = [max(bound, AMPLIFIED * found) for bound, found in zip(bounds, differences, strict=True)]
    return "" if _are_alike(values, graph, bounds) else "trains otherwise as a graph, by more than rounding explains"


class _ProvenStep:
    """A function beside its compiled form; of a class, a method of its instances."""

    def __init__(self, plain: Any, compiled: Any, call: Callable[..., Any]) -> None:
        self.plain, self.compiled, self._call = plain, compiled, call
        functools.update_wrapper(self, plain)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        return _ProvenStep(self.plain.__get__(instance, owner), self.compiled.__get__(instance, owner), self._call)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._call(self, arguments, named)


def _are_alike(values: Sequence[Any], others: Sequence[Any], bounds: Sequence[float]) -> bool:
    return all(distance <= bound for distance, bound in zip(map(_distance, values, others), bounds, strict=True))


def _distance(value: Any, other: Any) -> float:
    """Return the norm of a difference; for other types than floating point 0 if equal, and infinity otherwise."""
    if not tf.as_dtype(value.dtype).is_floating:
        return 0.0 if np.array_equal(value, other) else float("inf")
    return float(np.linalg.norm(np.float64(value) - np.float64(other)))


def _perturb(value: Any, rounding: float) -> Any:
    """Return numbers as they might be rounded otherwise."""
    if not tf.as_dtype(value.dtype).is_floating:
        return value
    signs = np.sign(np.random.default_rng(0).uniform(-1.0, 1.0, np.shape(value)))
    return (value * (1.0 + rounding * signs)).astype(value.dtype)
