"""Write files that are never seen half-written, read with care, and make temporary directories that are removed."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

import psutil

from autotune.data.errors import AutotuneError, RunDirectoryError

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}")  # names of files that are being written
_NO_DISK = re.compile("tmpfs|ramfs|devtmpfs|nfs|cifs|smb|9p|fuse|ceph|lustre|gpfs|beegfs|afs|virtiofs")
LOCK = "lock"  # a file in such a directory, which its process and the forks of that hold


def read_at_most(path: Path, most_bytes: int) -> bytes:
    """Read the first `most_bytes` of a file, and one byte more if there are more; without UTF-8's byte-order mark.

    Raises `OSError` also for pipes and devices, and `ValueError` for a null character in the path.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
        return stream.read(most_bytes + 1).removeprefix(codecs.BOM_UTF8)  # editors on Windows write it


def read_whole(path: Path, most_bytes: int, refuse: type[AutotuneError], hint: str) -> bytes:
    """Read a file as `read_at_most` does. Raises `refuse` where it cannot be read, or is larger."""
    try:
        content = read_at_most(path, most_bytes)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise refuse(f"cannot read {path}: {reason}", hint=hint) from error
    if len(content) > most_bytes:
        raise refuse(f"{path} is larger than {most_bytes} bytes", hint=hint)
    return content


def is_utf8(path: Path) -> bool:
    """Return whether a path can stand in JSON and cross between processes: Linux allows any bytes in names."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        return False
    return True


def write_atomically(path: Path, content: str | bytes, *, hint: str = "") -> None:
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


# ----------------------------------------------------------------------------------------------- temporary directories


def make_scratch(prefix: str, parent: Path | None = None) -> Path:
    """Make a directory with a name that begins so, until this process ends; `parent`: where, by default in $TMPDIR.

    Those that killed processes of this user have left are removed.
    """
    parent = parent or Path(tempfile.gettempdir())
    parent.mkdir(exist_ok=True)
    _sweep(parent, prefix)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    atexit.register(_remove, path, os.getpid())
    unnamed = path / f"{LOCK}.new"
    # The kernel frees the lock, however the process ends. The file gets its name once it is locked.
    fcntl.flock(os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), fcntl.LOCK_EX)
    unnamed.rename(path / LOCK)
    return path


def free_on_local_disk(folder: Path) -> int:
    """Return the bytes that are free in a folder; 0 where it is in memory or on another machine's disk."""
    mounts = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    below = next(kind for path in (folder, *folder.parents) if (kind := mounts.get(str(path))) or path == path.parent)
    return 0 if not below or _NO_DISK.match(below) else shutil.disk_usage(folder).free


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # a fork ends before its parent does
        shutil.rmtree(path, ignore_errors=True)


def _sweep(parent: Path, prefix: str) -> None:
    """Remove the directories whose lock nobody holds; one without a lock is not ours, or just being made."""
    for directory in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            found = directory.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(descriptor)
