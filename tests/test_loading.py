"""How a workload is named, found and loaded."""

import contextlib
import importlib.machinery
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_workload import a_workload, find_conflict, nothing

from autotune import tune
from autotune.data.errors import ArgumentError, WorkloadError
from autotune.data.facts import WorkloadReference
from autotune.runtime.failures import format_user_traceback
from autotune.script import loading
from autotune.script.loading import facts_of, load, parse_reference, reference_of, refuse_while_loading
from autotune.script.workload import Workload

GOOD = """
import autotune
workload = autotune.Workload(model=print, dataset=print, compile=dict, batch_size=32)
"""


@pytest.fixture(autouse=True)
def modules_and_path_as_before(monkeypatch):
    """What loading adds to the imported modules and to the search path is gone after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, source):
    """A file with this source, and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return path


def reference_to(path, name="workload"):
    """The workload called `name` in a file."""
    return WorkloadReference(file=str(path), name=name, search_path=(str(path.parent),))


def as_module(monkeypatch, name, **variables):
    """An imported module with these variables."""
    module = ModuleType(name)
    vars(module).update(variables)
    monkeypatch.setitem(sys.modules, name, module)


# ------------------------------------------------------------------------------------------------ references


@pytest.mark.parametrize(
    ("text", "name"), [("jobs/train.py", "workload"), ("jobs/train.py:large", "large"), ("link.py", "workload")]
)
def test_reference_resolves_from_current_directory_and_links(directory, text, name):
    file = write(directory / "jobs" / "train.py", "workload = large = 1")
    (directory / "link.py").symlink_to(file)
    assert parse_reference(text) == reference_to(file, name)


def test_a_missing_file_and_a_directory_are_no_files(directory):
    error = find_conflict(parse_reference, "jobs/none.py")
    assert error.message == "jobs/none.py: no such file or directory"
    assert str(directory) in error.hint
    (directory / "train.py").mkdir()
    assert find_conflict(parse_reference, "train.py").message == "train.py: is a directory"


def test_a_file_that_may_not_be_read_says_so(directory, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(loading, "read_at_most", refuse)
    assert find_conflict(parse_reference, "train.py").message == "train.py: permission denied"


@pytest.mark.parametrize(
    "text", ["train.py:", "train.py:a-b", "train.py:1", "pkg:a:b", "C:/train.py", "pkg:" + "x" * 256]
)
def test_what_follows_the_colon_must_be_a_name(text):
    error = find_conflict(parse_reference, text)
    assert error.message == f"{text!r}: {text.partition(':')[2]!r} is not a name"
    assert "path/to/file.py:name" in error.hint


@pytest.mark.parametrize(
    ("text", "module", "name"),
    [
        ("package.train", "package.train", "workload"),
        ("package:small", "package", "small"),
        ("nowhere", "nowhere", "workload"),
    ],
)
def test_a_dotted_name_is_a_module(directory, text, module, name):
    write(directory / "package" / "__init__.py", "raise RuntimeError('was run')")
    assert parse_reference(text) == WorkloadReference(module=module, name=name, search_path=(str(directory),))


@pytest.mark.parametrize("name", ["keras", "tensorflow", "numpy", "pandas"])
@pytest.mark.parametrize("text", ["jobs/{name}.py", "jobs/train.py", "jobs/train.py:small"])
def test_a_file_that_hides_a_module_from_tensorflow_is_refused(directory, text, name):
    write(directory / "jobs" / f"{name}.py", "workload = 1")
    write(directory / "jobs" / "train.py", "workload = 1")
    error = find_conflict(parse_reference, text.format(name=name))
    assert error.message.startswith(f"jobs/{name}.py: hides the module {name!r} from TensorFlow")
    assert f"my_{name}" in error.hint


def test_a_package_that_hides_one_from_tensorflow_is_refused(directory):
    write(directory / "keras" / "__init__.py", "")
    assert find_conflict(parse_reference, "keras.train").message.startswith("keras: hides the module 'keras'")
    assert find_conflict(parse_reference, "jobs.train").message.startswith("keras: hides the module 'keras'")


@pytest.mark.parametrize(
    "name", ["train", "model", "optuna", "profile", "random", "digits", "jobs/random/train", "keras/data"]
)
def test_a_file_that_hides_nothing_from_tensorflow_is_fine(directory, name):
    write(directory / f"{name}.py", "workload = 1")
    assert parse_reference(f"{name}.py").name == "workload"
    write(directory / "train.py", "workload = 1")
    assert parse_reference("train.py").name == "workload"


def test_failed_import_names_the_file_that_hides_a_module(directory):
    write(directory / "jobs" / "this.py", "")
    write(directory / "jobs" / "train.py", "import this\nthis.s")
    try:
        error = find_conflict(load, parse_reference("jobs/train.py"))
    finally:
        sys.modules.pop("this", None)
    assert error.message.startswith("jobs/this.py: hides the module 'this'")


@pytest.mark.parametrize(
    "text", ["jobs", "jobs/", "notes", ".", "..", "", ":name", "a-b", "jobs/train", "a..b", "x" * 256]
)
def test_what_is_neither_a_python_file_nor_a_module_is_refused(directory, text):
    (directory / "jobs").mkdir()
    write(directory / "notes", "")
    error = find_conflict(parse_reference, text)
    assert error.message == f"{text.partition(':')[0]!r} is neither a .py file, a notebook nor a module"
    assert "package.module[:name]" in error.hint


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30) | st.text(max_size=12).map(lambda text: text + ".py"))
@example(text="x" * 5000)
@example(text="x" * 5000 + ".py")
@example(text="\0.py")
@example(text="\udcff.py")
def test_whatever_is_written_is_a_reference_or_a_workload_error(text):
    with contextlib.suppress(WorkloadError):
        assert isinstance(parse_reference(text), WorkloadReference)


# ------------------------------------------------------------------------------------- references of objects


def test_a_modules_variable_is_found_by_module_and_name(monkeypatch):
    workload = a_workload()
    as_module(monkeypatch, "__main__", __file__=__file__)  # a program, also where a worker runs this test
    monkeypatch.setitem(sys.modules, "a_stand_in", object())  # packages put such things among the modules
    as_module(monkeypatch, "jobs.train", small=workload)
    monkeypatch.setattr(sys, "path", ["/somewhere", ""])
    monkeypatch.setattr(sys, "argv", ["program.py", "--width", "512"])
    assert reference_of(workload) == WorkloadReference(
        module="jobs.train", name="small", search_path=("/somewhere", str(Path.cwd())), args=("--width", "512")
    )


def test_a_local_variable_is_refused_with_where_to_put_it(monkeypatch):
    as_module(monkeypatch, "jobs.train", workload=a_workload())  # equal, and another one
    error = find_conflict(reference_of, a_workload())
    assert "not a variable at the top level of a module" in error.message
    assert "outside of any function" in error.hint


@pytest.mark.parametrize("name", ["jobs.train", "jobs.__main__"])
def test_a_program_run_as_a_module_is_found_as_that_module(monkeypatch, name):
    workload = a_workload()
    as_module(monkeypatch, "__main__", workload=workload, __spec__=importlib.machinery.ModuleSpec(name, None))
    reference = reference_of(workload)
    assert (reference.module, reference.file) == (name, None)


@pytest.mark.parametrize(
    ("attributes", "in_program"), [({}, False), ({"__file__": "<stdin>"}, False), ({"__file__": "run.py"}, True)]
)
def test_a_program_with_a_file_comes_before_what_it_imported(directory, monkeypatch, attributes, in_program):
    file = write(directory / "run.py", GOOD)
    workload = a_workload()
    as_module(monkeypatch, "__main__", workload=workload, **attributes)
    as_module(monkeypatch, "train", small=workload)
    reference = reference_of(workload)
    expected = (None, str(file), "workload") if in_program else ("train", None, "small")
    assert (reference.module, reference.file, reference.name) == expected


@pytest.mark.parametrize("attributes", [{}, {"__file__": "<stdin>"}])
def test_a_workload_typed_into_a_session_is_refused(monkeypatch, attributes):
    workload = a_workload()
    as_module(monkeypatch, "__main__", workload=workload, **attributes)
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["__main__"])  # as some packages call it, too
    error = find_conflict(reference_of, workload)
    assert "interactive session" in error.message
    assert 'autotune.tune("path/to/file.py")' in error.hint


# --------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(
    "more",
    [
        "",
        "import sys\nassert sys.modules[__name__].workload is workload\n",
        "import sys\nassert sys.argv == [__file__], sys.argv\n",
        "import neighbour_for_this_test\nif __name__ == '__main__':\n    raise SystemExit('run')\n",
    ],
    ids=["alone", "finds itself", "is its first argument", "finds its neighbours"],
)
def test_a_workload_is_loaded_from_a_file(tmp_path, more):
    write(tmp_path / "neighbour_for_this_test.py", "")
    loaded = load(reference_to(write(tmp_path / "train.py", GOOD + more)))
    assert isinstance(loaded, Workload)
    assert loaded.batch_size == 32


def test_the_search_path_comes_first_in_its_own_order(tmp_path):
    file = write(tmp_path / "train.py", GOOD)
    known = sys.path[0]
    before = sys.path.count(known)
    load(WorkloadReference(file=str(file), search_path=("/one", known, "/two")))
    assert sys.path[:3] == ["/one", "/two", known]
    assert sys.path.count(known) == before


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        ("nowhere_to_be_found", "nowhere_to_be_found"),
        ("nowhere_to_be_found.train", "nowhere_to_be_found"),
        ("package_for_this_test.trian", "package_for_this_test.trian"),
    ],
)
def test_a_module_that_is_not_there_is_named(tmp_path, module, missing):
    write(tmp_path / "package_for_this_test" / "__init__.py", "")
    error = find_conflict(load, WorkloadReference(module=module, search_path=(str(tmp_path),)))
    assert error.message == f"no module {module!r}"
    assert error.hint.startswith(f"{missing!r} is neither in the current directory")
    assert error.detail == ""


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        *(
            (source, "importing {file} raised SyntaxError: ", "import")
            for source in ("import sys\nworkload = = 1\n", "# coding: klingon\n", "(" * 300)
        ),
        ("from .net import x\n" + GOOD, "importing {file} raised ImportError: attempted relative", "PACKAGE.MODULE"),
        (
            "raise ModuleNotFoundError('install the extra')",
            "importing {file} raised ModuleNotFoundError: install the extra",
            "import",
        ),
        ("raise SystemExit(3)", "importing {file} raised SystemExit: 3", ""),
        ("raise KeyboardInterrupt", "importing {file} raised KeyboardInterrupt", ""),
        ("import sys; sys.exit()", "importing {file} raised SystemExit", ""),
        ("_workload = 1\nglobals()['workloads'] = 1", "{file}: no 'workload' in it", "Did you mean 'workloads'?"),
        ("workload = {'batch_size': 32}", "{file}:workload: is a dict, expected an autotune.Workload", "{file}:NAME"),
        (GOOD.replace("=32", "=0"), "Workload(batch_size=…): batch_size cannot be 0", ""),
    ],
)
def test_a_file_that_gives_no_workload_is_answered_with_why(tmp_path, source, message, hint):
    file = write(tmp_path / "train.py", source)
    error = find_conflict(load, reference_to(file))
    assert error.message.startswith(message.format(file=file))
    assert hint.format(file=file) in error.hint
    if "SyntaxError" in message:
        assert "(train.py, line" in error.message or "klingon" in error.message
        assert error.detail.splitlines()[-1].startswith("SyntaxError: ")


@pytest.mark.parametrize(("module", "name"), [("tensorflow", "TensorFlow"), ("keras", "Keras 3")])
def test_a_missing_tensorflow_is_said_with_how_to_install_it(tmp_path, monkeypatch, module, name):
    monkeypatch.setitem(sys.modules, module, None)
    error = find_conflict(load, reference_to(write(tmp_path / "train.py", "raise RuntimeError('was run')")))
    assert error.message == f"{name} is not installed in {sys.prefix}"
    assert "pip install 'tensorflow" in error.hint
    assert "your own build" in error.hint


def test_missing_tensorflow_ends_the_run_and_leaves_nothing(directory, monkeypatch):
    hidden = write(directory / "hidden" / "sitecustomize.py", "import sys\nsys.modules['tensorflow'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(hidden.parent))
    write(directory / "train.py", "import tensorflow\n" + GOOD)
    error = find_conflict(lambda: tune("train.py", budget=60, out="run"))
    assert error.message == f"TensorFlow is not installed in {sys.prefix}"
    assert not (directory / "run").exists()


@pytest.mark.parametrize("as_module", [False, True])
def test_a_module_that_the_users_file_misses_is_the_files_error(tmp_path, as_module):
    file = write(tmp_path / "job_for_this_test.py", "import nowhere_to_be_found\n" + GOOD)
    reference = (
        WorkloadReference(module="job_for_this_test", search_path=(str(tmp_path),)) if as_module else reference_to(file)
    )
    error = find_conflict(load, reference)
    assert "raised ModuleNotFoundError: No module named 'nowhere_to_be_found'" in error.message
    assert "line 1" in error.detail


def test_file_that_raises_shows_only_the_users_frames(tmp_path):
    file = write(tmp_path / "train.py", "def read():\n    return {}['path']\n\nread()\n")
    error = find_conflict(load, reference_to(file))
    assert error.message == f"importing {file} raised KeyError: 'path'"
    assert error.hint == "Fix the file so that it can be imported."
    shown = [line for line in error.detail.splitlines() if line.strip(" ~^")]  # Python marks the place, too
    assert shown == [
        "Traceback (your code):",
        f'  File "{file}", line 4, in <module>',
        "    read()",
        f'  File "{file}", line 2, in read',
        "    return {}['path']",
        "KeyError: 'path'",
    ]


def test_what_a_module_misses_is_said_of_the_module(tmp_path):
    write(tmp_path / "job_for_this_test.py", "")
    reference = WorkloadReference(module="job_for_this_test", search_path=(str(tmp_path),))
    assert find_conflict(load, reference).message == "job_for_this_test: no 'workload' in it"
    write(tmp_path / "bad_for_this_test.py", "raise ValueError('no')")
    reference = WorkloadReference(module="bad_for_this_test", search_path=(str(tmp_path),))
    assert find_conflict(load, reference).message == "importing bad_for_this_test raised ValueError: no"


def test_a_file_that_starts_a_tuner_by_being_imported_is_refused(tmp_path):
    source = GOOD + "from autotune.script.loading import refuse_while_loading\nrefuse_while_loading()\n"
    error = find_conflict(load, reference_to(write(tmp_path / "train.py", source)))
    assert "calls autotune.tune() while it is being imported" in error.message
    assert 'if __name__ == "__main__":' in error.hint
    refuse_while_loading()


# ------------------------------------------------------------------------------------------------ tracebacks


def raised_by(tmp_path, source):
    """The exception that running `source` as a user's file raises."""
    file = write(tmp_path / "users_file.py", source)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # whatever the source raises
        exec(compile(source, str(file), "exec"), {})
    return caught.value


def test_only_the_users_frames_are_shown(tmp_path):
    source = (
        "import json\n"
        "from pydantic import TypeAdapter, PlainValidator\n"
        "from typing import Annotated\n"
        "from autotune.data.printable import short\n"
        "from autotune.script.workload import call_with_config\n"
        "def inner(pairs):\n"
        "    raise TypeError('in the middle')\n"
        "def through_json(value=None):\n"
        "    return json.loads('{}', object_pairs_hook=inner)\n"
        "def through_pydantic():\n"
        "    return TypeAdapter(Annotated[int, PlainValidator(through_json)]).validate_python(1)\n"
        "class Shown:\n"
        "    def __repr__(self):\n"
        "        return through_pydantic()\n"
        "call_with_config(lambda: short(Shown()), None)\n"
    )
    shown = format_user_traceback(raised_by(tmp_path, source))
    assert shown.startswith("Traceback (your code):\n")
    assert shown.endswith("TypeError: in the middle")
    for function in ("<lambda>", "through_pydantic", "through_json", "inner"):
        assert f"in {function}\n" in shown
    for foreign in (Path(json.__file__).parent, "site-packages", str(Path(loading.__file__).parents[1])):
        assert str(foreign) not in shown


def test_library_error_shows_the_users_calling_line(tmp_path):
    shown = format_user_traceback(raised_by(tmp_path, "import json\njson.loads('{')\n"))
    assert "line 2, in <module>\n    json.loads('{')" in shown
    assert "decoder.py" not in shown
    assert "JSONDecodeError" in shown.splitlines()[-1]


def test_an_error_without_any_frame_of_the_users_is_one_line():
    assert format_user_traceback(ValueError("no frames")) == "ValueError: no frames"


# ----------------------------------------------------------------------------------------------------- facts


def test_the_facts_are_what_the_tuner_needs_to_know(tmp_path):
    file = write(tmp_path / "train.py", GOOD)
    workload = a_workload(
        baseline={"prefetch": 2}, dataset=lambda config: None, validation=nothing, batched=True, drop_remainder=True
    )
    facts = facts_of(workload, reference_to(file))
    assert (facts.batch_size, facts.baseline) == (32, {"prefetch": 2})
    assert (facts.batched, facts.drop_remainder) == (True, True)
    assert (facts.takes_config, facts.validates) == (True, True)
    plain = facts_of(a_workload(), reference_to(file))
    assert (plain.takes_config, plain.validates) == (False, False)


@pytest.mark.parametrize(
    ("file", "variable", "own", "expected"),
    [
        ("jobs/train.py", "workload", None, "train"),
        ("jobs/train.py", "small", None, "small"),
        ("jobs/train.py", "small", "mine", "mine"),
        ("jobs/__init__.py", "workload", None, "jobs"),
        ("jobs/__main__.py", "workload", None, "jobs"),
    ],
)
def test_workload_name_is_its_own_its_variable_or_its_file(tmp_path, file, variable, own, expected):
    path = write(tmp_path / file, GOOD)
    assert facts_of(a_workload(name=own), reference_to(path, variable)).name == expected


def test_a_module_without_a_file_gives_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "made_up", ModuleType("made_up"))
    facts = facts_of(a_workload(), WorkloadReference(module="made_up"))
    assert facts.name == "made_up"
    assert facts.fingerprint.startswith("sha256:")


def test_a_modules_workload_has_the_modules_file(tmp_path):
    file = write(tmp_path / "job_for_this_test.py", GOOD)
    reference = WorkloadReference(module="job_for_this_test", search_path=(str(tmp_path),))
    workload = load(reference)
    assert facts_of(workload, reference) == facts_of(workload, reference_to(file))


def test_the_fingerprint_follows_source_and_name(tmp_path):
    one = write(tmp_path / "a" / "train.py", GOOD)
    same = write(tmp_path / "b" / "train.py", GOOD)
    other = write(tmp_path / "c" / "train.py", GOOD + "# changed\n")
    print_of = facts_of(a_workload(), reference_to(one)).fingerprint
    assert print_of.startswith("sha256:")
    assert facts_of(a_workload(), reference_to(same)).fingerprint == print_of
    assert facts_of(a_workload(), reference_to(other)).fingerprint != print_of
    assert facts_of(a_workload(), reference_to(one, "small")).fingerprint != print_of


# ------------------------------------------------------------------------------------------------- arguments

PARSES = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32)
"""


def with_args(path, *args):
    """The workload in a file that is given these arguments."""
    return reference_to(path).model_copy(update={"args": args})


@pytest.mark.parametrize("as_module", [False, True])
def test_a_file_sees_its_own_arguments(tmp_path, as_module):
    source = PARSES + "ARGS, _ = parser.parse_known_args()\n" + GOOD.replace("32", "ARGS.batch")
    reference = with_args(write(tmp_path / "job_for_this_test.py", source), "--batch", "48")
    if as_module:
        reference = reference.model_copy(update={"file": None, "module": "job_for_this_test"})
    assert load(reference).batch_size == 48


def test_refused_arguments_hint_how_to_pass_them(tmp_path):
    file = write(tmp_path / "train.py", PARSES + "parser.parse_args()\n" + GOOD)
    error = find_conflict(load, with_args(file, "--wdith", "3"))
    assert error.message == f"importing {file} raised SystemExit: 2 in {file}, line 5"
    assert "after `--`" in error.hint


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--epochs 90", "expected a list of strings"),
        (["--epochs", 90], "expected a list of strings"),
        (["--data", "\udcff"], "is not UTF-8"),
        (["x" * 30_000], "longer than 25000 characters"),
    ],
)
def test_arguments_that_no_process_can_be_given_are_refused(directory, args, words):
    write(directory / "train.py", GOOD)
    with pytest.raises(ArgumentError, match=words):
        tune("train.py", args=args)
    assert [path.name for path in directory.iterdir()] == ["train.py"]


@pytest.mark.parametrize(("attributes", "expected"), [({"__file__": "train.py"}, ("--width", "9")), ({}, ())])
def test_a_programs_workload_has_its_arguments(directory, monkeypatch, attributes, expected):
    write(directory / "train.py", GOOD)
    workload = a_workload()
    as_module(monkeypatch, "jobs_for_this_test", workload=workload)
    as_module(monkeypatch, "__main__", workload=None, **attributes)
    monkeypatch.setattr(sys, "argv", ["train.py", "--width", "9"])
    assert reference_of(workload).args == expected
