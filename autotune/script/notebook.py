"""Translate a notebook into a script whose lines have a cell, with stand-ins for what it finds in its kernel.

IPython's own parser reads the cells. The stand-ins are IPython's shell, its display, plots, and Google Colab.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from autotune.data.errors import ArgumentError, WorkloadError
from autotune.data.facts import WorkloadReference
from autotune.data.files import read_at_most
from autotune.runtime.failures import after_import, locate_user_line
from autotune.runtime.sources import SUFFIX, Cell, cells_of
from autotune.script.call_sites import users_frame

LARGEST_BYTES = 1 << 28  # of a notebook with its outputs
DEFINITIONS = "definitions"  # the folder of what processes that the notebook spawns load
_DROPPED_MAGICS = {"autoreload", "config", "load_ext", "matplotlib", "pinfo", "pinfo2", "tensorboard"}
_DROPPED_MAGICS |= {"reload_ext", "tensorflow_version"}
_COLAB = ("auth", "data_table", "drive", "files", "output", "patches", "runtime", "userdata", "widgets")
_INSTALLS = re.compile(r"\s*(?:pip3?|conda|mamba|uv|(?:python3?|\{?sys\.executable\}?) -m pip)\s")
_DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
SKIP_HINT = "Or give the cell a tag, such as skip, and pass --skip-cells skip."
_REMOVE = f"Remove it. {SKIP_HINT}"


def open_notebook(
    reference: WorkloadReference, folder: Path, skip_cells: str | None, say: Callable[[str], object]
) -> WorkloadReference:
    """Write a notebook's code cells as a script below a folder; return its reference, that of a script as it is.

    Each line keeps its place in its cell. `skip_cells`: tags of cells to leave out, with commas between. Raises
    `WorkloadError` for what cannot run as a script, and `ArgumentError` for cells of a script.
    """
    skipped, tags, last = set((skip_cells or "").split(",")) - {""}, set[str](), 0
    if not reference.is_notebook:
        if skipped:
            raise ArgumentError("--skip-cells is for notebooks")
        return reference
    path = Path(str(reference.file))
    cells, lines, counts, says = list[Cell](), [""], Counter[str](), dict[str, str]()
    for number, cell in enumerate(_read_cells(path), start=1):
        source, ran_as = "".join(cell["source"]), cell.get("execution_count")
        shown = f"{path.name}, cell {number}" + (f" (In [{ran_as}])" if ran_as not in (None, number) else "")
        if (ran_as or last) < last:
            says.setdefault("order", f"{shown} last ran before a cell above it; autotune runs them from top to bottom")
        tags |= (own := set(cell.get("metadata", {}).get("tags", ())))
        code, future, installs = _translate_cell("" if own & skipped else source, shown)
        if installs:
            says.setdefault("installs", f"{shown} and later ones install nothing here: install packages before")
        # Another number of epochs moves no call.
        digest = hashlib.sha256(re.sub(r"\d+", "", source).encode("utf-8", "replace")).hexdigest()[:16]
        counts[digest] += 1
        cells.append(Cell(len(lines) + 1, shown, f"{digest}-{counts[digest]}", source))
        length, last, lines[0] = source.count("\n") + 1, ran_as or last, future or lines[0]
        lines += [*[*code.split("\n"), *[""] * length][:length], "#"]  # which ends the cell
    if unknown := sorted(skipped - tags):
        _refuse(path, f"no code cell has the tag {unknown[0]!r}", f"Its tags: {', '.join(sorted(tags)) or 'none'}.")
    (folder / DEFINITIONS).mkdir(parents=True, exist_ok=True)
    file, tree = folder / f"{path.stem}.py", ast.parse("\n".join(lines))
    file.write_text("\n".join([*lines, ""]), encoding="utf-8")
    file.with_suffix(SUFFIX).write_text(json.dumps(cells), encoding="utf-8")
    cells_of.cache_clear()
    for node in tree.body[:]:  # a spawned process must find functions, and not train
        calls = isinstance(node, ast.Assign | ast.AnnAssign) and any(
            isinstance(part, ast.Call) for part in ast.walk(node)
        )
        if calls or not isinstance(node, _DEFINES):
            tree.body.remove(node)
    (folder / DEFINITIONS / file.name).write_text(ast.unparse(tree), encoding="utf-8")
    for text in says.values():
        say(text)
    return reference.model_copy(update={"file": str(file)})


def _refuse(where: object, why: str, hint: str) -> NoReturn:
    raise WorkloadError(f"{where}: {why}", hint=hint)


def _read_cells(path: Path) -> list[dict[str, Any]]:
    """Return the code cells of a notebook. Raises `WorkloadError` where it is none that Python can run."""
    try:
        notebook = json.loads(read_at_most(path, LARGEST_BYTES))
        about, version = notebook.get("metadata", {}), notebook["nbformat"]
        language = about.get("kernelspec", {}).get("language") or about.get("language_info", {}).get("name") or "python"
        cells = [cell for cell in notebook.get("cells", ()) if cell["cell_type"] == "code"]
        has_code = any("".join(cell["source"]).strip() for cell in cells)
    except (AttributeError, KeyError, TypeError, OSError, ValueError, RecursionError) as error:
        why = f"is no notebook's JSON: {type(error).__name__}: {error}"
        _refuse(path, why, "Open it in Jupyter, and save it again.")
    if version < 4:
        _refuse(path, f"has nbformat {version}; autotune reads 4", "Convert it: jupyter nbconvert --to notebook FILE")
    if language.lower() not in ("python", "ipython"):
        _refuse(path, f"is in {language}", "autotune tunes trainings in Python.")
    if not has_code:
        _refuse(path, "has no cell with code", "Give the notebook that trains.")
    return cells


def _translate_cell(source: str, shown: str) -> tuple[str, str, bool]:
    """Return a cell as Python code in the same lines, what must begin the script, and whether it installs packages."""
    future, installs, edits = "", False, list[tuple[int, int, str]]()
    try:
        code = "".join(_without_cell_magics(list(io.StringIO(f"{source}\n")), shown))
        text, tree = code.encode(), ast.parse(code)
        starts = [0, 0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
        inner = [part for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef) for part in ast.walk(node)]
        node: Any
        for node in ast.walk(tree):
            method = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            is_shells = method.startswith("get_ipython().")
            texts = [str(getattr(argument, "value", "")) for argument in node.args] if is_shells else []
            magic = texts[0] if method.endswith(").run_line_magic") and texts else ""
            runs = texts[0] if method.endswith((").system", ").getoutput")) and texts else ""
            new = "None"
            if magic in ("conda", "pip") or _INSTALLS.match(f"{runs} "):
                installs = True
            elif isinstance(node, ast.ImportFrom) and node.module == "__future__":
                future = ast.unparse(node)
            elif isinstance(node, ast.Await) and node not in inner:
                end = starts[node.end_lineno or 0] + (node.end_col_offset or 0)
                edits.append((end, end, ")"))
                node.end_lineno, node.end_col_offset = node.lineno, node.col_offset + len("await")
                new = "get_ipython().wait("
            elif magic in ("time", "timeit"):
                new = re.sub(r"^(?:-[nr] ?\d+ |-[a-z]+ )+", "", texts[1]) or new
            elif not magic or magic in ("cd", "env", "run", "set_env"):
                continue
            elif magic not in _DROPPED_MAGICS:
                _refuse(f"{shown}, line {node.lineno}", f"the magic %{magic} cannot run in a script", _REMOVE)
            begin, end = starts[node.lineno] + node.col_offset, starts[node.end_lineno] + node.end_col_offset
            edits.append((begin, end, new))
        for begin, end, new in sorted(edits, reverse=True):
            text = text[:begin] + new.encode() + text[end:]
        compile(text, shown, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = str(error.msg if isinstance(error, SyntaxError) else error)
        _refuse(f"{shown}{line}", why, f"Fix the cell; Python cannot run it. {SKIP_HINT}")
    return text.decode(), future, installs


def _without_cell_magics(lines: list[str], shown: str) -> list[str]:
    """Return the code that IPython makes of a cell, without its cell magics."""
    first = next((index for index, line in enumerate(lines) if line.strip()), 0)
    while lines[first].startswith("%%"):
        name, _, rest = lines[first][2:].strip().partition(" ")
        if name in ("bash", "sh", "writefile"):
            call = f"get_ipython().run_cell_magic({name!r}, {rest!r}, {''.join(lines[first + 1 :])!r})"
            return [*lines[:first], call]
        if name not in ("capture", "time", "timeit"):  # whose body runs as code
            _refuse(f"{shown}, line {first + 1}", f"the magic %%{name} cannot run in a script", _REMOVE)
        lines[first] = f"{rest} = get_ipython()\n" if name == "capture" and rest.isidentifier() else "\n"
        first = next((index for index in range(first + 1, len(lines)) if lines[index].strip()), first)
    return [*lines[:first], *_transform(lines[first:])]


def _transform(lines: list[str]) -> list[str]:
    """Return lines as the Python code that IPython makes of them, each in its place."""
    try:
        from IPython.core import inputtransformer2
    except ImportError as error:
        hint = "Run pip install ipython; the extra `notebook` has it."
        _refuse("a notebook needs IPython, which cannot be imported", str(error), hint)
    manager: Any = inputtransformer2.TransformerManager()  # type: ignore[no-untyped-call]
    for transform in manager.cleanup_transforms:
        lines = transform(lines)
    is_changed = True
    while is_changed:
        before = lines
        is_changed, lines = manager.do_one_token_transform(before)
        if len(lines) < len(before):  # a line with continuations has become one
            place = next(index for index, line in enumerate(lines) if line != before[index])
            lines = [*lines[: place + 1], *["\n"] * (len(before) - len(lines)), *lines[place + 1 :]]
    return lines


# ------------------------------------------------------------------------------------------ its kernel


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
        sys.stdout.flush()  # what was printed before comes first, also in a file
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
