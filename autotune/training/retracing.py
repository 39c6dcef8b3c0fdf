"""Notices in the trial process that TensorFlow traces, or XLA compiles, the train function once more.

Tracing is seen by the seconds that TensorFlow says it spends on it, before and after each call of the train function.
XLA compiles anew for each shape that it meets, without a new trace: of that its runtime writes a line into the log, if
it was asked to before it was imported.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.recipe.tf_private import tracing_seconds

_SAYS_WHEN_IT_COMPILES = "device_compilation_profiler=1"
"""The source file of TensorFlow's runtime, and the level of verbosity, that tell of each compilation."""
_COMPILED = re.compile(rb"device_compilation_profiler\.cc:\d+\] Compiled \S+ \d+ times?,")


class _AskRuntime(importlib.abc.MetaPathFinder):
    """Sets what the runtime's log depends on at the last moment: a user's file may set it, too, before its import."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Finds nothing; looks on. It may be asked more than once: looking for a module does not import it."""
        if name != "tensorflow":
            return
        wanted = os.environ.get("TF_CPP_VMODULE", "").split(",")
        others = [each for each in wanted if each and each != _SAYS_WHEN_IT_COMPILES]
        os.environ["TF_CPP_VMODULE"] = ",".join([*others, _SAYS_WHEN_IT_COMPILES])
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"  # at any other, the runtime keeps such lines to itself


def enable_compile_logging() -> None:
    """Have TensorFlow, which is not imported yet, log each compilation of XLA's."""
    sys.meta_path.insert(0, _AskRuntime())


class Retracing:
    """Counts how often the train function was traced or compiled in each slice.

    Args:
        log: The file that takes what the trial, this process, writes to stderr.
        xla: Whether the train function is compiled by XLA.
    """

    def __init__(self, log: Path, *, xla: bool) -> None:
        self._log = log
        self._read_bytes = log.stat().st_size
        self._traces = 0
        self._seen = not xla  # where XLA compiles, a first compilation must be seen: else the log does not tell
        self._spent = tracing_seconds()

    def wrap(self, train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`train_function`, with the calls of it counted in which something was traced."""
        spent = self._spent
        if spent is None:
            return train_function

        def watched(iterator: Any) -> Any:
            before = spent()
            logs = train_function(iterator)
            self._traces += spent() != before
            return logs

        return watched

    def gauge(self) -> Callable[[float], dict[str, Any]]:
        """How often the function is traced or compiled in a slice, None where that cannot be seen.

        What is traced anew is compiled anew: the larger of the two numbers counts.
        """
        self._compilations()
        before = self._traces

        def measured(_: float) -> dict[str, Any]:
            compilations = self._compilations()
            seen = self._seen and self._spent is not None
            return {"retraces": max(self._traces - before, compilations) if seen else None}

        return measured

    def _compilations(self) -> int:
        """Those that the log's whole lines tell of since the last time."""
        found = 0
        with contextlib.suppress(OSError), self._log.open("rb") as stream:
            # A log that had grown too large is shorter than before: what its lost lines said is not counted.
            start = stream.seek(min(self._read_bytes, os.fstat(stream.fileno()).st_size))
            whole, newline, _ = stream.read().rpartition(b"\n")
            self._read_bytes = start + len(whole + newline)
            found = len(_COMPILED.findall(whole))
        self._seen = self._seen or found > 0
        return found
