"""Private temporary directories of processes that may be killed before they can remove them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

LOCK = "lock"  # a file in such a directory, which its process and the forks of that hold


def make_scratch(prefix: str) -> Path:
    """Make a directory with a name that begins so; remove those that killed processes of this user have left."""
    _sweep(Path(tempfile.gettempdir()), prefix)
    path = Path(tempfile.mkdtemp(prefix=prefix))
    unnamed = path / f"{LOCK}.new"
    # The kernel frees the lock, however the process ends. The file gets its name once it is locked.
    fcntl.flock(os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), fcntl.LOCK_EX)
    unnamed.rename(path / LOCK)
    return path


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
