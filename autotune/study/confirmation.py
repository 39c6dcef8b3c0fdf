"""The confirmation: finalists against the baseline again, in fresh processes of freshly started templates.

The search's winner owes part of its lead to luck, so nothing of the search enters the claim. Each *instance* is a
fresh process of the baseline and of every finalist; they take turns in short slices, in a balanced
random order. How many instances there are follows from the time alone, so no look at the results can stop it early,
or make it go on. What would win then trains continuously beside the baseline (`study/soak.py`).

Where the baseline is not *plain* (float32 without XLA), that takes turns in the same rounds, as a second thing to be
held against. It is no contender, and makes way for them wherever time or memory is short.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autotune.measure.continuous import FEWEST_SLICES, Soaked
from autotune.measure.deciding import Shortfall, Verdict, verdict
from autotune.measure.disturbance import NOTABLE_SHARE
from autotune.measure.intervals import LogInterval, instance_interval
from autotune.measure.stability import Check
from autotune.printable import first_line
from autotune.space.configuration import Configuration
from autotune.study.confirmed import Confirmed, Limits, Plain, Result, checks_of, ended
from autotune.study.expected import Expected, epoch_seconds
from autotune.study.plan import (
    ENOUGH_INSTANCES,
    FEWEST_INSTANCES,
    FEWEST_ROUNDS,
    LEAST_INSTANCE_SECONDS,
    MOST_INSTANCES,
    OVERRUN_SHARE,
    Plan,
    budget_to_confirm,
    plan_instances,
)
from autotune.study.progress import Notice, PhaseBegan
from autotune.study.run import Run
from autotune.study.running import Trial, ratio_interval
from autotune.study.side_by_side import (
    INPUT_WAIT_SECONDS,
    PATIENCE_SECONDS,
    SLICE_PATIENCE_SECONDS,
)
from autotune.study.slicing import SLICE_SECONDS, asked_seconds, slice_seconds, taken_seconds, wanted_seconds
from autotune.study.soak import Soak, plan_legs
from autotune.study.waiting import GENEROUS, Deadline, TimeIsUp
from autotune.trial.live import TrialFailed
from autotune.trial.messages import EPOCH_SECONDS
from autotune.trial.record import Outcome, Pairing, Phase, Slice, TrialRecord

GROUPS = (1, 2)
"""Template groups that the instances come from in turn; the search's is 0."""
BRACKET_ROUNDS = 3
MOST_ASKED = 2
"""Processes of a configuration that are asked how long they wait for input: the second where the first did not tell."""
ASKED_SHARE = 0.02
"""Of the confirmation's time: for the input wait of each configuration, at most."""
LONGEST_EPOCH_SECONDS = 2.5
"""The baseline's epoch by the search: up to there all are timed whole, where that leaves enough instances. An epoch's
end may stall for as long as the epoch takes, which steps do not show."""
WITH_A_STALL = 2.0
"""Times as long an epoch may take that ends in a stall; it is timed whole all the same."""
INSTANCES_BY_EPOCHS = 3
"""Fresh processes of one finalist that there must be time for, to have longer epochs timed whole."""
FIRST_SOAK_SHARE = 0.6
"""Of the soak's time, for the first of several that could win: the rest is for the next, should that be refuted."""


@dataclass
class _Contender:
    """A finalist while it is confirmed; `wanted` are the seconds that its slices were to have at last."""

    trial: Trial
    pairing: Pairing
    in_search: TrialRecord
    soaked: Soaked | None = None
    barred: bool = False
    wanted: float = SLICE_SECONDS
    measured: list[int] = field(default_factory=list)
    failure: TrialFailed | None = None

    @property
    def instances(self) -> list[list[float]]:
        """The log-ratios of each instance that was measured."""
        log_ratios = self.trial.log_ratios_by_instance()
        return [log_ratios[number] for number in self.measured]

    def over(self, other: _Contender | None) -> list[list[float]]:
        """The log-ratios of its instances to another contender, from rounds that both were in."""
        return [] if other is None else self.trial.log_ratios_over(other.trial)

    def note_instance(self) -> None:
        """The present process was measured; if it gave pairs, it is one more instance."""
        if self.trial.pairs and self.trial.pairs[-1].instance == self.trial.instances - 1:
            self.measured.append(self.trial.instances - 1)


@dataclass(frozen=True, kw_only=True)
class _Instance:
    """One instance: the group of its templates, seconds for its slices, and when it must leave room for others."""

    group: int
    seconds: float
    ends: float

    def share(self, part: float) -> _Instance:
        """The same with a part of the seconds."""
        return replace(self, seconds=part * self.seconds)


class Confirmer:
    """Confirms finalists.

    Args:
        run: What all phases share.
        plan: When to end.
        limits: Memory limits.
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
        self._limits = limits
        self._min_gain = min_gain
        self._numerics = numerics or {}
        self._asked_for = plain if plain != run.baseline else None
        self._plain: _Contender | None = None
        self._plain_left_out = ""
        self._deadline = Deadline(clock=run.clock, at=plan.ends + OVERRUN_SHARE * plan.budget)
        self._ends = plan.ends - plan.soak
        self._expected = Expected(run.records[0], slice_seconds=plan.slice_seconds)
        self._prepared = False
        self._times_asked: Counter[int] = Counter()
        self._asking_took = 0.0
        self._turns_took = 0.0
        self._asked_seconds = INPUT_WAIT_SECONDS
        self._in_twos = False
        self._comparisons = 1
        self._pauses_deceive = False
        self._interruptions_before = run.interruptions()
        self._baseline_failure: TrialFailed | None = None

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
        reference = run.new_trial(Phase.CONFIRM, run.baseline)
        self._expected.whole_up_to = self._times_whole(finalists[0])
        if not any(self._fits([each]) for each in finalists) or not self._holds_a_soak(finalists[0]):
            self._ends = plan.ends  # rather a claim without a continuous run than none
        waiting = sorted(finalists, key=lambda each: not self._fits([each]))  # those that time allows, first
        entered: list[_Contender] = []
        field_size = self._field_size(waiting)
        while waiting:
            records, waiting = waiting[:field_size], waiting[field_size:]
            contenders = [self._contender(each) for each in records]
            entered += contenders
            self._comparisons = len(entered)
            self._run_instances(reference, contenders)
            self._soak(reference, contenders)
            if any(self._may_win(each, reference) for each in contenders) or self._stopped():
                break
            if not self._fits(waiting[:1]):
                break
            if waiting:
                run.observe(
                    Notice(
                        text="the finalist failed or broke a rule in its confirmation; the next one takes its place"
                    )
                )
            field_size = 1
        return self._result(reference, entered)

    def _may_win(self, contender: _Contender, reference: Trial) -> bool:
        """Whether it ran, and passes every rule by what was measured of it so far; how fast it was is not asked."""
        if contender.failure is not None:
            return False
        record, baseline = ended(contender.trial, None), ended(reference, None)
        return all(check.passed for check in self._checks(record, baseline))

    def _soak(self, reference: Trial, contenders: Sequence[_Contender]) -> None:
        """A continuous run of what would be recommended now, beside the baseline, in the time that was kept for it.

        Where that takes its claim away, the next has one in the rest of the time. What has none then cannot be
        recommended: pauses may have made it look fast as well.
        """
        kept, self._ends = self._plan.ends - self._ends, self._plan.ends
        winners = [each for each in contenders if self._would_win(each, reference)]
        winners.sort(key=lambda each: self._claim(each).low, reverse=True)
        if kept and winners and not self._stopped():
            self._run.observe(
                PhaseBegan(phase=Phase.CONFIRM, ends=self._ends, detail="a continuous run of the winner")
            )
            for each in winners:
                spare = (1 - FIRST_SOAK_SHARE) * kept if each is winners[0] is not winners[-1] else 0.0
                self._soak_one(reference, each, ends=self._ends - spare)
                self._pauses_deceive = self._pauses_deceive or self._deceived(each)
                if self._would_win(each, reference):
                    break
        for each in contenders:
            each.barred = self._pauses_deceive and each.soaked is None

    def _soak_one(self, reference: Trial, contender: _Contender, *, ends: float) -> None:
        soak = Soak(
            self._run,
            self._deadline,
            start=self._start_again,
            close=self._close,
            stopped=self._stopped,
            ends=ends,
            last=self._ends,
        )
        with self._failing(contender):
            contender.soaked = soak.soak(
                reference,
                contender.trial,
                together=contender.pairing is Pairing.ALTERNATING,
                wanted=contender.wanted,
            )

    def _deceived(self, contender: _Contender) -> bool:
        """Whether pauses surely made it look faster than it is."""
        return contender.soaked is not None and contender.soaked.pauses.low > 0

    def _start_again(self, trial: Trial, stack: contextlib.ExitStack) -> None:
        usual = 1.0 if trial.warm is None else trial.warm.ready_seconds
        self._start(trial, GROUPS[0], stack, usual=usual)

    def _would_win(self, contender: _Contender, reference: Trial) -> bool:
        """Whether it is stable and faster by what was measured of it so far."""
        if not contender.instances or not self._may_win(contender, reference):
            return False
        return verdict(self._claim(contender), min_gain=self._min_gain) is Verdict.FASTER

    def _in_slices(self, contender: _Contender) -> LogInterval:
        return instance_interval(contender.instances, comparisons=self._comparisons)

    def _claim(self, contender: _Contender) -> LogInterval:
        """What slices say; freed of what the pauses gave, where a continuous run shows that they gave something."""
        claim, soaked = self._in_slices(contender), contender.soaked
        return soaked.without_pauses(claim) if soaked is not None and soaked.contradicts else claim

    def _checks(self, record: TrialRecord, baseline: TrialRecord) -> tuple[Check, ...]:
        """The stability rules, what the losses showed among them."""
        numerics = self._numerics.get(Configuration(record.configuration))
        return (*checks_of(record, baseline, self._limits), *([numerics] if numerics else []))

    def _run_instances(self, reference: Trial, contenders: Sequence[_Contender]) -> None:
        """As many instances as the time holds, whatever they show; none where it does not hold the fewest."""
        run = self._run
        if not self._fits([each.in_search for each in contenders]):
            self._plain_left_out = self._plain_left_out or "there was no time for a confirmation"
            return
        self._admit_plain(contenders)
        records = [each.in_search for each in self._with_plain(contenders)]
        self._prepare(contenders)  # plain is a fork of the baseline's
        start = self._expected.instance_start(records)
        seconds = self._planned(records, start)[1]
        self._asked_seconds = self._most_asked()
        done = failures = 0
        while done < MOST_INSTANCES and failures < FEWEST_INSTANCES:
            active = [each for each in contenders if each.failure is None]
            asking = self._asking(reference, active)
            if done >= FEWEST_INSTANCES:  # what has broken a rule leaves its time to the next
                active = [each for each in active if self._may_win(each, reference)]
            needed = start + seconds if done else start
            if not active or self._stopped() or self._left() < 0.8 * needed:
                return
            began, asking_before, turns_before = run.clock(), self._asking_took, self._turns_took
            instance = _Instance(
                group=GROUPS[(done + failures) % len(GROUPS)],
                seconds=seconds,
                ends=began + (self._left() - asking) / max(1, FEWEST_INSTANCES - done),
            )
            try:
                self._one_instance(reference, active, instance)
            except TimeIsUp:
                return
            except TrialFailed as failure:  # the baseline's: a failure of a contender is its own
                if failure.outcome is Outcome.OOM and self._spare_plain():
                    continue
                self._baseline_failure = failure
                failures += 1
                continue
            done += 1
            all_stayed = len(records) == len(self._with_plain(contenders))
            if done == 1 and all_stayed:  # else it took what plain's failure took
                asking_took = self._asking_took - asking_before  # which later ones do not take
                turns_took = self._turns_took - turns_before
                start = max(1.0, run.clock() - began - (turns_took or seconds) - asking_took)
                seconds = self._planned(records, start, done=done)[1]

    def _prepare(self, contenders: Sequence[_Contender]) -> None:
        """Have the templates of all groups import, side by side: importing takes one core."""
        configurations = [self._run.baseline, *(each.trial.configuration for each in contenders)]
        for group in GROUPS:
            self._run.trials.prepare(group, configurations)
        for group in GROUPS:
            self._run.trials.await_ready(group)
        self._prepared = True

    def _imports(self) -> float:
        """Seconds until the templates are ready."""
        return 0.0 if self._prepared else self._plan.import_seconds

    def _fits(self, records: Sequence[TrialRecord]) -> bool:
        """Whether the time left holds the fewest instances of these finalists; with less, none is begun."""
        least = max(LEAST_INSTANCE_SECONDS / 2, 2 * self._expected.shortest_slice(records))
        return self._left() >= self._imports() + FEWEST_INSTANCES * (
            self._expected.instance_start(records) + least
        )

    def _planned(self, records: Sequence[TrialRecord], start: float, done: int = 0) -> tuple[int, float]:
        """How many more instances of these finalists the time left holds, and seconds for the slices of each."""
        asking = 0.0 if done else self._most_asked() * (1 + len(records))
        return plan_instances(
            self._left() - self._imports() - asking,
            start=start,
            finalists=len(records),
            slice_seconds=self._expected.shortest_slice(records),
            done=done,
        )

    def _stopped(self) -> bool:
        return self._run.interruptions() > self._interruptions_before

    # ----------------------------------------------------------------------------------------- instances

    def _contender(self, record: TrialRecord) -> _Contender:
        trial = self._run.new_trial(Phase.CONFIRM, Configuration(record.configuration))
        pairing = record.pairing or Pairing.ALTERNATING
        trial.pairing = pairing
        return _Contender(trial=trial, pairing=pairing, in_search=record)

    def _field_size(self, records: Sequence[TrialRecord]) -> int:
        """How many to confirm side by side: fewer where starting them all would leave too few instances."""
        for size in range(min(self._plan.finalists, len(records)), 1, -1):
            start = self._expected.instance_start(records[:size])
            if self._planned(records[:size], start)[0] >= ENOUGH_INSTANCES:
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
        count, _ = self._planned([first], self._expected.instance_start([first]))
        return self._expected.whole_up_to if count >= INSTANCES_BY_EPOCHS else EPOCH_SECONDS

    def _holds_a_soak(self, first: TrialRecord) -> bool:
        """Whether the time kept for a continuous run holds the fewest turns of one; else it is the instances'."""
        both = (self._run.records[0], first)
        left = self._plan.soak - sum(self._expected.start(each) for each in both)
        spared = 1 - 1 / FEWEST_SLICES  # it runs in once, not before each slice
        longest = max(self._expected.slice_of(each) - spared * self._expected.run_in(each) for each in both)
        return first.pairing is Pairing.BRACKETED or plan_legs(left, slice_length=longest)[0] > 0

    def _left(self) -> float:
        return max(0.0, self._ends - self._run.clock())

    def _one_instance(self, reference: Trial, contenders: Sequence[_Contender], instance: _Instance) -> None:
        """One fresh process of the baseline and of each contender, measured against one another."""
        together = [each for each in contenders if each.pairing is Pairing.ALTERNATING]
        for alive_at_once in [[each] for each in together] if self._in_twos else [together]:
            if alive_at_once:
                share = instance.share(len(alive_at_once) / len(contenders))
                self._alternate(reference, self._with_plain(alive_at_once), share)
                self._make_room(alive_at_once)
        for each in contenders:
            if each.pairing is Pairing.BRACKETED and each.failure is None:
                self._bracket(reference, each, instance.share(1 / len(contenders)))
        for each in contenders:
            self._run.measured(each.trial)

    def _alternate(self, reference: Trial, contenders: Sequence[_Contender], instance: _Instance) -> None:
        with contextlib.ExitStack() as stack:
            usual = self._expected.start(self._run.records[0])
            self._start(reference, instance.group, stack, usual=usual)
            for each in contenders:
                with self._failing(each):
                    usual = self._expected.start(each.in_search)
                    self._start(each.trial, instance.group, stack, usual=usual)
            alive = [each for each in contenders if each.failure is None]
            if alive:
                self._take_turns(reference, alive, instance)
            for trial in (reference, *(each.trial for each in alive if each.failure is None)):
                self._close(trial)

    def _make_room(self, contenders: Sequence[_Contender]) -> None:
        """A contender that ran out of memory beside others gets another chance with fewer alive at once."""
        out = [each for each in contenders if each.failure and each.failure.outcome is Outcome.OOM]
        spared = bool(out) and self._spare_plain()
        for each in out:
            each.failure = None
            if spared:
                continue
            if len(contenders) > 1:
                self._in_twos = True
            else:
                each.pairing = each.trial.pairing = Pairing.BRACKETED

    @contextlib.contextmanager
    def _failing(self, contender: _Contender) -> Iterator[None]:
        """A failure inside is the contender's; the confirmation goes on without it."""
        try:
            yield
        except TrialFailed as failure:
            contender.failure = failure

    def _start(self, trial: Trial, group: int, stack: contextlib.ExitStack, *, usual: float) -> None:
        run = self._run
        began = run.clock()
        at_most = max(self._plan.trial_timeout, GENEROUS * usual) + SLICE_PATIENCE_SECONDS
        with self._deadline.wait(usual, at_most=at_most) as timeout:
            live = run.trials.launch(
                trial.configuration,
                log=run.log_of(trial),
                data=run.data,
                group=group,
                epoch_seconds=self._expected.whole_up_to,
            )
            stack.callback(live.kill)
            trial.live = live
            trial.instances += 1
            trial.warm = live.warm_up(timeout)
        trial.seconds += run.clock() - began

    def _take_turns(self, reference: Trial, contenders: Sequence[_Contender], instance: _Instance) -> None:
        run, seconds = self._run, instance.seconds
        assert reference.warm is not None
        warm = [each.trial.warm for each in contenders if each.trial.warm is not None]
        # With little time there are fewer rounds, not slices too short to be trusted: instances count alike.
        wanted = self._wanted_seconds(reference, contenders)
        for each in contenders:
            each.wanted = wanted
        length = slice_seconds(
            reference.warm, *warm, measured=max(seconds, LEAST_INSTANCE_SECONDS), wanted=wanted
        )
        began, rounds = run.clock(), 0
        while True:
            alive = [each for each in contenders if each.failure is None]
            if all(each is self._plain for each in alive):
                break
            one_round = (run.clock() - began) / rounds if rounds else 0.0
            over = run.clock() + one_round > min(instance.ends, self._ends)
            longer = one_round * max(each.trial.repeats() for each in alive)
            spent = run.clock() - began + one_round
            if rounds and (over or (rounds >= FEWEST_ROUNDS and spent > seconds + longer)):
                break
            try:
                self._one_round(reference, alive, length)
            except TimeIsUp:
                break
            rounds += 1
        took = run.clock() - began
        self._turns_took += took
        if rounds:
            self._expected.note_slice(took / rounds / (1 + len(contenders)))
        for each in contenders:
            each.note_instance()

    def _wanted_seconds(self, reference: Trial, contenders: Sequence[_Contender]) -> float:
        """Seconds of a slice that suit them, by their closing figures, or by what is known of them beforehand.

        A search trial's input wait is not: it was measured so briefly that a wait may not have shown.
        """
        seen = [(reference, self._run.records[0])]
        seen += [
            (each.trial, each.in_search.model_copy(update={"input_wait_fraction": None}))
            for each in contenders
        ]
        return wanted_seconds(
            *(before if trial.finished is None else ended(trial, None) for trial, before in seen)
        )

    def _one_round(self, reference: Trial, alive: Sequence[_Contender], length: float) -> None:
        """Everyone once, in random order; each contender is set against the baseline's slice of the round."""
        order: list[_Contender | None] = [None, *alive]
        self._run.rng.shuffle(order)
        own: dict[int, Slice] = {}
        baseline: Slice | None = None
        for each in order:
            if each is None:
                baseline = self._slice(reference, length)
                continue
            with self._failing(each):
                own[each.trial.number] = self._slice(each.trial, length)
        assert baseline is not None and reference.warm is not None
        reference.slices.append(baseline)
        before_baseline = order[: order.index(None)]
        for each in alive:
            if each.trial.number in own:
                each.trial.add_pair(
                    baseline_first=each not in before_baseline,
                    baseline=baseline,
                    candidate=own[each.trial.number],
                    reference=reference.warm,
                )

    def _bracket(self, reference: Trial, contender: _Contender, instance: _Instance) -> None:
        """Baseline, contender, baseline again, each in a process of its own, never two alive."""
        trial = contender.trial
        shortest = self._expected.shortest_slice([contender.in_search])
        taken = max(instance.seconds / (4 * BRACKET_ROUNDS), shortest)
        rounds = max(1, min(BRACKET_ROUNDS, int(instance.seconds / (4 * taken))))
        usual = self._expected.start(self._run.records[0])
        own_usual = self._expected.start(contender.in_search)
        before = self._alone(reference, instance.group, rounds, taken, usual)
        with self._failing(contender):
            own = self._alone(trial, instance.group, 2 * rounds, taken, own_usual)
        if contender.failure is not None:
            return
        after = self._alone(reference, instance.group, rounds, taken, usual)
        reference.slices += [*before, *after]
        assert reference.warm is not None
        for index, candidate in enumerate(own):
            trial.add_pair(
                baseline_first=index % 2 == 0,
                baseline=(before, after)[index % 2][index // 2],
                candidate=candidate,
                reference=reference.warm,
            )
        contender.note_instance()

    def _alone(self, trial: Trial, group: int, count: int, taken: float, usual: float) -> list[Slice]:
        with contextlib.ExitStack() as stack:
            self._start(trial, group, stack, usual=usual)
            assert trial.warm is not None and trial.live is not None
            length = max(asked_seconds(taken, trial.warm), slice_seconds(trial.warm, measured=0.0))
            began = self._run.clock()
            slices = [self._slice(trial, length) for _ in range(count)]
            self._turns_took += self._run.clock() - began
            self._close(trial)
        return slices

    def _slice(self, trial: Trial, length: float) -> Slice:
        assert trial.live is not None
        began = self._run.clock()
        usual = length if trial.warm is None else taken_seconds(length, trial.warm)
        try:
            with self._deadline.wait(usual, at_most=3 * length + PATIENCE_SECONDS) as timeout:
                return self._run.stamped(trial.live.measure(length, timeout))
        except TimeIsUp as over:
            if over.begun:
                trial.live = None
            raise
        finally:
            trial.seconds += self._run.clock() - began

    def _close(self, trial: Trial) -> None:
        """Take the closing figures; what was measured stands when they do not come.

        How long it waits for input is asked of one process only: of each, it would take a tenth of the time and more.
        """
        if trial.live is not None:
            ask, began = self._is_to_ask(trial), self._run.clock()
            asked = self._asked_seconds if ask else 0.0
            self._times_asked[trial.number] += ask
            with contextlib.suppress(TrialFailed):
                trial.note_closing(trial.live.finish(asked, self._deadline.closing(PATIENCE_SECONDS)))
            self._asking_took += self._run.clock() - began if ask else 0.0
            trial.live = None

    def _is_to_ask(self, trial: Trial) -> bool:
        """Whether its input wait is not known; what did not answer twice is not asked again."""
        known = trial.finished is not None and trial.finished.input_wait_fraction is not None
        return not known and self._times_asked[trial.number] < MOST_ASKED

    def _most_asked(self) -> float:
        """Seconds that the input wait of one process may take."""
        return min(INPUT_WAIT_SECONDS, ASKED_SHARE * self._left())

    def _asking(self, reference: Trial, contenders: Sequence[_Contender]) -> float:
        """Seconds that the input wait of those who were not asked yet will take."""
        beside = (each.trial for each in self._with_plain(contenders))
        return self._asked_seconds * sum(self._is_to_ask(each) for each in (reference, *beside))

    # --------------------------------------------------------------------------------------------- plain

    def _admit_plain(self, contenders: Sequence[_Contender]) -> None:
        """Have float32 without XLA take turns with them, unless that leaves them too few instances."""
        if self._asked_for is None or self._plain is not None or self._plain_left_out:
            return
        like_baseline = self._run.records[0].model_copy(update={"configuration": dict(self._asked_for)})
        records = [*(each.in_search for each in contenders), like_baseline]
        if any(each.pairing is Pairing.BRACKETED for each in contenders):
            self._plain_left_out = "memory does not hold everything at once"
        elif self._planned(records, self._expected.instance_start(records))[0] < ENOUGH_INSTANCES:
            self._plain_left_out = (
                f"with it, the time would not have held {ENOUGH_INSTANCES} fresh processes of each"
            )
        else:
            self._plain = self._contender(like_baseline)

    def _with_plain(self, contenders: Sequence[_Contender]) -> Sequence[_Contender]:
        """These, and float32 without XLA where it takes turns with them: last, so that it starts beside the others."""
        plain = self._plain
        return contenders if plain is None or plain.failure is not None else [*contenders, plain]

    def _spare_plain(self) -> bool:
        """Measure float32 without XLA no more, because others ran out of memory; False where it was not measured."""
        if self._plain is None or self._plain.failure is not None:
            return False
        self._plain.failure = TrialFailed(Outcome.OOM, "memory does not hold everything at once")
        return True

    def _plain_found(self) -> Plain | None:
        plain = self._plain
        if plain is None:
            return Plain(left_out=self._plain_left_out) if self._asked_for else None
        ratio = instance_interval(plain.instances) if plain.instances else None
        record = self._run.keep(self._record(plain, ratio))
        if plain.failure is not None:
            return Plain(
                record=record, left_out=first_line(plain.failure.reason) or str(plain.failure.outcome)
            )
        if record.speedup is None:
            return Plain(record=record, left_out="it was measured in too few fresh processes")
        return Plain(record=record, ratio=ratio)

    # ------------------------------------------------------------------------------------------- results

    def _result(self, reference: Trial, contenders: Sequence[_Contender]) -> Result:
        run = self._run
        failure = None if reference.slices else self._baseline_failure
        baseline = run.keep(ended(reference, failure))
        confirmed = []
        for each in contenders:
            ratio = self._claim(each) if each.instances else None
            record = self._record(each, ratio)
            decided = (
                Verdict.NO_SIGNIFICANT_GAIN
                if ratio is None or each.barred
                else verdict(ratio, min_gain=self._min_gain)
            )
            checks = self._checks(record, baseline)
            over_plain = each.over(self._plain)
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
                    over_plain=instance_interval(over_plain, comparisons=self._comparisons)
                    if over_plain
                    else None,
                )
            )
        self._tell_of_disturbances([each.trial for each in contenders])
        confirmed.sort(key=lambda each: each.ratio.low if each.ratio else float("-inf"), reverse=True)
        return Result(
            confirmed=tuple(confirmed),
            baseline=baseline,
            instances=max((len(each.instances) for each in contenders), default=0),
            cut_short=self._cut_short(),
            sufficient_budget=self._sufficient_budget(contenders),
            plain=self._plain_found(),
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

    def _cut_short(self) -> Shortfall:
        if self._stopped():
            return Shortfall.INTERRUPTED
        return Shortfall.BASELINE_FAILED if self._baseline_failure is not None else Shortfall.NO_TIME

    def _sufficient_budget(self, contenders: Sequence[_Contender]) -> float:
        """Seconds for a run whose confirmation has time for one finalist, the most promising that did not fail."""
        sound = [each for each in contenders if each.failure is None] or contenders
        records = [sound[0].in_search]
        return budget_to_confirm(
            self._plan,
            start=self._expected.instance_start(records),
            slice_seconds=self._expected.shortest_slice(records),
            instances=ENOUGH_INSTANCES,
        )

    def _record(self, contender: _Contender, ratio: LogInterval | None) -> TrialRecord:
        trial, failure = contender.trial, contender.failure
        record = ended(trial, failure)
        # The claim's interval is the one over instances, not the one over all slices.
        return record.model_copy(update={"speedup": None if ratio is None else ratio_interval(ratio)})
