"""The knowledge of a run, derived from its trials and records. Nothing is stored here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from autotune.data.figures import Check, LogInterval
from autotune.data.record import Outcome, Pairing, Phase, Standing, TrialRecord
from autotune.space.configuration import Configuration
from autotune.stats import numerics
from autotune.stats.intervals import ProcessPrior, Spread, pooled_spread, process_prior
from autotune.tuning import costs
from autotune.tuning.beliefs import Evidence
from autotune.tuning.confirmation import LeaderTrials, claim_of
from autotune.tuning.learning import numerics_of
from autotune.tuning.run import Run
from autotune.tuning.state import Candidate, Leader
from autotune.tuning.trial import Trial

FEW_DEGREES = 8  # of the slices of other trials, that tell how noisy the machine is


def parity_checks(records: Iterable[TrialRecord]) -> dict[tuple[object, ...], Check]:
    """Return what comparing losses has shown, by class of numerics."""
    return {
        numerics_of(Configuration(record.configuration)): check
        for record in records
        for check in record.checks
        if check.name == numerics.NAME
    }


class Knowledge:
    """The candidates and leaders of a run, by its trials and records."""

    def __init__(
        self,
        run: Run,
        baseline: Trial,
        *,
        measured_seconds: float,
        led_over: Mapping[Configuration, int] = MappingProxyType({}),
    ) -> None:
        self._run, self._baseline = run, baseline
        self._measured_seconds = measured_seconds
        self._led_over = led_over  # by leaders of earlier runs: see `Candidate`

    # ------------------------------------------------------------------------------------------- the search

    def searched(self) -> list[Trial]:
        """Return what was tried, in order, and what runs now; of a configuration that was run again the last trial."""
        records, latest = self._run.records, dict[Configuration, Trial]()
        for number, trial in sorted(self._run.trials.items()):
            interrupted = number in records and records[number].outcome is Outcome.INTERRUPTED  # it was not tried
            if trial.phase is Phase.SEARCH and not interrupted:
                latest[trial.asked] = trial
        return list(latest.values())

    def ended(self) -> list[Trial]:
        """Return the trials of the search that have ended."""
        return [trial for trial in self.searched() if trial.number in self._run.records]

    def tried(self) -> dict[Configuration, Trial]:
        """Return what was tried, by what was asked for and by what was in force; the baseline first."""
        searched = self.searched()
        tried = {self._baseline.configuration: self._baseline} | {trial.asked: trial for trial in searched}
        for trial in searched:
            tried.setdefault(trial.configuration, trial)
        return tried

    def spread(self) -> Spread:
        """Return how much pairs vary, pooled over all trials."""
        return pooled_spread([trial.log_ratios for trial in self.searched()])

    def candidates(self) -> list[Candidate]:
        """Return the trials of the search that have ended, as they are weighed."""
        run, compared, champion = self._run, parity_checks(self._run.records.values()), self.champion()
        beside = [] if champion is None else [champion.in_search]
        plain = numerics_of(run.baseline)
        return [self._candidate(trial, compared, beside, plain) for trial in self.ended()]

    def _candidate(
        self,
        trial: Trial,
        compared: dict[tuple[object, ...], Check],
        beside: Sequence[TrialRecord],
        plain: tuple[object, ...],
    ) -> Candidate:
        baseline, record = self._run.records[0], self._run.records[trial.number]
        ratios = trial.log_ratios if record.outcome.measured or record.outcome is Outcome.UNSTABLE else []
        own = numerics_of(trial.configuration)
        starts = costs.start_seconds(record)
        if record.pairing is Pairing.BRACKETED:
            starts += costs.start_seconds(baseline)
        return Candidate(
            number=trial.number,
            configuration=trial.configuration,
            ratio=statistics.fmean(ratios) if ratios else -math.inf,
            pairs=len(ratios),
            processes=max(1, trial.instances),
            pruned=record.outcome is Outcome.PRUNED,
            unstable=record.outcome is Outcome.UNSTABLE or (own in compared and not compared[own].passed),
            look_seconds=starts + self._measured_seconds,
            pair_seconds=costs.pair_seconds([baseline, record, *beside]),
            unchecked=own != plain and own not in compared,
            uncheckable=own != plain and own in compared and not compared[own].tells,
            led_over=self._led_over.get(trial.asked, 0),
        )

    def evidence(self) -> Evidence:
        """Return what has been tried, as proposals take it."""
        candidates, ended = self.candidates(), {trial.number: trial for trial in self.ended()}
        ratios = {
            ended[candidate.number].asked: candidate.ratio
            for candidate in candidates
            if candidate.measured and not candidate.unstable
        }
        unstable = {candidate.number for candidate in candidates if candidate.unstable}
        return Evidence(
            ratios={self._baseline.asked: 0.0, **ratios},
            failed=[
                trial.asked
                for number, trial in ended.items()
                if number in unstable or not self._run.records[number].outcome.measured
            ],
            running=[trial.asked for trial in self.searched() if trial.number not in ended],
        )

    def best(self) -> Trial:
        """Return the fastest so far by its estimate less its error; the baseline where nothing is faster."""
        best = self._best()
        return self._baseline if best is None else self._run.trials[best.number]

    def _best(self) -> Candidate | None:
        spread = self.spread()
        measured = [
            (candidate.ratio - candidate.error(spread), candidate.number, candidate)
            for candidate in self.candidates()
            if candidate.measured and not candidate.unstable
        ]
        lead, _, best = max(measured, default=(0.0, 0, None), key=lambda found: found[:2])
        return best if lead > 0 else None

    def best_interval(self) -> LogInterval | None:
        """Return the fastest candidate's, from which another one is distinguished; None before it has two pairs."""
        best = self._best()
        if best is None or best.pairs < 2:
            return None
        error = 2 * best.error(self.spread())
        return LogInterval(value=best.ratio, low=best.ratio - error, high=best.ratio + error, count=best.pairs)

    # ------------------------------------------------------------------------------------------- the leaders

    def leaders(self) -> list[LeaderTrials]:
        """Return what is or was confirmed: in the order in which it was begun, but the confirmed ones by when."""
        # The last one is the champion, whichever was begun first: it has beaten the others.
        known = [self.leader_trials(trial) for trial in list(self._run.trials.values()) if trial.looks]
        return sorted(known, key=self._order)

    def _order(self, leader: LeaderTrials) -> tuple[bool, float, int]:
        is_confirmed = leader.looks.standing is Standing.CONFIRMED
        record = self._run.records.get(leader.trial.number)
        written = 0.0 if record is None or not is_confirmed else record.ended_at_seconds or 0.0
        return is_confirmed, written, leader.trial.number

    def leader_trials(self, trial: Trial) -> LeaderTrials:
        """Return the trials of a leader's confirmation; `trial` is that of the leader's processes."""
        run, looks = self._run, trial.looks[-1]
        # A side that failed before its first slice has left no record.
        reference = run.trials.setdefault(looks.reference, Trial(looks.reference, Phase.CONFIRM, run.baseline))
        return LeaderTrials(
            reference=reference,
            trial=trial,
            champion=None if looks.champion is None else run.trials.get(looks.champion),
            in_search=run.records[looks.candidate],
        )

    def leader(self, number: int) -> LeaderTrials:
        """Return the leader whose processes are this trial's."""
        return self.leader_trials(self._run.trials[number])

    def weigh_leader(self, leader: LeaderTrials) -> Leader:
        """Return a leader as it is weighed."""
        records = self.beside_leader(leader)
        expected, least = costs.pair_seconds(records), costs.pair_seconds(records, least=True)
        if taken := leader.trial.instance_seconds:
            least *= statistics.fmean(taken) / expected
            expected = statistics.fmean(taken)
        return Leader(
            number=leader.trial.number,
            candidate=leader.looks.candidate,
            looks=leader.looks,
            processes=len(leader.measured),
            ratio=self.claim(leader),
            pair_seconds=expected,
            least_pair_seconds=least,
        )

    def beside_leader(self, leader: LeaderTrials) -> list[TrialRecord]:
        """Return the search's records of all that take turns in a confirmation."""
        champion = self.champion() if leader.champion is not None else None
        return [self._run.records[0], leader.in_search, *([] if champion is None else [champion.in_search])]

    def has_known_numerics(self, configuration: Configuration) -> bool:
        """Return whether a configuration computes as the baseline does, or was compared with float32."""
        own = numerics_of(configuration)
        check = parity_checks(self._run.records.values()).get(own)
        return own == numerics_of(self._run.baseline) or (check is not None and check.tells)

    def champion(self) -> LeaderTrials | None:
        """Return the leader that is recommended if the run ends now."""
        confirmed = [leader for leader in self.leaders() if leader.looks.standing is Standing.CONFIRMED]
        return confirmed[-1] if confirmed else None

    def claim(self, leader: LeaderTrials) -> LogInterval | None:
        """Return the logarithm of a leader's speed-up, at the level of its looks; None before the second process."""
        return self._interval(leader, leader.instances, self._run.baseline)

    def over_champion(self, leader: LeaderTrials, champion: LeaderTrials) -> LogInterval | None:
        """Return the same over the champion, from rounds that both were in."""
        return self._interval(leader, leader.over_champion, champion.trial.configuration)

    def _interval(
        self, leader: LeaderTrials, instances: Sequence[Sequence[float]], other: Configuration
    ) -> LogInterval | None:
        if len(instances) < 2:
            return None
        looks = leader.looks
        return claim_of(
            instances,
            prior=self.process_prior(without=looks.candidate),
            confidence=looks.confidence,
            apart=self._run.executor.needs_different_template(leader.trial.configuration, other),
        )

    def process_prior(self, *, without: int = 0) -> ProcessPrior:
        """Return how much fresh pairs of processes should vary, by all trials but one candidate's.

        That candidate's slices in the search count where the others have too few: they tell how noisy the machine
        is, and nothing of its processes.
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
