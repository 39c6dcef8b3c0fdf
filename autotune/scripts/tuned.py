"""Values by name for code of a script's that computes with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from autotune.space.knobs import check_value

_settings: Any = None  # those of this process, where it is a trial or uses a recipe
given: dict[str, Any] = {}
"""What the script has asked for by name, with the values that it would use itself."""


def use(settings: Any) -> None:
    """Hand out the values of these settings from now on."""
    global _settings
    _settings = settings


def tuned(**values: Any) -> SimpleNamespace:
    """The values to use for knobs that the script computes with: its own, unless a trial or a recipe has others.

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
    if _settings is None:
        return SimpleNamespace(**values)
    return SimpleNamespace(**{name: _settings.value(name, value) for name, value in values.items()})
