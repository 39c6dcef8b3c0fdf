"""Decide what a run does next. Pure: `next_action` weighs another candidate against more evidence for the leader.

The claim is looked at after every fresh pair of processes. Leaders share one error account: the k-th one gets
0.05 / (k (k + 1)), which is 0.05 for all of them together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.data.options import MIN_GAIN
from autotune.data.record import LOOK_SHARE, Standing
from autotune.stats.deciding import EndedBy, Verdict
from autotune.stats.intervals import ProcessPrior, t_quantile
from autotune.tuning.state import Candidate, Leader, State

ERROR = 0.05  # the chance that a run claims a gain that is not there
FEWEST_PROCESSES, MOST_PROCESSES = 2, 12  # a side, that a claim rests on; after the most its error is spent
NARROW = 0.1  # half-width of a claim, as a logarithm, above which time that is left narrows it
SAFELY = 0.7  # share of a leader's gain that the half-width of its interval should not exceed
MOST_CONFIRMATION_SHARE = 0.4  # of the budget, where more than the fewest processes are wanted
LARGE_GAIN_PROCESSES = 3  # that a large gain needs at most: it is confirmed early, and improved on afterwards
EARLY_CLAIM_SHARE = 1 / 3  # of the budget: a large gain is claimed by then
CALM = 2  # candidates in a row that were no faster than a large gain: then it is confirmed
FIRST_CLAIM_SHARE = 0.5  # of the budget: with so little left, a leader is confirmed
LEARNING_AGAIN_SHARE = 0.5  # of the budget at most, for comparing learning that an earlier budget did not suffice for
STAGNANT = 8  # candidates in a row that were no faster than the best: then it is confirmed
STAGNANT_AGAIN = 1  # candidates at least beside a champion that an earlier run has tried many others beside
MOST_LOOKS_AGAIN = 3  # at candidates that may be the best, before the leader is chosen
ENOUGH_CANDIDATES = 6  # the usually best ones: then time is kept for excluding gains of all that was tried
RESERVED_PROCESSES = 4  # a side: time for so many is kept while nothing looks faster than what there is
CLEARLY = 3.0  # standard errors above what counts: a leader is confirmed without another look
SAFELY_LONGER = 1.1  # a confirmation may take so many times as long as expected
SLOWER = 1.3  # another candidate may take so many times as long as the last ones
ENOUGH_PROCESSES = 3  # of a candidate: further looks at it choose no better
FEWEST_CANDIDATES = 3  # without a gain, before a run says so; fewer where no more are to be tried


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
    """Nothing is to be begun until something that runs on another seat has ended."""


@dataclass(frozen=True)
class End:
    """The run ends."""

    by: EndedBy


Action = TryAnother | LookAgain | CompareLosses | CompareLearning | Confirm | FreshPair | LeaveOut | GiveUp | Wait | End


def next_action(state: State) -> Action:
    """Return what to do next, on a seat that is free."""
    action = _next_action(state)
    return Wait() if isinstance(action, End) and state.busy else action


def _next_action(state: State) -> Action:
    if state.interrupted:
        return End(EndedBy.INTERRUPTED)
    if state.open is not None:
        if state.open.number in state.busy:
            for candidate in state.contenders if len(state.opened) < state.confirms_at_once else ():
                if state.left >= confirmation_seconds(state, candidate) and not candidate.unchecked:
                    return Confirm(candidate.number)
            return TryAnother() if _holds_another(state) else Wait()
        if _is_hopeless(state, state.open):
            return GiveUp(state.open.number)
        fits = state.left >= state.open.least_pair_seconds
        return FreshPair(state.open.number) if fits else _use_the_rest(state, state.open.candidate)
    for leader in state.champions.values():
        able = leader.unlearned and leader.number not in state.busy and not state.compares_losses
        if able and state.learning_seconds > 0:
            return CompareLearning(leader.number)
    if is_settled(state):
        ended = End(EndedBy.SETTLED if state.more_candidates else EndedBy.EXHAUSTED)
        return _learn_again(state) or _narrow(state) or _leave_change_out(state) or ended
    if state.contenders:
        return _for_leader(state, state.contenders[0])
    if _is_tired(state):  # without a budget that is to be used, the run would end here
        again = None if state.keeps_budget else _learn_again(state)
        if ending := again or _narrow(state) or _leave_change_out(state):
            return ending
    is_late = state.recommended is None and state.left < FIRST_CLAIM_SHARE * state.budget
    if not (is_late and _learn_again(state)) and _holds_another(state, reserve=_reserve(state)):
        return TryAnother()
    if again := _learn_again(state):
        return again
    if state.champion is None:
        for candidate in state.unclear:
            if state.left >= candidate.look_seconds:
                return LookAgain(candidate.number)
    elif narrower := _narrow(state):
        return narrower
    if _holds_another(state):  # the time holds no confirmation of it, but nothing else either
        return TryAnother()
    for leader in state.inconclusive if state.champion is None else ():
        if state.left >= leader.least_pair_seconds:
            return Confirm(leader.candidate)
    return _leave_change_out(state) or End(EndedBy.BUDGET)


def _learn_again(state: State) -> CompareLearning | None:
    """Return a confirmed leader whose learning the time kept for it did not suffice for, and all that is left does."""
    best = state.recommended
    for leader in () if state.compares_losses else state.champions.values():
        is_worth_it = best is None or state.worth(leader) > state.worth(best)
        if is_worth_it and 0 < _learning_needs(state, leader) <= state.left and leader.number not in state.busy:
            return CompareLearning(leader.number)
    return None


def _learning_needs(state: State, leader: Leader) -> float:
    """Return the seconds that comparing a confirmed leader's learning needs; 0 where that is known or cannot be."""
    return state.candidate(leader.candidate).learning_seconds if leader.unlearned else leader.learning_needs


def _narrow(state: State) -> FreshPair | None:
    """Return another pair for a confirmed leader whose claim is wide, where the time holds one."""
    for leader in state.champions.values():
        if leader.ratio is None or leader.number in state.busy:
            continue
        is_wide = leader.ratio.half_width > NARROW and leader.processes < leader.looks.most
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
    """Return whether an open leader will hardly be shown, and the time holds something else.

    That is so if all pairs that fit would not show a gain that is one standard error above its estimate.
    """
    if (
        leader.ratio is None
        or leader.processes < FEWEST_PROCESSES
        or not _holds_another(state, reserve=_reserve(state))
    ):
        return False
    confidence = leader.looks.confidence
    fits = leader.processes + int(state.left / leader.pair_seconds)
    needed = state.prior.half_width(min(fits, leader.looks.most), confidence)
    error = leader.ratio.half_width / t_quantile(confidence, state.prior.degrees + leader.processes - 1)
    return leader.ratio.value + error < needed


def is_settled(state: State) -> bool:
    """Return whether more time would change nothing, or not enough to continue unasked."""
    if state.contenders or state.open is not None:
        return False
    if state.champion is None and (state.unclear or state.inconclusive):
        return False
    tired = not state.keeps_budget and _is_tired(state)
    stagnant = not state.more_candidates or tired
    return stagnant if state.champion is not None else stagnant and _excluded(state)


def _is_tired(state: State) -> bool:
    """Return whether so many candidates were no faster that no more are tried unasked."""
    champion = state.champion
    led_over = 0 if champion is None else state.candidate(champion.candidate).led_over
    if not led_over:
        return state.since_best >= STAGNANT
    # What looks clearly faster than the champion would be confirmed first: none of the others does.
    return len(state.candidates) - 1 >= max(STAGNANT_AGAIN, STAGNANT - led_over)


def _for_leader(state: State, leader: Candidate) -> Action:
    """Search on, or confirm: when what is left is what the confirmation needs, it is confirmed."""
    needed = confirmation_seconds(state, leader)
    is_first = state.rival(leader) is None
    is_large = is_first and _is_large(state, leader, needed)
    is_known = is_large or leader.was_confirmed  # another run has chosen it among others
    early = is_known or (state.since_best >= STAGNANT and state.left >= 2 * needed)
    is_late = state.left < FIRST_CLAIM_SHARE * state.budget
    early = early or (is_first and is_late)
    rival = None if is_known and not is_late else _rival(state, leader)
    looks = min(MOST_LOOKS_AGAIN, len(state.contenders))
    choosing = 0.0 if rival is None else looks * rival.look_seconds
    if not early and _holds_another(state, reserve=needed + choosing):
        return TryAnother()
    if rival is not None and state.left >= rival.look_seconds + needed:
        return LookAgain(rival.number)
    if leader.unchecked and state.compares_losses:  # what it shows holds for all that compute alike
        return TryAnother() if _holds_another(state, reserve=needed) else Wait()
    if leader.unchecked and 0 < state.check_seconds <= state.left - leader.pair_seconds:
        return CompareLosses(leader.number)
    able = [candidate for candidate in state.contenders if candidate.pair_seconds <= state.left]
    return Confirm(able[0].number) if able else _use_the_rest(state, leader.number)


def _is_large(state: State, leader: Candidate, needed: float) -> bool:
    """Return whether a leader's gain is so large that it is confirmed now, long before the time is over."""
    if processes_needed(state, leader, surely=True) > LARGE_GAIN_PROCESSES:
        return False
    spent, due = state.budget - state.left, EARLY_CLAIM_SHARE * state.budget
    return spent >= due or (spent + needed >= due and state.since_best >= CALM)


def _use_the_rest(state: State, leader: int) -> Action:
    """Return what fits in time that holds no fresh pair of the leader."""
    if _holds_another(state):
        return TryAnother()
    fits = state.left >= state.candidate(leader).look_seconds
    return LookAgain(leader) if fits else _learn_again(state) or End(EndedBy.BUDGET)


def _holds_another(state: State, *, reserve: float = 0.0) -> bool:
    """Return whether the time holds another candidate, and what is kept for later."""
    seconds = SLOWER * state.candidate_seconds + reserve if reserve else state.candidate_seconds
    return state.more_candidates and state.left >= seconds


def _reserve(state: State) -> float:
    """Return the seconds to keep where nothing looks faster than what there is."""
    # For looks at what is unclear, so that it can be excluded; with a champion, for the confirmation of a
    # faster one, which stands beside both.
    if state.champion is not None:
        return FEWEST_PROCESSES * 1.5 * state.champion.pair_seconds
    first = RESERVED_PROCESSES * state.first_pair_seconds
    if len(state.candidates) < ENOUGH_CANDIDATES:
        return first if state.left > first + 2 * state.candidate_seconds else 0.0
    looks = [state.looks_to_exclude(candidate) * candidate.look_seconds for candidate in state.unclear]
    return first + sum(looks) + max(looks, default=0.0)  # what is tried next may be unclear, or a leader


def _rival(state: State, leader: Candidate) -> Candidate | None:
    """Return the candidate to look at again before the leader is chosen; None where none would tell more."""
    # A leader that is not clearly one; then, of the leader and the one that may most likely be faster still,
    # the one that was measured less.
    # What has the highest upper bound would be the leader itself, again and again, while another that two
    # slices speak of stays in doubt (LUCB: Kalyanakrishnan et al., 2012).
    if state.looks_since >= MOST_LOOKS_AGAIN:
        return None
    lead = leader.ratio - math.log1p(state.min_gain)
    if leader.processes < 2 and lead < CLEARLY * leader.error(state.spread):
        return leader
    others = [
        candidate
        for candidate in state.contenders
        if candidate is not leader and candidate.ratio + candidate.error(state.spread) > leader.ratio
    ]
    others = [candidate for candidate in others if min(candidate.processes, leader.processes) < ENOUGH_PROCESSES]
    if not others:
        return None
    challenger = max(others, key=lambda candidate: candidate.ratio + candidate.error(state.spread))
    return min(challenger, leader, key=lambda candidate: (candidate.processes, candidate.pairs))


def confirmation_seconds(state: State, leader: Candidate) -> float:
    """Return what a leader's confirmation should be kept time for, its comparisons of losses included."""
    most = int(MOST_CONFIRMATION_SHARE * state.budget / leader.pair_seconds)
    count = min(processes_needed(state, leader), max(LARGE_GAIN_PROCESSES, most))
    learning = min(leader.learning_seconds, state.learning_seconds)
    return SAFELY_LONGER * count * leader.pair_seconds + (state.check_seconds if leader.unchecked else 0.0) + learning


def processes_needed(state: State, leader: Candidate, *, surely: bool = False) -> int:
    """Return how many fresh processes a side should show that a leader is faster than what there is.

    With `surely` its gain is taken to be smaller by a standard error: the best of many owes part of it to luck.
    """
    rival = state.rival(leader)
    shown = 0.0 if rival is None or rival.ratio is None else rival.ratio.value
    gain = leader.ratio - shown - (leader.error(state.spread) if surely else 0.0)
    return processes_wanted(gain, state.prior, error=error_of(state.next_leader))


def processes_wanted(gain: float, prior: ProcessPrior, *, error: float, most: int = MOST_PROCESSES) -> int:
    """Return how many fresh processes a side should show a gain, a logarithm; `most` where that is not to be had."""
    for count in range(FEWEST_PROCESSES, most):
        if prior.half_width(count, 1 - LOOK_SHARE * error) <= SAFELY * gain:
            return count
    return most


def error_of(leader: int) -> float:
    """Return the error that the k-th leader of a run gets, from 1."""
    return ERROR / (leader * (leader + 1))


# --------------------------------------------------------------------------------------------------- the end


def verdict(state: State) -> Verdict:
    """Return what the run comes to. Without a recommendation it is about the script's own batch size."""
    if state.recommended is not None:
        return Verdict.FASTER
    contenders = [candidate for candidate in state.contenders if candidate.is_same_training]
    opened = [leader for leader in state.opened if leader.is_same_training]
    unsettled = opened or contenders or state.unclear or state.inconclusive
    if not unsettled and _excluded(state):
        refused = [
            candidate
            for candidate in _of_same_training(state)
            if candidate.unstable and candidate.ratio > math.log1p(state.min_gain)
        ]
        broken = any(leader.standing is Standing.UNSTABLE and leader.is_same_training for leader in state.leaders)
        return Verdict.UNSTABLE if refused or broken else Verdict.NO_SIGNIFICANT_GAIN
    return Verdict.UNDECIDED


def _excluded(state: State) -> bool:
    """Return whether gains above the bound are excluded for enough candidates, or nothing is left to be tried."""
    if state.exhausted:
        return True
    measured = sum(candidate.measured for candidate in _of_same_training(state))
    enough = measured >= FEWEST_CANDIDATES or not state.more_candidates
    return enough and excluded_above(state) < state.bound


def _of_same_training(state: State) -> list[Candidate]:
    return [candidate for candidate in state.candidates if candidate.is_same_training]


def excluded_above(state: State) -> float:
    """Return the gain above which all that was tried of the same training is excluded, as a logarithm; 0 or more."""
    broken = {number for number, leader in state.standing.items() if leader.standing is Standing.UNSTABLE}
    tried = _of_same_training(state)
    stable = [candidate for candidate in tried if not candidate.unstable and candidate.number not in broken]
    return max((state.upper(candidate) for candidate in stable), default=0.0)


def seconds_to_settle(state: State) -> float:
    """Estimate the seconds that a continued run needs, for the command that is printed."""
    leader: Leader | None = state.open or (None if state.contenders else next(iter(state.inconclusive), None))
    if leader is not None:
        gain = 0.0 if leader.ratio is None else leader.ratio.value
        # A small gain takes many more processes than were planned.
        wanted = processes_wanted(gain, state.prior, error=leader.looks.error, most=4 * MOST_PROCESSES)
        return max(1, wanted - leader.processes) * leader.pair_seconds
    if state.contenders:
        best = state.contenders[0]
        return processes_needed(state, best) * best.pair_seconds + best.learning_seconds / LEARNING_AGAIN_SHARE
    wanted = max(FEWEST_CANDIDATES - sum(candidate.measured for candidate in _of_same_training(state)), 1)
    looks = sum(candidate.look_seconds for candidate in state.unclear)
    return wanted * state.candidate_seconds + 2 * looks


def seconds_to_learn(state: State) -> float:
    """Return what comparing the learning of larger batches needs of a continued run; 0 if nothing is to be compared."""
    needs = (_learning_needs(state, leader) for leader in state.champions.values())
    return max(needs, default=0.0) / LEARNING_AGAIN_SHARE


def smallest_gain_shown(state: State) -> float:
    """Return the smallest gain, a logarithm, that the run's time could have shown of one candidate."""
    leader = state.open or state.champion or next(iter(state.inconclusive), None)
    if leader is not None and leader.ratio is not None:
        return max(leader.ratio.half_width, math.log1p(state.min_gain))
    return gain_shown_in(state.budget, state.first_pair_seconds, state.prior, state.next_leader, state.min_gain)


def gain_shown_in(
    budget: float, pair_seconds: float, prior: ProcessPrior, leader: int = 1, min_gain: float = MIN_GAIN
) -> float:
    """Return the smallest gain, a logarithm, that a run of that budget can show of its leader of that number."""
    count = max(FEWEST_PROCESSES, min(int(FIRST_CLAIM_SHARE * budget / pair_seconds), MOST_PROCESSES))
    return max(prior.half_width(count, 1 - LOOK_SHARE * error_of(leader)), math.log1p(min_gain))
