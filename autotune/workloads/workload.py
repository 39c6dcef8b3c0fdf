"""The user's side: what is trained, and how to find and load it.

This module may not import TensorFlow itself; loading the user's module usually does.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from autotune.errors import ConfigurationError, WorkloadError
from autotune.files import is_utf8, read_at_most
from autotune.space.configuration import Configuration
from autotune.space.knobs import KnobValue, check_value, nearest
from autotune.workloads import source

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

LARGEST_SOURCE_BYTES = 16 << 20
MODULE_NAME = "__autotune_workload__"
"""The `__name__` under which a user's file is loaded, so that its `__main__` block stays asleep."""

_loading_workload = False
"""True while a user's module is being imported, so that a tuner started from there is refused."""


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """What a workload's `dataset(config)` may read.

    Args:
        batch_size: Examples per step; for datasets that do their own batching.
        num_parallel_calls: To be handed to `map(…, num_parallel_calls=)`: None is serial, -1 is
            `tf.data.AUTOTUNE`.
        deterministic: Whether the order of the examples must be kept.
    """

    batch_size: int
    num_parallel_calls: int | None = None
    deterministic: bool = True

    @classmethod
    def of(cls, configuration: Configuration) -> DatasetConfig:
        """The part of a configuration that a dataset is told."""
        calls = configuration.get("num_parallel_calls", 0)
        return cls(
            batch_size=configuration.batch_size,
            num_parallel_calls=-1 if calls == "autotune" else int(calls) or None,
            deterministic=bool(configuration.get("deterministic", True)),
        )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained: a model, its data and its compile arguments, each made afresh on request.

    Args:
        model: Returns an uncompiled Keras model.
        dataset: `dataset()` or `dataset(config)` with a `DatasetConfig`: returns a `tf.data.Dataset` of
            single examples `(x, y)` or `(x, y, sample_weight)`, x and y being tensors, tuples or dicts. The
            config is handed to a parameter called `config`, or to a first one without a default.
        compile: Returns the keyword arguments of `model.compile`: optimizer, loss, metrics.
        batch_size: Examples per step in the baseline.
        baseline: Knobs that the user would set anyway, by name; the rest is TensorFlow's default.
        validation: Like `dataset`: what `fit` is given as `validation_data`, once per epoch.
        batched: The dataset does its own batching, by `config.batch_size`.
        drop_remainder: The last, smaller batch of an epoch is dropped.
        name: For the recipe, by which `autotune verify` knows it again; the variable's or file's name when None.

    Raises:
        WorkloadError: An argument has the wrong type, or a baseline knob or value does not exist.

    Example:
        >>> workload = Workload(model=build, dataset=examples, compile=lambda: {"loss": "mse"}, batch_size=32)
    """

    model: Callable[[], keras.Model]
    dataset: Callable[..., tf.data.Dataset]
    compile: Callable[[], Mapping[str, Any]]
    batch_size: int
    baseline: Mapping[str, KnobValue] = field(default_factory=dict)
    validation: Callable[..., tf.data.Dataset] | None = None
    batched: bool = False
    drop_remainder: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        """Check every argument."""
        for part in ("model", "dataset", "compile", "validation"):
            value = getattr(self, part)
            if not callable(value) and not (part == "validation" and value is None):
                raise WorkloadError(
                    f"Workload({part}=…) is a {type(value).__name__}, expected a function",
                    hint=f"Hand over the function itself, without calling it: {part}=make_{part}.",
                )
        for part, kind, expected in (
            ("baseline", Mapping, "a dict of knobs"),
            ("batched", bool, "True or False"),
            ("drop_remainder", bool, "True or False"),
            ("name", str | None, "a string"),
        ):
            value = getattr(self, part)
            if not isinstance(value, kind):
                raise WorkloadError(
                    f"Workload({part}=…) is a {type(value).__name__}, expected {expected}",
                    hint="`help(autotune.Workload)` describes every argument.",
                )
        try:
            check_value("batch_size", self.batch_size, where="Workload(batch_size=…)")
            for name, value in self.baseline.items():
                check_value(name, value, where="Workload(baseline=…)")
        except ConfigurationError as error:
            raise WorkloadError(error.message, hint=error.hint) from error
        if "batch_size" in self.baseline:
            raise WorkloadError(
                "Workload(baseline=…) names batch_size", hint="Give it as Workload(batch_size=…)."
            )
        if self.batched and not takes_config(self.dataset):
            raise WorkloadError(
                "Workload(batched=True) with a dataset() that takes no config",
                hint="Write `def dataset(config)` and batch by config.batch_size.",
            )


class WorkloadReference(BaseModel):
    """Where the workload is: a file or a module, and a name in it.

    Args:
        file: Absolute path of the user's file, or None for a module.
        module: Dotted module name, or None for a file.
        name: The variable that holds the `Workload`.
        search_path: Directories put in front of `sys.path`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str | None = None
    module: str | None = None
    name: str = "workload"
    search_path: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As the user writes it: `path/to/file.py:name`."""
        return f"{self.file or self.module}:{self.name}"


class WorkloadFacts(BaseModel):
    """What the template learned by importing the user's module.

    Args:
        name: The workload's name.
        batch_size: Its baseline batch size.
        baseline: The knobs it names.
        batched: Whether its dataset does its own batching.
        drop_remainder: Whether the last, smaller batch of an epoch is dropped.
        dataset_takes_config: Whether `dataset` accepts a config.
        validates: Whether it has validation data.
        fingerprint: `sha256:…` over the module's source and the name.
        in_force: What the knobs that act before a model is built stood at once the module was imported.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    batch_size: int
    baseline: dict[str, Any]
    batched: bool
    drop_remainder: bool
    dataset_takes_config: bool
    validates: bool
    fingerprint: str
    in_force: dict[str, Any] = {}


def takes_config(function: Callable[..., Any]) -> bool:
    """Whether `function` is to be handed a config: a parameter called `config`, or a first one that must be given.

    Other parameters with defaults, and `*arguments`, are the user's own: `dataset(shuffle=True)` wants no config.
    """
    return _named_config(function) or _needs_argument(function)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    given = function.keywords if isinstance(function, functools.partial) else {}
    return [each for each in found if each.name not in given]


def _named_config(function: Callable[..., Any]) -> bool:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(each.name == "config" and each.kind in by_name for each in _parameters(function))


def _needs_argument(function: Callable[..., Any]) -> bool:
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = next((each for each in _parameters(function) if each.kind in by_position), None)
    return first is not None and (first.default is first.empty or first.name == "config")


def call_with_config(function: Callable[..., Any], configuration: Configuration) -> Any:
    """`function(config)` if it takes one, else `function()`."""
    if _named_config(function):
        return function(config=DatasetConfig.of(configuration))
    if _needs_argument(function):
        return function(DatasetConfig.of(configuration))
    return function()


def parse_reference(text: str) -> WorkloadReference:
    """The workload that `path/to/file.py[:name]` or `package.module[:name]` stands for.

    Looks at the file or module without running it, so that the common mistakes are answered at once.

    Raises:
        WorkloadError: The text is neither, the file or module is missing, cannot be imported or hides a module
            that TensorFlow needs, or holds no such name.
    """
    location, separator, name = text.partition(":")
    name = name if separator else "workload"
    if not name.isidentifier():
        raise WorkloadError(
            f"{text!r}: {name!r} is not a name", hint="Write path/to/file.py:name or package.module:name."
        )
    return _file_reference(location, name) if location.endswith(".py") else _module_reference(location, name)


def _module_reference(module: str, name: str) -> WorkloadReference:
    directory = Path.cwd()
    package = os.path.isfile(os.path.join(module, "__init__.py"))
    dotted = all(part.isidentifier() for part in module.split("."))
    if not dotted or (os.path.exists(module) and not package):
        raise WorkloadError(
            f"{module!r} is neither a .py file nor a module",
            hint="Write path/to/file.py[:name] or package.module[:name].",
        )
    file = source.find_module(module, directory)
    if file is not None:
        if file.is_relative_to(directory):
            source.refuse_shadowing(module.partition(".")[0], module)
        shown = source.shown_path(file)
        source.check_source(_read(file, shown), name, written=module, file=shown, by_path=False)
    return WorkloadReference(module=module, name=name, search_path=(str(directory),))


def _file_reference(location: str, name: str) -> WorkloadReference:
    content = _read(Path(location), location)
    file = Path(location).resolve()
    if not is_utf8(file):
        raise WorkloadError(
            f"{file}: its path is not UTF-8", hint="Give the file, or its directory, another name."
        )
    source.refuse_shadowing(file.stem, location)
    source.check_source(content, name, written=location, file=location, by_path=True)
    return WorkloadReference(file=str(file), name=name, search_path=(str(file.parent),))


def _read(file: Path, shown: str) -> bytes:
    try:
        return read_at_most(file, LARGEST_SOURCE_BYTES)
    except FileNotFoundError as error:
        raise WorkloadError(
            f"{shown}: no such file", hint=f"Looked in {Path.cwd()}. Give the path of the workload's file."
        ) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise WorkloadError(
            f"cannot read {shown}: {reason}", hint="Give the path of a Python file that you may read."
        ) from error


def reference_of(workload: Workload) -> WorkloadReference:
    """Where a workload object can be loaded from again, by another process.

    Raises:
        WorkloadError: It is not a variable at the top level of a file or module.
    """
    main = sys.modules["__main__"]
    others = [
        each for each in sys.modules.items() if each[1] is not main
    ]  # `__mp_main__` is another name of it
    places = [("__main__", main), *others]
    if _is_interactive(main):  # it may hold what it imported: `from train import workload`
        places = [*others, ("__main__", main)]
    for module_name, module in places:
        for name, value in list(vars(module).items()) if isinstance(module, ModuleType) else ():
            if value is workload:
                return _reference_in(module_name, module, name)
    raise WorkloadError(
        "the workload is not a variable at the top level of a module, so trial processes cannot load it",
        hint="Write `workload = autotune.Workload(…)` outside of any function, or hand over "
        '"path/to/file.py:name".',
    )


def _reference_in(module_name: str, module: ModuleType, name: str) -> WorkloadReference:
    search_path = tuple(entry or str(Path.cwd()) for entry in sys.path)
    spec = getattr(module, "__spec__", None)
    if module_name != "__main__":
        return WorkloadReference(module=module_name, name=name, search_path=search_path)
    if spec is not None and spec.name:
        return WorkloadReference(module=spec.name, name=name, search_path=search_path)
    if _is_interactive(module):
        raise WorkloadError(
            "the workload was typed into an interactive session, so trial processes cannot load it",
            hint='Save it in a file and call autotune.tune("path/to/file.py").',
        )
    return WorkloadReference(
        file=str(Path(str(module.__file__)).resolve()), name=name, search_path=search_path
    )


def _is_interactive(main: ModuleType) -> bool:
    """Whether the program is a session or a `-c` text: nothing that another process could load again."""
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None)
    return not (spec is not None and spec.name) and not (file and Path(file).is_file())


def refuse_while_loading() -> None:
    """Raise if the user's module starts a tuner by being imported.

    Raises:
        WorkloadError: It does.
    """
    if _loading_workload:
        raise WorkloadError(
            "the workload's file calls autotune.tune() while it is being imported",
            hint='Put the call under `if __name__ == "__main__":`; trial processes load the file again.',
        )


def load(reference: WorkloadReference) -> Workload:
    """Import the user's module and take the workload out of it.

    Raises:
        WorkloadError: The module fails to import, or the name is not a `Workload`. The detail holds the
            user's own frames of the traceback.
    """
    global _loading_workload
    for entry in reversed(reference.search_path):
        if entry not in sys.path:
            sys.path.insert(0, entry)
    _loading_workload = True
    try:
        module = _import(reference)
    except WorkloadError:
        raise
    except BaseException as error:
        raise _import_failed(reference, error) from error
    finally:
        _loading_workload = False
    value = getattr(module, reference.name, None)
    if value is None:
        raise WorkloadError(
            f"{reference.file or reference.module}: no {reference.name!r} in it",
            hint=f"{nearest(reference.name, tuple(vars(module)))}"
            f"Write `{reference.name} = autotune.Workload(…)`.",
        )
    if not isinstance(value, Workload):
        raise WorkloadError(
            f"{reference}: is a {type(value).__name__}, expected an autotune.Workload",
            hint="Name the right variable: path/to/file.py:NAME.",
        )
    return value


def _import_failed(reference: WorkloadReference, error: BaseException) -> WorkloadError:
    if (
        isinstance(error, ModuleNotFoundError)
        and reference.module is not None
        and f"{reference.module}.".startswith(f"{error.name}.")
    ):
        return WorkloadError(
            f"no module {reference.module!r}",
            hint="It is looked for in the current directory and among the installed packages.",
        )
    hint = "Mend the file; it must be importable."
    if isinstance(error, ImportError) and "no known parent package" in str(error) and reference.file:
        hint = source.hint_to_name_the_module(Path(reference.file), reference.name)
    return WorkloadError(
        f"importing {reference.file or reference.module} raised {type(error).__name__}: {error}",
        hint=hint,
        detail=users_traceback(error),
    )


def _import(reference: WorkloadReference) -> ModuleType:
    if reference.file is None:
        assert reference.module is not None
        return importlib.import_module(reference.module)
    spec = importlib.util.spec_from_file_location(MODULE_NAME, reference.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module
    spec.loader.exec_module(module)
    return module


def fingerprint_of(file: str | None, name: str) -> str:
    """What tells a workload's source from another's: of the file, where there is one, and the name in it.

    Raises:
        OSError: The file cannot be read.
    """
    content = Path(file).read_bytes() if file else b""
    return f"sha256:{hashlib.sha256(content + bytes(1) + name.encode()).hexdigest()}"


def facts_of(
    workload: Workload, reference: WorkloadReference, in_force: Mapping[str, Any] | None = None
) -> WorkloadFacts:
    """What the tuner may know of a workload without TensorFlow; for `in_force` see `WorkloadFacts`."""
    file = reference.file
    if file is None:
        file = getattr(sys.modules.get(reference.module or ""), "__file__", None)
    stem = Path(file).stem if file else reference.module or "workload"
    if file and stem in ("__init__", "__main__"):
        stem = Path(file).resolve().parent.name
    default = stem if reference.name == "workload" else reference.name
    return WorkloadFacts(
        name=workload.name or default,
        batch_size=workload.batch_size,
        baseline=dict(workload.baseline),
        batched=workload.batched,
        drop_remainder=workload.drop_remainder,
        dataset_takes_config=takes_config(workload.dataset),
        validates=workload.validation is not None,
        fingerprint=fingerprint_of(file, reference.name),
        in_force=dict(in_force or {}),
    )


def users_traceback(error: BaseException) -> str:
    """The traceback of `error` with the user's own frames only: not autotune's, Python's or a package's."""
    ours = str(Path(__file__).resolve().parent) + os.sep
    foreign = (ours, "<frozen", *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")))
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(foreign)
    ]
    lines = ["Traceback (your code):\n", *traceback.format_list(frames)] if frames else []
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()
