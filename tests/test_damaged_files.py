"""Damaged and hostile files: each is read, or refused with one printable sentence.

What is read comes back from its file as it was, and what is shown of it drives no terminal. A hang ends the whole
test process: see `faulthandler_timeout` in pyproject.toml. `test_messages.py` does the same to the pipe.
"""

import contextlib
import copy
import functools
import io
import json
import math
import os
import re
import tempfile
import warnings
from pathlib import Path

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from simulated_runs import MACHINE

from autotune.data.errors import DamagedRunWarning, RecipeError, RunDirectoryError, SearchSpaceError
from autotune.data.run_directory import RunDirectory
from autotune.front import results
from autotune.front.documents import recipe_schema_text
from autotune.recipe.apply import environment
from autotune.recipe.recipe import Recipe
from autotune.report.history import compare, load_history
from autotune.space.configuration import baseline_configuration, format_value, read_trials
from autotune.space.knobs import KNOBS, Device
from autotune.space.space_file import SearchSpace, find_search_space

ROOT = Path(__file__).parents[1]
SPACES = [file.read_text() for file in sorted((ROOT / "search_spaces").glob("*.toml"))]
RECORDED = ROOT / "results" / "recorded" / "digits_mlp_command_one"
FIRST, SECOND, *_, LAST = sorted(RECORDED.glob("trials/*/result.json"))
FILES = [RECORDED / "run.json", RECORDED / "recipe.json", FIRST, SECOND, LAST]
RUN = {str(file.relative_to(RECORDED)): json.loads(file.read_text()) for file in FILES}
for document in RUN.values():  # one pair and one slice will do: more would draw the damage away from the rest
    document |= {name: document[name][:1] for name in ("pairs", "slices") if name in document}
NAME = "my\n\x1b[31m[red]\u202e\udcff.file"
"""A file's name that would drive a terminal, were it printed as it is."""


def find_conflict(function, *arguments):
    """The sentence with which a reader refuses, or leaves a trial out: printable, of bounded length; None otherwise."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DamagedRunWarning)
        try:
            function(*arguments)
        except (RecipeError, RunDirectoryError, SearchSpaceError) as refused:
            error = refused
        else:
            error = None
    said = [str(warning.message) for warning in caught]
    if error:
        assert error.hint.isprintable()
        assert str(error) == "\n".join(filter(None, (error.message, error.hint))), "more than message and hint"
        said.append(error.message)
    assert all(each.isprintable() and 0 < len(each) <= 1100 for each in said)
    return said[-1] if said else None


def read(function, *arguments):
    """What a reader returns; None where it refuses."""
    returned = []
    find_conflict(lambda: returned.append(function(*arguments)))
    return returned[0] if returned else None


# ----------------------------------------------------------------------------------- each reader, each damage

RESULT = str(FIRST.relative_to(RECORDED))
READERS = {
    "recipe.json": lambda run: Recipe.load(run / "recipe.json"),
    "run.json": lambda run: RunDirectory(run).read_run(),
    RESULT: lambda run: [*read_trials(RunDirectory(run))],
    "space.toml": lambda run: find_search_space(run / "space.toml"),
}
OF_JSON = [name for name in READERS if name.endswith(".json")]


@pytest.fixture
def run(tmp_path):
    """A run's directory, and a search space in it; each reader reads its own."""
    for name, document in RUN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(document))
    (tmp_path / "space.toml").write_text(SPACES[0])
    assert not any(find_conflict(reader, tmp_path) for reader in READERS.values())
    return tmp_path


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkdir, "Is a directory"),
        (os.mkfifo, "is a pipe or a device"),
        (lambda path: path.symlink_to("/dev/zero"), "is a pipe or a device"),
        (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40), "larger than"),
        (lambda path: path.write_bytes(b"# caf\xe9\n"), "not UTF-8 text"),
    ],
    ids=["directory", "pipe", "endless", "huge", "not text"],
)
def test_what_is_no_text_of_bounded_length_is_not_read(run, name, make, words):
    (run / name).unlink()
    make(run / name)
    said = find_conflict(READERS[name], run)
    assert str(run / name) in said
    if name not in ("recipe.json", "space.toml") and (run / name).is_symlink():
        words = "is a link"
    elif (name, words) == ("recipe.json", "Is a directory"):
        words = "it has no .json file"  # it may be a folder of recipes
    elif name in OF_JSON and words.startswith("not UTF-8"):
        words = "Invalid JSON"
    assert words in said


@pytest.mark.parametrize(
    ("name", "version"),
    [
        *((name, version) for name in OF_JSON for version in (2, 99, 10**400, 0, -1, "1", None, [1])),
        *(("recipe.json", version) for version in (1.0, True)),
    ],
)
def test_another_version_is_refused_as_that(run, name, version):
    (run / name).write_text(json.dumps(RUN[name] | {"schema_version": version}))
    assert re.search("schema_version|another version", find_conflict(READERS[name], run))


@pytest.mark.parametrize("name", OF_JSON)
def test_an_unknown_key_is_named(run, name):
    (run / name).write_text(json.dumps(RUN[name] | {"extra": 1}))
    assert "extra" in find_conflict(READERS[name], run)


# --------------------------------------------------------------------------------------------- any damage


def shown(draw, *arguments):
    """What is drawn, which is printable text and line breaks."""
    output = io.StringIO()
    draw(*arguments, console=Console(file=output, width=120, color_system=None, highlight=False))
    assert output.getvalue().replace("\n", "").isprintable()
    return output.getvalue()


TEXTS = ["", "\x1b]0;title\x07", "[/nothing]", "a\nb\r", "\u202e\x85", "\x00", "\ud800", "x" * 5000]
TEXTS += ["0001-01-01T00:00:00+23:00", "9999-12-31T23:59:59-23:00", "2026-11-20T10:00:00"]
NUMBERS = [0, -1, 1 << 31, (1 << 63) - 1, 1 << 63, 10**400, 10**4200, 1e-320, 1e308, math.nan, math.inf]
VALUES = st.recursive(
    st.sampled_from([*TEXTS, *NUMBERS, None, True]) | st.text(max_size=8) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ODD_BYTES = [b"[]", b"null", b"\0", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\ud800", b'"', b"9" * 5000]
ODD_BYTES.append(b'[{"a":' * 3000)
BYTES = st.binary(max_size=60) | st.sampled_from(ODD_BYTES)
TOKEN = re.compile(r'"[^"\n]*"|\w+|[^\s\w]')
ODD = ['"min()"', '"examples/0"', "nan", "1e400", "-1", "9" * 5000, "0x" + "f" * 5000, "[" * 2000, "{a=" * 1000]
ODD += ["a." * 3000, "x" * 5000, f'"{"x" * 5000}"', "'''", "\x00", '"\\u202e\\u001b"']
TOKENS = st.sampled_from(sorted(set(TOKEN.findall("".join(SPACES))))) | st.sampled_from(ODD)


def places_in(document):
    """Every value inside a document, as what holds it and its key there."""
    if isinstance(document, (dict, list)):
        for key in document if isinstance(document, dict) else range(len(document)):
            yield document, key
            yield from places_in(document[key])


@st.composite
def damaged_json(draw, document):
    """The document's text after some of its values were replaced, removed, renamed or repeated."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 4)))):
        if not (places := list(places_in(document))):
            break
        holder, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(("alike", "alike", "other", "remove", "rename", "repeat"))):
            case "alike" if isinstance(holder[key], (int, float, str)):
                holder[key] = draw(st.sampled_from(TEXTS if isinstance(holder[key], str) else NUMBERS))
            case "remove":
                del holder[key]
            case "rename" if isinstance(holder, dict):
                holder[draw(st.sampled_from(TEXTS))] = holder.pop(key)
            case "repeat":
                holder[key] = [holder[key]] * draw(st.sampled_from((1, 300)))
            case _:
                holder[key] = draw(VALUES)
    return json.dumps(document).encode()


@st.composite
def damaged_bytes(draw, data):
    """The bytes after a stretch of them was cut out, doubled or overwritten, or the end was cut off."""
    start = draw(st.integers(0, len(data)))
    end = min(len(data), start + draw(st.sampled_from((0, 1, 4, 64, 1024, len(data)))))
    return data[:start] + draw(st.just(b"") | BYTES | st.just(data[start:end] * 2)) + data[end:]


def damaged(document):
    """The JSON text of a document in which values, or any bytes, are damaged."""
    return damaged_json(document) | damaged_bytes(json.dumps(document).encode())


@st.composite
def damaged_toml(draw, text):
    """A text in which a token is replaced by another one, or any bytes are damaged."""
    if draw(st.booleans()):
        return draw(damaged_bytes(text.encode())).decode(errors="replace")
    token = draw(st.sampled_from(list(TOKEN.finditer(text))))
    return text[: token.start()] + draw(TOKENS) + text[token.end() :]


@pytest.fixture(scope="module")
def documents(recipes):
    """A recipe of each verdict, one with a watch at its end, and a recorded one; each is read."""
    assert Recipe.parse(json.dumps(RUN["recipe.json"]), source=NAME)
    return [*(json.loads(recipe.to_json()) for recipe in recipes.values()), RUN["recipe.json"]]


@settings(max_examples=400)
@given(data=st.data())
def test_a_damaged_recipe_is_read_or_refused(documents, data):
    content = data.draw(st.sampled_from(documents).flatmap(damaged) | BYTES)
    recipe = read(lambda: Recipe.parse(content, source=NAME))
    if recipe is None:
        return
    jsonschema.validate(json.loads(content), json.loads(recipe_schema_text()))
    assert Recipe.parse(recipe.to_json(), source="again") == recipe
    for configuration in (recipe.configuration, recipe.baseline):
        assert environment(configuration) in ({}, *({"TF_ENABLE_ONEDNN_OPTS": value} for value in "01"))
    recipe.machine.differences(MACHINE)
    shown(results.show_answer, recipe.answer, Path(NAME))


@settings(max_examples=200)
@given(
    text=st.sampled_from(SPACES).flatmap(damaged_toml) | st.text(max_size=80),
    device=st.sampled_from(Device),
    cores=st.sampled_from((1, 4096)),
    examples=st.sampled_from((None, 0, 1437, 10**12)),
    batch_size=st.integers(1, 5000),
    takes_config=st.booleans(),
)
@example(text=SPACES[0], device=Device.CPU, cores=2, examples=1437, batch_size=32, takes_config=True)
@example(
    text=f"schema_version = 0x{'f' * 5000}", device=Device.CPU, cores=2, examples=0, batch_size=1, takes_config=True
)
def test_a_damaged_search_space_is_read_or_refused(text, device, cores, examples, batch_size, takes_config):
    space = read(lambda: SearchSpace.parse(text, source=NAME))
    if space is None:
        assert text not in SPACES
        return
    baseline = baseline_configuration(batch_size, {}, device, where="baseline")
    machine = {"device": device, "cores": cores, "examples": examples, "dataset_takes_config": takes_config}
    resolved = read(lambda: space.resolve(baseline=baseline, **machine))
    if resolved is None:
        return
    assert baseline in resolved
    for name, values in resolved.choices.items():
        assert 2 <= len(set(map(format_value, values))) == len(values) <= 257
        assert all(value in KNOBS[name].domain for value in values)


ODD_PATHS = ["trials", "trials/9999999999/result.json", "a/b/run.json", "loop", "\n\x1b[31m\udcff/run.json"]
LINKS = ["run.json", "..", "/dev/zero", "/dev/null", "missing", "loop", "/proc/self/mem"]


@settings(max_examples=200)
@given(
    odd=st.dictionaries(
        st.sampled_from([*RUN, *ODD_PATHS]), st.sampled_from(["directory", "pipe", *LINKS]), max_size=1
    ),
    changed=st.sampled_from(list(RUN)).flatmap(lambda name: st.fixed_dictionaries({name: damaged(RUN[name])})),
)
@example(odd={}, changed={})
def test_a_damaged_run_directory_is_read_or_refused(odd, changed):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, NAME)
        for name, kind in odd.items():
            (run / name).parent.mkdir(parents=True)
            make = {"directory": os.mkdir, "pipe": os.mkfifo}.get(kind, functools.partial(os.symlink, kind))
            make(run / name)
        for name in RUN.keys() - odd.keys():
            with contextlib.suppress(OSError):
                (run / name).parent.mkdir(parents=True, exist_ok=True)
                (run / name).write_bytes(changed.get(name, json.dumps(RUN[name]).encode()))
        record, trials = read(RunDirectory(run).read_run), read(lambda: [*read_trials(RunDirectory(run))])
        assert odd or changed or (record and len(trials) == 3), "the whole run is read"
        for each in (*filter(None, [record]), *(trials or ())):
            assert type(each).model_validate_json(each.model_dump_json()) == each
        if (runs := read(compare, run)) is not None:
            shown(results.show_comparison, runs)
        if (frame := read(load_history, run)) is not None:
            assert len(shown(results.show_history, frame).splitlines()) == len(frame) + (3 if len(frame) else 1)
