"""What a run does next. Pure: `next_action` weighs another candidate against more evidence for the leader.

A leader's looks are fixed when its confirmation begins, and paid for from one error account: the k-th leader gets
0.05 / (k (k + 1)), which is 0.05 for all of them together, split over its looks (Bonferroni).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.record import Standing
from autotune.stats.deciding import EndedBy, Verdict
from autotune.stats.intervals import t_quantile
from autotune.tuning.state import Candidate, State

ERROR = 0.05  # the chance that a run claims a gain that is not there
LOOKS_AFTER = (4, 8, 12)  # fresh processes a side after which a confirmation is looked at
FEWEST_PROCESSES = 3  # a side, that a claim rests on: two may agree by chance
SAFELY = 0.7  # share of a leader's gain that the half-width of its interval should not exceed
MOST_CONFIRMATION_SHARE = 0.4  # of the budget, where more than the fewest processes are wanted
FIRST_CLAIM_SHARE = 0.5  # of the budget: with so little left, a leader is confirmed
STAGNANT = 8  # candidates in a row that were no faster than the best: then it is confirmed
MOST_LOOKS_AGAIN = 3  # at candidates that may be the best, before the leader is chosen
ENOUGH_CANDIDATES = 6  # the usually best ones: then time is kept for excluding gains of all that was tried
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
class Confirm:
    """Begin a leader's confirmation, with the looks that are planned for it."""

    candidate: int
    after: tuple[int, ...]


@dataclass(frozen=True)
class FreshPair:
    """Measure fresh processes of the open leader and the baseline."""

    leader: int


@dataclass(frozen=True)
class Wait:
    """Nothing is to be begun until something that runs on another seat has ended."""


@dataclass(frozen=True)
class End:
    """The run ends."""

    by: EndedBy


Action = TryAnother | LookAgain | CompareLosses | Confirm | FreshPair | Wait | End


def next_action(state: State) -> Action:
    """What to do next, on a seat that is free."""
    action = _next_action(state)
    return Wait() if isinstance(action, End) and state.busy else action


def _next_action(state: State) -> Action:
    if state.interrupted:
        return End(EndedBy.INTERRUPTED)
    if state.open is not None:
        if state.open.number in state.busy:
            for each in state.contenders if len(state.opened) < state.confirms_at_once else ():
                if state.left >= LOOKS_AFTER[0] * each.pair_seconds and not each.unchecked:
                    return _confirm(state, each)
            return TryAnother() if _holds_another(state, reserve=0.0) else Wait()
        fits = state.left >= state.open.pair_seconds
        return FreshPair(state.open.number) if fits else _in_the_rest(state, state.open.candidate)
    if is_settled(state):
        return End(EndedBy.SETTLED if state.more_candidates else EndedBy.EXHAUSTED)
    if state.contenders:
        return _for_leader(state, state.contenders[0])
    if _holds_another(state, reserve=_reserve(state)):
        return TryAnother()
    if state.champion is None:
        for each in state.unclear:
            if state.left >= each.look_seconds:
                return LookAgain(each.number)
        if _holds_another(state, reserve=0.0):
            return TryAnother()
        for leader in state.inconclusive:
            if state.left >= 2 * leader.pair_seconds:
                return _confirm(state, state.candidate(leader.candidate))
    return End(EndedBy.BUDGET)


def is_settled(state: State) -> bool:
    """Whether more time would change nothing, or not enough to go on unasked."""
    if state.contenders or state.open is not None:
        return False
    if state.champion is None and (state.unclear or state.inconclusive):
        return False
    tired = not state.keeps_budget and state.since_best >= STAGNANT
    stagnant = not state.more_candidates or tired
    return stagnant if state.champion is not None else stagnant and _excluded(state)


def _for_leader(state: State, leader: Candidate) -> Action:
    """Search on, or confirm: when what is left is what the confirmation needs, it is confirmed."""
    needed = confirmation_seconds(state, leader)
    early = state.since_best >= STAGNANT and state.left >= 2 * needed
    early = early or (state.champion is None and state.left < FIRST_CLAIM_SHARE * state.budget)
    rival = _rival(state, leader)
    looks = min(MOST_LOOKS_AGAIN, len(state.contenders))
    choosing = 0.0 if rival is None else looks * rival.look_seconds
    if not early and _holds_another(state, reserve=needed + choosing):
        return TryAnother()
    if rival is not None and state.left >= rival.look_seconds + needed:
        return LookAgain(rival.number)
    if leader.unchecked and 0 < state.check_seconds <= state.left - leader.pair_seconds:
        return CompareLosses(leader.number)
    able = [each for each in state.contenders if each.pair_seconds <= state.left]
    if not able:
        return _in_the_rest(state, leader.number)
    return _confirm(state, able[0])


def _in_the_rest(state: State, leader: int) -> Action:
    """In time that holds no fresh pair of the leader: another candidate, or another look at the leader."""
    if _holds_another(state, reserve=0.0):
        return TryAnother()
    fits = state.left >= state.candidate(leader).look_seconds
    return LookAgain(leader) if fits else End(EndedBy.BUDGET)


def _confirm(state: State, candidate: Candidate) -> Confirm:
    """Plan looks; of a leader that has some already, further ones, paid for as those of another leader."""
    known = state.standing.get(candidate.number)
    seconds = candidate.pair_seconds if known is None else known.pair_seconds
    before = 0 if known is None else known.processes
    return Confirm(candidate.number, tuple(before + each for each in plan_looks(int(state.left / seconds))))


def _holds_another(state: State, *, reserve: float) -> bool:
    return state.more_candidates and state.left >= SLOWER * state.candidate_seconds + reserve


def _reserve(state: State) -> float:
    """Seconds to keep where nothing looks faster than what there is."""
    # For looks at what is unclear, so that it can be excluded; with a champion, for the confirmation of a
    # faster one, which stands beside both.
    if state.champion is not None:
        return LOOKS_AFTER[0] * 1.5 * state.champion.pair_seconds
    first = LOOKS_AFTER[0] * state.first_pair_seconds
    if len(state.candidates) < ENOUGH_CANDIDATES:
        return first if state.left > first + 2 * state.candidate_seconds else 0.0
    looks = [state.looks_to_exclude(each) * each.look_seconds for each in state.unclear]
    return first + sum(looks) + max(looks, default=0.0)  # what is tried next may be unclear, or a leader


def _rival(state: State, leader: Candidate) -> Candidate | None:
    """The candidate to look at again before the leader is chosen; None where that would tell no more."""
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
        each for each in state.contenders if each is not leader and each.ratio + each.error(state.spread) > leader.ratio
    ]
    others = [each for each in others if min(each.processes, leader.processes) < ENOUGH_PROCESSES]
    if not others:
        return None
    challenger = max(others, key=lambda each: each.ratio + each.error(state.spread))
    return min(challenger, leader, key=lambda each: (each.processes, each.pairs))


def confirmation_seconds(state: State, leader: Candidate) -> float:
    """What a leader's confirmation should be kept time for, its comparison of losses included."""
    wanted = processes_wanted(leader.ratio, state.pair_deviation())
    most = int(MOST_CONFIRMATION_SHARE * state.budget / leader.pair_seconds)
    count = min(wanted, max(LOOKS_AFTER[0], most))
    return SAFELY_LONGER * count * leader.pair_seconds + (state.check_seconds if leader.unchecked else 0.0)


def processes_wanted(gain: float, deviation: float) -> int:
    """Fresh processes a side that should show a gain."""
    level = 1 - ERROR / 2 / len(LOOKS_AFTER)
    for count in LOOKS_AFTER[:-1]:
        if t_quantile(level, count - 1) * deviation / math.sqrt(count) <= SAFELY * gain:
            return count
    return LOOKS_AFTER[-1]


def plan_looks(affordable: int) -> tuple[int, ...]:
    """After how many processes a side a confirmation is looked at."""
    most = min(max(FEWEST_PROCESSES, affordable), LOOKS_AFTER[-1])
    whole = [each for each in LOOKS_AFTER if each <= most]
    if not whole:
        return (most,)
    return tuple(whole) if most - whole[-1] < 2 else (*whole, most)


def error_of(leader: int) -> float:
    """The error that the k-th leader of a run gets, from 1."""
    return ERROR / (leader * (leader + 1))


# --------------------------------------------------------------------------------------------------- the end


def verdict(state: State) -> Verdict:
    """What the run comes to."""
    if state.champion is not None:
        return Verdict.FASTER
    unsettled = state.open is not None or state.contenders or state.unclear or state.inconclusive
    if not unsettled and _excluded(state):
        refused = [each for each in state.candidates if each.unstable and each.ratio > math.log1p(state.min_gain)]
        broken = any(each.standing is Standing.UNSTABLE for each in state.leaders)
        return Verdict.UNSTABLE if refused or broken else Verdict.NO_SIGNIFICANT_GAIN
    return Verdict.UNDECIDED


def _excluded(state: State) -> bool:
    """Whether gains above the bound are excluded for enough candidates, or nothing is left to be tried."""
    if state.exhausted:
        return True
    measured = sum(each.measured for each in state.candidates)
    enough = measured >= FEWEST_CANDIDATES or not state.more_candidates
    return enough and excluded_above(state) < state.bound


def excluded_above(state: State) -> float:
    """The gain above which all is excluded for every candidate that was tried, as a logarithm; 0 or more."""
    broken = {number for number, each in state.standing.items() if each.standing is Standing.UNSTABLE}
    stable = [each for each in state.candidates if not each.unstable and each.number not in broken]
    return max((state.upper(each) for each in stable), default=0.0)


def seconds_to_settle(state: State) -> float:
    """What the run would need to go on with, by what is known: for the command that is printed."""
    if state.open is not None:
        return (state.open.looks.after[-1] - state.open.processes) * state.open.pair_seconds
    if state.contenders:
        leader = state.contenders[0]
        return processes_wanted(leader.ratio, state.pair_deviation()) * leader.pair_seconds
    if state.inconclusive:
        return LOOKS_AFTER[-1] * state.inconclusive[0].pair_seconds
    wanted = max(FEWEST_CANDIDATES - sum(each.measured for each in state.candidates), 1)
    return wanted * state.candidate_seconds + 2 * sum(each.look_seconds for each in state.unclear)
