"""Sees the steps of a training loop that a script has written itself.

A step is one element taken from the training's iterator; the training's iterator is the one that was read last when an
optimizer first updated weights. Where no dataset is read, a step is one call that updates weights: of `train_on_batch`,
of a `tf.function`, or of the optimizer itself.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from autotune.data.facts import ScriptFacts, Site
from autotune.recipe import apply
from autotune.recipe.tf_private import loop_classes, name_of_strategy, updates_of, workers_of
from autotune.script import tuned
from autotune.script.call_sites import shown, users_frame
from autotune.script.dataset_trace import batch_calls
from autotune.script.interpose import Wrappers, around, owner_of
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS, Stage
from autotune.training.pipeline import batch_length

_READS = "_autotune_reads"
"""What an iterator reads, and what a distributed dataset was made of."""
_PLACE = "_autotune_place"
_PARTS = "_autotune_parts"
"""Of a distributed dataset and its iterators: how many batches of what it was made of a step reads."""


class LoopWatch:
    """Watches this process's loops.

    Args:
        wrappers: Says when it is the script that calls, and whose hooks are told of the steps.
        facts: Of the script, where they are known: which function XLA is asked to compile.
    """

    def __init__(self, wrappers: Wrappers, facts: ScriptFacts | None = None) -> None:
        self._wrappers, self._hooks = wrappers, wrappers.hooks
        self._jit_compile = wrappers.settings.changes.get("jit_compile")
        self._compiled = None if facts is None or self._jit_compile is None else facts.step_function
        self.dataset: Any = None
        """What the training reads; None where it reads no dataset."""
        self.step_function: Site | None = None
        """The largest `tf.function` that updates weights and could be compiled by XLA."""
        self.jit_compile = False
        """Whether the script compiles it."""
        self.optimizers: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.wait_seconds = 0.0
        self.read_at: float | None = None
        """When an element was read last."""
        self.place: tuple[str, int] | None = None
        """Where the training's dataset is read from its beginning: a file and a line."""
        self.by_call = False
        """Whether a step is a call that updates weights: which may read a dataset's iterator that it is given."""
        self.parts = 1
        """How many batches of the dataset a step reads: one for each replica, where a function makes the dataset."""
        self.distributed = False
        """Whether a strategy of the script's has taken a dataset, whose options are set by then."""
        self._last_read: Any = None  # the iterator that was read last, while its element is not yet done with
        self._updates = 0
        self._unused: list[int] = []  # examples of elements that were read and have updated nothing yet
        self._updating: WeakSet[Any] = WeakSet()  # functions in whose trace an optimizer updates weights
        self._iterating: WeakSet[Any] = WeakSet()  # functions in whose trace a distributed dataset is looped over
        self._first_updating: int | None = None
        self._calls: list[Any] = []  # the functions that are being called, the outermost first
        self.strategy = ""
        """The name of the `tf.distribute` strategy by which it runs; empty without one."""
        self._in_strategy = 0
        self._workers = 1  # that share each batch
        self._updated_in_strategy = False
        self._logs: Any = None
        self._called_with = 0
        self._forward_calls = 0
        self.work: list[int] = []
        """How often layers and functions were called for each update, where no dataset is read."""
        self._read_inside = 0  # examples that a call reads from the iterator that it is given
        self._counter: tuple[Any, int] | None = None  # an optimizer, and its updates before the first call

    def install(self, tf: ModuleType, keras: ModuleType, *, layers: bool = False) -> None:
        """Watch iterators, functions, optimizers and `train_on_batch`.

        Args:
            tf: The module.
            keras: The module.
            layers: The batch that a layer was called with last is a step's, where no call that updates weights has one.
        """
        classes = loop_classes(tf)
        for kind in classes.datasets:
            around(kind, "__iter__", self._iterated)
        for kind in classes.iterators:
            around(kind, "__next__", self._next)
        around(classes.function, "__call__", self._called)
        around(owner_of(keras.optimizers.Optimizer, "apply"), "apply", self._applied)
        around(owner_of(keras.Model, "train_on_batch"), "train_on_batch", self._trained_on_batch)
        around(classes.strategy, "run", self._run)
        for name in ("experimental_distribute_dataset", "distribute_datasets_from_function"):
            around(classes.strategy, name, self._distributed)
        tuned.use(watch=self)

        def called(usual: Callable[..., Any], layer: Any, *arguments: Any, **named: Any) -> Any:
            self._forward_calls += self._wrappers.active and not self._calls
            if self._wrappers.active and arguments:
                length = _length(arguments[0])  # in a trace, where it is known
                self._called_with = max(length, self._called_with) if self._calls else length or self._called_with
            return usual(layer, *arguments, **named)

        def predicted(usual: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            self._forward_calls += self._wrappers.active
            return usual(*arguments, **named)

        if layers:
            around(keras.layers.Layer, "__call__", called)
            for name in ("predict", "predict_on_batch"):
                around(owner_of(keras.Model, name), name, predicted)

    def explicit(self, dataset: Any) -> Iterator[Any]:
        """The elements of a dataset, each of which is a step because the script says so: see `autotune.steps`."""
        self.dataset, self.place, self.by_call = getattr(dataset, _READS, dataset), ("autotune.steps", 0), False
        self._hooks.epoch_began()
        with self._wrappers.inert():
            iterator = iter(_as_tuned(self._wrappers, dataset))
        while True:
            if self._hooks.cuts_epoch(lambda: True):
                return
            try:
                with self._wrappers.inert():
                    element = self._read(next, iterator)
            except StopIteration:
                break
            yield element
            logs, self._logs = self._logs, None
            self._hooks.stepped(self._workers * _length(element), logs)
        self._hooks.epoch_ended()

    def restarted(self) -> None:
        """The script begins anew, and makes its functions anew: all but those of modules that it imports."""
        self._last_read, self._updates, self._calls = None, 0, []
        self._first_updating = None

    @property
    def work_varies(self) -> bool:
        """Whether updates take different numbers of calls. The first may build the model as well."""
        return self.by_call and self.dataset is None and len(set(self.work[1:])) > 1

    # ------------------------------------------------------------------------------------------ what is read

    def _iterated(self, usual: Callable[..., Any], dataset: Any) -> Any:
        if self._calls:
            self._iterating.add(self._calls[-1][0])
        frame: FrameType | None = users_frame() if self._wrappers.active and not self._calls else None
        while frame is not None and "site-packages" in frame.f_code.co_filename:  # a progress bar's
            frame = frame.f_back
        if frame is None:
            return usual(dataset)
        place = frame.f_code.co_filename, frame.f_lineno
        trains = place == self.place
        iterator = usual(_as_tuned(self._wrappers, dataset) if trains else dataset)
        setattr(iterator, _READS, getattr(dataset, _READS, dataset))
        setattr(iterator, _PLACE, place)
        setattr(iterator, _PARTS, getattr(dataset, _PARTS, 1))
        self._unused = []
        if trains:
            self._hooks.epoch_began()
        return iterator

    def _next(self, usual: Callable[..., Any], iterator: Any) -> Any:
        place = getattr(iterator, _PLACE, None)
        if place is None or not self._wrappers.active or self._calls:
            return usual(iterator)
        self._about_to_read(iterator)
        if place == self.place and self._hooks.cuts_epoch(_is_read_by_for):
            raise StopIteration
        try:
            element = self._read(usual, iterator)
        except StopIteration:
            if place == self.place:
                self._hooks.epoch_ended()
            raise
        self._last_read = iterator, element
        return element

    def _read(self, usual: Callable[..., Any], iterator: Any) -> Any:
        began = time.perf_counter()
        element = usual(iterator)
        self.read_at = time.perf_counter()
        self.wait_seconds += self.read_at - began
        return element

    def _about_to_read(self, iterator: Any) -> None:
        """What was done with the element that was read before was a step, if it is the training's."""
        last, self._last_read = self._last_read, None
        if last is None or last[0] is not iterator:
            return
        if self.place is None and self._updates and not self.by_call:
            self.place = getattr(iterator, _PLACE)
            self.dataset, self.parts = getattr(iterator, _READS), getattr(iterator, _PARTS)
        if getattr(iterator, _PLACE) != self.place:
            return
        self._unused.append(self._workers * _length(last[1]))
        if self._updates:  # several elements may make one update, and an evaluation makes none
            logs, self._logs, self._updates = self._logs, None, 0
            lengths, self._unused = self._unused, []
            for length in lengths:
                self._hooks.stepped(length, logs)

    def _distributed(self, usual: Callable[..., Any], strategy: Any, data: Any, *more: Any, **named: Any) -> Any:
        """A strategy takes a dataset, or a function that makes one for each worker: its own calls are the script's."""
        found, by_function = [], not hasattr(data, "element_spec")

        def noted(context: Any) -> Any:
            found.append(data(context))
            return found[-1]

        with contextlib.nullcontext() if by_function else self._wrappers.inert():
            made = usual(strategy, noted if by_function else data, *more, **named)
        if not by_function and made is not data:
            found.append(data)
        if found:
            self.distributed = True
            setattr(made, _READS, found[0])
            setattr(made, _PARTS, strategy.num_replicas_in_sync if by_function else 1)
        return made

    # ------------------------------------------------------------------------------------------ what updates

    def _called(self, usual: Callable[..., Any], function: Any, *arguments: Any, **named: Any) -> Any:
        if not self._wrappers.active:
            return usual(function, *arguments, **named)
        if self._compiled is not None and not hasattr(function, "_autotune_seen"):  # before it is first traced
            function._autotune_seen = True
            if _site(function, self._wrappers.directory).key == self._compiled.key:
                function._jit_compile = bool(self._jit_compile)
        outermost = not self._calls
        self._forward_calls += outermost
        self._calls.append((function, arguments))
        try:
            result = usual(function, *arguments, **named)
        finally:
            self._calls.pop()
        if outermost and function in self._updating:
            self._updated(id(function), arguments, _scalars(result))
        return result

    def _applied(self, usual: Callable[..., Any], optimizer: Any, *arguments: Any, **named: Any) -> Any:
        result = usual(optimizer, *arguments, **named)
        if self._wrappers.active:
            self.optimizers[id(optimizer)] = optimizer
            if self._calls:
                self._traced(optimizer)
            elif self._in_strategy:
                self._updated_in_strategy = True
            else:
                self._updated(id(optimizer), (), None)
        return result

    def _traced(self, optimizer: Any) -> None:
        """An optimizer updates weights in the functions that are being traced."""
        import tensorflow as tf

        graph, inside = tf.compat.v1.get_default_graph(), any(each in self._iterating for each, _ in self._calls)
        while graph is not None and not inside:
            inside = str(getattr(graph, "name", "")).startswith("Dataset_")  # of a loop over a dataset
            graph = getattr(graph, "outer_graph", None)
        if inside:
            self._hooks.loops_inside(_site(self._calls[0][0], self._wrappers.directory))
        self._updating.update(function for function, _ in self._calls)
        if self._counter is None:
            self._counter = optimizer, updates_of(optimizer)
        if self.step_function is not None or self._in_strategy:
            return
        for function, arguments in self._calls:
            if not any(hasattr(each, "element_spec") or hasattr(each, "__next__") for each in arguments):
                self.step_function = _site(
                    function, self._wrappers.directory
                )  # XLA compiles no function of datasets or iterators
                self.jit_compile = bool(function._jit_compile)
                return

    def _trained_on_batch(self, usual: Callable[..., Any], model: Any, x: Any, *arguments: Any, **named: Any) -> Any:
        if not self._wrappers.active:
            return usual(model, x, *arguments, **named)
        with self._wrappers.inert():
            result = usual(model, x, *arguments, **named)
        self.optimizers[id(model.optimizer)] = model.optimizer
        self._updated(id(model), (x,), _scalars(result))
        return result

    def _run(self, usual: Callable[..., Any], strategy: Any, *arguments: Any, **named: Any) -> Any:
        self._in_strategy += 1
        self._workers, self.strategy = workers_of(strategy), name_of_strategy(strategy)
        try:
            result = usual(strategy, *arguments, **named)
        finally:
            self._in_strategy -= 1
        if self._updated_in_strategy and not self._in_strategy and not self._calls:
            self._updated_in_strategy = False
            self._updated(id(strategy), (), None)
        return result

    def _updated(self, what: int, arguments: tuple[Any, ...], logs: Any) -> None:
        """A call that updates weights is over."""
        self._updates += 1
        self._logs = logs if logs is not None else self._logs
        if self._last_read is not None or self.place is not None:
            return
        self.by_call = True
        if self._first_updating is None:
            self._first_updating = what
            iterator = next((each for each in arguments if hasattr(each, _READS)), None)
            self.dataset, self.parts = getattr(iterator, _READS, None), getattr(iterator, _PARTS, 1)
            if hasattr(self.dataset, "element_spec") and not self._read_inside:
                calls, _ = batch_calls(self.dataset)
                with self._wrappers.inert():
                    batch = calls[0].used if calls else batch_length(self.dataset)
                optimizer, before = self._counter or (None, 0)
                self._read_inside = self.parts * batch * max(1, updates_of(optimizer) - before)
        if what == self._first_updating:
            self.work.append(self._forward_calls)
            self._forward_calls = 0
            length = next((n for each in arguments if (n := _length(each))), self._called_with)
            self._hooks.stepped(self._read_inside or self._workers * length, logs)


def _as_tuned(wrappers: Wrappers, dataset: Any) -> Any:
    """The dataset with the changed options, and prefetched where the script does not."""
    changes, sites = wrappers.settings.changes, wrappers.settings.sites
    acting = {name: value for name, value in changes.items() if KNOBS[name].stage is Stage.OPTIONS}
    if "prefetch" in changes and "prefetch" not in sites:
        acting["prefetch"] = changes["prefetch"]
    if not acting or not hasattr(dataset, "with_options"):
        return dataset
    with wrappers.inert():
        return apply.pipeline(dataset, Configuration(acting), batched=True)


def _site(function: Any, directory: str) -> Site:
    """Where a `tf.function` is defined."""
    called = inspect.unwrap(function.python_function)
    while isinstance(called, functools.partial):
        called = called.func
    called = getattr(called, "__func__", called)
    code = called.__code__ if hasattr(called, "__code__") else type(called).__call__.__code__
    file, line = shown(code.co_filename, directory), code.co_firstlineno
    return Site(file=file, function=code.co_qualname, call="tf.function", order=0, line=line)


def _is_read_by_for() -> bool:
    """Return whether the script reads by a `for`, which ends where `next()` would raise."""
    frame = users_frame()
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "FOR_ITER"


def _length(element: Any) -> int:
    """Examples in a batch: of a `PerReplica` those of all replicas."""
    import tensorflow as tf

    total = 0
    for leaf in tf.nest.flatten(element, expand_composites=False)[:1]:
        for part in getattr(leaf, "values", (leaf,)) if not hasattr(leaf, "flat_values") else (leaf,):
            shape = getattr(part, "shape", None)
            if shape is not None and len(shape) and shape[0]:
                total += int(shape[0])
    return total


def _scalars(result: Any) -> dict[str, Any]:
    """The single numbers that a step returned, by name where they have one."""
    if isinstance(result, tuple | list):
        result = {str(index): value for index, value in enumerate(result)}
    named = result if isinstance(result, dict) else {"loss": result}
    return {name: value for name, value in named.items() if _is_scalar(value)}


def _is_scalar(value: Any) -> bool:
    shape = getattr(value, "shape", () if isinstance(value, int | float) else None)
    return shape is not None and len(shape) == 0
