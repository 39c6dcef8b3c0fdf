"""Files that are never seen half-written: write to a temporary name, flush to disk, rename."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from autotune.errors import RunDirectoryError


def write_atomically(path: Path, text: str) -> None:
    """Put `text` into `path`, whole or not at all.

    Raises:
        RunDirectoryError: The directory is missing, not writable, or the disk is full; a file that
            stood there before is as it was.
    """
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write {path}: {error.strerror}",
            hint="What was finished before stays readable. Free some space, or give --out another directory.",
        ) from error
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                Path(temporary).unlink(missing_ok=True)  # gone already, where all went well


def _umask() -> int:
    """The process's file mode mask, read without changing it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022
