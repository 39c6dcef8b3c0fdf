"""The search: known-good single changes first, then what the sampler asks for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autotune.space.configuration import Configuration
from autotune.space.search_space import ResolvedSpace
from autotune.study.feasibility import known_to_fail
from autotune.study.plan import Plan
from autotune.study.probes import combination, doublings, probes
from autotune.study.progress import PhaseBegan
from autotune.study.run import Run
from autotune.study.running import Trial
from autotune.study.sampler import Sampler
from autotune.study.side_by_side import Interrupted, SideBySide
from autotune.trial.record import Outcome, Phase, TrialRecord

REPEATS_THAT_END_IT = 20
"""Samples in a row that were known already and not worth more slices: the space is explored."""


class Search:
    """Finds promising configurations within the plan's time.

    Args:
        run: What all phases share.
        beside: Runs candidates beside the baseline.
        space: Where to look.
        sampler: What to look at next.
        plan: When to end.
        most_trials: The user's own limit on trials, the baseline not counted; None for none.
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
    ) -> None:
        self._run = run
        self._beside = beside
        self._space = space
        self._sampler = sampler
        self._plan = plan
        self._most_trials = most_trials
        self._trials: dict[Configuration, Trial] = {}
        self._durations: list[float] = []

    def search(self) -> bool:
        """Probe, then sample, until the time is over, the trials are spent, or nothing new comes.

        Returns:
            Whether it ran to its end; False when the user interrupted it.
        """
        plan, run = self._plan, self._run
        self._tell_of_baseline()
        try:
            run.observe(PhaseBegan(phase=Phase.PROBE, ends=plan.probes_end, detail="one change at a time"))
            self._probe()
            run.observe(
                PhaseBegan(phase=Phase.SEARCH, ends=plan.search_ends, detail="what the sampler proposes")
            )
            self._sample()
        except Interrupted:
            return False
        return not run.interrupted()

    # --------------------------------------------------------------------------------------------- phases

    def _probe(self) -> None:
        for configuration in probes(self._space):
            if not self._time_for_another(self._plan.probes_end):
                return
            self._try(Phase.PROBE, configuration)
        for size in doublings(self._space):
            if not self._time_for_another(self._plan.search_ends):
                return
            record = self._try(Phase.PROBE, self._space.baseline.replace(batch_size=size))
            if record is not None and not record.outcome.measured:
                return

    def _sample(self) -> None:
        if self._time_for_another(self._plan.search_ends):
            self._try(Phase.SEARCH, combination(self._space, list(self._run.records.values())))
        repeats = 0
        while repeats < REPEATS_THAT_END_IT and self._time_for_another(self._plan.search_ends):
            asked, configuration = self._sampler.ask()
            known = self._trials.get(configuration)
            if known is None:
                repeats = 0
                self._sampler.tell(asked, self._run_new(Phase.SEARCH, configuration))
                continue
            record = self._run.records[known.number]
            if known.number and record.outcome is Outcome.OK and self._promising(record):
                self._run.announce(known)
                record = self._measure(known, incumbent_low=self._incumbent_low(without=known.number))
                repeats = 0
            else:
                repeats += 1
            self._sampler.tell(asked, record)

    # --------------------------------------------------------------------------------------------- trials

    def _tell_of_baseline(self) -> None:
        record = self._run.records[0]
        self._trials[self._space.baseline] = self._beside.baseline
        self._sampler.tell(self._sampler.ask_for(self._space.baseline), record)

    def _try(self, phase: Phase, configuration: Configuration) -> TrialRecord | None:
        """Run a given configuration, if it was not run yet."""
        if configuration in self._trials:
            return None
        asked = self._sampler.ask_for(configuration)
        record = self._run_new(phase, configuration)
        self._sampler.tell(asked, record)
        return record

    def _run_new(self, phase: Phase, configuration: Configuration) -> TrialRecord:
        trial = self._run.new_trial(phase, configuration)
        self._trials[configuration] = trial
        out_of_memory = [
            Configuration(each.configuration)
            for each in self._run.records.values()
            if each.outcome is Outcome.OOM
        ]
        if known_to_fail(configuration, out_of_memory):
            reason = "a trial that needs no more memory than this one ran out of it"
            return self._run.keep(trial.record(Outcome.INFERRED_OOM, reason=reason))
        # A probe also tells what its knob does, so it is measured even when it cannot win.
        return self._measure(trial, incumbent_low=self._incumbent_low() if phase is Phase.SEARCH else None)

    def _measure(self, trial: Trial, *, incumbent_low: float | None) -> TrialRecord:
        began = self._run.clock()
        record = self._beside.measure(trial, self._plan, incumbent_low=incumbent_low)
        self._durations.append(self._run.clock() - began)
        return record

    # ------------------------------------------------------------------------------------------ decisions

    def _time_for_another(self, ends: float) -> bool:
        """Whether a trial of the usual length would end in time, and is allowed."""
        if self._run.interrupted():
            raise Interrupted
        if self._most_trials is not None and len(self._run.records) - 1 >= self._most_trials:
            return False
        usual = statistics.median(self._durations) if self._durations else self._plan.measured + 3.0
        return self._run.clock() + usual <= ends

    def _measured(self) -> Sequence[TrialRecord]:
        return [
            each
            for each in self._run.records.values()
            if each.outcome is Outcome.OK and each.speedup is not None
        ]

    def _incumbent_low(self, *, without: int | None = None) -> float | None:
        """Lower bound of the best log-ratio; the baseline itself (0) counts as one to beat."""
        lows = [
            math.log(each.speedup.low)
            for each in self._measured()
            if each.speedup is not None and each.speedup.low > 0 and each.trial != without
        ]
        return max(lows, default=None)

    def _promising(self, record: TrialRecord) -> bool:
        """Whether more slices could make this the winner."""
        best = max((each.speedup.low for each in self._measured() if each.speedup), default=0.0)
        return record.speedup is not None and record.speedup.high >= best


def finalists(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials worth confirming, the most promising first: measured to the end and faster than the baseline.

    Ranked by lower bound, so that a lucky trial with a wide interval does not come before a sure one.
    """
    candidates = [
        each
        for each in records
        if each.phase in (Phase.PROBE, Phase.SEARCH)
        and each.outcome is Outcome.OK
        and each.speedup is not None
        and each.speedup.value > 1
    ]
    return sorted(candidates, key=lambda each: each.speedup.low if each.speedup else 0.0, reverse=True)
