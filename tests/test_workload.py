"""The user's side: what a workload may be, how it is named, and how it is loaded."""

import functools
import importlib.machinery
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.errors import WorkloadError
from autotune.space.configuration import Configuration
from autotune.workloads import workload as module_under_test
from autotune.workloads.workload import (
    DatasetConfig,
    Workload,
    WorkloadReference,
    call_with_config,
    facts_of,
    load,
    parse_reference,
    reference_of,
    refuse_while_loading,
    takes_config,
    users_traceback,
)

GOOD = """
import autotune
workload = autotune.Workload(model=print, dataset=print, compile=dict, batch_size=32)
"""


def nothing():
    """Stands for the functions of a workload that nobody calls here."""


def a_workload(**changes):
    """A workload, with some arguments changed."""
    arguments = {"model": nothing, "dataset": nothing, "compile": nothing, "batch_size": 32}
    return Workload(**{**arguments, **changes})


@pytest.fixture(autouse=True)
def modules_and_path_as_before(monkeypatch):
    """What loading adds to the imported modules and to the search path is gone after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
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


def refusal(function, *arguments):
    """The error with which `function` refuses."""
    with pytest.raises(WorkloadError) as caught:
        function(*arguments)
    return caught.value


# ------------------------------------------------------------------------------------------------ Workload


def test_a_workload_keeps_what_it_is_given():
    """Arguments are there unchanged, the others have their defaults, and nothing is called."""
    workload = a_workload(baseline={"prefetch": "autotune", "jit_compile": True})
    assert workload.model is nothing
    assert (workload.batch_size, workload.baseline["prefetch"]) == (32, "autotune")
    assert (workload.validation, workload.batched, workload.drop_remainder, workload.name) == (
        None,
        False,
        False,
        None,
    )


@pytest.mark.parametrize("part", ["model", "dataset", "compile", "validation"])
def test_the_parts_of_a_workload_are_functions(part):
    """A part that was called already is refused with how to hand it over."""
    error = refusal(lambda: a_workload(**{part: {"loss": "mse"}}))
    assert error.message == f"Workload({part}=…) is a dict, expected a function"
    assert error.hint == f"Hand over the function itself, without calling it: {part}=make_{part}."


@pytest.mark.parametrize("part", ["model", "dataset", "compile"])
def test_only_validation_may_be_missing(part):
    """None is no model, no dataset and no compile arguments."""
    assert "is a NoneType, expected a function" in refusal(lambda: a_workload(**{part: None})).message


@pytest.mark.parametrize("size", [0, -1, 32.0, True, "32", None, (1 << 20) + 1])
def test_a_batch_size_is_a_whole_number_from_one(size):
    """The error names the argument and what it takes."""
    error = refusal(lambda: a_workload(batch_size=size))
    assert error.message == f"Workload(batch_size=…): batch_size cannot be {size!r}"
    assert error.hint == "It takes an integer from 1 to 1048576."


def test_a_misspelt_baseline_knob_is_answered_with_the_nearest():
    """The knob error is a workload error that says where the name stands."""
    error = refusal(lambda: a_workload(baseline={"prefech": 2}))
    assert error.message == "Workload(baseline=…): there is no knob called 'prefech'"
    assert "Did you mean 'prefetch'?" in error.hint


def test_a_baseline_value_that_the_knob_cannot_take_is_refused():
    """Tensors, tf.data.AUTOTUNE as -1 and the like do not pass."""
    assert refusal(lambda: a_workload(baseline={"prefetch": -1})).message == (
        "Workload(baseline=…): prefetch cannot be -1"
    )


def test_the_batch_size_is_not_a_baseline_knob():
    """It has an argument of its own, and the error says so."""
    error = refusal(lambda: a_workload(baseline={"batch_size": 64}))
    assert error.message == "Workload(baseline=…) names batch_size"
    assert error.hint == "Give it as Workload(batch_size=…)."


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("baseline", ["prefetch"], "Workload(baseline=…) is a list, expected a dict of knobs"),
        ("baseline", None, "Workload(baseline=…) is a NoneType, expected a dict of knobs"),
        ("batched", 1, "Workload(batched=…) is a int, expected True or False"),
        ("drop_remainder", "yes", "Workload(drop_remainder=…) is a str, expected True or False"),
        ("name", 7, "Workload(name=…) is a int, expected a string"),
    ],
)
def test_arguments_of_another_type_are_refused(part, value, message):
    """Each is named, with what it is and what it should be."""
    assert refusal(lambda: a_workload(**{part: value})).message == message


def test_a_dataset_that_batches_by_itself_must_be_told_the_size():
    """`batched=True` needs `dataset(config)`; with it, it is fine."""
    error = refusal(lambda: a_workload(batched=True))
    assert "batched=True" in error.message
    assert "def dataset(config)" in error.hint
    assert a_workload(batched=True, dataset=lambda config: None).batched


def test_a_workload_cannot_be_changed():
    """It is frozen once made."""
    with pytest.raises(AttributeError):
        a_workload().batch_size = 64


# -------------------------------------------------------------------------------------------- dataset(config)


class Callables:
    """Callables of every kind, with and without room for a config."""

    def method(self):
        """Take none."""

    def method_with_config(self, config):
        """Take one."""

    def __call__(self, config):
        """Take one."""


def keyword_only(*, config=None):
    """Take one by name."""


def with_own_options(shuffle=True, config=None):
    """Take one by name, after an option of the user's own."""


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (nothing, False),
        (lambda **options: None, False),
        (lambda *files: None, False),
        (lambda shuffle=True: None, False),
        (lambda split="train", /, shuffle=True: None, False),
        (lambda *, size: None, False),
        (Callables().method, False),
        (functools.partial(lambda config: None, 1), False),
        (functools.partial(lambda config: None, config=1), False),
        (type("Opaque", (), {"__signature__": 3, "__call__": lambda self: None})(), False),
        (lambda config: None, True),
        (lambda config=None: None, True),
        (lambda config=None, /: None, True),
        (lambda config, /: None, True),
        (lambda c: None, True),
        (keyword_only, True),
        (with_own_options, True),
        (Callables().method_with_config, True),
        (Callables(), True),
        (functools.partial(lambda split, config: None, "train"), True),
    ],
)
def test_a_config_is_for_a_parameter_of_that_name_or_a_first_one_that_must_be_given(function, takes):
    """An option of the user's own is never handed a config; a signature that cannot be read takes none."""
    assert takes_config(function) is takes


def test_the_config_arrives_where_it_is_meant_and_nowhere_else():
    """By its name wherever that stands, else as the first argument; the user's own options keep their defaults."""
    configuration = Configuration({"batch_size": 64})
    told = DatasetConfig(batch_size=64)
    for function, received in (
        (lambda shuffle=True: shuffle, True),
        (lambda *files: files, ()),
        (lambda shuffle=True, config=None: (shuffle, config), (True, told)),
        (lambda *, config=None: config, told),
        (lambda config=None, /: config, told),
        (lambda c: c, told),
        (functools.partial(lambda split, config: (split, config), split="train"), ("train", told)),
    ):
        assert call_with_config(function, configuration) == received


def test_a_function_is_called_with_a_config_only_if_it_takes_one():
    """`dataset()` and `dataset(config)` both work."""
    configuration = Configuration({"batch_size": 64, "num_parallel_calls": 4})
    assert call_with_config(lambda: "none", configuration) == "none"
    assert call_with_config(lambda config: config, configuration) == DatasetConfig(
        batch_size=64, num_parallel_calls=4
    )


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({}, DatasetConfig(batch_size=8, num_parallel_calls=None, deterministic=True)),
        ({"num_parallel_calls": 0}, DatasetConfig(batch_size=8, num_parallel_calls=None)),
        ({"num_parallel_calls": 16}, DatasetConfig(batch_size=8, num_parallel_calls=16)),
        ({"num_parallel_calls": "autotune"}, DatasetConfig(batch_size=8, num_parallel_calls=-1)),
        ({"deterministic": False}, DatasetConfig(batch_size=8, deterministic=False)),
    ],
)
def test_a_dataset_is_told_its_part_in_tf_datas_own_values(knobs, expected):
    """0 parallel calls are None (serial), "autotune" is -1, which is tf.data.AUTOTUNE."""
    assert DatasetConfig.of(Configuration({"batch_size": 8, **knobs})) == expected


# ------------------------------------------------------------------------------------------------ references


def test_a_file_is_looked_up_from_the_current_directory(directory):
    """The reference has the absolute path, and the file's directory as its search path."""
    file = write(directory / "jobs" / "train.py", "workload = 1")
    assert parse_reference("jobs/train.py") == reference_to(file)


def test_a_name_follows_the_colon(directory):
    """Another variable of the file is chosen by name."""
    file = write(directory / "train.py", "small = large = 1")
    assert parse_reference("train.py:large") == reference_to(file, "large")


def test_a_link_is_followed_to_the_file(directory):
    """The workload's neighbours are those of the file, not those of the link."""
    file = write(directory / "jobs" / "train.py", "workload = 1")
    (directory / "link.py").symlink_to(file)
    assert parse_reference("link.py") == reference_to(file)


def test_a_missing_file_is_answered_with_where_it_was_looked_for(directory):
    """The error names the path as written and the current directory."""
    error = refusal(parse_reference, "jobs/none.py")
    assert error.message == "jobs/none.py: no such file"
    assert str(directory) in error.hint


def test_a_syntax_error_is_answered_with_its_line(directory):
    """File, line and Python's own account of it; the file is not run."""
    write(directory / "train.py", "import sys\nsys.exit(7)\nworkload = = 1\n")
    error = refusal(parse_reference, "train.py")
    assert error.message == "train.py:3: syntax error"
    assert "workload = = 1" in error.detail
    assert error.detail.endswith("SyntaxError: invalid syntax")


def test_source_that_python_cannot_decode_is_a_syntax_error_without_a_line(directory):
    """No line is named where there is none to name."""
    write(directory / "train.py", "# coding: klingon\n")
    assert refusal(parse_reference, "train.py").message == "train.py: syntax error"


@pytest.mark.parametrize(
    "source", [b"\0", b"x = '" + b"(" * 300, b"(" * 300, b"-" * 50_000 + b"1", b"\xff\xfe"]
)
def test_source_that_is_no_source_is_a_syntax_error(directory, source):
    """Null bytes, brackets without end, nesting beyond the parser, bytes that are no text."""
    (directory / "train.py").write_bytes(source)
    assert refusal(parse_reference, "train.py").message.endswith("syntax error")


def test_a_missing_name_is_answered_with_the_nearest_public_one(directory):
    """The error says what is missing, guesses, and shows what to write."""
    write(directory / "train.py", "_workload = 1\nworkloads = 2\n")
    error = refusal(parse_reference, "train.py")
    assert error.message == "train.py: no 'workload' in it"
    assert error.hint.startswith("Did you mean 'workloads'? Write `workload = autotune.Workload(…)`")
    assert "train.py:NAME" in error.hint


@pytest.mark.parametrize(
    "source",
    [
        "workload = 1",
        "a, (workload, b) = 1, (2, 3)",
        "workload: int = 1",
        "if True:\n    workload = 1",
        "try:\n    workload = 1\nexcept ImportError:\n    pass",
        "with open('x') as workload:\n    pass",
        "for workload in []:\n    pass",
        "(workload := 1)",
        "def workload():\n    pass",
        "class workload:\n    pass",
        "import workload",
        "import workload.parts",
        "import parts as workload",
        "from parts import one as workload",
        "from parts import *",
        "globals()['work' + 'load'] = 1",
        "vars()['work' + 'load'] = 1",
        "eval('globals().update(workload=1)')",
        "exec('workload = 1')",
        "def make():\n    global workload\n    workload = 1\nmake()",
    ],
)
def test_every_way_to_bind_a_name_counts(directory, source):
    """What only running the file can tell is left to running it."""
    write(directory / "train.py", source)
    assert parse_reference("train.py").name == "workload"


@pytest.mark.parametrize(
    "source",
    [
        "",
        "print(workload)",
        "def make():\n    workload = 1",
        "class Job:\n    workload = 1",
        "job.workload = 1",
        "make = lambda: (workload := 1)",
        "import parts.workload",
    ],
)
def test_a_name_that_is_only_used_or_local_does_not_count(directory, source):
    """Reading a name, an attribute of that name, and another scope's variable bind nothing here."""
    write(directory / "train.py", source)
    assert refusal(parse_reference, "train.py").message == "train.py: no 'workload' in it"


@pytest.mark.parametrize("text", ["train.py:", "train.py:a-b", "train.py:1", "pkg:a:b", "C:/train.py"])
def test_what_follows_the_colon_must_be_a_name(text):
    """The error shows the part that is none, and the two ways to write a reference."""
    error = refusal(parse_reference, text)
    assert error.message == f"{text!r}: {text.partition(':')[2]!r} is not a name"
    assert "path/to/file.py:name" in error.hint


@pytest.mark.parametrize(
    ("text", "module", "name"),
    [("package.train", "package.train", "workload"), ("package:small", "package", "small")],
)
def test_a_dotted_name_is_a_module(directory, text, module, name):
    """Modules are looked up from the current directory, packages by their `__init__.py`."""
    write(directory / "package" / "__init__.py", "small = 1")
    write(directory / "package" / "train.py", "from . import small\nworkload = small")
    assert parse_reference(text) == WorkloadReference(module=module, name=name, search_path=(str(directory),))


def test_a_module_may_lie_in_a_directory_without_init(directory):
    """A namespace package, in which a missing module is missing as well."""
    write(directory / "jobs" / "train.py", "workload = 1")
    assert parse_reference("jobs.train").module == "jobs.train"
    error = refusal(parse_reference, "jobs.trian")
    assert error.message == "no module 'jobs.trian'"
    assert error.hint == "Did you mean 'train'? 'trian' is looked for in jobs."


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (
            "tran",
            "Did you mean 'train'? 'tran' is looked for in {directory} and among the installed packages.",
        ),
        ("nowhere_to_be_found.train", "'nowhere_to_be_found' is looked for in {directory}"),
        ("package.trian:small", "Did you mean 'train'? 'trian' is looked for in package."),
        ("package.trian.deeper", "Did you mean 'train'? 'trian' is looked for in package."),
        ("train.deeper", "'deeper' is looked for in train."),
    ],
)
def test_a_missing_module_is_answered_without_importing_anything(directory, text, hint):
    """The error names the part that is missing, where it was looked for, and the nearest name there."""
    write(directory / "package" / "__init__.py", "raise RuntimeError('was run')")
    write(directory / "package" / "train.py", "workload = 1")
    write(directory / "train.py", "raise RuntimeError('was run')")
    error = refusal(parse_reference, text)
    assert error.message == f"no module {text.partition(':')[0]!r}"
    assert error.hint.startswith(hint.format(directory=directory))


def test_a_module_without_the_name_is_answered_like_a_file(directory):
    """The module is read, not run: a missing name and a syntax error are told with what to write."""
    write(directory / "package" / "__init__.py", "raise RuntimeError('was run')")
    write(directory / "package" / "train.py", "workloads = 1\nraise RuntimeError('was run')")
    write(directory / "package" / "broken.py", "\nworkload = = 1")
    error = refusal(parse_reference, "package.train")
    assert error.message == "package.train: no 'workload' in it"
    assert "Did you mean 'workloads'?" in error.hint
    assert "package.train:NAME" in error.hint
    assert refusal(parse_reference, "package.broken").message == "package/broken.py:2: syntax error"


def test_a_module_of_the_current_directory_comes_before_an_installed_one(directory, monkeypatch):
    """As it will be imported: the current directory is put first on the search path."""
    elsewhere = directory / "elsewhere"
    write(elsewhere / "module_found_twice.py", "other = 1")
    write(elsewhere / "module_found_elsewhere.py", "other = 1")
    monkeypatch.syspath_prepend(str(elsewhere))
    write(directory / "module_found_twice.py", "workload = 1")
    assert parse_reference("module_found_twice").name == "workload"
    message = refusal(parse_reference, "module_found_elsewhere").message
    assert message == "module_found_elsewhere: no 'workload' in it"


class FromNowhere:
    """An import hook, as editable installations have them, for one module without a file."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """The module, if it is the one."""
        return importlib.machinery.ModuleSpec(name, None) if name == "hooked_for_this_test" else None


@pytest.mark.parametrize("text", ["hooked_for_this_test", "changing.later", "listing.later", "_csv", "sys"])
def test_what_only_importing_can_tell_is_left_to_it(directory, monkeypatch, text):
    """Import hooks, packages that change their own path or the modules, compiled modules."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, FromNowhere])
    write(directory / "changing" / "__init__.py", "__path__.append('elsewhere')")
    write(directory / "listing" / "__init__.py", "import sys\nsys.modules['listing.later'] = sys")
    assert parse_reference(text).module == text


def test_a_module_may_make_its_names_when_asked(directory):
    """With a `__getattr__` at the top level, only running the module can tell."""
    write(directory / "lazy.py", "def __getattr__(name):\n    return 1")
    assert parse_reference("lazy").name == "workload"


# ----------------------------------------------------------------------- files that cannot be loaded by path


def test_a_file_with_relative_imports_is_answered_with_its_module(directory):
    """Loaded by its path it has no package; the hint is the command that works, from where it works."""
    write(directory / "jobs" / "pkg" / "__init__.py", "")
    write(directory / "jobs" / "pkg" / "net.py", "build = 1")
    write(directory / "jobs" / "pkg" / "train.py", "import os\nfrom .net import build\nworkload = build")
    error = refusal(parse_reference, "jobs/pkg/train.py")
    assert error.message.startswith("jobs/pkg/train.py:2: a relative import")
    assert error.hint.endswith(f": cd {directory / 'jobs'} && autotune tune pkg.train")
    assert refusal(parse_reference, "jobs/pkg/train.py:build").hint.endswith("tune pkg.train:build")


@pytest.mark.parametrize(
    ("file", "line", "module"),
    [
        ("pkg/train.py", "from .net import x", "pkg.train"),
        ("pkg/train.py", "from . import net", "pkg.train"),
        ("top/pkg/train.py", "from ..net import x", "top.pkg.train"),
        ("pkg/__init__.py", "from .net import x", "pkg"),
        ("whole/pkg/train.py", "from .net import x", "whole.pkg.train"),
    ],
)
def test_the_module_is_told_from_the_current_directory_where_it_can_be(directory, file, line, module):
    """Also without an `__init__.py`, as deep as the dots reach and as high as the packages do."""
    write(directory / "whole" / "__init__.py", "")
    write(directory / "whole" / "pkg" / "__init__.py", "")
    write(directory / file, f"{line}\nworkload = 1")
    assert refusal(parse_reference, file).hint.endswith(f"its package: autotune tune {module}")


def test_no_module_is_made_up_for_a_file_that_has_none(directory):
    """A directory that no module can be called like."""
    write(directory / "my-jobs" / "train.py", "from .net import x\nworkload = 1")
    assert "Write absolute imports" in refusal(parse_reference, "my-jobs/train.py").hint


@pytest.mark.parametrize(
    "source",
    [
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .net import x\nworkload = 1",
        "try:\n    from .net import x\nexcept ImportError:\n    x = 1\nworkload = x",
        "def unused():\n    from .net import x\nworkload = 1",
    ],
)
def test_a_relative_import_that_may_never_run_is_no_mistake(directory, source):
    """Only running the file can tell."""
    write(directory / "train.py", source)
    assert parse_reference("train.py").name == "workload"


def test_a_relative_import_that_runs_all_the_same_gets_the_same_hint(directory):
    """Found while loading, the error says how to name the module, too."""
    file = write(directory / "pkg" / "train.py", "if True:\n    from .net import x\n" + GOOD)
    error = refusal(load, reference_to(file))
    assert "attempted relative import" in error.message
    assert error.hint.endswith("autotune tune pkg.train")


@pytest.mark.parametrize(
    "name", ["random", "statistics", "keras", "tensorflow", "numpy", "pandas", "autotune"]
)
def test_a_file_called_like_a_module_that_tensorflow_needs_is_refused(directory, name):
    """Its directory comes first on the search path, so the file would be imported in that module's place."""
    write(directory / "jobs" / f"{name}.py", "workload = 1")
    error = refusal(parse_reference, f"jobs/{name}.py")
    assert error.message.startswith(f"jobs/{name}.py: is called like ")
    assert f"`import {name}`" in error.message
    assert f"{name}_workload" in error.hint


def test_a_package_called_like_one_that_tensorflow_needs_is_refused(directory):
    """The current directory comes first on the search path, too; an installed package is not meant."""
    write(directory / "random.py", "workload = 1")
    write(directory / "keras" / "train.py", "workload = 1")
    write(directory / "keras" / "__init__.py", "")
    assert "`import random`" in refusal(parse_reference, "random").message
    assert "`import keras`" in refusal(parse_reference, "keras.train").message
    assert refusal(parse_reference, "colorsys").message == "colorsys: no 'workload' in it"


@pytest.mark.parametrize(
    "name", ["train", "model", "optuna", "sys", "time", "os", "digits", "jobs/random/train"]
)
def test_a_file_that_hides_nothing_tensorflow_needs_is_fine(directory, name):
    """What is built into Python is found before any path; of directories only the file's own comes first."""
    write(directory / f"{name}.py", "workload = 1")
    assert parse_reference(f"{name}.py").name == "workload"


@pytest.mark.parametrize(
    "text", ["jobs", "jobs/", "notes", ".", "..", "", ":name", "a-b", "jobs/train", "a..b"]
)
def test_what_is_neither_a_python_file_nor_a_module_is_refused(directory, text):
    """Directories, other files, empty text and what cannot be a module's name."""
    (directory / "jobs").mkdir()
    write(directory / "notes", "")
    error = refusal(parse_reference, text)
    assert error.message == f"{text.partition(':')[0]!r} is neither a .py file nor a module"
    assert "package.module[:name]" in error.hint


def test_a_directory_called_like_a_file_is_refused(directory):
    """The operating system's reason is given."""
    (directory / "train.py").mkdir()
    assert refusal(parse_reference, "train.py").message == "cannot read train.py: Is a directory"


def test_a_file_that_may_not_be_read_says_so(directory, monkeypatch):
    """A refused permission is not taken for a missing file."""

    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("autotune.workloads.workload.read_at_most", refuse)
    assert refusal(parse_reference, "train.py").message == "cannot read train.py: Permission denied"


def parsed_or_refused(text):
    """The reference that `text` stands for, or the error; any other exception passes through."""
    try:
        return parse_reference(text)
    except WorkloadError as error:
        return error


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30) | st.text(max_size=12).map(lambda text: text + ".py"))
@example(text="x" * 5000)
@example(text="x" * 5000 + ".py")
@example(text="\0.py")
def test_whatever_is_written_is_a_reference_or_a_workload_error(text):
    """No text raises anything else, and each refusal has a message."""
    parsed = parsed_or_refused(text)
    assert isinstance(parsed, WorkloadReference) or parsed.message


@settings(max_examples=200, deadline=None)
@given(
    source=st.binary(max_size=60)
    | st.text(alphabet="workload =:()[]\n\t#\\'\"defclassimport*,.0", max_size=60).map(str.encode)
)
def test_whatever_the_file_holds_is_a_reference_or_a_workload_error(source, tmp_path_factory):
    """No content raises anything else."""
    file = tmp_path_factory.getbasetemp() / "arbitrary.py"
    file.write_bytes(source)
    parsed = parsed_or_refused(str(file))
    assert isinstance(parsed, WorkloadReference) or parsed.message.startswith(str(file))


# ------------------------------------------------------------------------------------- references of objects


def test_a_modules_variable_is_found_by_module_and_name(monkeypatch):
    """Another process imports the same module, with the same search path."""
    workload = a_workload()
    module = ModuleType("jobs.train")
    module.small = workload
    monkeypatch.setitem(sys.modules, "jobs.train", module)
    monkeypatch.setattr(sys, "path", ["/somewhere", ""])
    assert reference_of(workload) == WorkloadReference(
        module="jobs.train", name="small", search_path=("/somewhere", str(Path.cwd()))
    )


def test_a_local_variable_is_refused_with_where_to_put_it():
    """A workload that no module holds cannot be loaded by another process."""
    error = refusal(reference_of, a_workload())
    assert "not a variable at the top level of a module" in error.message
    assert "outside of any function" in error.hint


def test_an_equal_workload_is_not_the_workload(monkeypatch):
    """Only the very object is looked for."""
    module = ModuleType("jobs.train")
    module.workload = a_workload()
    monkeypatch.setitem(sys.modules, "jobs.train", module)
    refusal(reference_of, a_workload())


def test_what_is_no_module_among_the_modules_is_passed_over(monkeypatch):
    """Packages put stand-ins into `sys.modules`; they hold no workload."""
    workload = a_workload()
    module = ModuleType("the_right_one")
    module.workload = workload
    monkeypatch.setitem(sys.modules, "a_stand_in", object())
    monkeypatch.setitem(sys.modules, "the_right_one", module)
    assert reference_of(workload).module == "the_right_one"


def as_main(monkeypatch, workload, **attributes):
    """Make `workload` a variable of the program that is being run."""
    main = ModuleType("__main__")
    main.workload = workload
    for name, value in attributes.items():
        setattr(main, name, value)
    monkeypatch.setitem(sys.modules, "__main__", main)


def test_a_programs_variable_is_found_by_its_file(directory, monkeypatch):
    """`python train.py`: the file is loaded again, under another name."""
    file = write(directory / "train.py", GOOD)
    workload = a_workload()
    as_main(monkeypatch, workload, __file__="train.py")
    reference = reference_of(workload)
    assert (reference.file, reference.module, reference.name) == (str(file), None, "workload")


@pytest.mark.parametrize("name", ["jobs.train", "jobs.__main__"])
def test_a_program_run_as_a_module_is_found_as_that_module(monkeypatch, name):
    """`python -m jobs.train`, and `python -m jobs`, which runs the package's `__main__`."""
    workload = a_workload()
    as_main(monkeypatch, workload, __spec__=importlib.machinery.ModuleSpec(name, None))
    reference = reference_of(workload)
    assert (reference.module, reference.file) == (name, None)


@pytest.mark.parametrize("attributes", [{}, {"__file__": "<stdin>"}])
def test_a_workload_imported_into_a_session_is_found_in_its_module(monkeypatch, attributes):
    """In a notebook, `from train import workload`: the module can be loaded again, the session cannot."""
    workload = a_workload()
    as_main(monkeypatch, workload, **attributes)
    module = ModuleType("train")
    module.small = workload
    monkeypatch.setitem(sys.modules, "train", module)
    reference = reference_of(workload)
    assert (reference.module, reference.file, reference.name) == ("train", None, "small")


def test_a_program_with_a_file_comes_before_what_it_imported(directory, monkeypatch):
    """`python run.py` that imports its workload is loaded again as that file."""
    file = write(directory / "run.py", GOOD)
    workload = a_workload()
    as_main(monkeypatch, workload, __file__="run.py")
    module = ModuleType("train")
    module.workload = workload
    monkeypatch.setitem(sys.modules, "train", module)
    assert reference_of(workload).file == str(file)


@pytest.mark.parametrize("attributes", [{}, {"__file__": "<stdin>"}])
def test_a_workload_typed_into_a_session_is_refused(monkeypatch, attributes):
    """There is no file that another process could load."""
    workload = a_workload()
    as_main(monkeypatch, workload, **attributes)
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["__main__"])  # as some packages call it, too
    error = refusal(reference_of, workload)
    assert "interactive session" in error.message
    assert 'autotune.tune("path/to/file.py")' in error.hint


# --------------------------------------------------------------------------------------------------- loading


def test_a_workload_is_loaded_from_a_file(tmp_path):
    """The variable's value comes back."""
    loaded = load(reference_to(write(tmp_path / "train.py", GOOD)))
    assert isinstance(loaded, Workload)
    assert loaded.batch_size == 32


def test_a_file_finds_its_neighbours(tmp_path):
    """Modules beside the file can be imported by it, and its `__main__` block stays asleep."""
    write(tmp_path / "sizes_for_this_test.py", "BATCH = 48")
    source = GOOD.replace("32", "BATCH") + "if __name__ == '__main__':\n    raise SystemExit('run')\n"
    file = write(tmp_path / "train.py", "from sizes_for_this_test import BATCH\n" + source)
    assert load(reference_to(file)).batch_size == 48


def test_a_file_finds_itself_while_it_is_loaded(tmp_path):
    """Code that looks its own module up, as decorators do, finds it."""
    file = write(
        tmp_path / "train.py", GOOD + "import sys\nassert sys.modules[__name__].workload is workload\n"
    )
    assert load(reference_to(file)).batch_size == 32


def test_a_workload_is_loaded_from_a_module(tmp_path):
    """Found by way of the reference's search path."""
    write(tmp_path / "package_for_this_test" / "__init__.py", "")
    write(tmp_path / "package_for_this_test" / "jobs.py", GOOD)
    reference = WorkloadReference(module="package_for_this_test.jobs", search_path=(str(tmp_path),))
    assert load(reference).batch_size == 32


def test_the_search_path_comes_first_in_its_own_order(tmp_path):
    """Directories are put in front, and none twice."""
    file = write(tmp_path / "train.py", GOOD)
    known = sys.path[0]
    before = sys.path.count(known)
    load(WorkloadReference(file=str(file), search_path=("/one", known, "/two")))
    assert sys.path[:3] == ["/one", "/two", known]
    assert sys.path.count(known) == before


def test_a_module_that_is_not_there_is_named():
    """The error says where it was looked for; there is no traceback to show."""
    error = refusal(load, WorkloadReference(module="nowhere_to_be_found"))
    assert error.message == "no module 'nowhere_to_be_found'"
    assert "current directory" in error.hint
    assert error.detail == ""


def test_a_missing_package_above_the_module_is_a_missing_module():
    """`nowhere.train` is missing when `nowhere` is."""
    assert refusal(load, WorkloadReference(module="nowhere.train")).message == "no module 'nowhere.train'"


@pytest.mark.parametrize("as_module", [False, True])
def test_a_module_that_the_users_file_misses_is_the_files_error(tmp_path, as_module):
    """It is not the workload's module that is missing, and the traceback shows the line."""
    file = write(tmp_path / "job_for_this_test.py", "import nowhere_to_be_found\n" + GOOD)
    reference = (
        WorkloadReference(module="job_for_this_test", search_path=(str(tmp_path),))
        if as_module
        else reference_to(file)
    )
    error = refusal(load, reference)
    assert "raised ModuleNotFoundError: No module named 'nowhere_to_be_found'" in error.message
    assert "line 1" in error.detail


def test_a_missing_module_without_a_name_is_the_files_error(tmp_path):
    """Packages raise it by hand, too."""
    file = write(tmp_path / "train.py", "raise ModuleNotFoundError('install the extra')")
    error = refusal(load, reference_to(file))
    assert error.message == f"importing {file} raised ModuleNotFoundError: install the extra"


def test_a_file_that_raises_is_answered_with_the_users_own_frames(tmp_path):
    """Message, file, line and source are shown; the frames of the import system are not."""
    file = write(tmp_path / "train.py", "def read():\n    return {}['path']\n\nread()\n")
    error = refusal(load, reference_to(file))
    assert error.message == f"importing {file} raised KeyError: 'path'"
    assert error.hint == "Mend the file; it must be importable."
    shown = [line for line in error.detail.splitlines() if line.strip(" ~^")]  # Python marks the place, too
    assert shown == [
        "Traceback (your code):",
        f'  File "{file}", line 4, in <module>',
        "    read()",
        f'  File "{file}", line 2, in read',
        "    return {}['path']",
        "KeyError: 'path'",
    ]


@pytest.mark.parametrize(
    "statement", ["raise SystemExit(3)", "raise KeyboardInterrupt", "import sys; sys.exit()"]
)
def test_a_file_that_ends_the_process_is_an_error_too(tmp_path, statement):
    """Importing must not end the template."""
    error = refusal(load, reference_to(write(tmp_path / "train.py", statement)))
    assert " raised " in error.message


def test_a_missing_variable_is_answered_with_the_nearest(tmp_path):
    """What looking at the file could not tell, loading does."""
    file = write(tmp_path / "train.py", "globals()['workloads'] = 1")
    error = refusal(load, reference_to(file))
    assert error.message == f"{file}: no 'workload' in it"
    assert error.hint == "Did you mean 'workloads'? Write `workload = autotune.Workload(…)`."


def test_what_a_module_misses_is_said_of_the_module(tmp_path):
    """A workload looked up by module is named by module in the error."""
    write(tmp_path / "job_for_this_test.py", "")
    reference = WorkloadReference(module="job_for_this_test", search_path=(str(tmp_path),))
    assert refusal(load, reference).message == "job_for_this_test: no 'workload' in it"
    write(tmp_path / "bad_for_this_test.py", "raise ValueError('no')")
    reference = WorkloadReference(module="bad_for_this_test", search_path=(str(tmp_path),))
    assert refusal(load, reference).message == "importing bad_for_this_test raised ValueError: no"


def test_a_variable_of_another_type_is_refused(tmp_path):
    """The error says what it is and what was expected."""
    file = write(tmp_path / "train.py", "workload = {'batch_size': 32}")
    error = refusal(load, reference_to(file))
    assert error.message == f"{file}:workload: is a dict, expected an autotune.Workload"
    assert "path/to/file.py:NAME" in error.hint


def test_a_wrong_argument_in_the_users_file_keeps_its_own_message(tmp_path):
    """The workload's own error passes through as it is."""
    file = write(tmp_path / "train.py", GOOD.replace("batch_size=32", "batch_size=0"))
    assert refusal(load, reference_to(file)).message == "Workload(batch_size=…): batch_size cannot be 0"


def test_a_file_that_starts_a_tuner_by_being_imported_is_refused(tmp_path):
    """The error says where to put the call; afterwards tuners can be started again."""
    source = GOOD + "from autotune.workloads.workload import refuse_while_loading\nrefuse_while_loading()\n"
    error = refusal(load, reference_to(write(tmp_path / "train.py", source)))
    assert "calls autotune.tune() while it is being imported" in error.message
    assert 'if __name__ == "__main__":' in error.hint
    refuse_while_loading()


@pytest.mark.parametrize("source", [GOOD, "raise ValueError"])
def test_a_tuner_may_start_once_loading_is_over(tmp_path, source):
    """Whether the file could be loaded or not, and while nothing is loaded."""
    refuse_while_loading()
    try:
        load(reference_to(write(tmp_path / "train.py", source)))
    except WorkloadError:
        assert source != GOOD
    refuse_while_loading()


# ------------------------------------------------------------------------------------------------ tracebacks


def raised_by(tmp_path, source):
    """The exception that running `source` as a user's file raises."""
    file = write(tmp_path / "users_file.py", source)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # whatever the source raises
        exec(compile(source, str(file), "exec"), {})
    return caught.value


def test_only_the_users_frames_are_shown(tmp_path):
    """Frames of the standard library, of installed packages and of autotune are left out; the user's stay."""
    source = (
        "import json\n"
        "from pydantic import TypeAdapter, PlainValidator\n"
        "from typing import Annotated\n"
        "from autotune.workloads.workload import call_with_config\n"
        "def inner(pairs):\n"
        "    raise TypeError('in the middle')\n"
        "def through_json(value=None):\n"
        "    return json.loads('{}', object_pairs_hook=inner)\n"
        "def through_pydantic():\n"
        "    return TypeAdapter(Annotated[int, PlainValidator(through_json)]).validate_python(1)\n"
        "call_with_config(lambda: through_pydantic(), None)\n"
    )
    shown = users_traceback(raised_by(tmp_path, source))
    assert shown.startswith("Traceback (your code):\n")
    assert shown.endswith("TypeError: in the middle")
    for function in ("<lambda>", "through_pydantic", "through_json", "inner"):
        assert f"in {function}\n" in shown
    for foreign in (Path(json.__file__).parent, "site-packages", module_under_test.__file__):
        assert str(foreign) not in shown


def test_an_error_from_a_library_shows_the_users_line_that_called_it(tmp_path):
    """The last frame is the user's call, not the library's insides."""
    shown = users_traceback(raised_by(tmp_path, "import json\njson.loads('{')\n"))
    assert "line 2, in <module>\n    json.loads('{')" in shown
    assert "decoder.py" not in shown
    assert "JSONDecodeError" in shown.splitlines()[-1]


def test_an_error_without_any_frame_of_the_users_is_one_line():
    """No empty traceback is shown."""
    assert users_traceback(ValueError("no frames")) == "ValueError: no frames"


# ----------------------------------------------------------------------------------------------------- facts


def test_the_facts_are_what_the_tuner_needs_to_know(tmp_path):
    """Batch size, baseline, and what dataset and validation look like."""
    file = write(tmp_path / "train.py", GOOD)
    workload = a_workload(
        baseline={"prefetch": 2},
        dataset=lambda config: None,
        validation=nothing,
        batched=True,
        drop_remainder=True,
    )
    facts = facts_of(workload, reference_to(file))
    assert (facts.batch_size, facts.baseline) == (32, {"prefetch": 2})
    assert (facts.batched, facts.drop_remainder) == (True, True)
    assert (facts.dataset_takes_config, facts.validates) == (True, True)
    plain = facts_of(a_workload(), reference_to(file))
    assert (plain.dataset_takes_config, plain.validates) == (False, False)


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
def test_a_workload_is_called_by_its_own_name_its_variable_or_its_file(
    tmp_path, file, variable, own, expected
):
    """The usual variable's name says nothing, nor do the names of a package's own files."""
    path = write(tmp_path / file, GOOD)
    assert facts_of(a_workload(name=own), reference_to(path, variable)).name == expected


def test_a_module_without_a_file_gives_its_name(monkeypatch):
    """A module that was made up in memory has no source to fingerprint, and is called by its own name."""
    monkeypatch.setitem(sys.modules, "made_up", ModuleType("made_up"))
    facts = facts_of(a_workload(), WorkloadReference(module="made_up"))
    assert facts.name == "made_up"
    assert facts.fingerprint.startswith("sha256:")


def test_a_modules_workload_has_the_modules_file(tmp_path):
    """Name and fingerprint are the same however the file was found."""
    file = write(tmp_path / "job_for_this_test.py", GOOD)
    reference = WorkloadReference(module="job_for_this_test", search_path=(str(tmp_path),))
    workload = load(reference)
    assert facts_of(workload, reference) == facts_of(workload, reference_to(file))


def test_the_fingerprint_follows_source_and_name(tmp_path):
    """The same source and name give the same fingerprint; another of either gives another."""
    one = write(tmp_path / "a" / "train.py", GOOD)
    same = write(tmp_path / "b" / "train.py", GOOD)
    other = write(tmp_path / "c" / "train.py", GOOD + "# changed\n")
    print_of = facts_of(a_workload(), reference_to(one)).fingerprint
    assert print_of.startswith("sha256:")
    assert facts_of(a_workload(), reference_to(same)).fingerprint == print_of
    assert facts_of(a_workload(), reference_to(other)).fingerprint != print_of
    assert facts_of(a_workload(), reference_to(one, "small")).fingerprint != print_of


def test_this_module_alone_imports_no_tensorflow():
    """The tuner's process reads references without TensorFlow."""
    code = (
        "import autotune.workloads.workload, sys; print('tensorflow' in sys.modules, 'optuna' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "False"]
