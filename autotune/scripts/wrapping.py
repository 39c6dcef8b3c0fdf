"""Wraps what a script calls of TensorFlow and Keras, so that its values can be seen and set.

Wrappers act by the nearest frame outside of TensorFlow and Keras. They are inert inside `fit`, `evaluate`, `predict`
and `adapt`, which call the same functions for themselves.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Protocol

from autotune.scripts import tuned
from autotune.scripts.call_sites import site_of, users_frame
from autotune.scripts.chain import Made, batch_ratio, tag
from autotune.scripts.facts import Site
from autotune.scripts.settings import Settings
from autotune.scripts.side_effects import replace_everywhere
from autotune.workloads.stray_training import OnceImported

AUTOTUNE = -1  # tf.data.AUTOTUNE


class Hooks(Protocol):
    """What is done where a script trains."""

    def fit(self, model: Any, usual: Callable[..., Any], arguments: dict[str, Any], line: str) -> Any:
        """In place of `model.fit` with these arguments."""


class Wrappers:
    """The wrappers of one process.

    Args:
        settings: What is changed in the script.
        hooks: What is done where it trains.
        directory: The script's own.
    """

    def __init__(self, settings: Settings, hooks: Hooks, directory: str) -> None:
        self.settings = settings
        self.hooks = hooks
        self.directory = directory
        self.given: dict[str, Any] = {}
        """What the script has passed for knobs without a call site, the last value by knob."""
        self._inert = 0
        self._waiting: dict[str, list[Callable[[ModuleType], None]]] = {}

    def install(self) -> None:
        """Wrap TensorFlow and Keras now where they are imported, and otherwise as soon as they are."""
        tuned.use(self.settings)
        self.once_imported("tensorflow", self.wrap_tensorflow)
        self.once_imported("keras", self.wrap_keras)

    def once_imported(self, name: str, act: Callable[[ModuleType], None]) -> None:
        """Call a function with a module, now or right after it is imported."""
        if name in sys.modules:
            act(sys.modules[name])
            return
        if name not in self._waiting:
            self._waiting[name] = []
            waiting = self._waiting[name]

            def act_all(module: ModuleType) -> None:
                for each in waiting:
                    each(module)

            sys.meta_path.insert(0, OnceImported(name, act_all))
        self._waiting[name].append(act)

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

    def site(self) -> Site | None:
        """The script's call that is being made; None where it is not the script that calls."""
        frame = users_frame() if self.active else None
        return None if frame is None else site_of(frame, self.directory)

    # ---------------------------------------------------------------------------------------- tf.data, threads

    def wrap_tensorflow(self, tf: ModuleType) -> None:
        """Wrap what makes pipelines, and what sets threads."""
        dataset = tf.data.Dataset
        for name in ("batch", "padded_batch", "ragged_batch"):
            self._wrap_method(dataset, name, self._batch)
        for name in ("map", "interleave"):
            self._wrap_method(dataset, name, self._parallel)
        self._wrap_method(dataset, "prefetch", self._prefetch)
        self._wrap_method(dataset, "shuffle", self._shuffle)
        threading = tf.config.threading
        for of in ("intra", "inter"):
            setting = f"set_{of}_op_parallelism_threads"
            self._wrap_setting(threading, setting, f"{of}_op_threads")
        self._wrap_setting(tf.config.experimental, "enable_tensor_float_32_execution", "tensor_float_32")

    def _wrap_method(self, owner: Any, name: str, act: Callable[..., Any]) -> None:
        usual = getattr(owner, name, None)
        if usual is None:  # another version's
            return
        signature = inspect.signature(usual)

        @functools.wraps(usual)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            site = self.site()
            if site is None:
                return usual(*arguments, **named)
            try:
                bound = signature.bind(*arguments, **named)
            except TypeError:
                return usual(*arguments, **named)  # which says what is wrong
            return act(usual, site, bound)

        setattr(owner, name, wrapped)

    def _batch(self, usual: Callable[..., Any], site: Site, bound: inspect.BoundArguments) -> Any:
        given = bound.arguments["batch_size"]
        size = _whole(given)
        if size is None:
            return usual(*bound.args, **bound.kwargs)
        used = self.settings.at("batch_size", site, size)
        if used != size:
            bound.arguments["batch_size"] = used
        drops = bool(bound.arguments.get("drop_remainder", False))
        made = Made("batch_size", site, size, used, drop_remainder=drops)
        return tag(usual(*bound.args, **bound.kwargs), made)

    def _parallel(self, usual: Callable[..., Any], site: Site, bound: inspect.BoundArguments) -> Any:
        given = bound.arguments.get("num_parallel_calls")
        used = self.settings.at("num_parallel_calls", site, given, _as_calls)
        bound.arguments["num_parallel_calls"] = used
        made = tag(usual(*bound.args, **bound.kwargs), Made("num_parallel_calls", site, given, used))
        if self.settings.at("cache", site, False):
            with self.inert():
                return made.cache()
        return made

    def _prefetch(self, usual: Callable[..., Any], site: Site, bound: inspect.BoundArguments) -> Any:
        given = _whole(bound.arguments["buffer_size"])
        used = self.settings.at("prefetch", site, given, _as_buffer)
        if used != given:
            bound.arguments["buffer_size"] = used
        return tag(usual(*bound.args, **bound.kwargs), Made("prefetch", site, given, used))

    def _shuffle(self, usual: Callable[..., Any], site: Site, bound: inspect.BoundArguments) -> Any:
        size, ratio = _whole(bound.arguments["buffer_size"]), batch_ratio(bound.args[0])
        if size is not None and ratio != 1.0:  # it shuffles batches: as many examples as before
            bound.arguments["buffer_size"] = max(1, round(size / ratio))
        return usual(*bound.args, **bound.kwargs)

    def _wrap_setting(self, owner: Any, name: str, knob: str) -> None:
        """Wrap a function that sets one value: the knob's own stays in force."""
        usual = getattr(owner, name)

        @functools.wraps(usual)
        def wrapped(value: Any) -> Any:
            self.given[knob] = value
            return usual(self.settings.value(knob, value))

        setattr(owner, name, wrapped)

    # --------------------------------------------------------------------------------------------- Keras

    def wrap_keras(self, keras: ModuleType) -> None:
        """Wrap `fit`, `compile`, the dtype policy, and what must not be seen inside."""
        self._wrap_policy(keras)
        model = keras.Model
        self._wrap_compile(owner_of(model, "compile"))
        self._wrap_fit(owner_of(model, "fit"))
        for name in ("evaluate", "predict"):
            self._wrap_inert(owner_of(model, name), name)
        for layer in (
            "TextVectorization",
            "Normalization",
            "StringLookup",
            "IntegerLookup",
            "Discretization",
        ):
            kind = getattr(keras.layers, layer, None)
            if kind is not None and "adapt" in vars(kind):
                self._wrap_inert(kind, "adapt")

    def _wrap_policy(self, keras: ModuleType) -> None:
        usual = keras.config.set_dtype_policy

        @functools.wraps(usual)
        def wrapped(policy: Any) -> None:
            self.given["precision"] = getattr(policy, "name", policy)
            usual(self.settings.value("precision", policy))

        replace_everywhere(usual, wrapped, below=("keras",))

    def _wrap_compile(self, owner: Any) -> None:
        usual = owner.compile
        signature = inspect.signature(usual)

        @functools.wraps(usual)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if not self.active:
                return usual(*arguments, **named)
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            for knob in ("jit_compile", "steps_per_execution"):
                if knob in bound.arguments:
                    self.given[knob] = bound.arguments[knob]
                    bound.arguments[knob] = self.settings.value(knob, bound.arguments[knob])
            return usual(*bound.args, **bound.kwargs)

        owner.compile = wrapped

    def _wrap_fit(self, owner: Any) -> None:
        usual = owner.fit
        signature = inspect.signature(usual)

        @functools.wraps(usual)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            frame = users_frame() if self.active else None
            if frame is None:
                return usual(*arguments, **named)
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            model, given = bound.args[0], dict(bound.arguments)
            given.pop(next(iter(given)))
            with self.inert():
                site = site_of(frame, self.directory)
                return self.hooks.fit(model, usual, given, f"{site.file}, line {site.line}")

        owner.fit = wrapped

    def _wrap_inert(self, owner: Any, name: str) -> None:
        usual = getattr(owner, name)

        @functools.wraps(usual)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            with self.inert():
                return usual(*arguments, **named)

        setattr(owner, name, wrapped)


def owner_of(model: Any, name: str) -> Any:
    """The class that defines a method: `load_model` compares `Model.compile` with `Trainer.compile`."""
    return next(each for each in model.__mro__ if name in vars(each))


def _whole(value: Any) -> int | None:
    """A Python or NumPy integer, or a constant tensor, as an int; None for anything else."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _as_calls(value: Any) -> int | None:
    return AUTOTUNE if value == "autotune" else int(value) or None


def _as_buffer(value: Any) -> int:
    return AUTOTUNE if value == "autotune" else int(value)
