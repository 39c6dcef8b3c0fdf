"""The edit that makes a recipe permanent in a script: a unified diff of constants and inserted lines."""

from __future__ import annotations

import ast
import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from autotune.data.facts import KerasVersion, ScriptFacts, Site
from autotune.data.files import make_scratch
from autotune.data.models import KnobValue
from autotune.recipe.recipe import Recipe
from autotune.runtime.sources import cell_at, cells_of, file_of, own_files, parse_source
from autotune.script.call_sites import calls_in, functions_in, shown, uses_shapes
from autotune.script.inline_steps import InlineStep, find_inline_steps, is_moved, move_inline_steps
from autotune.script.loading import parse_reference
from autotune.script.long_run import facts_in
from autotune.script.notebook import open_notebook
from autotune.script.settings import ARGUMENTS, CALLS
from autotune.space.configuration import format_value
from autotune.space.freed_memory import MALLOPT

_LINES = {
    "precision": 'keras.config.set_dtype_policy("{value}")',
    "intra_op_threads": "tf.config.threading.set_intra_op_parallelism_threads({value})",
    "inter_op_threads": "tf.config.threading.set_inter_op_parallelism_threads({value})",
    "tensor_float_32": "tf.config.experimental.enable_tensor_float_32_execution({value})",
    "onednn": 'os.environ["TF_ENABLE_ONEDNN_OPTS"] = "{value:d}"',
}
"""Lines that set a knob, before anything of TensorFlow's is created; `onednn` before it is imported."""
_OPTIONS = {
    "data_threads": "threading.private_threadpool_size",
    "deterministic": "deterministic",
    "data_autotune": "autotune.enabled",
}
"""The attributes of `tf.data.Options` that set a knob."""
_BEFORE_IMPORTS = {"onednn": "import os", "keep_freed_memory": "import ctypes"}  # lines at the top, and what they need
_KERAS_2_PRECISION = 'tf_keras.mixed_precision.set_global_policy("{value}")'
_FRAMEWORK = re.compile(r"\b(tensorflow|keras|tf_keras)\b")
_IMPORTS = {"tf": "import tensorflow as tf", "keras": "import keras", "tf_keras": "import tf_keras"}


class _Edit(NamedTuple):
    """Replacement of text, by the offsets of its bytes."""

    begin: int
    end: int
    text: str


def script_diff(recipe: Recipe, script: Path) -> tuple[str, list[str]]:
    """Return a unified diff of the script's own files, and what it omits: `NAME=value` of knobs, and the learning rate.

    Raises:
        RecipeError: The recipe is not of this script.
    """
    main = script.resolve()
    facts, directory = facts_in(recipe, main, str(script)), str(main.parent)
    if main.suffix == ".ipynb":
        notebook = parse_reference(str(script))
        main = file_of(open_notebook(notebook, make_scratch("autotune-notebook-"), facts.skip_cells, str))
    files = own_files(main, Path(directory))
    changes = dict(recipe.changes)
    lines = {knob: _LINES[knob].format(value=changes[knob]) for knob in _LINES if knob in changes}
    if calls := MALLOPT[str(changes.get("keep_freed_memory", "none"))]:
        lines["keep_freed_memory"] = "\n".join(f"ctypes.CDLL(None).mallopt{call}" for call in calls)
    if "precision" in lines and recipe.workload.keras is KerasVersion.KERAS_2:
        lines["precision"] = _KERAS_2_PRECISION.format(value=changes["precision"])
    reached = set(lines)
    rule = recipe.learning_rate_rule
    scaled = "" if rule is None or rule.rule == "as is" else f"{rule.factor:.6g} ({rule.rule})"
    rates = _where_rate_is_set(files, facts, directory) if scaled else set()
    diffs = list[str]()
    keys = {name: {site.key for site in facts.sites.get(name, ())} for name in ("cache", "batched_map")}
    for file in files:
        source, fit = file.read_bytes(), None
        edits = _inserted(source, lines, str(file)) if file == main else []
        if changes.get("graph_step"):
            decorated = _decorated(source, facts.sites.get("graph_step", ()), str(file), directory, changes)
            edits += decorated
            reached |= {"graph_step", "jit_compile"} if decorated else set()
        comment = f"# autotune: multiply the learning rate by {scaled}; tested only with it"
        edits += [_above(source, line, comment) for rated, line in rates if rated == file]
        moved: dict[str, tuple[ast.Call, list[_Edit]]] = {}  # that change places, with the edits of their arguments
        for site, call in calls_in(str(file), directory).values():
            wanted = _knobs_at(site, facts, changes)
            if not any(keyword.arg == "run_eagerly" for keyword in call.keywords):
                wanted.pop("graph_step", None)  # the script sets an attribute
            reached |= wanted.keys()
            if changes.get("cache") and not facts.cache_file_bytes and site.key in keys["cache"]:
                reached, end = reached | {"cache"}, _place(source, call)[1]
                edits.append(_Edit(end, end, ".cache()"))
            arguments = {ARGUMENTS.get(knob, knob): _shown(value) for knob, value in wanted.items()}
            if arguments.pop("graph_step", ""):
                arguments["run_eagerly"] = "False"
            if facts.fit_site is not None and site.key == facts.fit_site.key:
                fit = call, arguments
                continue
            own = _arguments(source, call, arguments)
            edits += own
            if changes.get("batched_map") and site.key in keys["batched_map"]:
                moved[site.call] = call, own
        if len(moved) == 2 and _is_read_once(source, moved["map"][0], moved["batch"][0]):
            reached.add("batched_map")
            edits = [edit for edit in edits if edit not in moved["map"][1]]
            edits += _move(source, *moved["map"], moved["batch"][0], vectorized=facts.vectorized)
        if fit is not None:
            edits, inserted = _edit_fit(source, *fit, edits, recipe)
            reached |= inserted
        diffs += _diffs(source, edits, str(file), directory)
    changes |= {name: value for name, value in recipe.configuration.items() if name == "global_batch"}
    rest = [f"{name}={format_value(value)}" for name, value in changes.items() if name not in reached]
    if scaled and not rates:
        rest.append(f"learning rate times {scaled}")
    return "".join(diffs), rest


def _where_rate_is_set(files: Sequence[Path], facts: ScriptFacts, directory: str) -> set[tuple[Path, int]]:
    """Return files and lines of `compile`; else of the optimizers that are made; else of the training."""
    calls = [(file, site, call) for file in files for site, call in calls_in(str(file), directory).values()]
    made: dict[Path, set[str]] = {file: set() for file in files}  # names of optimizers that it imports
    for file in files:
        for node in ast.walk(parse_source(file)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2] == "optimizers":
                made[file] |= {alias.asname or alias.name for alias in node.names}

    def at(wanted: Site | None) -> list[tuple[Path, ast.Call]]:
        return [(file, call) for file, site, call in calls if wanted is not None and site.key == wanted.key]

    def makes_optimizer(file: Path, call: ast.Call) -> bool:
        *owners, name = ast.unparse(call.func).split(".")
        return name in made[file] if not owners else owners[-1] == "optimizers"

    optimizers = [(file, call) for file, _, call in calls if makes_optimizer(file, call)]
    found = at(facts.compile_site) or optimizers or at(facts.fit_site) or at(facts.epochs_range)
    return {(file, call.lineno) for file, call in found}


def _above(source: bytes, line: int, *texts: str) -> _Edit:
    """Return the edit that inserts lines above the statement that contains a line."""
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt))
    first = max(node.lineno for node in statements if node.lineno <= line <= (node.end_lineno or 0))
    begin = _offset(source, first, 0)
    text = source.splitlines()[first - 1].decode()
    indent = text[: len(text) - len(text.lstrip())]
    return _Edit(begin, begin, "".join(f"{indent}{line}\n" for line in texts))


def _decorated(
    source: bytes, sites: Sequence[Site], file: str, directory: str, changes: Mapping[str, KnobValue]
) -> list[_Edit]:
    """Return the edits that decorate the functions at these sites; none where the script does not import TensorFlow.

    A step that stands in its loop is moved into such a function.
    """
    tree, moved, wanted = ast.parse(source), ast.parse(source), {site.key for site in sites}
    name = _tensorflow_in(tree)
    given = [] if uses_shapes(tree) else ["reduce_retracing=True"]
    given += ["jit_compile=True"] if changes.get("jit_compile") else []
    decorator = f"@{name}.function" + (f"({', '.join(given)})" if given else "")
    steps = {step.name: step for step in find_inline_steps(tree)}
    move_inline_steps(moved)
    edits = []
    for node in (node for site, node in functions_in(moved, file, directory) if name and site.key in wanted):
        if is_moved(node):
            if not (moves := _moved(source, steps[node.name], decorator)):
                return []
            edits += moves
        else:
            begin = _offset(source, node.lineno, 0)
            edits.append(_Edit(begin, begin, f"{_indent(source, node)}{decorator}\n"))
    return edits


def _moved(source: bytes, step: InlineStep, decorator: str) -> list[_Edit]:
    """Return the edits that move a step into a function; none where a text of several lines would change.

    None either where the step does not end its line, or TensorFlow is imported below the function.
    """
    constants = (node for part in step.statements for node in ast.walk(part) if isinstance(node, ast.Constant))
    first, last, before = step.statements[0], step.statements[-1], step.before
    shares_line = any(part.lineno == last.end_lineno for part in step.body if part not in step.statements)
    is_imported = _tensorflow_in(ast.parse(source), above=before)
    if shares_line or not is_imported or any(node.end_lineno != node.lineno for node in constants):
        return []
    begin, end = _offset(source, first.lineno, 0), _offset(source, (last.end_lineno or 0) + 1, 0)
    above = min([before.lineno, *(mark.lineno for mark in getattr(before, "decorator_list", ()))])
    place, margin = _offset(source, above, 0), _indent(source, before)
    old = _indent(source, first)
    new = margin + ("\t" if "\t" in old else " " * 4)
    lines = source[begin:end].decode().rstrip("\r\n").split("\n") + [f"{old}{step.footer}"] * bool(step.results)
    # Only comments and continued lines may begin further left.
    body = (f"{new}{line.removeprefix(old) if line.startswith(old) else line.lstrip()}".rstrip() for line in lines)
    text = "\n".join([f"{margin}{decorator}", f"{margin}{step.header}", *body, "", "" if margin else "\n"])
    return [_Edit(place, place, text), _Edit(begin, end, f"{old}{step.call}\n")]


def _indent(source: bytes, node: ast.stmt) -> str:
    """Return what stands before a statement in its line."""
    begin = _offset(source, node.lineno, 0)
    return source[begin : begin + node.col_offset].decode()


def _tensorflow_in(tree: ast.Module, above: ast.stmt | None = None) -> str:
    """Return the name by which a file imports TensorFlow, above a statement; empty where it does not."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    early = (node for node in imports if above is None or node.lineno < above.lineno)
    imported = (alias for node in early for alias in node.names)
    return next((alias.asname or alias.name for alias in imported if alias.name == "tensorflow"), "")


def _knobs_at(site: Site, facts: ScriptFacts, changes: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """Return the changed knobs that are arguments of the call at a site."""
    knobs = [
        knob
        for knob, sites in facts.sites.items()
        if knob in ARGUMENTS
        and site.key in {reached.key for reached in sites}
        and (knob == "batch_size" or CALLS.get(site.call) == knob)  # not inside Keras's makers of datasets
    ]
    if facts.compile_site is not None and site.key == facts.compile_site.key:
        knobs += ["jit_compile", "steps_per_execution", "graph_step"]
    is_fit_of_arrays = not facts.batch_given_as and "workers" not in facts.baseline  # which is a PyDataset's
    if is_fit_of_arrays and facts.fit_site is not None and site.key == facts.fit_site.key:
        knobs.append("batch_size")
    return {knob: changes[knob] for knob in knobs if knob in changes}


def _offset(source: bytes, line: int, column: int) -> int:
    return sum(map(len, source.splitlines(keepends=True)[: line - 1])) + column


def _shown(value: KnobValue) -> str:
    return "tf.data.AUTOTUNE" if isinstance(value, str) else repr(value)


def _edit_fit(
    source: bytes, call: ast.Call, arguments: dict[str, str], edits: list[_Edit], recipe: Recipe
) -> tuple[list[_Edit], set[str]]:
    """Return the edits with those of `fit` and of lines above it, and the knobs of its dataset that these set."""
    sites, tree = recipe.workload.script.sites if recipe.workload.script else {}, ast.parse(source)
    x = next((word.value for word in call.keywords if word.arg == "x"), call.args[0] if call.args else None)
    is_dataset = not sites.keys().isdisjoint(CALLS.values()) and "y" not in (word.arg for word in call.keywords)
    made = recipe.changes.keys() & {*_OPTIONS, "persistent_iterator", *({"prefetch"} - sites.keys())}
    if not made or x is None or not is_dataset or len(call.args) > 1:
        return edits + _arguments(source, call, arguments), set()
    (begin, end), tf = _place(source, x), _tensorflow_in(tree) or "tf"
    batches, options = (f"{name}{'_of_recipe' * (name.encode() in source)}" for name in ("batches", "options"))
    inner = [edit for edit in edits if begin <= edit.begin and edit.end <= end]
    value = _apply(source[:end], inner)[begin:].decode()
    value = value if isinstance(x, ast.Name | ast.Attribute | ast.Call) and "\n" not in value else f"({value})"
    above = [] if _tensorflow_in(tree) else ["import tensorflow as tf"]
    if of_options := [knob for knob in _OPTIONS if knob in made]:
        above.append(f"{options} = {tf}.data.Options()")
        above += [f"{options}.{_OPTIONS[knob]} = {recipe.configuration[knob]!r}" for knob in of_options]
        value += f".with_options({options})"
    above.append(f"{batches} = {value}")
    used, depth = batches, recipe.configuration["prefetch"] if made & {"prefetch", "persistent_iterator"} else 0
    if "persistent_iterator" in made:
        used, arguments["steps_per_epoch"], depth = f"{batches}.repeat()", f"len({batches})", depth or 1
    used += f".prefetch({_shown(depth)})" if depth else ""
    edits = [*(edit for edit in edits if edit not in inner), _above(source, call.lineno, *above)]
    return [*edits, _Edit(begin, end, used), *_arguments(source, call, arguments)], made


def _arguments(source: bytes, node: ast.Call, wanted: Mapping[str, str]) -> list[_Edit]:
    """Return the edits that give a call these arguments: instead of what it has, or as further keywords."""
    edits, more = [], []
    is_fit = isinstance(node.func, ast.Attribute) and node.func.attr == "fit"
    for keyword, text in wanted.items():
        named = next((argument.value for argument in node.keywords if argument.arg == keyword), None)
        first = node.args[0] if node.args and keyword in ("batch_size", "buffer_size") and not is_fit else None
        old = named if named is not None else first
        if old is None:
            more.append(f"{keyword}={text}")
        else:
            edits.append(_Edit(*_place(source, old), text))
    if more:
        end = len(source[: _place(source, node)[1] - 1].rstrip())
        before = source[:end]
        separator = "" if before.endswith(b"(") else " " if before.endswith(b",") else ", "
        edits.append(_Edit(end, end, separator + ", ".join(more)))
    return edits


def _place(source: bytes, node: ast.expr) -> tuple[int, int]:
    """Return where an expression begins and ends in a source."""
    end = _offset(source, node.end_lineno or 0, node.end_col_offset or 0)
    return _offset(source, node.lineno, node.col_offset), end


def _move(source: bytes, call: ast.Call, edits: list[_Edit], behind: ast.Call, *, vectorized: bool) -> list[_Edit]:
    """Return the edits that put a call of a method, with these edits of its arguments, behind another call."""
    assert isinstance(call.func, ast.Attribute)
    _, end = _place(source, call)
    dot = source.rindex(b".", 0, _place(source, call.func)[1] - len(call.func.attr))
    begin = len(source[:dot].rstrip(b" \t\r\n\\"))  # before what breaks the line
    if vectorized:
        function = call.args[0] if call.args else next(word.value for word in call.keywords if word.arg == "map_func")
        place = _place(source, function)
        text = source[slice(*place)].decode()
        text = f"({text})" if isinstance(function, ast.Lambda) else text
        text = f"lambda *batch: tf.vectorized_map(lambda example: {text}(*example), batch)"
        edits = [*edits, _Edit(*place, text)]
    _, after = _place(source, behind)
    moved = _apply(source[:end], edits)[begin:].decode()
    line, rest = source[:begin].rpartition(b"\n")[2], source[end:].partition(b"\n")[0]
    if re.fullmatch(rb"\s*(\w+) = \1", line) and not rest.strip():  # nothing is left of it
        begin, end = begin - len(line), end + len(rest) + 1
    return [_Edit(begin, end, ""), _Edit(after, after, moved)]


def _is_read_once(source: bytes, mapped: ast.Call, batched: ast.Call) -> bool:
    """Return whether only `batch` reads what `map` makes: in its expression, or in lines `name = name.method()`."""
    receiver: ast.expr = batched
    while isinstance(receiver, ast.Call) and isinstance(receiver.func, ast.Attribute) and receiver is not mapped:
        receiver = receiver.func.value
    blocks = [node.body for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Module | ast.FunctionDef)]
    for block in blocks:
        lines = [line for line in block if mapped.lineno <= (line.end_lineno or 0) and line.lineno <= batched.lineno]
        if len(lines) > 1:
            first, *between, last = lines
            inner = ((*line.body, *line.orelse) if isinstance(line, ast.If) else (line,) for line in between)
            lines = [first, *itertools.chain(*inner), last]
            texts = [ast.unparse(line) if isinstance(getattr(line, "value", None), ast.Call) else "" for line in lines]
            name = texts[0].partition(" = ")[0]
            reads_it = re.compile(rf"({name} =|return) {name}\.(?!.*\b{name}\b).*")
            return name.isidentifier() and all(map(reads_it.fullmatch, texts[1:]))
    return receiver is mapped


def _inserted(source: bytes, lines: Mapping[str, str], file: str) -> list[_Edit]:
    """Return the edits that insert lines after the imports at the top; those of the environment before them.

    In a notebook the top ends with the first cell that imports TensorFlow or Keras.
    """
    tree = ast.parse(source)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    first = next((cell_at(file, node.lineno) for node in imports if _FRAMEWORK.search(ast.unparse(node))), None)
    if first is not None:
        imports = [node for node in imports if (cell_at(file, node.lineno) or first).first_line <= first.first_line]
    future = [node for node in imports if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    docstring = tree.body[:1] if ast.get_docstring(tree) is not None else []
    body = [node for node in tree.body if node not in (*future, *docstring)]
    edits = []
    for knob in lines.keys() & _BEFORE_IMPORTS if body else ():
        begin = _offset(source, body[0].lineno, 0)
        edits.append(_Edit(begin, begin, f"{_BEFORE_IMPORTS[knob]}\n\n{lines[knob]}\n\n"))
    late = [line for knob, line in lines.items() if knob not in _BEFORE_IMPORTS]
    if late and imports:
        bound = {name.asname or name.name for node in imports for name in node.names}
        needed = sorted({line.partition(".")[0] for line in late} - bound)
        end = _offset(source, (imports[-1].end_lineno or 0) + 1, 0)
        text = "\n".join([*(_IMPORTS[name] for name in needed), *late])
        edits.append(_Edit(end, end, f"\n{text}\n"))
    return edits


def _diffs(source: bytes, edits: list[_Edit], file: str, directory: str) -> Iterator[str]:
    """Yield the unified diff of a file; of a notebook those of its cells, as the notebook has them."""
    cells = cells_of(file)
    begins = [_offset(source, cell.first_line, 0) for cell in cells]
    parts = zip(cells, begins, [*begins[1:], len(source) + 1], strict=False)
    named = [(cell.shown, begin, end, f"{cell.source}\n") for cell, begin, end in parts]
    for name, begin, end, written in named or [(shown(file, directory), 0, len(source) + 1, source.decode())]:
        own = [edit for edit in edits if begin <= edit.begin < end]
        own = [edit._replace(begin=edit.begin - begin, end=edit.end - begin) for edit in own]
        code, edited = (
            text.decode().splitlines(keepends=True) for text in (source[begin:end], _apply(source[begin:end], own))
        )
        before, after = written.splitlines(keepends=True), list[str]()
        for kind, low, high, start, stop in difflib.SequenceMatcher(None, code, edited, autojunk=False).get_opcodes():
            after += before[low:high] if kind == "equal" else edited[start:stop]
        for line in difflib.unified_diff(before, after, name, name):
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _apply(source: bytes, edits: Iterable[_Edit]) -> bytes:
    # Of insertions at one place the first ends up lowest: a comment stays above its call.
    for edit in sorted(set(edits), key=lambda edit: (-edit.begin, not edit.text.lstrip().startswith("#"), edit.text)):
        source = source[: edit.begin] + edit.text.encode() + source[edit.end :]
    return source
