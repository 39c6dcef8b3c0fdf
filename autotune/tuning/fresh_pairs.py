"""A leader's confirmation: fresh processes of the leader and the baseline, started after it was chosen.

The search's leader owes part of its lead to luck, so nothing of the search enters the claim. Each *instance* is a fresh
process of either side, and of the champion where a leader was confirmed before; they take turns in short slices, in a
balanced random order. Where two do not fit in memory together they follow each other: baseline, leader, champion,
baseline.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autotune.executors.executor import IN_CONFIRMATION, DeviceUnavailable, TrialFailed, TrialTiming
from autotune.record import Boundary, Looks, Outcome, Pairing, Slice, TrialRecord
from autotune.tuning.beside import (
    INPUT_WAIT_SECONDS,
    PATIENCE_SECONDS,
    SLICE_PATIENCE_SECONDS,
    SLICES_IN_A_TRIAL,
    Interrupted,
)
from autotune.tuning.costs import LEAST_ROUNDS, MOST_SLICES_SECONDS
from autotune.tuning.run import Run, never_two_alive
from autotune.tuning.running import Trial
from autotune.tuning.slicing import most_waiting, slice_seconds, slice_times, taken_seconds, wanted_seconds
from autotune.tuning.waiting import GENEROUS, Deadline

BRACKET_ROUNDS = 3
"""Slices of the baseline on either side of a leader that runs alone, which has twice as many."""
MOST_ASKED = 2
"""Processes of a side that are asked how long they wait for input: the second where the first did not tell."""
BASELINE_FAILURES = 2
"""In a row, of the baseline beside a leader: then the confirmation ends."""


class Confirmation:
    """One leader's confirmation as it is measured.

    Args:
        reference: The trial of the baseline's processes.
        trial: The trial of the leader's.
        champion: The trial of those of the leader confirmed before; None without one.
        in_search: What the search found of the leader.
        timing: How the processes are timed.

    Attributes:
        measured: The leader's processes that gave pairs.
        failure: Why it cannot be recommended at all.
        champion_failure: Why nothing was measured of the champion beside it.
    """

    def __init__(
        self,
        *,
        reference: Trial,
        trial: Trial,
        champion: Trial | None,
        in_search: TrialRecord,
        timing: TrialTiming = IN_CONFIRMATION,
    ) -> None:
        self.reference = reference
        self.trial = trial
        self.champion = champion
        self.in_search = in_search
        self.timing = timing
        self.measured: list[int] = sorted({pair.instance for pair in trial.pairs})
        self.failure: TrialFailed | None = None
        self.champion_failure: TrialFailed | None = None
        self.seconds: list[float] = []
        if trial.pairing is None:
            trial.pairing = in_search.pairing or Pairing.ALTERNATING

    @property
    def looks(self) -> Looks:
        """Those in force."""
        return self.trial.looks[-1]

    @property
    def instances(self) -> list[list[float]]:
        """The log-ratios of each instance that was measured."""
        log_ratios = self.trial.log_ratios_by_instance()
        return [log_ratios[number] for number in self.measured]

    @property
    def over_champion(self) -> list[list[float]]:
        """The same to the champion, from rounds that both were in."""
        if self.champion is None:
            return []
        log_ratios = self.trial.log_ratios_over(self.champion)
        return [log_ratios[number] for number in self.measured if number in log_ratios]


class FreshPairs:
    """Measures instances, one after another.

    Args:
        run: What all parts share.
        deadline: When every wait has ended.
        timeout: Seconds that a process may take until it is warm, or more where that is usual.
    """

    def __init__(self, run: Run, deadline: Deadline, *, timeout: float) -> None:
        self._run = run
        self._deadline = deadline
        self._timeout = timeout
        self._times_asked: Counter[int] = Counter()
        self._boundaries: dict[int, Boundary] = {}

    def measure(
        self, confirmation: Confirmation, rounds: int, *, most_seconds: float = MOST_SLICES_SECONDS
    ) -> None:
        """One more instance: a fresh process of each side, measured against one another.

        A failure of the leader is kept with the confirmation. Where memory ran out beside the baseline, the next
        instances are brackets.

        Args:
            confirmation: Whose.
            rounds: Slices of each.
            most_seconds: What all slices may take, where the fewest are no longer: long slices ask for as much.

        Raises:
            TrialFailed: The baseline failed.
            DeviceUnavailable: A process had not the device that the baseline had.
            Interrupted: The user asked to stop; an instance of which pairs were measured counts.
            TimeIsUp: The deadline leaves no time; the same.
        """
        began = self._run.clock()
        trial = confirmation.trial
        if trial.pairing is Pairing.BRACKETED:
            self._bracket(confirmation, rounds)
        else:
            self._alternate(confirmation, rounds, most_seconds)
        if isinstance(confirmation.failure, DeviceUnavailable):
            failure, confirmation.failure = confirmation.failure, None
            raise failure
        confirmation.seconds.append(self._run.clock() - began)
        self._run.measured(trial)

    def _alternate(self, confirmation: Confirmation, rounds: int, most_seconds: float) -> None:
        reference, trial, champion = confirmation.reference, confirmation.trial, confirmation.champion
        together = False
        try:
            with contextlib.ExitStack() as stack:
                with never_two_alive():
                    self._start(reference, stack, confirmation.timing)
                with _kept(confirmation):
                    self._start(trial, stack, confirmation.timing)
                    together = True
                if champion is not None and confirmation.failure is None:
                    try:
                        self._start(champion, stack, confirmation.timing)
                    except DeviceUnavailable:
                        raise
                    except TrialFailed as failure:
                        confirmation.champion_failure = failure
                        confirmation.champion = champion = None
                if confirmation.failure is None:
                    self._take_turns(confirmation, champion, rounds, most_seconds)
                for each in (reference, trial if confirmation.failure is None else None, champion):
                    self._close(each)
        except TrialFailed as failure:
            if failure.outcome is not Outcome.OOM or not together:
                raise
            confirmation.failure = failure  # the baseline found no memory beside the leader
        if confirmation.failure is not None and confirmation.failure.outcome is Outcome.OOM:
            confirmation.failure = None
            if confirmation.champion is not None:
                confirmation.champion_failure = TrialFailed(
                    Outcome.OOM, "memory does not hold three processes"
                )
                confirmation.champion = None
            else:
                trial.pairing = Pairing.BRACKETED

    def _take_turns(
        self, confirmation: Confirmation, champion: Trial | None, rounds: int, most_seconds: float
    ) -> None:
        reference, trial = confirmation.reference, confirmation.trial
        sides = [each for each in (reference, trial, champion) if each is not None]
        length = self._length(confirmation, sides, most=most_seconds / (LEAST_ROUNDS * len(sides)))
        one_round = sum(taken_seconds(length, each.warm) for each in sides if each.warm is not None)
        rounds = min(rounds, max(LEAST_ROUNDS, round(most_seconds / one_round)))
        order = sides
        done = 0
        try:
            while done < rounds + trial.repeats():
                if self._run.interrupted():
                    raise Interrupted
                order = order[::-1] if done % 2 else self._run.rng.sample(sides, len(sides))
                with _kept(confirmation):
                    self._one_round(confirmation, order, length)
                if confirmation.failure is not None:
                    return
                done += 1
        finally:
            if done and trial.instances - 1 not in confirmation.measured:
                confirmation.measured.append(trial.instances - 1)

    def _one_round(self, confirmation: Confirmation, order: Sequence[Trial], length: float) -> None:
        """Everyone once; the leader, and the champion, are set against the baseline's slice of the round."""
        reference = confirmation.reference
        slices = {each.number: self._slice(each, length, confirmation) for each in order}
        assert reference.warm is not None
        reference.add_slices([slices[reference.number]])
        place = {each.number: index for index, each in enumerate(order)}
        for each in order:
            if each is not reference:
                each.add_pair(
                    baseline_first=place[reference.number] < place[each.number],
                    baseline=slices[reference.number],
                    candidate=slices[each.number],
                    reference=reference.warm,
                )

    def _length(self, confirmation: Confirmation, sides: Sequence[Trial], *, most: float) -> float:
        """Seconds of a slice that suit all of them; at most so many where calls and epochs are no longer."""
        seen = [(confirmation.reference, self._run.records[0]), (confirmation.trial, confirmation.in_search)]
        waiting = [
            most_waiting(
                [*record.slices, *(pair.candidate for pair in record.pairs)],
                record.input_wait_fraction if trial.finished is None else trial.finished.input_wait_fraction,
            )
            for trial, record in seen
        ]
        warm = [each.warm for each in sides if each.warm is not None]
        return slice_seconds(*warm, wanted=wanted_seconds(*waiting), most=most)

    def _bracket(self, confirmation: Confirmation, rounds: int) -> None:
        """Baseline, leader and champion, baseline again, each in a process of its own, never two alive."""
        reference, trial = confirmation.reference, confirmation.trial
        rounds = max(1, min(BRACKET_ROUNDS, rounds // 2))
        before = self._alone(reference, rounds, confirmation)
        reference.add_slices(before)
        inside = [trial] if confirmation.champion is None else [trial, confirmation.champion]
        taken: list[tuple[Trial, list[Slice]]] = []
        for each in inside if trial.instances % 2 == 0 else inside[::-1]:
            try:
                with _kept(confirmation) if each is trial else contextlib.nullcontext():
                    taken.append((each, self._alone(each, 2 * rounds, confirmation)))
            except DeviceUnavailable:
                raise
            except (TrialFailed, _OfBaseline) as failure:
                other = failure.failure if isinstance(failure, _OfBaseline) else failure
                confirmation.champion_failure, confirmation.champion = other, None
            if confirmation.failure is not None:
                return
        after = self._alone(reference, rounds, confirmation)
        reference.add_slices(after)
        assert reference.warm is not None
        for each, own in taken:
            each.pairing = Pairing.BRACKETED
            for index, candidate in enumerate(own):
                each.add_pair(
                    baseline_first=index % 2 == 0,
                    baseline=(before, after)[index % 2][index // 2],
                    candidate=candidate,
                    reference=reference.warm,
                )
        confirmation.measured.append(trial.instances - 1)

    def _alone(self, trial: Trial, count: int, confirmation: Confirmation) -> list[Slice]:
        with never_two_alive(), contextlib.ExitStack() as stack:
            self._start(trial, stack, confirmation.timing)
            assert trial.warm is not None
            length = slice_seconds(trial.warm, most=MOST_SLICES_SECONDS / SLICES_IN_A_TRIAL)
            slices = [self._slice(trial, length, confirmation) for _ in range(count)]
            self._close(trial)
        return slices

    # ---------------------------------------------------------------------------------------------- processes

    def _start(self, trial: Trial, stack: contextlib.ExitStack, timing: TrialTiming) -> None:
        """A fresh process of a trial, warm; the stack kills it at its end."""
        run, began = self._run, self._run.clock()
        is_baseline = trial.configuration == run.baseline
        boundary = self._boundaries.get(trial.number, run.boundary if is_baseline else None)
        usual = 0.0 if trial.warm is None else trial.warm.ready_seconds
        at_most = max(self._timeout, GENEROUS * usual) + SLICE_PATIENCE_SECONDS
        with self._deadline.wait(usual, at_most=at_most) as timeout:
            live = run.trials.launch(
                trial.configuration,
                log=run.log_of(trial),
                data=run.data,
                timing=replace(timing, boundary=boundary),
            )
            stack.callback(_end, trial)
            trial.live = live
            trial.instances += 1
            warm = live.warm_up(timeout)
            run.refuse_other_devices(warm.started.gpus)
            trial.note_warm(warm)
        if warm.ready.boundary is not None:
            self._boundaries[trial.number] = warm.ready.boundary
        trial.seconds += run.clock() - began

    def _slice(self, trial: Trial, length: float, confirmation: Confirmation) -> Slice:
        assert trial.live is not None
        began = self._run.clock()
        usual, beyond = slice_times(length, trial.warm)
        try:
            with self._deadline.wait(usual, at_most=3 * length + PATIENCE_SECONDS, beyond=beyond) as timeout:
                return self._run.stamped(trial.live.measure(length, timeout))
        except TrialFailed as failure:
            if trial is confirmation.reference:
                raise _OfBaseline(failure) from failure
            if trial is confirmation.champion:
                confirmation.champion_failure, confirmation.champion = failure, None
                raise _OfBaseline(failure) from failure
            raise
        finally:
            trial.seconds += self._run.clock() - began

    def _close(self, trial: Trial | None) -> None:
        """Take the closing figures; what was measured stands when they do not come.

        How long it waits for input is asked of one process only.
        """
        if trial is None or trial.live is None:
            return
        known = trial.finished is not None and trial.finished.input_wait_fraction is not None
        ask = not known and self._times_asked[trial.number] < MOST_ASKED
        self._times_asked[trial.number] += ask
        with contextlib.suppress(TrialFailed):
            trial.note_closing(
                trial.live.finish(
                    INPUT_WAIT_SECONDS if ask else 0.0, self._deadline.closing(PATIENCE_SECONDS)
                )
            )
        _end(trial)


class _OfBaseline(Exception):
    """A failure that is not the leader's."""

    def __init__(self, failure: TrialFailed) -> None:
        super().__init__()
        self.failure = failure


@contextlib.contextmanager
def _kept(confirmation: Confirmation) -> Iterator[None]:
    """A trial's failure inside is kept as the leader's; one of the baseline's is raised.

    Raises:
        TrialFailed: The baseline's.
    """
    try:
        yield
    except _OfBaseline as other:
        raise other.failure from other
    except TrialFailed as failure:
        confirmation.failure = failure


def _end(trial: Trial) -> None:
    if trial.live is not None:
        trial.live.kill()
        trial.live = None
