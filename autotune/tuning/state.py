"""The state of a run at a moment, as the loop weighs it. Frozen values; nothing here measures or waits.

Ratios are logarithms of speed-ups over the baseline, times are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from autotune.data.figures import LogInterval
from autotune.data.options import MIN_GAIN
from autotune.data.record import InterimAnalysis, Standing
from autotune.space.configuration import Configuration
from autotune.stats.intervals import ProcessPrior, Spread, t_quantile
from autotune.stats.same_loss import USUAL_OVER_CRITICAL, log_examples

PROCESS_DEVIATION = 0.02  # log deviation between processes that is allowed for where few were measured
EXCLUDED_GAIN = 0.10  # excluded for `no_significant_gain`, or `min_gain` where that is larger
BY_ERRORS = 1.5  # standard errors above what counts: the best of many looks faster by chance
MIN_LEAD_OVER_BEST = 0.03  # how much faster than the best leader, as a logarithm, a candidate must look
MOST_LOOKS = 8  # at one candidate, that are kept time for
NO_SPREAD = Spread(deviation=0.0, degrees=0)
USUAL_PRIOR = ProcessPrior(deviation=0.04, degrees=8)
UNDECIDED = (Standing.NOT_SHOWN, Standing.OUT_OF_TIME)  # of leaders that were looked at, and may have a gain
EXCLUSION_ERROR = 0.05  # the chance to err in saying that no candidate gains more than a bound


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration that was tried in the search."""

    number: int
    configuration: Configuration
    ratio: float = -math.inf  # the estimate; minus infinity where nothing was measured
    pairs: int = 0  # pairs of slices that the estimate rests on
    processes: int = 1  # fresh processes that they are from
    pruned: bool = False  # whether it was given up because it surely does not win
    unstable: bool = False
    look_seconds: float = 1.0  # what another look at it takes
    pair_seconds: float = 1.0  # what a fresh pair of processes of it and the baseline takes
    unchecked: bool = False  # it computes otherwise than the baseline, and its losses were not compared
    uncheckable: bool = False  # they were compared, and that could not tell
    was_confirmed: bool = False  # in an earlier run, or on another machine
    led_over: int = 0  # candidates of an earlier run that it was confirmed ahead of, on this kind of machine
    batch_ratio: float = 1.0  # examples per update over the baseline's; 1 too where samples per second are the aim
    learning_seconds: float = 0.0  # what comparing its learning with the baseline's takes; 0 if that is known
    least_learning_seconds: float = 0.0  # the same with the fewest and shortest trainings; infinite if none can be

    @property
    def is_same_training(self) -> bool:
        """Return whether the batches are the baseline's."""
        return self.batch_ratio == 1

    @property
    def measured(self) -> bool:
        """Return whether there is an estimate."""
        return self.pairs > 0

    def error(self, spread: Spread) -> float:
        """Standard error of the estimate."""
        return math.sqrt(spread.deviation**2 / max(1, self.pairs) + PROCESS_DEVIATION**2 / self.processes)


@dataclass(frozen=True, kw_only=True)
class Leader:
    """A candidate that is, or was, confirmed."""

    number: int  # its trial in the confirmation
    candidate: int  # its trial in the search
    looks: InterimAnalysis  # the error that its confirmation may spend
    processes: int  # fresh processes a side so far
    ratio: LogInterval | None  # the claim so far, at the level of its looks; None before the second process
    pair_seconds: float = 1.0  # what the next fresh pair takes
    least_pair_seconds: float = 1.0  # what one takes that has few slices, because the time is short
    batch_ratio: float = 1.0  # as a candidate's
    unmeasured_changes: tuple[str, ...] = ()  # that may be left out of it to see what they give, and were not yet
    ablation_seconds: float = 1.0  # what leaving one of them out takes
    learning_untested: bool = False  # it trains other batches than the baseline, and its learning was not compared yet
    learning_seconds_needed: float = 0.0  # seconds that comparing it needs, where those kept for it were too few
    same_loss: LogInterval | None = None  # the logarithm of the same-loss speed-up; None where it was not measured

    @property
    def standing(self) -> Standing:
        """The standing of its confirmation."""
        return self.looks.standing

    @property
    def is_same_training(self) -> bool:
        """Return whether the batches are the baseline's."""
        return self.batch_ratio == 1


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a run at a moment."""

    left: float
    budget: float  # seconds for everything
    keeps_budget: bool = True  # the budget was asked for: the search continues after a claim until it is used
    candidates: tuple[Candidate, ...] = ()
    leaders: tuple[Leader, ...] = ()  # in order, open or closed
    spread: Spread = NO_SPREAD  # how far single pairs lie from their trial's mean
    candidate_seconds: float = 1.0
    first_pair_seconds: float = 1.0  # what a fresh pair takes of a candidate that nothing is known of
    more_candidates: bool = True  # whether there is another one to try, and it is allowed
    exhausted: bool = False  # whether the search space has no other one
    all_tried: bool = False  # whether each change that can act was tried by itself, or is ruled out
    check_seconds: float = 0.0  # remaining time for comparing losses
    learning_seconds: float = 0.0  # the same for comparing how leaders with another batch size learn
    ablation_seconds: float = 0.0  # remaining time for leaving changes out of the recommendation
    over_critical: float = USUAL_OVER_CRITICAL  # the baseline's batch size over the critical one, as far as is known
    prior: ProcessPrior = USUAL_PRIOR  # how far a fresh pair of processes may lie from its mean
    busy: frozenset[int] = frozenset()  # trials that are being measured on other seats
    compares_losses: bool = False  # whether another seat does, or compares how a leader learns
    confirms_at_once: int = 1  # leaders that may be confirmed at the same time, on different seats
    min_gain: float = MIN_GAIN
    interrupted: bool = False

    @cached_property
    def open_leaders(self) -> list[Leader]:
        """The leaders whose confirmations are open."""
        return [leader for leader in self.leaders if leader.standing is Standing.OPEN]

    @cached_property
    def next_open_leader(self) -> Leader | None:
        """The first open leader that is not being measured now; the first one if all are."""
        idle = [leader for leader in self.open_leaders if leader.number not in self.busy]
        return next(iter(idle or self.open_leaders), None)

    @cached_property
    def best_leaders(self) -> dict[float, Leader]:
        """The leaders that were confirmed, the last one of each batch ratio: it has beaten the others of it."""
        return {leader.batch_ratio: leader for leader in self.leaders if leader.standing is Standing.CONFIRMED}

    @cached_property
    def same_training(self) -> Leader | None:
        """The confirmed leader of the same batches."""
        return self.best_leaders.get(1.0)

    @cached_property
    def larger_batch(self) -> Leader | None:
        """The confirmed leader with another batch size that reaches the same losses soonest, as far as is known."""
        others = [leader for leader in self.best_leaders.values() if not leader.is_same_training]
        return max(
            others, key=lambda leader: (leader.same_loss is not None, self.equal_loss_gain(leader)), default=None
        )

    @cached_property
    def recommended(self) -> Leader | None:
        """The leader that is recommended if the run ends now.

        The same training, unless another batch size was shown to reach the same losses sooner than the baseline and
        than the same training. Known numerics come before speed.
        """
        same, larger = self.same_training, self.larger_batch
        if larger is None or larger.same_loss is None or larger.same_loss.low <= 0:
            return same
        if larger.same_loss.value < math.log1p(self.min_gain):
            return same
        if same is None or same.ratio is None:
            return larger
        known, larger_known = (self.has_known_numerics(self.candidate(leader.candidate)) for leader in (same, larger))
        if known != larger_known:
            return same if known else larger
        lead = larger.same_loss.value - same.ratio.value
        return larger if lead > math.hypot(larger.same_loss.half_width, same.ratio.half_width) else same

    @cached_property
    def best_leader(self) -> Leader | None:
        """The leader that is recommended, or will be if its learning bears it out."""
        larger = self.larger_batch
        if self.recommended is None and larger is not None and larger.learning_untested and self.learning_seconds > 0:
            return larger
        return self.recommended

    def more_examples(self, batch_ratio: float) -> float:
        """Return the logarithm of the examples that a larger batch should need to a loss, over the baseline's."""
        return log_examples(max(1.0, batch_ratio), self.over_critical)

    def equal_loss_gain(self, leader: Leader) -> float:
        """Return the logarithm of a confirmed leader's speed-up to the same loss: measured, or as it should be."""
        if leader.same_loss is not None:
            return leader.same_loss.value
        return (0.0 if leader.ratio is None else leader.ratio.value) - self.more_examples(leader.batch_ratio)

    @cached_property
    def leaders_by_candidate(self) -> dict[int, Leader]:
        """The leaders by the numbers of their trials in the search; the last one of each."""
        return {leader.candidate: leader for leader in self.leaders}

    @property
    def bound(self) -> float:
        """The gain that must be excluded for `no_significant_gain`, as a logarithm."""
        return math.log1p(max(self.min_gain, EXCLUDED_GAIN))

    def has_known_numerics(self, candidate: Candidate) -> bool:
        """Return whether it computes as the baseline does, or was or may be compared with float32."""
        return not candidate.uncheckable and not (candidate.unchecked and self.check_seconds <= 0)

    def leader_to_beat(self, candidate: Candidate) -> Leader | None:
        """Return the confirmed leader of the same batch size that a candidate must beat.

        One of known numerics need not beat one whose are not.
        """
        best_leader = self.best_leaders.get(candidate.batch_ratio)
        if best_leader is None or self.has_known_numerics(self.candidate(best_leader.candidate)):
            return best_leader
        return None if self.has_known_numerics(candidate) else best_leader

    def candidate(self, number: int) -> Candidate:
        """Return the candidate with this number."""
        return next(candidate for candidate in self.candidates if candidate.number == number)

    def gain_upper_bound(self, candidate: Candidate) -> float:
        """Return the gain excluded for a candidate, as a logarithm; `EXCLUSION_ERROR` is for all together."""
        leader = self.leaders_by_candidate.get(candidate.number)
        if leader is not None and leader.ratio is not None and leader.standing in UNDECIDED:
            return leader.ratio.high
        if not candidate.measured:
            return -math.inf  # it cannot be run
        measured = sum(known.measured for known in self.candidates)
        degrees = max(1, self.spread.degrees)
        return candidate.ratio + t_quantile(1 - 2 * EXCLUSION_ERROR / measured, degrees) * candidate.error(self.spread)

    @cached_property
    def stable(self) -> list[Candidate]:
        """The candidates that were measured, and failed no check in the search or in fresh processes."""
        broken = {
            number for number, leader in self.leaders_by_candidate.items() if leader.standing is Standing.UNSTABLE
        }
        sound = [known for known in self.candidates if known.measured and not known.unstable]
        return [known for known in sound if known.number not in broken]

    def equal_loss_upper_bound(self, candidate: Candidate) -> float:
        """Return the upper bound of the gain to equal loss, as a logarithm."""
        return self.gain_upper_bound(candidate) - self.more_examples(candidate.batch_ratio)

    @cached_property
    def likely_leaders(self) -> list[Candidate]:
        """The candidates that may be confirmed: faster by more than chance; the most promising first.

        Those whose numerics cannot be compared with float32 come last. They never replace a leader of known numerics.
        """
        # They must look clearly faster than the best leader of their batch size was shown to be. One of another batch
        # size than a confirmed leader's must also look sooner at the same loss.
        errors = BY_ERRORS if self.more_candidates else 1.0
        best_leaders = self.best_leaders.values()

        def threshold(candidate: Candidate) -> float:
            least, best = math.log1p(self.min_gain), self.leader_to_beat(candidate)
            if best is not None and best.ratio is not None:
                least = max(least, best.ratio.value + MIN_LEAD_OVER_BEST)
            if candidate.is_same_training:
                return least
            other_batches = [
                self.equal_loss_gain(leader) for leader in best_leaders if leader.batch_ratio != candidate.batch_ratio
            ]
            return max([least, *(worth + self.more_examples(candidate.batch_ratio) for worth in other_batches)])

        def needs_known(candidate: Candidate) -> bool:
            best = self.best_leaders.get(candidate.batch_ratio)
            return best is not None and self.has_known_numerics(self.candidate(best.candidate))

        judged = {
            number
            for number, leader in self.leaders_by_candidate.items()
            if leader.standing is not Standing.OUT_OF_TIME
        }
        able = [
            candidate
            for candidate in self.stable
            if not candidate.pruned
            and candidate.number not in self.busy
            and candidate.number not in judged
            and candidate.ratio - errors * candidate.error(self.spread) > threshold(candidate)
            and (self.has_known_numerics(candidate) or not needs_known(candidate))
        ]

        def rank(candidate: Candidate) -> tuple[bool, bool, float]:
            can_be_recommended = candidate.is_same_training or self.learning_seconds > 0
            return self.has_known_numerics(candidate), can_be_recommended, self.min_equal_loss_gain(candidate)

        return sorted(able, key=rank, reverse=True)

    def min_equal_loss_gain(self, candidate: Candidate) -> float:
        """Return the logarithm of the speed-up to the same loss that a candidate should at least have."""
        return candidate.ratio - self.more_examples(candidate.batch_ratio) - candidate.error(self.spread)

    @cached_property
    def unclear(self) -> list[Candidate]:
        """The candidates of the same training of which a gain above the bound is not excluded."""
        known = {*self.leaders_by_candidate, *self.busy}
        return [found for found in self.doubtful(self.bound) if found.is_same_training and found.number not in known]

    def doubtful(self, bound: float) -> list[Candidate]:
        """Return the candidates that may gain more than a bound to the same loss; the most doubtful first."""
        return sorted(
            (known for known in self.stable if self.equal_loss_upper_bound(known) >= bound),
            key=self.equal_loss_upper_bound,
            reverse=True,
        )

    def looks_to_exclude(self, candidate: Candidate, bound: float) -> int:
        """Return after how many looks again a gain above a bound should be excluded; at most `MOST_LOOKS`."""
        # One that looked slower than the baseline is taken to be as fast: it looked so by chance.
        of_process = max(1, candidate.pairs // candidate.processes)
        quantile = (self.gain_upper_bound(candidate) - candidate.ratio) / candidate.error(self.spread)
        needed = self.more_examples(candidate.batch_ratio)
        for looks in range(MOST_LOOKS):
            more = replace(candidate, pairs=candidate.pairs + looks * of_process, processes=candidate.processes + looks)
            if max(0.0, candidate.ratio - needed) + quantile * more.error(self.spread) < bound:
                return looks
        return MOST_LOOKS

    @cached_property
    def inconclusive(self) -> list[Leader]:
        """The leaders that were not shown to be faster, and of which a gain above the bound is not excluded."""
        return [
            leader
            for leader in self.leaders_by_candidate.values()
            if leader.standing in UNDECIDED
            and leader.is_same_training
            and (leader.ratio is None or leader.ratio.high >= self.bound)
            and not self.candidate(leader.candidate).unstable
        ]

    @cached_property
    def since_best(self) -> int:
        """The number of candidates tried since the fastest so far, of the same training or of another batch size."""
        latest = -1
        for same in (True, False):
            sound = [candidate for candidate in self.stable if candidate.is_same_training is same]
            if sound:
                latest = max(latest, self.candidates.index(max(sound, key=self.min_equal_loss_gain)))
        return len(self.candidates) - 1 - latest

    @property
    def next_leader(self) -> int:
        """The number of the leader that is confirmed next: each one gets a smaller error."""
        return 1 + max((known.looks.leader for known in self.leaders), default=0)
