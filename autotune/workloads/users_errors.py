"""What an exception of the user's code says: its cause in one line, and the user's own frames."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

from autotune.errors import WorkloadError
from autotune.executors.log import printable, tail

_SAYS_NOTHING = re.compile(
    r'Graph execution error:|Detected at node |<stack traces unavailable>|File "|Exception encountered when calling '
    r"|\d+ root error\(s\) found|Could not automatically infer the output shape "
)
"""Lines above the one in which TensorFlow or Keras says what went wrong."""
_IN_LAST_LINE = "in user code:"  # by AutoGraph, above the source lines
_ARGUMENTS = "Arguments received by "  # by Keras, below the cause


def cause_of(error: BaseException) -> str:
    """The exception's type and the innermost line that says something, `KeyError: 'labels'`."""
    kind = type(error).__name__
    quoted = isinstance(error, KeyError) and len(error.args) == 1 and "\n" in str(error.args[0])
    text = printable(str(error.args[0] if quoted else error)).partition(_ARGUMENTS)[0]
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if line and not _SAYS_NOTHING.match(line)]
    if not said:
        return f"{kind}: no message"
    line = said[-1] if _IN_LAST_LINE in said else re.sub(r"^\(\d+\) ", "", said[0])
    return line if line.startswith(f"{kind}: ") else f"{kind}: {line}"


def users_traceback(error: BaseException) -> str:
    """The traceback of `error` with the user's own frames only: not autotune's, Python's or a package's."""
    frames = users_frames(traceback.extract_tb(error.__traceback__))
    lines = ["Traceback (your code):\n", *traceback.format_list(frames)] if frames else []
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()


def users_frames(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames of a stack that are the user's own."""
    installed = (sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
    foreign = (str(Path(__file__).resolve().parents[1]) + os.sep, "<frozen", *installed)
    return [
        frame
        for frame in stack
        if not frame.filename.startswith(foreign) and "__autograph_generated" not in frame.filename
    ]


def users_line(stack: Iterable[traceback.FrameSummary]) -> str:
    """`train.py, line 12`: the innermost of the user's own lines."""
    return next((f"{each.filename}, line {each.lineno}" for each in users_frames(stack)[::-1]), "a package")


def exit_error(what: str, error: SystemExit, hint: str) -> WorkloadError:
    """The error of code that ends the process. What it printed before, as `argparse` does, says why."""
    sys.stdout.flush()
    log = Path("/proc/self/fd/2")
    line = users_line(traceback.extract_tb(error.__traceback__))
    printed = tail(log) if log.is_file() else ""
    return WorkloadError(f"{what} raised {cause_of(error)} in {line}", hint=hint, detail=printed)
