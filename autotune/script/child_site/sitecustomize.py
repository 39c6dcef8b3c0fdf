"""Watch a Python that a surveyed script starts, which imports this before anything else: see `script.children`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from typing import Any


class _BeforeTensorFlow:
    """Imports autotune only when TensorFlow or Keras is about to be imported: other programs start as fast as ever."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in ("tensorflow", "keras", "tf_keras"):
            return None
        sys.meta_path.remove(self)
        with contextlib.suppress(ImportError):  # another installation of Python, without autotune
            from autotune.script.children import watch_imports

            watch_imports()
        return importlib.util.find_spec(name)  # also by what has just been put on `sys.meta_path`


if "AUTOTUNE_SURVEY" in os.environ:
    sys.meta_path.insert(0, _BeforeTensorFlow())

_this = sys.modules.pop(__name__)
sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
try:
    importlib.import_module(__name__)  # the one that this one hides
except ImportError:
    sys.modules[__name__] = _this
