"""The Keras that this process trains with: Keras 3 (`keras`) or Keras 2 (`tf_keras`). Both may be imported."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from autotune.data.facts import KerasVersion

LEGACY_VARIABLE = "TF_USE_LEGACY_KERAS"
"""Makes `tf.keras` Keras 2."""
_version = KerasVersion.KERAS_3


def uses_legacy_keras(variables: Mapping[str, str]) -> bool:
    """Return whether `tf.keras` is Keras 2 with these environment variables."""
    return variables.get(LEGACY_VARIABLE) in ("true", "True", "1")


def use_keras(version: KerasVersion) -> None:
    """Note which Keras this process trains with."""
    global _version
    _version = version


def keras_in_use() -> KerasVersion:
    """Return the Keras that this process trains with; Keras 3 where nothing has said otherwise."""
    return _version


def keras_module() -> Any:
    """Return the package of the Keras that this process trains with, imported now where that was not done."""
    return importlib.import_module(_version.package)


def keras_of(value: Any) -> KerasVersion | None:
    """Return the Keras of a model, optimizer or other object; None for an object of neither."""
    packages = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    return next((version for version in KerasVersion if version.package in packages), None)
