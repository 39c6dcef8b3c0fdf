"""The commands, which are all known to `app` once this is imported."""

from autotune.commands import reading, training
from autotune.commands.app import app, restore_help

restore_help(reading)
restore_help(training)
__all__ = ["app"]
