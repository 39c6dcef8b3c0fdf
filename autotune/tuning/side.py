"""One process of a trial while the driver measures it: started, asked for slices, closed, killed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from autotune.data.record import Outcome, Slice
from autotune.runtime.executor import IN_SEARCH, LiveTrial, SeatLost, TrialFailed, WarmUp
from autotune.runtime.protocol import TrialTiming
from autotune.tuning.run import Run
from autotune.tuning.slicing import taken_seconds
from autotune.tuning.trial import Trial
from autotune.tuning.waiting import GENEROUS, Deadline

PATIENCE_SECONDS = 30.0  # how long a slice of a process that has been warm may take beyond its length


class Interrupted(Exception):
    """The user asked to stop."""


class Sliced(Protocol):
    """What takes turns in slices."""

    trial: Trial

    def slice(self, length: float) -> Slice:
        """Train for about so many seconds."""


@dataclass(kw_only=True, eq=False)
class Side:
    """A process of a trial. Failures carry the trial's number."""

    run: Run
    deadline: Deadline
    trial: Trial
    live: LiveTrial
    at_most: float = PATIENCE_SECONDS  # seconds to wait for a slice beyond three times its length
    generous: float = GENEROUS  # times the usual length in vain until the trial is at fault

    @classmethod
    def start(
        cls,
        run: Run,
        deadline: Deadline,
        trial: Trial,
        *,
        seat: str,
        usual: float,
        at_most: float,
        timing: TrialTiming = IN_SEARCH,
        generous: float = GENEROUS,
    ) -> Side:
        """Launch a process and wait until it is warm. Raises TrialFailed, and TimeIsUp with less than `usual` left."""
        began, live = run.clock(), None
        trial.place = run.executor.place(seat)
        try:
            with deadline.wait(usual, at_most=at_most, generous=generous) as timeout, _of(run, trial):
                with run.others_work():
                    live = run.executor.launch(
                        trial.configuration, seat=seat, log=run.log_of(trial), data=run.data, timing=timing
                    )
                    trial.instances += 1
                    warm = live.warm_up(timeout)
                run.refuse_other_devices(warm.started.gpus)
        except BaseException:
            if live is not None:
                live.kill()
            raise
        finally:
            trial.seconds += run.clock() - began
        trial.note_warm(warm)
        return cls(run=run, deadline=deadline, trial=trial, live=live, generous=generous)

    @property
    def warm(self) -> WarmUp:
        """What it told once it was warm."""
        assert self.trial.warm is not None
        return self.trial.warm

    def slice(self, length: float) -> Slice:
        """Train for about so many seconds. Raises TrialFailed, TimeIsUp."""
        began = self.run.clock()
        try:
            with (
                self.deadline.wait(
                    taken_seconds(length, self.warm),
                    at_most=3 * length + self.at_most,
                    generous=self.generous,
                    beyond=self.warm.ready.uncounted_seconds,
                ) as timeout,
                _of(self.run, self.trial),
                self.run.others_work(),
            ):
                measured = self.live.measure(length, timeout)
        finally:
            self.trial.seconds += self.run.clock() - began
        return measured.model_copy(update={"at": self.run.now()})

    def close(self, input_wait_seconds: float, *, thorough: bool = False) -> None:
        """Take the closing figures and end it; what was measured stands when they do not come."""
        # Raises TrialFailed where training has ruined the weights.
        patience = self.deadline.closing(PATIENCE_SECONDS)
        try:
            with _of(self.run, self.trial), self.run.others_work():
                finished = self.live.finish(input_wait_seconds, patience, thorough=thorough)
            self.trial.note_closing(finished)
        except TrialFailed as failure:
            if failure.outcome is Outcome.NONFINITE:
                raise
        finally:
            self.kill()

    def kill(self) -> None:
        """End it now."""
        self.live.kill()


@contextlib.contextmanager
def _of(run: Run, trial: Trial) -> Iterator[None]:
    """Note in a failure whose it is. With a single seat, one that is lost is the trial's failure."""
    try:
        yield
    except TrialFailed as failure:
        if isinstance(failure, SeatLost) and not run.several:
            lost, failure = (
                failure,
                TrialFailed(failure.outcome, failure.reason, hint=failure.hint, log_tail=failure.log_tail),
            )
            failure.trial = trial.number
            raise failure from lost
        failure.trial = trial.number
        raise
