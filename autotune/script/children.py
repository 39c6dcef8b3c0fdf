"""Find a training in another process that a script starts: only the script's own process can be timed.

Forks keep the survey's wrappers. A fresh interpreter, as of `multiprocessing` by spawn or of `subprocess`, imports
`child_site/sitecustomize.py` when it starts, because the survey puts that folder on `PYTHONPATH`.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from autotune.recipe.keras_api import KERAS_PACKAGES, api_of
from autotune.runtime.failures import after_import, locate_user_line

_VARIABLE = "AUTOTUNE_SURVEY"  # the survey's process, its pipe, and whether an import already ends it
_FOLDER = str(Path(__file__).with_name("child_site"))


def watch_children(pipe: int, *, imports: bool = False) -> None:
    """Let children of this process, which leads its process group, answer in its place.

    With `imports` a child that imports TensorFlow does so, otherwise one that trains.
    """
    os.environ[_VARIABLE] = f"{os.getpid()}:{pipe}:{'import' if imports else 'train'}"
    os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *_inherited_path()])


def _inherited_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", _FOLDER)]


def stop_watching() -> None:
    """Leave the children that this process starts from now on alone."""
    os.environ.pop(_VARIABLE, None)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", _FOLDER)]
    os.environ.pop("PYTHONPATH", None)
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def is_child() -> bool:
    """Return whether this process is a child of the one that called `watch_children`."""
    return os.environ.get(_VARIABLE, "").partition(":")[0] not in ("", str(os.getpid()))


def answer_for_parent(answer: Mapping[str, Any]) -> NoReturn:
    """Answer instead of the process that called `watch_children`; kill its process group, and end this process.

    The parent may wait for this process's result, so it must not continue.
    """
    pid, pipe, _ = os.environ[_VARIABLE].split(":")
    try:
        with open(f"/proc/{pid}/fd/{pipe}", "wb") as stream:
            stream.write(json.dumps(answer).encode() + b"\n")
        os.killpg(int(pid), signal.SIGKILL)
    finally:
        os._exit(1)


def refuse_training(*_: Any, **__: Any) -> NoReturn:
    """Answer that the script trains in a child process, with the line that trains."""
    line = locate_user_line(traceback.extract_stack())
    answer_for_parent(
        {
            "message": f"{line}: trains in a process that the script starts, and only the script's own process can be "
            "timed",
            "hint": "Have the script train in its own process, such as by an option; or tune the file that trains.",
        }
    )


def watch_imports() -> None:
    """Watch a fresh interpreter that is about to import TensorFlow or Keras."""
    if os.environ[_VARIABLE].endswith("import"):
        answer_for_parent({})
    for package in KERAS_PACKAGES:
        after_import(package, _refuse_all_training)


def _refuse_all_training(keras: ModuleType) -> None:
    for owner, name in api_of(keras).training_calls():
        setattr(owner, name, refuse_training)
