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

from autotune.worker.private_api import tracing_seconds

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


def ask_runtime_to_tell() -> None:
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
        self._xla = xla
        self._read_bytes = log.stat().st_size
        self._cut_line = b""
        self._traces: int | None = 0
        self._compilations = 0
        self._seen_to_compile = False

    def wrap(self, train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`train_function`, with the calls of it counted in which something was traced."""
        spent = tracing_seconds()
        if spent is None:
            self._traces = None
            return train_function

        def watched(iterator: Any) -> Any:
            before = spent()
            logs = train_function(iterator)
            if spent() != before and self._traces is not None:
                self._traces += 1
            return logs

        return watched

    def gauge(self) -> Callable[[float], dict[str, Any]]:
        """A slice begins: how often the function is traced or compiled in it, None where that cannot be seen.

        What is traced anew is compiled anew: the larger of the two numbers counts. Where XLA compiles, the first
        compilation must have been seen: otherwise the log does not tell.
        """
        self._count()

        def measured(_: float) -> dict[str, Any]:
            traces, compilations = self._count()
            seen = traces is not None and (self._seen_to_compile or not self._xla)
            return {"retraces": max(traces or 0, compilations) if seen else None}

        return measured

    def _count(self) -> tuple[int | None, int]:
        """Traces and compilations since the last count."""
        compilations = 0
        with contextlib.suppress(OSError), self._log.open("rb") as stream:
            # A log that had grown too large is shorter than before: what its lost lines said is not counted.
            stream.seek(min(self._read_bytes, os.fstat(stream.fileno()).st_size))
            whole, _, self._cut_line = (self._cut_line + stream.read()).rpartition(b"\n")
            self._read_bytes = stream.tell()
            compilations = len(_COMPILED.findall(whole))
        self._seen_to_compile = self._seen_to_compile or compilations > 0
        traces, self._traces = self._traces, None if self._traces is None else 0
        return traces, compilations
