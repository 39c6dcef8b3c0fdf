"""Decide what a run does next. Pure: `next_action` weighs another candidate against more evidence for the leader.

The claim is looked at after every fresh pair of processes. Leaders share one error budget: the k-th one gets
0.05 / (k (k + 1)), which is 0.05 for all of them together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.data.options import MIN_GAIN
from autotune.data.record import LOOK_SHARE
from autotune.stats.deciding import EndedBy, Verdict
from autotune.stats.intervals import ProcessPrior, t_quantile
from autotune.tuning.state import Candidate, Leader, State

ERROR = 0.05  # the chance that a run claims a gain that is not there
FEWEST_PROCESSES, MOST_PROCESSES = 2, 12  # a side, that a claim rests on; after the most its error is spent
MAX_CLAIM_HALF_WIDTH = 0.1  # half-width of a claim, as a logarithm, above which time that is left narrows it
MAX_WIDTH_OVER_GAIN = 0.7  # share of a leader's gain that the half-width of its interval should not exceed
LARGE_GAIN_PROCESSES = 3  # that a large gain needs at most: it is confirmed early, and improved on afterwards
LARGE_CLAIM_SHARE = 0.7  # of the budget: with so little left, a large gain is confirmed
FIRST_CLAIM_SHARE = 0.5  # of the budget: with so little left, a leader is confirmed
OTHER_CLAIM_SHARE = 0.4  # the same after a claim, for the other answer
BETTER_CLAIM_SHARE = 0.25  # the same for candidates faster than a claim
LEARNING_AGAIN_SHARE = 0.5  # of the budget at most, for comparing learning that an earlier budget did not suffice for
STALE_AFTER_CANDIDATES = 8  # candidates in a row that were no faster than the best: then it is confirmed
FEW_CANDIDATES = 4  # before so many were measured, time is kept for the shortest confirmation alone
ENOUGH_CANDIDATES = 6  # the usually best ones: then time is kept for excluding gains of all that was tried
RESERVED_PROCESSES = 4  # a side: time for so many is kept while nothing looks faster than what there is
MIN_Z_TO_CONFIRM = 3.0  # standard errors above what counts: a leader is confirmed without another look
CONFIRM_TIME_FACTOR = 1.1  # time that a confirmation may take, over the expected time
SLOWER = 1.3  # time that another candidate may take, over that of the last ones
FEWEST_CANDIDATES = 3  # without a gain, before a run says so; fewer where no more are to be tried
ENOUGH_EXCLUDED = 0.05  # of a gain, or `min_gain` if that is larger, for a run to end where each change was tried


@dataclass(frozen=True)
class TryAnother:
    """Start a new candidate."""


@dataclass(frozen=True)
class LookAgain:
    """Measure a candidate in another process."""

    candidate: int


@dataclass(frozen=True)
class CompareLosses:
    """Train a candidate for its losses, beside float32 without XLA."""

    candidate: int


@dataclass(frozen=True)
class CompareLearning:
    """Train a confirmed leader and the baseline from the same state, for the examples that both need to a loss."""

    leader: int


@dataclass(frozen=True)
class Confirm:
    """Begin a leader's confirmation."""

    candidate: int


@dataclass(frozen=True)
class FreshPair:
    """Measure fresh processes of the open leader and the baseline."""

    leader: int


@dataclass(frozen=True)
class LeaveOut:
    """Measure a confirmed leader without one of its changes."""

    leader: int
    knob: str


@dataclass(frozen=True)
class GiveUp:
    """Leave an open leader that the time will hardly show to be faster."""

    leader: int


@dataclass(frozen=True)
class Wait:
    """Wait for another seat."""


@dataclass(frozen=True)
class End:
    """The run ends."""

    by: EndedBy


Action = TryAnother | LookAgain | CompareLosses | CompareLearning | Confirm | FreshPair | LeaveOut | GiveUp | Wait | End


def next_action(state: State) -> Action:
    """Return the next action, on a free seat."""
    action = _next_action(state)
    return Wait() if isinstance(action, End) and state.busy else action


def _next_action(state: State) -> Action:
    if state.interrupted:
        return End(EndedBy.INTERRUPTED)
    if (open_leader := state.next_open_leader) is not None:
        if open_leader.number in state.busy:
            for candidate in state.likely_leaders if len(state.open_leaders) < state.confirms_at_once else ():
                if state.left >= confirmation_seconds(state, candidate) and not candidate.unchecked:
                    return Confirm(candidate.number)
            return TryAnother() if _has_time_for_another(state) else Wait()
        if _is_hopeless(state, open_leader):
            return GiveUp(open_leader.number)
        fits = state.left >= open_leader.least_pair_seconds
        return FreshPair(open_leader.number) if fits else _spend_remaining_time(state, open_leader.candidate)
    for leader in state.best_leaders.values():
        able = leader.learning_untested and leader.number not in state.busy and not state.compares_losses
        if able and state.learning_seconds > 0:
            return CompareLearning(leader.number)
    if is_settled(state):
        ended = End(EndedBy.SETTLED if state.more_candidates else EndedBy.EXHAUSTED)
        return _retry_learning_check(state) or _narrow_claim(state) or _leave_change_out(state) or ended
    if likely_leader := _next_leader(state):
        return _confirm_or_search(state, likely_leader)
    doubtful = _in_doubt(state) or {}
    if (
        doubtful
        and {*state.leaders_by_candidate, *state.busy}.isdisjoint(doubtful)
        and sum(doubtful.values()) <= state.left / 2
    ):
        return LookAgain(next(iter(doubtful)))
    if _is_stale(state):  # without a budget that is to be used, the run would end here
        again = None if state.keeps_budget else _retry_learning_check(state) or _narrow_claim(state)
        if finish := again or _leave_change_out(state):
            return finish
    is_late = state.recommended is None and state.left < FIRST_CLAIM_SHARE * state.budget
    if not (is_late and _retry_learning_check(state)) and _has_time_for_another(state, reserve=_reserve(state)):
        return TryAnother()
    if again := _retry_learning_check(state):
        return again
    if state.best_leader is None:
        for candidate in state.unclear:
            if state.left >= candidate.look_seconds:
                return LookAgain(candidate.number)
    elif narrower := _narrow_claim(state):
        return narrower
    if _has_time_for_another(state):  # there is no time to confirm it, nor for anything else
        return TryAnother()
    for leader in state.inconclusive if state.best_leader is None else ():
        if state.left >= leader.least_pair_seconds:
            return Confirm(leader.candidate)
    return _leave_change_out(state) or End(EndedBy.BUDGET)


def _retry_learning_check(state: State) -> CompareLearning | None:
    """Return the learning check of a confirmed leader that was cut short and fits into all the time that is left."""
    best = state.recommended
    for leader in () if state.compares_losses else state.best_leaders.values():
        is_worth_it = best is None or state.equal_loss_gain(leader) > state.equal_loss_gain(best)
        if (
            is_worth_it
            and 0 < _learning_seconds_needed(state, leader) <= state.left
            and leader.number not in state.busy
        ):
            return CompareLearning(leader.number)
    return None


def _learning_seconds_needed(state: State, leader: Leader) -> float:
    """Return the seconds that comparing a confirmed leader's learning needs; 0 where that is known or cannot be."""
    if leader.learning_untested:
        return state.candidate(leader.candidate).learning_seconds
    return leader.learning_seconds_needed


def _narrow_claim(state: State) -> FreshPair | None:
    """Return another pair for an answer whose claim is wide, if there is time; the recommended one's first."""
    for leader in (state.recommended, state.same_training, state.larger_batch):
        if leader is None or leader.ratio is None or leader.number in state.busy:
            continue
        is_wide = leader.ratio.half_width > MAX_CLAIM_HALF_WIDTH and leader.processes < leader.looks.most
        if is_wide and state.left >= leader.least_pair_seconds:
            return FreshPair(leader.number)
    return None


def _leave_change_out(state: State) -> LeaveOut | None:
    """Return a change to leave out of the recommended configuration, where the time for that holds it."""
    leader = state.recommended
    if leader is None or leader.number in state.busy or not leader.unmeasured_changes:
        return None
    is_unused = state.keeps_budget and not state.more_candidates  # nothing else can use the time that is left
    seconds = state.left if is_unused else min(state.left, state.ablation_seconds)
    return LeaveOut(leader.number, leader.unmeasured_changes[0]) if seconds >= leader.ablation_seconds else None


def _is_hopeless(state: State, leader: Leader) -> bool:
    """Return whether an open leader is unlikely to be shown, and there is time for something else.

    It is unlikely if all pairs that fit would not show a gain that is one standard error above its estimate.
    """
    if leader.ratio is None or leader.processes < FEWEST_PROCESSES:
        return False
    if not _has_time_for_another(state, reserve=_reserve(state)):
        return False
    confidence = leader.looks.confidence
    fits = leader.processes + int(state.left / leader.pair_seconds)
    needed = state.prior.half_width(min(fits, leader.looks.most), confidence)
    error = leader.ratio.half_width / t_quantile(confidence, state.prior.degrees + leader.processes - 1)
    return leader.ratio.value + error < needed


def is_settled(state: State) -> bool:
    """Return whether more time would change nothing, or not enough to continue unasked."""
    if _next_leader(state) is not None or state.next_open_leader is not None:
        return False
    if _in_doubt(state) == {}:
        return True
    if state.best_leader is None and (state.unclear or state.inconclusive):
        return False
    is_stale = not state.keeps_budget and _is_stale(state)
    return (is_stale or not state.more_candidates) and (state.best_leader is not None or _excluded(state))


def _is_stale(state: State) -> bool:
    """Return whether so many candidates were no faster that no more are tried unasked."""
    best_leader = state.best_leader
    led_over = 0 if best_leader is None else state.candidate(best_leader.candidate).led_over
    if not led_over:
        return state.since_best >= STALE_AFTER_CANDIDATES
    # A candidate clearly faster than the best leader would be confirmed first: there is none.
    return len(state.candidates) - 1 >= max(1, STALE_AFTER_CANDIDATES - led_over)


def _in_doubt(state: State) -> dict[int, float] | None:
    """Return candidates that may still gain enough, and the seconds of a look at each; None before all is tried."""
    if (
        not state.all_tried
        or len(state.stable) < FEWEST_CANDIDATES
        or state.best_leader is not None
        or state.inconclusive
    ):
        return None
    enough = math.log1p(max(state.min_gain, ENOUGH_EXCLUDED))
    return {
        known.number: known.look_seconds * state.looks_to_exclude(known, enough) for known in state.doubtful(enough)
    }


def _next_leader(state: State) -> Candidate | None:
    """Return the likely leader that is confirmed next; None where the time goes elsewhere.

    After a claim, only a candidate for the other answer is confirmed, or one expected to beat the recommendation in
    the time left.
    """
    best = state.recommended
    if not state.best_leaders or not state.more_candidates:
        # A larger batch without time for its learning is no answer, as long as others may be.
        others_fit = _has_time_for_another(state)
        for known in state.likely_leaders:
            if not others_fit or known.is_same_training or _shortest_confirmation(state, known) <= state.left:
                return known
        return None

    def is_worth_it(candidate: Candidate) -> bool:
        needed = processes_needed(state, candidate)
        is_sooner = best is None or state.min_equal_loss_gain(candidate) > state.equal_loss_gain(best)
        return is_sooner and needed < MOST_PROCESSES and needed * candidate.pair_seconds <= state.left

    able = [known for known in state.likely_leaders if _serves_missing_answer(state, known) or is_worth_it(known)]
    is_late = state.left < BETTER_CLAIM_SHARE * state.budget
    return min(able, key=lambda known: not is_late and not _serves_missing_answer(state, known), default=None)


def _serves_missing_answer(state: State, candidate: Candidate) -> bool:
    """Return whether a candidate would give the answer, same batch or other batch, that has no confirmed leader yet."""
    return all(known.is_same_training is not candidate.is_same_training for known in state.best_leaders.values())


def _confirm_or_search(state: State, leader: Candidate) -> Action:
    """Search on, or confirm: it is confirmed when the time left is what the confirmation needs."""
    needed = confirmation_seconds(state, leader)
    is_late = state.left < _claim_share(state, leader) * state.budget
    early = leader.was_confirmed or is_late or (state.since_best >= STALE_AFTER_CANDIDATES and state.left >= 2 * needed)
    lead = leader.ratio - math.log1p(state.min_gain)
    is_chosen = leader.was_confirmed and not is_late  # by another run, among others
    is_clear = is_chosen or leader.processes > 1 or lead >= MIN_Z_TO_CONFIRM * leader.error(state.spread)
    reserve = needed + (0.0 if is_clear else leader.look_seconds)
    larger = [known for known in state.likely_leaders if leader.is_same_training and not known.is_same_training]
    if larger and _serves_missing_answer(state, larger[0]):
        reserve += confirmation_seconds(state, larger[0])
    is_first_of_few = sum(known.measured for known in state.candidates) < FEW_CANDIDATES and state.best_leader is None
    if is_first_of_few and not leader.was_confirmed:  # a better one may need fewer processes than this one
        early, reserve = False, _shortest_confirmation(state, leader)
    if not early and _has_time_for_another(state, reserve=reserve):
        return TryAnother()
    if not is_clear and state.left >= leader.look_seconds + needed:
        return LookAgain(leader.number)
    if leader.unchecked and state.compares_losses:  # its result applies to every configuration of these numerics
        return TryAnother() if _has_time_for_another(state, reserve=needed) else Wait()
    if leader.unchecked and 0 < state.check_seconds <= state.left - leader.pair_seconds:
        return CompareLosses(leader.number)
    able = [candidate for candidate in (leader, *state.likely_leaders) if candidate.pair_seconds <= state.left]
    return Confirm(able[0].number) if able else _spend_remaining_time(state, leader.number)


def _shortest_confirmation(state: State, leader: Candidate) -> float:
    """Return the seconds that a leader's confirmation takes at least, its comparisons of losses included."""
    check = state.check_seconds if leader.unchecked else 0.0
    return CONFIRM_TIME_FACTOR * FEWEST_PROCESSES * leader.pair_seconds + check + leader.least_learning_seconds


def _claim_share(state: State, leader: Candidate) -> float:
    """Return the share of the budget that is left when a leader is confirmed at the latest."""
    if state.best_leader is None:
        is_large = processes_needed(state, leader, surely=True) <= LARGE_GAIN_PROCESSES
        return LARGE_CLAIM_SHARE if is_large else FIRST_CLAIM_SHARE
    return OTHER_CLAIM_SHARE if _serves_missing_answer(state, leader) else BETTER_CLAIM_SHARE


def _spend_remaining_time(state: State, leader: int) -> Action:
    """Return an action for time that is too short for a fresh pair of the leader."""
    if _has_time_for_another(state):
        return TryAnother()
    fits = state.left >= state.candidate(leader).look_seconds
    return LookAgain(leader) if fits else _retry_learning_check(state) or End(EndedBy.BUDGET)


def _has_time_for_another(state: State, *, reserve: float = 0.0) -> bool:
    """Return whether there is time for another candidate besides the reserve."""
    seconds = SLOWER * state.candidate_seconds + reserve if reserve else state.candidate_seconds
    return state.more_candidates and state.left >= seconds


def _reserve(state: State) -> float:
    """Return the reserve in seconds if no candidate looks faster than the current best."""
    # For looks at unclear candidates, so that they can be excluded; with a best leader, for the confirmation of a
    # faster one, which stands beside both.
    if state.best_leader is not None:
        return FEWEST_PROCESSES * 1.5 * state.best_leader.pair_seconds
    first = RESERVED_PROCESSES * state.first_pair_seconds
    if len(state.candidates) < ENOUGH_CANDIDATES:
        return first if state.left > first + 2 * state.candidate_seconds else 0.0
    looks = [state.looks_to_exclude(candidate, state.bound) * candidate.look_seconds for candidate in state.unclear]
    return first + sum(looks) + max(looks, default=0.0)  # the next candidate may be unclear, or a leader


def kept_for_learning(state: State, leader: int) -> float:
    """Return the seconds that a fresh pair of an open leader leaves for its learning, where there is time for both."""
    of = next(known for known in state.leaders if known.number == leader)
    needed = (
        min(state.candidate(of.candidate).learning_seconds, state.learning_seconds) if of.learning_untested else 0.0
    )
    return needed if state.left >= of.least_pair_seconds + needed else 0.0


def confirmation_seconds(state: State, leader: Candidate) -> float:
    """Return the seconds to keep for a leader's confirmation, its comparisons of losses included."""
    most = int(_claim_share(state, leader) * state.budget / leader.pair_seconds)
    count = min(processes_needed(state, leader), max(LARGE_GAIN_PROCESSES, most))
    learning = min(leader.learning_seconds, state.learning_seconds)
    return (
        CONFIRM_TIME_FACTOR * count * leader.pair_seconds
        + (state.check_seconds if leader.unchecked else 0.0)
        + learning
    )


def processes_needed(state: State, leader: Candidate, *, surely: bool = False) -> int:
    """Return how many fresh processes a side should show that a leader is faster than what there is.

    With `surely` its gain is taken to be smaller by a standard error: the best of many is partly luck.
    """
    best = state.leader_to_beat(leader)
    shown = 0.0 if best is None or best.ratio is None else best.ratio.value
    gain = leader.ratio - shown - (leader.error(state.spread) if surely else 0.0)
    return processes_wanted(gain, state.prior, error=error_of(state.next_leader))


def processes_wanted(gain: float, prior: ProcessPrior, *, error: float, most: int = MOST_PROCESSES) -> int:
    """Return how many fresh processes a side should show a gain, a logarithm; `most` where that is not to be had."""
    for count in range(FEWEST_PROCESSES, most):
        if prior.half_width(count, 1 - LOOK_SHARE * error) <= MAX_WIDTH_OVER_GAIN * gain:
            return count
    return most


def error_of(leader: int) -> float:
    """Return the significance level of the k-th leader of a run, counted from 1 (alpha spending)."""
    return ERROR / (leader * (leader + 1))


# --------------------------------------------------------------------------------------------------- the end


def verdict(state: State) -> Verdict:
    """Return the verdict. Without a recommendation it is about the script's own batch size."""
    if state.recommended is not None:
        return Verdict.FASTER
    likely_leaders = [candidate for candidate in state.likely_leaders if candidate.is_same_training]
    opened = [leader for leader in state.open_leaders if leader.is_same_training]
    unsettled = opened or likely_leaders or state.unclear or state.inconclusive
    if not unsettled and _excluded(state):
        faster = [known for known in _of_same_training(state) if known.ratio > math.log1p(state.min_gain)]
        refused = any(known not in state.stable for known in faster)
        return Verdict.UNSTABLE if refused else Verdict.NO_SIGNIFICANT_GAIN
    return Verdict.UNDECIDED


def _excluded(state: State) -> bool:
    """Return whether gains above the bound are excluded for enough candidates, or nothing is left to be tried."""
    if state.exhausted:
        return True
    measured = sum(candidate.measured for candidate in _of_same_training(state))
    enough = measured >= FEWEST_CANDIDATES or not state.more_candidates or _in_doubt(state) is not None
    return enough and excluded_above(state) < state.bound


def _of_same_training(state: State) -> list[Candidate]:
    return [candidate for candidate in state.candidates if candidate.is_same_training]


def excluded_above(state: State) -> float:
    """Return the gain above which all that was tried of the same training is excluded, as a logarithm; 0 or more."""
    return max(
        (state.gain_upper_bound(candidate) for candidate in state.stable if candidate.is_same_training), default=0.0
    )


def seconds_to_settle(state: State) -> float:
    """Estimate the seconds that a continued run needs, for the command that is printed."""
    leader: Leader | None = state.next_open_leader or (
        None if state.likely_leaders else next(iter(state.inconclusive), None)
    )
    if leader is not None:
        gain = 0.0 if leader.ratio is None else leader.ratio.value
        # A small gain takes many more processes than were planned.
        wanted = processes_wanted(gain, state.prior, error=leader.looks.error, most=4 * MOST_PROCESSES)
        return max(1, wanted - leader.processes) * leader.pair_seconds
    if state.likely_leaders:
        best = state.likely_leaders[0]
        return processes_needed(state, best) * best.pair_seconds + best.learning_seconds / LEARNING_AGAIN_SHARE
    wanted = max(FEWEST_CANDIDATES - sum(candidate.measured for candidate in _of_same_training(state)), 1)
    looks = sum(candidate.look_seconds for candidate in state.unclear)
    return wanted * state.candidate_seconds + 2 * looks


def seconds_to_learn(state: State) -> float:
    """Return the seconds that a continued run needs to compare the learning of larger batches; 0 without any."""
    needs = (_learning_seconds_needed(state, leader) for leader in state.best_leaders.values())
    return max(needs, default=0.0) / LEARNING_AGAIN_SHARE


def smallest_gain_shown(state: State) -> float:
    """Return the smallest gain, a logarithm, that the run's time could have shown of one candidate."""
    leader = state.next_open_leader or state.best_leader or next(iter(state.inconclusive), None)
    if leader is not None and leader.ratio is not None:
        return max(leader.ratio.half_width, math.log1p(state.min_gain))
    return gain_shown_in(state.budget, state.first_pair_seconds, state.prior, state.next_leader, state.min_gain)


def gain_shown_in(
    budget: float, pair_seconds: float, prior: ProcessPrior, leader: int = 1, min_gain: float = MIN_GAIN
) -> float:
    """Return the smallest gain, a logarithm, that a run of that budget can show of its leader of that number."""
    count = max(FEWEST_PROCESSES, min(int(FIRST_CLAIM_SHARE * budget / pair_seconds), MOST_PROCESSES))
    return max(prior.half_width(count, 1 - LOOK_SHARE * error_of(leader)), math.log1p(min_gain))
