"""Wraps what a script calls of TensorFlow and Keras, so that its values can be seen and set.

Wrappers act by the nearest frame outside of TensorFlow and Keras. They are inert inside `fit`, `evaluate`, `predict`
and `adapt`, which call the same functions for themselves.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.data.facts import Site
from autotune.runtime.failures import ImportHook
from autotune.script import tuned
from autotune.script.call_sites import site_of, users_frame
from autotune.script.dataset_trace import Made, batch_calls, tag
from autotune.script.settings import ARGUMENTS, CALLS, Settings


class Hooks:
    """What is done where a script trains, and in its own loop's steps; nothing, but for what is overridden."""

    def imported(self, name: str) -> None:
        """`tensorflow` or `keras` is imported, and wrapped."""

    def fit(self, model: Any, usual: Callable[..., Any], arguments: dict[str, Any], site: Site) -> Any:
        """In place of `model.fit` with these arguments, at this place."""
        return usual(model, **arguments)

    def stepped(self, examples: int, logs: Any) -> None:
        """A step of a loop's training is over; `logs` are the numbers that it returned."""

    def loops_inside(self, function: Site) -> None:
        """This `tf.function` trains on a whole dataset by one call, whose steps cannot be seen."""

    def epoch_began(self) -> None:
        """The dataset of a loop's training is read from its beginning."""

    def epoch_ended(self) -> None:
        """The dataset of a loop's training was read to its end."""

    def cuts_epoch(self, can_be_cut: Callable[[], bool]) -> bool:
        """Return whether the epoch of a loop is to end before its dataset does, where the script can bear that."""
        return False


class Wrappers:
    """The wrappers of one process.

    Args:
        settings: What is changed in the script.
        hooks: What is done where it trains.
        directory: The script's own.
        scratch: Takes the files of `Dataset.cache` in a trial: an old one would yield batches of another size.
    """

    def __init__(self, settings: Settings, hooks: Hooks, directory: str, scratch: Path | None = None) -> None:
        self.settings, self.hooks, self.directory, self.scratch = settings, hooks, directory, scratch
        self.compiled_at: Site | None = None
        """Where the script has compiled a model last, and with what `jit_compile`."""
        self.jit_compile: Any = "auto"
        self._inert = 0

    def install(self) -> None:
        """Wrap TensorFlow and Keras now where they are imported, and otherwise as soon as they are."""
        tuned.use(settings=self.settings)
        for name, wrap in (("tensorflow", self._wrap_tensorflow), ("keras", self._wrap_keras)):
            if name in sys.modules:
                wrap(sys.modules[name])
            else:
                sys.meta_path.insert(0, ImportHook(name, wrap))

    @property
    def active(self) -> bool:
        """Whether the script itself is calling."""
        return self._inert == 0

    @contextlib.contextmanager
    def inert(self) -> Iterator[None]:
        """What TensorFlow and Keras call for themselves."""
        self._inert += 1
        try:
            yield
        finally:
            self._inert -= 1

    def _wrap_tensorflow(self, tf: ModuleType) -> None:
        """Wrap what makes pipelines, and what sets threads."""
        dataset, threading, experimental = tf.data.Dataset, tf.config.threading, tf.config.experimental
        for name, knob in CALLS.items():
            self._wrap(dataset, name, functools.partial(self._makes, knob))
        self._wrap(dataset, "shuffle", _shuffle)
        self._wrap(dataset, "cache", self._cache)
        for owner, name, knob in (
            (threading, "set_intra_op_parallelism_threads", "intra_op_threads"),
            (threading, "set_inter_op_parallelism_threads", "inter_op_threads"),
            (experimental, "enable_tensor_float_32_execution", "tensor_float_32"),
        ):
            self._wrap(owner, name, functools.partial(self._set, knob))
        self.hooks.imported("tensorflow")

    def _wrap_keras(self, keras: ModuleType) -> None:
        """Wrap `fit`, `compile`, the dtype policy, and what must not be seen inside."""
        policy = keras.config.set_dtype_policy
        self._wrap(keras.config, "set_dtype_policy", functools.partial(self._set, "precision"))
        replace_everywhere(policy, keras.config.set_dtype_policy)
        for name, act in (("compile", self._compile), ("fit", self._fit)):
            self._wrap(owner_of(keras.Model, name), name, act)
        for name in ("evaluate", "predict"):
            around(owner_of(keras.Model, name), name, self._inertly)
        for layer in ("TextVectorization", "Normalization", "StringLookup", "IntegerLookup", "Discretization"):
            kind = getattr(keras.layers, layer, None)
            if kind is not None and "adapt" in vars(kind):
                around(kind, "adapt", self._inertly)
        self.hooks.imported("keras")

    def _wrap(self, owner: Any, name: str, act: Callable[..., Any]) -> None:
        """Where the script calls it, a function is `act` with the usual one, the place and the arguments."""
        if not hasattr(owner, name):  # another version's
            return
        signature = inspect.signature(getattr(owner, name))

        def seen(usual: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            frame = users_frame() if self.active else None
            if frame is None:
                return usual(*arguments, **named)
            try:
                bound = signature.bind(*arguments, **named)
            except TypeError:
                return usual(*arguments, **named)  # which says what is wrong
            return act(usual, site_of(frame, self.directory), bound)

        around(owner, name, seen)

    def _inertly(self, usual: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with self.inert():
            return usual(*arguments, **named)

    # ------------------------------------------------------------------------------------------ what acts

    def _set(self, knob: str, usual: Callable[..., Any], _: Site, bound: inspect.BoundArguments) -> Any:
        """A function that sets one value: the knob's own stays in force."""
        (value,) = bound.arguments.values()
        return usual(self.settings.value(knob, value))

    def _makes(self, knob: str, usual: Callable[..., Any], site: Site, bound: inspect.BoundArguments) -> Any:
        """A method of a dataset that takes a knob: the dataset that it makes remembers the call."""
        given = _whole(bound.arguments.get(ARGUMENTS[knob]))
        used = self.settings.at(knob, site, given)
        if used != given:
            bound.arguments[ARGUMENTS[knob]] = used or (None if knob == "num_parallel_calls" else 0)
        made = usual(*bound.args, **bound.kwargs)
        if given is None and knob == "batch_size":
            return made
        drops = bool(bound.arguments.get("drop_remainder", False))
        tag(made, Made(knob, site, given, used, drop_remainder=drops))
        if knob == "num_parallel_calls" and self.settings.at("cache", site, False):
            with self.inert():
                return made.cache()
        return made

    def _cache(self, usual: Callable[..., Any], site: Site, bound: inspect.BoundArguments) -> Any:
        """A cache in a file is the trial's own; in a long run with another batch size it has a name of its own."""
        file = bound.arguments.get("filename")
        if isinstance(file, str | os.PathLike) and os.fspath(file):
            calls, _ = batch_calls(bound.args[0])
            if self.scratch is not None:
                self.scratch.mkdir(exist_ok=True)
                bound.arguments["filename"] = str(self.scratch / f"cache-{os.getpid()}-{site.line}-{site.order}")
            elif calls and calls[0].used != calls[0].given:
                bound.arguments["filename"] = f"{os.fspath(file)}.batch-{calls[0].used}"
        return usual(*bound.args, **bound.kwargs)

    def _compile(self, usual: Callable[..., Any], site: Site, bound: inspect.BoundArguments) -> Any:
        bound.apply_defaults()
        self.compiled_at = site
        self.jit_compile = bound.arguments.get("jit_compile", self.jit_compile)
        if "jit_compile" in bound.arguments:
            bound.arguments["jit_compile"] = self.settings.value("jit_compile", self.jit_compile)
        return usual(*bound.args, **bound.kwargs)

    def _fit(self, usual: Callable[..., Any], site: Site, bound: inspect.BoundArguments) -> Any:
        bound.apply_defaults()
        _, *names = bound.arguments
        with self.inert():
            return self.hooks.fit(bound.args[0], usual, {name: bound.arguments[name] for name in names}, site)


def _shuffle(usual: Callable[..., Any], _: Site, bound: inspect.BoundArguments) -> Any:
    """A shuffle of batches holds as many examples as before."""
    size, calls = _whole(bound.arguments["buffer_size"]), batch_calls(bound.args[0])[0]
    if size is not None and calls and calls[0].used != calls[0].given:
        bound.arguments["buffer_size"] = max(1, round(size * calls[0].given / calls[0].used))
    return usual(*bound.args, **bound.kwargs)


def _whole(value: Any) -> int | None:
    """A Python or NumPy integer, or a constant tensor, as an int; None for anything else."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def around(owner: Any, name: str, act: Callable[..., Any]) -> None:
    """Call `act` in a function's place, with the usual one before its arguments."""
    usual = getattr(owner, name)

    @functools.wraps(usual)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return act(usual, *arguments, **named)

    setattr(owner, name, wrapped)


def replace_everywhere(original: Any, replacement: Any, *, below: tuple[str, ...] = ("keras",)) -> None:
    """Put a function in another's place, in every loaded module of these packages that has it."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(below) or not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if value is original:
                setattr(module, attribute, replacement)


def owner_of(model: Any, name: str) -> Any:
    """The class that defines a method: `load_model` compares `Model.compile` with `Trainer.compile`."""
    return next(each for each in model.__mro__ if name in vars(each))
