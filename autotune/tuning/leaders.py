"""What happens to leaders: a confirmation begins, a fresh pair is measured, a look is taken, a leader is judged."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.data.figures import Check
from autotune.data.printable import first_line
from autotune.data.record import Looks, Outcome, Phase, Standing
from autotune.runtime.executor import DeviceUnavailable, SeatLost, TrialFailed
from autotune.space.configuration import Configuration
from autotune.stats import numerics
from autotune.stats.deciding import is_faster
from autotune.tuning import costs
from autotune.tuning.confirmation import BASELINE_FAILURES, FreshPairs, LeaderTrials, SlicePlan
from autotune.tuning.events import Began, Notice, PairMeasured
from autotune.tuning.knowledge import View
from autotune.tuning.learning import numerics_of
from autotune.tuning.policy import FEWEST_PROCESSES, MOST_PROCESSES
from autotune.tuning.rules import Limits, checks_of
from autotune.tuning.run import Run
from autotune.tuning.state import EXCLUDED_GAIN
from autotune.tuning.trial import Trial

RULES_ASKED_AFTER = 4  # processes of a leader: with fewer, one odd process does not refuse it


class Leaders:
    """The leaders of a run."""

    def __init__(self, run: Run, view: View, pairs: FreshPairs, *, limits: Limits, min_gain: float) -> None:
        self._run, self._view, self._pairs = run, view, pairs
        self._limits, self._min_gain = limits, min_gain
        self._failures = 0
        self.checks: dict[int, tuple[Check, ...]] = {}
        """The stability rules of each leader, by the number of its trial."""
        self.parity: dict[Configuration, Check] = {}  # what comparing losses has shown, by configuration

    def begin(self, candidate: Trial, *, error: float) -> None:
        """Begin a leader's confirmation, which may spend so much error; nothing is measured yet."""
        run, view = self._run, self._view
        run.observe(Began(text=f"confirming in fresh processes: {run.changes(candidate.configuration)}"))
        number = 1 + max((known.looks.leader for known in view.confirmations.values()), default=0)
        champion = view.champion()
        for known in view.confirmations.values():
            if known.looks.candidate == candidate.number:
                most = len(known.measured) + MOST_PROCESSES
                update = {"leader": number, "error": error, "most": most, "standing": Standing.OPEN}
                if champion is not None and not known.is_beside(champion.trial.configuration):
                    known.champion = run.new_trial(Phase.CONFIRM, champion.trial.configuration)
                    update["champion"] = known.champion.number
                known.trial.looks = (*known.trial.looks, known.looks.model_copy(update=update))
                return
        reference = run.new_trial(Phase.CONFIRM, run.baseline)
        trial = run.new_trial(Phase.CONFIRM, candidate.configuration)
        beside = None if champion is None else run.new_trial(Phase.CONFIRM, champion.trial.configuration)
        trial.looks = (
            Looks(
                leader=number,
                candidate=candidate.number,
                error=error,
                most=MOST_PROCESSES,
                reference=reference.number,
                champion=None if beside is None else beside.number,
            ),
        )
        view.confirmations[trial.number] = LeaderTrials(
            reference=reference, trial=trial, champion=beside, in_search=run.records[candidate.number]
        )

    def measure_pair(self, confirmation: LeaderTrials, *, seat: str, left: float) -> None:
        """Measure a fresh pair of processes, and look at the claim; `left` is in seconds."""
        # Raises Interrupted, TimeIsUp.
        run, before = self._run, len(confirmation.measured)
        records = self._view.beside_leader(confirmation)
        most = max(0.0, left - confirmation.start_seconds(records))
        plan = SlicePlan(
            seconds=min(costs.slices_seconds(records), most), most_seconds=min(costs.MOST_SLICES_SECONDS, most)
        )
        run.announce(confirmation.trial)
        try:
            self._pairs.measure(confirmation, plan, seat=seat, concludes=lambda: self._shows_a_gain(confirmation))
            self._failures = 0
        except SeatLost:
            raise  # the pair is measured again on another seat
        except TrialFailed as failure:
            self._failures += 1
            why = first_line(failure.reason) or failure.outcome
            if confirmation.champion is not None and failure.trial == confirmation.champion.number:
                self._champion_failed(confirmation, failure)
            who = "the baseline" if failure.trial == confirmation.reference.number else "what was confirmed before"
            text = f"{who} failed in a process of the confirmation ({why}), which counts for nothing"
            if isinstance(failure, DeviceUnavailable):
                text = f"a process of the confirmation had no device: {failure.reason}. {failure.hint}"
            run.observe(Notice(text=text))
        finally:
            self._keep(confirmation)
            standing = self._judged(confirmation)
            if standing is not Standing.OPEN or confirmation.looks.standing is Standing.CONFIRMED:
                self._conclude(confirmation, standing)  # a claim that further pairs do not bear out is open again
                self._failures = 0
            elif len(confirmation.measured) > before:
                claim = self._view.claim(confirmation)
                run.observe(
                    PairMeasured(
                        trial=confirmation.trial.number,
                        processes=len(confirmation.measured),
                        speedup=None if claim is None else claim.ratio,
                    )
                )

    def _shows_a_gain(self, confirmation: LeaderTrials) -> bool:
        """Return whether the pairs so far show a gain, stable or not."""
        claim = self._view.claim(confirmation)
        return claim is not None and is_faster(claim, min_gain=self._min_gain)

    def _champion_failed(self, confirmation: LeaderTrials, failure: TrialFailed) -> None:
        """What was confirmed and fails twice in a row is not stable; the leader need not beat it then."""
        champion = self._view.champion()
        if champion is not None and self._failures >= BASELINE_FAILURES:
            champion.failure, confirmation.champion, self._failures = failure, None, 0
            self._conclude(champion, Standing.UNSTABLE)

    def _keep(self, confirmation: LeaderTrials) -> None:
        """Write down what was measured: a run that is stopped goes on from there."""
        for each in (confirmation.reference, confirmation.champion):
            if each is not None and (each.slices or each.rated):
                self._run.keep(each.record(Outcome.OK), announce=False)
        self._write(confirmation, announce=False)

    def _write(
        self, confirmation: LeaderTrials, *, announce: bool = True, refused: dict[str, object] | None = None
    ) -> None:
        """Write the leader's record; its speed-up is the claim over processes, not over all slices."""
        claim = self._view.claim(confirmation)
        update = {
            "speedup": None if claim is None else claim.ratio,
            "checks": self.checks.get(confirmation.trial.number, ()),
            **(refused or {}),
        }
        self._run.keep(confirmation.record().model_copy(update=update), announce=announce)

    def give_up(self, confirmation: LeaderTrials) -> None:
        """Leave a leader that the time will hardly show to be faster."""
        self._conclude(confirmation, Standing.NOT_SHOWN)

    def last_look(self, confirmation: LeaderTrials) -> None:
        """Conclude what the time has not sufficed for."""
        standing = self._judged(confirmation)
        if standing in (Standing.OPEN, Standing.NOT_SHOWN):
            standing = Standing.OUT_OF_TIME
        self._conclude(confirmation, standing)

    def _conclude(self, confirmation: LeaderTrials, standing: Standing) -> None:
        """Keep what a look has shown."""
        trial = confirmation.trial
        refused: dict[str, object] | None = None
        beside = confirmation.champion
        update: dict[str, object] = {"standing": standing, "champion": None if beside is None else beside.number}
        if standing is Standing.CONFIRMED and confirmation.looks.confirmed_at_seconds is None:
            update["confirmed_at_seconds"] = self._run.now()
        trial.looks = (*trial.looks[:-1], trial.looks[-1].model_copy(update=update))
        if standing is Standing.UNSTABLE and confirmation.failure is None:
            refused = {"outcome": Outcome.UNSTABLE, "reason": _broken(self.checks[trial.number])}
        self._write(confirmation, refused=refused)
        if standing is Standing.CONFIRMED:  # the last one is the champion, whichever was begun first
            self._view.confirmations[trial.number] = self._view.confirmations.pop(trial.number)

    def _judged(self, confirmation: LeaderTrials) -> Standing:
        """Where a leader stands now."""
        if confirmation.failure is not None:
            return Standing.UNSTABLE
        count, claim = len(confirmation.measured), self._view.claim(confirmation)
        is_spent = count >= confirmation.looks.most or self._failures >= BASELINE_FAILURES
        if claim is None or claim.count < FEWEST_PROCESSES:
            return Standing.NOT_SHOWN if is_spent else Standing.OPEN
        self.checks[confirmation.trial.number] = checks = self._rules(confirmation)
        broken = _broken(checks)
        if broken:
            return Standing.UNSTABLE if count >= RULES_ASKED_AFTER or is_spent else Standing.OPEN
        if is_faster(claim, min_gain=self._min_gain):
            if confirmation.watch_memory(self._run).why_unclear:  # it is measured on, and never confirmed like that
                return Standing.NOT_SHOWN if is_spent else Standing.OPEN
            if self._beats_champion(confirmation):
                return Standing.CONFIRMED
            champion = self._view.champion()
            if champion is not None and not is_spent and not confirmation.is_beside(champion.trial.configuration):
                # It was confirmed meanwhile, on another seat: from now on it stands beside.
                confirmation.champion = self._run.new_trial(Phase.CONFIRM, champion.trial.configuration)
                return Standing.OPEN
        gain = math.log1p(self._min_gain)
        bound = math.log1p(max(self._min_gain, EXCLUDED_GAIN))
        is_hopeless = claim.high < gain or (claim.value < gain and claim.high < bound)
        return Standing.NOT_SHOWN if is_hopeless or is_spent else Standing.OPEN

    def _beats_champion(self, confirmation: LeaderTrials) -> bool:
        """Whether it is surely faster than the leader confirmed before, in rounds that both were in."""
        champion = self._view.champion()
        if champion is None or champion is confirmation:
            return True
        if not confirmation.is_beside(champion.trial.configuration):  # but beside an earlier one, or none
            return False
        over = self._view.over_champion(confirmation, champion)
        return over is not None and over.low > 0

    def _rules(self, confirmation: LeaderTrials) -> tuple[Check, ...]:
        """The stability rules, what the losses showed among them."""
        record, baseline = confirmation.trial.record(Outcome.OK), confirmation.reference.record(Outcome.OK)
        own = numerics_of(confirmation.trial.configuration)
        parity = [check for each, check in self.parity.items() if numerics_of(each) == own]
        checks = checks_of(record, baseline, self._limits, searched=self._run.records.values())
        return (*checks, *parity[-1:])

    def note_parity(self, configuration: Configuration, check: Check) -> None:
        """Keep what comparing losses has shown; where they part, all of that class of numerics are unstable."""
        run, numerics_class = self._run, numerics_of(configuration)
        self.parity[configuration] = check
        self._view.compared.add(numerics_class)
        if check.passed:
            return
        self._view.refused.add(numerics_class)
        for each in self._view.searched():
            record = run.records[each.number]
            if numerics_of(each.configuration) == numerics_class and record.outcome.measured:
                refused = {"outcome": Outcome.UNSTABLE, "reason": f"{check.name}: {check.detail}"}
                run.keep(record.model_copy(update=refused), announce=each.configuration == configuration)
        for confirmation in self._view.confirmations.values():
            alike = numerics_of(confirmation.trial.configuration) == numerics_class
            if alike and confirmation.looks.standing is Standing.CONFIRMED:
                self.checks[confirmation.trial.number] = self._rules(confirmation)
                self._conclude(confirmation, Standing.UNSTABLE)

    def restore(self, earlier: Sequence[Trial]) -> None:
        """Take over the leaders of earlier invocations."""
        by_number, records = {each.number: each for each in earlier}, self._run.records
        for trial in sorted(earlier, key=lambda each: records[each.number].ended_at_seconds or 0.0):
            record = records[trial.number]
            if record.outcome is Outcome.UNSTABLE and record.reason.startswith(numerics.NAME):
                self._view.refused.add(numerics_of(trial.configuration))
                self._view.compared.add(numerics_of(trial.configuration))
            if not trial.looks:
                continue
            looks = trial.looks[-1]
            # A side that failed before its first slice has left no record.
            reference = Trial(looks.reference, Phase.CONFIRM, self._run.baseline)
            self._view.confirmations[trial.number] = LeaderTrials(
                reference=by_number.get(looks.reference, reference),
                trial=trial,
                champion=by_number.get(looks.champion or 0),
                in_search=records[looks.candidate],
            )
            self.checks[trial.number] = record.checks
            for each in record.checks:
                if each.name == numerics.NAME:
                    self.parity[trial.configuration] = each
                    self._view.compared.add(numerics_of(trial.configuration))


def _broken(checks: Sequence[Check]) -> str:
    """The rules that were broken, in words; empty for none."""
    return "; ".join(f"{each.name}: {each.detail}" for each in checks if not each.passed)
