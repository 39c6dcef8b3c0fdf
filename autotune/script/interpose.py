"""Wrap what a script calls of TensorFlow and Keras, so that its values can be seen and changed.

Wrappers act by the nearest frame outside of TensorFlow and Keras. They are inert inside `fit`, `evaluate`, `predict`
and `adapt`, which call the same functions themselves.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from inspect import BoundArguments
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.data.errors import ApplyError
from autotune.data.facts import Site
from autotune.data.files import free_on_local_disk, make_scratch
from autotune.data.printable import memory_size
from autotune.recipe.keras_api import KERAS_PACKAGES, keras_api
from autotune.runtime.failures import after_import
from autotune.script.batched_map import map_batches, without_map
from autotune.script.call_sites import site_of, users_frame
from autotune.script.dataset_trace import DatasetCall, batch_calls, tag
from autotune.script.settings import ARGUMENTS, CALLS, Settings, serve_script
from autotune.space.keras_in_use import keras_of

_LAYERS_THAT_ADAPT = ("TextVectorization", "Normalization", "StringLookup", "IntegerLookup", "Discretization")


class Hooks:
    """Hooks called when a script trains, and in each step of a custom loop. By default they do nothing."""

    def imported(self, name: str) -> None:
        """Note that `tensorflow`, `keras` or `tf_keras` was imported and wrapped."""

    def fit(self, model: Any, usual: Callable[..., Any], arguments: dict[str, Any], site: Site) -> Any:
        """Run instead of `model.fit` with these arguments, at this site."""
        return usual(model, **arguments)

    def stepped(self, examples: int, logs: Any) -> None:
        """Note that a step of a training loop has ended; `logs` are the numbers that it returned."""

    def loops_inside(self, function: Site) -> None:
        """Note that this `tf.function` trains on a whole dataset in one call, so its steps cannot be observed."""

    def epoch_began(self) -> None:
        """Note that the dataset of a training loop is read from its beginning."""

    def epoch_ended(self) -> None:
        """Note that the dataset of a training loop was read to its end."""

    def cuts_epoch(self, can_be_cut: Callable[[], bool]) -> bool:
        """Return whether the epoch of a loop is to end before its dataset does, where the script permits that."""
        return False


class Wrappers:
    """The wrappers of one process.

    `scratch` takes the files of `Dataset.cache` in a trial: an old one would yield batches of another size.
    """

    def __init__(self, settings: Settings, hooks: Hooks, directory: str, scratch: Path | None = None) -> None:
        self.settings, self.hooks, self.directory, self.scratch = settings, hooks, directory, scratch
        self.compiled_at: Site | None = None  # the script's last `compile`, and its `jit_compile`
        self.jit_compile: Any = "auto"
        self.set_at: dict[str, Site] = {}  # where the script sets knobs that have no call sites, and `floatx`
        self._inert = 0

    def install(self) -> None:
        """Wrap TensorFlow and Keras now where they are imported, otherwise as soon as they are."""
        serve_script(settings=self.settings)
        after_import("tensorflow", self._wrap_tensorflow)
        for package in KERAS_PACKAGES:
            after_import(package, self._wrap_keras)

    @property
    def active(self) -> bool:
        """True if the script itself is calling."""
        return self._inert == 0

    @contextlib.contextmanager
    def inert(self) -> Iterator[None]:
        """Let calls pass unseen, such as those that TensorFlow and Keras make themselves."""
        self._inert += 1
        try:
            yield
        finally:
            self._inert -= 1

    def around(self, owner: Any, name: str, act: Callable[..., Any]) -> Callable[[], None]:
        """Wrap as the function `around` does, while the wrappers are not inert."""

        def act_or_pass(usual: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            return usual(*arguments, **named) if self._inert else act(usual, *arguments, **named)

        return around(owner, name, act_or_pass)

    def _wrap_tensorflow(self, tf: ModuleType) -> None:
        """Wrap the methods of datasets, and the functions that set threads."""
        dataset, threading, experimental = tf.data.Dataset, tf.config.threading, tf.config.experimental
        for name, knob in CALLS.items():
            self._at_site(dataset, name, functools.partial(self._call_dataset, knob))
        self._at_site(dataset, "shuffle", shuffle_examples)
        self._at_site(dataset, "flat_map", self._flat_map)
        self._at_site(dataset, "cache", self._cache)
        for owner, name, knob in (
            (threading, "set_intra_op_parallelism_threads", "intra_op_threads"),
            (threading, "set_inter_op_parallelism_threads", "inter_op_threads"),
            (experimental, "enable_tensor_float_32_execution", "tensor_float_32"),
            (tf.config, "run_functions_eagerly", "run_functions_eagerly"),  # no knob: it keeps its value
            (tf.config, "experimental_run_functions_eagerly", "run_functions_eagerly"),
        ):
            self._at_site(owner, name, functools.partial(self._set_knob, knob))
        self.hooks.imported("tensorflow")

    def _wrap_keras(self, keras: ModuleType) -> None:
        """Wrap `fit`, `compile` and the dtype policy; make the wrappers inert in what trains or reads by itself."""
        precision = keras.mixed_precision
        policy = precision.set_global_policy  # also `keras.config.set_dtype_policy`
        self._at_site(precision, "set_global_policy", functools.partial(self._set_knob, "precision"))
        replace_everywhere(policy, precision.set_global_policy, below=(keras.__name__,))
        setattr(sys.modules[policy.__module__], policy.__name__, policy)  # Keras 3 calls it for the first layer
        backend, floatx = keras.backend, keras.backend.set_floatx
        self._at_site(backend, "set_floatx", functools.partial(self._set_knob, "floatx"))  # no knob: it keeps its value
        replace_everywhere(floatx, backend.set_floatx, below=(keras.__name__,))
        self._at_site(owner_of(keras.Model, "compile"), "compile", self._compile)
        self._at_site(owner_of(keras.Model, "fit"), "fit", self._fit)
        for name in ("evaluate", "predict"):
            around(owner_of(keras.Model, name), name, self._call_inertly)
        for kind in (getattr(keras.layers, name, None) for name in _LAYERS_THAT_ADAPT):
            if kind is not None and "adapt" in vars(kind):
                around(kind, "adapt", self._call_inertly)
        self.hooks.imported(keras.__name__)

    def _at_site(self, owner: Any, name: str, act: Callable[..., Any]) -> None:
        """Replace the script's own calls of a function by `act(usual, site, arguments)`."""
        if not hasattr(owner, name):  # another version's
            return
        signature = inspect.signature(getattr(owner, name))

        def act_at_site(usual: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            frame = users_frame()
            if frame is None:
                return usual(*arguments, **named)
            try:
                bound = signature.bind(*arguments, **named)
            except TypeError:
                return usual(*arguments, **named)  # which raises its own error
            return act(usual, site_of(frame, self.directory), bound)

        self.around(owner, name, act_at_site)

    def _call_inertly(self, usual: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with self.inert():
            return usual(*arguments, **named)

    def _set_knob(self, knob: str, usual: Callable[..., Any], site: Site, bound: BoundArguments) -> Any:
        """Call a function that sets one value, with the knob's value instead of the script's."""
        self.set_at[knob] = site
        (value,) = bound.arguments.values()
        return usual(self.settings.value(knob, value))

    def _call_dataset(self, knob: str, usual: Callable[..., Any], site: Site, bound: BoundArguments) -> Any:
        """Call a method of a dataset that takes a knob. The new dataset remembers the call."""
        given = _as_int(bound.arguments.get(ARGUMENTS[knob]))
        if given is None and knob == "batch_size":
            return usual(*bound.args, **bound.kwargs)
        used = self.settings.at(knob, site, given)
        if used != given:
            bound.arguments[ARGUMENTS[knob]] = used or (None if knob == "num_parallel_calls" else 0)
        moved = None
        if self.settings.at("batched_map", site, False) and knob == "batch_size":
            with self.inert():
                bound.arguments["self"], moved = without_map(bound.args[0], self.settings.sites["batched_map"])
        dataset = usual(*bound.args, **bound.kwargs)
        drops = bool(bound.arguments.get("drop_remainder", False))
        tag(dataset, DatasetCall(knob, site, given, used, drop_remainder=drops, arguments=bound.arguments))
        if moved is not None:
            with self.inert():
                named = {name: value for name, value in moved.arguments.items() if name != "self"}
                dataset = map_batches(dataset, vectorized=self.settings.vectorized, **named)
            tag(dataset, moved)
        return self._cached(dataset, site) if knob == "num_parallel_calls" else dataset

    def _flat_map(self, usual: Callable[..., Any], site: Site, bound: BoundArguments) -> Any:
        dataset = usual(*bound.args, **bound.kwargs)
        tag(dataset, DatasetCall("cache", site, False, False))
        return self._cached(dataset, site)

    def _cached(self, dataset: Any, site: Site) -> Any:
        """Return a dataset with a cache behind it, if the configuration has one there."""
        if not self.settings.at("cache", site, False):
            return dataset
        wanted, folder, file = self.settings.cache_file_bytes, self.scratch or Path(tempfile.gettempdir()), ""
        if wanted and self.scratch is None and free_on_local_disk(folder) < 2 * wanted:  # a trial's was asked
            why = f"cache=true needs a file of {memory_size(wanted)}, and twice that is not free on a disk in {folder}"
            raise ApplyError(why, hint="Set TMPDIR to a folder on a local disk with more room.")
        if wanted:  # no cache in memory: a file that no other process reads, and that is removed
            file = str(make_scratch("autotune-cache-", folder) / "epoch")
        with self.inert():
            return dataset.cache(file)

    def _cache(self, usual: Callable[..., Any], site: Site, bound: BoundArguments) -> Any:
        """Give a trial a cache file of its own, and so a long run whose batch size is changed."""
        file = bound.arguments.get("filename")
        if isinstance(file, str | os.PathLike) and os.fspath(file):
            calls, _ = batch_calls(bound.args[0])
            if self.scratch is not None:
                self.scratch.mkdir(exist_ok=True)
                bound.arguments["filename"] = str(self.scratch / f"cache-{os.getpid()}-{site.line}-{site.order}")
            elif calls and calls[0].used != calls[0].given:
                bound.arguments["filename"] = f"{os.fspath(file)}.batch-{calls[0].used}"
        return usual(*bound.args, **bound.kwargs)

    def _compile(self, usual: Callable[..., Any], site: Site, bound: BoundArguments) -> Any:
        bound.apply_defaults()
        self.compiled_at = site
        self.set_at.pop("run_eagerly", None)
        if bound.arguments.get("run_eagerly"):
            self.set_at["run_eagerly"] = site
            bound.arguments["run_eagerly"] = not self.settings.changes.get("graph_step")
        if "jit_compile" in bound.arguments:
            api = keras_api(keras_of(bound.args[0]))
            self.jit_compile = api.jit_compile(bound.arguments["jit_compile"])
            bound.arguments["jit_compile"] = self.settings.value("jit_compile", self.jit_compile)
        return usual(*bound.args, **bound.kwargs)

    def _fit(self, usual: Callable[..., Any], site: Site, bound: BoundArguments) -> Any:
        bound.apply_defaults()
        receiver, *names = bound.arguments
        arguments, model = {name: bound.arguments[name] for name in names}, bound.arguments[receiver]
        if self.settings.changes.get("graph_step"):
            model.run_eagerly = False  # the script may have set the attribute
        with self.inert():
            return self.hooks.fit(model, usual, arguments, site)


def shuffle_examples(usual: Callable[..., Any], _: Site, bound: BoundArguments) -> Any:
    """Call `Dataset.shuffle`. Of batches, the buffer holds as many examples as the script's."""
    size, calls = _as_int(bound.arguments["buffer_size"]), batch_calls(bound.args[0])[0]
    if size is not None and calls and calls[0].used != calls[0].given:
        bound.arguments["buffer_size"] = max(1, round(size * calls[0].given / calls[0].used))
    return usual(*bound.args, **bound.kwargs)


def _as_int(value: Any) -> int | None:
    """Return a Python or NumPy integer, or a constant tensor, as an int; None for anything else."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def around(owner: Any, name: str, act: Callable[..., Any]) -> Callable[[], None]:
    """Call `act` in a function's place, with the usual function before its arguments; return what undoes that."""
    usual, own = getattr(owner, name), vars(owner).get(name)

    @functools.wraps(usual)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return act(usual, *arguments, **named)

    setattr(owner, name, wrapped)
    return functools.partial(delattr, owner, name) if own is None else functools.partial(setattr, owner, name, own)


def replace_everywhere(original: Any, replacement: Any, *, below: tuple[str, ...]) -> None:
    """Replace a function in every loaded module of these packages that has it."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(below) or not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if value is original:
                setattr(module, attribute, replacement)


def owner_of(model: Any, name: str) -> Any:
    """Return the class that defines a method: `load_model` compares `Model.compile` with `Trainer.compile`."""
    return next(kind for kind in model.__mro__ if name in vars(kind))
