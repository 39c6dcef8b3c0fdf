"""Notices in the trial process that TensorFlow traces, or XLA compiles, the train function once more.

Tracing is seen by the counter of seconds that TensorFlow spends over it, read before and after each call of the
train function. XLA compiles anew for each shape that it meets, without a new trace: of that its runtime writes a line
into the log, if it was asked to before it was imported. Neither costs a step more than a microsecond.
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

_SAYS_WHEN_IT_COMPILES = "device_compilation_profiler=1"
"""The source file of TensorFlow's runtime, and the level of talkativeness, that tell of each compilation."""
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
    """Counts how often the train function was traced or compiled.

    Args:
        log: The file that takes what the trial, this process, writes to stderr.
        xla: Whether the train function is compiled by XLA.
    """

    def __init__(self, log: Path, *, xla: bool) -> None:
        self._log = log
        self._xla = xla
        self._read_bytes = log.stat().st_size
        self._cut_line = b""
        self._traces = self._compilations = 0
        self._seen_to_compile = False

    def wrap(self, train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`train_function`, with the calls of it counted in which something was traced."""
        from tensorflow.python.eager.polymorphic_function import tracing_compilation

        spent = tracing_compilation._graph_building_time_counter.get_cell()

        def watched(iterator: Any) -> Any:
            before = spent.value()
            logs = train_function(iterator)
            if spent.value() != before:
                self._traces += 1
            return logs

        return watched

    def since_last_asked(self) -> int | None:
        """How often it was traced or compiled since this was last asked; None where that cannot be seen.

        What is traced anew is compiled anew: the larger of the two numbers counts. Where XLA compiles, the first
        compilation must have been seen: otherwise the log does not tell.
        """
        self._read_log()
        self._seen_to_compile = self._seen_to_compile or self._compilations > 0
        traces, compilations = self._traces, self._compilations
        self._traces = self._compilations = 0
        return max(traces, compilations) if self._seen_to_compile or not self._xla else None

    def _read_log(self) -> None:
        with contextlib.suppress(OSError), self._log.open("rb") as stream:
            # A log that had grown too large is shorter than before: what its lost lines said is not counted.
            stream.seek(min(self._read_bytes, os.fstat(stream.fileno()).st_size))
            whole, _, self._cut_line = (self._cut_line + stream.read()).rpartition(b"\n")
            self._read_bytes = stream.tell()
            self._compilations += len(_COMPILED.findall(whole))
