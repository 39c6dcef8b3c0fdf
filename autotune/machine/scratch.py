"""Private temporary directories of processes that may be killed before they can remove them."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

import psutil

_NO_DISK = re.compile("tmpfs|ramfs|devtmpfs|nfs|cifs|smb|9p|fuse|ceph|lustre|gpfs|beegfs|afs|virtiofs")
LOCK = "lock"  # a file in such a directory, which its process and the forks of that hold


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
