"""One instance of a confirmation: fresh processes of the baseline and of contenders, measured against one another.

Where everything fits in memory they take turns, in rounds of a slice each. Where a contender runs out of memory,
float32 without XLA is left out first; then every contender has the baseline to itself; then it is in a bracket, as
those are that the search had to measure so: baseline, contender, baseline again, never two alive.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from autotune.measure.continuous import Soaked
from autotune.study.confirmed import ended
from autotune.study.expected import Expected
from autotune.study.plan import FEWEST_ROUNDS, LEAST_INSTANCE_SECONDS
from autotune.study.run import Run, never_two_alive
from autotune.study.running import Trial
from autotune.study.side_by_side import (
    INPUT_WAIT_SECONDS,
    PATIENCE_SECONDS,
    SLICE_PATIENCE_SECONDS,
)
from autotune.study.slicing import (
    SLICE_SECONDS,
    asked_seconds,
    slice_seconds,
    slice_times,
    waits_much,
    wanted_seconds,
)
from autotune.study.waiting import GENEROUS, Deadline, TimeIsUp
from autotune.trial.live import DeviceUnavailable, TrialFailed
from autotune.trial.record import Outcome, Pairing, Slice, TrialRecord

BRACKET_ROUNDS = 3
"""Slices of the baseline on either side of a contender that runs alone, which has twice as many; fewer where time is
short."""
MOST_ASKED = 2
"""Processes of a configuration that are asked how long they wait for input: the second where the first did not tell."""


@dataclass
class Contender:
    """What is measured against the baseline.

    Args:
        trial: Its trial.
        pairing: How it is measured beside the baseline.
        in_search: What the search found of it.
        soaked: What a continuous run showed; None before, and without one.
        barred: Whether it cannot be recommended without one.
        measured: Its processes that gave pairs.
        groups: The groups of templates that those are forks of.
        failure: Why it cannot be recommended at all.
    """

    trial: Trial
    pairing: Pairing
    in_search: TrialRecord
    soaked: Soaked | None = None
    barred: bool = False
    measured: list[int] = field(default_factory=list)
    groups: set[int] = field(default_factory=set)
    failure: TrialFailed | None = None

    @property
    def instances(self) -> list[list[float]]:
        """The log-ratios of each instance that was measured."""
        log_ratios = self.trial.log_ratios_by_instance()
        return [log_ratios[number] for number in self.measured]

    def over(self, other: Contender | None) -> list[list[float]]:
        """The log-ratios of its instances to another contender, from rounds that both were in."""
        if other is None:
            return []
        log_ratios = self.trial.log_ratios_over(other.trial)
        return [log_ratios[number] for number in self.measured if number in log_ratios]

    def note_instance(self, group: int) -> None:
        """The present process, a fork of this group's, was measured; if it gave pairs, it is one more instance."""
        if self.trial.pairs and self.trial.pairs[-1].instance == self.trial.instances - 1:
            self.measured.append(self.trial.instances - 1)
            self.groups.add(group)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """A trial's failure inside is kept as this contender's; the confirmation goes on without it."""
        try:
            yield
        except TrialFailed as failure:
            self.failure = failure


_Order = list[Contender | None]
"""Who takes a slice after whom; None is the baseline."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One instance: the group of its templates, seconds for its slices, and the end that no round is to overrun."""

    group: int
    seconds: float
    ends: float

    def share(self, part: float) -> Instance:
        """The same with a part of the seconds."""
        return replace(self, seconds=part * self.seconds)


@dataclass(kw_only=True)
class Took:
    """Seconds that an instance's slices took, and the closing of processes that were asked for their input wait."""

    slices: float = 0.0
    asking: float = 0.0


class Instances:
    """Measures instances, one after another.

    Args:
        run: What all phases share.
        deadline: After it, nothing is waited for but closing figures.
        expected: What processes and slices will take; told of what slices took.
        trial_timeout: Seconds that a process may take until it is warm, or more where that is usual.

    Attributes:
        plain: Float32 without XLA where it takes turns as well: no contender, and the first to make room.
        input_wait_seconds: What measuring the input wait of one process may take.
        most_wanted: Seconds of a slice that are wanted at most, whatever its trials wait.
    """

    def __init__(self, run: Run, deadline: Deadline, expected: Expected, *, trial_timeout: float) -> None:
        self.plain: Contender | None = None
        self.input_wait_seconds = INPUT_WAIT_SECONDS
        self.most_wanted = SLICE_SECONDS
        self._run = run
        self._deadline = deadline
        self._expected = expected
        self._trial_timeout = trial_timeout
        self._times_asked: Counter[int] = Counter()
        self._in_twos = False
        self._took = Took()
        self._trained_last: Trial | None = None
        self._slices: Counter[int] = Counter()
        self._after_pauses: Counter[int] = Counter()
        self._lengths: dict[int, float] = {}

    def measure(self, reference: Trial, contenders: Sequence[Contender], instance: Instance) -> Took:
        """Fresh processes of the baseline and of each contender, measured against one another.

        A contender's failure is kept with it. If memory ran out it is cleared, and the next instance leaves more room.

        Raises:
            TrialFailed: The baseline failed.
            DeviceUnavailable: A process had not the device that the baseline had.
            TimeIsUp: The deadline leaves no time for a process or a bracket; where it ends rounds, what was measured
                stands.
        """
        self._took = Took()
        together = [each for each in contenders if each.pairing is Pairing.ALTERNATING]
        for alive_at_once in [[each] for each in together] if self._in_twos else [together]:
            if alive_at_once:
                share = instance.share(len(alive_at_once) / len(contenders))
                self._alternate(reference, self.with_plain(alive_at_once), share)
                self._make_room(alive_at_once)
        for each in contenders:
            if each.pairing is Pairing.BRACKETED and each.failure is None:
                self._bracket(reference, each, instance.share(1 / len(contenders)))
        self._blame_nobody_for_the_device(contenders)
        for each in contenders:
            self._run.measured(each.trial)
        return replace(self._took)

    def start(self, trial: Trial, group: int, stack: contextlib.ExitStack, *, usual: float) -> None:
        """A fresh process of a trial, warm.

        Args:
            trial: Which; its process so far has ended.
            group: Of the templates that it is a fork of.
            stack: Kills the process at its end.
            usual: Seconds that this takes when nothing is amiss.

        Raises:
            TrialFailed: It could not be started, or did not become warm.
            TimeIsUp: The deadline leaves no time for it, or has passed.
        """
        run = self._run
        began = run.clock()
        at_most = max(self._trial_timeout, GENEROUS * usual) + SLICE_PATIENCE_SECONDS
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
            warm = live.warm_up(timeout)
            run.refuse_other_devices(warm.started.gpus)
            trial.note_warm(warm)
        self._trained_last = trial
        trial.seconds += run.clock() - began

    def close(self, trial: Trial) -> None:
        """Take the closing figures; what was measured stands when they do not come.

        How long it waits for input is asked of one process only: of each, it would take a tenth of the time and more.
        """
        if trial.live is not None:
            ask, began = self._is_to_ask(trial), self._run.clock()
            asked = self.input_wait_seconds if ask else 0.0
            self._times_asked[trial.number] += ask
            with contextlib.suppress(TrialFailed):
                trial.note_closing(trial.live.finish(asked, self._deadline.closing(PATIENCE_SECONDS)))
            self._took.asking += self._run.clock() - began if ask else 0.0
            trial.live = None

    def asking(self, reference: Trial, contenders: Sequence[Contender]) -> float:
        """Seconds that the input wait of those who were not asked yet will take."""
        beside = (each.trial for each in self.with_plain(contenders))
        return self.input_wait_seconds * sum(self._is_to_ask(each) for each in (reference, *beside))

    def with_plain(self, contenders: Sequence[Contender]) -> Sequence[Contender]:
        """These, and float32 without XLA where it takes turns with them: last, so that it starts beside the others."""
        plain = self.plain
        return contenders if plain is None or plain.failure is not None else [*contenders, plain]

    def share_after_pauses(self, trial: Trial) -> float:
        """Share of a trial's slices before which another one has trained, so that there was a pause."""
        slices = self._slices[trial.number]
        return self._after_pauses[trial.number] / slices if slices else 1.0

    def slice_length(self, trial: Trial) -> float:
        """Seconds that a trial's slices were asked to have at last."""
        return self._lengths[trial.number]

    def make_room(self, contenders: Sequence[Contender]) -> bool:
        """Have fewer alive at once from now on, because the baseline ran out of memory beside these.

        Returns:
            False where none was alive beside it.
        """
        together = [each for each in contenders if each.pairing is Pairing.ALTERNATING]
        if not together or self.spare_plain():
            return bool(together)
        if len(together) > 1 and not self._in_twos:
            self._in_twos = True
        else:
            for each in together:
                each.pairing = each.trial.pairing = Pairing.BRACKETED
        return True

    def spare_plain(self) -> bool:
        """Measure float32 without XLA no more, because others ran out of memory; False where it was not measured."""
        if self.plain is None or self.plain.failure is not None:
            return False
        self.plain.failure = TrialFailed(Outcome.OOM, "memory does not hold everything at once")
        return True

    def _alternate(self, reference: Trial, contenders: Sequence[Contender], instance: Instance) -> None:
        with contextlib.ExitStack() as stack:
            usual = self._expected.start_seconds(self._expected.baseline)
            with never_two_alive():
                self.start(reference, instance.group, stack, usual=usual)
            for each in contenders:
                with each.failing():
                    usual = self._expected.start_seconds(each.in_search)
                    self.start(each.trial, instance.group, stack, usual=usual)
            alive = [each for each in contenders if each.failure is None]
            if alive:
                self._take_turns(reference, alive, instance)
            for trial in (reference, *(each.trial for each in alive if each.failure is None)):
                self.close(trial)

    def _blame_nobody_for_the_device(self, contenders: Sequence[Contender]) -> None:
        """Where a process had not the device that the baseline had, the instance has failed, not a contender."""
        plain = [] if self.plain is None else [self.plain]
        lost = [each for each in (*contenders, *plain) if isinstance(each.failure, DeviceUnavailable)]
        failures = [each.failure for each in lost if each.failure is not None]
        for each in lost:
            each.failure = None
        if failures:
            raise failures[0]

    def _make_room(self, contenders: Sequence[Contender]) -> None:
        """A contender that ran out of memory beside others gets another chance with fewer alive at once."""
        out = [each for each in contenders if each.failure and each.failure.outcome is Outcome.OOM]
        spared = bool(out) and self.spare_plain()
        for each in out:
            each.failure = None
            if spared:
                continue
            if len(contenders) > 1:
                self._in_twos = True
            else:
                each.pairing = each.trial.pairing = Pairing.BRACKETED

    def _take_turns(self, reference: Trial, contenders: Sequence[Contender], instance: Instance) -> None:
        run, seconds = self._run, instance.seconds
        assert reference.warm is not None
        warm = [each.trial.warm for each in contenders if each.trial.warm is not None]
        # With little time there are fewer rounds, not slices too short to be trusted: instances count alike.
        wanted = self._wanted_seconds(reference, contenders)
        length = slice_seconds(
            reference.warm, *warm, measured=max(seconds, LEAST_INSTANCE_SECONDS), wanted=wanted
        )
        began, rounds = run.clock(), 0
        order: _Order = []
        while True:
            alive = [each for each in contenders if each.failure is None]
            if all(each is self.plain for each in alive):
                break
            one_round = (run.clock() - began) / rounds if rounds else 0.0
            over = run.clock() + one_round > instance.ends
            longer = one_round * max(each.trial.repeats() for each in alive)
            spent = run.clock() - began + one_round
            if rounds and (over or (rounds >= FEWEST_ROUNDS and spent > seconds + longer)):
                break
            order = self._next_order(order, alive, turned=rounds % 2 == 1)
            try:
                self._one_round(reference, order, length)
            except TimeIsUp:
                break
            rounds += 1
        took = run.clock() - began
        self._took.slices += took
        if rounds:
            self._expected.note_slice(took / rounds / (1 + len(contenders)))
        for each in contenders:
            each.note_instance(instance.group)

    def _wanted_seconds(self, reference: Trial, contenders: Sequence[Contender]) -> float:
        """Seconds of a slice that suit them, by their closing figures, or by what is known of them beforehand.

        A search trial's input wait is, where it is long: it was measured so briefly that a wait may not have shown.
        """
        unknown = {"input_wait_fraction": None}
        seen = [(reference, self._run.records[0])]
        seen += [
            (each.trial, found if waits_much(found) else found.model_copy(update=unknown))
            for each, found in ((each, each.in_search) for each in contenders)
        ]
        wanted = wanted_seconds(
            *(before if trial.finished is None else ended(trial, None) for trial, before in seen)
        )
        return min(self.most_wanted, wanted)

    def _next_order(self, last: _Order, alive: Sequence[Contender], *, turned: bool) -> _Order:
        """The order of a round: drawn, or the last one's turned round, of those that are still there."""
        if turned:
            return [each for each in reversed(last) if each is None or each.failure is None]
        return self._run.rng.sample([None, *alive], 1 + len(alive))

    def _one_round(self, reference: Trial, order: _Order, length: float) -> None:
        """Everyone once; each contender is set against the baseline's slice of the round."""
        alive = [each for each in order if each is not None]
        own: dict[int, Slice] = {}
        baseline: Slice | None = None
        for each in order:
            if each is None:
                baseline = self._slice(reference, length)
                continue
            with each.failing():
                own[each.trial.number] = self._slice(each.trial, length)
        assert baseline is not None and reference.warm is not None
        reference.add_slices([baseline])
        before_baseline = order[: order.index(None)]
        for each in alive:
            if each.trial.number in own:
                each.trial.add_pair(
                    baseline_first=each not in before_baseline,
                    baseline=baseline,
                    candidate=own[each.trial.number],
                    reference=reference.warm,
                )

    def _bracket(self, reference: Trial, contender: Contender, instance: Instance) -> None:
        """Baseline, contender, baseline again, each in a process of its own, never two alive."""
        trial = contender.trial
        shortest = self._expected.shortest_slice_seconds([contender.in_search])
        taken = max(instance.seconds / (4 * BRACKET_ROUNDS), shortest)
        rounds = max(1, min(BRACKET_ROUNDS, int(instance.seconds / (4 * taken))))
        usual = self._expected.start_seconds(self._expected.baseline)
        own_usual = self._expected.start_seconds(contender.in_search)
        before = self._alone(reference, instance.group, rounds, taken, usual)
        reference.add_slices(before)
        with contender.failing():
            own = self._alone(trial, instance.group, 2 * rounds, taken, own_usual)
        if contender.failure is not None:
            return
        after = self._alone(reference, instance.group, rounds, taken, usual)
        reference.add_slices(after)
        assert reference.warm is not None
        for index, candidate in enumerate(own):
            trial.add_pair(
                baseline_first=index % 2 == 0,
                baseline=(before, after)[index % 2][index // 2],
                candidate=candidate,
                reference=reference.warm,
            )
        contender.note_instance(instance.group)

    def _alone(self, trial: Trial, group: int, count: int, taken: float, usual: float) -> list[Slice]:
        with never_two_alive(), contextlib.ExitStack() as stack:
            self.start(trial, group, stack, usual=usual)
            assert trial.warm is not None and trial.live is not None
            length = max(asked_seconds(taken, trial.warm), slice_seconds(trial.warm, measured=0.0))
            began = self._run.clock()
            slices = [self._slice(trial, length) for _ in range(count)]
            self._took.slices += self._run.clock() - began
            self.close(trial)
        return slices

    def _slice(self, trial: Trial, length: float) -> Slice:
        assert trial.live is not None
        began = self._run.clock()
        self._lengths[trial.number] = length
        usual, beyond = slice_times(length, trial.warm)
        at_most = 3 * length + PATIENCE_SECONDS
        try:
            with self._deadline.wait(usual, at_most=at_most, beyond=beyond) as timeout:
                taken = self._run.stamped(trial.live.measure(length, timeout))
            self._slices[trial.number] += 1
            self._after_pauses[trial.number] += self._trained_last is not trial
            self._trained_last = trial
            return taken
        except TimeIsUp as over:
            if over.begun:
                trial.live = None
            raise
        finally:
            trial.seconds += self._run.clock() - began

    def _is_to_ask(self, trial: Trial) -> bool:
        """Whether its input wait is not known; what did not answer twice is not asked again."""
        known = trial.finished is not None and trial.finished.input_wait_fraction is not None
        return not known and self._times_asked[trial.number] < MOST_ASKED
