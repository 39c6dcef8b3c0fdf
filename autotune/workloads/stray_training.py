"""Notices a training by code that is only to define one: it would run in each process before the timed one does."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from autotune.errors import WorkloadError
from autotune.workloads.users_errors import users_line


@contextlib.contextmanager
def training_refused(what: str, hint: str) -> Iterator[None]:
    """End a training that begins in this context. Raises `WorkloadError` with its line, `what` and `hint`."""
    found: list[WorkloadError] = []  # AutoGraph and the user's own `except` may hide it on its way up

    def refuse(*_: Any, **__: Any) -> None:
        line = users_line(traceback.extract_stack())
        found.append(WorkloadError(f"{line}: trains a model {what}", hint=hint))
        raise found[0]

    undo = contextlib.ExitStack()

    def wrap(keras: ModuleType) -> None:
        for owner, name in (
            (keras.Model, "fit"),
            (keras.Model, "train_on_batch"),
            (keras.optimizers.Optimizer, "apply"),
        ):
            inherited = name not in vars(owner)
            undo.callback(*((delattr, owner, name) if inherited else (setattr, owner, name, vars(owner)[name])))
            setattr(owner, name, refuse)

    if "keras" in sys.modules:
        wrap(sys.modules["keras"])
    else:
        finder = OnceImported("keras", wrap)
        sys.meta_path.insert(0, finder)
        undo.callback(sys.meta_path.remove, finder)
    try:
        yield
    finally:
        undo.close()
        if found:
            raise found[0]


class OnceImported(MetaPathFinder):
    """Calls a function with a module right after it is imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The usual spec, whose loader calls the function as well."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self._name else None
        if spec is not None and spec.loader is not None:
            usual = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                usual(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader
        return spec
