"""Finds a training that a script starts in another process: only the script's own process can be timed.

Forks keep the survey's wrappers. A fresh interpreter, as of `multiprocessing` by spawn or of `subprocess`, imports
`child_site/sitecustomize.py` when it starts, because the survey puts that folder on `PYTHONPATH`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from autotune.runtime.failures import ImportHook, locate_user_line

VARIABLE = "AUTOTUNE_SURVEY"  # the survey's process, its answer's descriptor, and whether an import ends it already
_FOLDER = str(Path(__file__).with_name("child_site"))


def watch_children(answer: int, *, imports: bool = False) -> None:
    """Let children of this process answer in its place.

    Args:
        answer: Where this process answers. It leads its process group.
        imports: Importing TensorFlow in a child ends this process; else training in one does.
    """
    os.environ[VARIABLE] = f"{os.getpid()}:{answer}:{'import' if imports else 'train'}"
    inherited = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", _FOLDER)]
    os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *inherited])


def is_child() -> bool:
    """Whether this process is a child of the one that called `watch_children`."""
    return os.environ.get(VARIABLE, "").partition(":")[0] not in ("", str(os.getpid()))


def answer_for_parent(told: Mapping[str, Any]) -> NoReturn:
    """Answer in the place of the process that called `watch_children`, and end that process's group and this process.

    The parent may wait for this process's result, so it must not go on.
    """
    pid, descriptor, _ = os.environ[VARIABLE].split(":")
    try:
        with open(f"/proc/{pid}/fd/{descriptor}", "wb") as stream:
            stream.write(json.dumps(told).encode() + b"\n")
        os.killpg(int(pid), signal.SIGKILL)
    finally:
        os._exit(1)


def refuse_training(*_: Any, **__: Any) -> NoReturn:
    """Answer that the script trains in a child process, with the line that trains."""
    answer_for_parent(
        {
            "message": f"{locate_user_line(traceback.extract_stack())}: trains in a process that the script starts, "
            "and only the script's own process can be timed",
            "hint": "Have the script train in its own process, such as by an option; or tune the file that trains.",
        }
    )


def watch_imports() -> None:
    """Watch a fresh interpreter that is about to import TensorFlow or Keras."""
    if os.environ[VARIABLE].endswith("import"):
        answer_for_parent({})
    sys.meta_path.insert(0, ImportHook("keras", _watch_training))


def _watch_training(keras: ModuleType) -> None:
    keras.Model.fit = keras.Model.train_on_batch = keras.optimizers.Optimizer.apply = refuse_training
