"""Confirm leaders: begin a confirmation, measure a fresh pair, take a look, judge a leader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autotune.data.figures import Check
from autotune.data.printable import first_line
from autotune.data.record import InterimAnalysis, Outcome, Phase, Standing
from autotune.runtime.executor import DeviceUnavailable, SeatLost, TrialFailed
from autotune.stats.deciding import is_faster
from autotune.tuning import costs
from autotune.tuning.confirmation import BASELINE_FAILURES, FreshPairs, LeaderTrials, SlicePlan
from autotune.tuning.events import Began, Notice, PairMeasured
from autotune.tuning.learning import numerics_of
from autotune.tuning.policy import FEWEST_PROCESSES, MOST_PROCESSES
from autotune.tuning.rules import checks_of
from autotune.tuning.run import Run
from autotune.tuning.standings import Standings, parity_checks
from autotune.tuning.state import EXCLUDED_GAIN
from autotune.tuning.trial import Trial

RULES_ASKED_AFTER = 4  # processes of a leader: with fewer, one odd process does not refuse it


class Leaders:
    """Acts on the leaders of a run. How they stand is in their records."""

    def __init__(self, run: Run, standings: Standings, pairs: FreshPairs) -> None:
        self._run, self._standings, self._pairs = run, standings, pairs
        self._min_gain = run.options.min_gain
        self._failures = 0  # in a row, of a side that is not the leader

    # ------------------------------------------------------------------------------------------- actions

    def begin(self, candidate: Trial, *, error: float) -> None:
        """Begin a leader's confirmation, which may spend so much error; nothing is measured yet."""
        run = self._run
        run.observe(Began(text=f"confirming in fresh processes: {run.changes(candidate.configuration)}"))
        leaders, best_leader = self._standings.leaders(), self._standings.best_leader_beside(candidate.configuration)
        number = 1 + max((known.looks.leader for known in leaders), default=0)
        for known in leaders:
            if known.looks.candidate == candidate.number:
                update = {"leader": number, "error": error, "most": len(known.measured) + MOST_PROCESSES}
                looks = known.looks.model_copy(update={**update, "standing": Standing.OPEN})
                known.trial.looks = (*known.trial.looks, looks)
                if best_leader is not None and not known.alternates_with(best_leader.trial.configuration):
                    self._alternate_with(best_leader, known.trial)
                return
        reference = run.new_trial(Phase.CONFIRM, run.baseline)
        trial = run.new_trial(Phase.CONFIRM, candidate.configuration)
        looks = InterimAnalysis(
            leader=number, candidate=candidate.number, error=error, most=MOST_PROCESSES, reference=reference.number
        )
        trial.looks = (looks,)
        if best_leader is not None:
            self._alternate_with(best_leader, trial)

    def measure_pair(self, number: int, *, seat: str, left: float) -> None:
        """Measure a fresh pair of processes, and look at the claim; `left` is in seconds."""
        # Raises Interrupted, TimeIsUp.
        run, leader = self._run, self._standings.leader(number)
        before, records = len(leader.measured), self._standings.records_with(leader)
        most = max(0.0, left - leader.start_seconds(records, run))
        plan = SlicePlan(
            seconds=min(costs.slices_seconds(records), most), most_seconds=min(costs.MOST_SLICES_SECONDS, most)
        )

        def shows_a_gain() -> bool:  # stable or not
            claim = self._standings.claim(leader)
            return claim is not None and is_faster(claim, min_gain=self._min_gain)

        run.announce(leader.trial)
        try:
            self._pairs.measure(leader, plan, seat=seat, concludes=shows_a_gain)
            self._failures = 0
        except SeatLost:
            raise  # the pair is measured again on another seat
        except TrialFailed as failure:
            self._note_other_side(leader, failure)
        finally:
            leader = self._standings.leader(number)
            for trial in (leader.reference, leader.best_leader):  # a stopped run continues from there
                if trial is not None and (trial.slices or trial.pairs):
                    run.save_record(trial.record(Outcome.OK), announce=False)
            self._write(leader, announce=False)
            standing = self._judge(leader)
            if standing is not Standing.OPEN or leader.looks.standing is Standing.CONFIRMED:
                self._conclude(leader, standing)  # a claim that further pairs do not bear out is open again
                self._failures = 0
            elif len(leader.measured) > before:
                claim = self._standings.claim(leader)
                speedup = None if claim is None else claim.ratio
                run.observe(PairMeasured(trial=number, processes=len(leader.measured), speedup=speedup))

    def give_up(self, number: int) -> None:
        """Leave a leader that the time will hardly show to be faster."""
        self._conclude(self._standings.leader(number), Standing.NOT_SHOWN)

    def last_look(self, number: int) -> None:
        """Conclude what the time has not sufficed for."""
        leader = self._standings.leader(number)
        standing = self._judge(leader)
        if standing in (Standing.OPEN, Standing.NOT_SHOWN):
            standing = Standing.OUT_OF_TIME
        self._conclude(leader, standing)

    def note_parity(self, candidate: Trial, check: Check) -> None:
        """Record the parity check. If the losses diverge, mark all trials of that numerics class unstable."""
        run, numerics_class = self._run, numerics_of(candidate.configuration)
        candidate.checks = (check,)
        run.save_record(run.records[candidate.number].model_copy(update={"checks": candidate.checks}), announce=False)
        if check.passed:
            return
        for trial in self._standings.ended():
            record = run.records[trial.number]
            if numerics_of(trial.configuration) == numerics_class and record.outcome.measured:
                refused = {"outcome": Outcome.UNSTABLE, "reason": f"{check.name}: {check.detail}"}
                run.save_record(
                    record.model_copy(update=refused), announce=trial.configuration == candidate.configuration
                )
        for leader in self._standings.leaders():
            is_same_class = numerics_of(leader.trial.configuration) == numerics_class
            if is_same_class and leader.looks.standing is Standing.CONFIRMED:
                leader.trial.checks = self._rules(leader)
                self._conclude(leader, Standing.UNSTABLE)

    # ------------------------------------------------------------------------------------------- judging

    def _judge(self, leader: LeaderTrials) -> Standing:
        """Return where a leader stands now."""
        if leader.failure is not None:
            return Standing.UNSTABLE
        count, claim = len(leader.measured), self._standings.claim(leader)
        is_spent = count >= leader.looks.most or self._failures >= BASELINE_FAILURES
        if claim is None or claim.count < FEWEST_PROCESSES:
            return Standing.NOT_SHOWN if is_spent else Standing.OPEN
        leader.trial.checks = checks = self._rules(leader)
        if _broken(checks):
            return Standing.UNSTABLE if count >= RULES_ASKED_AFTER or is_spent else Standing.OPEN
        if is_faster(claim, min_gain=self._min_gain):
            if leader.why_memory_unclear(self._run):  # it is measured on, and never confirmed like that
                return Standing.NOT_SHOWN if is_spent else Standing.OPEN
            best_leader = self._standings.best_leader_beside(leader.trial.configuration)
            if self._beats(leader, best_leader):
                return Standing.CONFIRMED
            if best_leader is not None and not is_spent and not leader.alternates_with(best_leader.trial.configuration):
                # It was confirmed meanwhile, on another seat: from now on it stands beside.
                self._alternate_with(best_leader, leader.trial)
                return Standing.OPEN
        gain, bound = math.log1p(self._min_gain), math.log1p(max(self._min_gain, EXCLUDED_GAIN))
        is_hopeless = claim.high < gain or (claim.value < gain and claim.high < bound)
        return Standing.NOT_SHOWN if is_hopeless or is_spent else Standing.OPEN

    def _beats(self, leader: LeaderTrials, best_leader: LeaderTrials | None) -> bool:
        """Return whether it is surely faster than the leader confirmed before, in rounds that both were in.

        Known numerics come before speed: one that could not be compared with float32 is the best leader if no other is.
        """
        if best_leader is None or best_leader.trial is leader.trial:
            return True
        known = [self._standings.has_known_numerics(side.trial.configuration) for side in (leader, best_leader)]
        if known[0] != known[1]:
            return known[0]
        if not leader.alternates_with(best_leader.trial.configuration):  # but beside an earlier one, or none
            return False
        over = self._standings.over_best_leader(leader, best_leader)
        return over is not None and over.low > 0

    def _rules(self, leader: LeaderTrials) -> tuple[Check, ...]:
        """Return the stability checks, including the comparison of losses."""
        records = self._run.records.values()
        record, baseline = leader.trial.record(Outcome.OK), leader.reference.record(Outcome.OK)
        parity = parity_checks(records).get(numerics_of(leader.trial.configuration))
        checks = checks_of(record, baseline, self._run.limits, searched=records)
        return checks if parity is None else (*checks, parity)

    # ------------------------------------------------------------------------------------------- keeping

    def _note_other_side(self, leader: LeaderTrials, failure: TrialFailed) -> None:
        """Report a failure that is not the leader's. A confirmed one that fails twice in a row is not stable."""
        self._failures += 1
        why = first_line(failure.reason) or failure.outcome
        best_leader = self._standings.best_leader_beside(leader.trial.configuration)
        is_of_best_leader = leader.best_leader is not None and failure.trial == leader.best_leader.number
        if is_of_best_leader and best_leader is not None and self._failures >= BASELINE_FAILURES:
            best_leader.trial.failure, self._failures = failure, 0
            self._conclude(best_leader, Standing.UNSTABLE)
            self._update_looks(leader.trial, champion=None)  # the leader need not beat it any more
        who = "the baseline" if failure.trial == leader.reference.number else "the configuration confirmed before"
        text = f"{who} failed during the confirmation ({why}); this pair is not counted"
        if isinstance(failure, DeviceUnavailable):
            text = f"a process of the confirmation had no device: {failure.reason}. {failure.hint}"
        self._run.observe(Notice(text=text))

    def _alternate_with(self, best_leader: LeaderTrials, trial: Trial) -> None:
        """Measure the best leader beside a leader from now on, in processes of its own."""
        added = self._run.new_trial(Phase.CONFIRM, best_leader.trial.configuration)
        self._update_looks(trial, champion=added.number)

    def _update_looks(self, trial: Trial, **update: Any) -> None:
        trial.looks = (*trial.looks[:-1], trial.looks[-1].model_copy(update=update))

    def _write(self, leader: LeaderTrials, *, announce: bool = True, **refused: Any) -> None:
        """Write the leader's record; its speed-up is the claim over processes, not over all slices."""
        claim = self._standings.claim(leader)
        update = {"speedup": claim and claim.ratio, **refused}
        self._run.save_record(leader.record().model_copy(update=update), announce=announce)

    def _conclude(self, leader: LeaderTrials, standing: Standing) -> None:
        """Keep what a look has shown."""
        trial = leader.trial
        self._update_looks(trial, standing=standing)
        if standing is Standing.CONFIRMED and leader.looks.confirmed_at_seconds is None:
            self._update_looks(trial, confirmed_at_seconds=self._run.now())
        if standing is Standing.UNSTABLE and leader.failure is None:
            self._write(leader, outcome=Outcome.UNSTABLE, reason=_broken(trial.checks))
        else:
            self._write(leader)


def _broken(checks: Sequence[Check]) -> str:
    """Return the rules that were broken, in words; empty for none."""
    return "; ".join(f"{check.name}: {check.detail}" for check in checks if not check.passed)
