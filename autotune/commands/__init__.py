"""The commands, which are all known to `app` once this is imported."""

from autotune.commands import reading, training
from autotune.commands.app import app

__all__ = ["app", "reading", "training"]
