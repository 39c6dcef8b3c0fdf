"""The edit that makes a recipe permanent in a script: a unified diff of constants, by call site."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from autotune.data.models import KnobValue
from autotune.recipe.recipe import Recipe
from autotune.runtime.sources import own_files
from autotune.script.call_sites import calls_in, shown
from autotune.script.long_run import facts_in
from autotune.script.settings import ARGUMENTS, CALLS
from autotune.space.configuration import format_value

_LINES = {
    "precision": 'keras.config.set_dtype_policy("{value}")',
    "intra_op_threads": "tf.config.threading.set_intra_op_parallelism_threads({value})",
    "inter_op_threads": "tf.config.threading.set_inter_op_parallelism_threads({value})",
    "tensor_float_32": "tf.config.experimental.enable_tensor_float_32_execution({value})",
    "onednn": 'os.environ["TF_ENABLE_ONEDNN_OPTS"] = "{value:d}"',
}
"""Lines that set a knob, before anything of TensorFlow's is made; `onednn` before it is imported."""


class Edit(NamedTuple):
    """Text that takes the place of other text, by the offsets of its bytes."""

    begin: int
    end: int
    text: str


def script_diff(recipe: Recipe, script: Path) -> tuple[str, list[str]]:
    """A unified diff of the script's own files, and what it leaves to `autotune run`.

    Raises:
        RecipeError: The recipe is not of this script.
    """
    main = script.resolve()
    facts, directory = facts_in(recipe, main, str(script)), str(main.parent)
    files = own_files(main, main.parent)
    changes = dict(recipe.changes)
    edits: dict[Path, list[Edit]] = {file: [] for file in files}
    reached: set[str] = set()
    for file in files:
        for site, call in calls_in(str(file), directory).values():
            wanted = {
                ARGUMENTS[knob]: changes[knob]
                for knob, sites in facts.sites.items()
                if knob in changes
                and knob in ARGUMENTS
                and site.key in {each.key for each in sites}
                and (knob == "batch_size" or CALLS.get(site.call) == knob)  # not inside Keras's makers of datasets
            }
            if facts.compile_site is not None and site.key == facts.compile_site.key:
                wanted |= {knob: changes[knob] for knob in ("jit_compile", "steps_per_execution") if knob in changes}
                reached |= wanted.keys()
            at_fit = facts.fit_site is not None and site.key == facts.fit_site.key
            if at_fit and "batch_size" in changes and not facts.batch_given_as:
                wanted["batch_size"] = changes["batch_size"]
            reached |= {knob for knob in changes if ARGUMENTS.get(knob) in wanted}
            edits[file] += _arguments(file.read_bytes(), call, site.call, wanted)
    lines = {knob: _LINES[knob].format(value=changes[knob]) for knob in _LINES if knob in changes}
    edits[main] += _inserted(main.read_bytes(), lines)
    reached |= lines.keys()
    changes |= {name: value for name, value in recipe.configuration.items() if name == "global_batch"}
    rest = [f"{name}={format_value(value)}" for name, value in changes.items() if name not in reached]
    return "".join(_diff(file, each, directory) for file, each in edits.items()), rest


def _offset(source: bytes, line: int, column: int) -> int:
    return sum(map(len, source.splitlines(keepends=True)[: line - 1])) + column


def _arguments(source: bytes, node: ast.Call, name: str, wanted: Mapping[str, KnobValue]) -> list[Edit]:
    """The edits that give a call these arguments: in place of what it has, or as further keywords."""
    edits, more = [], []
    for keyword, value in wanted.items():
        text = "tf.data.AUTOTUNE" if value == "autotune" else repr(value)
        named = next((each.value for each in node.keywords if each.arg == keyword), None)
        first = node.args[0] if node.args and keyword in ("batch_size", "buffer_size") and name != "fit" else None
        old = named if named is not None else first
        if old is None:
            more.append(f"{keyword}={text}")
        else:
            begin = _offset(source, old.lineno, old.col_offset)
            edits.append(Edit(begin, _offset(source, old.end_lineno or 0, old.end_col_offset or 0), text))
    if more:
        end = len(source[: _offset(source, node.end_lineno or 0, node.end_col_offset or 0) - 1].rstrip())
        last = source[:end]
        separator = "" if last.endswith(b"(") else " " if last.endswith(b",") else ", "
        edits.append(Edit(end, end, separator + ", ".join(more)))
    return edits


def _inserted(source: bytes, lines: Mapping[str, str]) -> list[Edit]:
    """Lines after the imports at the top; those of the environment before them."""
    tree = ast.parse(source)
    imports = [each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    future = [each for each in imports if isinstance(each, ast.ImportFrom) and each.module == "__future__"]
    docstring = tree.body[:1] if ast.get_docstring(tree) is not None else []
    body = [each for each in tree.body if each not in (*future, *docstring)]
    edits = []
    if "onednn" in lines and body:
        begin = _offset(source, body[0].lineno, 0)
        edits.append(Edit(begin, begin, f"import os\n\n{lines['onednn']}\n\n"))
    late = [text for knob, text in lines.items() if knob != "onednn"]
    if late and imports:
        modules = {each.split(".", 1)[0] for each in late}
        bound = {name.asname or name.name for each in imports for name in each.names}
        needed = {"tf": "import tensorflow as tf", "keras": "import keras"}
        late = [needed[each] for each in sorted(modules - bound)] + late
        end = _offset(source, (imports[-1].end_lineno or 0) + 1, 0)
        edits.append(Edit(end, end, "\n" + "\n".join(late) + "\n"))
    return edits


def _diff(file: Path, edits: list[Edit], directory: str) -> str:
    source = file.read_bytes()
    changed = source
    for each in sorted(set(edits), key=lambda each: (-each.begin, each.text)):
        changed = changed[: each.begin] + each.text.encode() + changed[each.end :]
    before, after = (text.decode().splitlines(keepends=True) for text in (source, changed))
    name = shown(str(file), directory)
    return "".join(difflib.unified_diff(before, after, name, name))
