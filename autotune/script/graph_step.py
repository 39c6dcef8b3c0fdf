"""Compile the eager steps of a script by `tf.function`, and prove in trials that they train as before.

A decorator is put into the syntax tree, so that methods, closures and nested functions need nothing of their own.
"""

from __future__ import annotations

import ast
import builtins
import functools
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.data.facts import Site
from autotune.data.record import Outcome
from autotune.recipe.tf_private import keras, tf
from autotune.runtime import failures
from autotune.script.call_sites import functions_in, line_of_code, shown
from autotune.script.execute import edit_trees
from autotune.script.settings import Settings

_DECORATOR = "__autotune_graph_step__"
PROVEN_CALLS = (1, 3)  # of each function; its last one is proven, too
MOST_TRACES = 2  # of all functions, after those calls
CHANGE_SHARE = 1e-5
"""Largest difference between both sides, as a share of what a step changes: float32 rounds to 6e-8, and sums of some
hundred rounded numbers differ by that much."""
AMPLIFIED = 10.0  # times the difference that rounding the weights makes: Adam divides a gradient that is rounding alone
_ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 2.0**-52}
_FLOAT32_ROUNDING = 2.0**-23


class StepCompiler:
    """Compiles the functions at some sites, in a script that has not begun.

    With `obey`, the calls in `PROVEN_CALLS` of each are proven: `obey` acts, and ends the trial where that fails.
    `leave_out` is told the seconds that a proof takes.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        settings: Settings,
        directory: str,
        obey: Callable[[Callable[[], None]], None] | None = None,
        leave_out: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._sites, self._settings, self._directory = sites, settings, directory
        self._obey, self._leave_out = obey, leave_out
        self._calls: dict[Any, int] = {}  # of each compiled function
        self._last: dict[Any, Callable[[], None]] = {}  # proves its last call
        self._traces = 0  # up to the last proof
        self._is_proving = False
        setattr(builtins, _DECORATOR, self._compile)
        edit_trees(self._decorate, {Path(directory, site.file).resolve() for site in sites})

    def _decorate(self, tree: ast.Module, file: str) -> None:
        """Decorate the functions at the sites in the tree of a file."""
        known = [site for site in self._sites if site.file == shown(file, self._directory)]
        seen: list[str] = []
        for name, node in functions_in(tree) if known else ():
            if any((site.function, site.order) == (name, seen.count(name)) for site in known):
                node.decorator_list.append(ast.copy_location(ast.Name(_DECORATOR, ast.Load()), node))
            seen.append(name)

    def _compile(self, function: Any) -> Any:
        code, jit_compile = function.__code__, self._settings.changes.get("jit_compile")
        self._settings.reached |= {site.key for site in self._sites if site.function == code.co_qualname}
        compiled = tf.function(function, reduce_retracing=True, jit_compile=jit_compile or None)
        return compiled if self._obey is None else _ProvenStep(function, compiled, self.call)

    def call(self, step: _ProvenStep, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a compiled function, and prove the call if it is one of those that are proven."""
        assert self._obey is not None
        if self._is_proving:  # within the function that is proven
            return step.plain(*arguments, **named)
        calls = self._calls.get(step.compiled, 0) + 1
        try:
            result = step.compiled(*arguments, **named)
        except (StopIteration, tf.errors.OutOfRangeError):
            raise
        except Exception as error:
            if calls > 1 or failures.is_out_of_memory(error):
                raise
            why = f"cannot be compiled: {failures.summarize_error(error)}"
            self._obey(functools.partial(self._refuse, step, why, Outcome.ERROR))
        self._calls[step.compiled] = calls
        self._last[step.compiled] = prove = functools.partial(self._prove, step, arguments, named)
        if calls in PROVEN_CALLS:
            began = time.perf_counter()
            self._obey(prove)
            self._traces = self._count_traces()
            self._leave_out(time.perf_counter() - began)
        return result

    def finish(self) -> None:
        """Prove the last call of each function. Raises TrainingFailed where it trains otherwise, or is traced often."""
        for prove in self._last.values():
            prove()
        traces = self._count_traces() - self._traces
        if traces > MOST_TRACES:
            names = ", ".join(str(site) for site in self._sites)
            why = f"{names}: {traces} more graphs were made after the first calls, as its arguments change"
            raise failures.TrainingFailed(Outcome.UNSTABLE, why)

    def _count_traces(self) -> int:
        return sum(compiled.experimental_get_tracing_count() for compiled in self._calls)

    def _refuse(self, step: _ProvenStep, why: str, outcome: Outcome = Outcome.UNSTABLE) -> None:
        code = step.plain.__code__
        where = f"{code.co_name}() in {line_of_code(code, self._directory)}"
        raise failures.TrainingFailed(outcome, f"graph_step: {where}, {why}")

    def _prove(self, step: _ProvenStep, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Compare a call with that of the plain function, from the same variables, which stay as they are."""
        own = [found for found in gc.get_objects() if issubclass(type(found), tf.Variable)]
        variables = [found for found in own if not tf.is_symbolic_tensor(found.handle) and found.is_initialized()]
        before = [tf.identity(variable) for variable in variables]

        def run(function: Callable[..., Any], beginning: Sequence[Any] = before) -> list[Any]:
            _assign(variables, beginning)
            results = function(*arguments, **named)
            after = [tf.identity(variable) for variable in variables]
            _assign(variables, before)
            return [*after, *(tf.identity(part) for part in tf.nest.flatten(results) if tf.is_tensor(part))]

        self._is_proving = True
        try:
            plain, again, graph = run(step.plain), run(step.plain), run(step.compiled)
            computes_in = str(keras.mixed_precision.global_policy().compute_dtype)
            rounding = _ROUNDING.get(computes_in, _FLOAT32_ROUNDING)
            names = [variable.name for variable in variables] + ["its result"] * (len(plain) - len(before))
            starts = [*before, *map(tf.zeros_like, plain[len(before) :])]
            bounds = [
                CHANGE_SHARE * _distance(own, start) + 4 * _FLOAT32_ROUNDING * _distance(own, tf.zeros_like(own))
                for own, start in zip(plain, starts, strict=True)
            ]
            if name := _first_beyond(names, plain, again, bounds):
                self._refuse(
                    step, f"gives another {name} in a second run of the same call: it reads what no variable has"
                )
            if _first_beyond(names, plain, graph, bounds):
                rounded = run(step.plain, [_perturb(value, rounding) for value in before])
                bounds = [
                    max(bound, AMPLIFIED * _distance(own, other))
                    for bound, own, other in zip(bounds, plain, rounded, strict=True)
                ]
            if name := _first_beyond(names, plain, graph, bounds):
                self._refuse(step, f"trains otherwise as a graph: {name} differs by more than rounding explains")
        finally:
            self._is_proving = False


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


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _perturb(value: Any, rounding: float) -> Any:
    """Return numbers as they might be rounded otherwise."""
    if not value.dtype.is_floating:
        return value
    signs = tf.sign(tf.random.stateless_uniform(tf.shape(value), (1, 2), -1.0, 1.0))
    return value * tf.cast(1.0 + rounding * signs, value.dtype)


def _distance(own: Any, other: Any) -> float:
    """Return the norm of a difference; of what is no floating-point number 0 if equal, and infinity otherwise."""
    if not own.dtype.is_floating:
        return 0.0 if bool(tf.reduce_all(tf.equal(own, other))) else float("inf")
    return float(tf.norm(tf.cast(own, tf.float64) - tf.cast(other, tf.float64)))


def _first_beyond(names: Sequence[str], own: Sequence[Any], other: Sequence[Any], bounds: Sequence[float]) -> str:
    """Return the first whose values differ by more than its bound; empty if none do."""
    sides = zip(names, own, other, bounds, strict=True)
    return next((name for name, one, two, bound in sides if not _distance(one, two) <= bound), "")
