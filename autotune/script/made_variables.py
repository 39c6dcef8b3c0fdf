"""Save the variables that a script makes, and restore their values in another process of the same script."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from autotune.data.record import Outcome
from autotune.recipe.keras_api import keras_api
from autotune.recipe.tf_private import keras, tf
from autotune.runtime.failures import TrainingFailed
from autotune.script.interpose import around
from autotune.training.branch import LARGEST_STATE_BYTES, write_state

_HALF_PRECISION = ("bfloat16", "float16")  # a file of arrays has no such type


class MadeVariables:
    """The variables that this process makes, in order of their creation.

    Those of metrics and of generators of random numbers are left out: they are no state of a training.
    """

    def __init__(self) -> None:
        self._made: list[weakref.ref[Any]] = []
        self._held: list[Any] | None = None
        self._inside_left_out = 0

    def watch(self) -> None:
        """Note every variable that is made from now on."""
        around(type(tf.Variable), "__call__", self._make)
        method = keras_api().metric_variable_method
        around(keras.metrics.Metric, method, self._leave_out)
        around(tf.random.Generator, "__init__", self._leave_out)
        if hasattr(keras, "random"):  # Keras 2 draws by TensorFlow's generators
            around(keras.random.SeedGenerator, "__init__", self._leave_out)

    def _make(self, usual: Callable[..., Any], kind: type, *arguments: Any, **named: Any) -> Any:
        made = usual(kind, *arguments, **named)
        # Other kinds are made inside such a call. Keras 2 makes its weights by that of version 1.
        if kind in (tf.Variable, tf.compat.v1.Variable) and not self._inside_left_out:
            self._made.append(weakref.ref(made))
        return made

    def _leave_out(self, usual: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._inside_left_out += 1
        try:
            return usual(*arguments, **named)
        finally:
            self._inside_left_out -= 1

    def hold(self) -> None:
        """Hold the variables that exist now: those of the training, once it has taken a step."""
        gc.collect()  # else it would depend on the collector which of the others are left
        alive = [variable for reference in self._made if (variable := reference()) is not None]
        self._held = [variable for variable in alive if _is_number(variable.dtype)]
        self._made.clear()

    def release(self) -> None:
        """Hold none any more: the script makes them anew."""
        self._held = None

    def save(self, file: Path) -> bool:
        """Save the values of those that are held; return whether there are any, small enough for that."""
        held = self._held or []
        sizes = [(variable.shape.num_elements() or 0) * variable.dtype.size for variable in held]
        if not held or sum(sizes) > LARGEST_STATE_BYTES:
            return False
        write_state(file, {str(place): _array(held[place]) for place in range(len(held))})
        return True

    def restore(self, file: str) -> None:
        """Give those that are held the values that another process has saved. Raises TrainingFailed if they differ."""
        held = self._held or []
        with np.load(file, allow_pickle=False) as saved:
            values = [saved[str(place)] for place in range(len(saved.files))]
        if len(values) != len(held):
            raise TrainingFailed(
                Outcome.ERROR,
                f"the script makes {len(held)} variables with this configuration, and {len(values)} in the baseline",
            )
        for place, (variable, value) in enumerate(zip(held, values, strict=True)):
            if not variable.shape.is_compatible_with(value.shape):
                raise TrainingFailed(
                    Outcome.ERROR,
                    f"variable {place + 1} of the script has the shape {tuple(variable.shape)} with this "
                    f"configuration, and {value.shape} in the baseline",
                )
        for variable, value in zip(held, values, strict=True):
            variable.assign(tf.cast(value, variable.dtype))


def _is_number(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex)


def _array(variable: Any) -> np.ndarray:
    is_half = variable.dtype.name in _HALF_PRECISION
    return np.asarray(tf.cast(variable, tf.float32) if is_half else variable.numpy())
