"""Find other runs of autotune on this machine that use the same devices.

Each run holds a locked file in a directory that belongs to the user alone. The kernel frees the lock when its process
ends, however that happens.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune.data.printable import one_line

SHARED_TEMPORARY = Path("/tmp")  # one place for all shells of a user, whatever TMPDIR says
LOOK_SECONDS = 0.5
_LARGEST_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class AnnouncedRun:
    """A run that is going on."""

    pid: int  # of its driver
    directory: str
    since: float  # when it was announced, in seconds since the epoch; runs are served in this order
    devices: tuple[str, ...]  # see `local_devices`


def local_devices(gpus: Sequence[str]) -> tuple[str, ...]:
    """Return what a run uses of this machine: UUIDs of these GPUs or, without any, `core N` for each core."""
    return tuple(gpus) or tuple(f"core {number}" for number in sorted(os.sched_getaffinity(0)))


@contextlib.contextmanager
def announce_run(
    directory: Path,
    devices: Sequence[str],
    *,
    say: Callable[[str], None],
    wait: bool = False,  # until those announced earlier have ended
    advice: str = "",  # what the user can do about another one
    within: Path | None = None,  # where runs are announced; the user's runtime directory when None
) -> Iterator[float]:
    """Announce a run while it lasts, and name another one that uses its devices. Yields the seconds that it waited."""
    own = AnnouncedRun(pid=os.getpid(), directory=str(directory.resolve()), since=time.time(), devices=tuple(devices))
    place = within or runtime_directory()
    if place is None:
        yield 0.0
        return
    with _held_file(place, own) as file:
        yield _wait_or_warn(place, file, own, wait=wait, say=say, advice=advice)


def _wait_or_warn(
    place: Path, file: Path, own: AnnouncedRun, *, wait: bool, say: Callable[[str], None], advice: str
) -> float:
    began, said = time.monotonic(), 0
    while True:
        running = [
            other
            for name, other in _announced_runs(place)
            if name != file.name
            and not set(own.devices).isdisjoint(other.devices)
            and (other.since, name) < (own.since, file.name)
        ]
        if not running:
            return time.monotonic() - began if wait else 0.0
        first = min(running, key=lambda other: other.since)
        if first.pid != said:
            said = first.pid
            who = f"another autotune run is using this machine (process {first.pid}, {one_line(first.directory)})"
            disturbs = "; ".join(filter(None, ["both slow each other down, and intervals will be wide", advice]))
            say(f"{who}: {'this one starts once that has ended' if wait else disturbs}")
        if not wait:
            return 0.0
        time.sleep(LOOK_SECONDS)


def runtime_directory() -> Path | None:
    """Return a directory that nobody else can write to; None where none can be had."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    for parent, name in ((given, "autotune"), (str(SHARED_TEMPORARY), f"autotune-{os.getuid()}")):
        if not os.path.isabs(parent):
            continue
        path = Path(parent, name)
        with contextlib.suppress(OSError):
            path.mkdir(mode=0o700, exist_ok=True)
            found = path.lstat()  # a link that somebody else has put there is not followed
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                return path
    return None


@contextlib.contextmanager
def _held_file(place: Path, own: AnnouncedRun) -> Iterator[Path]:
    """Hold a locked file with a run's announcement, complete from the moment it has its name."""
    file = place / f"{own.pid}-{secrets.token_hex(4)}.json"
    unnamed = file.with_suffix(".new")
    try:
        descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError:  # a full disk: nothing is announced
        yield file
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, json.dumps(asdict(own)).encode())
            unnamed.rename(file)
        yield file
    finally:
        for path in (unnamed, file):
            with contextlib.suppress(OSError):
                path.unlink()
        os.close(descriptor)


def _announced_runs(place: Path) -> Iterator[tuple[str, AnnouncedRun]]:
    """Yield the runs whose processes live, with the names of their files; what others left is removed."""
    for file in place.glob("*.json"):
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            if _is_locked(descriptor):
                with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                    content = json.loads(os.read(descriptor, _LARGEST_BYTES))
                    yield file.name, AnnouncedRun(**{**content, "devices": tuple(content["devices"])})
            else:
                file.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
