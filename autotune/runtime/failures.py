"""How a trial fails: the exceptions, and the message that tells the tuner."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from autotune.data.errors import ApplyError, AutotuneError, WorkloadError
from autotune.data.printable import printable
from autotune.data.record import Outcome
from autotune.runtime.error_patterns import card_fault, says_no_memory
from autotune.runtime.protocol import Failed
from autotune.runtime.user_errors import ARGS_HINT, cause_of, exit_error, training_refused, users_traceback


class TrainingFailed(Exception):
    """Training showed something that ends the trial."""

    def __init__(self, outcome: Outcome, reason: str, *, hint: str = "", input_error: bool = False) -> None:
        super().__init__(reason)
        self.outcome, self.reason, self.hint, self.input_error = outcome, reason, hint, input_error


def call_user(part: str, function: Callable[[], Any]) -> Any:
    """Call one of the workload's functions.

    Raises:
        WorkloadError: It raised an exception, which is the user's to mend. What `is_nobodys` says passes through.
    """
    try:
        with training_refused(f"in {part}()", "Take it out: the trial trains by itself."):
            return function()
    except WorkloadError:
        raise
    except SystemExit as error:
        raise exit_error(f"the workload's {part}()", error, ARGS_HINT) from error
    except Exception as error:
        if is_nobodys(error):
            raise
        what = f"the workload's {part}() raised {cause_of(error)}"
        raise WorkloadError(what, detail=users_traceback(error)) from error


def strategy_error(what: str) -> WorkloadError:
    """The error of a part of the workload that a `tf.distribute` strategy has hold of."""
    return WorkloadError(
        f"{what}, and trials open a strategy's scope by themselves",
        hint="Take tf.distribute out of the workload: strategy and replicas are knobs, which Workload(baseline=…) may "
        "name. Or tune the training script as it is.",
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, of Python's or TensorFlow's, says that memory ran out."""
    text = str(error)
    if isinstance(error, MemoryError) or says_no_memory(text):
        return True
    errors = getattr(sys.modules.get("tensorflow"), "errors", None)  # it may not have been imported, or not wholly
    if errors is None:
        return False
    exhausted = isinstance(error, errors.OpError) and "RESOURCE_EXHAUSTED" in text
    return exhausted or isinstance(error, errors.ResourceExhaustedError)


def is_nobodys(error: BaseException) -> bool:
    """Whether an exception says that memory ran out or that a card failed: no line of code is at fault."""
    return is_out_of_memory(error) or bool(card_fault(str(error)))


def told(error: BaseException) -> Failed:
    """The message that tells the tuner of an exception."""
    outcome, hint, detail, users = Outcome.ERROR, "", "", False
    if isinstance(error, TrainingFailed):
        outcome, reason, hint, users = error.outcome, error.reason, error.hint, error.input_error
    elif isinstance(error, AutotuneError):
        reason, hint, detail = error.message, error.hint, error.detail
        users = isinstance(error, WorkloadError | ApplyError)
    elif isinstance(error, MemoryError):  # TensorFlow may not be imported
        outcome, reason = Outcome.OOM, f"out of host memory: {error}"
    else:
        hint = card_fault(str(error))
        outcome = Outcome.OOM if is_out_of_memory(error) else Outcome.CRASHED if hint else Outcome.ERROR
        reason, detail = cause_of(error), users_traceback(error)
    return Failed(
        outcome=outcome,
        reason=printable(reason)[:4000],
        hint=hint,
        detail=printable(detail)[-20000:],
        input_error=users,
    )
