"""Standard output and error whose failures end nothing: a full device, a reader that has gone, letters they lack."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class _Lenient:
    """A stream that replaces letters it cannot write by `?`, and is silent once it is broken."""

    def __init__(self, stream: TextIO | None) -> None:
        # One that was closed before Python began is None, and its descriptor free for a socket to take.
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        encoding = self._stream.encoding or "utf-8"
        with self._silent_once_broken():
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with self._silent_once_broken():
            self._stream.flush()

    @contextlib.contextmanager
    def _silent_once_broken(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):  # ValueError: the stream is closed
            # What it still holds would fail again when Python ends.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self._stream.fileno())


@contextlib.contextmanager
def lenient_output() -> Iterator[None]:
    """Make standard output and error such streams."""
    out, err = _Lenient(sys.stdout), _Lenient(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            out.flush()
            err.flush()
