"""The commands, which are all known to `app` once this is imported."""

from autotune.commands.app import app
from autotune.commands.reading import compare, dashboard, doctor, history, knobs, report, show, space
from autotune.commands.training import run, tune, verify

__all__ = [
    "app",
    "compare",
    "dashboard",
    "doctor",
    "history",
    "knobs",
    "report",
    "run",
    "show",
    "space",
    "tune",
    "verify",
]
