"""The live baseline of a seat, and what is told of a baseline that fails."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

from autotune.data.errors import BudgetError, MeasuringStoppedError, NoStableConfigurationError, WorkloadError
from autotune.data.record import Outcome, Slice
from autotune.runtime.executor import IN_SEARCH, SeatLost, TrialFailed, WarmUp
from autotune.runtime.protocol import TrialTiming
from autotune.tuning.run import Run, never_two_alive
from autotune.tuning.side import PATIENCE_SECONDS, Side
from autotune.tuning.trial import Trial
from autotune.tuning.waiting import GENEROUS, Deadline, TimeIsUp

MOST_DEATHS = 3  # in a row, of a baseline that has trained before: then the run ends


class Baseline:
    """The baseline's process on a seat: alive between candidates, started again where it died."""

    def __init__(self, run: Run, deadline: Deadline, seat: str) -> None:
        self._run, self._deadline, self._seat = run, deadline, seat
        self.trial: Trial
        self.side: Side | None = None
        self.beside = False  # whether a candidate is alive: then want of memory is the candidate's failure

    def launch(self, *, usual: float, at_most: float, timing: TrialTiming = IN_SEARCH) -> WarmUp:
        """Start its process. Raises TrialFailed, TimeIsUp."""
        with contextlib.nullcontext() if self.beside else never_two_alive():
            self.side = Side.start(
                self._run,
                self._deadline,
                self.trial,
                seat=self._seat,
                usual=usual,
                at_most=at_most,
                timing=timing,
                generous=math.inf,
            )
        return self.side.warm

    def ensure(self) -> Side:
        """Its process, started again where it is gone. Raises NoStableConfigurationError, TrialFailed, TimeIsUp."""
        deaths = 0
        while self.side is None:
            usual = 0.0 if self.trial.warm is None else self.trial.warm.ready_seconds
            timing = replace(IN_SEARCH, boundary=self._run.boundary)
            try:
                self.launch(usual=usual, at_most=max(3 * PATIENCE_SECONDS, GENEROUS * usual), timing=timing)
            except SeatLost:
                raise
            except TrialFailed as failure:
                deaths += 1
                if not self.starts_again(failure, deaths):
                    raise self._judged(failure) from failure
        return self.side

    def starts_again(self, failure: TrialFailed, deaths: int) -> bool:
        """Tell whether to start it again after so many deaths in a row: it has trained, so something else ended it."""
        trained = bool(self.trial.slices) or self.trial.warm is not None
        return trained and failure.outcome is Outcome.CRASHED and deaths < MOST_DEATHS

    def slice(self, length: float) -> Slice:
        """Train a slice of it; it is started again where it died. Raises as `ensure`."""
        for deaths in range(1, MOST_DEATHS + 1):
            side = self.ensure()
            try:
                return side.slice(length)
            except TimeIsUp as over:
                if over.begun:
                    self.stop()
                raise
            except SeatLost:
                raise
            except TrialFailed as failure:
                self.stop()
                if deaths > 1 and not self.starts_again(failure, deaths):
                    raise self._judged(failure) from failure
        raise AssertionError("unreachable")

    def _judged(self, failure: TrialFailed) -> Exception:
        if self.beside and failure.outcome is Outcome.OOM:
            return failure
        return baseline_error(self._run, self.trial, failure)

    def stop(self) -> None:
        """Kill its process."""
        if self.side is not None:
            self.side.kill()
            self.side = None


def baseline_error(run: Run, trial: Trial, failure: TrialFailed, *, hurried: bool = False) -> Exception:
    """What to tell of a baseline that failed; `hurried` where the budget left it less time than it may take."""
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
            hint=failure.hint or f"Mend that; --resume {run.directory.path} goes on. Its log is {run.log_of(trial)}.",
            detail=detail,
        )
    return NoStableConfigurationError(
        f"the baseline itself fails ({failure.outcome}): {failure.reason}",
        hint=failure.hint or f"Nothing can be recommended before it runs. Its log is {run.log_of(trial)}.",
        detail=detail,
    )
