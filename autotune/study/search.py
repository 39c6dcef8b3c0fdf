"""The search: known-good single changes first, then what the sampler asks for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import optuna

from autotune.measure.intervals import Spread, pooled_spread
from autotune.space.configuration import Configuration
from autotune.space.search_space import ResolvedSpace
from autotune.study.feasibility import known_to_fail
from autotune.study.plan import Plan, usual_trial
from autotune.study.probes import combination, doublings, probes, pushed
from autotune.study.progress import PhaseBegan
from autotune.study.run import Run
from autotune.study.running import Trial
from autotune.study.sampler import Sampler
from autotune.study.side_by_side import Interrupted, SideBySide
from autotune.study.waiting import TimeIsUp
from autotune.trial.record import Outcome, Pairing, Phase, TrialRecord

REPEATS_THAT_END_IT = 20
"""Samples in a row that were known already: the space is explored."""
MOST_SECOND_LOOKS = 12
DOUBLINGS_WITHOUT_GAIN = 2
"""Doublings of the batch size in a row that were no faster: larger ones are left to the sampler."""


class Search:
    """Finds promising configurations within the plan's time.

    Args:
        run: What all phases share.
        beside: Runs candidates beside the baseline.
        space: Where to look.
        sampler: What to look at next.
        plan: When to end.
        most_trials: The user's own limit on trials, the baseline not counted; None for none.
        earlier: Trials of an earlier invocation, the baseline not among them.
    """

    def __init__(
        self,
        run: Run,
        beside: SideBySide,
        space: ResolvedSpace,
        sampler: Sampler,
        plan: Plan,
        *,
        most_trials: int | None,
        earlier: Sequence[Trial] = (),
    ) -> None:
        self._run = run
        self._beside = beside
        self._space = space
        self._sampler = sampler
        self._plan = plan
        self._most_trials = most_trials
        self._trials = {each.configuration: each for each in earlier}
        self._durations = [each.seconds / max(1, each.instances) for each in earlier if each.pairs]

    def search(self) -> bool:
        """Probe, then sample, until the time is over, the trials are spent, or nothing new comes.

        Returns:
            Whether it ran to its end; False when the user interrupted it.
        """
        plan, run = self._plan, self._run
        self._tell_of_what_is_known()
        try:
            run.observe(PhaseBegan(phase=Phase.PROBE, ends=plan.probes_end, detail="one change at a time"))
            self._probe()
            run.observe(
                PhaseBegan(phase=Phase.SEARCH, ends=plan.search_ends, detail="what the sampler proposes")
            )
            self._sample()
            self._second_looks()
        except Interrupted:
            return False
        except TimeIsUp:
            pass  # what was measured is what there is
        return not run.interrupted()

    # --------------------------------------------------------------------------------------------- phases

    def _probe(self) -> None:
        for configuration in probes(self._space):
            ends = self._plan.probes_end if self._durations else self._plan.search_ends  # one in any case
            if not self._time_for_another(ends):
                break  # sizes have a limit of their own
            if self._time_to_import(configuration, ends):
                self._tried(Phase.PROBE, configuration)
        best, behind = 1.0, 0
        for size in doublings(self._space):
            if not self._time_for_another(self._plan.sampling_ends) or behind == DOUBLINGS_WITHOUT_GAIN:
                return
            record = self._tried(Phase.PROBE, self._space.baseline.replace(batch_size=size))
            if not record.outcome.measured:
                return
            behind = 0 if _speed(record) > best else behind + 1
            best = max(best, _speed(record))

    def _sample(self) -> None:
        ends = self._plan.sampling_ends
        self._climb(ends)
        repeats = 0
        while repeats < REPEATS_THAT_END_IT and self._time_for_another(ends):
            asked, configuration = self._sampler.ask()
            known = self._trials.get(configuration)
            if known is None and not self._time_to_import(configuration, ends):
                repeats += 1
                self._sampler.pass_over(asked)
                continue
            if known is None:
                repeats = 0
                self._run_and_tell(asked, Phase.SEARCH, configuration)
                continue
            repeats += 1
            record = self._run.records[known.number]
            try:
                if known in self._leaders():
                    record = self._look_again(known)
            finally:  # what an earlier look at it gave stands
                self._sampler.tell(asked, record)

    def _climb(self, ends: float) -> None:
        """All that helped in one configuration, then its numbers raised for as long as that helps."""
        configuration = combination(self._space, self._leads())
        fastest = 0.0
        while self._time_for_another(ends):
            record = self._tried(Phase.SEARCH, configuration)
            higher = pushed(self._space, configuration)
            if higher == configuration or record.outcome is not Outcome.OK or _speed(record) <= fastest:
                return
            fastest, configuration = _speed(record), higher

    def _second_looks(self) -> None:
        """More slices for the leaders, so that luck decides less which of them is confirmed.

        Where the search has ended early they take no more than their share: the rest is the confirmation's.
        """
        plan = self._plan
        ends = min(plan.search_ends, self._run.clock() + plan.search_ends - plan.sampling_ends)
        for _ in range(MOST_SECOND_LOOKS):
            leaders = self._leaders()
            if len(leaders) < 2 or not self._time_for_another(ends, new=False):
                return
            self._look_again(_less_known(leaders))

    def _look_again(self, trial: Trial) -> TrialRecord:
        self._run.announce(trial)
        return self._measure(trial, incumbent_low=None)

    # --------------------------------------------------------------------------------------------- trials

    def _tell_of_what_is_known(self) -> None:
        """The baseline, and what an earlier invocation found."""
        self._trials[self._space.baseline] = self._beside.baseline
        self._sampler.catch_up(self._run.records.values())

    def _tried(self, phase: Phase, configuration: Configuration) -> TrialRecord:
        """What a given configuration gave; it is run, if it was not yet."""
        known = self._trials.get(configuration)
        if known is not None:
            return self._run.records[known.number]
        return self._run_and_tell(self._sampler.ask_for(configuration), phase, configuration)

    def _run_and_tell(self, asked: optuna.Trial, phase: Phase, configuration: Configuration) -> TrialRecord:
        trial = self._run.new_trial(phase, configuration)
        self._trials[configuration] = trial
        try:
            record = self._run_new(trial)
        except (Interrupted, TimeIsUp):
            self._sampler.tell(asked, self._run.records[trial.number])
            raise
        self._sampler.tell(asked, record)
        return record

    def _run_new(self, trial: Trial) -> TrialRecord:
        out_of_memory = [
            Configuration(each.configuration)
            for each in self._run.records.values()
            if each.outcome is Outcome.OOM
            and each.pairing is not Pairing.ALTERNATING  # else: not tried alone
        ]
        if known_to_fail(trial.configuration, out_of_memory):
            reason = "a trial that needs no more memory than this one ran out of it"
            return self._run.keep(trial.record(Outcome.INFERRED_OOM, reason=reason))
        # A probe also tells what its knob does, so it is measured even when it cannot win.
        return self._measure(
            trial, incumbent_low=self._incumbent_low() if trial.phase is Phase.SEARCH else None
        )

    def _measure(self, trial: Trial, *, incumbent_low: float | None) -> TrialRecord:
        began = self._run.clock()
        others = self._spread()
        record = self._beside.measure(trial, self._plan, incumbent_low=incumbent_low, others=others)
        self._durations.append(self._run.clock() - began)
        return record

    # ------------------------------------------------------------------------------------------ decisions

    def _time_for_another(self, ends: float, *, new: bool = True) -> bool:
        """Whether a trial of the usual length would end in time, and is allowed."""
        if self._run.interrupted():
            raise Interrupted
        if new and self._most_trials is not None and len(self._run.records) - 1 >= self._most_trials:
            return False
        first = max(usual_trial(self._plan.measured), self._plan.least_trial)
        usual = statistics.median(self._durations) if self._durations else first
        return self._run.clock() + usual <= ends

    def _time_to_import(self, configuration: Configuration, ends: float) -> bool:
        """Whether a trial would end in time though its environment asks for a template of its own."""
        importing = self._beside.import_seconds(configuration, self._plan)
        return self._time_for_another(ends - importing)

    def _measured(self) -> list[Trial]:
        """The trials that were measured to their end."""
        return [
            trial
            for trial in self._trials.values()
            if trial.number
            and len(trial.log_ratios) > 1
            and self._run.records[trial.number].outcome is Outcome.OK
        ]

    def _spread(self) -> Spread:
        """How much pairs vary, pooled over all trials."""
        return pooled_spread([trial.log_ratios for trial in self._trials.values() if trial.number])

    def _errors(self) -> dict[int, float]:
        """Standard error of each measured trial's log-ratio, by number, the spread pooled over all."""
        measured = self._measured()
        deviation = self._spread().deviation
        return {trial.number: deviation / math.sqrt(len(trial.log_ratios)) for trial in measured}

    def _leads(self) -> dict[Configuration, float]:
        """Each measured configuration's log-ratio, less one standard error."""
        errors = self._errors()
        return {t.configuration: statistics.fmean(t.log_ratios) - errors[t.number] for t in self._measured()}

    def _incumbent_low(self) -> float | None:
        """Lower bound of the best log-ratio."""
        errors = self._errors()
        return max(
            (statistics.fmean(t.log_ratios) - 2 * errors[t.number] for t in self._measured()), default=None
        )

    def _leaders(self) -> list[Trial]:
        """The trials that could still be the best, the one with the highest upper bound first."""
        low, errors = self._incumbent_low(), self._errors()
        highs = {t.number: statistics.fmean(t.log_ratios) + 2 * errors[t.number] for t in self._measured()}
        leaders = [t for t in self._measured() if low is not None and highs[t.number] >= low]
        return sorted(leaders, key=lambda t: highs[t.number], reverse=True)

    def finalists(self) -> list[TrialRecord]:
        """The trials worth confirming, the most promising first: measured to the end, faster than the baseline.

        Ranked one standard error below the estimate, so that a lucky trial does not come before a sure one.
        """
        leads = self._leads()
        faster = [t for t in self._measured() if statistics.fmean(t.log_ratios) > 0]
        ranked = sorted(faster, key=lambda t: leads[t.configuration], reverse=True)
        return [self._run.records[trial.number] for trial in ranked]


def _speed(record: TrialRecord) -> float:
    """How much faster than the baseline it was, which is as fast as itself; 0 where nobody knows."""
    if record.trial == 0:
        return 1.0
    return 0.0 if record.speedup is None else record.speedup.value


def _less_known(leaders: Sequence[Trial]) -> Trial:
    """Of the fastest and the one that may most likely be faster still, the one that was measured less.

    What has the highest upper bound would be the leader itself, again and again, while another that two slices
    speak of stays in doubt (LUCB: Kalyanakrishnan et al., 2012).

    Args:
        leaders: Two or more, the one with the highest upper bound first.
    """
    fastest = max(leaders, key=lambda trial: statistics.fmean(trial.log_ratios))
    challenger = next(trial for trial in leaders if trial is not fastest)
    return min(challenger, fastest, key=lambda trial: len(trial.log_ratios))
