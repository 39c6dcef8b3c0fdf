"""How candidates and leaders of a run stand, derived from its trials and records. Nothing is stored here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autotune.data.figures import Check, LogInterval
from autotune.data.models import KnobValue
from autotune.data.record import ContinuedTraining, Outcome, Pairing, Phase, Standing, TrialRecord
from autotune.data.run_directory import EarlierLeader
from autotune.space.configuration import Configuration
from autotune.stats.intervals import ProcessPrior, Spread, claim_interval, pooled_spread, process_prior
from autotune.stats.same_loss import (
    NOT_COMPARABLE,
    NOT_REACHED,
    USUAL_OVER_CRITICAL,
    ExamplesNeeded,
    examples_needed,
    log_examples,
    over_critical_of,
    same_loss_speedup,
)
from autotune.stats.stability import PARITY
from autotune.tuning import costs
from autotune.tuning.beliefs import Observations
from autotune.tuning.confirmation import LeaderTrials, unmeasured_changes
from autotune.tuning.learning import branch_seconds, least_branch_seconds, numerics_of
from autotune.tuning.run import Run
from autotune.tuning.state import Candidate, Leader
from autotune.tuning.trial import Trial

FEW_DEGREES = 8  # of the slices of other trials, that tell how noisy the machine is


@dataclass(frozen=True, kw_only=True)
class LearningResult:
    """Learning of a leader with another batch size, beside the baseline's."""

    branch: ContinuedTraining
    needed: ExamplesNeeded
    speedup: LogInterval  # the logarithm of the same-loss speed-up, at the level that the leader's error leaves


def parity_checks(records: Iterable[TrialRecord]) -> dict[tuple[object, ...], Check]:
    """Return the checks of losses by class of numerics; a conclusive check is preferred to an inconclusive one."""
    found = [
        (numerics_of(Configuration(record.configuration)), check)
        for record in records
        for check in record.checks
        if check.name == PARITY
    ]
    return dict(sorted(found, key=lambda known: (known[1].conclusive, not known[1].passed)))


class Standings:
    """The candidates and leaders of a run, by its trials and records."""

    def __init__(
        self,
        run: Run,
        *,
        measured_seconds: float,
        earlier: Mapping[Configuration, EarlierLeader] = MappingProxyType({}),
    ) -> None:
        self._run, self._baseline = run, run.trials[0]
        self._measured_seconds = measured_seconds
        self._earlier = earlier  # leaders of other runs

    # ------------------------------------------------------------------------------------------- the search

    def searched(self) -> list[Trial]:
        """Return the search's trials that are no repeats, in order, those that run now included."""
        records = self._run.records
        return [
            known
            for known in self._requested_trials()
            if known.number not in records or not records[known.number].is_repeat
        ]

    def _requested_trials(self) -> list[Trial]:
        """Return the trials that were requested, repeats included; the last one of each configuration."""
        records, latest = self._run.records, dict[Configuration, Trial]()
        for number, trial in sorted(self._run.trials.items()):
            interrupted = number in records and records[number].outcome is Outcome.INTERRUPTED  # it was not tried
            if trial.phase is Phase.SEARCH and not interrupted:
                latest[trial.requested] = trial
        return list(latest.values())

    def ended(self) -> list[Trial]:
        """Return the trials of the search that have ended."""
        return [trial for trial in self.searched() if trial.number in self._run.records]

    def tried(self) -> dict[Configuration, Trial]:
        """Return the trials by configuration, as asked for and as in force; the baseline first."""
        searched = self._requested_trials()
        tried = {self._baseline.configuration: self._baseline} | {trial.requested: trial for trial in searched}
        for trial in searched:
            tried.setdefault(trial.configuration, trial)
        return tried

    def idle_values(self) -> set[tuple[str, KnobValue]]:
        """Return the values of knobs that were asked for, and did nothing: the baseline's were in force."""
        usual, idle, acting = self._baseline.configuration, set[tuple[str, KnobValue]](), set[tuple[str, KnobValue]]()
        for trial in [known for known in self._requested_trials() if known.number in self._run.records]:
            for name, value in trial.configuration.items():
                did_nothing = value == usual[name] and trial.requested[name] not in (
                    value,
                    self._baseline.requested[name],
                )
                idle |= {(name, trial.requested[name])} if did_nothing else set()
                acting |= {(name, value)}
        return idle - acting

    def spread(self) -> Spread:
        """Return how much pairs vary, pooled over all trials."""
        return pooled_spread([trial.log_ratios for trial in self.searched()])

    def candidates(self) -> list[Candidate]:
        """Return the trials of the search that have ended, as they are weighed."""
        records = self._run.records
        baseline, plain = records[0], numerics_of(self._run.baseline)
        compared, best_leaders = parity_checks(records.values()), self.best_leaders()
        found = []
        for trial in self.ended():
            record, batch_ratio = records[trial.number], self.batch_ratio(trial.configuration)
            best_leader = best_leaders.get(batch_ratio)
            best_records = [] if best_leader is None else [best_leader.search_record]
            ratios = trial.log_ratios if record.outcome.measured or record.outcome is Outcome.UNSTABLE else []
            own, earlier = numerics_of(trial.configuration), self._earlier.get(trial.requested)
            starts = costs.start_seconds(record)
            if record.pairing is Pairing.BRACKETED:
                starts += costs.start_seconds(baseline)
            learns_otherwise = self.can_branch and batch_ratio != 1 and not self.branch_of(trial.configuration)
            least_learning = 0.0 if batch_ratio == 1 or self.can_branch else math.inf
            if learns_otherwise:
                least_learning = least_branch_seconds(baseline, record)
            found.append(
                Candidate(
                    number=trial.number,
                    configuration=trial.configuration,
                    ratio=statistics.fmean(ratios) if ratios else -math.inf,
                    pairs=len(ratios),
                    processes=max(1, trial.instances),
                    pruned=record.outcome is Outcome.PRUNED,
                    unstable=record.outcome is Outcome.UNSTABLE or (own in compared and not compared[own].passed),
                    look_seconds=starts + self._measured_seconds,
                    pair_seconds=costs.pair_seconds([baseline, record, *best_records]),
                    unchecked=own != plain and own not in compared,
                    uncheckable=own != plain and own in compared and not compared[own].conclusive,
                    was_confirmed=earlier is not None and earlier.confirmed,
                    led_over=0 if earlier is None else earlier.led_over,
                    batch_ratio=batch_ratio,
                    learning_seconds=branch_seconds(baseline, record) if learns_otherwise else 0.0,
                    least_learning_seconds=least_learning,
                )
            )
        return found

    def batch_ratio(self, configuration: Configuration) -> float:
        """Return examples per update over the baseline's; 1 where samples per second are the aim, whatever learns."""
        if self._run.options.objective != "time_to_loss":
            return 1.0
        return configuration.update_size / self._run.baseline.update_size

    def observations(self) -> Observations:
        """Return the observations that proposals use."""
        candidates, ended = self.candidates(), {trial.number: trial for trial in self.ended()}
        ratios = {
            ended[candidate.number].requested: candidate.ratio
            for candidate in candidates
            if candidate.measured and not candidate.unstable
        }
        unstable = {candidate.number for candidate in candidates if candidate.unstable}
        return Observations(
            ratios={self._baseline.requested: 0.0, **ratios},
            failed=[
                trial.requested
                for number, trial in ended.items()
                if number in unstable or not self._run.records[number].outcome.measured
            ],
            running=[trial.requested for trial in self.searched() if trial.number not in ended],
            over_critical=self.over_critical() if self._run.options.objective == "time_to_loss" else 0.0,
        )

    def best(self, *, of_same_training: bool = False) -> Trial:
        """Return the trial that should reach the same loss soonest, errors deducted; else the baseline."""
        candidates = [known for known in self.candidates() if known.is_same_training or not of_same_training]
        best = self._best(candidates)
        return self._baseline if best is None else self._run.trials[best.number]

    def _best(self, candidates: Iterable[Candidate]) -> Candidate | None:
        spread, over_critical = self.spread(), self.over_critical()

        def lead(known: Candidate) -> float:
            return known.ratio - log_examples(max(1.0, known.batch_ratio), over_critical) - known.error(spread)

        able = [known for known in candidates if known.measured and not known.unstable and lead(known) > 0]
        return max(able, key=lambda known: (lead(known), known.number), default=None)

    def best_interval(self, configuration: Configuration) -> LogInterval | None:
        """Return the ratio from which a configuration is distinguished: that of the best of its kind.

        None before the best has two pairs. It is taken to the configuration's batch size: as many more examples as
        that needs, so much faster it must be.
        """
        ratio = self.batch_ratio(configuration)
        best = self._best(known for known in self.candidates() if known.is_same_training is (ratio == 1))
        if best is None or best.pairs < 2:
            return None
        needs = [log_examples(max(1.0, of), self.over_critical()) for of in (ratio, best.batch_ratio)]
        value, error = best.ratio + needs[0] - needs[1], 2 * best.error(self.spread())
        return LogInterval(value=value, low=value - error, high=value + error, count=best.pairs)

    # ------------------------------------------------------------------------------------------- learning

    @property
    def can_branch(self) -> bool:
        """True if other trainings can begin with the state of the baseline's."""
        saved = any(log.state_steps is not None for log in self._run.records[0].processes)
        return self._run.state_file is not None and saved

    def branch_of(self, configuration: Configuration) -> ContinuedTraining | None:
        """Return how a configuration was seen to learn, by itself or by one of the same batch size and numerics.

        A comparison that counts steps is not valid at any other batch size.
        """
        found = [trial.branch for trial in self._learning_alike(configuration)]
        others = [trial.branch for trial in self._run.trials.values()]
        found += [branch for branch in others if branch and branch.not_measured.startswith(NOT_COMPARABLE)]
        return next((branch for branch in found if branch is not None), None)

    def keep_branch(self, trial: Trial, branch: ContinuedTraining) -> None:
        """Keep how a leader was seen to learn, in place of what was kept of those of its batch size and numerics."""
        for other in self._learning_alike(trial.configuration):
            other.branch = None
        trial.branch = branch

    def forget_unmeasured_learning(self) -> float:
        """Forget the comparisons of learning that were not measured; return the seconds that they needed, at most."""
        needs = 0.0
        for trial in self._run.trials.values():
            if trial.branch is not None and trial.branch.not_measured:
                needs, trial.branch = max(needs, trial.branch.needs_seconds or 0.0), None
        return needs

    def _learning_alike(self, configuration: Configuration) -> list[Trial]:
        """Return the trials of a configuration's batch size and numerics."""
        return [
            trial
            for trial in self._run.trials.values()
            if trial.configuration.update_size == configuration.update_size
            and numerics_of(trial.configuration) == numerics_of(configuration)
        ]

    def over_critical(self) -> float:
        """Return the baseline's batch size over the critical one: by the latest comparison, else the usual one."""
        found = USUAL_OVER_CRITICAL
        for trial in self._run.trials.values():
            ratio = self.batch_ratio(trial.configuration)
            if trial.branch is not None and not trial.branch.not_measured and ratio > 1:
                needed = examples_needed(trial.branch)
                if isinstance(needed, ExamplesNeeded):
                    found = over_critical_of(needed.log_ratio.value, ratio)
                elif needed == NOT_REACHED:
                    found = math.inf
        return found

    def learning_result(self, leader: LeaderTrials) -> LearningResult | str | None:
        """Return how a leader with another batch size learns, or why that is not known; None before it is looked at."""
        configuration = leader.trial.configuration
        branch = None if self.batch_ratio(configuration) == 1 else self.branch_of(configuration)
        if branch is None or branch.not_measured:
            return None if branch is None else branch.not_measured
        if (claim := self.claim(leader)) is None:
            return None
        needed = examples_needed(branch)
        if not isinstance(needed, ExamplesNeeded):
            return needed
        degrees = self.process_prior(without=leader.looks.candidate).degrees + len(leader.measured) - 1
        levels = {"confidence": leader.looks.confidence, "level": 1 - leader.looks.error}
        speedup = same_loss_speedup(claim, needed, degrees=degrees, **levels)
        return LearningResult(branch=branch, needed=needed, speedup=speedup)

    # ------------------------------------------------------------------------------------------- the leaders

    def leaders(self) -> list[LeaderTrials]:
        """Return all leaders in the order in which they were begun, the confirmed ones by when they were confirmed."""
        # The last one is the best leader, whichever was begun first: it has beaten the others.

        def order(leader: LeaderTrials) -> tuple[bool, float, int]:
            is_confirmed = leader.looks.standing is Standing.CONFIRMED
            record = self._run.records.get(leader.trial.number)
            written = 0.0 if record is None or not is_confirmed else record.ended_at_seconds or 0.0
            return is_confirmed, written, leader.trial.number

        known = [self.leader(number) for number, trial in list(self._run.trials.items()) if trial.looks]
        return sorted(known, key=order)

    def leader(self, number: int) -> LeaderTrials:
        """Return the trials of a leader's confirmation, by the number of that of its processes."""
        run, trial = self._run, self._run.trials[number]
        looks = trial.looks[-1]
        # A side that failed before its first slice has left no record.
        reference = run.trials.setdefault(looks.reference, Trial(looks.reference, Phase.CONFIRM, run.baseline))
        return LeaderTrials(
            reference=reference,
            trial=trial,
            best_leader=None if looks.champion is None else run.trials.get(looks.champion),
            search_record=run.records[looks.candidate],
        )

    def weigh_leader(self, leader: LeaderTrials) -> Leader:
        """Return a leader as it is weighed."""
        records = self.records_with(leader)
        expected, least = costs.pair_seconds(records), costs.pair_seconds(records, least=True)
        if taken := leader.next_seconds(self._run):
            least, expected = least * taken / expected, taken
        number, configuration = leader.trial.number, leader.trial.configuration
        ratio = self.batch_ratio(configuration)
        branch, result = self.branch_of(configuration), self.learning_result(leader)
        starts = sum(map(costs.start_seconds, (self._run.records[0], leader.search_record)))
        return Leader(
            number=number,
            candidate=leader.looks.candidate,
            looks=leader.looks,
            processes=len(leader.measured),
            ratio=self.claim(leader),
            pair_seconds=expected,
            least_pair_seconds=least,
            batch_ratio=ratio,
            unmeasured_changes=unmeasured_changes(
                number, leader.requested, self._run.baseline, self._run.records.values()
            ),
            ablation_seconds=starts + self._measured_seconds,
            learning_untested=ratio != 1 and self.can_branch and branch is None,
            learning_seconds_needed=0.0 if branch is None or ratio == 1 else branch.needs_seconds or 0.0,
            same_loss=result.speedup if isinstance(result, LearningResult) else None,
        )

    def records_with(self, leader: LeaderTrials) -> list[TrialRecord]:
        """Return the search's records of all that take turns in a confirmation."""
        best_leader = self.best_leader_beside(leader.trial.configuration) if leader.best_leader is not None else None
        return [
            self._run.records[0],
            leader.search_record,
            *([] if best_leader is None else [best_leader.search_record]),
        ]

    def has_known_numerics(self, configuration: Configuration) -> bool:
        """Return whether a configuration computes as the baseline does, or was compared with float32."""
        own = numerics_of(configuration)
        check = parity_checks(self._run.records.values()).get(own)
        return own == numerics_of(self._run.baseline) or (check is not None and check.conclusive)

    def best_leaders(self) -> dict[float, LeaderTrials]:
        """Return the leaders that were confirmed, the last one of each batch ratio: it has beaten the others of it."""
        return {
            self.batch_ratio(leader.trial.configuration): leader
            for leader in self.leaders()
            if leader.looks.standing is Standing.CONFIRMED
        }

    def best_leader_beside(self, configuration: Configuration) -> LeaderTrials | None:
        """Return the confirmed leader of the same batch size, which a configuration must beat."""
        return self.best_leaders().get(self.batch_ratio(configuration))

    def claim(self, leader: LeaderTrials) -> LogInterval | None:
        """Return the logarithm of a leader's speed-up, at the level of its looks; None before the second process."""
        return self._interval(leader, leader.instances, self._run.baseline, leader.baseline_compilations)

    def over_best_leader(self, leader: LeaderTrials, best_leader: LeaderTrials) -> LogInterval | None:
        """Return the same over the best leader, from rounds that both were in."""
        return self._interval(leader, leader.over_best_leader, best_leader.trial.configuration)

    def _interval(
        self,
        leader: LeaderTrials,
        instances: Sequence[Sequence[float]],
        other: Configuration,
        compilations: int | None = None,
    ) -> LogInterval | None:
        if len(instances) < 2:
            return None
        return claim_interval(
            instances,
            prior=self.process_prior(without=leader.looks.candidate),
            confidence=leader.looks.confidence,
            different_template=self._run.executor.needs_different_template(leader.trial.configuration, other),
            compilations=compilations,
        )

    def process_prior(self, *, without: int = 0) -> ProcessPrior:
        """Return the prior for the variance between process pairs, from all trials except those of `without`.

        That candidate's search slices count only if the others are too few: they show how noisy the machine is,
        and nothing of its processes.
        """
        baseline, leaders = self._run.records[0], self.leaders()
        trials = [
            *([*trial.log_ratios_by_instance().values()] for trial in self.searched() if trial.number != without),
            *(leader.instances for leader in leaders if leader.looks.candidate != without),
        ]
        if without and pooled_spread([values for processes in trials for values in processes]).degrees < FEW_DEGREES:
            trials += [[values] for values in self._run.trials[without].log_ratios_by_instance().values()]
        own = [len(values) for leader in leaders if leader.looks.candidate == without for values in leader.instances]
        rounds = round(statistics.fmean(own)) if own else costs.rounds([baseline, baseline])
        return process_prior(trials, rounds=max(1, rounds))
