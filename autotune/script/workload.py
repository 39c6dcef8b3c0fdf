"""A `Workload`: a training as functions of the user's. Imports no TensorFlow."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from autotune.data.errors import ConfigurationError, WorkloadError
from autotune.data.models import KnobValue
from autotune.data.printable import plural, with_article
from autotune.space.configuration import Configuration, DatasetConfig
from autotune.space.knobs import check_value, did_you_mean

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its data and its compile arguments, each made anew on request.

    Args:
        model: Returns a Keras model, not compiled unless `compile` is None.
        dataset: `dataset()` or `dataset(config)` with a `DatasetConfig`: returns a `tf.data.Dataset` of
            single examples `(x, y)` or `(x, y, sample_weight)`, x and y being tensors, tuples or dicts. The
            config is handed to a parameter called `config`, or to a first one without a default.
        compile: Returns the keyword arguments of `model.compile`: optimizer, loss, metrics. None where `model()`
            returns a compiled model.
        batch_size: Examples per step in the baseline.
        baseline: Knobs that the user would set anyway, by name; the rest is TensorFlow's default.
        validation: Like `dataset`: what `fit` is given as `validation_data`, once per epoch.
        batched: The dataset does its own batching, by `config.batch_size`.
        drop_remainder: Drop the last, smaller batch of an epoch.
        name: For the recipe, by which `autotune verify` knows it again; the variable's or file's name when None.

    Raises:
        WorkloadError: An argument has the wrong type, or a baseline knob or value does not exist.

    Example:
        >>> workload = Workload(model=build, dataset=examples, compile=lambda: {"loss": "mse"}, batch_size=32)
    """

    model: Callable[[], keras.Model]
    dataset: Callable[..., tf.data.Dataset]
    compile: Callable[[], Mapping[str, Any]] | None
    batch_size: int
    baseline: Mapping[str, KnobValue] = field(default_factory=dict)
    validation: Callable[..., tf.data.Dataset] | None = None
    batched: bool = False
    drop_remainder: bool = False
    name: str | None = None

    def __new__(cls, *positional: object, **named: object) -> Workload:
        """Refuse what would be a bare TypeError. Without any arguments, a copy is being made."""
        known = tuple(item.name for item in fields(cls))
        unknown = [name for name in named if name not in known]
        required = (item.name for item in fields(cls) if item.default is item.default_factory is MISSING)
        missing = [name for name in required if name not in named]
        hint = "Write Workload(model=…, dataset=…, compile=…, batch_size=…); `help(autotune.Workload)` has the rest."
        if positional:
            message = f"Workload(…) was given {plural(len(positional), 'argument')} without a name, expected none"
            raise WorkloadError(message, hint=hint)
        if unknown:
            message = f"Workload({unknown[0]}=…): there is no such argument"
            raise WorkloadError(message, hint=did_you_mean(unknown[0], known) + hint)
        if named and missing:
            raise WorkloadError(f"Workload({missing[0]}=…) is missing", hint=hint)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check every argument."""
        for part, kind, expected in (
            ("model", Callable, "a function"),
            ("dataset", Callable, "a function"),
            ("compile", Callable | None, "a function"),
            ("validation", Callable | None, "a function"),
            ("baseline", Mapping, "a dict of knobs"),
            ("batched", bool, "True or False"),
            ("drop_remainder", bool, "True or False"),
            ("name", str | None, "a string"),
        ):
            value = getattr(self, part)
            hint = "`help(autotune.Workload)` describes every argument."
            if expected == "a function":
                hint = f"Pass the function itself, without calling it: {part}=make_{part}."
            if not isinstance(value, kind):  # type: ignore[arg-type]  # mypy knows no bare Callable
                message = f"Workload({part}=…) is {with_article(type(value).__name__)}, expected {expected}"
                raise WorkloadError(message, hint=hint)
        try:
            check_value("batch_size", self.batch_size, where="Workload(batch_size=…)")
            for name, value in self.baseline.items():
                check_value(name, value, where="Workload(baseline=…)")
        except ConfigurationError as error:
            raise WorkloadError(error.message, hint=error.hint) from error
        if "batch_size" in self.baseline:
            raise WorkloadError("Workload(baseline=…) names batch_size", hint="Give it as Workload(batch_size=…).")
        if self.batched and not takes_config(self.dataset):
            message = "Workload(batched=True) with a dataset() that takes no config"
            raise WorkloadError(message, hint="Write `def dataset(config)` and batch by config.batch_size.")


_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


def takes_config(function: Callable[..., Any]) -> bool:
    """Return whether `function` takes a config: as a parameter `config`, or a first one without a default."""
    return _config_parameter(function) is not None


def call_with_config(function: Callable[..., Any], configuration: Configuration) -> Any:
    """Call `function(config)` if it takes a config, else `function()`."""
    parameter = _config_parameter(function)
    if parameter is None:
        return function()
    config = DatasetConfig.of(configuration)
    by_name = parameter.name == "config" and parameter.kind is not parameter.POSITIONAL_ONLY
    return function(config=config) if by_name else function(config)


def _config_parameter(function: Callable[..., Any]) -> inspect.Parameter | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    given = function.keywords if isinstance(function, functools.partial) else {}
    free = [parameter for parameter in parameters if parameter.name not in given]
    by_name = (_EITHER, inspect.Parameter.KEYWORD_ONLY)
    by_place = (_EITHER, inspect.Parameter.POSITIONAL_ONLY)
    named = [parameter for parameter in free if parameter.name == "config" and parameter.kind in by_name]
    first = [parameter for parameter in free[:1] if parameter.kind in by_place and parameter.default is parameter.empty]
    return next(iter(named + first), None)
