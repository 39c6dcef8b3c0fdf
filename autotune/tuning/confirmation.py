"""A leader's confirmation: fresh processes of the leader and the baseline, started after it was chosen.

Nothing of the search enters the claim, because the best of many owes part of its lead to luck. An *instance* is a fresh
process of each side, and of the champion where a leader was confirmed before. They take turns in short slices. Where
two do not fit in memory they follow each other in blocks: baseline, leader, champion, baseline.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autotune.data.record import Boundary, Looks, Outcome, Pairing, Slice, TrialRecord
from autotune.runtime.executor import IN_SEARCH, DeviceUnavailable, SeatLost, TrialFailed
from autotune.space.configuration import Configuration
from autotune.stats.stability import FEWEST_SLICES
from autotune.tuning import costs
from autotune.tuning.comparison import set_in_blocks, take_turns
from autotune.tuning.costs import LEAST_ROUNDS, MOST_ROUNDS, MOST_SLICES_SECONDS
from autotune.tuning.feasibility import fit_on_card
from autotune.tuning.rules import MemoryWatch
from autotune.tuning.run import Run, never_two_alive
from autotune.tuning.seat import INPUT_WAIT_SECONDS, SLICE_PATIENCE_SECONDS, SLICES_IN_A_TRIAL
from autotune.tuning.side import Side
from autotune.tuning.slicing import most_waiting, slice_seconds, taken_seconds, wanted_in_blocks, wanted_seconds
from autotune.tuning.trial import Trial
from autotune.tuning.waiting import GENEROUS, Deadline

BLOCK_ROUNDS = 3  # slices of the baseline before and after a leader that runs alone, which has twice as many
NEGLIGIBLE = 0.01
"""Share of an epoch below which the leader takes over what the baseline's boundary between epochs takes."""
BASELINE_FAILURES = 2  # in a row, of the baseline beside a leader: then the confirmation ends


@dataclass(kw_only=True, eq=False)
class Confirmation:
    """One leader's confirmation as it is measured."""

    reference: Trial  # of the baseline's processes
    trial: Trial  # of the leader's
    champion: Trial | None  # of those of the leader confirmed before
    in_search: TrialRecord
    measured: list[int] = field(init=False)  # the leader's processes that gave pairs
    failure: TrialFailed | None = None  # why it cannot be recommended at all
    seconds: list[float] = field(default_factory=list)  # what each instance took

    def __post_init__(self) -> None:
        """Go on with what was measured."""
        self.measured = sorted({pair.instance for pair in self.trial.pairs})
        self.trial.pairing = self.trial.pairing or self.in_search.pairing or Pairing.ALTERNATING

    @property
    def looks(self) -> Looks:
        """Those in force."""
        return self.trial.looks[-1]

    @property
    def instances(self) -> list[list[float]]:
        """The log-ratios of each instance that was measured."""
        log_ratios = self.trial.log_ratios_by_instance()
        return [log_ratios[number] for number in self.measured if number in log_ratios]

    @property
    def over_champion(self) -> list[list[float]]:
        """The same to the champion, from rounds that both were in."""
        if self.champion is None:
            return []
        log_ratios = self.trial.log_ratios_over(self.champion)
        return [log_ratios[number] for number in self.measured if number in log_ratios]

    def start_seconds(self, records: list[TrialRecord]) -> float:
        """What an instance takes beyond its slices: by what the last ones took, or by the search's records."""
        if not self.seconds:
            return sum(map(costs.start_seconds, records))
        slices = sum(each.baseline.seconds + each.candidate.seconds for each in self.trial.pairs)
        beside = [] if self.champion is None else self.champion.pairs
        slices += sum(each.candidate.seconds for each in beside)
        of_slices = slices / max(1, len(self.measured))
        return max(0.0, statistics.fmean(self.seconds) - of_slices) if self.measured else 0.0

    def record(self) -> TrialRecord:
        """The leader's, as it stands."""
        return self.trial.record(Outcome.OK, failure=self.failure)

    def watch_memory(self, run: Run) -> MemoryWatch:
        """Return what all slices so far show of the leader's memory."""
        return MemoryWatch(
            record=self.trial.record(Outcome.OK), searched=run.records.values(), baseline_batch=run.baseline.batch_size
        )

    def is_beside(self, configuration: Configuration) -> bool:
        """Whether its champion is this one."""
        return self.champion is not None and self.champion.configuration == configuration

    def take(self, failure: TrialFailed) -> None:
        """Keep the leader's failure. Raises that of another side, of a device and of a seat."""
        if isinstance(failure, (DeviceUnavailable, SeatLost)) or failure.trial != self.trial.number:
            raise failure
        self.failure = failure


@dataclass(frozen=True, kw_only=True)
class SlicePlan:
    """How long the slices of one pair of processes should take, all together."""

    seconds: float
    most_seconds: float = MOST_SLICES_SECONDS  # where sides that wait for something from outside need long ones
    most_rounds: int = MOST_ROUNDS


class FreshPairs:
    """Measures instances on a seat, one after another."""

    def __init__(self, run: Run, deadline: Deadline, *, timeout: float) -> None:
        self._run = run
        self._deadline = deadline
        self._timeout = timeout
        self._boundaries: dict[Configuration, Boundary] = {}

    def measure(
        self, confirmation: Confirmation, plan: SlicePlan, *, seat: str, concludes: Callable[[], bool] = lambda: True
    ) -> None:
        """Measure one more instance: a fresh process of each side, against one another.

        `concludes` says whether the pair that was just measured decides. Only then are its processes asked for figures
        that the claim does not need: the wait for input, ceilings, a profile.
        """
        # Raises TrialFailed of the baseline, DeviceUnavailable, Interrupted, TimeIsUp; measured pairs count.
        # A failure of the leader is kept with the confirmation. Where memory ran out beside the baseline, the
        # next instances are in blocks.
        began, trial = self._run.clock(), confirmation.trial
        beside = [each.configuration for each in (trial, confirmation.champion) if each is not None]
        records = self._run.records
        if 0 in records and not fit_on_card(records[0].slices, beside, records.values()):
            trial.pairing = Pairing.BRACKETED
        if trial.pairing is Pairing.BRACKETED:
            self._bracket(confirmation, plan, seat)
        else:
            self._alternate(confirmation, plan, seat, concludes)
        confirmation.seconds.append(self._run.clock() - began)
        self._run.measured(trial)

    def _alternate(self, confirmation: Confirmation, plan: SlicePlan, seat: str, concludes: Callable[[], bool]) -> None:
        trial, sides = confirmation.trial, []
        with contextlib.ExitStack() as stack:
            try:
                with never_two_alive():
                    sides.append(self._start(confirmation.reference, stack, confirmation, seat))
                sides.append(self._start(trial, stack, confirmation, seat))
                if confirmation.champion is not None:
                    sides.append(self._start(confirmation.champion, stack, confirmation, seat))
                self._take_turns(confirmation, sides, plan)
            except TrialFailed as failure:
                if sides and failure.outcome is Outcome.OOM:
                    trial.pairing = Pairing.BRACKETED  # memory does not hold all that were alive
                    return
                confirmation.take(failure)
            examine = concludes()
            for each in sides:
                if confirmation.failure is None or each.trial is not trial:
                    try:
                        _close(each, examine=examine)
                    except TrialFailed as failure:
                        confirmation.take(failure)

    def _take_turns(self, confirmation: Confirmation, sides: Sequence[Side], plan: SlicePlan) -> None:
        trial = confirmation.trial
        # Where the search has seen memory grow, slices are shorter, so that there are enough of them to tell.
        watched = FEWEST_SLICES if confirmation.watch_memory(self._run).why_unclear else 0
        length = self._length(confirmation, sides, most=plan.most_seconds / (max(LEAST_ROUNDS, watched) * len(sides)))
        one_round = sum(taken_seconds(length, side.warm) for side in sides)
        rounds = max(LEAST_ROUNDS, watched, min(plan.most_rounds, round(plan.seconds / one_round)))
        try:
            take_turns(
                self._run,
                sides[0],
                sides[1:],
                length,
                lambda done: (
                    done < rounds + trial.repeats()
                    or (done < FEWEST_SLICES and bool(confirmation.watch_memory(self._run).why_unclear))
                ),
            )
        finally:
            instance = trial.instances - 1
            if own := [pair for pair in trial.pairs if pair.instance == instance]:
                confirmation.measured.append(instance)
                confirmation.reference.add_slices([pair.baseline for pair in own])

    def _length(self, confirmation: Confirmation, sides: Sequence[Side], *, most: float) -> float:
        """Seconds of a slice that suit all of them; at most so many where calls and epochs are no longer."""
        seen = [(confirmation.reference, self._run.records[0]), (confirmation.trial, confirmation.in_search)]
        waiting = [
            most_waiting(
                record.own_slices,
                record.input_wait_fraction
                if trial.finished is None or trial.finished.input_wait_fraction is None
                else trial.finished.input_wait_fraction,
            )
            for trial, record in seen
        ]
        return slice_seconds(
            *(each.warm for each in sides), wanted=wanted_seconds(*waiting, objective=self._run.objective), most=most
        )

    def _bracket(self, confirmation: Confirmation, plan: SlicePlan, seat: str) -> None:
        """Baseline, leader and champion, baseline again, each in a process of its own, never two alive."""
        reference, trial = confirmation.reference, confirmation.trial
        in_block = plan.seconds / (4 * costs.slice_seconds(confirmation.in_search))
        rounds = max(1, min(BLOCK_ROUNDS, plan.most_rounds // 2, round(in_block)))
        if trial.pairs and confirmation.watch_memory(self._run).why_unclear:
            rounds = FEWEST_SLICES  # of the baseline too, whose memory may grow as well
        before = self._alone(reference, rounds, confirmation, seat)
        inside = [trial] if confirmation.champion is None else [trial, confirmation.champion]
        taken: list[tuple[Trial, list[Slice]]] = []
        for each in inside if trial.instances % 2 == 0 else inside[::-1]:
            try:
                taken.append((each, self._alone(each, 2 * rounds, confirmation, seat)))
            except TrialFailed as failure:
                confirmation.take(failure)
            if confirmation.failure is not None:
                return
        after = self._alone(reference, rounds, confirmation, seat)
        reference.add_slices([*before, *after])
        for each, own in taken:
            each.pairing = Pairing.BRACKETED
            set_in_blocks(each, own, before=before, after=after, reference=reference)
        confirmation.measured.append(trial.instances - 1)

    def _alone(self, trial: Trial, count: int, confirmation: Confirmation, seat: str) -> list[Slice]:
        with never_two_alive(), contextlib.ExitStack() as stack:
            side = self._start(trial, stack, confirmation, seat)
            wanted = wanted_in_blocks(self._run.objective)
            length = slice_seconds(side.warm, wanted=wanted, most=MOST_SLICES_SECONDS / SLICES_IN_A_TRIAL)
            slices = [side.slice(length) for _ in range(count)]
            _close(side, examine=trial.instances > 1)  # nobody knows yet whether this pair decides
        return slices

    # ---------------------------------------------------------------------------------------------- processes

    def _start(self, trial: Trial, stack: contextlib.ExitStack, confirmation: Confirmation, seat: str) -> Side:
        """A fresh process of a trial, warm; the stack kills it at its end."""
        run = self._run
        boundary = self._boundaries.get(trial.configuration)
        if boundary is None and run.executor.whole is None:  # the search has seen a part of the host, which is slower
            boundary = self._known_boundary(trial, confirmation)
        usual = 0.0 if trial.warm is None else trial.warm.ready_seconds
        side = Side.start(
            run,
            self._deadline,
            trial,
            seat=seat,
            usual=usual,
            at_most=max(self._timeout, GENEROUS * usual) + SLICE_PATIENCE_SECONDS,
            timing=replace(IN_SEARCH, boundary=boundary),
        )
        stack.callback(side.kill)
        if side.warm.ready.boundary is not None:
            self._boundaries[trial.configuration] = side.warm.ready.boundary
        return side

    def _known_boundary(self, trial: Trial, confirmation: Confirmation) -> Boundary | None:
        """Return what is known of a side's boundary between epochs; None where its process should measure it."""
        of_baseline, searched = self._run.boundary, confirmation.in_search
        if trial.configuration == self._run.baseline:
            return of_baseline
        if trial is not confirmation.trial or of_baseline is None or searched.throughput is None:
            return None
        if searched.boundary is not None or not searched.examples_per_epoch:
            return searched.boundary
        epoch_seconds = searched.examples_per_epoch / searched.throughput.value
        cost = of_baseline.seconds_at(1 / searched.throughput.value)
        return of_baseline if cost < NEGLIGIBLE * epoch_seconds else None


def _close(side: Side, *, examine: bool) -> None:
    """Take the closing figures; with `examine` those that take time, unless the side has them already."""
    finished = side.trial.finished
    examine = examine and (finished is None or finished.input_wait_fraction is None)
    side.close(INPUT_WAIT_SECONDS if examine else 0.0, thorough=examine)
