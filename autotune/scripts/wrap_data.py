"""Wraps what a script calls to make its pipelines, and to set TensorFlow's threads."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autotune.scripts.chain import Made, batch_calls, batch_ratio, tag
from autotune.scripts.facts import Site

if TYPE_CHECKING:
    from autotune.scripts.wrapping import Wrappers

AUTOTUNE = -1  # tf.data.AUTOTUNE


def wrap_tensorflow(wrappers: Wrappers, tf: ModuleType) -> None:
    """Wrap what makes pipelines, and what sets threads."""
    dataset = tf.data.Dataset
    for name in ("batch", "padded_batch", "ragged_batch"):
        _wrap_method(wrappers, dataset, name, partial(_batch, wrappers))
    for name in ("map", "interleave"):
        _wrap_method(wrappers, dataset, name, partial(_parallel, wrappers))
    _wrap_method(wrappers, dataset, "prefetch", partial(_prefetch, wrappers))
    _wrap_method(wrappers, dataset, "shuffle", partial(_shuffle, wrappers))
    _wrap_method(wrappers, dataset, "cache", partial(_cache, wrappers))
    threading = tf.config.threading
    for of in ("intra", "inter"):
        setting = f"set_{of}_op_parallelism_threads"
        _wrap_setting(wrappers, threading, setting, f"{of}_op_threads")
    _wrap_setting(wrappers, tf.config.experimental, "enable_tensor_float_32_execution", "tensor_float_32")


def _wrap_method(wrappers: Wrappers, owner: Any, name: str, act: Callable[..., Any]) -> None:
    usual = getattr(owner, name, None)
    if usual is None:  # another version's
        return
    signature = inspect.signature(usual)

    @functools.wraps(usual)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        site = wrappers.site()
        if site is None:
            return usual(*arguments, **named)
        try:
            bound = signature.bind(*arguments, **named)
        except TypeError:
            return usual(*arguments, **named)  # which says what is wrong
        return act(usual, site, bound)

    setattr(owner, name, wrapped)


def _batch(wrappers: Wrappers, usual: Callable[..., Any], site: Site, bound: inspect.BoundArguments) -> Any:
    given = bound.arguments["batch_size"]
    size = _whole(given)
    if size is None:
        return usual(*bound.args, **bound.kwargs)
    used = wrappers.settings.at("batch_size", site, size)
    if used != size:
        bound.arguments["batch_size"] = used
    drops = bool(bound.arguments.get("drop_remainder", False))
    made = Made("batch_size", site, size, used, drop_remainder=drops)
    return tag(usual(*bound.args, **bound.kwargs), made)


def _parallel(wrappers: Wrappers, usual: Callable[..., Any], site: Site, bound: inspect.BoundArguments) -> Any:
    given = bound.arguments.get("num_parallel_calls")
    used = wrappers.settings.at("num_parallel_calls", site, given, _as_calls)
    bound.arguments["num_parallel_calls"] = used
    made = tag(usual(*bound.args, **bound.kwargs), Made("num_parallel_calls", site, given, used))
    if wrappers.settings.at("cache", site, False):
        with wrappers.inert():
            return made.cache()
    return made


def _prefetch(wrappers: Wrappers, usual: Callable[..., Any], site: Site, bound: inspect.BoundArguments) -> Any:
    given = _whole(bound.arguments["buffer_size"])
    used = wrappers.settings.at("prefetch", site, given, _as_buffer)
    if used != given:
        bound.arguments["buffer_size"] = used
    return tag(usual(*bound.args, **bound.kwargs), Made("prefetch", site, given, used))


def _shuffle(wrappers: Wrappers, usual: Callable[..., Any], site: Site, bound: inspect.BoundArguments) -> Any:
    size, ratio = _whole(bound.arguments["buffer_size"]), batch_ratio(bound.args[0])
    if size is not None and ratio != 1.0:  # it shuffles batches: as many examples as before
        bound.arguments["buffer_size"] = max(1, round(size / ratio))
    return usual(*bound.args, **bound.kwargs)


def _cache(wrappers: Wrappers, usual: Callable[..., Any], site: Site, bound: inspect.BoundArguments) -> Any:
    """A cache in a file is the trial's own; in a long run with another batch size it has a name of its own."""
    file = bound.arguments.get("filename")
    if isinstance(file, str | os.PathLike) and os.fspath(file):
        calls, _ = batch_calls(bound.args[0])
        if wrappers.scratch is not None:
            wrappers.scratch.mkdir(exist_ok=True)
            name = f"cache-{os.getpid()}-{site.line}-{site.order}"
            bound.arguments["filename"] = str(wrappers.scratch / name)
        elif calls and calls[0].used != calls[0].given:
            bound.arguments["filename"] = f"{os.fspath(file)}.batch-{calls[0].used}"
    return usual(*bound.args, **bound.kwargs)


def _wrap_setting(wrappers: Wrappers, owner: Any, name: str, knob: str) -> None:
    """Wrap a function that sets one value: the knob's own stays in force."""
    usual = getattr(owner, name)

    @functools.wraps(usual)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if len(arguments) + len(named) != 1:
            return usual(*arguments, **named)  # which says what is wrong
        (value,) = (*arguments, *named.values())
        wrappers.given[knob] = value
        used = wrappers.settings.value(knob, value)
        return usual(*(used for _ in arguments), **dict.fromkeys(named, used))

    setattr(owner, name, wrapped)


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
