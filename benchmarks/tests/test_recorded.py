"""Whole runs replayed on recorded slices, and the ways of making intervals that are compared on them."""

import dataclasses
import itertools
import math
import random
import statistics

import pytest
from looks import RULES, confirmed, spending
from recorded import CONDITIONS, DEFAULT, RecordedTrials, Recording, Stretch, planted, replay, true_speedup
from simulated_runs import BASELINE

from autotune.stats.deciding import Verdict
from autotune.stats.intervals import ProcessPrior


def an_instance(rng, *, noise, pairs=5, ratio=1.0):
    """So many pairs of slices of half a second and about 2,000 examples."""
    return [
        ((2000, 0.5 * math.exp(rng.gauss(0, noise))), (2000, 0.5 * math.exp(rng.gauss(0, noise)) / ratio))
        for _ in range(pairs)
    ]


def a_recording(*, noise=0.03, ratio=1.0, pairs=5, seed=0):
    """Forty instances; the second side was faster by a factor when it was recorded."""
    rng = random.Random(seed)
    pool = [an_instance(rng, noise=noise, pairs=pairs, ratio=ratio) for _ in range(40)]
    return Recording(
        import_seconds=3.0, first_step_seconds=0.5, warmup_seconds=1.0, call_seconds=0.01, pools={"quiet": pool}
    )


def log_ratios_of(recording):
    """Of each instance as it was recorded, the second side over the first."""
    return [
        [math.log(others / theirs / (examples / seconds)) for (examples, seconds), (others, theirs) in each]
        for each in recording.pools["quiet"]
    ]


def test_a_stretch_is_one_instance_in_its_order():
    recording = a_recording()
    rounds = [
        [sign * each[(start + index) % 5] for index in range(5)]
        for each, start, sign in itertools.product(log_ratios_of(recording), range(5), (1, -1))
    ]
    for seed in range(20):
        stretch = Stretch(recording.pools["quiet"], random.Random(seed))
        played = [math.log(stretch.ratio(index)) for index in range(5)]
        assert any(played == pytest.approx(each) for each in rounds)
        assert stretch.ratio(7) == stretch.ratio(2), "round again"


def test_all_instances_and_both_sides_are_drawn():
    recording = a_recording(ratio=1.1)
    rng = random.Random(0)
    drawn = [Stretch(recording.pools["quiet"], rng) for _ in range(2000)]
    means = [math.fsum(math.log(each.ratio(index)) for index in range(5)) / 5 for each in drawn]
    of_pool = [math.fsum(each) / 5 for each in log_ratios_of(recording)]
    assert sum(map(abs, means)) / 2000 == pytest.approx(sum(map(abs, of_pool)) / 40, rel=0.03)
    assert sum(mean > 0 for mean in means) / 2000 == pytest.approx(0.5, abs=0.05)
    assert len({round(abs(math.log(each.ratio(0))), 9) for each in drawn}) > 0.95 * 40 * 5


def ratios_in_replay(recording, pairs=2000):
    """Log-ratios of neighbouring slices of replayed processes, each two of which have five."""
    trials = RecordedTrials(recording, CONDITIONS["quiet"], planted(0.0), seed=1)
    found = []
    while len(found) < pairs:
        sides = [trials.launch(each, log="", data=None) for each in (BASELINE, BASELINE.replace(jit_compile=True))]
        for side in sides:
            side.warm_up(60.0)
        for _ in range(5):
            slices = [side.measure(5.0, 60.0) for side in sides]
            rates = [math.log(slice_.examples / slice_.seconds) for slice_ in slices]
            found.append(rates[1] - rates[0])
        for side in sides:
            side.kill()
    return found


def test_pairs_of_a_replay_vary_as_they_were_recorded_to():
    recording = a_recording(noise=0.1)
    recorded = [value for each in log_ratios_of(recording) for value in each]
    replayed = ratios_in_replay(recording)
    assert statistics.pstdev(replayed) == pytest.approx(math.hypot(*recorded) / math.sqrt(200), rel=0.1)
    assert abs(statistics.fmean(replayed)) < 0.01


def test_what_the_machine_does_to_both_sides_cancels_out():
    rng = random.Random(0)
    speeds = [0.5 * math.exp(rng.gauss(0, 0.3)) for _ in range(40)]
    pool = [[((2000, speed), (2000, speed)) for speed in speeds]]
    recording = dataclasses.replace(a_recording(), pools={"quiet": pool})
    assert max(map(abs, ratios_in_replay(recording, 50))) < 1e-6


def test_no_gain_is_rarely_claimed():
    runs = [replay(a_recording(), CONDITIONS["quiet"], gain=0.0, budget=120.0, seed=seed) for seed in range(10)]
    assert sum(each.evidence.verdict is Verdict.FASTER for each in runs) <= 1


def test_a_large_planted_gain_is_found_and_its_interval_holds_it():
    runs = [replay(a_recording(), CONDITIONS["quiet"], gain=0.5, budget=120.0, seed=seed) for seed in range(5)]
    assert {each.evidence.verdict for each in runs} == {Verdict.FASTER}
    for each in runs:
        low, high = each.evidence.speedup.low, each.evidence.speedup.high
        assert low <= true_speedup(each, a_recording(), CONDITIONS["quiet"], 0.5) <= high


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_interval_moves_with_what_it_is_of(rule):
    rng = random.Random(1)
    prior = ProcessPrior(deviation=0.05, degrees=8)
    processes = [[rng.gauss(0.0, 0.1) for _ in range(5)] for _ in range(8)]
    found = rule(processes, prior)
    moved = rule([[value + 0.3 for value in values] for values in processes], prior)
    mirrored = rule([[-value for value in values] for values in processes], prior)
    assert found.low < found.high
    assert (moved.low, moved.high) == pytest.approx((found.low + 0.3, found.high + 0.3))
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low))


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
def test_a_large_gain_takes_two_processes_and_none_is_by_chance(condition):
    recording = Recording.load(DEFAULT)
    clear = [confirmed(recording, condition, spending, 1.0, seed) for seed in range(20)]
    assert statistics.median(count for count, _ in clear) == 2
    assert sum(holds for _, holds in clear) >= 19
    absent = [confirmed(recording, condition, spending, 0.0, seed) for seed in range(20)]
    assert sum(count > 0 for count, _ in absent) <= 2
