"""Write files that are never seen half-written: to a temporary name, flushed, renamed; and read with care."""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import re
import secrets
import stat
from pathlib import Path

from autotune.data.errors import RunDirectoryError

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}")  # names of files that are being written


def read_at_most(path: Path, most_bytes: int) -> bytes:
    """Read the first `most_bytes` of a file, and one byte more if there are more; without UTF-8's byte-order mark.

    Raises `OSError` also for pipes and devices, and `ValueError` for a null character in the path.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
        return stream.read(most_bytes + 1).removeprefix(codecs.BOM_UTF8)  # editors on Windows write it


def is_utf8(path: Path) -> bool:
    """Return whether a path can stand in JSON and cross between processes: Linux allows any bytes in names."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        return False
    return True


def write_atomically(
    path: Path,
    content: str | bytes,
    *,
    hint: str = "Finished trials stay readable. Free some space, or give --out another directory.",
) -> None:
    """Write `content` to `path`, whole or not at all. Raises `RunDirectoryError` with `hint` on failure.

    A link is followed. A pipe or a device is written to and stays what it is.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    # `tempfile` would ignore the umask, and leave the file behind when an interrupt comes just after it was made.
    temporary = target.parent / f".{target.name}.{secrets.token_hex(8)}"
    try:
        if _is_open_or_special(path):
            with contextlib.suppress(BrokenPipeError), path.open("ab") as stream:
                stream.write(data)  # the reader has left, as of `--csv /dev/stdout | head`
            return
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {error.strerror}", hint=hint) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()  # gone already, where all went well


def _is_open_or_special(path: Path) -> bool:
    """Return whether a path leads to a pipe, a device, or a file that a process has open, as /dev/stdout may."""
    with contextlib.suppress(FileNotFoundError):
        kind = os.stat(path).st_mode
        opened = os.path.abspath(path).startswith(("/dev/std", "/dev/fd/", "/proc/"))
        return not stat.S_ISDIR(kind) and (opened or not stat.S_ISREG(kind))
    return False


def shipped_directory(name: str) -> Path:
    """Return a directory that ships with autotune: inside the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / name
    return inside if inside.is_dir() else package.parent / name
