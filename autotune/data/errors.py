"""The errors that autotune raises on purpose, each with its exit code."""

from __future__ import annotations

from typing import ClassVar

from autotune.data.printable import LONGEST_MESSAGE, one_line

INTERNAL = "internal error of autotune"  # begins the reason of a trial that autotune's own code ended


class AutotuneError(Exception):
    """Base of every error that autotune raises on purpose.

    Args:
        message: What is wrong and where, in one sentence.
        hint: The next step, in one sentence; empty if the message says it.
        detail: Lines to show below the message, such as the user's own traceback or the end of a log.
    """

    exit_code: ClassVar[int] = 4

    def __init__(self, message: str, *, hint: str = "", detail: str = "") -> None:
        self.message = one_line(message, longest=LONGEST_MESSAGE)
        self.hint = one_line(hint, longest=LONGEST_MESSAGE)
        super().__init__(self.message)
        self.detail = detail

    def __str__(self) -> str:
        """Return the message, the hint and the detail, on lines of their own."""
        return "\n".join(part for part in (self.message, self.hint, self.detail) if part)


class InputError(AutotuneError):
    """The user's input is wrong, and the user can fix it."""

    exit_code = 2


class ArgumentError(InputError):
    """A command-line or function argument is wrong."""


class WorkloadError(InputError):
    """The user's module, model, dataset or compile arguments cannot be used."""


class SearchSpaceError(InputError):
    """A search-space file is damaged or names something that does not exist."""


class ConfigurationError(InputError):
    """A knob does not exist, or cannot take the value given."""


class RecipeError(InputError):
    """A recipe file is missing, damaged, written by a newer version, or of another workload or baseline."""


class RunDirectoryError(InputError):
    """A run directory cannot be written, is in use, or is not one."""


class DamagedRunWarning(UserWarning):
    """A run, or one of its trials, cannot be read and is omitted."""


class BudgetError(InputError):
    """The budget is too short for the baseline."""


class ApplyError(InputError):
    """A recipe has no effect: applied too late in the process, not to examples, or to a model that ignores it."""


class MachineMismatchError(InputError):
    """The recipe was measured on a machine that differs from this one."""


class NoStableConfigurationError(AutotuneError):
    """The baseline itself fails, so that nothing can be measured against it."""

    exit_code = 3


class MeasuringStoppedError(NoStableConfigurationError):
    """The baseline was measured, and then it or its device failed for good: the measurements stand."""


class TrialProcessError(AutotuneError):
    """One of autotune's own processes failed, and the user's code did not cause it."""


class TuningInterruptedError(AutotuneError):
    """The run was interrupted before anything could be recommended."""

    exit_code = 130
