"""Runs a user's script as its own program, and finds out what it sets before it imports TensorFlow."""

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
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from autotune.errors import WorkloadError
from autotune.scripts.call_sites import sites_in
from autotune.scripts.facts import Site
from autotune.scripts.side_effects import effects_of
from autotune.scripts.sources import fingerprint, installed_packages, own_files
from autotune.workloads.workload import WorkloadReference

_ENDLESS = "__autotune_endless_range__"
_FRAMEWORKS = ("tensorflow", "keras", "tf_keras")


def directory_of(reference: WorkloadReference) -> str:
    """The directory that comes first on the script's search path."""
    return reference.search_path[0]


def file_of(reference: WorkloadReference) -> Path:
    """The script's file; of a module's, as Python would find it. Imports nothing. Raises `WorkloadError`."""
    if reference.file is not None:
        return Path(reference.file)
    parts = str(reference.module).split(".")
    for entry in (*reference.search_path, *sys.path):
        stem = Path(entry or ".", *parts)
        for file in (stem / "__main__.py", stem.with_suffix(".py")):
            if file.is_file():
                return file.resolve()
    raise WorkloadError(
        f"no module {reference.module!r} that can be run",
        hint="It is looked for in the current directory and among the installed packages.",
    )


def run_as_main(reference: WorkloadReference, *, endless: Site | None = None) -> None:
    """Run the script as `python script.py args` does: as `__main__`, with its own arguments and search path.

    Args:
        reference: The script. What it raises passes through.
        endless: A call of `range()` in it that comes round again and again: the epochs of a trial have no end.
    """
    file = file_of(reference)
    if directory_of(reference) not in sys.path[:1]:
        sys.path.insert(0, directory_of(reference))
    sys.argv = [str(file) if reference.module else str(reference.shown or file), *reference.args]
    if reference.module is not None:
        runpy.run_module(str(reference.module), run_name="__main__", alter_sys=True)
        return
    main = ModuleType("__main__")
    main.__file__ = sys.argv[0] if Path(sys.argv[0]).is_file() else str(file)
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main  # processes that it spawns load the program by this module's file
    tree = ast.parse(file.read_bytes())
    if endless is not None:
        for site, call in sites_in(str(file), directory_of(reference)):
            if site.key == endless.key:
                _rename(tree, call.node, _ENDLESS)
        setattr(builtins, _ENDLESS, lambda *bounds: itertools.cycle(range(*bounds)))
    code = compile(tree, str(file), "exec", dont_inherit=True)
    exec(code, main.__dict__)  # the user's own program


def fingerprint_of_script(reference: WorkloadReference) -> str:
    """A hash of the script's own files. Raises `OSError` if one cannot be read."""
    return fingerprint(own_files(file_of(reference), Path(directory_of(reference))))


def _rename(tree: ast.Module, call: ast.Call, name: str) -> None:
    """Have a call, found by where it is in another tree of the same source, call something else."""
    place = call.lineno, call.col_offset
    for node in ast.walk(tree):
        func = node.func if isinstance(node, ast.Call) and (node.lineno, node.col_offset) == place else None
        if isinstance(func, ast.Name):
            func.id = name


class _Found(BaseException):
    """TensorFlow is about to be imported."""


class _StopAtFramework(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] in _FRAMEWORKS:
            raise _Found
        return None


def discover(reference: WorkloadReference) -> tuple[dict[str, str], list[str]]:
    """What a script sets in the environment before it imports TensorFlow, and the installed packages it imports.

    The script runs in a fork up to that import, without output or input. TensorFlow must not be imported yet.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.setpgid(0, 0)
        before = dict(os.environ)
        effects_of(reference, lambda _: os._exit(0)).watch_writes()  # the survey says it again
        try:
            sys.meta_path.insert(0, _StopAtFramework())
            run_as_main(reference)
        except BaseException:  # where it fails, the survey says so
            pass
        finally:
            changed = {name: text for name, text in os.environ.items() if before.get(name) != text}
            os.write(writing, json.dumps(changed).encode() + b"\n")
            os._exit(0)
    os.close(writing)
    changed = json.loads(answer_of(pid, reading) or "{}")
    files = own_files(file_of(reference), Path(directory_of(reference)))
    return changed, [each for each in installed_packages(files) if each not in _FRAMEWORKS]


def answer_of(pid: int, reading: int) -> bytes:
    """The line that a fork writes before it ends; empty without one. What the fork has started is ended with it."""
    with open(reading, "rb") as stream:  # its children may hold the pipe open for ever
        line = stream.readline()
    _end(pid)
    return line


def _end(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def import_packages(names: Sequence[str]) -> bool:
    """Import installed packages, as far as they can be; whether that has started threads."""
    before = threading.active_count()
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # the script says so when it needs it
            continue
    return threading.active_count() > before
