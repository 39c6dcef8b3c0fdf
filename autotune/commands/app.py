"""The command line's application, which the commands join."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

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


def restore_help(file: str, commands: dict[str, Any]) -> None:
    """Give commands the help that `python -OO` has dropped: their docstrings, out of their source."""
    if sys.flags.optimize < 2:
        return
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name in commands:
            commands[node.name].__doc__ = ast.get_docstring(node)
