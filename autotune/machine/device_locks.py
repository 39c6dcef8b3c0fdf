"""Lock the devices of a run, so that a second run on them can be reported or wait.

There is one lock file for each device, in a directory that belongs to the user alone. The kernel frees the lock when
its process ends, however that happens.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import filelock

from autotune.data.printable import one_line

SHARED_TEMPORARY = Path("/tmp")  # one place for all shells of a user, whatever TMPDIR says
HOST_CPU = "the CPU"
LOOK_SECONDS = 0.5
DISTURBS = "both slow each other down, and intervals will be wide"


@contextlib.contextmanager
def lock_devices(
    directory: Path,
    devices: Sequence[str],  # UUIDs of GPUs or MIG instances, or `HOST_CPU`
    *,
    say: Callable[[str], None],
    wait: bool = False,  # until the devices are free
    advice: str = "",  # after the message about another run
) -> Iterator[float]:
    """Lock the devices of a run while it lasts, and name another run that has one. Yields the seconds that it waited.

    Where no lock can be had, for lack of a directory to write to, the run goes on without it.
    """
    began, folder, named = time.monotonic(), runtime_directory(), set()
    own = f"process {os.getpid()}, {directory.resolve()}"
    with contextlib.ExitStack() as locks:
        for device in sorted(devices) if folder else ():  # in one order: two runs that wait never block each other
            path = Path(folder or "", re.sub(r"[^\w-]", "_", device))
            lock = filelock.FileLock(path.with_suffix(".lock"))
            holder = path.with_suffix(".txt")  # not in the lock file, which filelock may truncate
            try:
                lock.acquire(blocking=False)
            except filelock.Timeout:
                other = "just started"
                with contextlib.suppress(OSError):
                    other = holder.read_text(encoding="utf-8", errors="replace")
                if other not in named:
                    then = "this one starts once that has ended" if wait else f"{DISTURBS}{advice}"
                    say(f"another autotune run is using {device} ({one_line(other)}): {then}")
                named.add(other)
                if not wait:
                    continue
                lock.acquire(poll_interval=LOOK_SECONDS)
            except (OSError, NotImplementedError):  # there are no locks here
                continue
            locks.callback(lock.release)
            locks.callback(holder.unlink, missing_ok=True)
            with contextlib.suppress(OSError):  # a full disk
                holder.write_text(own, encoding="utf-8", errors="replace")
        yield time.monotonic() - began if wait else 0.0


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
