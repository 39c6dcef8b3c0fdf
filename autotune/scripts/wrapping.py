"""Wraps what a script calls of TensorFlow and Keras, so that its values can be seen and set.

Wrappers act by the nearest frame outside of TensorFlow and Keras. They are inert inside `fit`, `evaluate`, `predict`
and `adapt`, which call the same functions for themselves.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from autotune.scripts import tuned
from autotune.scripts.call_sites import site_of, users_frame
from autotune.scripts.facts import Site
from autotune.scripts.settings import Settings
from autotune.scripts.wrap_data import wrap_tensorflow
from autotune.scripts.wrap_keras import wrap_keras
from autotune.workloads.users_errors import OnceImported


class Hooks(Protocol):
    """What is done where a script trains."""

    def fit(self, model: Any, usual: Callable[..., Any], arguments: dict[str, Any], site: Site) -> Any:
        """In place of `model.fit` with these arguments, at this place."""


class Wrappers:
    """The wrappers of one process.

    Args:
        settings: What is changed in the script.
        hooks: What is done where it trains.
        directory: The script's own.
    """

    def __init__(self, settings: Settings, hooks: Hooks, directory: str) -> None:
        self.settings = settings
        self.hooks = hooks
        self.directory = directory
        self.scratch: Path | None = None
        """Takes the files of `Dataset.cache` in a trial: an old one would yield batches of another size."""
        self.compiled_at: Site | None = None
        """Where the script has compiled a model last."""
        self.given: dict[str, Any] = {}
        """What the script has passed for knobs without a call site, the last value by knob."""
        self._inert = 0
        self._waiting: dict[str, list[Callable[[ModuleType], None]]] = {}

    def install(self) -> None:
        """Wrap TensorFlow and Keras now where they are imported, and otherwise as soon as they are."""
        tuned.use(self.settings)
        self.once_imported("tensorflow", partial(wrap_tensorflow, self))
        self.once_imported("keras", partial(wrap_keras, self))

    def once_imported(self, name: str, act: Callable[[ModuleType], None]) -> None:
        """Call a function with a module, now or right after it is imported."""
        if name in sys.modules:
            act(sys.modules[name])
            return
        if name not in self._waiting:
            self._waiting[name] = []
            waiting = self._waiting[name]

            def act_all(module: ModuleType) -> None:
                for each in waiting:
                    each(module)

            sys.meta_path.insert(0, OnceImported(name, act_all))
        self._waiting[name].append(act)

    @property
    def active(self) -> bool:
        """Whether the script itself is calling."""
        return self._inert == 0

    @contextlib.contextmanager
    def inert(self) -> Iterator[None]:
        """What TensorFlow and Keras call for themselves."""
        self._inert += 1
        try:
            yield
        finally:
            self._inert -= 1

    def site(self) -> Site | None:
        """The script's call that is being made; None where it is not the script that calls."""
        frame = users_frame() if self.active else None
        return None if frame is None else site_of(frame, self.directory)
