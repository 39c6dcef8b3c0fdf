"""A run directory taken for a run, and emptied again where the input was at fault before anything was tried."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from autotune.data.errors import InputError, RunDirectoryError
from autotune.data.run_directory import RunDirectory


@contextlib.contextmanager
def occupied(directory: RunDirectory) -> Iterator[None]:
    """The run directory, created and locked; emptied again where the input was at fault before anything was tried."""
    made = [folder for folder in (directory.path, *directory.path.parents) if not folder.exists()]
    directory.create()
    try:
        yield
    except RunDirectoryError:
        raise  # what was finished before stays
    except (InputError, KeyboardInterrupt) as error:
        directory.release()
        needed = 0 if isinstance(error, KeyboardInterrupt) else 1
        if not (directory.trial_directory(needed) / "result.json").exists():
            directory.remove_own_files()
            for each in made:
                with contextlib.suppress(OSError):
                    each.rmdir()  # stays where it holds what is not ours
        raise
    finally:
        directory.release()
