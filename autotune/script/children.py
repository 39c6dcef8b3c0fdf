"""Find a training in another process that a script starts: only the script's own process can be timed.

Forks keep the survey's wrappers. A fresh interpreter, as of `multiprocessing` by spawn or of `subprocess`, imports
`child_site/sitecustomize.py` when it starts, because the survey puts that folder on `PYTHONPATH`.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from autotune.data.errors import WorkloadError
from autotune.data.facts import WorkloadReference
from autotune.data.printable import MASK, is_credential, mask_arguments
from autotune.recipe.keras_api import KERAS_PACKAGES, api_of
from autotune.runtime.failures import after_import, locate_user_line
from autotune.runtime.sources import file_of
from autotune.runtime.supervisor import send_answer

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
    if paths := _inherited_path():
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)


def is_child() -> bool:
    """Return whether this process is a child of the one that called `watch_children`."""
    return os.environ.get(_VARIABLE, "").partition(":")[0] not in ("", str(os.getpid()))


def answer_for_parent(answer: Mapping[str, Any]) -> NoReturn:
    """Answer instead of the process that called `watch_children`; kill its process group, and end this process.

    The parent may wait for this process's result, so it must not continue.
    """
    pid, pipe, _ = os.environ[_VARIABLE].split(":")
    try:
        send_answer(os.open(f"/proc/{pid}/fd/{pipe}", os.O_WRONLY), answer)
        os.killpg(int(pid), signal.SIGKILL)
    finally:
        os._exit(1)


def refuse_restarts(
    reference: WorkloadReference, refuse: Callable[[WorkloadError], object] | None = None, *, run: Sequence[str] = ()
) -> dict[str, str]:
    """Have `refuse` called where the script replaces this process: often it sets what Python reads when it starts.

    Return the environment to compare with. `refuse` takes the error, which is raised where it is None. A script that
    runs by `autotune run`, with these words, may start another program, as it may have trained.
    """
    process, before, file = os.getpid(), dict(os.environ), os.path.realpath(file_of(reference))
    command = f"autotune run {shlex.join(run)}" if run else "autotune tune"
    script = f"-m {reference.module}" if reference.file is None else shlex.quote(reference.shown)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "os.exec" or os.getpid() != process:
            return
        line, words = locate_user_line(), list(map(os.fsdecode, arguments[1]))
        own = [index for index, word in enumerate(words) if word == reference.module or os.path.realpath(word) == file]
        if own:
            given = {os.fsdecode(name): os.fsdecode(text) for name, text in (arguments[2] or os.environ).items()}
            changed = {name: text for name, text in given.items() if before.get(name) != text}
            hint = f"Start it like that: `{_command(changed, f'{command} {script}', words[own[0] + 1 :])}`."
            error = WorkloadError(f"{line}: starts the script again in place of its process", hint=hint)
        elif not run:
            shown = shlex.join(mask_arguments(words))
            error = WorkloadError(f"{line}: replaces the process by `{shown}`", hint="Tune the program that trains.")
        else:
            return
        if refuse is None:
            raise error
        refuse(error)

    sys.addaudithook(audit)
    return before


def _command(variables: Mapping[str, str], start: str, args: Sequence[str]) -> str:
    """Return a command line that sets variables, begins with `start` and gives a script arguments."""
    sets = [f"{name}={MASK if is_credential(name) else shlex.quote(text)}" for name, text in variables.items()]
    dashes = ["--"] if args and start.startswith("autotune tune ") else []
    return " ".join([*sets, start, *dashes, *map(shlex.quote, mask_arguments(args))])


def refuse_training(*_: Any, **__: Any) -> NoReturn:
    """Answer that the script trains in a child process, with the line that trains."""
    line, trains = locate_user_line(), "the file that trains"
    if sys.argv[0] in sys.orig_argv:  # this is no fork, and runs a file
        own = {name: text for name, text in os.environ.items() if name.startswith("PYTHON") and name != "PYTHONPATH"}
        trains += f": `{_command(own, f'autotune tune {shlex.quote(sys.argv[0])}', sys.argv[1:])}`"
    why = f"{line}: trains in a process that the script starts, and only the script's own process can be timed"
    hint = f"Have the script train in its own process, such as by an option; or tune {trains}."
    answer_for_parent({"message": why, "hint": hint})


def watch_imports() -> None:
    """Watch a fresh interpreter that is about to import TensorFlow or Keras."""
    if os.environ[_VARIABLE].endswith("import"):
        answer_for_parent({})

    def refuse_all(keras: ModuleType) -> None:
        for owner, name in api_of(keras).training_calls():
            setattr(owner, name, refuse_training)

    for package in KERAS_PACKAGES:
        after_import(package, refuse_all)
