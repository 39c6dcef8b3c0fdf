"""What the user's code does wrong: what its exceptions say, and a training by code that is only to define one."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.data.errors import WorkloadError
from autotune.data.printable import printable
from autotune.runtime.logs import tail

_SAYS_NOTHING = re.compile(
    r'Graph execution error:|Detected at node |<stack traces unavailable>|File "|Exception encountered when calling '
    r"|\d+ root error\(s\) found|Could not automatically infer the output shape "
)
"""Lines above the one in which TensorFlow or Keras says what went wrong."""
_IN_LAST_LINE = "in user code:"  # by AutoGraph, above the source lines
_ARGUMENTS = "Arguments received by "  # by Keras, below the cause


def cause_of(error: BaseException) -> str:
    """The exception's type and the innermost line that says something, `KeyError: 'labels'`."""
    kind = type(error).__name__
    quoted = isinstance(error, KeyError) and len(error.args) == 1 and "\n" in str(error.args[0])
    text = printable(str(error.args[0] if quoted else error)).partition(_ARGUMENTS)[0]
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if line and not _SAYS_NOTHING.match(line)]
    if not said:
        return f"{kind}: no message"
    line = said[-1] if _IN_LAST_LINE in said else re.sub(r"^\(\d+\) ", "", said[0])
    return line if line.startswith(f"{kind}: ") else f"{kind}: {line}"


def users_traceback(error: BaseException) -> str:
    """The traceback of `error` with the user's own frames only: not autotune's, Python's or a package's."""
    frames = users_frames(traceback.extract_tb(error.__traceback__))
    lines = ["Traceback (your code):\n", *traceback.format_list(frames)] if frames else []
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()


def users_frames(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames of a stack that are the user's own."""
    installed = (sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
    foreign = (str(Path(__file__).resolve().parents[1]) + os.sep, "<frozen", *installed)
    # A virtual environment may take its packages from another one's folder.
    inside = ("__autograph_generated", f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
    return [
        frame
        for frame in stack
        if not frame.filename.startswith(foreign) and not any(part in frame.filename for part in inside)
    ]


def users_line(stack: Iterable[traceback.FrameSummary]) -> str:
    """`train.py, line 12`: the innermost of the user's own lines."""
    return next((f"{each.filename}, line {each.lineno}" for each in users_frames(stack)[::-1]), "a package")


def exit_error(what: str, error: SystemExit, hint: str) -> WorkloadError:
    """The error of code that ends the process. What it printed before, as `argparse` does, says why."""
    sys.stdout.flush()
    log = Path("/proc/self/fd/2")
    line = users_line(traceback.extract_tb(error.__traceback__))
    printed = tail(log) if log.is_file() else ""
    return WorkloadError(f"{what} raised {cause_of(error)} in {line}", hint=hint, detail=printed)


@contextlib.contextmanager
def training_refused(what: str, hint: str) -> Iterator[None]:
    """End a training that begins in this context: it would run in each process before the timed one does.

    Raises `WorkloadError` with its line, `what` and `hint`.
    """
    found: list[WorkloadError] = []  # AutoGraph and the user's own `except` may hide it on its way up

    def refuse(*_: Any, **__: Any) -> None:
        line = users_line(traceback.extract_stack())
        found.append(WorkloadError(f"{line}: trains a model {what}", hint=hint))
        raise found[0]

    undo = contextlib.ExitStack()

    def wrap(keras: ModuleType) -> None:
        trains = (keras.Model, "fit"), (keras.Model, "train_on_batch"), (keras.optimizers.Optimizer, "apply")
        for owner, name in trains:
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

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The usual spec, whose loader calls the function as well."""
        spec = PathFinder.find_spec(name, path, target) if name == self._name else None
        if spec is not None and spec.loader is not None:
            usual = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                usual(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader
        return spec


ARGS_HINT = (
    "Give the file its own arguments after `--`, as in `autotune tune train.py -- --epochs 90`, or put what ends it "
    'under `if __name__ == "__main__":`.'
)
