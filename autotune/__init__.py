"""autotune finds the fastest stable way to run a TensorFlow training on one machine.

    recipe = autotune.tune("train.py", budget="10m")      # before a long training
    recipe = autotune.Recipe.load("recipe.json")          # in the training code
    trials = autotune.load_history("results/train/…")     # in pandas

Names are imported when they are first used: `import autotune` loads neither Optuna nor pandas nor TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autotune.data.errors import AutotuneError as AutotuneError
from autotune.script.workload import Workload as Workload
from autotune.space.configuration import DatasetConfig as DatasetConfig
from autotune.version import __version__ as __version__

if TYPE_CHECKING:
    from autotune.front.tune import tune as tune
    from autotune.recipe.recipe import MachineMismatchWarning as MachineMismatchWarning
    from autotune.recipe.recipe import Recipe as Recipe
    from autotune.report.history import compare as compare
    from autotune.report.history import load_history as load_history
    from autotune.report.history import load_ops as load_ops
    from autotune.report.history import load_slices as load_slices
    from autotune.script.long_run import activate as activate
    from autotune.script.settings import steps as steps
    from autotune.script.settings import tuned as tuned
    from autotune.tuning.verify import Verification as Verification
    from autotune.tuning.verify import verify as verify

_MODULES = {
    "front.tune": "tune",
    "recipe.recipe": "MachineMismatchWarning Recipe",
    "report.history": "compare load_history load_ops load_slices",
    "script.long_run": "activate",
    "script.settings": "steps tuned",
    "tuning.verify": "Verification verify",
}
_LAZY = {name: f"autotune.{module}" for module, names in _MODULES.items() for name in names.split()}
__all__ = ["AutotuneError", "DatasetConfig", "Workload", "__version__", *_LAZY]  # noqa: PLE0604


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
