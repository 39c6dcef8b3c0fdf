"""The only room that prints."""

from autotune.console.closing import resume_command, show_diff, show_recipe, show_usage, show_verification
from autotune.console.mistakes import show_error
from autotune.console.progress import Progress, trial_line
from autotune.console.tables import show_comparison, show_findings, show_history, show_knobs, show_space, show_trials
from autotune.console.text import clean, duration, note, ratio, say, size

__all__ = [
    "Progress",
    "clean",
    "duration",
    "note",
    "ratio",
    "resume_command",
    "say",
    "show_comparison",
    "show_diff",
    "show_error",
    "show_findings",
    "show_history",
    "show_knobs",
    "show_recipe",
    "show_space",
    "show_trials",
    "show_usage",
    "show_verification",
    "size",
    "trial_line",
]
