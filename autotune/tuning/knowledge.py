"""What a run knows, made from its trials and their records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autotune.data.figures import LogInterval
from autotune.data.record import Outcome, Pairing, Standing, TrialRecord
from autotune.space.configuration import Configuration
from autotune.stats.intervals import ProcessPrior, Spread, claim_interval, pooled_spread, process_prior
from autotune.tuning import costs
from autotune.tuning.candidates import Others
from autotune.tuning.confirmation import Confirmation
from autotune.tuning.learning import numerics_of
from autotune.tuning.run import Run
from autotune.tuning.state import Candidate, Leader
from autotune.tuning.trial import Trial

FEW_DEGREES = 8  # of the slices of other trials, that tell how restless the machine is


class View:
    """The candidates and leaders of a run, as the loop weighs them."""

    def __init__(self, run: Run, *, measured_seconds: float) -> None:
        self._run = run
        self._measured_seconds = measured_seconds
        self.tried: dict[Configuration, Trial] = {}
        """What was tried in the search, by what was asked for and by what was in force."""
        self.confirmations: dict[int, Confirmation] = {}  # of all leaders, by the numbers of their trials
        self.compared: set[tuple[object, ...]] = set()  # the classes of numerics whose losses were compared
        self.refused: set[tuple[object, ...]] = set()  # those that do not learn as float32 does

    def trial(self, number: int) -> Trial:
        """The trial of the search with this number."""
        return next(each for each in self.tried.values() if each.number == number)

    def searched(self) -> list[Trial]:
        """What was tried, in order; interrupted trials were not, and one that runs is not yet."""
        records = self._run.records
        return [
            each
            for each in self._searched_trials()
            if each.number in records and records[each.number].outcome is not Outcome.INTERRUPTED
        ]

    def spread(self) -> Spread:
        """How much pairs vary, pooled over all trials."""
        return pooled_spread([each.log_ratios for each in self.tried.values() if each.number])

    def process_prior(self, *, without: int = 0) -> ProcessPrior:
        """Return how much fresh pairs of processes should vary, by all trials but one candidate's.

        That candidate's slices in the search count where the others have too few: they tell how restless the machine
        is, and nothing of its processes.
        """
        baseline = self._run.records[0]
        leaders = [known for known in self.confirmations.values() if known.looks.candidate != without]
        trials = [
            *(
                [*trial.log_ratios_by_instance().values()]
                for trial in self._searched_trials()
                if trial.number != without
            ),
            *(known.instances for known in leaders),
        ]
        if without and pooled_spread([values for processes in trials for values in processes]).degrees < FEW_DEGREES:
            trials += [[values] for values in self.trial(without).log_ratios_by_instance().values()]
        own = [
            len(values)
            for known in self.confirmations.values()
            if known.looks.candidate == without
            for values in known.instances
        ]
        rounds = round(statistics.fmean(own)) if own else costs.rounds([baseline, baseline])
        return process_prior(trials, rounds=max(1, rounds))

    def _searched_trials(self) -> list[Trial]:
        """Return every trial of the search once, measured or not, without the baseline."""
        return [trial for trial in dict.fromkeys(self.tried.values()) if trial.number]

    def candidate(self, trial: Trial) -> Candidate:
        """A trial of the search as it is weighed."""
        record, records = self._run.records[trial.number], self._run.records
        ratios = trial.log_ratios if record.outcome.measured or record.outcome is Outcome.UNSTABLE else []
        own = numerics_of(trial.configuration)
        return Candidate(
            number=trial.number,
            configuration=trial.configuration,
            ratio=statistics.fmean(ratios) if ratios else -math.inf,
            pairs=len(ratios),
            processes=max(1, trial.instances),
            pruned=record.outcome is Outcome.PRUNED,
            unstable=record.outcome is Outcome.UNSTABLE or own in self.refused,
            look_seconds=costs.start_seconds(record)
            + (costs.start_seconds(records[0]) if record.pairing is Pairing.BRACKETED else 0.0)
            + self._measured_seconds,
            pair_seconds=costs.pair_seconds([records[0], record, *self.champion_records()]),
            unchecked=own != numerics_of(self._run.baseline) and own not in self.compared,
        )

    def others(self) -> Others:
        """What other seats do and have done, as proposals take it."""
        running = [each.asked for each in self.tried.values() if each.number not in self._run.records]
        candidates = [(each.asked, self.candidate(each)) for each in self.searched()]
        ratios = {asked: each.ratio for asked, each in candidates if each.measured and not each.unstable}
        return Others(running=list(dict.fromkeys(running)), ratios={self.trial(0).asked: 0.0, **ratios})

    def leader(self, confirmation: Confirmation) -> Leader:
        """A leader as it is weighed."""
        records = self.beside_leader(confirmation)
        expected, least = costs.pair_seconds(records), costs.pair_seconds(records, least=True)
        if confirmation.seconds:
            least *= statistics.fmean(confirmation.seconds) / expected
            expected = statistics.fmean(confirmation.seconds)
        return Leader(
            number=confirmation.trial.number,
            candidate=confirmation.looks.candidate,
            looks=confirmation.looks,
            processes=len(confirmation.measured),
            ratio=self.claim(confirmation),
            pair_seconds=expected,
            least_pair_seconds=least,
        )

    def beside_leader(self, confirmation: Confirmation) -> list[TrialRecord]:
        """The search's records of all that take turns in a confirmation."""
        champion = self.champion_records() if confirmation.champion is not None else []
        return [self._run.records[0], confirmation.in_search, *champion]

    def champion(self) -> Confirmation | None:
        """The confirmation of what is recommended if the run ends now."""
        confirmed = [each for each in self.confirmations.values() if each.looks.standing is Standing.CONFIRMED]
        return confirmed[-1] if confirmed else None

    def champion_records(self) -> list[TrialRecord]:
        """The search's record of it; none without one."""
        champion = self.champion()
        return [] if champion is None else [champion.in_search]

    def claim(self, confirmation: Confirmation) -> LogInterval | None:
        """Logarithm of a leader's speed-up, at the level of its looks; None before the second process."""
        return self._interval(confirmation, confirmation.instances, self._run.baseline)

    def over_champion(self, confirmation: Confirmation, champion: Confirmation) -> LogInterval | None:
        """The same over the champion, from rounds that both were in."""
        return self._interval(confirmation, confirmation.over_champion, champion.trial.configuration)

    def _interval(
        self, confirmation: Confirmation, instances: Sequence[Sequence[float]], other: Configuration
    ) -> LogInterval | None:
        if len(instances) < 2:
            return None
        apart = self._run.executor.apart(confirmation.trial.configuration, other)
        looks = confirmation.looks
        prior = self.process_prior(without=looks.candidate)
        return claim_interval(instances, prior=prior, confidence=looks.confidence, other_template=apart)

    def best(self) -> Trial:
        """The fastest so far by its estimate less its error; the baseline where nothing is faster."""
        spread = self.spread()
        measured = [
            (each.ratio - each.error(spread), each.number)
            for each in map(self.candidate, self.searched())
            if each.measured and not each.unstable
        ]
        lead, number = max(measured, default=(0.0, 0))
        return self.trial(number if lead > 0 else 0)

    def best_interval(self) -> LogInterval | None:
        """The fastest candidate's, against which another one is told apart; None before there are two pairs."""
        best = self.best()
        if not best.number or len(best.log_ratios) < 2:
            return None
        error = 2 * self.candidate(best).error(self.spread())
        mean = statistics.fmean(best.log_ratios)
        return LogInterval(value=mean, low=mean - error, high=mean + error, count=len(best.log_ratios))
