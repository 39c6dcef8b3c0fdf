"""How a process of a script leaves it: by a few steps of what is not tuned, and at once where it is done."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import keras

FEW_STEPS = 3
"""Of each `fit` that is not tuned."""


def leave(status: int) -> NoReturn:
    """End this process at once: no `finally` and no `atexit` of the script runs."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have closed it
            stream.flush()
    os._exit(status)


def few_steps(model: keras.Model, usual: Callable[..., Any], arguments: dict[str, Any], callbacks: list[Any]) -> Any:
    """Run a `fit` for a few steps: what it returns has the keys that the script may ask for."""
    few = {
        "steps_per_epoch": FEW_STEPS,
        "epochs": arguments["initial_epoch"] + 1,
        "callbacks": callbacks,
        "verbose": 0,
        "validation_freq": 1,
    }
    if arguments["validation_data"] is not None or arguments["validation_split"]:
        few["validation_steps"] = 1
    return usual(model, **(arguments | few))
