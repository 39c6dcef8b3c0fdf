"""The confirmation: finalists against the baseline again, in fresh processes of freshly started templates.

The search's winner owes part of its lead to luck, so nothing of the search enters the claim. Each *instance* is a
fresh process of the baseline and of every finalist; they take turns in short slices, in a balanced
random order. How many instances there are follows from the time alone, so no look at the results can stop it early,
or make it go on: `study/expected.py` has what each will take, `study/instances.py` measures it. What would win then
trains continuously beside the baseline (`study/soak.py`).

Where the baseline is not *plain* (float32 without XLA), that takes turns in the same rounds, as a second thing to be
held against. It is no contender, and makes way for them wherever time or memory is short.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autotune.measure.continuous import FEWEST_SLICES
from autotune.measure.deciding import Shortfall, Verdict, verdict
from autotune.measure.disturbance import NOTABLE_SHARE
from autotune.measure.intervals import LogInterval, between_templates, instance_interval
from autotune.measure.stability import Check
from autotune.printable import first_line
from autotune.space.configuration import Configuration
from autotune.study.confirmed import Confirmed, Limits, Plain, Result, checks_of, ended, stalls_of_baseline
from autotune.study.expected import Expected, epoch_seconds
from autotune.study.instances import Contender, Instance, Instances
from autotune.study.plan import (
    ENOUGH_INSTANCES,
    FEWEST_INSTANCES,
    INSTANCES_OF_SEVERAL,
    LEAST_INSTANCE_SECONDS,
    MOST_INSTANCES,
    OVERRUN_SHARE,
    Plan,
    budget_to_confirm,
    least_slices,
    plan_instances,
)
from autotune.study.progress import Notice, PhaseBegan
from autotune.study.run import Run
from autotune.study.running import Trial, luck_of_stalls, ratio_interval
from autotune.study.side_by_side import INPUT_WAIT_SECONDS
from autotune.study.slicing import LONG_SLICE_SECONDS, waits_much
from autotune.study.soak import Soak, plan_legs
from autotune.study.waiting import Deadline, TimeIsUp
from autotune.trial.live import DeviceUnavailable, TrialFailed
from autotune.trial.messages import EPOCH_SECONDS
from autotune.trial.record import Outcome, Pairing, Phase, TrialRecord

GROUPS = (1, 2)
"""Template groups that the instances come from in turn; the search's is 0."""
ASKED_SHARE = 0.02
"""Of the confirmation's time: for the input wait of each configuration, at most."""
LONGEST_EPOCH_SECONDS = 2.5
"""The baseline's epoch by the search: up to there all are timed whole, where that leaves enough instances. An epoch's
end may stall for as long as the epoch takes, which steps do not show and short epochs only estimate."""
WITH_A_STALL = 2.0
"""An epoch that ends in a stall may take so many times as long, and is timed whole all the same."""
INSTANCES_BY_EPOCHS = 3
"""Fresh processes of one finalist that there must be time for, to have longer epochs timed whole."""
NEARLY = 0.8
"""Share of what a part should take that it is begun with: expectations err."""
RULES_ASKED_AFTER = (ENOUGH_INSTANCES, 2 * ENOUGH_INSTANCES, 4 * ENOUGH_INSTANCES)
"""Instances, after which what has broken a rule is measured no further: of fewer one may err, and so may each look."""
FIRST_SOAK_SHARE = 0.6
"""Of the soak's time, for the first of several that could win: the rest is for the next, should that be refuted."""


class Confirmer:
    """Confirms finalists.

    Args:
        run: What all phases share.
        plan: When to end.
        limits: Memory limits of the machine.
        min_gain: Smallest gain that counts.
        numerics: What the finalists' loss curves showed, for those that were looked at.
        plain: The baseline in float32 without XLA, to be measured as well where it is not the baseline itself.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        limits: Limits,
        *,
        min_gain: float,
        numerics: Mapping[Configuration, Check] | None = None,
        plain: Configuration | None = None,
    ) -> None:
        self._run = run
        self._plan = plan
        # The process knows better than NVML what it may take: a part of a card, or what the workload allows itself.
        self._limits = replace(limits, device_bytes=run.device_limit_bytes or limits.device_bytes)
        self._min_gain = min_gain
        self._numerics = numerics or {}
        self._asked_for = plain if plain != run.baseline else None
        self._plain_left_out = ""
        self._deadline = Deadline(clock=run.clock, at=plan.ends + OVERRUN_SHARE * plan.budget)
        self._ends = plan.ends - plan.soak
        self._expected = Expected(run.records[0], slice_seconds=plan.slice_seconds)
        self._instances = Instances(run, self._deadline, self._expected, trial_timeout=plan.trial_timeout)
        self._prepared = self._instances_stopped = False
        self._comparisons = 1
        self._pauses_deceive = False
        self._interruptions_before = run.interruptions()
        self._baseline_failure: TrialFailed | None = None
        self._reference: Trial | None = None

    def confirm(self, finalists: Sequence[TrialRecord]) -> Result:
        """Measure finalists against the baseline until the plan's end.

        Args:
            finalists: The most promising first; the plan says how many are confirmed at once, the others
                stand by in case those fail.
        """
        run, plan = self._run, self._plan
        run.observe(
            PhaseBegan(phase=Phase.CONFIRM, ends=plan.ends, detail="fresh processes against the baseline")
        )
        reference = self._reference = run.new_trial(Phase.CONFIRM, run.baseline)
        self._expected.whole_up_to = self._times_whole(finalists[0])
        self._lengthen_slices(finalists[0])
        if not any(self._fits([each]) for each in finalists) or not self._holds_a_soak(finalists[0]):
            self._ends = plan.ends  # rather a claim without a continuous run than none
        waiting = sorted(finalists, key=lambda each: not self._fits([each]))  # those that time allows, first
        entered: list[Contender] = []
        field_size = self._field_size(waiting)
        while waiting:
            records, waiting = waiting[:field_size], waiting[field_size:]
            contenders = [self._contender(each) for each in records]
            entered += contenders
            self._comparisons = len(entered)
            self._run_instances(reference, contenders)
            self._soak(reference, contenders)
            for each in entered:
                each.barred = self._pauses_deceive and each.soaked is None
            if any(self._may_win(each, reference) for each in contenders) or self._stopped():
                break
            if waiting and not self._fits_well(waiting[0]):
                self._ends = plan.ends  # rather no continuous run than no claim to bet on
            if not self._fits(waiting[:1]):
                break
            if waiting:
                gone = "; ".join(self._why_not(each, reference) for each in contenders)
                run.observe(Notice(text=f"{gone}; the next finalist takes its place"))
            field_size = 1
        return self._result(reference, entered)

    def _may_win(self, contender: Contender, reference: Trial) -> bool:
        """Whether it ran, and passes every rule by what was measured of it so far; how fast it was is not asked."""
        if contender.failure is not None:
            return False
        record, baseline = ended(contender.trial, None), ended(reference, None)
        return all(check.passed for check in self._checks(record, baseline))

    def _why_not(self, contender: Contender, reference: Trial) -> str:
        """Which finalist cannot win, and why, in a few words."""
        failure, name = contender.failure, f"trial {contender.trial.number}"
        if failure is not None:
            return f"{name} failed in its confirmation ({first_line(failure.reason) or failure.outcome})"
        record, baseline = ended(contender.trial, None), ended(reference, None)
        broken = [each.name for each in self._checks(record, baseline) if not each.passed]
        return f"{name} broke a rule in its confirmation ({', '.join(broken)})"

    def _soak(self, reference: Trial, contenders: Sequence[Contender]) -> None:
        """A continuous run of what would be recommended now, beside the baseline, in the time that was kept for it.

        Where that takes its claim away, the next has one in the rest of the time. What has none then cannot be
        recommended: pauses may have made it look fast as well.
        """
        kept = self._plan.ends - self._ends
        winners = [each for each in contenders if self._would_win(each, reference)]
        winners.sort(key=lambda each: self._claim(each).low, reverse=True)
        if kept and winners and not self._stopped():
            self._ends = self._plan.ends
            self._run.observe(
                PhaseBegan(phase=Phase.CONFIRM, ends=self._ends, detail="a continuous run of the winner")
            )
            for each in winners:
                spare = (1 - FIRST_SOAK_SHARE) * kept if each is winners[0] is not winners[-1] else 0.0
                try:
                    self._soak_one(reference, each, ends=self._ends - spare)
                finally:
                    self._keep_so_far(reference, contenders)
                self._pauses_deceive = self._pauses_deceive or self._deceived(each)
                if self._would_win(each, reference):
                    break

    def _soak_one(self, reference: Trial, contender: Contender, *, ends: float) -> None:
        soak = Soak(
            self._run,
            self._deadline,
            start=self._start_again,
            close=self._instances.close,
            stopped=self._stopped,
            ends=ends,
            last=self._ends,
        )
        together = contender.pairing is Pairing.ALTERNATING
        own, beside = map(self._instances.share_after_pauses, (contender.trial, reference))
        with contender.failing():
            contender.soaked = soak.soak(
                reference,
                contender.trial,
                together=together,
                length=self._instances.slice_length(contender.trial) if together else None,
                shares=(own, beside) if together else (1.0, 1.0),  # a bracket's turns have its slices' pauses
            )

    def _deceived(self, contender: Contender) -> bool:
        """Whether pauses surely made it look faster than it is."""
        return contender.soaked is not None and contender.soaked.pauses.low > 0

    def _start_again(self, trial: Trial, stack: contextlib.ExitStack) -> None:
        usual = 1.0 if trial.warm is None else trial.warm.ready_seconds
        self._instances.start(trial, GROUPS[0], stack, usual=usual)

    def _would_win(self, contender: Contender, reference: Trial) -> bool:
        """Whether it is stable and faster by what was measured of it so far."""
        if not contender.instances or not self._may_win(contender, reference):
            return False
        return self._verdict(contender, self._claim(contender)) is Verdict.FASTER

    def _verdict(self, contender: Contender, claim: LogInterval) -> Verdict:
        """What its claim comes to: nothing, where it was measured in forks of one template only."""
        if contender.barred or len(contender.groups) < len(GROUPS):
            return Verdict.NO_SIGNIFICANT_GAIN
        return verdict(claim, min_gain=self._min_gain)

    def _in_slices(self, contender: Contender) -> LogInterval:
        assert self._reference is not None
        unseen = luck_of_stalls(contender.trial, self._reference)
        return self._over(contender, contender.instances, self._run.baseline, unseen=unseen)

    def _over(
        self,
        contender: Contender,
        instances: Sequence[Sequence[float]],
        other: Configuration,
        *,
        unseen: float = 0.0,
    ) -> LogInterval:
        """Logarithm of a contender's speed-up over another configuration, over instances.

        Args:
            contender: Which.
            instances: For each instance the log-ratios of its pairs.
            other: What it is held against.
            unseen: Variance of an instance that its slices do not show.
        """
        interval = instance_interval(instances, comparisons=self._comparisons, unseen=unseen)
        if not self._run.trials.apart(contender.trial.configuration, other):
            return interval
        return between_templates(interval, len(contender.groups), comparisons=self._comparisons)

    def _claim(self, contender: Contender) -> LogInterval:
        """What slices say; freed of what the pauses gave, where a continuous run shows that they gave something."""
        claim, soaked = self._in_slices(contender), contender.soaked
        return soaked.without_pauses(claim) if soaked is not None and soaked.contradicts else claim

    def _checks(self, record: TrialRecord, baseline: TrialRecord) -> tuple[Check, ...]:
        """The stability rules, what the losses showed among them."""
        numerics = self._numerics.get(Configuration(record.configuration))
        return (*checks_of(record, baseline, self._limits), *([numerics] if numerics else []))

    def _contender(self, record: TrialRecord) -> Contender:
        trial = self._run.new_trial(Phase.CONFIRM, Configuration(record.configuration))
        pairing = record.pairing or Pairing.ALTERNATING
        trial.pairing = pairing
        return Contender(trial=trial, pairing=pairing, in_search=record)

    def _stopped(self) -> bool:
        return self._run.interruptions() > self._interruptions_before

    def _run_instances(self, reference: Trial, contenders: Sequence[Contender]) -> None:
        """As many instances as the time holds, whatever they show; none where it does not hold the fewest."""
        run = self._run
        if not self._fits([each.in_search for each in contenders]):
            self._plain_left_out = self._plain_left_out or "there was no time for a confirmation"
            return
        self._admit_plain(contenders)
        records = [each.in_search for each in self._instances.with_plain(contenders)]
        self._prepare(contenders)  # plain is a fork of the baseline's
        start = self._expected.instance_start_seconds(records)
        seconds = self._planned(records, start)[1]
        self._instances.input_wait_seconds = self._most_asked()
        done = failures = 0
        dropped: list[Trial] = []
        while done < MOST_INSTANCES and failures < FEWEST_INSTANCES:
            active = [each for each in contenders if each.failure is None and each.trial not in dropped]
            asking = self._instances.asking(reference, active)
            if done in RULES_ASKED_AFTER:  # what has broken one leaves its time to the next
                dropped += [each.trial for each in active if not self._may_win(each, reference)]
                active = [each for each in active if each.trial not in dropped]
            if not active or not self._holds_another(records, start, seconds, done=done):
                return
            if self._stopped():
                self._instances_stopped = True
                return
            began = run.clock()
            instance = Instance(
                group=GROUPS[done % len(GROUPS)],  # what failed is tried again with the same
                seconds=seconds,
                ends=began + (self._left() - asking) / max(1, FEWEST_INSTANCES - done),
            )
            try:
                took = self._instances.measure(reference, active, instance)
            except TimeIsUp:
                return
            except TrialFailed as failure:
                # The baseline's or the device's: a failure of a contender is its own.
                if failure.outcome is Outcome.OOM and self._instances.make_room(active):
                    continue
                self._tell_of_failure(failure)
                self._baseline_failure = failure
                failures += 1
                continue
            finally:
                self._keep_so_far(reference, contenders)
            done += 1
            failures = 0
            self._baseline_failure = None  # it happens, and is not why there are no more
            all_stayed = len(records) == len(self._instances.with_plain(contenders))
            if done == 1 and all_stayed:  # else it took what plain's failure took
                start = run.clock() - began - (took.slices or seconds) - took.asking  # later ones do not ask
                start = max(1.0, start)
                seconds = self._planned(records, start, done=done)[1]

    def _tell_of_failure(self, failure: TrialFailed) -> None:
        """Of the baseline's, or of a process that had not the baseline's device: the instance is lost."""
        if isinstance(failure, DeviceUnavailable):
            text = f"a process of the confirmation had no device: {failure.reason}. {failure.hint}"
        else:
            why = first_line(failure.reason) or str(failure.outcome)
            text = f"the baseline failed in a fresh process of the confirmation ({why}), which counts for nothing"
        self._run.observe(Notice(text=text))

    def _keep_so_far(self, reference: Trial, contenders: Sequence[Contender]) -> None:
        """Write down what was measured: should the run end before its confirmation does, it is there."""
        measured = self._instances.with_plain(contenders)
        so_far = [(reference, None), *((each.trial, each.failure) for each in measured)]
        for trial, failure in so_far:
            if trial.pairs or trial.slices:
                self._run.keep(ended(trial, failure, early=True), announce=False)

    def _holds_another(
        self, records: Sequence[TrialRecord], start: float, seconds: float, *, done: int
    ) -> bool:
        """Whether there is time for another instance: until there are enough, also that of a continuous run."""
        needed, plan = self._needed(records, start, seconds, done=done), self._plan
        few = done < ENOUGH_INSTANCES and not plan.soak_wanted
        if few and self._left() < needed <= plan.ends - self._run.clock():
            self._ends = plan.ends
        return self._left() >= needed

    def _needed(self, records: Sequence[TrialRecord], start: float, seconds: float, *, done: int) -> float:
        """Seconds that must be left for another instance, of fewer slices than planned where others took longer.

        Until there are enough the fewest slices will do; then one of less than half the others' would add more noise
        than it takes away.
        """
        if done >= ENOUGH_INSTANCES:
            return start + seconds / 2
        slice_length = self._expected.shortest_slice_seconds(records)
        slices = min(seconds, least_slices(len(records), slice_seconds=slice_length)) if done else 0.0
        return NEARLY * (start + slices)

    def _prepare(self, contenders: Sequence[Contender]) -> None:
        """Have the templates of all groups import, side by side: importing takes one core."""
        configurations = [self._run.baseline, *(each.trial.configuration for each in contenders)]
        for group in GROUPS:
            self._run.trials.prepare(group, configurations)
        for group in GROUPS:
            self._run.trials.await_ready(group)
        self._prepared = True

    # ------------------------------------------------------------------------------------------ planning

    def _imports(self) -> float:
        """Seconds until the templates are ready."""
        return 0.0 if self._prepared else self._plan.import_seconds

    def _fits(self, records: Sequence[TrialRecord]) -> bool:
        """Whether the time left holds the fewest instances of these finalists; with less, none is begun."""
        least = max(LEAST_INSTANCE_SECONDS / 2, 2 * self._expected.shortest_slice_seconds(records))
        return self._left() >= self._imports() + FEWEST_INSTANCES * (
            self._expected.instance_start_seconds(records) + least
        )

    def _fits_well(self, record: TrialRecord) -> bool:
        """Whether the time left holds enough instances of this finalist."""
        start = self._expected.instance_start_seconds([record])
        return self._planned([record], start)[0] >= ENOUGH_INSTANCES

    def _planned(self, records: Sequence[TrialRecord], start: float, done: int = 0) -> tuple[int, float]:
        """How many more instances of these finalists the time left holds, and seconds for the slices of each."""
        asking = 0.0 if done else self._most_asked() * (1 + len(records))
        return plan_instances(
            self._left() - self._imports() - asking,
            start=start,
            finalists=len(records),
            slice_seconds=self._expected.shortest_slice_seconds(records),
            done=done,
        )

    def _field_size(self, records: Sequence[TrialRecord]) -> int:
        """How many to confirm side by side: fewer where starting them all would leave too few instances."""
        for size in range(min(self._plan.finalists, len(records)), 1, -1):
            start = self._expected.instance_start_seconds(records[:size])
            if self._planned(records[:size], start)[0] >= INSTANCES_OF_SEVERAL:
                return size
        return 1

    def _times_whole(self, first: TrialRecord) -> float:
        """Up to which length epochs are timed whole: both sides alike, and as time allows.

        Args:
            first: The most promising finalist.
        """
        if epoch_seconds(self._run.records[0]) > LONGEST_EPOCH_SECONDS:
            return EPOCH_SECONDS
        self._expected.whole_up_to = WITH_A_STALL * LONGEST_EPOCH_SECONDS
        count, _ = self._planned([first], self._expected.instance_start_seconds([first]))
        return self._expected.whole_up_to if count >= INSTANCES_BY_EPOCHS else EPOCH_SECONDS

    def _lengthen_slices(self, first: TrialRecord) -> None:
        """Plan for long slices where either side waits for much of its time, and where that leaves enough instances.

        Args:
            first: The most promising finalist.
        """
        waiting = any(map(waits_much, (self._run.records[0], first)))
        if not waiting or first.pairing is Pairing.BRACKETED:
            return  # in a bracket slices follow on one another: there are no pauses
        start = self._expected.instance_start_seconds([first])
        available = self._left() - self._imports()
        if plan_instances(available, start=start, slice_seconds=LONG_SLICE_SECONDS)[0] >= ENOUGH_INSTANCES:
            self._expected.ask_for(LONG_SLICE_SECONDS)
            self._instances.most_wanted = LONG_SLICE_SECONDS

    def _holds_a_soak(self, first: TrialRecord) -> bool:
        """Whether the time kept for a continuous run holds the fewest turns of one; else it is the instances'."""
        both = (self._run.records[0], first)
        left = self._plan.soak - sum(self._expected.start_seconds(each) for each in both)
        spared = 1 - 1 / FEWEST_SLICES  # it runs in once a leg, not before each slice
        longest = max(
            self._expected.slice_seconds(each) - spared * self._expected.run_in_seconds(each) for each in both
        )
        return first.pairing is Pairing.BRACKETED or plan_legs(left, slice_length=longest)[0] > 0

    def _left(self) -> float:
        return max(0.0, self._ends - self._run.clock())

    def _most_asked(self) -> float:
        """Seconds that the input wait of one process may take."""
        return min(INPUT_WAIT_SECONDS, ASKED_SHARE * self._left())

    # --------------------------------------------------------------------------------------------- plain

    def _admit_plain(self, contenders: Sequence[Contender]) -> None:
        """Have float32 without XLA take turns with them, unless that leaves them too few instances."""
        if self._asked_for is None or self._instances.plain is not None or self._plain_left_out:
            return
        like_baseline = self._run.records[0].model_copy(update={"configuration": dict(self._asked_for)})
        records = [*(each.in_search for each in contenders), like_baseline]
        if any(each.pairing is Pairing.BRACKETED for each in contenders):
            self._plain_left_out = "memory does not hold everything at once"
        elif self._planned(records, self._expected.instance_start_seconds(records))[0] < ENOUGH_INSTANCES:
            self._plain_left_out = (
                f"with it, the time would not have held {ENOUGH_INSTANCES} fresh processes of each"
            )
        else:
            self._instances.plain = self._contender(like_baseline)

    def _plain_found(self) -> Plain | None:
        plain = self._instances.plain
        if plain is None:
            return Plain(left_out=self._plain_left_out) if self._asked_for else None
        assert self._reference is not None
        luck = luck_of_stalls(plain.trial, self._reference)
        ratio = instance_interval(plain.instances, unseen=luck) if plain.instances else None
        record = self._run.keep(self._record(plain, ratio))
        if plain.failure is not None:
            return Plain(
                record=record, left_out=first_line(plain.failure.reason) or str(plain.failure.outcome)
            )
        if record.speedup is None:
            return Plain(record=record, left_out="it was measured in too few fresh processes")
        return Plain(record=record, ratio=ratio)

    # ------------------------------------------------------------------------------------------- results

    def _result(self, reference: Trial, contenders: Sequence[Contender]) -> Result:
        run = self._run
        failure = self._baseline_failure
        if reference.slices or isinstance(failure, DeviceUnavailable):  # which was no fault of the baseline's
            failure = None
        baseline = run.keep(ended(reference, failure))
        confirmed = []
        for each in contenders:
            ratio = self._claim(each) if each.instances else None
            record = self._record(each, ratio)
            decided = Verdict.NO_SIGNIFICANT_GAIN if ratio is None else self._verdict(each, ratio)
            checks = self._checks(record, baseline)
            plain = self._instances.plain
            over_plain = each.over(plain)
            if not all(check.passed for check in checks) and record.outcome is Outcome.OK:
                failed = "; ".join(f"{c.name}: {c.detail}" for c in checks if not c.passed)
                record = record.model_copy(update={"outcome": Outcome.UNSTABLE, "reason": failed})
            confirmed.append(
                Confirmed(
                    configuration=each.trial.configuration,
                    ratio=ratio,
                    verdict=decided,
                    checks=checks,
                    record=run.keep(record),
                    in_search=each.in_search.speedup,
                    in_slices=self._in_slices(each) if each.instances else None,
                    soaked=each.soaked,
                    barred=each.barred,
                    templates=len(each.groups),
                    over_plain=self._over(
                        each,
                        over_plain,
                        plain.trial.configuration,
                        unseen=luck_of_stalls(each.trial, plain.trial),
                    )
                    if plain and over_plain
                    else None,
                )
            )
        self._tell_of_disturbances([each.trial for each in contenders])
        self._tell_of_stalls([each.record for each in confirmed], baseline)
        confirmed.sort(key=lambda each: each.ratio.low if each.ratio else float("-inf"), reverse=True)
        return Result(
            confirmed=tuple(confirmed),
            baseline=baseline,
            instances=max((len(each.instances) for each in contenders), default=0),
            cut_short=self._cut_short(),
            sufficient_budget=self._sufficient_budget(contenders),
            plain=self._plain_found(),
            stopped=self._instances_stopped,
        )

    def _tell_of_disturbances(self, trials: Sequence[Trial]) -> None:
        """A word where the interval is wider than it need be, because others were busy."""
        pairs = [pair for trial in trials for pair in trial.pairs]
        disturbed = sum(pair.disturbed is not None for pair in pairs)
        if disturbed > NOTABLE_SHARE * len(pairs):
            self._run.observe(
                Notice(
                    text=f"something else kept this machine busy in bursts: {disturbed} of the confirmation's "
                    f"{len(pairs)} pairs of slices were disturbed; end it, or give a larger --budget, for a "
                    "narrower interval"
                )
            )

    def _tell_of_stalls(self, finalists: Sequence[TrialRecord], baseline: TrialRecord) -> None:
        """A word where the baseline's own speed, and so every speed-up over it, hangs on how its epochs end."""
        longest = max(finalists, key=lambda each: len(each.pairs))
        stalls, epochs = stalls_of_baseline(longest, baseline)
        if stalls.share > NOTABLE_SHARE:
            self._run.observe(
                Notice(
                    text=f"{stalls.epochs} of {epochs} epochs of the baseline ended as stalls of `tf.data`'s tuning "
                    f"do, for {stalls.share:.0%} of the time. How many do changes with the machine's speed, and the "
                    "speed-up with it. "
                    "options.autotune.enabled = False on its dataset is without them (data_autotune=false), but may "
                    "be slower otherwise"
                )
            )

    def _cut_short(self) -> Shortfall:
        if self._stopped():
            return Shortfall.INTERRUPTED
        return Shortfall.BASELINE_FAILED if self._baseline_failure is not None else Shortfall.NO_TIME

    def _sufficient_budget(self, contenders: Sequence[Contender]) -> float:
        """Seconds for a run whose confirmation has time for one finalist, the most promising that did not fail."""
        sound = [each for each in contenders if each.failure is None] or contenders
        records = [sound[0].in_search]
        return budget_to_confirm(
            self._plan,
            start=self._expected.instance_start_seconds(records),
            slice_seconds=self._expected.shortest_slice_seconds(records),
        )

    def _record(self, contender: Contender, ratio: LogInterval | None) -> TrialRecord:
        trial, failure = contender.trial, contender.failure
        record = ended(trial, failure)
        # The claim's interval is the one over instances, not the one over all slices.
        return record.model_copy(update={"speedup": None if ratio is None else ratio_interval(ratio)})
