"""Forks of a test's process."""

import os
import warnings


def fork() -> int:
    """Fork this process, whose other threads are those of the test runner."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
