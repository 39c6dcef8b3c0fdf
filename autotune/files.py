"""Files that are never seen half-written: write to a temporary name, flush to disk, rename; and careful reading."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from autotune.errors import RunDirectoryError


def read_at_most(path: Path, most_bytes: int) -> bytes:
    """The first `most_bytes` of a file, and one byte more where there are more.

    Raises `OSError` also for pipes and devices, and `ValueError` for a null character in the path.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
        return stream.read(most_bytes + 1)


def is_utf8(path: Path) -> bool:
    """Whether the path can stand in JSON and cross between processes: Linux allows any bytes in names."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        return False
    return True


def write_atomically(
    path: Path,
    content: str | bytes,
    *,
    hint: str = "What was finished before stays readable. Free some space, or give --out another directory.",
) -> None:
    """Put `content` into `path`, whole or not at all. Raises `RunDirectoryError` with `hint` if it cannot."""
    data = content.encode() if isinstance(content, str) else content
    # `tempfile` would ignore the umask, and leave the file behind when an interrupt comes just after it was made.
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
