"""TensorFlow and Keras, each imported when a name of it is first asked for: a template is forked before that."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import tensorflow as tf
else:

    class _Lazy:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module(self._name), name)

    keras, tf = _Lazy("keras"), _Lazy("tensorflow")

__all__ = ["keras", "tf"]
