"""autotune finds the fastest stable way to run a TensorFlow training on one machine.

    recipe = autotune.tune("train.py", budget="10m")      # before a long training
    recipe = autotune.Recipe.load("recipe.json")          # in the training code
    trials = autotune.load_history("results/train/…")     # in pandas

Names are imported when they are first used: `import autotune` loads neither Optuna nor pandas nor TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autotune.errors import AutotuneError
from autotune.version import __version__
from autotune.workloads.workload import DatasetConfig, Workload

if TYPE_CHECKING:
    from autotune.recipe.recipe import MachineMismatchWarning, Recipe
    from autotune.report.compare import compare
    from autotune.report.effects import knob_effects, load_ops, load_slices
    from autotune.report.frame import load_history
    from autotune.scripts.long_run import activate
    from autotune.scripts.tuned import steps, tuned
    from autotune.tuning.tune import tune
    from autotune.tuning.verifying import Verification, verify

_LAZY = {
    "MachineMismatchWarning": "autotune.recipe.recipe",
    "activate": "autotune.scripts.long_run",
    "steps": "autotune.scripts.tuned",
    "tuned": "autotune.scripts.tuned",
    "Recipe": "autotune.recipe.recipe",
    "Verification": "autotune.tuning.verifying",
    "compare": "autotune.report.compare",
    "knob_effects": "autotune.report.effects",
    "load_history": "autotune.report.frame",
    "load_ops": "autotune.report.effects",
    "load_slices": "autotune.report.effects",
    "tune": "autotune.tuning.tune",
    "verify": "autotune.tuning.verifying",
}

__all__ = [
    "AutotuneError",
    "DatasetConfig",
    "MachineMismatchWarning",
    "Recipe",
    "Verification",
    "Workload",
    "__version__",
    "activate",
    "compare",
    "knob_effects",
    "load_history",
    "load_ops",
    "load_slices",
    "steps",
    "tune",
    "tuned",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
