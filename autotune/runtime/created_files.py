"""Files that a run's trials have created: list them, recognise them, and remove those left unchanged."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from autotune.data.files import read_at_most
from autotune.data.run_directory import LARGEST_FILE_BYTES

Identity = tuple[int, int, int, int]
"""Device, inode, size in bytes and time of the last change in nanoseconds: what a file was when a trial left it."""


def identity_of(path: str) -> Identity | None:
    """Return what tells whether a file is as it was; None where it is gone. Of a directory only what stays the same."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if stat.S_ISDIR(found.st_mode):
        return found.st_dev, found.st_ino, 0, 0
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_created(listed: Path) -> dict[str, Identity]:
    """Read what trials have made, as they left it. A damaged line is left out."""
    found: dict[str, Identity] = {}
    with contextlib.suppress(OSError):
        for line in read_at_most(listed, LARGEST_FILE_BYTES).decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                path, *identity = json.loads(line)
                device, inode, size, changed = map(int, identity)
                found[str(path)] = (device, inode, size, changed)
    return found


def remove_created(listed: Path, directories: Sequence[str]) -> None:
    """Remove what trials have made below these directories, where it is as they left it.

    A file that somebody has changed since stays, and so does a directory that is not empty.
    """
    below = tuple(os.path.join(directory, "") for directory in directories)
    left = {path: identity for path, identity in read_created(listed).items() if path.startswith(below)}
    for path in sorted(left, key=len, reverse=True):
        if identity_of(path) != left[path]:
            continue
        with contextlib.suppress(OSError):
            os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
    with contextlib.suppress(OSError):
        listed.unlink()
