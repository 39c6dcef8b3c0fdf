"""Explain failures inside a template or trial: what the user's code did wrong, and the message to the driver."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.data.errors import INTERNAL, ApplyError, AutotuneError, WorkloadError
from autotune.data.printable import printable
from autotune.data.record import Outcome
from autotune.recipe.keras_api import KERAS_PACKAGES, api_of
from autotune.runtime.executor import TrialFailed
from autotune.runtime.logs import gpu_fault_hint, is_memory_error, read_tail
from autotune.runtime.protocol import Failed
from autotune.runtime.sources import describe_frames, describe_line, is_installed

ARGS_HINT = (
    "Give the file its own arguments after `--`, as in `autotune tune train.py -- --epochs 90`, or put what ends it "
    'under `if __name__ == "__main__":`.'
)
# Lines above the one in which TensorFlow or Keras says what went wrong.
_UNINFORMATIVE = re.compile(
    r'Graph execution error:|Detected at node |<stack traces unavailable>|File "|Exception encountered when calling '
    r"|\d+ root error\(s\) found|Could not automatically infer the output shape "
)
_AUTOGRAPH_HEADING = "in user code:"  # above source lines: the cause is in the last line
_KERAS_ARGUMENTS = re.compile(r"(?:Call a|A)rguments received by ")  # below the cause; Keras 2 begins with "Call"
_LINE_IN_TEXT = re.compile(r'File "([^"\n]+)", line (\d+)')  # of code that was traced


# ------------------------------------------------------------------------------------------- what went wrong


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception, of Python's or TensorFlow's, says that memory ran out."""
    text = str(error)
    if isinstance(error, MemoryError) or is_memory_error(text):
        return True
    errors = getattr(sys.modules.get("tensorflow"), "errors", None)  # it may not be imported, or only in part
    if errors is None:
        return False
    exhausted = isinstance(error, errors.OpError) and "RESOURCE_EXHAUSTED" in text
    return exhausted or isinstance(error, errors.ResourceExhaustedError)


def is_environment_failure(error: BaseException) -> bool:
    """Return whether memory ran out or a GPU failed, so that no line of code is at fault."""
    return is_out_of_memory(error) or bool(gpu_fault_hint(str(error)))


def summarize_error(error: BaseException) -> str:
    """Return the exception's type and its innermost informative line, such as `KeyError: 'labels'`."""
    kind = type(error).__name__
    quoted = isinstance(error, KeyError) and len(error.args) == 1 and "\n" in str(error.args[0])
    text = _KERAS_ARGUMENTS.split(printable(str(error.args[0] if quoted else error)))[0]
    lines = [line.strip() for line in text.splitlines()]
    informative = [line for line in lines if line and not _UNINFORMATIVE.match(line)]
    if not informative:
        return f"{kind}: no message"
    line = informative[-1] if _AUTOGRAPH_HEADING in informative else re.sub(r"^\(\d+\) ", "", informative[0])
    return line if line.startswith(f"{kind}: ") else f"{kind}: {line}"


def format_user_traceback(error: BaseException) -> str:
    """Format the traceback with the user's own frames only: without those of autotune, Python and packages."""
    frames = select_user_frames(traceback.extract_tb(error.__traceback__))
    lines = ["Traceback (your code):\n", *traceback.format_list(frames)] if frames else []
    return describe_frames("".join([*lines, *traceback.format_exception_only(error)]).rstrip())


def select_user_frames(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames of a stack that are the user's own."""
    installed = (sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
    foreign = (str(Path(__file__).resolve().parents[1]) + os.sep, "<frozen", *installed)
    return [
        frame
        for frame in stack
        if not frame.filename.startswith(foreign)
        and "__autograph_generated" not in frame.filename
        and not is_installed(frame.filename)  # a virtual environment may take packages from another one's folder
    ]


def locate_user_line(stack: Iterable[traceback.FrameSummary] | None = None) -> str:
    """Return the innermost of the user's own lines in a stack, by default the running one: `train.py, line 12`."""
    frames = select_user_frames(traceback.extract_stack() if stack is None else stack)
    return describe_line(frames[-1].filename, frames[-1].lineno) if frames else "a package"


def summarize_with_line(error: BaseException) -> str:
    """Return the summary and the user's line that caused the error: `KeyError: 'labels' in train.py, line 12`."""
    traced = [traceback.FrameSummary(file, int(line), "") for file, line in _LINE_IN_TEXT.findall(str(error))]
    stacks = (traced, traceback.extract_tb(error.__traceback__), traceback.extract_stack())
    frames = next(filter(None, map(select_user_frames, stacks)), [])
    here = os.path.join(os.getcwd(), "")
    where = [f" in {describe_line(frame.filename, frame.lineno).removeprefix(here)}" for frame in frames[-1:]]
    return "".join([summarize_error(error).removesuffix("." * len(where)), *where])


# ---------------------------------------------------------------------------------------------------- raising


def call_user(part: str, function: Callable[[], Any]) -> Any:
    """Call one of the workload's functions.

    Raises:
        WorkloadError: It raised an exception, which the user has to fix. Environment failures pass through.
    """
    try:
        with refuse_training(f"in {part}()", "Remove it: the trial trains by itself."):
            return function()
    except WorkloadError:
        raise
    except SystemExit as error:
        raise make_exit_error(f"the workload's {part}()", error) from error
    except Exception as error:
        if is_environment_failure(error):
            raise
        message = f"the workload's {part}() raised {summarize_error(error)}"
        raise WorkloadError(message, detail=format_user_traceback(error)) from error


def make_exit_error(code: str, error: SystemExit) -> WorkloadError:
    """Make the error of code that ends the process. What it printed before, as `argparse` does, says why."""
    sys.stdout.flush()
    log = Path("/proc/self/fd/2")
    line = locate_user_line(traceback.extract_tb(error.__traceback__))
    printed = read_tail(log) if log.is_file() else ""
    return WorkloadError(f"{code} raised {summarize_error(error)} in {line}", hint=ARGS_HINT, detail=printed)


def make_strategy_error(problem: str) -> WorkloadError:
    """Make the error of a part of the workload that a `tf.distribute` strategy holds."""
    return WorkloadError(
        f"{problem}, but autotune opens the strategy scope itself",
        hint="Remove tf.distribute from the workload: strategy and replicas are knobs, which Workload(baseline=…) may "
        "name. Or tune the training script as it is.",
    )


@contextlib.contextmanager
def refuse_training(where: str, hint: str) -> Iterator[None]:
    """End a training that begins in this context: it would run in each process before the timed one does.

    Raises `WorkloadError` with its line, `where` and `hint`.
    """
    found: list[WorkloadError] = []  # AutoGraph or the user's own `except` may swallow the error

    def refuse(*_: Any, **__: Any) -> None:
        found.append(WorkloadError(f"{locate_user_line()}: trains a model {where}", hint=hint))
        raise found[0]

    undo = contextlib.ExitStack()

    def wrap(keras: ModuleType) -> None:
        for owner, name in api_of(keras).training_calls():
            inherited = name not in vars(owner)
            undo.callback(*((delattr, owner, name) if inherited else (setattr, owner, name, vars(owner)[name])))
            setattr(owner, name, refuse)

    for package in KERAS_PACKAGES:
        undo.callback(after_import(package, wrap))
    try:
        yield
    finally:
        undo.close()
        if found:
            raise found[0]


class ImportHook(MetaPathFinder):
    """Calls a function with a module right after it is imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], object]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the usual spec, whose loader calls the function as well."""
        spec = PathFinder.find_spec(name, path, target) if name == self._name else None
        if spec is not None and spec.loader is not None:
            usual = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                usual(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader
        return spec


def after_import(name: str, act: Callable[[ModuleType], object]) -> Callable[[], None]:
    """Act on a module, now if it is imported and otherwise right after that; return what ends the waiting."""
    if name in sys.modules:
        act(sys.modules[name])
        return lambda: None
    hook = ImportHook(name, act)
    sys.meta_path.insert(0, hook)
    return lambda: sys.meta_path.remove(hook)


# ---------------------------------------------------------------------------------------------------- reporting


def _own_line(error: BaseException) -> str:
    """Return the line of autotune's own that raised an error; empty where it is another's."""
    frames, package = traceback.extract_tb(error.__traceback__), Path(__file__).resolve().parents[1]
    is_users = isinstance(error, TypeError) and "argument" in str(error)  # given to what a wrapper calls
    if is_users or not isinstance(error, Exception) or not frames or package not in Path(frames[-1].filename).parents:
        return ""
    return f"{Path(frames[-1].filename).relative_to(package.parent)}, line {frames[-1].lineno}"


def encode_failure(error: BaseException) -> Failed:
    """Return the message that reports an exception to the driver."""
    outcome, hint, detail, input_error = Outcome.ERROR, "", "", False
    if isinstance(error, TrialFailed):
        outcome, reason, hint, input_error = error.outcome, error.reason, error.hint, error.input_error
    elif isinstance(error, AutotuneError):
        reason, hint, detail = error.message, error.hint, error.detail
        input_error = isinstance(error, WorkloadError | ApplyError)
    elif isinstance(error, MemoryError):  # TensorFlow may not be imported
        outcome, reason = Outcome.OOM, f"out of host memory: {error}"
    else:
        hint = gpu_fault_hint(str(error))
        outcome = Outcome.OOM if is_out_of_memory(error) else Outcome.CRASHED if hint else Outcome.ERROR
        summarize = summarize_with_line if outcome is Outcome.ERROR else summarize_error
        reason, detail = summarize(error), format_user_traceback(error)
        if outcome is Outcome.ERROR and (line := _own_line(error)):
            traceback.print_exception(error)  # into the log
            reason, hint = f"{INTERNAL}: {summarize_error(error)} in {line}", "This is a bug in autotune."
    return Failed(
        outcome=outcome,
        reason=printable(reason)[:4000],
        hint=hint,
        detail=printable(detail)[-20000:],
        input_error=input_error,
    )
