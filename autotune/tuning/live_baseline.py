"""The live baseline of a seat, and the errors that a failing baseline ends a run with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from autotune.data.errors import BudgetError, MeasuringStoppedError, NoStableConfigurationError, WorkloadError
from autotune.data.record import Outcome, Slice
from autotune.runtime.executor import SeatLost, TrialFailed
from autotune.tuning.comparison import MeasuredProcess
from autotune.tuning.run import Run
from autotune.tuning.trial import Trial
from autotune.tuning.waiting import TimeIsUp

MOST_DEATHS = 3  # in a row, of a baseline that has trained before: then the run ends


@dataclass(kw_only=True, eq=False)
class LiveBaseline(MeasuredProcess):
    """The baseline's process on a seat: alive between candidates, started again where it died."""

    is_kept: ClassVar[bool] = True
    generous: float = math.inf

    def ensure(self) -> None:
        """Start it again where it is gone. Raises NoStableConfigurationError, TrialFailed, TimeIsUp."""
        deaths = 0
        while self.live is None:
            try:
                self.start()
            except SeatLost:
                raise
            except TrialFailed as failure:
                deaths += 1
                if not self.starts_again(failure, deaths):
                    raise self._judged(failure) from failure

    def slice(self, length: float) -> Slice:
        """Train a slice of it; it is started again where it died. Raises as `ensure`."""
        for deaths in range(1, MOST_DEATHS + 1):
            self.ensure()
            try:
                return super().slice(length)
            except TimeIsUp as over:
                if over.begun:
                    self.kill()
                raise
            except SeatLost:
                raise
            except TrialFailed as failure:
                self.kill()
                if deaths > 1 and not self.starts_again(failure, deaths):
                    raise self._judged(failure) from failure
        raise AssertionError("unreachable")

    def slice_once(self, length: float) -> Slice:
        """Train a slice; raises TrialFailed where it died."""
        return super().slice(length)

    def starts_again(self, failure: TrialFailed, deaths: int) -> bool:
        """Return whether to start it again after so many deaths in a row: it has trained before."""
        trained = bool(self.trial.slices or self.trial.processes)
        return trained and failure.outcome is Outcome.CRASHED and deaths < MOST_DEATHS

    def _judged(self, failure: TrialFailed) -> Exception:
        if self.beside and failure.outcome is Outcome.OOM:
            return failure  # want of memory beside a candidate is the candidate's failure
        return baseline_error(self.run, self.trial, failure)


def baseline_error(run: Run, trial: Trial, failure: TrialFailed, *, hurried: bool = False) -> Exception:
    """Return the error for a baseline that failed; `hurried` where the budget left it less time than it may take."""
    detail = failure.detail or failure.log_tail
    if failure.outcome is Outcome.TIMEOUT and hurried:
        return BudgetError(
            f"the budget ended after {run.clock():.0f} s, before the baseline was timed",
            hint=f"Give a larger --budget, such as {max(60, math.ceil(run.clock() / 6) * 60)}s.",
            detail=detail,
        )
    if failure.outcome is Outcome.TIMEOUT and not trial.slices:
        hint = "Try it on its own with model.fit first; if it trains there, give a larger --budget."
        if run.executor.isolation == "template":
            hint = (
                "If it never trains at all, try it on its own with model.fit first; if it does train there, try "
                "--isolation spawn: threads that a library has started at import do not survive a fork."
            )
        return BudgetError(f"the baseline was not warm and timed in time: {failure.reason}", hint=hint, detail=detail)
    if failure.input_error:
        return WorkloadError(failure.reason, hint=failure.hint, detail=failure.detail)
    if trial.slices and failure.outcome is not Outcome.NONFINITE:
        return MeasuringStoppedError(
            f"the baseline was measured, but its process fails now ({failure.outcome}): {failure.reason}",
            hint=failure.hint or f"Fix that; --resume {run.directory.path} goes on. Its log is {run.log_of(trial)}.",
            detail=detail,
        )
    return NoStableConfigurationError(
        f"the baseline itself fails ({failure.outcome}): {failure.reason}",
        hint=failure.hint or f"Nothing can be recommended before it runs. Its log is {run.log_of(trial)}.",
        detail=detail,
    )
