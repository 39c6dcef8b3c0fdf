"""Files that a run's trials have created: list them, recognise them, and remove those left unchanged."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.data.files import read_at_most
from autotune.data.run_directory import LARGEST_FILE_BYTES

Identity = tuple[int, int, int, int]
"""Device, inode, size in bytes and time of the last change in nanoseconds: what a file was when a trial left it."""


def identity_of(path: str) -> Identity | None:
    """Return what changes when a file does; None for a missing file. For a directory only device and inode count."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if stat.S_ISDIR(found.st_mode):
        return found.st_dev, found.st_ino, 0, 0
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class CreatedFiles:
    """The files and directories that trials have created: earlier ones by their list, this process's as it goes."""

    def __init__(self, listed: Path) -> None:  # a JSON line for each path, with its identity
        self._listed = listed
        self._earlier = read_created(listed)
        self._new: set[str] = set()  # of this process

    def add(self, path: str) -> None:
        """Note a path that this process is about to create or to change, with its missing parent directories."""
        if path in self._earlier and os.path.isdir(path):
            return  # others may have put files there since
        missing = (parent for parent in map(str, Path(path).parents) if not os.path.exists(parent))
        self._new.update((path, *missing))

    def owns(self, path: str) -> bool:
        """Return whether trials have created this file or directory, and nobody else has changed it since."""
        # A file below a created directory may be the user's: only what was seen to be created counts.
        if path in self._earlier and path not in self._new:
            return identity_of(path) == self._earlier[path]
        return path in self._new

    def may_remove(self, path: str) -> bool:
        """Return whether trials own this file, or this directory and all that it holds."""
        below = list(files_below(path))
        return all(map(self.owns, below or [path]))

    def save(self) -> None:
        """Append what this process has created, as it is now, to the list."""
        identities = {path: identity for path in sorted(self._new) if (identity := identity_of(path)) is not None}
        changed = {path: identity for path, identity in identities.items() if self._earlier.get(path) != identity}
        self._earlier.update(changed)
        with contextlib.suppress(OSError), self._listed.open("a", encoding="utf-8") as stream:  # the run may be gone
            stream.writelines(json.dumps([path, *identity]) + "\n" for path, identity in changed.items())


def files_below(directory: str) -> Iterator[str]:
    """Yield the files and directories below a directory, however deep; nothing for a file or a link."""
    for root, directories, files in os.walk(directory) if not os.path.islink(directory) else ():
        yield from (os.path.join(root, name) for name in (*directories, *files))


def read_created(listed: Path) -> dict[str, Identity]:
    """Read the list of what trials have created. A damaged line is left out."""
    found: dict[str, Identity] = {}
    with contextlib.suppress(OSError):
        for line in read_at_most(listed, LARGEST_FILE_BYTES).decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                path, *identity = json.loads(line)
                device, inode, size, changed = map(int, identity)
                found[str(path)] = (device, inode, size, changed)
    return found


def remove_created(listed: Path, directories: Sequence[str]) -> None:
    """Remove what trials have created below these directories and nobody has changed since.

    A directory that is not empty stays.
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
