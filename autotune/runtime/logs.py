"""The logs of templates and trials: kept from filling the disk while they grow, and what their ends say.

A process appends to its log, which the driver cuts. The kernel's limit would meet files of the user's code as well.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from autotune.data.printable import printable

LARGEST_LOG_BYTES = 16 << 20
HEAD_BYTES, END_BYTES = 1 << 20, 1 << 16
TAIL_LENGTH = 4000

_FATAL = re.compile(r"Check failed|^(?:F\d{4} |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: F )|^terminate called|^  what\(\)")
# What the runtime writes into every log, as against what says why a trial ended.
_RUNTIMES_OWN = re.compile(
    r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: (?P<old>[IWE]) "  # 2026-11-20 10:00:00.123456: I
    r"|(?P<new>[IWE])\d{4} \d\d:\d\d:\d+\.\d+ +\d+ )"  # I0000 00:00:1795211797.449557   30689
    r"\S+\.(?:cc|cpp|h):\d+\] "  # C++ sources only: what Python code logs by absl looks the same but for .py
)
# Errors that also stand in the logs of trainings that are well.
_HARMLESS = re.compile(
    r"failed call to cuInit|Could not find cuda drivers|kernel driver does not appear to be running"
    r"|Unable to register cu\w+ (?:factory|plugin)|Delay kernel timed out"
)
# Second lines of such messages, which have no prefix; what Python loaded, below the stack of a signal.
_BARE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    r"|To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler flags\.$"
    r"|Skipping registering GPU devices\.\.\.$"
    r"|Extension modules: \w[\w.]*, .* \(total: \d+\)$"
)


def open_log(path: str | Path) -> int:
    """Open a log to append to, and return its descriptor. Only its owner may read what a script prints."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def cap(log: Path) -> None:
    """Cut the middle out of a log that has become too large. What is written to it meanwhile may be lost."""
    with contextlib.suppress(OSError):
        size = os.stat(log).st_size
        if size > LARGEST_LOG_BYTES:
            end = _end(log)
            os.truncate(log, HEAD_BYTES)
            with log.open("ab") as stream:
                stream.write(f"\n[autotune: cut out here; the log had grown to {size} bytes]\n".encode() + end)


def tail(log: Path) -> str:
    """The last lines of a log that say something, without bytes that are not text; empty when none does."""
    return _end_text(log)[-TAIL_LENGTH:]


def fatal_line(log: Path) -> str:
    """The last line by which the runtime said why it aborts; empty when none does."""
    return next((line for line in reversed(_end_text(log).splitlines()) if _FATAL.search(line)), "")


def _end(log: Path) -> bytes:
    with contextlib.suppress(OSError), log.open("rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - END_BYTES))
        return stream.read(END_BYTES)
    return b""


def _end_text(log: Path) -> str:
    end = _end(log)
    text = end.decode("utf-8", "replace")
    if len(end) == END_BYTES:  # the first line is cut, and could not be told for what it is
        text = text.partition("\n")[2] or text
    return without_runtime_noise(printable(text)).strip()


def without_runtime_noise(text: str) -> str:
    """`text` without the runtime's information lines, warnings and harmless errors; what speaks of memory stays."""
    kept: list[str] = []
    dropped = False
    for line in text.splitlines():
        dropped = _is_noise(line) or (dropped and line.lstrip().startswith("[[{{node "))
        if not dropped:
            kept.append(line)
    return "\n".join(kept)


def _is_noise(line: str) -> bool:
    found = _RUNTIMES_OWN.match(line)
    if found is None or "Check failed" in line or "memory" in line:
        return _BARE.match(line) is not None
    return "E" not in (found["old"], found["new"]) or _HARMLESS.search(line) is not None
