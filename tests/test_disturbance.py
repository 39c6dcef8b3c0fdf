"""Which pairs are disturbed, and that leaving them out does not shape the claim."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import Fresh, a_slice, faster_by, log_ratios_of, simulated_trials

from autotune.data.facts import GpuUse
from autotune.data.record import LOOK_SHARE, Phase
from autotune.front.console import trial_line
from autotune.space.configuration import Configuration
from autotune.stats.disturbance import CAUSES, find_disturbances, load_of, usable_pairs
from autotune.tuning import trial as running
from autotune.tuning.policy import error_of
from autotune.tuning.trial import Trial

SPEED = faster_by(jit_compile=1.5, batch_size=1.2, steps_per_execution=1.1)


def loaded(load, rate=4000.0):
    """A slice during which others took so much of the machine; None where that is unknown."""
    return a_slice(rate).model_copy(update={"cores": 1, "foreign_cpu_seconds": None if load is None else 0.5 * load})


def disturbed_pairs(loads):
    """Which pairs of slices with these loads are left out, the baseline's load first."""
    found = find_disturbances([(loaded(one), loaded(other)) for one, other in loads])
    assert set(found) <= {None, "others"}
    return [each is not None for each in found]


def marked(loads, usual=0.0, count=12):
    """The places of the pairs that are disturbed; loads by the slice's place, from 0, baseline first."""
    slices = [loads.get(place, usual) for place in range(2 * count)]
    found = disturbed_pairs(list(zip(slices[::2], slices[1::2], strict=True)))
    return [place for place, disturbed in enumerate(found) if disturbed]


@pytest.mark.parametrize(
    ("loads", "usual", "left_out"),
    [
        pytest.param({5: 0.4, 10: 0.3, 11: 0.3}, 0.0, [2, 5], id="bursts"),
        pytest.param({5: 0.9, 10: 0.8, 11: 0.8}, 0.5, [2, 5], id="bursts over a load"),
        pytest.param(dict.fromkeys(range(6, 15), 0.45), 0.0, [3, 4, 5, 6, 7], id="a long burst"),
        pytest.param({}, 0.1, [], id="a little constant load"),
        pytest.param({}, 0.9, [], id="constant load"),
        pytest.param(dict.fromkeys(range(1, 24, 2), 0.4), 0.0, [], id="load that comes with one configuration"),
        pytest.param({9: 0.0}, 0.5, [4], id="a slice without the usual load"),
        pytest.param({5: 0.05}, 0.0, [], id="little load"),
        pytest.param({5: 0.5}, None, [], id="a machine that shows nothing else"),
        pytest.param({5: None, 9: 0.5}, 0.0, [4], id="a slice of unknown load"),
    ],
)
def test_bursts_of_load_mark_the_pairs_that_they_hit(loads, usual, left_out):
    assert marked(loads, usual) == left_out


def test_without_pairs_none_is_disturbed():
    assert disturbed_pairs([]) == []


@pytest.mark.parametrize(
    ("cores", "foreign", "steal", "load"),
    [(None, 1.0, None, None), (2, None, None, None), (2, 0.5, 0.5, 0.5), (2, None, 0.5, 0.25), (2, 9.0, 0.0, 1.0)],
)
def test_a_load_is_what_others_took_of_the_cores(cores, foreign, steal, load):
    counted = {"cores": cores, "foreign_cpu_seconds": foreign, "steal_seconds": steal}
    assert load_of(a_slice(seconds=1.0).model_copy(update=counted)) == load


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
    noise = random.Random(1)
    loads = [{place: min(0.95, restless(noise)) for place in range(40)} for _ in range(60)]
    assert sum(len(marked(load, count=20)) for load in loads) / (60 * 20) < 0.05


shares = st.floats(0, 1)


@given(st.lists(st.tuples(shares, shares), max_size=30))
def test_candidate_and_baseline_are_judged_alike(loads):
    found = disturbed_pairs(loads)
    assert disturbed_pairs([(two, one) for one, two in loads]) == found
    assert not any(found) or found.count(False) >= max(2, len(found) / 2)


@given(st.lists(st.booleans(), max_size=30))
def test_enough_pairs_remain_or_all_are_used(disturbed):
    keep = usable_pairs(disturbed)
    assert len(keep) == len(disturbed)
    if not all(keep):
        assert sum(keep) >= max(2, len(keep) / 2)
        assert keep == [not each for each in disturbed]


# ------------------------------------------------------------------------------------------------- on a GPU


def on_gpu(count=12, **sides):
    """Why each pair is left out. `baseline` and `candidate` say, by the pair's place, what their slices' card tells."""
    slices = {
        side: [
            a_slice().model_copy(update={"gpus": (GpuUse(**{**QUIET, **told.get(place, {})}),)})
            for place in range(count)
        ]
        for side, told in {"baseline": {}, "candidate": {}, **sides}.items()
    }
    found = find_disturbances(list(zip(slices["baseline"], slices["candidate"], strict=True)))
    return {place: cause for place, cause in enumerate(found) if cause is not None}


QUIET = {"limited_by": (), "others": 0, "foreign_utilisation": 0.0}
HOT, CAPPED, IDLE = ({"limited_by": (each,)} for each in ("thermal", "power_cap", "idle"))


@pytest.mark.parametrize("reason", ["power_cap", "thermal", "hardware_thermal", "hardware_slowdown", "power_brake"])
def test_a_pair_whose_card_was_slowed_on_one_side_is_left_out(reason):
    slowed = {"limited_by": (reason, "sync_boost")}
    assert on_gpu(baseline={3: slowed}, candidate={7: slowed}) == {3: "gpu_clocks", 7: "gpu_clocks"}


BUSY, THERE, SITS = ({"others": 1, "foreign_utilisation": share} for share in (0.4, None, 0.0))
SILENT = {"limited_by": None, "others": None, "foreign_utilisation": None}


@pytest.mark.parametrize(
    ("baseline", "candidate", "left_out"),
    [
        pytest.param({3: HOT}, {3: HOT}, {}, id="slowed on both sides"),
        pytest.param({3: IDLE}, {5: {"limited_by": ("applications_clocks",)}}, {}, id="clocks that were set or idle"),
        pytest.param({}, dict.fromkeys(range(0, 12, 2), CAPPED), {}, id="a cap that comes with one configuration"),
        pytest.param(
            {0: HOT, 4: HOT}, {2: HOT, 6: HOT}, dict.fromkeys((0, 2, 4, 6), "gpu_clocks"), id="at times on both sides"
        ),
        pytest.param({2: BUSY}, {9: THERE}, {2: "others_on_gpu", 9: "others_on_gpu"}, id="another process"),
        pytest.param({}, {2: SITS}, {}, id="a process that only sits there"),
        pytest.param(*[dict.fromkeys(range(12), THERE)] * 2, {}, id="a process that is always there"),
        pytest.param({2: {**HOT, "others": 1}}, {2: SILENT}, {}, id="a card that does not tell"),
    ],
)
def test_a_card_that_is_slowed_or_shared_at_times_disturbs(baseline, candidate, left_out):
    assert on_gpu(baseline=baseline, candidate=candidate) == left_out


def test_the_trial_says_why_pairs_were_left_out(among_bursts):
    record = among_bursts.record
    left_out = [pair.disturbed_by for pair in record.pairs if pair.disturbed]
    assert set(left_out) == {"others"}
    line = trial_line(record, "jit_compile=true", stamp="1:00").plain
    assert f"({len(left_out)} of {len(record.pairs)} pairs discarded: {CAUSES['others']})" in line


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
    trials = simulated_trials(SPEED, noise=0.03, instance_noise=0.005, foreign_load=load, seed=seed, **settings)
    fresh = Fresh(tmp_path, trials)
    fresh.measure(pairs, rounds=12)
    return fresh


@pytest.fixture(scope="module")
def among_bursts(tmp_path_factory):
    """Pairs of which bursts have disturbed some."""
    return confirmed(tmp_path_factory.mktemp("bursts"), 3, load=bursts(3))


def test_with_bursts_the_claim_is_narrower_and_still_covers(tmp_path, monkeypatch):
    def intervals(seeds):
        return [confirmed(tmp_path, seed, load=bursts(seed)).interval() for seed in range(seeds)]

    found = intervals(24)
    assert sum(each.low <= math.log(1.5) <= each.high for each in found) >= 22
    monkeypatch.setattr(running, "find_disturbances", lambda pairs: [None] * len(pairs))
    with_detection, without = (sum(each.half_width for each in some) for some in (found[:12], intervals(12)))
    assert with_detection < 0.7 * without


def test_bursts_that_do_not_show_leave_the_claim_covering(tmp_path):
    found = [
        confirmed(tmp_path, seed, load=bursts(seed, every=30.0, longest=6.0), load_shows=False) for seed in range(16)
    ]
    intervals = [fresh.interval(confidence=1 - LOOK_SHARE * error_of(1)) for fresh in found]
    assert sum(interval.low <= math.log(1.5) <= interval.high for interval in intervals) >= 15
    assert not any(pair.disturbed for each in found for pair in each.record.pairs)


def test_what_the_claim_rests_on_can_be_read_from_the_record(among_bursts):
    found = among_bursts
    assert any(pair.disturbed for pair in found.record.pairs)
    instances = {}
    for pair in found.record.pairs:
        if not pair.disturbed:
            instances.setdefault(pair.instance, []).append(pair)
    means = [statistics.fmean(log_ratios_of(pairs)) for pairs in instances.values()]
    assert found.interval().value == pytest.approx(statistics.fmean(means))


def test_disturbed_pairs_are_taken_again_within_bounds(tmp_path, among_bursts):
    def rounds(fresh):
        counts = [sum(pair.instance == each for pair in fresh.record.pairs) for each in range(6)]
        return min(counts), max(counts)

    assert rounds(confirmed(tmp_path, 3, load=lambda at: 0.0)) == (12, 12)
    fewest, most = rounds(among_bursts)
    assert fewest >= 12
    assert 12 < most <= 30


def test_a_search_trials_disturbed_pairs_do_not_count():
    baseline, trial = (Trial(number, Phase.SEARCH, Configuration({})) for number in (0, 1))
    for load, rate in ((0.0, 6000.0), (0.0, 6600.0), (0.8, 2000.0), (0.0, 6300.0)):
        trial.add_pair(baseline_first=True, baseline=loaded(0.0), candidate=loaded(load, rate), reference=baseline)
    assert [pair.disturbed for pair in trial.pairs] == [False, False, True, False]
    left = [math.log(rate / 4000) for rate in (6000, 6600, 6300)]
    assert math.log(trial.speedup.value) == pytest.approx(statistics.fmean(left))
