"""The example of `autotune demo`: a training that ships with autotune, copied to where the user can read it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from autotune.data.errors import ArgumentError
from autotune.data.files import shipped_directory, write_atomically

EXAMPLE = "train_digits.py"


def copy_example() -> str:
    """Copy the example to the current directory, unless it is there, and return its name.

    Raises:
        ArgumentError: Another file has its name, or scikit-learn, which has its data, is not installed.
        RunDirectoryError: The directory cannot be written.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ArgumentError("the demo trains on scikit-learn's digits", hint="Run pip install scikit-learn.")
    source, copy = shipped_directory("examples") / EXAMPLE, Path(EXAMPLE)
    if not copy.exists():
        write_atomically(copy, source.read_bytes(), hint="Change to a directory that you may write to.")
    elif not copy.is_file() or copy.read_bytes() != source.read_bytes():
        raise ArgumentError(f"{EXAMPLE} is here already, and is not the demo's", hint="Change to another directory.")
    return EXAMPLE
