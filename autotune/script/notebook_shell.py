"""Stand-ins for what a notebook finds in its kernel: IPython's shell, its display, plots, and Google Colab."""

from __future__ import annotations

import ast
import functools
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.data.errors import WorkloadError
from autotune.runtime.failures import after_import, locate_user_line
from autotune.script.call_sites import users_frame
from autotune.script.notebook import SKIP_HINT

_COLAB = ("auth", "data_table", "drive", "files", "output", "patches", "runtime", "userdata", "widgets")


def stand_in(main: ModuleType, tree: ast.Module) -> None:
    """Give a notebook's translation what its kernel has."""
    sys.dont_write_bytecode = True  # beside the notebook
    shell, idle = _Shell(vars(main)), _Idle()
    vars(main).update(get_ipython=lambda: shell, display=idle)
    after_import("IPython", lambda module: vars(module).update(get_ipython=lambda: shell))
    after_import("IPython.display", lambda module: vars(module).update(display=idle, clear_output=idle))
    after_import("matplotlib", lambda module: module.use("Agg"))
    after_import("matplotlib.pyplot", lambda module: vars(module).update(show=idle))
    # A notebook that asks by `try: import google.colab` whether it runs on Colab must find out.
    imports = (node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    if any("google.colab" in ast.unparse(node) for node in imports) or "COLAB_RELEASE_TAG" in os.environ:
        sys.modules |= {name: _Colab(name) for name in ("google.colab", *(f"google.colab.{part}" for part in _COLAB))}


class _Idle:
    """Does nothing, whatever is called of it."""

    def __getattr__(self, name: str) -> Any:
        return _Idle()

    def __call__(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


class _Shell(_Idle):
    """The shell that `get_ipython()` returns. Its other methods do nothing."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.user_ns, self.config = names, dict[str, Any]()

    def run_line_magic(self, name: str, line: str, *_: Any) -> Any:
        line, before = _expand(line).strip(), sys.argv
        if name == "cd":
            os.chdir(os.path.expanduser(line.strip("'\"") or "~"))
        elif name == "run":
            sys.argv = [word for word in shlex.split(line) if word not in ("-i", "-t")]
            exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec", dont_inherit=True), self.user_ns)
            sys.argv = before
        elif name in ("env", "set_env"):
            key, separator, value = line.partition("=" if "=" in line else " ")
            os.environ.update({key.strip(): value.strip()} if separator else {})
            return os.environ.get(key)
        return None

    def run_cell_magic(self, name: str, line: str, body: str) -> None:
        if name != "writefile":
            subprocess.run([name, "-c", body], check=True)
            return
        with open(_expand(line.removeprefix("-a ")), "a" if line.startswith("-a ") else "w") as stream:
            stream.write(body)

    def system(self, command: str, output: int | None = None) -> Any:
        return subprocess.run(_expand(command), shell=True, check=False, text=True, stdout=output)

    def getoutput(self, command: str) -> Any:
        from IPython.utils.text import SList

        return SList(self.system(command, subprocess.PIPE).stdout.splitlines())

    @functools.cached_property
    def wait(self) -> Any:
        """The function that waits for what is awaited outside of functions; it is got before that is made."""
        import asyncio

        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop.run_until_complete


def _expand(text: str) -> str:
    """Return a command with the notebook's values of `{name}` and `$name`."""
    from IPython.utils.text import DollarFormatter

    frame = users_frame()
    try:
        return str(DollarFormatter().vformat(text, [], {} if frame is None else {**frame.f_globals, **frame.f_locals}))
    except Exception:  # as in IPython: it is no template
        return text


class _Colab(ModuleType):
    """A module of `google.colab` without Colab's page."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        own = f"{self.__name__}.{name}"
        return sys.modules.get(own) or functools.partial(_use_colab, own)


def _use_colab(name: str, folder: str = "", *_: Any, **__: Any) -> None:
    if not name.endswith((".clear", ".download")) and not (name.endswith(".mount") and os.path.isdir(folder)):
        why = f"{locate_user_line()}: calls {name}({folder}), which needs Colab's page"
        raise WorkloadError(why, hint=f"Put its data where the notebook looks for it. {SKIP_HINT}")
