"""Run a user's script as its own program, and find out what it sets before it imports TensorFlow."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import importlib.abc
import itertools
import os
import runpy
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.data.facts import Site, WorkloadReference
from autotune.runtime import containment
from autotune.runtime.sources import directory_of, file_of, installed_packages, main_file_of, own_files
from autotune.runtime.supervisor import run_in_fork, send_answer
from autotune.script import children
from autotune.script.call_sites import calls_in
from autotune.script.notebook import DEFINITIONS, stand_in
from autotune.script.sandbox import SideEffects

_RANGE = "__autotune_range_{}_{}__"  # a name of `range`, by line and column of the call
_FRAMEWORKS = ("tensorflow", "keras", "tf_keras")


_process = 0  # that runs the script
_edits: list[Callable[[ast.Module, str], object]] = []  # of the syntax trees of the script and what it imports


def note_process() -> None:
    """Note that this process runs the script; forks that the script makes by `os.fork` do not."""
    global _process
    _process = os.getpid()


def is_scripts_fork() -> bool:
    """Return whether the script has made this process by `os.fork`."""
    return os.getpid() != _process


def run_as_main(reference: WorkloadReference, *, endless: Site | None = None, adjustable: bool = False) -> None:
    """Run the script as `python script.py args` does: as `__main__`, with its own arguments and search path.

    Args:
        reference: The script. What it raises passes through.
        endless: A call of `range()` in it that starts again when it ends, so that a trial's epochs are infinite.
        adjustable: `make_endless` may be called while the script runs.
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
    if reference.is_notebook:
        os.chdir(directory)
        stand_in(main, tree)
        main.__file__ = os.path.join(os.path.dirname(file), DEFINITIONS, os.path.basename(file))
    for edit in _edits:
        edit(tree, file)
    if adjustable or endless is not None:
        _name_ranges(tree)
    if endless is not None:
        make_endless(endless, reference)
    exec(compile(tree, file, "exec", dont_inherit=True), main.__dict__)  # the user's own program


def edit_trees(edit: Callable[[ast.Module, str], object], files: Collection[Path]) -> None:
    """Edit the syntax trees of these files of the script's when they are compiled. Positions must stay."""
    _edits.append(edit)
    usual = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> Any:
        if Path(loader.path).resolve() not in files:
            return usual(loader, name)
        tree = ast.parse(loader.get_data(loader.path))
        edit(tree, loader.path)
        return compile(tree, loader.path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_code  # type: ignore[assignment,method-assign]


def _name_ranges(tree: ast.Module) -> None:
    """Give the calls of `range()` in all `for` statements names of their own."""
    if any(_binds_range(node) for node in ast.walk(tree)):
        return
    for loop in ast.walk(tree):
        for node in ast.walk(loop.iter) if isinstance(loop, ast.For) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
                node.func.id = _RANGE.format(node.lineno, node.col_offset)
                setattr(builtins, node.func.id, range)


def _binds_range(node: ast.AST) -> bool:
    """Return whether a script gives the name `range` to something of its own."""
    names = [getattr(node, name, None) for name in ("asname", "name", "arg")]
    return "range" in names or (
        isinstance(node, ast.Name) and node.id == "range" and not isinstance(node.ctx, ast.Load)
    )


def make_endless(site: Site, reference: WorkloadReference) -> None:
    """Have a call of `range()` start again when it ends, in a script that `run_as_main` runs."""
    for found, call in calls_in(main_file_of(reference), directory_of(reference)).values():
        if found.key == site.key:
            name = _RANGE.format(call.lineno, call.col_offset)
            setattr(builtins, name, lambda *bounds: itertools.cycle(range(*bounds)))


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
        containment.renew()
        children.watch_children(pipe, imports=True)
        before = dict(os.environ)

        def changed() -> dict[str, str]:
            return {name: text for name, text in os.environ.items() if before.get(name) != text}

        effects = SideEffects(reference, lambda _: os._exit(0))  # the survey reports it again
        effects.watch_writes()
        sys.meta_path.insert(0, _StopAtFramework(lambda: children.answer_for_parent({"variables": changed()})))
        with contextlib.suppress(BaseException):  # if it fails, the survey says so
            run_as_main(reference)
        send_answer(pipe, {"variables": changed()})

    variables = run_in_fork(run).get("variables", {})
    files = own_files(file_of(reference), Path(directory_of(reference)))
    return variables, [name for name in installed_packages(files) if name not in _FRAMEWORKS]


def import_packages(names: Sequence[str]) -> None:
    """Import installed packages, as far as they can be."""
    for name in names:
        with contextlib.suppress(Exception):  # the script reports it when it needs the package
            importlib.import_module(name)
