"""Wraps what a script calls of Keras: `fit`, `compile`, the dtype policy, and what must not be seen inside."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autotune.scripts.call_sites import site_of, users_frame
from autotune.scripts.side_effects import replace_everywhere

if TYPE_CHECKING:
    from autotune.scripts.wrapping import Wrappers


def wrap_keras(wrappers: Wrappers, keras: ModuleType) -> None:
    """Wrap `fit`, `compile`, the dtype policy, and what must not be seen inside."""
    _wrap_policy(wrappers, keras)
    model = keras.Model
    _wrap_compile(wrappers, owner_of(model, "compile"))
    _wrap_fit(wrappers, owner_of(model, "fit"))
    for name in ("evaluate", "predict"):
        _wrap_inert(wrappers, owner_of(model, name), name)
    for layer in ("TextVectorization", "Normalization", "StringLookup", "IntegerLookup", "Discretization"):
        kind = getattr(keras.layers, layer, None)
        if kind is not None and "adapt" in vars(kind):
            _wrap_inert(wrappers, kind, "adapt")


def _wrap_policy(wrappers: Wrappers, keras: ModuleType) -> None:
    usual = keras.config.set_dtype_policy

    @functools.wraps(usual)
    def wrapped(policy: Any) -> None:
        wrappers.given["precision"] = getattr(policy, "name", policy)
        usual(wrappers.settings.value("precision", policy))

    replace_everywhere(usual, wrapped, below=("keras",))


def _wrap_compile(wrappers: Wrappers, owner: Any) -> None:
    usual = owner.compile
    signature = inspect.signature(usual)

    @functools.wraps(usual)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if not wrappers.active:
            return usual(*arguments, **named)
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        wrappers.compiled_at = wrappers.site()
        for knob in ("jit_compile", "steps_per_execution"):
            if knob in bound.arguments:
                wrappers.given[knob] = bound.arguments[knob]
                bound.arguments[knob] = wrappers.settings.value(knob, bound.arguments[knob])
        return usual(*bound.args, **bound.kwargs)

    owner.compile = wrapped


def _wrap_fit(wrappers: Wrappers, owner: Any) -> None:
    usual = owner.fit
    signature = inspect.signature(usual)

    @functools.wraps(usual)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        frame = users_frame() if wrappers.active else None
        if frame is None:
            return usual(*arguments, **named)
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        model, given = bound.args[0], dict(bound.arguments)
        given.pop(next(iter(given)))
        with wrappers.inert():
            site = site_of(frame, wrappers.directory)
            return wrappers.hooks.fit(model, usual, given, site)

    owner.fit = wrapped


def _wrap_inert(wrappers: Wrappers, owner: Any, name: str) -> None:
    usual = getattr(owner, name)

    @functools.wraps(usual)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        with wrappers.inert():
            return usual(*arguments, **named)

    setattr(owner, name, wrapped)


def owner_of(model: Any, name: str) -> Any:
    """The class that defines a method: `load_model` compares `Model.compile` with `Trainer.compile`."""
    return next(each for each in model.__mro__ if name in vars(each))
