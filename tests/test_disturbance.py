"""Which pairs are disturbed, and that leaving them out does not shape the claim."""

import json
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_runs import Fresh, a_pair, faster_by, log_ratios_of, quick_tune, simulated_trials

from autotune.record import Pair, Phase
from autotune.stats.disturbance import (
    Disturbance,
    Timing,
    departures,
    disturbances,
    kept,
    load_of,
)
from autotune.tuning import trial as running
from autotune.tuning.resuming import Earlier
from autotune.tuning.trial import speedup_of

SPEED = faster_by(jit_compile=1.5, batch_size=1.2, steps_per_execution=1.1)


def pairs_of(loads=None, speeds=None, count=12, apart=0.5):
    """Pairs of slices half a second apart, baseline first; loads or speeds by the slice's place, from 0."""
    loads, speeds = loads or {}, speeds or {}
    usual = None if loads.get("unknown") else 0.0

    def slice_at(place):
        return Timing(
            at=place * apart, log_rate=math.log(4000.0 * speeds.get(place, 1.0)), load=loads.get(place, usual)
        )

    return [(slice_at(2 * each), slice_at(2 * each + 1)) for each in range(count)]


def marked(pairs):
    """The places of the pairs that are disturbed."""
    return [place for place, found in enumerate(disturbances(pairs)) if found is not None]


# ---------------------------------------------------------------------------------------------------- load


def test_a_burst_of_load_marks_the_pairs_that_it_hit():
    """Whether it hit one slice of a pair or both; nothing else is marked."""
    pairs = pairs_of({5: 0.5, 10: 0.3, 11: 0.3})
    assert marked(pairs) == [2, 5]
    assert disturbances(pairs)[2] is Disturbance.LOAD


@pytest.mark.parametrize("apart", [0.25, 0.5, 5.0])
@pytest.mark.parametrize("slices", [1, 6, 12])
@pytest.mark.parametrize("kind", ["load", "pace"])
def test_how_long_a_burst_may_be_does_not_depend_on_how_short_slices_are(apart, slices, kind):
    """One of up to six seconds, or of twelve slices where these are longer, is marked whole, and nothing else is."""
    hit = range(40, 40 + max(slices, int(slices / 2 / apart)))
    what = {"load": dict.fromkeys(hit, 0.45)} if kind == "load" else {"speeds": dict.fromkeys(hit, 0.5)}
    pairs = pairs_of(what.get("load"), what.get("speeds"), count=50, apart=apart)
    lone = kind == "pace" and len(hit) == 1  # a slow slice is no burst
    assert marked(pairs) == ([] if lone else sorted({place // 2 for place in hit}))


@pytest.mark.parametrize("load", [0.1, 0.5, 0.9])
def test_constant_load_is_no_burst(load):
    """Where others are always busy, that is what this machine is."""
    assert marked(pairs_of(dict.fromkeys(range(24), load))) == []


def test_load_that_comes_with_one_configuration_is_no_burst():
    """Kernel threads that work for the candidate alone belong to it: its pairs are all alike."""
    assert marked(pairs_of({place: 0.4 for place in range(24) if place % 2})) == []


def test_the_end_of_a_long_load_marks_the_pair_that_it_divides():
    """Where a load is usual, a pair of which one slice lacks it compares what cannot be compared."""
    loads = {place: 0.5 for place in range(24) if place != 9}
    assert marked(pairs_of(loads)) == [4]


def test_little_load_is_no_burst():
    """A few percent of the machine are what any machine has."""
    assert marked(pairs_of({5: 0.05})) == []


def test_what_a_machine_does_not_show_marks_nothing():
    """Unknown loads are unknown, not nothing."""
    assert marked(pairs_of({"unknown": True, 5: 0.5})) == []
    assert load_of(seconds=1.0, cores=None, foreign_cpu_seconds=1.0, steal_seconds=None) is None
    assert load_of(seconds=1.0, cores=2, foreign_cpu_seconds=None, steal_seconds=None) is None
    assert load_of(seconds=1.0, cores=2, foreign_cpu_seconds=0.5, steal_seconds=0.5) == 0.5


@pytest.mark.parametrize(
    "restless",
    [
        lambda r: r.uniform(0.0, 0.4),
        lambda r: r.expovariate(1 / 0.1),
        lambda r: abs(r.gauss(0.0, 0.05)),
        lambda r: 0.02 if r.random() < 0.98 else 0.08,
    ],
)
def test_a_machine_that_is_always_restless_has_few_marked(restless):
    """Below one pair in twenty, however its load is spread."""
    noise = random.Random(1)
    found = total = 0
    for _ in range(60):
        pairs = pairs_of({place: min(0.95, restless(noise)) for place in range(40)}, count=20)
        found, total = found + len(marked(pairs)), total + len(pairs)
    assert found / total < 0.05


# ---------------------------------------------------------------------------------------------------- pace


def test_a_stretch_that_slowed_both_is_a_burst_though_nothing_shows():
    """All pairs that it touches are marked, also the one of which it hit the second slice only."""
    pairs = pairs_of({"unknown": True}, {5: 0.5, 6: 0.5, 7: 0.6})
    assert marked(pairs) == [2, 3]
    assert disturbances(pairs)[2] is Disturbance.PACE


@pytest.mark.parametrize("slow", [[5], [4], [5, 9, 15], [0, 2, 4], [3, 8, 15]])
def test_one_process_that_stands_still_is_no_burst(slow):
    """A training's own stalls are part of its speed: where the other is not slow beside it, they count."""
    assert marked(pairs_of(speeds=dict.fromkeys(slow, 0.3))) == []


def test_slices_are_neighbours_in_time_not_in_the_list():
    """Where the candidate ran first, its slice is beside what came before."""
    pairs = pairs_of(speeds={5: 0.5, 6: 0.5})
    apart = [
        (one, Timing(at=other.at + 100.0, log_rate=other.log_rate, load=other.load)) for one, other in pairs
    ]
    assert marked(pairs) == [2, 3]
    assert marked(apart) == []


def test_noisy_speeds_alone_mark_next_to_nothing():
    """Slices whose speeds vary by 10, 20 or 30 percent are this machine as it is."""
    noise = random.Random(1)
    for deviation in (0.1, 0.2, 0.3):
        speeds = [{place: math.exp(noise.gauss(0.0, deviation)) for place in range(40)} for _ in range(60)]
        found = sum(len(marked(pairs_of(speeds=each, count=20))) for each in speeds)
        assert found / (60 * 20) < 0.01


log_rates = st.floats(-3.0, 9.0)
any_pairs = st.lists(
    st.tuples(st.floats(0, 100), log_rates, st.floats(0, 1), log_rates, st.floats(0, 1)), max_size=30
).map(
    lambda rows: [
        (Timing(at=at, log_rate=a, load=b), Timing(at=at + 0.5, log_rate=c, load=d))
        for at, a, b, c, d in rows
    ]
)


@settings(deadline=None)
@given(any_pairs)
def test_candidate_and_baseline_are_judged_alike(pairs):
    """With the two exchanged the same pairs are marked: nobody is favoured."""
    assert disturbances([(two, one) for one, two in pairs]) == disturbances(pairs)


@settings(deadline=None)
@given(any_pairs, st.floats(-2.0, 2.0))
def test_how_much_faster_the_candidate_is_does_not_enter_loads(pairs, gain):
    """What goes for its load goes whatever the ratio is that is to be claimed."""

    def by_load(of):
        return [each is Disturbance.LOAD for each in disturbances(of)]

    faster = [(one, Timing(at=two.at, log_rate=two.log_rate + gain, load=two.load)) for one, two in pairs]
    assert by_load(faster) == by_load(pairs)


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=30))
def test_enough_pairs_remain_or_all_are_used(disturbed):
    """Never fewer than half, never fewer than the fewest, and no disturbed one beside those that were left out."""
    keep = kept(disturbed)
    assert len(keep) == len(disturbed)
    if not all(keep):
        assert sum(keep) >= max(2, len(keep) / 2)
        assert keep == [not each for each in disturbed]


# ---------------------------------------------------------------------------------------------------- bias


def ratios_under(rule, *, candidate_stalls=0.0, baseline_stalls=0.0, burst=0.0, seed=0):
    """Mean log-ratio error of pairs that a rule leaves, the truth being the mean of all that is the trainings' own."""
    noise = random.Random(seed)
    left, own = [], []
    for _ in range(400):
        sides = {0: {}, 1: {}}
        slow_until = -1
        for place in range(40):
            side = place % 2
            stall = (baseline_stalls, candidate_stalls)[side]
            log_rate = noise.gauss(0.0, 0.05) - (0.7 if noise.random() < stall else 0.0)
            own.append((1 if side else -1) * 2 * log_rate)
            if noise.random() < burst:
                slow_until = place + noise.randrange(1, 5)
            sides[side][place // 2] = (place / 2, log_rate - (0.6 if place < slow_until else 0.0))
        pairs = [
            tuple(
                Timing(at=sides[side][each][0], log_rate=sides[side][each][1], load=None) for side in (0, 1)
            )
            for each in range(20)
        ]
        left += [
            two.log_rate - one.log_rate
            for (one, two), drop in zip(pairs, rule(pairs), strict=True)
            if not drop
        ]
    return statistics.fmean(left) - statistics.fmean(own)


def ours(pairs):
    """The rule in force."""
    return disturbances(pairs)


def slow_baseline(pairs):
    """A rule that is not in force: pairs whose baseline was slow go."""
    return [one.log_rate < -0.3 for one, _ in pairs]


def either_slow(pairs):
    """A rule that is not in force: pairs of which either was slow go."""
    return [min(one.log_rate, two.log_rate) < -0.3 for one, two in pairs]


def test_leaving_out_slow_baselines_is_conservative_and_wrong():
    """It makes the baseline look faster than it is, whether bursts or its own stalls slowed it."""
    assert ratios_under(slow_baseline, burst=0.05) < -0.02
    assert ratios_under(slow_baseline, baseline_stalls=0.1) < -0.05


def test_leaving_out_whatever_was_slow_hides_a_candidates_stalls():
    """Symmetric in words, and a candidate that stands still now and then looks as if it did not."""
    assert ratios_under(either_slow, candidate_stalls=0.1) > 0.05


@pytest.mark.parametrize("burst", [0.0, 0.05])
@pytest.mark.parametrize(("candidate", "baseline"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.1), (0.05, 0.05)])
def test_the_rule_in_force_moves_the_claim_by_nothing_that_counts(candidate, baseline, burst):
    """With bursts and stalls of either one: the ratio stays what the trainings' own pace makes it."""
    error = ratios_under(ours, candidate_stalls=candidate, baseline_stalls=baseline, burst=burst)
    assert abs(error) < 0.01


# ------------------------------------------------------------------------------------------- the whole chain


def bursts(seed, *, every=8.0, longest=2.0):
    """Others take half of the machine now and then, for up to two seconds."""
    chance = random.Random(seed)
    spans, now = [], 0.0
    while now < 1000.0:
        now += chance.expovariate(1 / every)
        spans.append((now, now + chance.uniform(0.3, longest), chance.uniform(0.3, 0.7)))
        now = spans[-1][1]
    return lambda at: next((load for begins, ends, load in spans if begins <= at < ends), 0.0)


def confirmed(tmp_path, seed, *, load, pairs=6, **settings):
    """Fresh pairs of a configuration that is 1.5 times as fast, on a machine with this load."""
    trials = simulated_trials(
        SPEED, noise=0.03, instance_noise=0.005, foreign_load=load, seed=seed, **settings
    )
    fresh = Fresh(tmp_path, trials)
    fresh.measure(pairs, rounds=12)
    return fresh


def test_with_bursts_the_claim_is_narrower_and_still_covers(tmp_path, monkeypatch):
    """Detection makes the interval clearly narrower; the truth is inside as often as it should be."""
    seeds = range(24)

    def all_of_them():
        found = [confirmed(tmp_path, seed, load=bursts(seed)).interval() for seed in seeds]
        covered = sum(each.low <= math.log(1.5) <= each.high for each in found)
        return statistics.fmean(each.half_width for each in found), covered

    with_detection, covered = all_of_them()
    monkeypatch.setattr(running, "disturbances", lambda pairs: [None] * len(pairs))
    without, _ = all_of_them()
    assert with_detection < 0.7 * without
    assert covered >= 22


def test_bursts_that_do_not_show_leave_the_claim_covering(tmp_path):
    """Long bursts on a machine that shows no load are found by the pace, and the truth stays inside."""
    found = [
        confirmed(tmp_path, seed, load=bursts(seed, every=30.0, longest=6.0), load_shows=False)
        for seed in range(16)
    ]
    intervals = [each.interval() for each in found]
    assert sum(each.low <= math.log(1.5) <= each.high for each in intervals) >= 15
    reasons = {pair.disturbed for each in found for pair in each.record.pairs}
    assert reasons == {None, Disturbance.PACE}


@pytest.mark.parametrize("load", [0.0, 0.5])
def test_constant_load_marks_nothing(tmp_path, load):
    """A machine that is always half taken gives a claim about that machine, with nothing left out."""
    record = confirmed(tmp_path, 1, load=lambda at: load).record
    assert all(pair.disturbed is None for pair in record.pairs)
    assert record.disturbed_pairs is None


def test_what_the_claim_rests_on_can_be_read_from_the_record(tmp_path):
    """The interval is that of the pairs that are not marked, but in instances that lost too many."""
    found = confirmed(tmp_path, 3, load=bursts(3))
    assert found.record.disturbed_pairs in ("left_out", "used")
    instances = {}
    for pair in found.record.pairs:
        instances.setdefault(pair.instance, []).append(pair)
    means = []
    for pairs in instances.values():
        keep = kept([pair.disturbed is not None for pair in pairs])
        counted = [pair for pair, counts in zip(pairs, keep, strict=True) if counts]
        means.append(statistics.fmean(log_ratios_of(counted)))
    assert found.interval().value == pytest.approx(statistics.fmean(means))


def test_disturbed_pairs_are_taken_again_within_bounds(tmp_path):
    """An instance gets a round more for each, up to a number: restlessness does not go on for ever."""

    def rounds(load):
        pairs = confirmed(tmp_path, 3, load=load).record.pairs
        counts = [sum(pair.instance == each for pair in pairs) for each in range(6)]
        return min(counts), max(counts)

    assert rounds(lambda at: 0.0) == (12, 12)
    fewest, most = rounds(bursts(3))
    assert fewest >= 12
    assert 12 < most <= 30


def test_how_many_pairs_there_are_does_not_depend_on_speeds(tmp_path):
    """Bursts that only the pace shows are left out, and never make measuring go on."""
    found = confirmed(tmp_path, 3, load=bursts(3, every=30.0, longest=6.0), load_shows=False)
    assert any(pair.disturbed for pair in found.record.pairs)
    assert len(found.record.pairs) == 6 * 12


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=40), st.randoms(use_true_random=False))
def test_what_is_usual_is_what_is_near_in_time_in_whatever_order_it_is_told(values, rng):
    """Slices that bracket others do not come in the order of time; what each departs by is the same."""
    times = [1.5 * place for place in range(len(values))]
    places = rng.sample(range(len(values)), len(values))
    in_order = departures(values, times)
    shuffled = departures([values[place] for place in places], [times[place] for place in places])
    assert shuffled == [in_order[place] for place in places]


def test_a_restored_trial_has_the_marks_of_its_record(tmp_path):
    """Resuming judges nothing anew: the log-ratios are those that the record's speed-up was made of."""
    trials = simulated_trials(SPEED, noise=0.02, foreign_load=bursts(5, every=4.0))
    _, directory = quick_tune(trials, tmp_path / "run", budget=600.0)
    records = {n: each for n, each in directory.trials.items() if each.phase is not Phase.CONFIRM}
    earlier = Earlier(run=directory.record, records=records, next_number=max(records) + 1)
    restored = {trial.number: trial for trial in earlier.trials()}
    assert any(each.disturbed_pairs for each in records.values())
    for number, record in records.items():
        assert tuple(restored[number].pairs) == record.pairs
        if record.speedup is not None:
            assert speedup_of(restored[number]).value == pytest.approx(record.speedup.value)


def test_records_without_any_of_this_are_read_as_before():
    """A pair of an older run has no time, no load and no mark; what it has is read."""
    pair = a_pair(1.5)
    new = {"at", "cores", "foreign_cpu_seconds", "steal_seconds", "throttled_seconds", "cpu_megahertz"}
    older = pair.model_dump(mode="json", exclude={"disturbed": True, "baseline": new, "candidate": new})
    assert not new & set(older["baseline"])
    assert Pair.model_validate_json(json.dumps(older)) == pair
