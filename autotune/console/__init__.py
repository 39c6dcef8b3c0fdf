"""The only room that prints."""

from autotune.console.closing import resume_command, show_recipe, show_usage, show_verification
from autotune.console.mistakes import show_error, show_wrong_usage
from autotune.console.progress import Progress, trial_line
from autotune.console.tables import show_comparison, show_history, show_knobs, show_space, show_trials
from autotune.console.text import (
    clean,
    clean_lines,
    duration,
    ratio,
    say,
    size,
    speed,
    terminal,
)

__all__ = [
    "Progress",
    "clean",
    "clean_lines",
    "duration",
    "ratio",
    "resume_command",
    "say",
    "show_comparison",
    "show_error",
    "show_history",
    "show_knobs",
    "show_recipe",
    "show_space",
    "show_trials",
    "show_usage",
    "show_verification",
    "show_wrong_usage",
    "size",
    "speed",
    "terminal",
    "trial_line",
]
