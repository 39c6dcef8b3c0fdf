"""What a run does next, by what it knows: each rule on frozen values, and whole plays against random answers."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_runs import a_candidate, a_leader, a_state

from autotune.data.figures import LogInterval
from autotune.data.record import InterimAnalysis, Standing
from autotune.stats.deciding import EndedBy, Verdict
from autotune.stats.intervals import Spread
from autotune.tuning.policy import (
    MOST_PROCESSES,
    CompareLearning,
    CompareLosses,
    Confirm,
    End,
    FreshPair,
    GiveUp,
    LookAgain,
    TryAnother,
    Wait,
    confirmation_seconds,
    error_of,
    excluded_above,
    kept_for_learning,
    next_action,
    processes_wanted,
    seconds_to_learn,
    seconds_to_settle,
    verdict,
)
from autotune.tuning.state import USUAL_PRIOR

SLOWER = tuple(a_candidate(number, -0.5) for number in range(1, 8))
"""Tried candidates of which a gain is excluded."""
FAST = a_candidate(9, 1.2, processes=2)
CONFIRMED = a_leader(9, standing=Standing.CONFIRMED, low=0.4, high=0.55, processes=4)
NOT_SHOWN = Standing.NOT_SHOWN


def confirms(action):
    """The candidate whose confirmation begins; None for another action."""
    return action.candidate if isinstance(action, Confirm) else None


# ---------------------------------------------------------------------------------- search on, or confirm


def test_run_begins_with_a_candidate_or_ends_without_time():
    assert next_action(a_state()) == TryAnother()
    assert next_action(a_state(left=4.0)) == End(EndedBy.BUDGET)


def test_leader_is_confirmed_when_the_time_left_just_suffices():
    needed = confirmation_seconds(a_state(FAST), FAST)
    budget = 2 * needed
    assert next_action(a_state(*SLOWER[:2], FAST, left=needed + 20.0, budget=budget)) == TryAnother()
    assert confirms(next_action(a_state(*SLOWER[:2], FAST, left=needed, budget=budget))) == FAST.number


@pytest.mark.parametrize(("gain", "share"), [(0.1, 0.5), (1.2, 0.7)])
def test_claim_waits_for_half_the_time_or_less_for_a_large_gain(gain, share):
    leader = a_candidate(9, gain, processes=2, pairs=40)
    for left, is_due in ((1.01 * share, False), (0.99 * share, True)):
        action = next_action(a_state(*SLOWER[:3], leader, left=1000.0 * left, budget=1000.0))
        assert (confirms(action) == 9) is is_due


def test_time_for_two_processes_is_kept_while_few_were_tried():
    """A small gain needs many processes. A better candidate, found first, may need two."""
    slightly = a_candidate(9, 0.25, processes=2, pairs=40)
    shortest = 1.1 * 2 * slightly.pair_seconds
    few = a_state(*SLOWER[:2], slightly, left=shortest + 10.0, budget=1000.0)
    assert confirmation_seconds(few, slightly) > few.left
    assert next_action(few) == TryAnother()
    assert confirms(next_action(dataclasses.replace(few, left=shortest))) == 9
    assert confirms(next_action(dataclasses.replace(few, candidates=(*SLOWER[:3], slightly)))) == 9


def test_larger_batch_that_cannot_learn_in_time_waits():
    larger = a_candidate(9, 1.2, processes=2, batch_ratio=4.0, learning_seconds=300.0)
    larger = dataclasses.replace(larger, least_learning_seconds=90.0)
    state = a_state(*SLOWER[:4], larger, left=60.0, budget=120.0, learning_seconds=30.0)
    assert next_action(state) == TryAnother()
    assert confirms(next_action(dataclasses.replace(state, more_candidates=False))) == 9
    assert confirms(next_action(dataclasses.replace(state, left=130.0, budget=260.0))) == 9
    never = dataclasses.replace(larger, least_learning_seconds=math.inf)
    unlimited = dataclasses.replace(state, candidates=(*SLOWER[:4], never), left=900.0, budget=1000.0)
    assert next_action(unlimited) == TryAnother()


def test_earlier_leader_that_is_faster_is_confirmed_at_once():
    much = {"left": 990.0, "budget": 1000.0}
    again = dataclasses.replace(FAST, was_confirmed=True, processes=1, pairs=4)
    assert next_action(a_state(dataclasses.replace(again, was_confirmed=False), **much)) == TryAnother()
    assert confirms(next_action(a_state(again, **much))) == FAST.number
    slower = a_candidate(9, 0.01, was_confirmed=True)
    assert next_action(a_state(slower, **much)) == TryAnother()


@pytest.mark.parametrize(("led_over", "more"), [(0, 8), (5, 3), (7, 1), (30, 1)])
def test_earlier_rivals_of_a_leader_shorten_the_search(led_over, more):
    again = dataclasses.replace(FAST, led_over=led_over)
    for count in (more - 1, more):
        behind = [a_candidate(number, -0.5) for number in range(10, 10 + count)]
        state = a_state(again, *behind, leaders=(CONFIRMED,), left=1e4, budget=1e4, keeps_budget=False)
        assert next_action(state) == (TryAnother() if count < more else End(EndedBy.SETTLED))
        assert next_action(dataclasses.replace(state, keeps_budget=True)) == TryAnother()


def test_what_was_confirmed_is_what_the_next_must_beat():
    lucky = a_candidate(9, 7.0, processes=2)
    shown = a_leader(9, low=1.5, high=2.5, standing=Standing.CONFIRMED, number=90)
    better = a_candidate(12, 4.0, processes=2)
    state = a_state(lucky, better, leaders=(shown,), more_candidates=False)
    assert confirms(next_action(state)) == 12
    level = a_leader(9, low=3.5, high=4.5, standing=Standing.CONFIRMED, number=90)
    assert state.likely_leaders
    assert not dataclasses.replace(state, leaders=(level,)).likely_leaders


def test_steady_leader_is_confirmed_early_and_search_goes_on():
    behind = [a_candidate(number, 0.1, pairs=20) for number in range(10, 25)]
    assert next_action(a_state(FAST, *behind[:1], left=1000.0, budget=1000.0)) == TryAnother()
    assert confirms(next_action(a_state(FAST, *behind, left=1000.0, budget=1000.0))) == FAST.number
    known = a_state(FAST, *behind, left=1000.0, budget=1000.0, leaders=(CONFIRMED,))
    assert next_action(known) == TryAnother()


def test_a_leader_within_chance_is_looked_at_again_first():
    narrowly = a_candidate(9, 0.12, pairs=4)
    state = a_state(*SLOWER, narrowly, more_candidates=False, spread=Spread(deviation=0.08, degrees=30))
    assert state.likely_leaders
    assert next_action(state) == LookAgain(9)
    again = dataclasses.replace(narrowly, processes=2, pairs=8)
    assert confirms(next_action(dataclasses.replace(state, candidates=(*SLOWER, again)))) == 9


def test_how_leaders_learn_is_compared_on_one_seat_at_a_time():
    larger = a_candidate(9, 1.0, batch_ratio=4.0)
    confirmed = a_leader(
        9, standing=Standing.CONFIRMED, low=0.9, high=1.1, number=90, processes=4, learning_untested=True
    )
    state = a_state(larger, leaders=(confirmed,), learning_seconds=30.0)
    assert next_action(state) == CompareLearning(90)
    assert next_action(dataclasses.replace(state, compares_losses=True)) != CompareLearning(90)


def test_retries_loss_comparison_that_ran_out_of_time():
    """The retry comes before narrowing a claim, if it can change the recommendation."""
    larger, wide = a_candidate(9, 1.0, batch_ratio=4.0), {"number": 90, "processes": 4, "batch_ratio": 4.0}
    cut_short = a_leader(9, low=0.2, high=1.8, standing=Standing.CONFIRMED, learning_seconds_needed=50.0, **wide)
    state = a_state(larger, leaders=(cut_short,), more_candidates=False, exhausted=True, left=60.0)
    assert next_action(state) == CompareLearning(90)
    for without in ({"left": 40.0}, {"busy": frozenset({90}), "left": 60.0}, {"compares_losses": True}):
        assert next_action(dataclasses.replace(state, **without)) != CompareLearning(90)
    learning_untested = dataclasses.replace(cut_short, learning_seconds_needed=0.0, learning_untested=True)
    for needs, action in (50.0, CompareLearning(90)), (70.0, FreshPair(90)):  # others have used the time kept for it
        kept = a_candidate(9, 1.0, batch_ratio=4.0, learning_seconds=needs)
        assert next_action(dataclasses.replace(state, candidates=(kept,), leaders=(learning_untested,))) == action
    same = a_leader(8, low=1.4, high=1.6, standing=Standing.CONFIRMED, number=80, processes=4)
    both = dataclasses.replace(state, candidates=(a_candidate(8, 1.5), larger), leaders=(same, cut_short))
    assert next_action(both) != CompareLearning(90), "it would not be recommended"


def test_seconds_to_learn_covers_batches_not_compared():
    """Also beside another recommendation: how they learn is not known."""
    same = a_leader(8, low=1.4, high=1.6, standing=Standing.CONFIRMED, number=80, processes=4)
    larger = {"standing": Standing.CONFIRMED, "low": 0.9, "high": 1.1, "number": 90, "batch_ratio": 4.0}
    candidates = (a_candidate(8, 1.5), a_candidate(9, 1.0, batch_ratio=4.0, learning_seconds=20.0))
    for known, seconds in ({"learning_seconds_needed": 10.0}, 20.0), ({"learning_untested": True}, 40.0), ({}, 0.0):
        state = a_state(*candidates, leaders=(same, a_leader(9, **larger, **known)))
        assert seconds_to_learn(state) == seconds


def test_learning_is_retried_at_half_time_without_a_winner():
    larger = a_candidate(9, 1.0, batch_ratio=4.0)
    cut_short = a_leader(
        9,
        standing=Standing.CONFIRMED,
        low=0.9,
        high=1.1,
        number=90,
        processes=4,
        batch_ratio=4.0,
        learning_seconds_needed=50.0,
    )
    state = a_state(larger, leaders=(cut_short,), left=130.0, budget=240.0)
    assert next_action(state) == TryAnother()
    assert next_action(dataclasses.replace(state, left=110.0)) == CompareLearning(90)


def test_time_too_short_for_a_pair_goes_to_learning():
    larger = a_candidate(9, 1.0, batch_ratio=4.0)
    same = a_candidate(8, 0.5, processes=2, pair_seconds=80.0, look_seconds=70.0)
    confirmed = {"standing": Standing.CONFIRMED, "number": 90, "processes": 4, "batch_ratio": 4.0}
    cut_short = a_leader(9, low=0.9, high=1.1, learning_seconds_needed=50.0, **confirmed)
    state = a_state(larger, same, leaders=(cut_short,), more_candidates=False, left=60.0)
    assert next_action(state) == CompareLearning(90)
    assert next_action(dataclasses.replace(state, left=45.0)) == End(EndedBy.BUDGET)


def test_run_without_budget_retries_learning_before_it_ends():
    """A run with a budget goes on searching."""
    larger, slower = a_candidate(9, 1.0, batch_ratio=4.0), [a_candidate(number, -0.5) for number in range(10, 20)]
    confirmed = {"standing": Standing.CONFIRMED, "number": 90, "processes": 4, "batch_ratio": 4.0}
    cut_short = a_leader(9, low=0.9, high=1.1, learning_seconds_needed=50.0, **confirmed)
    state = a_state(larger, *slower, leaders=(cut_short,), left=200.0, budget=300.0)
    assert next_action(dataclasses.replace(state, keeps_budget=False)) == CompareLearning(90)
    assert next_action(state) == TryAnother()


def test_losses_are_compared_before_confirming_other_numerics():
    unchecked = dataclasses.replace(FAST, unchecked=True)
    state = a_state(unchecked, more_candidates=False, check_seconds=20.0)
    assert next_action(state) == CompareLosses(9)
    assert confirms(next_action(dataclasses.replace(state, check_seconds=0.0))) == 9
    for left in (100.0, 25.0):  # another seat compares
        assert next_action(dataclasses.replace(state, compares_losses=True, left=left)) == Wait()
    assert confirms(next_action(dataclasses.replace(state, left=25.0))) == 9
    assert confirms(next_action(a_state(FAST, more_candidates=False, check_seconds=20.0))) == 9


def test_a_leader_that_the_time_does_not_hold_makes_way():
    slow = dataclasses.replace(FAST, number=8, ratio=1.0, pair_seconds=60.0)
    state = a_state(slow, FAST, more_candidates=False, left=45.0)
    assert confirms(next_action(state)) == FAST.number


def test_an_open_leader_is_measured_on():
    assert next_action(a_state(FAST, a_candidate(10, 2.0), leaders=(a_leader(9),))) == FreshPair(90)


@pytest.mark.parametrize("leaders", [(), (a_leader(9),)])
def test_time_that_holds_no_fresh_pair_is_used_by_the_search(leaders):
    state = a_state(*SLOWER, FAST, leaders=leaders, left=7.0)
    assert next_action(state) == TryAnother()
    assert next_action(dataclasses.replace(state, more_candidates=False)) == LookAgain(FAST.number)
    assert next_action(dataclasses.replace(state, left=4.0)) == End(EndedBy.BUDGET)


def test_unpromising_leader_gives_way_to_other_candidates():
    doubtful = a_leader(9, low=-0.15, high=0.16, processes=2)
    state = a_state(*SLOWER, FAST, leaders=(doubtful,), left=100.0)
    assert next_action(state) == GiveUp(90)
    assert next_action(dataclasses.replace(state, more_candidates=False)) == FreshPair(90)
    promising = a_leader(9, low=0.0, high=0.4, processes=2)
    assert next_action(dataclasses.replace(state, leaders=(promising,))) == FreshPair(90)


def test_search_gets_its_share_after_a_claim():
    """The other answer is confirmed next, then faster candidates; narrowing comes last."""
    wide = a_leader(9, standing=Standing.CONFIRMED, low=0.4, high=0.9, processes=2)
    other, faster = a_candidate(10, 1.5, batch_ratio=4.0, learning_seconds=60.0), a_candidate(11, 4.0, processes=2)
    state = a_state(FAST, *SLOWER, leaders=(wide,), left=500.0, budget=1000.0, learning_seconds=100.0)
    for found in ((), (faster,), (other, faster)):
        assert next_action(dataclasses.replace(state, candidates=(*state.candidates, *found))) == TryAnother()
    both = dataclasses.replace(state, candidates=(FAST, dataclasses.replace(other, processes=3), faster), left=390.0)
    assert confirms(next_action(both)) == 10, "the other answer comes first"
    assert next_action(dataclasses.replace(both, candidates=(FAST, faster))) == TryAnother()
    assert confirms(next_action(dataclasses.replace(both, candidates=(FAST, faster), left=240.0))) == 11
    assert next_action(dataclasses.replace(both, candidates=(FAST, *SLOWER))) == TryAnother(), "narrowing comes last"
    assert next_action(dataclasses.replace(both, candidates=(FAST, *SLOWER), left=25.0)) == FreshPair(90)


def test_candidate_unlikely_to_beat_the_claim_yields_to_search():
    slightly = a_candidate(10, 0.65, pairs=40, processes=4)
    state = a_state(FAST, slightly, leaders=(CONFIRMED,), left=40.0, budget=300.0)
    assert state.likely_leaders
    assert next_action(state) == TryAnother()
    assert confirms(next_action(dataclasses.replace(state, more_candidates=False))) == 10


def test_time_for_a_larger_batch_to_learn_is_reserved():
    larger = a_candidate(10, 0.5, batch_ratio=4.0, learning_seconds=60.0)
    state = a_state(*SLOWER[:2], FAST, larger, left=150.0, budget=150.0, learning_seconds=60.0)
    assert state.likely_leaders[0] is FAST
    assert next_action(state) == TryAnother()
    assert next_action(dataclasses.replace(state, left=106.0)) != TryAnother()
    opened = a_leader(10, learning_untested=True, batch_ratio=4.0)
    for left, kept in ((150.0, 60.0), (69.0, 60.0), (67.0, 0.0)):
        assert kept_for_learning(dataclasses.replace(state, leaders=(opened,), left=left), 90) == kept


def test_run_ends_if_all_is_tried_and_no_gain_is_possible():
    flat = [a_candidate(number, 0.0, pairs=60, processes=3) for number in range(1, 7)]
    state = a_state(*flat, left=250.0)
    assert next_action(state) == TryAnother()
    through = dataclasses.replace(state, all_tried=True)
    assert next_action(through) == End(EndedBy.SETTLED)
    assert verdict(through) is Verdict.NO_SIGNIFICANT_GAIN
    for other in (a_candidate(7, 0.03, pairs=8), a_candidate(7, 0.08, pairs=2, batch_ratio=1.2)):
        assert next_action(dataclasses.replace(through, candidates=(*flat, other))) == LookAgain(7)
    open_question = a_leader(6, standing=NOT_SHOWN, low=-0.05, high=0.07, processes=12)
    assert next_action(dataclasses.replace(through, leaders=(open_question,))) == TryAnother()
    larger = a_candidate(7, 0.02, pairs=60, processes=4, batch_ratio=8.0)
    for found in ((*flat, larger), (flat[0], larger, dataclasses.replace(larger, number=8, batch_ratio=2.0))):
        ended = dataclasses.replace(through, candidates=found)
        assert next_action(ended) == End(EndedBy.SETTLED)
        assert verdict(ended) is Verdict.NO_SIGNIFICANT_GAIN


def test_time_that_is_left_narrows_a_wide_claim():
    wide = a_leader(9, standing=Standing.CONFIRMED, low=0.2, high=0.9, processes=2)
    state = a_state(FAST, *SLOWER, leaders=(wide,), more_candidates=False)
    assert next_action(state) == FreshPair(90)
    assert next_action(dataclasses.replace(state, leaders=(CONFIRMED,))) == End(EndedBy.EXHAUSTED)
    spent = dataclasses.replace(wide, processes=12)
    assert next_action(dataclasses.replace(state, leaders=(spent,))) == End(EndedBy.EXHAUSTED)


def test_open_leader_gets_a_short_pair_if_time_is_short():
    leader = a_leader(9, pair_seconds=20.0, least_pair_seconds=8.0)
    assert next_action(a_state(FAST, leaders=(leader,), left=9.0)) == FreshPair(90)


@pytest.mark.parametrize("leaders", [(), (a_leader(9),), (CONFIRMED,)])
def test_who_asks_to_stop_is_heard_first(leaders):
    assert next_action(a_state(FAST, leaders=leaders, interrupted=True)) == End(EndedBy.INTERRUPTED)


# ------------------------------------------------------------------------------------- nothing is faster


def test_unclear_candidate_gets_another_look_if_none_is_faster():
    doubtful = (a_candidate(8, 0.02, pairs=1), a_candidate(9, 0.04, pairs=1))
    state = a_state(*SLOWER, *doubtful, left=14.0)
    assert next_action(state) == LookAgain(9)
    assert next_action(a_state(*SLOWER, left=14.0)) == TryAnother()


@pytest.mark.parametrize(("keeps", "by"), [(False, EndedBy.SETTLED), (True, None)])
def test_a_budget_that_was_asked_for_is_used(keeps, by):
    many = [a_candidate(number, -0.5) for number in range(20)]
    for state in (
        a_state(*many, keeps_budget=keeps),
        a_state(FAST, *many, leaders=(CONFIRMED,), keeps_budget=keeps, budget=1e4, left=1e4),
    ):
        assert next_action(state) == (TryAnother() if by is None else End(by))


def test_time_too_short_to_confirm_is_used_by_the_search():
    for left in (5.0, 20.0, 60.0):
        assert next_action(a_state(FAST, leaders=(CONFIRMED,), left=left)) == TryAnother()
    assert next_action(a_state(FAST, leaders=(CONFIRMED,), left=4.9)) == End(EndedBy.BUDGET)


def test_an_exhausted_space_ends_the_run():
    failed = [dataclasses.replace(slower, pairs=0, ratio=-math.inf) for slower in SLOWER]
    for candidates in (SLOWER, failed):
        state = a_state(*candidates, more_candidates=False, exhausted=True)
        assert next_action(state) == End(EndedBy.EXHAUSTED)
        assert verdict(state) is Verdict.NO_SIGNIFICANT_GAIN


def test_leader_without_a_decision_is_measured_further():
    open_question = a_leader(9, standing=NOT_SHOWN, low=-0.1, high=0.4, processes=12)
    state = a_state(*SLOWER, FAST, leaders=(open_question,), more_candidates=False)
    action = next_action(state)
    assert confirms(action) == 9
    answered = a_leader(9, standing=NOT_SHOWN, low=-0.02, high=0.04, processes=12)
    assert next_action(dataclasses.replace(state, leaders=(answered,))) == End(EndedBy.EXHAUSTED)


# -------------------------------------------------------------------------------------- looks and errors


def test_errors_of_all_leaders_sum_to_five_percent():
    errors = [error_of(leader) for leader in range(1, 10_000)]
    assert 0.0499 < math.fsum(errors) <= 0.05
    assert errors == sorted(errors, reverse=True)


def test_smaller_gains_need_more_processes_up_to_a_cap():
    wanted = [processes_wanted(math.log(ratio), USUAL_PRIOR, error=0.025) for ratio in (2.0, 1.3, 1.1, 1.001)]
    assert wanted == sorted(wanted)
    assert wanted[0] == 2
    assert wanted[1] < wanted[2] < wanted[3] == processes_wanted(-1.0, USUAL_PRIOR, error=0.025)


# ---------------------------------------------------------------------------------------------- verdicts


def unstable(number, gain):
    """A candidate that failed a stability check."""
    return a_candidate(number, gain, unstable=True)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (a_state(*SLOWER), Verdict.NO_SIGNIFICANT_GAIN),
        (a_state(*SLOWER[:2]), Verdict.UNDECIDED),
        (a_state(*SLOWER[:2], exhausted=True), Verdict.NO_SIGNIFICANT_GAIN),
        (a_state(), Verdict.UNDECIDED),
        (a_state(*SLOWER, a_candidate(9, 0.05, pairs=1)), Verdict.UNDECIDED),
        (a_state(*SLOWER, FAST), Verdict.UNDECIDED),
        (a_state(*SLOWER, FAST, leaders=(a_leader(9),)), Verdict.UNDECIDED),
        (a_state(*SLOWER, FAST, leaders=(CONFIRMED,)), Verdict.FASTER),
        (a_state(*SLOWER, FAST, leaders=(CONFIRMED, a_leader(1))), Verdict.FASTER),
        (a_state(*SLOWER, FAST, leaders=(CONFIRMED,), interrupted=True), Verdict.FASTER),
        (a_state(*SLOWER, unstable(9, 0.5)), Verdict.UNSTABLE),
        (a_state(*SLOWER, unstable(9, -0.5)), Verdict.NO_SIGNIFICANT_GAIN),
        (a_state(*SLOWER, FAST, leaders=(a_leader(9, standing=Standing.UNSTABLE),)), Verdict.UNSTABLE),
        (
            a_state(*SLOWER, FAST, leaders=(a_leader(9, standing=NOT_SHOWN, low=-0.02, high=0.05),)),
            Verdict.NO_SIGNIFICANT_GAIN,
        ),
        (a_state(*SLOWER, FAST, leaders=(a_leader(9, standing=NOT_SHOWN, low=-0.2, high=0.5),)), Verdict.UNDECIDED),
    ],
)
def test_what_a_run_comes_to(state, expected):
    assert verdict(state) is expected


def test_the_gain_that_is_excluded_is_that_of_the_most_doubtful():
    alone = excluded_above(a_state(*SLOWER, a_candidate(9, 0.05)))
    assert alone > math.log1p(0.05)
    crashed = dataclasses.replace(a_candidate(10), ratio=-math.inf, pairs=0)
    assert excluded_above(a_state(*SLOWER, a_candidate(9, 0.05), crashed)) == pytest.approx(alone)
    assert excluded_above(a_state(*SLOWER, unstable(9, 0.5))) < math.log1p(0.05)
    confirmed = a_leader(9, standing=NOT_SHOWN, low=-0.02, high=0.03)
    assert excluded_above(a_state(*SLOWER, FAST, leaders=(confirmed,))) == pytest.approx(math.log1p(0.03))


# ------------------------------------------------------------------------------------------ whatever it knows

seconds = st.floats(0.5, 400.0)
candidates = st.builds(
    a_candidate,
    st.just(0),
    st.floats(-0.9, 2.0),
    pairs=st.integers(0, 20),
    processes=st.integers(1, 5),
    pruned=st.booleans(),
    unstable=st.booleans(),
    unchecked=st.booleans(),
    was_confirmed=st.booleans(),
    batch_ratio=st.sampled_from([1.0, 1.0, 4.0]),
    led_over=st.integers(0, 12),
    look_seconds=seconds,
    pair_seconds=seconds,
)


@st.composite
def states(draw):
    """Any state: candidates, of which some are or were confirmed, and any costs and times."""
    found = [
        dataclasses.replace(each, number=number)
        for number, each in enumerate(draw(st.lists(candidates, max_size=8)), 1)
    ]
    leaders = []
    for each in draw(st.lists(st.sampled_from(found), unique_by=id, max_size=3)) if found else []:
        middle, half = draw(st.floats(-0.5, 1.0)), draw(st.floats(0.001, 0.5))
        ratio = LogInterval(value=middle, low=middle - half, high=middle + half, count=4)
        standing = draw(st.sampled_from(Standing))
        leader = a_leader(each.number, standing=standing, number=100 + each.number, processes=4)
        usual = draw(seconds)
        costs = {"pair_seconds": usual, "least_pair_seconds": 0.8 * usual}
        leaders.append(dataclasses.replace(leader, ratio=ratio, **costs))
    more = draw(st.booleans())
    return a_state(
        *found,
        leaders=tuple(leaders),
        left=draw(st.floats(-10.0, 2000.0)),
        budget=2000.0,
        keeps_budget=draw(st.booleans()),
        candidate_seconds=draw(seconds),
        first_pair_seconds=draw(seconds),
        more_candidates=more,
        exhausted=not more and draw(st.booleans()),
        all_tried=draw(st.booleans()),
        check_seconds=draw(st.floats(0.0, 200.0)),
        interrupted=draw(st.booleans()),
        spread=draw(st.builds(Spread, deviation=st.floats(0.0, 0.3), degrees=st.integers(0, 40))),
    )


def cost(state, action):
    """Seconds that must be there for an action."""
    match action:
        case TryAnother():
            return state.candidate_seconds
        case LookAgain(candidate=number):
            return state.candidate(number).look_seconds
        case CompareLosses():
            return state.check_seconds
        case FreshPair(leader=number):
            return min(leader.least_pair_seconds for leader in state.leaders if leader.number == number)
        case Confirm(candidate=number):
            return min(
                [state.candidate(number).pair_seconds]
                + [leader.least_pair_seconds for leader in state.leaders if leader.candidate == number]
            )
        case End() | GiveUp():
            return 0.0


@settings(max_examples=400)
@given(states())
def test_no_action_is_begun_that_does_not_fit(state):
    action = next_action(state)
    if not isinstance(action, End):
        assert cost(state, action) <= state.left
    if action == End(EndedBy.SETTLED):
        assert verdict(state) is not Verdict.UNDECIDED
    if isinstance(action, Confirm):
        assert not state.candidate(action.candidate).unstable
        before = state.leaders_by_candidate.get(action.candidate)
        assert before is None or before.standing in (Standing.OUT_OF_TIME, NOT_SHOWN)


@settings(max_examples=200)
@given(states())
def test_an_undecided_run_can_go_on_in_the_time_that_is_named(state):
    state = dataclasses.replace(state, interrupted=False, keeps_budget=True)
    if verdict(state) is Verdict.UNDECIDED and (state.more_candidates or state.candidates):
        named = 1.5 * seconds_to_settle(state) + state.first_pair_seconds
        action = next_action(dataclasses.replace(state, left=named))
        assert action != End(EndedBy.BUDGET)


def after(state, action, draw):
    """A state in which the action has been done, with answers that are drawn."""
    state = dataclasses.replace(state, left=state.left - 0.5 - draw(st.floats(0.0, 1.2)) * cost(state, action))
    match action:
        case TryAnother() if draw(st.integers(0, 20)) == 0:
            return dataclasses.replace(state, more_candidates=False, exhausted=True)
        case TryAnother():
            new = dataclasses.replace(draw(candidates), number=len(state.candidates) + 1, unstable=False)
            return dataclasses.replace(state, candidates=(*state.candidates, new))
        case LookAgain(candidate=number):
            looked = state.candidate(number)
            looked = dataclasses.replace(
                looked,
                pairs=looked.pairs + 4,
                processes=looked.processes + 1,
                ratio=looked.ratio + draw(st.floats(-0.1, 0.1)),
            )
            return with_candidate(state, looked)
        case CompareLosses(candidate=number):
            fails = draw(st.booleans())
            checked = dataclasses.replace(state.candidate(number), unchecked=False, unstable=fails)
            return dataclasses.replace(with_candidate(state, checked), check_seconds=0.0)
        case Confirm(candidate=number):
            k = sum(leader.looks.leader > 0 for leader in state.leaders) + 1
            known = state.leaders_by_candidate.get(number)
            leader = known or a_leader(number, number=100 + number)
            most = leader.processes + MOST_PROCESSES
            looks = InterimAnalysis(leader=k, candidate=number, error=error_of(k), most=most, reference=200 + number)
            others = tuple(leader for leader in state.leaders if leader is not known)
            return dataclasses.replace(state, leaders=(*others, dataclasses.replace(leader, looks=looks)))
        case GiveUp(leader=number):
            leader = next(leader for leader in state.leaders if leader.number == number)
            looks = leader.looks.model_copy(update={"standing": NOT_SHOWN})
            others = tuple(known for known in state.leaders if known.number != number)
            return dataclasses.replace(state, leaders=(*others, dataclasses.replace(leader, looks=looks)))
        case FreshPair(leader=number):
            leader = next(leader for leader in state.leaders if leader.number == number)
            leader = dataclasses.replace(leader, processes=leader.processes + 1)
            if leader.processes > 1:
                last = leader.processes == leader.looks.most
                standings = [standing for standing in Standing if standing is not Standing.OPEN or not last]
                standing = draw(st.sampled_from(standings))
                looks = leader.looks.model_copy(update={"standing": standing})
                middle, half = draw(st.floats(-0.5, 1.0)), draw(st.floats(0.001, 0.5))
                ratio = LogInterval(value=middle, low=middle - half, high=middle + half, count=4)
                leader = dataclasses.replace(leader, looks=looks, ratio=ratio)
            others = tuple(each for each in state.leaders if each.number != leader.number)
            return dataclasses.replace(state, leaders=(*others, leader))


def with_candidate(state, candidate):
    """The state with one candidate known better."""
    changed = tuple(candidate if each.number == candidate.number else each for each in state.candidates)
    return dataclasses.replace(state, candidates=changed)


@settings(max_examples=60)
@given(st.data(), st.floats(20.0, 2000.0), st.booleans())
def test_a_run_ends_whatever_its_actions_bring(data, budget, keeps_budget):
    state = a_state(
        left=budget, budget=budget, keeps_budget=keeps_budget, first_pair_seconds=20.0, candidate_seconds=8.0
    )
    for _ in range(3000):
        action = next_action(state)
        if isinstance(action, End):
            return
        state = after(state, action, data.draw)
    pytest.fail("it goes on for ever")
