"""Sees the steps of a training loop that a script has written itself.

A step is one element taken from the training's iterator; the training's iterator is the one that was read last when an
optimizer first updated weights. Where no dataset is read, a step is one call that updates weights: of `train_on_batch`,
of a `tf.function`, or of the optimizer itself.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any, Protocol

from autotune.scripts import tuned
from autotune.scripts.call_sites import shown, users_frame
from autotune.scripts.facts import ScriptFacts, Site
from autotune.scripts.wrap_keras import owner_of
from autotune.scripts.wrapping import Wrappers
from autotune.worker.private_api import loop_classes

_READS = "_autotune_reads"
"""What an iterator reads, and what a distributed dataset was made of."""
_PLACE = "_autotune_place"
_END = object()


class LoopHooks(Protocol):
    """What is done with a loop's steps."""

    def stepped(self, examples: int, logs: Any) -> None:
        """A step of the training is over; `logs` are the numbers that it returned."""

    def epoch_began(self) -> None:
        """The training's dataset is read from its beginning."""

    def epoch_ended(self) -> None:
        """The training's dataset was read to its end."""

    def reads(self, dataset: Any) -> Any:
        """The dataset that is read in place of this one, by the loop that trains."""


class LoopWatch:
    """Watches this process's loops.

    Args:
        wrappers: Says when it is the script that calls.
        hooks: Are told of the steps.
        facts: Of the script, where they are known: which function XLA is asked to compile.
    """

    def __init__(self, wrappers: Wrappers, hooks: LoopHooks, facts: ScriptFacts | None = None) -> None:
        self._wrappers, self._hooks = wrappers, hooks
        wanted = wrappers.settings.changes.get("jit_compile")
        function = None if facts is None else facts.step_function
        self._compile_with = None if function is None or wanted is None else (function, bool(wanted))
        self.dataset: Any = None
        """What the training reads; None where it reads no dataset."""
        self.batches_by_call = False
        """A step is a call that updates weights."""
        self.step_function: Site | None = None
        """The largest `tf.function` that updates weights and could be compiled by XLA."""
        self.jit_compile = False
        """Whether the script compiles it."""
        self.optimizers: list[Any] = []
        self.wait_seconds = 0.0
        self.read_at: float | None = None
        """When an element was read last."""
        self.place: tuple[str, int] | None = None
        """Where the training's dataset is read from its beginning: a file and a line."""
        self._last_read: Any = None  # the iterator that was read last, while its element is not yet done with
        self._updates = 0
        self._unused: list[int] = []  # examples of elements that were read and have updated nothing yet
        self._updating: set[int] = set()  # functions in whose trace an optimizer updates weights
        self._first_updating: int | None = None
        self._calls: list[Any] = []  # the functions that are being called, the outermost first
        self._in_strategy = 0
        self._updated_in_strategy = False
        self._logs: Any = None
        self._called_with = 0

    def install(self, tf: ModuleType, keras: ModuleType) -> None:
        """Watch iterators, functions, optimizers and `train_on_batch`."""
        classes = loop_classes(tf)
        for kind in classes.datasets:
            self._wrap_iter(kind)
        for kind in classes.iterators:
            self._wrap_next(kind)
        self._wrap_function(classes.function)
        self._wrap_update(owner_of(keras.optimizers.Optimizer, "apply"))
        self._wrap_train_on_batch(owner_of(keras.Model, "train_on_batch"))
        self._wrap_strategy(classes.strategy)
        tuned.watch_by(self)

    def watch_models(self, keras: ModuleType) -> None:
        """Take the batch that a layer was called with last for a step's, where no call that updates weights has one."""
        usual = keras.layers.Layer.__call__

        @functools.wraps(usual)
        def wrapped(layer: Any, *arguments: Any, **named: Any) -> Any:
            if self._wrappers.active and not self._calls and arguments:
                self._called_with = _length(arguments[0]) or self._called_with
            return usual(layer, *arguments, **named)

        keras.layers.Layer.__call__ = wrapped

    def explicit(self, dataset: Any) -> Iterator[Any]:
        """The elements of a dataset, each of which is a step because the script says so: see `autotune.steps`."""
        self.dataset, self.place, self.batches_by_call = dataset, ("autotune.steps", 0), False
        self._hooks.epoch_began()
        with self._wrappers.inert():
            iterator = iter(self._hooks.reads(dataset))
        while True:
            began = time.perf_counter()
            with self._wrappers.inert():
                element = next(iterator, _END)
            if element is _END:
                break
            self.read_at = time.perf_counter()
            self.wait_seconds += self.read_at - began
            yield element
            logs, self._logs = self._logs, None
            self._hooks.stepped(_length(element), logs)
        self._hooks.epoch_ended()

    def restarted(self) -> None:
        """The script begins anew."""
        self._last_read, self._updates, self._calls = None, 0, []

    # ------------------------------------------------------------------------------------------ what is read

    def _users_place(self) -> tuple[str, int] | None:
        frame: FrameType | None = users_frame() if self._wrappers.active and not self._calls else None
        while frame is not None and "site-packages" in frame.f_code.co_filename:  # a progress bar's
            frame = frame.f_back
        return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)

    def _wrap_iter(self, kind: Any) -> None:
        usual = kind.__iter__

        @functools.wraps(usual)
        def wrapped(dataset: Any) -> Any:
            place = self._users_place()
            if place is None:
                return usual(dataset)
            trains = place == self.place
            iterator = usual(self._hooks.reads(dataset) if trains else dataset)
            setattr(iterator, _READS, getattr(dataset, _READS, dataset))
            setattr(iterator, _PLACE, place)
            self._unused = []
            if trains:
                self._hooks.epoch_began()
            return iterator

        kind.__iter__ = wrapped

    def _wrap_next(self, kind: Any) -> None:
        usual = kind.__next__

        @functools.wraps(usual)
        def wrapped(iterator: Any) -> Any:
            place = getattr(iterator, _PLACE, None)
            if place is None or not self._wrappers.active or self._calls:
                return usual(iterator)
            self._about_to_read(iterator)
            began = time.perf_counter()
            try:
                element = usual(iterator)
            except StopIteration:
                if place == self.place:
                    self._hooks.epoch_ended()
                raise
            self._last_read, self.read_at = (iterator, element), time.perf_counter()
            self.wait_seconds += self.read_at - began
            return element

        kind.__next__ = wrapped

    def _about_to_read(self, iterator: Any) -> None:
        """What was done with the element that was read before was a step, if it is the training's."""
        last, self._last_read = self._last_read, None
        if last is None or last[0] is not iterator:
            return
        if self.place is None and self._updates and not self.batches_by_call:
            self.place, self.dataset = getattr(iterator, _PLACE), getattr(iterator, _READS)
        if getattr(iterator, _PLACE) != self.place:
            return
        self._unused.append(_length(last[1]))
        if self._updates:  # several elements may make one update, and an evaluation makes none
            logs, self._logs, self._updates = self._logs, None, 0
            lengths, self._unused = self._unused, []
            for length in lengths:
                self._hooks.stepped(length, logs)

    # ------------------------------------------------------------------------------------------ what updates

    def _wrap_function(self, kind: Any) -> None:
        usual = kind.__call__

        @functools.wraps(usual)
        def wrapped(function: Any, *arguments: Any, **named: Any) -> Any:
            if not self._wrappers.active:
                return usual(function, *arguments, **named)
            self._compile(function)
            outermost = not self._calls
            self._calls.append((function, arguments))
            try:
                result = usual(function, *arguments, **named)
            finally:
                self._calls.pop()
            if outermost and id(function) in self._updating:
                self._updated(id(function), arguments, _scalars(result))
            return result

        kind.__call__ = wrapped

    def _compile(self, function: Any) -> None:
        """Have XLA compile the step function, or not, before it is first traced."""
        if self._compile_with is None or getattr(function, "_autotune_seen", False):
            return
        function._autotune_seen = True
        wanted, value = self._compile_with
        if self._site(function).key == wanted.key:
            function._jit_compile = value

    def _site(self, function: Any) -> Site:
        called = inspect.unwrap(function.python_function)
        while isinstance(called, functools.partial):
            called = called.func
        code = getattr(getattr(called, "__func__", called), "__code__", None)
        if code is None:  # an object that can be called
            code = type(called).__call__.__code__
        return Site(
            file=shown(code.co_filename, self._wrappers.directory),
            function=code.co_qualname,
            call="tf.function",
            order=0,
            line=code.co_firstlineno,
        )

    def _wrap_update(self, kind: Any) -> None:
        usual = kind.apply

        @functools.wraps(usual)
        def wrapped(optimizer: Any, *arguments: Any, **named: Any) -> Any:
            result = usual(optimizer, *arguments, **named)
            if self._wrappers.active:
                if all(each is not optimizer for each in self.optimizers):
                    self.optimizers.append(optimizer)
                if self._calls:
                    self._traced()
                elif self._in_strategy:
                    self._updated_in_strategy = True
                else:
                    self._updated(id(optimizer), (), None)
            return result

        kind.apply = wrapped

    def _traced(self) -> None:
        """An optimizer updates weights in the functions that are being traced."""
        self._updating |= {id(function) for function, _ in self._calls}
        if self.step_function is not None or self._in_strategy:
            return
        for function, arguments in self._calls:
            if not any(_is_data(each) for each in arguments):
                self.step_function = self._site(function)
                self.jit_compile = bool(function._jit_compile)
                return

    def _wrap_train_on_batch(self, owner: Any) -> None:
        usual = owner.train_on_batch

        @functools.wraps(usual)
        def wrapped(model: Any, x: Any, *arguments: Any, **named: Any) -> Any:
            if not self._wrappers.active:
                return usual(model, x, *arguments, **named)
            with self._wrappers.inert():
                result = usual(model, x, *arguments, **named)
            if all(each is not model.optimizer for each in self.optimizers):
                self.optimizers.append(model.optimizer)
            self._updated(id(model), (x,), _scalars(result))
            return result

        owner.train_on_batch = wrapped

    def _wrap_strategy(self, kind: Any) -> None:
        run, distribute = kind.run, kind.experimental_distribute_dataset

        @functools.wraps(run)
        def counted(strategy: Any, *arguments: Any, **named: Any) -> Any:
            self._in_strategy += 1
            try:
                result = run(strategy, *arguments, **named)
            finally:
                self._in_strategy -= 1
            if self._updated_in_strategy and not self._in_strategy and not self._calls:
                self._updated_in_strategy = False
                self._updated(id(strategy), (), None)
            return result

        @functools.wraps(distribute)
        def noted(strategy: Any, dataset: Any, *arguments: Any, **named: Any) -> Any:
            with self._wrappers.inert():
                made = distribute(strategy, dataset, *arguments, **named)
            if made is not dataset:
                setattr(made, _READS, dataset)
            return made

        kind.run, kind.experimental_distribute_dataset = counted, noted

    def _updated(self, what: int, arguments: tuple[Any, ...], logs: Any) -> None:
        """A call that updates weights is over."""
        self._updates += 1
        self._logs = logs if logs is not None else self._logs
        if self._last_read is not None or self.place is not None:
            return
        self.batches_by_call = True
        if self._first_updating is None:
            self._first_updating = what
        if what == self._first_updating:
            self._hooks.stepped(next((n for each in arguments if (n := _length(each))), self._called_with), logs)


def _is_data(argument: Any) -> bool:
    """Whether a function's argument is a dataset or an iterator, which XLA cannot compile."""
    return hasattr(argument, "element_spec") or hasattr(argument, "__next__")


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


def _scalars(result: Any) -> Any:
    """The single numbers that a step returned, by name where they have one."""
    if isinstance(result, dict):
        kept = {name: value for name, value in result.items() if _is_scalar(value)}
    elif isinstance(result, tuple | list):
        kept = {str(index): value for index, value in enumerate(result) if _is_scalar(value)}
    else:
        kept = {"loss": result} if _is_scalar(result) else {}
    return kept


def _is_scalar(value: Any) -> bool:
    shape = getattr(value, "shape", () if isinstance(value, int | float) else None)
    return shape is not None and len(shape) == 0
