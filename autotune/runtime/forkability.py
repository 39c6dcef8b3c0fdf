"""Decide whether this process can be forked as it is, and give a fork files and random numbers of its own."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import signal
import stat
import subprocess
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from autotune.machine.telemetry import note_peak_before, peak_host_bytes

_HARMLESS_DEVICES = frozenset(("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"))
_UNSHAREABLE_FILES = {b"SQLite format 3\0": "an SQLite database", b"\x89HDF\r\n\x1a\n": "an HDF5 file"}
"""First bytes of files that libraries must not use across a fork."""
_SEMAPHORES = "/dev/shm/sem."  # glibc's names for those that processes share
LOOKS, LOOK_SECONDS = 10, 0.01  # for threads that have ended
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


class Unforkable(Exception):
    """The process holds something that no fork can have. The text says what, and fits behind "because"."""


@dataclass(frozen=True, kw_only=True)
class OpenFile:
    """A regular file that is open at a descriptor."""

    descriptor: int
    path: str
    flags: int  # of `open`
    status: os.stat_result

    @property
    def is_written(self) -> bool:
        """True if it can be written to."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    def reopen(self) -> None:
        """Open the file again at the same descriptor, with an offset that no other process moves.

        A file that is written is opened by its path, so that the process's own layer takes what it writes. A descriptor
        that a library has closed in this fork, or given to another file, is left as it is: matplotlib closes its fonts.
        """
        try:
            is_same = os.path.samestat(os.fstat(self.descriptor), self.status)
            if not is_same or fcntl.fcntl(self.descriptor, fcntl.F_GETFL) != self.flags:
                return
        except OSError:
            return
        source = self.path if self.is_written else f"/proc/self/fd/{self.descriptor}"
        inheritable = os.get_inheritable(self.descriptor)
        opened = os.open(source, self.flags | os.O_CLOEXEC)
        os.lseek(opened, os.lseek(self.descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(opened, self.descriptor, inheritable=inheritable)
        os.close(opened)


@dataclass(frozen=True, kw_only=True)
class ForkState:
    """What a fork must restore to continue as this process would."""

    files: tuple[OpenFile, ...] = ()
    random: Any = None  # of Python's generator, which each fork seeds anew
    peak_bytes: int = 0  # of this process's memory, which the kernel counts anew in each fork

    def restore(self) -> None:
        """Restore it in a fork. Raises `OSError` if a file is gone."""
        for file in self.files:
            file.reopen()
        if self.random is not None:
            random.setstate(self.random)
        note_peak_before(self.peak_bytes)


class ForkCheck:
    """Compares this process with what it was when the check was made, before the user's code ran."""

    def __init__(self) -> None:
        self._known = frozenset(_descriptors())
        self._mappings = frozenset(writable_shared_mappings())
        self._threads = len(os.listdir("/proc/self/task"))

    def state(self) -> ForkState:
        """Return what each fork must restore. Raises `Unforkable`."""
        gc.collect()  # garbage may hold files, such as a database that nobody has closed
        subprocess._cleanup()  # type: ignore[attr-defined]  # awaits those that the script has dropped
        for child in psutil.Process().children():  # also one that has ended and nobody awaited
            with contextlib.suppress(psutil.Error):
                raise Unforkable(f"a process that it started is there ({child.name()})")
        if signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL:
            raise Unforkable("it handles SIGCHLD")
        if any(signal.getitimer(timer)[0] for timer in _TIMERS):
            raise Unforkable("a timer is running")
        end_pools_that_allow_forks()
        for _ in range(LOOKS):  # the kernel shows a thread that was joined for a moment longer
            if len(os.listdir("/proc/self/task")) <= self._threads:
                break
            time.sleep(LOOK_SECONDS)
        else:
            raise Unforkable("a pool of threads is in use")
        for path in writable_shared_mappings():
            if path not in self._mappings:
                holds = "holds a lock or pool of multiprocessing"
                raise Unforkable(f"it {holds if path.startswith(_SEMAPHORES) else 'shares memory'} ({path})")
        if locks_files():
            raise Unforkable("it holds a lock on a file")
        files = open_files(sorted(descriptor for descriptor in _descriptors() if descriptor not in self._known))
        return ForkState(files=tuple(files), random=random.getstate(), peak_bytes=peak_host_bytes())


def end_pools_that_allow_forks() -> None:
    """End idle pools whose library handles forks, as OpenBLAS does: they start again when they are needed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this child only ends
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def writable_shared_mappings() -> Iterator[str]:
    """Yield the files, or names, of memory that this process shares with others and may write to."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        _, permissions, *fields = line.split(maxsplit=5)
        if permissions[1] == "w" and permissions[3] == "s":
            yield fields[3] if len(fields) > 3 else "anonymous memory"


def locks_files() -> bool:
    """Return whether this process holds locks on files: no fork inherits them."""
    own = str(os.getpid())
    lines = Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines()
    return any(len(fields) > 4 and fields[1] != "->" and fields[4] == own for fields in map(str.split, lines))


def open_files(descriptors: Sequence[int]) -> Iterator[OpenFile]:
    """Yield the regular files among descriptors. Raises `Unforkable` for one that cannot be opened again."""
    for descriptor in descriptors:
        path, status = os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor)
        if path in _HARMLESS_DEVICES:
            continue
        if not stat.S_ISREG(status.st_mode) or path.startswith("/memfd:"):
            raise Unforkable(f"{describe_descriptor(path)} is open")
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        file = OpenFile(descriptor=descriptor, path=path, flags=flags, status=status)
        if file.is_written and status.st_nlink == 0:
            raise Unforkable("a temporary file without a name is open")
        with open(f"/proc/self/fd/{descriptor}", "rb", buffering=0) as stream:
            first = stream.read(max(map(len, _UNSHAREABLE_FILES)))
        for magic, name in _UNSHAREABLE_FILES.items():
            if first.startswith(magic):
                raise Unforkable(f"{name} is open ({path})")
        yield file


def describe_descriptor(path: str) -> str:
    """Return what a link of `/proc/self/fd` stands for, in words."""
    kind, separator, _ = path.partition(":")
    if separator and not path.startswith("/"):
        return "an event queue" if kind == "anon_inode" else f"a {kind}"
    return path


def _descriptors() -> Iterator[int]:
    """Yield the open descriptors of this process, without the listing's own."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.fstat(int(name))
            yield int(name)
