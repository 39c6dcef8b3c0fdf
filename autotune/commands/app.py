"""The command line's application, which the commands join."""

from __future__ import annotations

import ast
import inspect
import sys
from types import ModuleType

from cyclopts import App

app = App(
    name="autotune",
    help="Finds the fastest stable way to run a TensorFlow training on this machine.",
    help_epilogue="With --debug, an error shows its traceback.",
    version_flags=["--version"],
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    help_format="plaintext",
)


def restore_help(module: ModuleType) -> None:
    """Give a module's commands the help that `python -OO` has dropped: their docstrings, out of their source."""
    for node in ast.parse(inspect.getsource(module)).body if sys.flags.optimize >= 2 else ():
        if isinstance(node, ast.FunctionDef):
            getattr(module, node.name).__doc__ = ast.get_docstring(node)
