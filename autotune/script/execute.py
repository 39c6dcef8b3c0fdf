"""Run a user's script as its own program, and find out what it sets before it imports TensorFlow."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import importlib.abc
import itertools
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from autotune.data.facts import Site, WorkloadReference
from autotune.runtime import containment
from autotune.runtime.sources import directory_of, file_of, installed_packages, main_file_of, own_files
from autotune.runtime.waiting import lead_group
from autotune.script import children
from autotune.script.call_sites import calls_in
from autotune.script.sandbox import SideEffects

_ENDLESS = "__autotune_endless_range__"
_FRAMEWORKS = ("tensorflow", "keras", "tf_keras")


def run_as_main(reference: WorkloadReference, *, endless: Site | None = None) -> None:
    """Run the script as `python script.py args` does: as `__main__`, with its own arguments and search path.

    Args:
        reference: The script. What it raises passes through.
        endless: A call of `range()` in it that starts again when it ends, so that a trial's epochs are infinite.
    """
    directory = directory_of(reference)
    if directory not in sys.path[:1]:
        sys.path.insert(0, directory)
    sys.argv = [reference.shown, *reference.args]
    if reference.module is not None:  # which sets sys.argv[0] to the module's file
        runpy.run_module(str(reference.module), run_name="__main__", alter_sys=True)
        return
    main = ModuleType("__main__")
    main.__file__ = file = main_file_of(reference)
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main  # processes that it spawns load the program by this module's file
    tree = ast.parse(Path(file).read_bytes())
    if endless is not None:
        setattr(builtins, _ENDLESS, lambda *bounds: itertools.cycle(range(*bounds)))
        calls = calls_in(file, directory).values()
        places = [(call.lineno, call.col_offset) for site, call in calls if site.key == endless.key]
        for node in ast.walk(tree):
            func = node.func if isinstance(node, ast.Call) and (node.lineno, node.col_offset) in places else None
            if isinstance(func, ast.Name):
                func.id = _ENDLESS
    exec(compile(tree, file, "exec", dont_inherit=True), main.__dict__)  # the user's own program


def leave(status: int) -> NoReturn:
    """End this process at once: no `finally` and no `atexit` of the script runs."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have closed it
            stream.flush()
    os._exit(status)


class _FrameworkImported(BaseException):
    """TensorFlow is about to be imported."""


class _StopAtFramework(importlib.abc.MetaPathFinder):
    def __init__(self, answer: Callable[[], object]) -> None:
        self._answer = answer

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] in _FRAMEWORKS:
            if children.is_child():  # whose parent may wait for its result
                self._answer()
            raise _FrameworkImported
        return None


def discover(reference: WorkloadReference) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a script sets before it imports TensorFlow, and the installed packages it imports.

    The script runs in a fork up to that import, without output or input. TensorFlow must not be imported yet.
    """

    def run(pipe: int) -> None:
        children.watch_children(pipe, imports=True)
        before = dict(os.environ)

        def changed() -> dict[str, str]:
            return {name: text for name, text in os.environ.items() if before.get(name) != text}

        effects = SideEffects(reference, lambda _: os._exit(0))  # the survey reports it again
        effects.watch_writes()
        sys.meta_path.insert(0, _StopAtFramework(lambda: children.answer_for_parent(changed())))
        with contextlib.suppress(BaseException):  # if it fails, the survey says so
            run_as_main(reference)
        effects.training_begins()
        send_answer(pipe, changed())

    variables = run_in_fork(run)
    files = own_files(file_of(reference), Path(directory_of(reference)))
    return variables, [name for name in installed_packages(files) if name not in _FRAMEWORKS]


def send_answer(pipe: int, answer: dict[str, Any]) -> None:
    """Answer the process that has forked this one."""
    with open(pipe, "wb", closefd=False) as stream:
        stream.write(json.dumps(answer).encode() + b"\n")


def run_in_fork(run: Callable[[int], object], *, may_wait: bool = False) -> dict[str, Any]:
    """Run a function in a fork of this process, with a pipe for `send_answer`; return the answer, empty without one.

    The fork and the processes that it has started are killed. With `may_wait` they live on if the answer says that the
    fork is `waiting`.
    """
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            lead_group(parent)
            containment.renew(more_later=may_wait)
            run(writing)
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:  # its children may hold the pipe open for ever
        line = stream.readline()
    answer: dict[str, Any] = json.loads(line or "{}")
    if may_wait and "waiting" in answer:
        return answer
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return answer


def import_packages(names: Sequence[str]) -> None:
    """Import installed packages, as far as they can be."""
    for name in names:
        with contextlib.suppress(Exception):  # the script reports it when it needs the package
            importlib.import_module(name)
