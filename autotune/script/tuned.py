"""`autotune.tuned` and `autotune.steps`: what a script may call to share its values and its steps."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from autotune.space.knobs import check_value

_settings: Any = None  # those of this process, where it is a trial or uses a recipe
_watch: Any = None
given: dict[str, Any] = {}
"""The script's own values of the knobs that it has asked for."""


def use(*, settings: Any = None, watch: Any = None) -> None:
    """Return the values of these settings to the script, and report its explicit steps to this watch, from now on."""
    global _settings, _watch
    _settings, _watch = settings or _settings, watch or _watch


def tuned(**values: Any) -> SimpleNamespace:
    """Return the values to use for knobs that the script computes with: its own, unless a trial or recipe has others.

    Args:
        values: The script's own values, by the names of knobs.

    Raises:
        ConfigurationError: There is no such knob, or it cannot have that value.

    Example:
        >>> settings = autotune.tuned(batch_size=32)
        >>> steps = examples // settings.batch_size
    """
    for name, value in values.items():
        check_value(name, value, where="autotune.tuned()")
    given.update(values)
    changed = {} if _settings is None else {name: _settings.value_once(name, values[name]) for name in values}
    return SimpleNamespace(**values | changed)


def steps(dataset: Any) -> Iterator[Any]:
    """Yield the elements of a dataset, each of which is one step of the training: for loops autotune cannot observe.

    Such a loop updates weights without an optimizer of Keras. Outside trials this only yields the elements.

    Args:
        dataset: The training data: a `tf.data.Dataset` of batches, or anything that can be iterated.

    Example:
        >>> for x, y in autotune.steps(batches):
        ...     my_step(x, y)
    """
    yield from dataset if _watch is None else _watch.explicit(dataset)
