"""Files that are never seen half-written: write to a temporary name, flush to disk, rename."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from autotune.errors import RunDirectoryError


def write_atomically(
    path: Path,
    content: str | bytes,
    *,
    hint: str = "What was finished before stays readable. Free some space, or give --out another directory.",
) -> None:
    """Put `content` into `path`, whole or not at all.

    Args:
        path: The file; one that stands there is replaced, with the permissions of a new file.
        content: Text is written as UTF-8.
        hint: The next step, should the file not be writable.

    Raises:
        RunDirectoryError: The directory is missing, not writable, or the disk is full; a file that
            stood there before is as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    # The name is chosen here, and not by tempfile: so it is known, and removed, even when an interrupt comes
    # just after the file was made; and a file that is opened in the plain way heeds the umask.
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {error.strerror}", hint=hint) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()  # gone already, where all went well
