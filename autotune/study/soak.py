"""The soak: a winner and the baseline train continuously, in turns of seconds, to hold the claim against.

What slices between pauses cannot show shows here: a pipeline that gains from the pauses, memory that grows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

from autotune.measure.continuous import FEWEST_LEGS, FEWEST_SLICES, Soaked, soaked
from autotune.study.run import Run, never_two_alive
from autotune.study.running import Trial
from autotune.study.side_by_side import PATIENCE_SECONDS
from autotune.study.slicing import counted_seconds, slice_seconds
from autotune.study.waiting import Deadline, TimeIsUp
from autotune.trial.live import DeviceUnavailable, TrialFailed
from autotune.trial.record import Leg, Slice

LEAST_LEG_SECONDS, MOST_LEG_SECONDS = 1.5, 5.0
"""Of one turn. Many short ones tell more of what pauses give than few long ones; memory is watched in both."""
ENOUGH_LEGS = 8


def plan_legs(seconds: float, *, slice_length: float, start: float = 0.0) -> tuple[int, int]:
    """How many legs there are time for, and how many slices each has; no legs where there is too little.

    Args:
        seconds: For all legs.
        slice_length: Seconds of a slice.
        start: Seconds that starting processes takes per leg.
    """
    shortest = max(LEAST_LEG_SECONDS, FEWEST_SLICES * slice_length)
    affordable = int(max(0.0, seconds) / (shortest + start)) // 4 * 4
    if affordable < FEWEST_LEGS:
        return 0, 0
    long_ones = int(seconds / (max(shortest, MOST_LEG_SECONDS) + start)) // 4 * 4
    legs = max(min(affordable, ENOUGH_LEGS), long_ones)
    return legs, max(FEWEST_SLICES, int((seconds / legs - start) / slice_length))


class Soak:
    """Runs one.

    Args:
        run: What all phases share.
        deadline: When every wait has ended.
        start: Starts a trial's process, to be ended by the stack, and waits until it is warm.
        close: Takes a trial's closing figures, and ends its process.
        stopped: Whether the user has asked to stop.
        ends: Seconds since the run began at which the last leg should have ended.
        last: When it must have ended, where the fewest legs need longer.
    """

    def __init__(
        self,
        run: Run,
        deadline: Deadline,
        *,
        start: Callable[[Trial, contextlib.ExitStack], None],
        close: Callable[[Trial], None],
        stopped: Callable[[], bool],
        ends: float,
        last: float,
    ) -> None:
        self._run = run
        self._deadline = deadline
        self._start = start
        self._close = close
        self._stopped = stopped
        self._ends = ends
        self._last = last
        self._busy: Trial | None = None

    def soak(
        self,
        reference: Trial,
        trial: Trial,
        *,
        together: bool,
        length: float | None,
        shares: tuple[float, float] = (1.0, 1.0),
    ) -> Soaked | None:
        """Let both train in turns, either of them first.

        Where both are alive they alternate, so that each leg has a pause before it, while the other one trains.
        Else two legs in a row are one process's: then there are no pauses, in the claim's slices either.

        Args:
            reference: The baseline.
            trial: The winner.
            together: Whether both may be alive at once.
            length: Seconds of a slice, as in what is to be corrected: a pause gives the more to a shorter one. None
                where there are no pauses to speak of.
            shares: Of both slices in what is to be corrected, those with a pause before them: winner's, baseline's.

        Returns:
            None where there was too little time, the baseline failed, or the device was not available.

        Raises:
            TrialFailed: The winner failed.
        """
        taken = len(trial.legs), len(reference.legs)
        try:
            with contextlib.ExitStack() as stack:
                self._take_turns(reference, trial, stack, together=together, length=length)
        except TimeIsUp:
            pass  # what was measured by then is what there is
        except DeviceUnavailable:
            return None  # which is nobody's fault
        except TrialFailed:
            if self._busy is trial:
                raise
            return None
        own, beside = trial.legs[taken[0] :], reference.legs[taken[1] :]
        if min(len(own), len(beside)) < FEWEST_LEGS / 2:
            return None
        return soaked(
            [[(trial.rate(each), each.examples) for each in leg.slices] for leg in own],
            [[(reference.rate(each), each.examples) for each in leg.slices] for leg in beside],
            seconds=sum(each.seconds for leg in own for each in leg.slices),
            shares=shares,
        )

    def _take_turns(
        self,
        reference: Trial,
        trial: Trial,
        stack: contextlib.ExitStack,
        *,
        together: bool,
        length: float | None,
    ) -> None:
        first, second = self._run.rng.sample([reference, trial], 2)
        order = [first, second] if together else [first, second, second, first]
        starts = 0.0 if together else sum(each.warm.ready_seconds for each in order if each.warm) / 4 / 2
        if together:
            for each in (first, second):  # or the second one's first leg would follow on its own warm-up
                self._begin(each, stack)
        warm = [each.warm for each in (reference, trial) if each.warm is not None]
        if length is None:
            length = slice_seconds(*warm, measured=math.inf)
        length = max(length, slice_seconds(*warm, measured=0.0))  # a call or an epoch, in these processes
        began = self._run.clock()
        # The run-in is only before the first of a leg.
        longest = max(
            counted_seconds(length, each) + each.ready.run_in_seconds / FEWEST_SLICES for each in warm
        )
        count, slices = plan_legs(self._ends - began, slice_length=longest, start=starts)
        if not count:
            self._ends = self._last
            count, slices = plan_legs(self._ends - began, slice_length=longest, start=starts)
        last: Trial | None = None
        for index in range(count):
            one_leg = (self._run.clock() - began) / max(1, index)
            slower = index >= FEWEST_LEGS and self._run.clock() + one_leg > self._ends
            if slower or self._stopped():
                break
            each = order[index % len(order)]
            if not together and last is not each:
                if last is not None:
                    self._close(last)
                stack.close()
                with never_two_alive():
                    self._begin(each, stack)
            self._leg(each, length, slices)
            last = each
        alive = [reference, trial] if together else [] if last is None else [last]
        for each in alive:
            self._close(each)

    def _begin(self, trial: Trial, stack: contextlib.ExitStack) -> None:
        self._busy = trial
        self._start(trial, stack)

    def _leg(self, trial: Trial, length: float, slices: int) -> None:
        assert trial.live is not None
        self._busy = trial
        assert trial.warm is not None
        seconds = slices * counted_seconds(length, trial.warm) + trial.warm.ready.run_in_seconds
        beyond = trial.warm.ready.uncounted_seconds
        with self._deadline.wait(seconds, at_most=3 * seconds + PATIENCE_SECONDS, beyond=beyond) as timeout:
            parts = trial.live.measure_continuously(length, slices, timeout)
        trial.legs.append(Leg(instance=max(0, trial.instances - 1), slices=self._stamped(parts)))

    def _stamped(self, slices: Sequence[Slice]) -> tuple[Slice, ...]:
        """The slices of a leg that ended just now: each began when the one before it had ended."""
        end, stamped = self._run.now(), list[Slice]()
        for each in reversed(slices):
            stamped.append(each.model_copy(update={"at": end}))
            end -= each.seconds
        return tuple(reversed(stamped))
