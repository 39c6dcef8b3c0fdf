"""The loop of a run: ask what to do next, do it, know more.

    while time is left and the answer is not settled:
        action = next_action(state)
        state = what is known after doing it

What is measured is in records, and the state follows from them: a run that was stopped goes on from its records.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.errors import NoStableConfigurationError
from autotune.executors.executor import IN_SEARCH, DeviceUnavailable, TrialFailed
from autotune.printable import first_line
from autotune.record import Looks, Outcome, Pairing, Phase, Standing, TrialRecord
from autotune.space.configuration import Configuration
from autotune.space.search_space import ResolvedSpace
from autotune.stats import numerics
from autotune.stats.deciding import EndedBy, is_faster
from autotune.stats.intervals import (
    LogInterval,
    Spread,
    between_templates,
    instance_interval,
    pooled_spread,
)
from autotune.stats.stability import Check
from autotune.tuning import costs
from autotune.tuning.beside import Beside, Interrupted, SameInForce, TrialLimits
from autotune.tuning.feasibility import known_to_fail
from autotune.tuning.fresh_pairs import BASELINE_FAILURES, Confirmation, FreshPairs
from autotune.tuning.next_action import (
    FEWEST_PROCESSES,
    CompareLosses,
    Confirm,
    End,
    FreshPair,
    LookAgain,
    TryAnother,
    error_of,
    next_action,
    processes_wanted,
)
from autotune.tuning.options import Options
from autotune.tuning.parity import Parity, numerics_of
from autotune.tuning.progress import Began, Notice
from autotune.tuning.proposals import Proposals
from autotune.tuning.rules import Limits, checks_of
from autotune.tuning.run import Run
from autotune.tuning.running import Trial, ratio_interval
from autotune.tuning.sampler import Sampler
from autotune.tuning.slicing import is_busy
from autotune.tuning.state import Candidate, Leader, State
from autotune.tuning.trainings import Trainings
from autotune.tuning.waiting import Deadline, TimeIsUp

CLOSING_SECONDS = 1.0
"""For ending the processes and writing the recipe."""
OVERRUN_SHARE = 0.03
"""Of the budget: how far waits may run beyond its end."""
CHECK_SHARE = 0.1
"""Of the budget: what comparing losses may take, all together."""
RULES_ASKED_AFTER = 4
"""Processes of a leader after which its rules are asked: of fewer one odd process would decide."""
LATEST_CANDIDATES = 5
"""What another candidate takes is the median of so many."""
WAITS = 0.15
"""Share of its time that a training waits for input from which its pipeline's knobs are tried first."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a run has found when it ends.

    Args:
        state: What it knows.
        ended_by: Why it ended.
        confirmations: Of all leaders, by the numbers of their trials.
        checks: The stability rules of each leader.
        parity: What comparing losses has shown, by configuration.
    """

    state: State
    ended_by: EndedBy
    confirmations: Mapping[int, Confirmation]
    checks: Mapping[int, tuple[Check, ...]]
    parity: Mapping[Configuration, Check]


class Loop:
    """Runs it.

    Args:
        run: What all parts share.
        beside: The live baseline, and candidates beside it.
        deadline: When every wait has ended.
        space: Where to look.
        sampler: The Optuna study.
        options: How the run is to be done.
        limits: Memory limits of the machine.
        import_seconds: What a fresh template takes to import everything.
        earlier: Trials of earlier invocations, the baseline not among them.
    """

    def __init__(
        self,
        run: Run,
        beside: Beside,
        deadline: Deadline,
        *,
        space: ResolvedSpace,
        sampler: Sampler,
        options: Options,
        limits: Limits,
        import_seconds: float,
        earlier: Sequence[Trial] = (),
    ) -> None:
        warm = beside.baseline.warm
        assert warm is not None
        timeout = options.trial_timeout or costs.trial_timeout(
            options.budget, first_step=warm.first_step_seconds, ready=warm.ready_seconds
        )
        self._run, self._beside, self._space, self._sampler = run, beside, space, sampler
        self._options, self._import_seconds = options, import_seconds
        # The process knows better than NVML what it may take: a part of a card, or what the workload allows itself.
        self._limits = replace(limits, device_bytes=run.device_limit_bytes or limits.device_bytes)
        self._trial_limits = TrialLimits(
            timeout=timeout, measured=costs.measured_seconds(warm.first_step_seconds)
        )
        self._pairs = FreshPairs(run, deadline, timeout=timeout)
        self._proposals = Proposals(space, sampler)
        self._tried: dict[Configuration, Trial] = {space.baseline: beside.baseline}
        self._confirmations: dict[int, Confirmation] = {}
        self._checks: dict[int, tuple[Check, ...]] = {}
        self._parity: dict[Configuration, Check] = {}
        self._check_seconds = CHECK_SHARE * options.budget
        self._durations: list[float] = []
        self._looks_since = self._failures = 0
        self._time_is_up = False
        self._restore(earlier)

    def run(self) -> Found:
        """Until the answer is settled, or the time is over."""
        while True:
            state = self.state()
            action = End(EndedBy.BUDGET) if self._time_is_up else next_action(state)
            if isinstance(action, End):
                if action.by is EndedBy.BUDGET and state.open is not None:
                    self._last_look(self._confirmations[state.open.number])
                    state = self.state()
                return Found(
                    state=state,
                    ended_by=action.by,
                    confirmations=self._confirmations,
                    checks=self._checks,
                    parity=self._parity,
                )
            try:
                self._do(action)
            except Interrupted:
                pass  # the state says so
            except TimeIsUp:
                self._time_is_up = True
            except NoStableConfigurationError as error:
                if state.champion is None:
                    raise
                self._run.observe(Notice(text=f"{error.message}; the search ends here"))
                self._time_is_up = True

    def _do(self, action: TryAnother | LookAgain | CompareLosses | Confirm | FreshPair) -> None:
        match action:
            case TryAnother():
                self._try_another()
            case LookAgain(candidate=number):
                self._look_again(self._trial(number))
            case CompareLosses(candidate=number):
                self._compare_losses(self._trial(number))
            case Confirm(candidate=number, after=after):
                self._begin_confirmation(self._trial(number), after)
            case FreshPair(leader=number):
                self._fresh_pair(self._confirmations[number])

    # ---------------------------------------------------------------------------------------------- the state

    def state(self) -> State:
        """What is known now."""
        run, options = self._run, self._options
        spread = self._spread()
        candidates = tuple(self._candidate(each) for each in self._candidates())
        baseline = run.records[0]
        limit = options.trials is not None and len(candidates) >= options.trials
        return State(
            left=options.budget - CLOSING_SECONDS - (options.soak or 0.0) - run.clock(),
            budget=options.budget,
            keeps_budget=options.keeps_budget,
            candidates=candidates,
            leaders=tuple(self._leader(each) for each in self._confirmations.values()),
            spread=spread,
            candidate_seconds=self._candidate_seconds(),
            first_pair_seconds=costs.pair_seconds([baseline, baseline], IN_SEARCH),
            more_candidates=not (self._proposals.exhausted or self._proposals.nothing_fits or limit),
            exhausted=self._proposals.exhausted,
            check_seconds=self._check_seconds,
            rounds_in_pair=costs.rounds([baseline, baseline], IN_SEARCH),
            looks_since=self._looks_since,
            min_gain=options.min_gain,
            interrupted=run.interrupted(),
        )

    def _candidates(self) -> list[Trial]:
        """What was tried, in order; an interrupted trial was not, and one that runs is not yet."""
        records = self._run.records
        return [
            each
            for each in dict.fromkeys(self._tried.values())
            if each.number in records
            and each.number
            and records[each.number].outcome is not Outcome.INTERRUPTED
        ]

    def _candidate(self, trial: Trial) -> Candidate:
        record = self._run.records[trial.number]
        ratios = trial.log_ratios if record.outcome.measured or record.outcome is Outcome.UNSTABLE else []
        records = [self._run.records[0], record, *self._champion_records()]
        return Candidate(
            number=trial.number,
            configuration=trial.configuration,
            ratio=statistics.fmean(ratios) if ratios else -math.inf,
            pairs=len(ratios),
            processes=max(1, trial.instances),
            pruned=record.outcome is Outcome.PRUNED,
            unstable=record.outcome is Outcome.UNSTABLE,
            look_seconds=costs.start_seconds(record, IN_SEARCH) + self._trial_limits.measured,
            pair_seconds=costs.pair_seconds(records, IN_SEARCH),
            unchecked=self._is_unchecked(trial.configuration),
        )

    def _is_unchecked(self, configuration: Configuration) -> bool:
        """Whether it computes otherwise than the baseline, and its class of numerics was not looked at."""
        own = numerics_of(configuration)
        known = {numerics_of(each) for each in self._parity}
        return own != numerics_of(self._run.baseline) and own not in known

    def _champion_records(self) -> list[TrialRecord]:
        champion = self._champion()
        return [] if champion is None else [champion.in_search]

    def _champion(self) -> Confirmation | None:
        confirmed = [
            each for each in self._confirmations.values() if each.looks.standing is Standing.CONFIRMED
        ]
        return confirmed[-1] if confirmed else None

    def _leader(self, confirmation: Confirmation) -> Leader:
        number = confirmation.trial.number
        records = [self._run.records[0], confirmation.in_search]
        if confirmation.champion is not None:
            records += self._champion_records()
        expected = costs.pair_seconds(records, confirmation.timing)
        if confirmation.seconds:
            expected = statistics.fmean(confirmation.seconds)
        return Leader(
            number=number,
            candidate=confirmation.looks.candidate,
            looks=confirmation.looks,
            processes=len(confirmation.measured),
            ratio=self.claim(confirmation),
            pair_seconds=expected,
        )

    def claim(self, confirmation: Confirmation) -> LogInterval | None:
        """Logarithm of a leader's speed-up, at the level of its looks; None before the second process."""
        return self._interval(confirmation, confirmation.instances, self._run.baseline)

    def _interval(
        self, confirmation: Confirmation, instances: Sequence[Sequence[float]], other: Configuration
    ) -> LogInterval | None:
        if len(instances) < 2:
            return None
        confidence = confirmation.looks.confidence
        interval = instance_interval(instances, confidence=confidence)
        if self._run.trials.apart(confirmation.trial.configuration, other):
            return between_templates(interval, confidence=confidence)
        return interval

    def _candidate_seconds(self) -> float:
        """What another candidate takes."""
        if self._durations:
            return statistics.median(self._durations[-LATEST_CANDIDATES:])
        warm = self._beside.baseline.warm
        assert warm is not None
        return warm.ready_seconds + self._trial_limits.measured

    def _looks_planned(self) -> int:
        return sum(len(each.trial.looks) for each in self._confirmations.values())

    def _spread(self) -> Spread:
        """How much pairs vary, pooled over all trials."""
        return pooled_spread([each.log_ratios for each in self._tried.values() if each.number])

    def _trial(self, number: int) -> Trial:
        return next(each for each in self._tried.values() if each.number == number)

    # ------------------------------------------------------------------------------------------- the search

    def _try_another(self) -> None:
        best = self._best()
        proposed = self._proposals.next(
            self._tried,
            best.asked,
            waits=self._waits(best),
            step_seconds=self._step_seconds(),
            passes_over=self._passes_over,
        )
        if proposed is None:
            return
        asked, configuration = proposed
        self._looks_since = 0
        trial = self._run.new_trial(Phase.SEARCH, configuration)
        self._tried[configuration] = trial
        try:
            if known_to_fail(configuration, self._out_of_memory()):
                reason = "a trial that needs no more memory than this one ran out of it"
                self._run.keep(trial.record(Outcome.INFERRED_OOM, reason=reason))
            else:
                self._measure(trial, self._best_interval())
        except SameInForce as same:
            self._run.observe(
                Notice(
                    text=f"trial {trial.number} is trial {self._tried[same.configuration].number} in force"
                )
            )
        finally:
            record = self._run.records.get(trial.number)
            if record is not None:
                self._sampler.tell(asked, record)
            if record is None or record.outcome is Outcome.INTERRUPTED:
                del self._tried[configuration]
        if configuration in self._tried:
            self._tried.setdefault(trial.configuration, trial)

    def _step_seconds(self) -> float:
        """What a step of the baseline takes."""
        slices = self._run.records[0].slices
        return statistics.median(each.step_seconds.p50 for each in slices) if slices else 0.0

    def _waits(self, trial: Trial) -> bool:
        """Whether a training waits for its input, as far as is known."""
        record = self._run.records[trial.number]
        if record.input_wait_fraction is not None:
            return record.input_wait_fraction > WAITS
        return not is_busy(record.slices)

    def _look_again(self, trial: Trial) -> None:
        self._looks_since += 1
        self._run.announce(trial)
        self._measure(trial, None)

    def _measure(self, trial: Trial, leader: LogInterval | None) -> None:
        began = self._run.clock()
        try:
            self._beside.measure(
                trial,
                self._trial_limits,
                leader=leader,
                others=self._spread(),
                known=lambda configuration: configuration in self._tried,
            )
        finally:
            self._durations.append(self._run.clock() - began)

    def _best(self) -> Trial:
        """The fastest so far by its estimate less its error; the baseline where nothing is faster."""
        spread = self._spread()
        measured = [
            (each.ratio - each.error(spread), self._trial(each.number))
            for each in map(self._candidate, self._candidates())
            if each.measured and not each.unstable
        ]
        lead, trial = max(measured, key=lambda each: each[0], default=(0.0, self._beside.baseline))
        return trial if lead > 0 else self._beside.baseline

    def _best_interval(self) -> LogInterval | None:
        """The fastest candidate's, against which another one is told apart; None before there are two."""
        best = self._best()
        if not best.number or len(best.log_ratios) < 2:
            return None
        error = 2 * self._candidate(best).error(self._spread())
        mean = statistics.fmean(best.log_ratios)
        return LogInterval(value=mean, low=mean - error, high=mean + error, count=len(best.log_ratios))

    def _out_of_memory(self) -> list[Configuration]:
        return [
            Configuration(each.configuration)
            for each in self._run.records.values()
            if each.outcome is Outcome.OOM
            and each.pairing is not Pairing.ALTERNATING  # else: not tried alone
        ]

    def _passes_over(self, configuration: Configuration) -> bool:
        """Whether the time does not hold the import that a configuration needs."""
        if not self._beside.imports_first(configuration):
            return False
        state = self.state()
        return state.left < self._import_seconds + 2 * state.candidate_seconds + 4 * state.first_pair_seconds

    # --------------------------------------------------------------------------------------------- the leader

    def _compare_losses(self, trial: Trial) -> None:
        """Whether a leader still learns as float32 without XLA does; one that does not is unstable, and its like."""
        run, began = self._run, self._run.clock()
        self._beside.end_baseline()
        run.observe(
            Began(text=f"comparing losses with float32 without XLA: {run.changes(trial.configuration)}")
        )
        ends = min(began + self._check_seconds, self._options.budget - CLOSING_SECONDS)
        with Trainings(run, ends=ends) as trainings:
            check = Parity(trainings).check(trial.configuration)
        self._check_seconds = max(0.0, self._check_seconds - (run.clock() - began))
        self._parity[trial.configuration] = check
        if check.passed:
            return
        for each in self._candidates():
            if numerics_of(each.configuration) == numerics_of(trial.configuration):
                record = run.records[each.number]
                if record.outcome.measured:
                    refused = {"outcome": Outcome.UNSTABLE, "reason": f"{check.name}: {check.detail}"}
                    run.keep(record.model_copy(update=refused), announce=each is trial)
        for confirmation in self._confirmations.values():
            alike = numerics_of(confirmation.trial.configuration) == numerics_of(trial.configuration)
            if alike and confirmation.looks.standing is Standing.CONFIRMED:
                self._checks[confirmation.trial.number] = self._rules(confirmation)
                self._conclude(confirmation, Standing.UNSTABLE)

    def _begin_confirmation(self, candidate: Trial, after: tuple[int, ...]) -> None:
        """Plan a leader's looks, and pay for them; nothing is measured yet."""
        run = self._run
        self._beside.end_baseline()
        run.observe(Began(text=f"confirming in fresh processes: {run.changes(candidate.configuration)}"))
        k = self._looks_planned() + 1
        known = next(
            (each for each in self._confirmations.values() if each.looks.candidate == candidate.number), None
        )
        if known is not None:
            update = {"leader": k, "error": error_of(k), "after": after, "standing": Standing.OPEN}
            known.trial.looks = (*known.trial.looks, known.looks.model_copy(update=update))
            return
        in_search = run.records[candidate.number]
        champion = self._champion()
        reference = run.new_trial(Phase.CONFIRM, run.baseline)
        trial = run.new_trial(Phase.CONFIRM, candidate.configuration)
        beside = None if champion is None else run.new_trial(Phase.CONFIRM, champion.trial.configuration)
        trial.looks = (
            Looks(
                leader=k,
                candidate=candidate.number,
                error=error_of(k),
                after=after,
                reference=reference.number,
                champion=None if beside is None else beside.number,
            ),
        )
        records = [run.records[0], in_search, *self._champion_records()]
        state = self.state()
        wanted = processes_wanted(statistics.fmean(candidate.log_ratios), state.pair_deviation())
        timing = costs.confirmation_timing(records, seconds=state.left, pairs=min(wanted, after[-1]))
        confirmation = Confirmation(
            reference=reference, trial=trial, champion=beside, in_search=in_search, timing=timing
        )
        self._confirmations[trial.number] = confirmation

    def _fresh_pair(self, confirmation: Confirmation) -> None:
        run = self._run
        records = [run.records[0], confirmation.in_search]
        if confirmation.champion is not None:
            records += self._champion_records()
        run.announce(confirmation.trial)
        try:
            self._pairs.measure(
                confirmation,
                costs.rounds(records, confirmation.timing),
                most_seconds=self._slices_seconds(confirmation, records),
            )
            self._failures = 0
        except TrialFailed as failure:
            self._failures += 1
            self._tell_of_failure(failure)
        finally:
            self._keep(confirmation)
            self._look(confirmation)

    def _slices_seconds(self, confirmation: Confirmation, records: list[TrialRecord]) -> float:
        """What the slices of the next fresh pair may take, so that the planned ones fit."""
        planned = max(1, confirmation.looks.after[-1] - len(confirmation.measured))
        starts = sum(costs.start_seconds(each, confirmation.timing) for each in records)
        each = self.state().left / planned - starts
        return min(costs.MOST_SLICES_SECONDS, max(costs.LEAST_SLICES_SECONDS, each))

    def _tell_of_failure(self, failure: TrialFailed) -> None:
        """Of the baseline's, or of a process that had not the baseline's device: the instance is lost."""
        if isinstance(failure, DeviceUnavailable):
            text = f"a process of the confirmation had no device: {failure.reason}. {failure.hint}"
        else:
            why = first_line(failure.reason) or str(failure.outcome)
            text = f"the baseline failed in a fresh process of the confirmation ({why}), which counts for nothing"
        self._run.observe(Notice(text=text))

    def _keep(self, confirmation: Confirmation) -> None:
        """Write down what was measured: a run that is stopped goes on from there."""
        for each in (confirmation.reference, confirmation.champion):
            if each is not None and (each.slices or each.pairs):
                self._run.keep(each.record(Outcome.OK), announce=False)
        self._run.keep(self._record(confirmation), announce=False)

    def _record(self, confirmation: Confirmation) -> TrialRecord:
        trial, failure = confirmation.trial, confirmation.failure
        record = trial.record(Outcome.OK) if failure is None else trial.failed(failure)
        claim = self.claim(confirmation)
        # The claim's interval is the one over processes, not the one over all slices.
        speedup = None if claim is None else ratio_interval(claim)
        return record.model_copy(update={"speedup": speedup, "checks": self._checks.get(trial.number, ())})

    def _look(self, confirmation: Confirmation) -> None:
        """Judge a leader where a look is due; rules are asked of it as well."""
        due = len(confirmation.measured) in confirmation.looks.after
        if due or confirmation.failure is not None or self._failures >= BASELINE_FAILURES:
            self._conclude(confirmation, self._judged(confirmation))
            self._failures = 0

    def _last_look(self, confirmation: Confirmation) -> None:
        """The time is over: the last of the looks is taken now."""
        standing = self._judged(confirmation)
        if standing in (Standing.OPEN, Standing.NOT_SHOWN):
            standing = Standing.OUT_OF_TIME
        self._conclude(confirmation, standing)

    def _conclude(self, confirmation: Confirmation, standing: Standing) -> None:
        """Keep what a look has shown."""
        trial = confirmation.trial
        trial.looks = (*trial.looks[:-1], trial.looks[-1].model_copy(update={"standing": standing}))
        record = self._record(confirmation)
        if standing is Standing.UNSTABLE and confirmation.failure is None:
            failed = "; ".join(f"{c.name}: {c.detail}" for c in self._checks[trial.number] if not c.passed)
            record = record.model_copy(update={"outcome": Outcome.UNSTABLE, "reason": failed})
        self._run.keep(record)

    def _judged(self, confirmation: Confirmation) -> Standing:
        """Where a leader stands now."""
        number = confirmation.trial.number
        if confirmation.failure is not None:
            return Standing.UNSTABLE
        claim = self.claim(confirmation)
        if claim is None or claim.count < FEWEST_PROCESSES:
            return Standing.NOT_SHOWN
        self._checks[number] = self._rules(confirmation)
        broken = not all(each.passed for each in self._checks[number])
        if broken and (len(confirmation.measured) >= RULES_ASKED_AFTER or self._is_last(confirmation)):
            return Standing.UNSTABLE
        if is_faster(claim, min_gain=self._options.min_gain) and self._beats_champion(confirmation):
            return Standing.CONFIRMED
        gain = math.log1p(self._options.min_gain)
        hopeless = claim.high < gain or (claim.value < gain and claim.high < self.state().bound)
        return Standing.NOT_SHOWN if hopeless or self._is_last(confirmation) else Standing.OPEN

    def _is_last(self, confirmation: Confirmation) -> bool:
        return (
            len(confirmation.measured) >= confirmation.looks.after[-1] or self._failures >= BASELINE_FAILURES
        )

    def _beats_champion(self, confirmation: Confirmation) -> bool:
        """Whether it is surely faster than the leader confirmed before, in rounds that both were in."""
        champion = self._champion()
        if champion is None:
            return True
        over = self._interval(confirmation, confirmation.over_champion, champion.trial.configuration)
        return over is not None and over.low > 0

    def _rules(self, confirmation: Confirmation) -> tuple[Check, ...]:
        """The stability rules, what the losses showed among them."""
        record, baseline = confirmation.trial.record(Outcome.OK), confirmation.reference.record(Outcome.OK)
        own = numerics_of(confirmation.trial.configuration)
        parity = [check for each, check in self._parity.items() if numerics_of(each) == own]
        return (*checks_of(record, baseline, self._limits), *parity[-1:])

    # ------------------------------------------------------------------------------------------- going on

    def _restore(self, earlier: Sequence[Trial]) -> None:
        """Take over what earlier invocations have measured."""
        by_number = {each.number: each for each in earlier}
        for trial in earlier:
            if trial.phase is Phase.SEARCH:
                self._tried[trial.asked] = trial
                self._tried.setdefault(trial.configuration, trial)
        for trial in earlier:
            if trial.looks and trial.looks[-1].reference in by_number:
                looks = trial.looks[-1]
                confirmation = Confirmation(
                    reference=by_number[looks.reference],
                    trial=trial,
                    champion=by_number.get(looks.champion or 0),
                    in_search=self._run.records[looks.candidate],
                )
                self._confirmations[trial.number] = confirmation
                self._checks[trial.number] = checks = self._run.records[trial.number].checks
                for each in checks:
                    if each.name == numerics.NAME:
                        self._parity[trial.configuration] = each
        self._sampler.catch_up(self._run.records.values())
