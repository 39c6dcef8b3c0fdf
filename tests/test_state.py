"""What a run knows at a moment: what may be confirmed, what is in doubt, and how surely."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import a_candidate, a_leader, a_state

from autotune.data.figures import LogInterval
from autotune.data.record import Standing
from autotune.stats.intervals import Spread

SPREAD = Spread(deviation=0.05, degrees=30)
CONFIRMED = a_leader(1, standing=Standing.CONFIRMED, low=0.3, high=0.6)


def numbers(found):
    """The numbers of candidates, in order."""
    return [each.number for each in found]


def test_slices_reduce_error_to_a_floor_that_processes_lower():
    errors = [a_candidate(1, pairs=pairs).error(SPREAD) for pairs in (2, 8, 10_000)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] > 0.01 > a_candidate(1, pairs=10_000, processes=9).error(SPREAD)


def test_likely_leaders_beat_chance_and_come_surest_first():
    found = a_state(
        a_candidate(1, 0.5),
        a_candidate(2, 0.6),
        a_candidate(3, 0.7, pruned=True),
        a_candidate(4, 0.7, unstable=True),
        dataclasses.replace(a_candidate(5), ratio=-math.inf, pairs=0),
        a_candidate(6, 0.03),
        a_candidate(7, 0.62, pairs=1),  # faster than the second, and less surely so
    ).likely_leaders
    assert numbers(found) == [2, 7, 1]


@pytest.mark.parametrize(
    ("standing", "again"), [(Standing.OUT_OF_TIME, True), (Standing.NOT_SHOWN, False), (Standing.UNSTABLE, False)]
)
def test_leader_is_confirmed_again_only_if_it_ran_out_of_time(standing, again):
    leader = a_leader(1, standing=standing, low=-0.1, high=0.1, processes=4)
    assert bool(a_state(a_candidate(1, 0.5), leaders=(leader,)).likely_leaders) is again


def test_only_clearly_faster_candidates_challenge_a_champion():
    state = a_state(a_candidate(1, 0.5), a_candidate(2, 0.5, pairs=500), a_candidate(3, 0.7), leaders=(CONFIRMED,))
    assert numbers(state.likely_leaders) == [3]
    second = a_leader(3, number=95, standing=Standing.CONFIRMED, low=0.5, high=0.8)
    later = dataclasses.replace(state, leaders=(CONFIRMED, second))
    assert later.best_leader is second
    assert later.likely_leaders == []


LARGER = a_leader(2, number=92, standing=Standing.CONFIRMED, low=1.8, high=2.2, batch_ratio=4.0)


def sooner(low, high):
    """A larger batch's leader, which reaches the same losses so much sooner, as a share."""
    bounds = math.log1p(low), math.log1p(high)
    measured = LogInterval(value=sum(bounds) / 2, low=bounds[0], high=bounds[1], count=8)
    return dataclasses.replace(LARGER, same_loss=measured)


def test_of_each_batch_size_there_is_a_champion():
    state = a_state(a_candidate(1, 0.5), a_candidate(2, 2.0, batch_ratio=4.0), leaders=(CONFIRMED, LARGER))
    assert (state.same_training, state.larger_batch) == (CONFIRMED, LARGER)
    assert state.leader_to_beat(a_candidate(3, 0.1)) is CONFIRMED
    assert state.leader_to_beat(a_candidate(3, 0.1, batch_ratio=4.0)) is LARGER
    assert state.leader_to_beat(a_candidate(3, 0.1, batch_ratio=8.0)) is None


@pytest.mark.parametrize(
    ("leaders", "recommended"),
    [
        ((CONFIRMED, LARGER), "same"),  # how it learns is not known
        ((CONFIRMED, sooner(1.5, 2.5)), "larger"),
        ((CONFIRMED, sooner(0.3, 0.8)), "same"),  # sooner than the baseline, but not than the same training
        ((CONFIRMED, sooner(-0.1, 3.0)), "same"),
        ((sooner(0.1, 0.3),), "larger"),
        ((sooner(-0.1, 0.3),), None),
        ((LARGER,), None),
    ],
)
def test_larger_batch_is_recommended_only_if_surely_sooner(leaders, recommended):
    """Sooner to the same losses than the baseline and the same training."""
    found = a_state(a_candidate(1, 0.5), a_candidate(2, 2.0, batch_ratio=4.0), leaders=leaders).recommended
    assert (found and ("same" if found.is_same_training else "larger")) == recommended


@pytest.mark.parametrize(("unknown", "recommended"), [(1, "larger"), (2, "same")])
def test_known_numerics_come_before_the_same_loss_sooner(unknown, recommended):
    candidates = [a_candidate(1, 0.5), a_candidate(2, 2.0, batch_ratio=4.0)]
    candidates[unknown - 1] = dataclasses.replace(candidates[unknown - 1], uncheckable=True)
    larger = sooner(1.5, 2.5) if unknown == 2 else sooner(0.2, 0.4)
    found = a_state(*candidates, leaders=(CONFIRMED, larger)).recommended
    assert ("same" if found.is_same_training else "larger") == recommended


def test_a_larger_batch_must_gain_what_counts():
    larger = sooner(0.2, 0.4)
    state = a_state(a_candidate(2, 2.0, batch_ratio=4.0), leaders=(larger,))
    assert state.recommended is larger
    assert dataclasses.replace(state, min_gain=0.5).recommended is None


def test_larger_batch_must_look_sooner_than_a_confirmed_leader():
    small, large = (a_candidate(number, gain, batch_ratio=4.0) for number, gain in ((2, 0.8), (3, 2.0)))
    assert numbers(a_state(a_candidate(1, 0.5), small, large, leaders=(CONFIRMED,)).likely_leaders) == [3]
    needs_all = dataclasses.replace(a_state(small, large, leaders=(CONFIRMED,)), over_critical=math.inf)
    assert needs_all.likely_leaders == [], "it needs four times the examples"


def test_same_training_need_not_beat_a_larger_batch():
    state = a_state(a_candidate(1, 0.5), a_candidate(2, 2.0, batch_ratio=4.0), leaders=(sooner(1.5, 2.5),))
    assert numbers(state.likely_leaders) == [1]


def test_soonest_to_the_same_loss_is_confirmed_first():
    same, larger = a_candidate(1, 0.5), a_candidate(2, 0.8, batch_ratio=4.0)
    faster = dataclasses.replace(larger, ratio=math.log(4.0))
    assert numbers(a_state(same, larger, learning_seconds=30.0).likely_leaders) == [1, 2]
    assert numbers(a_state(same, faster, learning_seconds=30.0).likely_leaders) == [2, 1]
    assert numbers(a_state(same, faster).likely_leaders) == [1, 2], "without time to see how it learns it comes last"


def test_uncomparable_numerics_come_last():
    """They never replace a champion of comparable numerics."""
    unknown = dataclasses.replace(a_candidate(3, 0.9), uncheckable=True)
    fast, faster = a_candidate(1, 0.5), a_candidate(4, 0.7)
    assert numbers(a_state(unknown, fast).likely_leaders) == [1, 3]
    not_yet = dataclasses.replace(unknown, uncheckable=False, unchecked=True)
    assert numbers(a_state(not_yet, fast, check_seconds=9.0).likely_leaders) == [3, 1], "it will be compared"
    assert numbers(a_state(not_yet, fast, check_seconds=0.0).likely_leaders) == [1, 3]
    assert numbers(a_state(unknown, fast, faster, leaders=(CONFIRMED,)).likely_leaders) == [4]
    confirmed = a_leader(3, standing=Standing.CONFIRMED, low=0.8, high=1.0)
    assert numbers(a_state(unknown, fast, leaders=(confirmed,)).likely_leaders) == [1], "it need not be faster"


def test_gains_are_excluded_for_all_candidates_together():
    few, many = (a_state(*(a_candidate(number) for number in range(count))) for count in (2, 20))
    assert few.gain_upper_bound(few.candidates[0]) < many.gain_upper_bound(many.candidates[0])


@pytest.mark.parametrize("standing", [Standing.NOT_SHOWN, Standing.OUT_OF_TIME])
def test_what_was_confirmed_has_the_bound_of_its_fresh_processes(standing):
    leader = a_leader(1, standing=standing, low=-0.05, high=0.08)
    state = a_state(a_candidate(1, 0.5), leaders=(leader,))
    assert math.exp(state.gain_upper_bound(state.candidates[0])) == pytest.approx(1.08)


def test_what_failed_has_no_gain():
    state = a_state(dataclasses.replace(a_candidate(1), ratio=-math.inf, pairs=0))
    assert state.gain_upper_bound(state.candidates[0]) == -math.inf
    assert state.unclear == []


def test_the_most_doubtful_is_the_first_that_is_unclear():
    leader = a_leader(4, standing=Standing.NOT_SHOWN, low=-0.1, high=0.3)
    state = a_state(
        a_candidate(1, 0.06),
        a_candidate(2, 0.04, pairs=4),
        a_candidate(3, -0.3),
        a_candidate(4, 0.2),
        a_candidate(5, 0.2, unstable=True),
        leaders=(leader,),
    )
    assert numbers(state.unclear) == [1, 2]
    assert state.inconclusive == [leader]


@pytest.mark.parametrize(("min_gain", "bound"), [(0.02, 0.10), (0.3, 0.3)])
def test_gains_that_do_not_count_need_not_be_excluded(min_gain, bound):
    assert math.expm1(a_state(min_gain=min_gain).bound) == pytest.approx(bound)


@given(st.floats(-0.3, 0.05), st.integers(1, 4))
def test_the_looks_that_exclude_a_gain_are_enough(gain, pairs):
    candidate = a_candidate(1, gain, pairs=pairs)
    state = a_state(candidate)
    looks = state.looks_to_exclude(candidate, state.bound)
    more = dataclasses.replace(candidate, pairs=pairs * (1 + looks), processes=1 + looks)
    assert looks >= 4 or dataclasses.replace(state, candidates=(more,)).unclear == []
    assert (looks > 0) or state.unclear == []


def test_since_best_counts_candidates_after_the_best():
    slower = [a_candidate(number, 0.1) for number in (3, 4)]
    assert a_state(a_candidate(1, 0.2), a_candidate(2, 0.5), *slower).since_best == 2
    assert a_state(a_candidate(1, 0.2), a_candidate(2, 0.5, unstable=True), *slower).since_best == 3
    assert a_state().since_best == 0


def test_only_one_leader_is_open():
    answered, running = a_leader(1, standing=Standing.NOT_SHOWN), a_leader(2, number=95)
    assert a_state(a_candidate(1), a_candidate(2), leaders=(answered, running)).next_open_leader is running
    assert a_state(a_candidate(1), leaders=(answered,)).next_open_leader is None
