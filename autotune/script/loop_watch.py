"""Observe the steps of a training loop that a script has written itself.

A step is one element taken from the training's iterator: the iterator that was read last when an optimizer first
updated weights, or that of the `for` around it. It ends when any iterator is read or made after an update. Where no
dataset is read, a step is one call that updates weights: of `train_on_batch`, of a `tf.function`, or of the optimizer
itself. Where several optimizers take turns, it is a round of all of them.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import CodeType, FrameType, ModuleType
from typing import Any, Literal
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, WeakValueDictionary, ref

from autotune.data.facts import ScriptFacts, Site
from autotune.recipe import apply
from autotune.recipe.keras_api import api_of, keras_api
from autotune.recipe.tf_private import align_function_numbering, loop_classes, name_of_strategy, workers_of
from autotune.runtime.sources import is_installed
from autotune.script.call_sites import is_own, line_of, place_of, running_frames, users_frame
from autotune.script.dataset_trace import batch_calls, is_batched
from autotune.script.eager_steps import EagerSteps
from autotune.script.interpose import Wrappers, around, owner_of
from autotune.script.loop_ends import StepLoop, find_step_loop
from autotune.script.settings import serve_script
from autotune.script.slow_parts import RESTARTS
from autotune.space.configuration import Configuration
from autotune.space.keras_in_use import keras_of
from autotune.space.knobs import KNOBS, Stage
from autotune.training.pipeline import batch_length

_ORIGIN, _LAST = "_autotune_origin", "_autotune_last"
"""Attributes of iterators and distributed datasets; of iterators."""
_READERS = os.path.join("tensorflow", "python", "framework", "ops.py"), os.path.join("numpy", "_core", "fromnumeric.py")
"""Files of functions that read a tensor for their caller."""
SlowLine = Literal["reads", "predicts", "iterates"]
"""What a line does in each step: read a GPU's tensors, call a model's `predict`, or make an iterator."""


@dataclass(frozen=True)
class _Origin:
    """The dataset that an iterator reads."""

    dataset: Any
    place: tuple[str, int] | None = None  # file and line at which the iterator was made
    parts: int = 1  # see `LoopWatch.parts`


@dataclass(frozen=True)
class _Batch:
    """What was read last from the training's iterator and has ended no step yet."""

    iterator: ReferenceType[Any]
    origin: _Origin
    lengths: list[int]  # examples for one worker, of each element that was read since the last step
    is_by_for: bool  # read by a `for`, before the first update


class LoopWatch:
    """Watches this process's loops.

    `facts` are those of the script, where they are known: which function XLA compiles. With `finds_compiled` TensorFlow
    must find what XLA compiled, now or in another process. `eager` is called at eager updates.
    """

    def __init__(
        self,
        wrappers: Wrappers,
        facts: ScriptFacts | None = None,
        *,
        finds_compiled: bool = False,
        eager: EagerSteps | None = None,
    ) -> None:
        self.eager = eager
        self._wrappers, self._hooks = wrappers, wrappers.hooks
        self._jit_compile = wrappers.settings.changes.get("jit_compile")
        self._finds_compiled = finds_compiled
        self._compiled = None if facts is None or self._jit_compile is None else facts.step_function
        self.dataset: Any = None  # that the training reads; None where it reads none
        self.place: tuple[str, int] | None = None  # the file and line at which it is read from its beginning
        self.by_call = False  # a step is a call that updates weights; it may read from an iterator that it is given
        self.distributed = False  # a strategy of the script's has taken a dataset, so its options are set already
        self.parts = 1  # batches of the dataset that a step reads: one per replica, where a function makes the dataset
        self.strategy = ""  # the name of the `tf.distribute` strategy that runs the steps
        self.optimizers: WeakValueDictionary[int, Any] = WeakValueDictionary()  # all that update weights
        self.layers: WeakValueDictionary[int, Any] = WeakValueDictionary()  # all that were called, if they are watched
        self.step_function: Site | None = None  # the largest `tf.function` that updates weights and XLA can compile
        self.jit_compile = False  # the script compiles it
        self.keeps_element = False  # the loop goes on with the last element, and reads no other
        self.wait_seconds = 0.0  # how long reading has taken
        self.read_at: float | None = None  # when an element was last read
        self._called_at: float | None = None  # when a call that updates weights was last made, where it is a step
        self.loop: StepLoop | None = None  # that reads the training's elements, once these are known
        self.work: list[int] = []  # calls of layers and functions before each update, where no dataset is read
        self._batch: _Batch | None = None
        self._unended = WeakKeyDictionary[Any, _Batch]()  # of iterators that may be the training's, the last read last
        self._read_in_step: dict[int, tuple[str, int] | None] = {}  # iterators, and where they were made
        self._needed: set[tuple[str, int] | None] = set()  # where iterators were made that an update may have needed
        self._steps = Counter[bool]()  # by whether they have read several iterators
        self._pass: Literal["begun", "read", "ended"] = "read"  # of the training's data
        self._updates = 0  # since the last step
        # Of what slows each step down, the file and line: after how many updates it was done.
        self._slow_lines = defaultdict[tuple[SlowLine, str, int], set[int]](set)
        self._all_updates = 0
        self._anew_at: tuple[str, int] | None = None  # where an iterator was made that was gone at the first update
        self._logs: Any = None
        self._calls: list[Any] = []  # functions that are being called, and their arguments, the outermost first
        self._updating: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # functions, and their optimizers
        self._iterating: WeakSet[Any] = WeakSet()  # functions that loop over a distributed dataset
        self._first_updating: int | None = None
        self.updaters = 1 if facts is None else facts.updaters  # see `ScriptFacts`
        self._updated: set[int] = set()  # optimizers that have updated weights since the last step
        self._in_strategy = 0  # calls of `strategy.run`, one inside another
        self._workers = 1  # that share each batch
        self._updated_in_strategy = False
        self._last_length = 0  # examples that a layer was last called with
        self._forward_calls = 0  # of layers and functions since the last update
        self._read_inside = 0  # examples that a call reads from the iterator that it is given
        self._counter: tuple[Any, int] | None = None  # an optimizer, and its updates before the first call
        self._restore: list[Callable[[], None]] = []  # what undoes `install`

    def install(self, tf: ModuleType) -> None:
        """Watch iterators, functions and strategies."""
        classes, act_on = loop_classes(tf), self._wrappers.around
        distributing = ("experimental_distribute_dataset", "distribute_datasets_from_function")
        self._restore = [
            *(around(kind, "__iter__", self._iterate) for kind in classes.datasets),
            *(act_on(kind, "__next__", self._next) for kind in classes.iterators),
            act_on(classes.function, "__call__", self._call),
            *([act_on(tf.GradientTape, "__enter__", self.eager.note_tape)] if self.eager is not None else ()),
            *([act_on(classes.tensor, "_numpy", self._note_read)] if self.eager is not None else ()),
            around(classes.strategy, "run", self._run),
            *(around(classes.strategy, name, self._distribute) for name in distributing),
        ]
        serve_script(watch=self)

    def install_keras(self, keras: ModuleType, *, layers: bool = False) -> None:
        """Watch optimizers and `train_on_batch` of a Keras.

        With `layers`, the batch of the last layer call is a step's where no call that updates weights has one.
        """
        api, act_on = api_of(keras), self._wrappers.around
        api.watch_trained_variables()
        for base in api.optimizer_bases():
            owner = owner_of(base, api.update_method)
            self._restore.append(act_on(owner, api.update_method, self._apply))
        methods: list[tuple[Any, str, Callable[..., Any]]] = [(keras.Model, "train_on_batch", self._train_on_batch)]
        if layers:
            methods.append((keras.layers.Layer, "__call__", self._call_layer))
            methods += [(keras.Model, name, self._predict) for name in ("predict", "predict_on_batch")]
        self._restore += [act_on(owner_of(kind, name), name, act) for kind, name, act in methods]

    def uninstall(self) -> None:
        """Watch nothing any more."""
        for restore in reversed(self._restore):
            restore()
        self._restore = []

    def trained_weights(self, count: int | None = None) -> list[Any]:
        """Return the variables that the optimizers update, or that the first `count` do."""
        optimizers = list(self.optimizers.values())[:count]
        return [variable for optimizer in optimizers for variable in keras_api().trained_by(optimizer)]

    def explicit(self, dataset: Any) -> Iterator[Any]:
        """Yield the elements of a dataset, each of which is a step because the script says so: see `autotune.steps`."""
        origin = getattr(dataset, _ORIGIN, _Origin(dataset))
        self.dataset, self.place, self.by_call = origin.dataset, ("autotune.steps", 0), False
        self._batch, self._updates = None, 0
        self._hooks.epoch_began()
        with self._wrappers.inert():
            iterator = iter(_with_knobs(self._wrappers, dataset))
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
        """Forget what the script has called: it begins again, with new functions."""
        self._batch, self._updates, self._calls, self._pass = None, 0, [], "read"
        self._first_updating = None
        self._updated.clear()

    @property
    def work_varies(self) -> bool:
        """True if updates take different numbers of calls. The first may build the model as well."""
        return self.by_call and self.dataset is None and len(set(self.work[1:])) > 1

    @property
    def reads_several(self) -> bool:
        """True if most steps read several iterators that their updates may need, as of `zip`."""
        return self._steps[True] > self._steps[False]

    @property
    def why_unseen(self) -> str:
        """Why the training's dataset is not known: each step makes its iterator anew; empty if none does."""
        line = "" if self._anew_at is None else line_of(*self._anew_at, self._wrappers.directory)
        return RESTARTS.format(line) if ("iterates", line) in self.slow_lines() else ""

    @property
    def step_began_at(self) -> float | None:
        """When the step that ends now has begun: its input was read, or its function called; None if not known."""
        return self._called_at if self.by_call else self.read_at

    # ------------------------------------------------------------------------------------------ reading

    def _iterate(self, usual: Callable[..., Any], dataset: Any) -> Any:
        if self._calls:
            self._iterating.add(self._calls[-1][0])
        frame: FrameType | None = users_frame() if self._wrappers.active and not self._calls else None
        while frame is not None and is_installed(frame.f_code.co_filename):  # a progress bar's
            frame = frame.f_back
        if frame is None:
            return usual(dataset)
        self._end_step()
        if self.optimizers:
            self._note_slow_line("iterates", frame)
        place = frame.f_code.co_filename, frame.f_lineno
        trains = place == self.place
        iterator = usual(_with_knobs(self._wrappers, dataset) if trains else dataset)
        setattr(iterator, _ORIGIN, replace(getattr(dataset, _ORIGIN, _Origin(dataset)), place=place))
        if trains and self._pass != "begun":  # `zip` makes several iterators in one line
            self._hooks.epoch_began()
            self._pass = "begun"
        return iterator

    def _next(self, usual: Callable[..., Any], iterator: Any) -> Any:
        origin = getattr(iterator, _ORIGIN, None)
        if origin is None or self._calls:
            return usual(iterator)
        self._end_step(iterator)
        trains = origin.place == self.place
        if trains and self._hooks.cuts_epoch(_is_read_by_for):
            raise StopIteration
        steps = self._steps.total()
        if trains and self.loop is None and self.eager is not None:  # in a survey, before another iterator is read
            self.loop = find_step_loop(running_frames(), self._wrappers.directory, is_batched)
        element, read_after = getattr(iterator, _LAST, (None, steps))
        if not self.keeps_element or read_after == steps:  # before its step has ended, it waits for another element
            try:
                element = self._read(usual, iterator)
            except StopIteration:
                setattr(iterator, _LAST, (None, steps))
                self._unended.pop(iterator, None)
                self._read_in_step.pop(id(iterator), None)
                if self.place is None:
                    self._return_to_iterator_before()
                elif self._batch is not None and self._batch.iterator() is iterator:
                    self._batch = None
                if trains and self._pass != "ended":  # a strict `zip` reads the end of each
                    self._pass = "ended"
                    self._hooks.epoch_ended()
                raise
        setattr(iterator, _LAST, (element, steps))
        self._read_in_step[id(iterator)] = origin.place
        if trains or (self.place is None and not self.by_call):
            before = self._unended.pop(iterator, None)
            lengths = [] if before is None else before.lengths
            lengths.append(_length(element))
            self._batch = _Batch(ref(iterator), origin, lengths, self.place is None and _is_read_by_for())
            self._unended[iterator], self._pass = self._batch, "read"
        return element

    def _return_to_iterator_before(self) -> None:
        """Forget an iterator that has ended before the first update, as of a validation within the training's loop."""
        self._batch = next(iter([*self._unended.values()][::-1]), None)

    def _read(self, usual: Callable[..., Any], iterator: Any) -> Any:
        began = time.perf_counter()
        element = usual(iterator)
        self.read_at = time.perf_counter()
        self.wait_seconds += self.read_at - began
        return element

    def _end_step(self, iterator: Any = None) -> None:
        """Report what was done with the training's last element as a step, if it has updated weights.

        `iterator`: which is read next. Several elements of one iterator may make one update.
        """
        batch = self._batch
        if batch is None:
            return
        is_used = self._updates > 0
        if is_used or batch.iterator() is iterator:
            self._batch = None
        if is_used:
            self._steps[sum(place in self._needed for place in self._read_in_step.values()) > 1] += 1
            self._read_in_step.clear()
            if self.place is None:
                again = None if iterator is None else self._unended.get(iterator)
                batch = again if again is not None and again.is_by_for else batch
                self.dataset, self.place, self.parts = batch.origin.dataset, batch.origin.place, batch.origin.parts
            logs, self._logs, self._updates = self._logs, None, 0
            self._unended.clear()
            for length in batch.lengths:
                self._hooks.stepped(self._workers * length, logs)

    def _distribute(self, usual: Callable[..., Any], strategy: Any, data: Any, *rest: Any, **named: Any) -> Any:
        """Give a strategy a dataset, or a function that makes one per worker and whose calls are the script's own."""
        taken, by_function = [], not hasattr(data, "element_spec")

        def noted(context: Any) -> Any:
            taken.append(data(context))
            return taken[-1]

        with contextlib.nullcontext() if by_function else self._wrappers.inert():
            result = usual(strategy, noted if by_function else data, *rest, **named)
        if not by_function and result is not data:
            taken.append(data)
        if taken:
            self.distributed = True
            parts = strategy.num_replicas_in_sync if by_function else 1
            setattr(result, _ORIGIN, _Origin(taken[0], parts=parts))
        return result

    def _note_read(self, usual: Callable[..., Any], tensor: Any) -> Any:
        """Note the line of the user's that turns a tensor into numbers, by itself or through TensorFlow and NumPy."""
        is_of_gpu = self.optimizers and "GPU" in str(tensor.device)  # on a CPU the step has ended by then
        frame: FrameType | None = sys._getframe(1) if is_of_gpu else None
        while frame is not None and not is_own(file := frame.f_code.co_filename):
            frame = frame.f_back if file.endswith(_READERS) or not is_installed(file) else None
        if frame is not None:
            self._note_slow_line("reads", frame)
        return usual(tensor)

    def _note_slow_line(self, kind: SlowLine, frame: FrameType) -> None:
        self._slow_lines[kind, frame.f_code.co_filename, frame.f_lineno].add(self._all_updates)

    def slow_lines(self) -> Iterator[tuple[SlowLine, str]]:
        """Yield lines that slow each step down: what they do, and where they stand."""
        most = max(1, len(self.optimizers))  # updates of a step
        for (kind, file, line), updates in self._slow_lines.items():
            # An iterator for each epoch is usual.
            is_often = any(0 < later - number <= most for number in updates for later in updates)
            if len(updates) > 1 and (is_often or kind != "iterates"):
                yield kind, line_of(file, line, self._wrappers.directory)

    # ------------------------------------------------------------------------------------------ updating

    def _call(self, usual: Callable[..., Any], function: Any, *arguments: Any, **named: Any) -> Any:
        if (self._compiled or self._finds_compiled) and not hasattr(function, "_autotune_seen"):
            function._autotune_seen = True  # before it is first traced
            site = None if self._compiled is None else _site_of(function, self._wrappers.directory)
            if site is not None and self._compiled is not None and site.key == self._compiled.key:
                function._jit_compile = bool(self._jit_compile)
            if self._finds_compiled and function._jit_compile:
                align_function_numbering()
        outermost = not self._calls
        if self.eager is not None:
            self.eager.compiled |= {code for code in [_code_of(function)] if code is not None}
        self._forward_calls += outermost
        self._calls.append((function, arguments))
        began = time.perf_counter()
        try:
            result = usual(function, *arguments, **named)
        finally:
            self._calls.pop()
        if outermost and function in self._updating:
            self._called_at = self._called_at if self._updated else began  # of a round, when it began
            shows = not self._wrappers.settings.changes.get("graph_step")  # as its eager form: neither batch nor loss
            self._updated |= {*self._updating[function]}
            self._update(self._updating[function][0], arguments if shows else (), _scalars(result) if shows else None)
        return result

    def _call_layer(self, usual: Callable[..., Any], layer: Any, *arguments: Any, **named: Any) -> Any:
        self._forward_calls += not self._calls
        self.layers[id(layer)] = layer
        if arguments:
            length = _length(arguments[0])  # in a trace, where it is known
            self._last_length = max(length, self._last_length) if self._calls else length or self._last_length
        return usual(layer, *arguments, **named)

    def _predict(self, usual: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._forward_calls += 1
        frame = users_frame() if self.optimizers else None
        if frame is not None:
            self._note_slow_line("predicts", frame)
        return usual(*arguments, **named)

    def _apply(self, usual: Callable[..., Any], optimizer: Any, *arguments: Any, **named: Any) -> Any:
        result = usual(optimizer, *arguments, **named)
        self.optimizers[id(optimizer)] = optimizer
        if self._calls:
            self._note_trace(optimizer)
            return result
        self._updated.add(id(optimizer))
        if self._in_strategy:
            self._updated_in_strategy = True
        else:
            if self.eager is not None:
                self.eager.note_update(optimizer, self._batch)
            self._update(id(optimizer), (), None)
        return result

    def _note_trace(self, optimizer: Any) -> None:
        """Note that the functions which are being traced update weights."""
        import tensorflow as tf

        graph, loops = tf.compat.v1.get_default_graph(), any(called in self._iterating for called, _ in self._calls)
        while graph is not None and not loops:
            loops = str(getattr(graph, "name", "")).startswith("Dataset_")  # of a loop over a dataset
            graph = getattr(graph, "outer_graph", None)
        if loops and (site := _site_of(self._calls[0][0], self._wrappers.directory)) is not None:
            self._hooks.loops_inside(site)
        for function, _ in self._calls:
            self._updating.setdefault(function, []).append(id(optimizer))
        if self._counter is None:
            self._counter = optimizer, keras_api(keras_of(optimizer)).updates_of(optimizer)
        if self.step_function is not None or self._in_strategy:
            return
        for function, arguments in self._calls:  # XLA compiles no function of datasets or iterators
            site = _site_of(function, self._wrappers.directory)
            if site is not None and not any(
                hasattr(value, "element_spec") or hasattr(value, "__next__") for value in arguments
            ):
                self.step_function = site
                self.jit_compile = bool(function._jit_compile)
                return

    def _train_on_batch(self, usual: Callable[..., Any], model: Any, x: Any, *arguments: Any, **named: Any) -> Any:
        self._called_at = time.perf_counter()
        with self._wrappers.inert():
            result = usual(model, x, *arguments, **named)
        self.optimizers[id(model.optimizer)] = model.optimizer
        self._update(id(model), (x,), _scalars(result))
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
            self._update(id(strategy), (), None)
        return result

    def _update(self, updater: int, arguments: tuple[Any, ...], logs: Any) -> None:
        """Note the end of a call that updates weights. It is a step if no dataset is read outside."""
        read = list(self._read_in_step.values())
        self._needed.update(read[-1:] if self._all_updates else read)
        self._updates += 1
        self._all_updates += 1
        self._logs = logs if logs is not None else self._logs
        if self.place is None and self._batch is not None and self._batch.iterator() is None:
            self._anew_at = self._batch.origin.place
            self._return_to_iterator_before()
        if self.place is not None or self._batch is not None:
            return
        self.by_call, self._batch = True, None
        if self._first_updating is None:
            self._first_updating = updater
            self._note_iterator(arguments)
        if updater == self._first_updating and len(self._updated | {updater}) >= self.updaters:
            self._updated.clear()
            self.work.append(self._forward_calls)
            self._forward_calls = 0
            length = next((length for value in arguments if (length := _length(value))), self._last_length)
            self._hooks.stepped(self._read_inside or self._workers * length, logs)

    def _note_iterator(self, arguments: tuple[Any, ...]) -> None:
        """Note what a call that updates weights reads from the iterator that it is given, if it is given one."""
        origins = (getattr(value, _ORIGIN, None) for value in arguments)
        origin = next(filter(None, origins), _Origin(None))
        self.dataset, self.parts = origin.dataset, origin.parts
        if not hasattr(self.dataset, "element_spec") or self._read_inside:
            return
        calls, _ = batch_calls(self.dataset)
        with self._wrappers.inert():
            batch = calls[0].used if calls else batch_length(self.dataset)
        optimizer, before = self._counter or (None, 0)
        updates = keras_api(keras_of(optimizer)).updates_of(optimizer) - before
        self._read_inside = self.parts * batch * max(1, updates)


def _with_knobs(wrappers: Wrappers, dataset: Any) -> Any:
    """Return the dataset with the changed options, and prefetched where the script does not."""
    changes, sites = wrappers.settings.changes, wrappers.settings.sites
    acting = {name: value for name, value in changes.items() if KNOBS[name].stage is Stage.OPTIONS}
    if "prefetch" in changes and "prefetch" not in sites:
        acting["prefetch"] = changes["prefetch"]
    if not acting or not hasattr(dataset, "with_options"):
        return dataset
    with wrappers.inert():
        return apply.pipeline(dataset, Configuration(acting), batched=True)


def _code_of(function: Any) -> CodeType | None:
    """Return the code that a `tf.function` compiles; None where it is not Python's."""
    called = inspect.unwrap(function.python_function)
    while isinstance(called, functools.partial):
        called = called.func
    called = getattr(called, "__func__", called)
    if not hasattr(called, "__code__"):  # an object; its class may compile the method itself
        called = getattr(type(called).__call__, "python_function", type(called).__call__)
    code = getattr(called, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _site_of(function: Any, directory: str) -> Site | None:
    """Return where a `tf.function` is defined; None where it is not Python's."""
    code = _code_of(function)
    if code is None:
        return None
    place = place_of(code.co_filename, code.co_firstlineno, directory)
    return Site(function=code.co_qualname, call="tf.function", order=0, **place)


def _is_read_by_for() -> bool:
    """Return whether the script reads by a `for`, which ends where `next()` would raise."""
    frame = users_frame()
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "FOR_ITER"


def _length(element: Any) -> int:
    """Return the examples in a batch; of a `PerReplica` those of all replicas."""
    import tensorflow as tf

    total = 0
    for leaf in tf.nest.flatten(element, expand_composites=False)[:1]:
        for part in getattr(leaf, "values", (leaf,)) if not hasattr(leaf, "flat_values") else (leaf,):
            shape = getattr(part, "shape", None)
            if shape is not None and len(shape) and shape[0]:
                total += int(shape[0])
    return total


def _scalars(result: Any) -> dict[str, Any]:
    """Return the single numbers that a step returned, by name where they have one."""
    if isinstance(result, tuple | list):
        result = {str(index): value for index, value in enumerate(result)}
    named = result if isinstance(result, dict) else {"loss": result}
    return {name: value for name, value in named.items() if _is_scalar(value)}


def _is_scalar(value: Any) -> bool:
    shape = getattr(value, "shape", () if isinstance(value, int | float) else None)
    return shape is not None and len(shape) == 0
