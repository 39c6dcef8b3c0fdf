"""Finds a workload or a script by its name, and loads a workload in another process."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.data.errors import WorkloadError
from autotune.data.facts import KerasVersion, ScriptSettings, WorkloadFacts, WorkloadReference
from autotune.data.files import is_utf8, read_at_most
from autotune.data.options import check_args
from autotune.data.printable import with_article
from autotune.runtime.failures import format_user_traceback, make_exit_error, refuse_training, summarize_error
from autotune.runtime.logs import is_memory_error
from autotune.runtime.sources import binds_workload, directory_of, fingerprint_of, own_files
from autotune.script.workload import Workload, takes_config
from autotune.space.keras_in_use import keras_in_use
from autotune.space.knobs import did_you_mean

LONGEST_NAME = 255  # bytes of a file's name on Linux: a run's directory is named after the workload
MODULE_NAME = "__mp_main__"  # as `multiprocessing` calls a program's file in the processes that it spawns
# fmt: off
NEEDED_PACKAGES = (  # that TensorFlow and both Keras load by name
    "absl", "gast", "google", "h5py", "keras", "numpy", "optree", "packaging", "pandas", "requests", "rich", "scipy",
    "six", "tensorflow", "termcolor", "tf_keras", "wrapt",
)
# fmt: on

_loading_workload = False  # true while a user's module is being imported


def parse_reference(text: str) -> WorkloadReference:
    """Find the workload or script named by `path/to/file.py[:name]` or `package.module[:name]`, or a notebook.

    Imports nothing. Without a name it is a script, unless the source binds `workload` at its top level. Raises
    `WorkloadError` also for a file beside it that hides a module which TensorFlow needs.
    """
    location, separator, name = text.partition(":")
    name = name if separator else "workload"
    if not name.isidentifier() or len(name.encode()) > LONGEST_NAME:
        hint = "Write path/to/file.py:name or package.module:name."
        raise WorkloadError(f"{text!r}: {name!r} is not a name", hint=hint)
    directory, file, module, parts = Path.cwd(), None, None, location.split(".")
    if location.endswith((".py", ".ipynb")):
        source = _check_file(location)
        directory, file, sources = source.parent, str(source), [source]
    else:
        package = os.path.isfile(os.path.join(location, "__init__.py"))
        dotted = all(map(str.isidentifier, parts)) and len(location.encode()) <= LONGEST_NAME
        if not dotted or (os.path.exists(location) and not package):
            hint = "Write path/to/file.py[:name] or package.module[:name]."
            raise WorkloadError(f"{location!r} is neither a .py file, a notebook nor a module", hint=hint)
        module, stem = location, directory.joinpath(*parts)
        sources = [path for path in (stem / "__main__.py", stem.with_suffix(".py")) if path.is_file()]
    for needed in NEEDED_PACKAGES:
        for found in (directory / needed / "__init__.py", directory / f"{needed}.py"):
            if found.is_file():
                raise _hidden_module_error(needed, found if found.name != "__init__.py" else found.parent)
    is_notebook = location.endswith(".ipynb")
    if is_notebook and separator:
        raise WorkloadError(f"{text!r}: a notebook has no Workload")
    is_script = bool(sources) and not separator and (is_notebook or not binds_workload(sources[0], name))
    script = ScriptSettings() if is_script else None
    return WorkloadReference(
        file=file,
        module=module,
        name=name,
        search_path=(str(directory),),
        script=script,
        called_as=location if script is not None and file is not None else "",
    )


def _check_file(location: str) -> Path:
    """Return the file's path. Raises `WorkloadError` where it cannot be read, or named in a message to a process."""
    try:
        read_at_most(Path(location), 0)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        hint = f"Give the path of the workload's file, from {Path.cwd()}."
        raise WorkloadError(f"{location}: {reason.lower()}", hint=hint) from error
    file = Path(location).resolve()
    if not is_utf8(file):
        raise WorkloadError(f"{file}: its path is not UTF-8")
    return file


def _hidden_module_error(name: str, found: Path) -> WorkloadError:
    shown = found.relative_to(Path.cwd()) if found.is_relative_to(Path.cwd()) else found
    return WorkloadError(
        f"{shown}: hides the module {name!r} from TensorFlow, because the workload's directory comes first on "
        "Python's search path",
        hint=f"Rename it, for example to my_{name}.",
    )


def reference_of(workload: Workload) -> WorkloadReference:
    """Find where another process can load a workload from. Raises `WorkloadError` where it cannot be loaded."""
    main = sys.modules["__main__"]
    run_as = getattr(getattr(main, "__spec__", None), "name", None)  # by `python -m`
    file = getattr(main, "__file__", None)
    interactive = not run_as and not (file and Path(file).is_file())
    search_path = tuple(entry or str(Path.cwd()) for entry in sys.path)
    args = () if interactive else check_args(sys.argv[1:])  # a session's are the notebook kernel's
    # A program comes first. A session comes last: it may hold an imported workload, and cannot be loaded again.
    places = sorted(sys.modules.items(), key=lambda place: (place[1] is main) == interactive)
    for module_name, module in places:
        for name, value in list(vars(module).items()) if isinstance(module, ModuleType) else ():
            if value is not workload:
                continue
            if module is not main or run_as:
                found = run_as if module is main else module_name
                return WorkloadReference(module=found, name=name, search_path=search_path, args=args)
            if interactive:
                raise WorkloadError(
                    "the workload was typed into an interactive session, so trial processes cannot load it",
                    hint='Save it in a file and call autotune.tune("path/to/file.py").',
                )
            path = str(Path(str(file)).resolve())
            return WorkloadReference(file=path, name=name, search_path=search_path, args=args)
    raise WorkloadError(
        "the workload is not a variable at the top level of a module, so trial processes cannot load it",
        hint='Write `workload = autotune.Workload(…)` outside of any function, or pass "path/to/file.py:name".',
    )


def refuse_while_loading() -> None:
    """Raise `WorkloadError` if importing the user's module starts a tuner."""
    if _loading_workload:
        raise WorkloadError(
            "the workload's file calls autotune.tune() while it is being imported",
            hint='Put the call under `if __name__ == "__main__":`; trial processes load the file again.',
        )


def load(reference: WorkloadReference) -> Workload:
    """Import the user's module, and return its workload.

    Raises `WorkloadError`, also where TensorFlow is missing. Errors of memory pass through.
    """
    global _loading_workload
    for entry in reversed(reference.search_path):
        if entry not in sys.path:
            sys.path.insert(0, entry)
    require_tensorflow()
    where = reference.file or reference.module
    sys.argv = [str(where), *reference.args]
    _loading_workload = True
    try:
        hint = 'Put it under `if __name__ == "__main__":`; trials train by themselves.'
        with refuse_training("while the file is imported", hint):
            module = _import(reference)
    except WorkloadError:
        raise
    except BaseException as error:
        if isinstance(error, MemoryError) or is_memory_error(str(error)):
            raise  # the file is not at fault
        for name in sorted(sys.stdlib_module_names):
            found = Path(getattr(sys.modules.get(name), "__file__", None) or "/")
            if str(found.parent) in reference.search_path:
                raise _hidden_module_error(name, found) from error
        raise _import_error(reference, error) from error
    finally:
        _loading_workload = False
    value = getattr(module, reference.name, None)
    if value is None:
        public = tuple(name for name in vars(module) if not name.startswith("_"))
        raise WorkloadError(
            f"{where}: no {reference.name!r} in it",
            hint=f"{did_you_mean(reference.name, public)}Write `{reference.name} = autotune.Workload(…)` at the top "
            f"level, or name the variable: {where}:NAME.",
        )
    if not isinstance(value, Workload):
        raise WorkloadError(
            f"{reference}: is {with_article(type(value).__name__)}, expected an autotune.Workload",
            hint=f"Name the right variable: {where}:NAME.",
        )
    return value


def require_tensorflow() -> None:
    """Raise WorkloadError where TensorFlow or the Keras in use is not installed."""
    version = keras_in_use()
    for module, name in (("tensorflow", "TensorFlow"), (version.package, version.label)):
        if importlib.util.find_spec(module) is None:
            hint = "Run pip install 'tensorflow>=2.18,<2.22', or install your own build there."
            if version is KerasVersion.KERAS_2 and module == version.package:
                hint = "Run pip install tf_keras, of the same minor version as TensorFlow."
            raise WorkloadError(f"{name} is not installed in {sys.prefix}", hint=hint)


def _import(reference: WorkloadReference) -> ModuleType:
    if reference.module is not None:
        return importlib.import_module(reference.module)
    file = Path(str(reference.file))
    # Processes that the user's code spawns import its functions by the module's name.
    found = None if "." in file.stem or file.stem in sys.modules else importlib.util.find_spec(file.stem)
    if found is not None and found.origin == str(file):
        return importlib.import_module(file.stem)
    spec = importlib.util.spec_from_file_location(MODULE_NAME, str(file))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__spec__ = None  # so that they load the program's file by its path
    sys.modules[MODULE_NAME] = sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    return module


def _import_error(reference: WorkloadReference, error: BaseException) -> WorkloadError:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and f"{reference.module}.".startswith(f"{missing}."):
        return WorkloadError(
            f"no module {reference.module!r}",
            hint=f"{missing!r} is neither in the current directory nor among the installed packages.",
        )
    action = f"importing {reference.file or reference.module}"
    if isinstance(error, SystemExit):
        return make_exit_error(action, error)
    hint = "Fix the file so that it can be imported."
    if "no known parent package" in str(error):
        hint = "Name it as a module, from the directory above its package: autotune tune PACKAGE.MODULE"
    return WorkloadError(f"{action} raised {summarize_error(error)}", hint=hint, detail=format_user_traceback(error))


def _source_of(reference: WorkloadReference) -> str | None:
    return reference.file or getattr(sys.modules.get(reference.module or ""), "__file__", None)


def source_files(reference: WorkloadReference) -> list[Path]:
    """Return the file of a workload that was imported, and the modules of its own that it imports."""
    file = _source_of(reference)
    return [] if file is None else own_files(Path(file), Path(directory_of(reference)))


def facts_of(
    workload: Workload, reference: WorkloadReference, in_force: Mapping[str, Any] | None = None
) -> WorkloadFacts:
    """Return the facts of a workload that need no TensorFlow; for `in_force` see `WorkloadFacts`."""
    file = _source_of(reference)
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
        takes_config=takes_config(workload.dataset),
        validates=workload.validation is not None,
        fingerprint=fingerprint_of(file, reference.name),
        in_force=dict(in_force or {}),
        keras=keras_in_use(),
    )
