"""A leader's confirmation: fresh processes of the leader and the baseline, started after it was chosen.

Nothing of the search enters the claim, because the best of many owes part of its lead to luck. An *instance* is a fresh
process of each side, and of the best leader where a leader was confirmed before.

A leader without one of its changes is measured beside the whole leader, to see what it gives. That decides nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from autotune.data.figures import Interval, LogInterval
from autotune.data.record import Ablation, Boundary, InterimAnalysis, Outcome, Pairing, Phase, TrialRecord
from autotune.runtime.executor import DeviceUnavailable, SeatLost, TrialFailed
from autotune.runtime.protocol import Started
from autotune.space.configuration import Configuration, find_conflict, normalize, reset_idle
from autotune.space.knobs import KNOBS
from autotune.stats.deciding import Stop, stop_measuring
from autotune.stats.intervals import CONFIDENCE, ProcessPrior, Spread, mean_interval
from autotune.stats.stability import FEWEST_SLICES
from autotune.tuning import costs
from autotune.tuning.comparison import Comparison, MeasuredProcess, own_compilations
from autotune.tuning.costs import LEAST_ROUNDS, MOST_ROUNDS, MOST_SLICES_SECONDS
from autotune.tuning.rules import why_memory_unclear
from autotune.tuning.run import Interrupted, Run, TimeIsUp
from autotune.tuning.seat import INPUT_WAIT_SECONDS, SLICE_PATIENCE_SECONDS, SearchSchedule, TrialLimits, find_in_force
from autotune.tuning.trial import Trial

BLOCK_ROUNDS = 3  # slices of the baseline before and after a leader that runs alone, which has twice as many
NEGLIGIBLE = 0.01
"""Share of an epoch below which the leader takes over what the baseline's boundary between epochs takes."""
WITH_BOUNDARY = 3.0  # how many times as long a process may take to start that measures its boundary itself
LOADING_SAVES = 0.6  # share of the time to compile that loading saves: two thirds with ResNet-50 on an H200
BASELINE_FAILURES = 2  # in a row, of the baseline beside a leader: then the confirmation ends
FEWEST_CHANGES = 2  # what a single change gives is the claim itself
MIN_ABLATION_PAIRS = 2  # of slices, where the time was over: one has no spread


@dataclass(frozen=True, kw_only=True)
class LeaderTrials:
    """The trials of one leader's confirmation."""

    reference: Trial  # of the baseline's processes
    trial: Trial  # of the leader's
    best_leader: Trial | None  # of those of the leader confirmed before
    search_record: TrialRecord

    @property
    def requested(self) -> Configuration:
        """Its configuration as it was requested, before its first process reported the values in force."""
        return Configuration(self.search_record.asked or self.search_record.configuration)

    @property
    def failure(self) -> TrialFailed | None:
        """The failure because of which it cannot be recommended; None without one."""
        return self.trial.failure

    @property
    def measured(self) -> list[int]:
        """The leader's processes that gave pairs."""
        return sorted({pair.instance for pair in self.trial.pairs})

    @property
    def baseline_compilations(self) -> int:
        """Number of the baseline's processes that compiled for themselves; the others loaded their programs."""
        return sum(log.saved_seconds is None for log in self.reference.processes)

    @property
    def sides(self) -> list[Trial]:
        """All trials, the baseline's first."""
        return [trial for trial in (self.reference, self.trial, self.best_leader) if trial is not None]

    @property
    def in_blocks(self) -> bool:
        """True if memory could not hold all sides at once."""
        return (self.trial.pairing or self.search_record.pairing) is Pairing.BRACKETED

    @property
    def looks(self) -> InterimAnalysis:
        """The looks in force."""
        return self.trial.looks[-1]

    @property
    def instances(self) -> list[list[float]]:
        """The log-ratios of each instance that was measured."""
        return [log_ratios for _, log_ratios in sorted(self.trial.log_ratios_by_instance().items())]

    @property
    def over_best_leader(self) -> list[list[float]]:
        """The log-ratios to the best leader, from rounds that both were in."""
        if self.best_leader is None:
            return []
        return [log_ratios for _, log_ratios in sorted(self.trial.log_ratios_over(self.best_leader).items())]

    def start_seconds(self, records: Sequence[TrialRecord], run: Run) -> float:
        """Return the seconds of an instance beyond its slices: by the last ones, or by the search's records."""
        taken = self.next_seconds(run)
        if taken is None:
            return costs.starts_seconds(records)
        slices = sum(pair.baseline.seconds + pair.candidate.seconds for pair in self.trial.pairs)
        rounds_of_best = () if self.best_leader is None else self.best_leader.pairs
        slices += sum(pair.candidate.seconds for pair in rounds_of_best)
        return max(0.0, taken - slices / len(self.measured)) if self.measured else 0.0

    def next_seconds(self, run: Run) -> float | None:
        """Return the expected seconds of the next instance, by those before it; None before the first."""
        taken, kept = self.trial.instance_seconds, run.confirmed
        loading = [side for side in self.sides if kept and side.processes and kept.has(*own_compilations(run, side))]
        if not taken or not loading:
            return statistics.fmean(taken) if taken else None
        compiled = [side.processes[-1].compile_seconds for side in loading if side.processes[-1].saved_seconds is None]
        return max(0.0, taken[-1] - LOADING_SAVES * sum(compiled))

    def record(self) -> TrialRecord:
        """Return the leader's record, as it stands."""
        return self.trial.record(Outcome.OK, failure=self.trial.failure)

    def why_memory_unclear(self, run: Run) -> str:
        """Return why all slices so far do not exclude a memory leak; empty if they do."""
        return why_memory_unclear(self.trial.record(Outcome.OK), run.records.values(), run.baseline.batch_size)

    def alternates_with(self, configuration: Configuration) -> bool:
        """Return whether its best leader is this one."""
        return self.best_leader is not None and self.best_leader.configuration == configuration


@dataclass(frozen=True, kw_only=True)
class SlicePlan:
    """The seconds that all slices of one pair of processes should take."""

    seconds: float
    most_seconds: float = MOST_SLICES_SECONDS  # where sides that wait for something from outside need long ones
    most_rounds: int = MOST_ROUNDS


@dataclass(kw_only=True)
class PairSchedule:
    """The schedule of fresh processes: a fixed number of rounds, whatever they show."""

    run: Run
    leader: LeaderTrials
    plan: SlicePlan
    concludes: Callable[[], bool]
    rounds: int = field(default=0, init=False)

    @property
    def is_leak_possible(self) -> bool:
        """Return whether the slices so far are too few to tell of a leak."""
        return bool(self.leader.why_memory_unclear(self.run))

    def turn_seconds(self, processes: Sequence[MeasuredProcess]) -> float:
        """See `Schedule`. Where the search has seen memory grow, there are more slices, and shorter ones."""
        least = max(LEAST_ROUNDS, FEWEST_SLICES) if self.is_leak_possible else LEAST_ROUNDS
        length = costs.slice_length(
            *(process.warm for process in processes),
            wanted=costs.length_in_turns(*self._waiting(), objective=self.run.options.objective),
            most=self.plan.most_seconds / (least * len(processes)),
        )
        round_seconds = sum(costs.taken_seconds(length, process.warm) for process in processes)
        self.rounds = max(least, min(self.plan.most_rounds, round(self.plan.seconds / round_seconds)))
        return length

    def _waiting(self) -> list[float]:
        """Return the share of its time that each side may wait, by its own processes or by the search."""
        leader = self.leader
        shares = []
        for trial, record in ((leader.reference, self.run.records[0]), (leader.trial, leader.search_record)):
            own = trial.latest("input_wait_fraction")
            shares.append(costs.most_waiting(record.own_slices, record.input_wait_fraction if own is None else own))
        return shares

    def goes_on(self, rounds: int, length: float) -> bool:
        """See `Schedule`."""
        if rounds < self.rounds + self.leader.trial.extra_pairs_allowed():
            return True
        return rounds < FEWEST_SLICES and self.is_leak_possible

    def block_seconds(self, process: MeasuredProcess) -> float:
        """See `Schedule`."""
        wanted = costs.length_in_blocks(self.run.options.objective)
        return costs.slice_length(process.warm, wanted=wanted, most=MOST_SLICES_SECONDS / costs.SLICES_IN_A_TRIAL)

    def block_rounds(self, length: float) -> int:
        """See `Schedule`."""
        if self.leader.trial.pairs and self.is_leak_possible:
            return FEWEST_SLICES  # of the baseline too, whose memory may grow as well
        held = self.plan.seconds / (4 * costs.usual_slice_seconds(self.leader.search_record))
        return max(1, min(BLOCK_ROUNDS, self.plan.most_rounds // 2, round(held)))

    def close(self, process: MeasuredProcess) -> None:
        """See `Schedule`. Figures that take time are asked for once, of the pair that decides."""
        examine = self._decides if process.alternates else process.trial.instances > 1  # a block cannot know that
        examine = examine and process.trial.latest("input_wait_fraction") is None
        process.close(INPUT_WAIT_SECONDS if examine else 0.0, thorough=examine)

    @cached_property
    def _decides(self) -> bool:
        return self.concludes()


class FreshPairs:
    """Measures instances on a seat, one after another."""

    def __init__(self, run: Run, *, timeout: float) -> None:
        self._run, self._timeout = run, timeout
        self._boundaries: dict[Configuration, Boundary] = {}

    def measure(
        self, leader: LeaderTrials, plan: SlicePlan, *, seat: str, concludes: Callable[[], bool] = lambda: True
    ) -> None:
        """Measure one more instance: a fresh process of each side, against one another.

        `concludes` says whether the pair that was just measured decides. Only then are its processes asked for figures
        that the claim does not need: the wait for input, ceilings, a profile.
        """
        # Raises TrialFailed of the baseline, DeviceUnavailable, Interrupted, TimeIsUp; measured pairs count.
        # A failure of the leader is kept with its trials.
        run, began = self._run, self._run.clock()
        processes = [self._process(trial, leader, seat) for trial in leader.sides]
        comparison = Comparison(
            run=run,
            reference=processes[0],
            candidates=processes[1:],
            schedule=PairSchedule(run=run, leader=leader, plan=plan, concludes=concludes),
            in_blocks=leader.in_blocks,
            reference_alone=run.records[0].slices if 0 in run.records else (),
        )
        try:
            comparison.measure()
        except TrialFailed as failure:
            if isinstance(failure, (DeviceUnavailable, SeatLost)) or failure.trial != leader.trial.number:
                raise
            leader.trial.failure = failure
        finally:
            known = {process.trial.configuration: process.boundary for process in processes}
            self._boundaries |= {configuration: found for configuration, found in known.items() if found is not None}
        leader.trial.instance_seconds.append(run.clock() - began)
        run.measured(leader.trial)

    def _process(self, trial: Trial, leader: LeaderTrials, seat: str) -> MeasuredProcess:
        run = self._run
        boundary = self._boundaries.get(trial.configuration) or self._known_boundary(trial, leader)
        return MeasuredProcess(
            run=run,
            trial=trial,
            seat=seat,
            start_timeout=(self._timeout + SLICE_PATIENCE_SECONDS) * (1.0 if boundary else WITH_BOUNDARY),
            boundary=boundary,
            keeps_compilations=run.confirmed is not None,
        )

    def _known_boundary(self, trial: Trial, leader: LeaderTrials) -> Boundary | None:
        """Return a side's known boundary between epochs; None where its process should measure it."""
        of_baseline, searched = self._run.boundary, leader.search_record
        if trial.configuration == self._run.baseline:
            return of_baseline
        if trial is not leader.trial or of_baseline is None or searched.throughput is None:
            return None
        if searched.boundary is not None or not searched.examples_per_epoch:
            return searched.boundary
        epoch_seconds = searched.examples_per_epoch / searched.throughput.value
        cost = of_baseline.seconds_at(1 / searched.throughput.value)
        return of_baseline if cost < NEGLIGIBLE * epoch_seconds else None


# ------------------------------------------------------------------------------------- without one change


def without_change(configuration: Configuration, knob: str, baseline: Configuration) -> Configuration:
    """Return a configuration with the baseline's value of one knob, and of those that only act beside it."""
    return reset_idle(normalize(configuration.replace(**{knob: baseline[knob]}), {}), baseline)


def unmeasured_changes(
    leader: int, configuration: Configuration, baseline: Configuration, records: Iterable[TrialRecord]
) -> tuple[str, ...]:
    """Return the changes of a leader that can be left out and were not yet; none where it has only one."""
    # The configuration is as it was requested: what other changes bring about cannot be left out alone.
    changes = configuration.differences(baseline)
    if len(changes) < FEWEST_CHANGES:
        return ()
    done = {record.ablation.knob for record in records if record.ablation and record.ablation.leader == leader}
    return tuple(
        knob
        for knob in changes
        if knob not in done and not find_conflict(without_change(configuration, knob, baseline))
    )


def leave_out(
    run: Run, leader: LeaderTrials, knob: str, *, seat: str, limits: TrialLimits, spread: Spread, prior: ProcessPrior
) -> TrialRecord:
    """Measure a leader without one of its changes beside the whole leader, and keep both records.

    Whatever fails is in the record. `spread` is that of other trials' pairs, `prior` that of fresh pairs of processes.
    """
    # Raises Interrupted, and SeatLost where there are several seats.
    whole = leader.trial.configuration
    reference = run.new_trial(Phase.ABLATION, whole)
    trial = run.new_trial(Phase.ABLATION, without_change(leader.requested, knob, run.baseline))
    trial.pooled_spread = spread
    outcome, reason, log_tail = Outcome.OK, "", ""
    ended: Interrupted | SeatLost | None = None
    try:
        _compare(run, leader, reference, trial, knob, seat=seat, limits=limits)
    except (Interrupted, SeatLost) as why:
        ended, outcome, reason = why, Outcome.INTERRUPTED, "stopped before it was measured"
    except TimeIsUp:
        if len(trial.log_ratios) < MIN_ABLATION_PAIRS:
            outcome, reason = Outcome.INTERRUPTED, "the time was over"
    except TrialFailed as failure:
        outcome, reason, log_tail = failure.outcome, failure.whole, failure.log_tail
        if isinstance(failure, DeviceUnavailable):
            outcome = Outcome.INTERRUPTED  # it says nothing of the change
        elif failure.trial != trial.number:
            outcome, reason = Outcome.INTERRUPTED, f"the recommended configuration failed beside it: {failure.whole}"
    if reference.slices:
        run.save_record(reference.record(Outcome.OK), announce=False)
    gain: Interval | None = None
    if outcome is Outcome.OK:
        measured = mean_interval(trial.log_ratios, pooled_spread=trial.pooled_spread)
        margin = max(measured.half_width, prior.half_width(1, CONFIDENCE))  # no narrower than one fresh pair tells
        value = -measured.value
        gain = LogInterval(value=value, low=value - margin, high=value + margin, count=1).ratio
    ablation = Ablation(knob=knob, leader=leader.trial.number, reference=reference.number, gain=gain)
    record = trial.record(outcome, reason=reason, log_tail=log_tail)
    record = run.save_record(record.model_copy(update={"ablation": ablation, "speedup": None}))
    if ended is not None:
        raise ended
    return record


def _compare(
    run: Run, leader: LeaderTrials, reference: Trial, trial: Trial, knob: str, *, seat: str, limits: TrialLimits
) -> None:
    """Measure both sides in turns, or in blocks where memory does not hold both."""

    def note_in_force(started: Started) -> None:
        trial.configuration = find_in_force(trial.configuration, started, run.baseline)

    def enough() -> Stop | None:
        return stop_measuring(trial.log_ratios, leader=None, pooled_spread=trial.pooled_spread)

    of_processes = (log.boundary for log in reversed(leader.trial.processes))
    known = next((found for found in of_processes if found is not None), leader.search_record.boundary)
    boundary = known or run.boundary
    process = partial(MeasuredProcess, run=run, seat=seat, start_timeout=limits.timeout)
    own = None if KNOBS[knob].structural else boundary
    whole = process(trial=reference, boundary=boundary)
    without = process(trial=trial, boundary=own, on_started=note_in_force)
    searched = [run.records[0], leader.search_record]
    waiting = [costs.most_waiting(record.own_slices, record.input_wait_fraction) for record in searched]
    schedule = SearchSchedule(
        process=without,
        baseline=whole,
        limits=limits,
        usual_length=costs.length_in_turns(*waiting, objective=run.options.objective),
        enough=enough,
    )
    comparison = Comparison(
        run=run,
        reference=whole,
        candidates=[without],
        schedule=schedule,
        in_blocks=leader.in_blocks,
        reference_alone=run.records[0].slices,
    )
    comparison.measure()
