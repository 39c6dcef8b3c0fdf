"""A run directory taken for a run, and emptied again where the input was at fault before anything was tried."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import InputError, RunDirectoryError
from autotune.run_directory import RunDirectory


@contextlib.contextmanager
def occupied(directory: RunDirectory) -> Iterator[None]:
    """The run directory, created and locked; emptied again where the input was at fault before anything was tried."""
    before = set(directory.path.iterdir()) if directory.path.is_dir() else None
    made_parent = not directory.path.parent.exists()
    directory.create()
    try:
        yield
    except RunDirectoryError:
        raise  # what was finished before stays
    except (InputError, KeyboardInterrupt) as error:
        directory.release()
        needed = 0 if isinstance(error, KeyboardInterrupt) else 1
        if not (directory.trial_directory(needed) / "result.json").exists():
            _remove(directory.path, before, parent=made_parent)
        raise
    finally:
        directory.release()


def _remove(path: Path, before: set[Path] | None, *, parent: bool) -> None:
    """Take away what a run put into its directory; the directory as well where `before` is None."""
    if before is None:
        shutil.rmtree(path, ignore_errors=True)
        if parent:
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # results/<workload>, when it is empty now
        return
    for entry in set(path.iterdir()) - before:
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
