"""Confirmations replayed from recorded slices, and the ways of making intervals that are compared on them."""

import dataclasses
import itertools
import math
import random
import statistics
import time

import false_wins
import pytest
from autotune.study.plan import FINALISTS
from confirming import Confirmations
from estimators import WAYS, autocorrelated
from figures import share
from recorded import FEW_REPLAYS, Nowhere, RecordedTrials, Recording, Stretch, instances_of, replay, replays
from simulated_runs import a_pair, a_record

from autotune.measure.deciding import Verdict


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
        import_seconds=3.0,
        first_step_seconds=0.5,
        warmup_seconds=1.0,
        call_seconds=0.01,
        pools={"quiet": pool},
    )


def log_ratios_of(recording):
    """Of each instance as it was recorded, the second side over the first."""
    return [
        [math.log(others / theirs / (examples / seconds)) for (examples, seconds), (others, theirs) in each]
        for each in recording.pools["quiet"]
    ]


def claims(recording, count, **settings):
    """How many of so many replays of 60 s find the finalist faster."""
    results = [replay(recording, "quiet", seed, seconds=60.0, **settings) for seed in range(count)]
    return sum(each.winner is not None for each in results)


# ------------------------------------------------------------------------------------------------- slices


def test_a_stretch_is_one_instance_in_its_order():
    """Played once round, it has the recorded ratios of one instance, neighbours still neighbours; or their inverses."""
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


def test_noise_that_is_in_the_times_favours_neither_side():
    """Slices of equally many examples vary in seconds: over many replays the overall rates are equal."""
    recording = a_recording(noise=0.4)
    found = [replay(recording, "quiet", seed, seconds=60.0).confirmed[0].ratio for seed in range(200)]
    values = [each.value for each in found if each is not None]
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert abs(statistics.fmean(values)) < 3 * error < 0.04


def test_all_instances_and_both_sides_are_drawn():
    """Over many stretches every pair is the first at times, the mean size is the pool's, and half are negative."""
    recording = a_recording(ratio=1.1)
    rng = random.Random(0)
    drawn = [Stretch(recording.pools["quiet"], rng) for _ in range(2000)]
    means = [math.fsum(math.log(each.ratio(index)) for index in range(5)) / 5 for each in drawn]
    of_pool = [math.fsum(each) / 5 for each in log_ratios_of(recording)]
    assert sum(map(abs, means)) / 2000 == pytest.approx(sum(map(abs, of_pool)) / 40, rel=0.03)
    assert sum(mean > 0 for mean in means) / 2000 == pytest.approx(0.5, abs=0.05)
    assert len({round(abs(math.log(each.ratio(0))), 9) for each in drawn}) > 0.95 * 40 * 5


@pytest.mark.parametrize("gain", [1.0, 1.3])
def test_replayed_slices_have_the_planted_ratio(gain):
    """The rates of a finalist over the baseline's of the same round are a recorded ratio times the gain."""
    recording = a_recording()
    recorded = [abs(value) for each in log_ratios_of(recording) for value in each]
    trials = RecordedTrials(recording, "quiet", random.Random(3), gain=gain)
    bench = Confirmations(trials, Nowhere("nowhere"), trials.clock, seed=3)
    for _ in range(20):
        baseline, finalist = (
            trials.launch(each, log="", data=None)
            for each in (bench.baseline, bench.baseline.replace(data_threads=1))
        )
        seen = set()
        for _ in range(5):
            first, second = baseline.measure(0.5, 1.0), finalist.measure(0.5, 1.0)
            seen.add(first.seconds)
            ratio = second.examples / second.seconds / (first.examples / first.seconds)
            nearest = min(recorded, key=lambda each: abs(each - abs(math.log(ratio / gain))))
            assert abs(math.log(ratio / gain)) == pytest.approx(nearest, abs=1e-9)
        assert len(seen) == 5, "each slice is the next one"


def test_a_record_gives_its_pairs_by_instance():
    """What a confirmation has kept, in the order of time; an instance that was cut short says too little."""
    whole = [a_pair(speedup, instance=number) for number in (0, 2) for speedup in (1.0, 2.0, 1.5)]
    record = a_record(pairs=(*whole[:3], a_pair(instance=1), *whole[3:]))
    sides = [((2000, 0.5), (examples, 0.5)) for examples in (2000, 4000, 3000)]
    assert instances_of(record) == [sides, sides]


def test_a_recording_is_read_as_it_was_written(tmp_path):
    """From its file come the same replays, and it is small."""
    recording = a_recording()
    recording.save(tmp_path / "recording.json")
    again = Recording.load(tmp_path / "recording.json")
    before, after = (replay(each, "quiet", 5, seconds=60.0) for each in (recording, again))
    assert before.confirmed[0].ratio == after.confirmed[0].ratio
    assert (tmp_path / "recording.json").stat().st_size < 150 * 40 * 5


# ------------------------------------------------------------------------------------------------ replays


def test_a_replay_takes_no_time_to_speak_of():
    """It keeps to the time that it replays, and takes less than a tenth of it."""
    began = time.perf_counter()
    result = replay(a_recording(), "quiet", 0, seconds=90.0)
    assert time.perf_counter() - began < 0.1 * 90.0
    assert result.instances >= 6
    assert result.baseline.instances == result.instances


def test_more_time_buys_more_instances():
    """The plan of the confirmation is the tuner's own; what importing takes comes off its time."""
    recording = a_recording()
    counts = [replay(recording, "quiet", 0, seconds=each).instances for each in (20.0, 40.0, 90.0)]
    assert counts[0] < counts[1] < counts[2]
    slow = dataclasses.replace(recording, import_seconds=53.0)
    assert replay(slow, "quiet", 0, seconds=90.0).instances == counts[1]


def test_a_recording_that_is_not_there_names_the_command_that_makes_one(tmp_path):
    """And which file was looked for."""
    with pytest.raises(SystemExit, match=r"no recording at .*gone\.json.*false_wins\.py --record"):
        Recording.load(tmp_path / "gone.json")


def test_a_large_gain_is_always_found_and_a_loss_never():
    """Whatever is drawn: 50% more is faster, 50% less is not."""
    recording = a_recording(noise=0.1)
    assert claims(recording, 20, gain=1.5) == 20
    assert claims(recording, 20, gain=1 / 1.5) == 0


def test_no_gain_is_rarely_found():
    """Where nothing is planted, nothing is found in all but few replays; nor where one recorded side was faster."""
    for ratio in (1.0, 1.05):
        assert claims(a_recording(noise=0.06, ratio=ratio), 40) <= 4


def test_confirmations_that_decided_nothing_are_no_evidence():
    """Neither for nor against false claims: the share is of those that had enough instances."""
    recording = a_recording()
    nothing = replay(recording, "quiet", 0, seconds=5.0)
    found = replay(recording, "quiet", 0, seconds=60.0, gain=1.5)
    figures = false_wins.claims("x", [nothing, found])
    assert (figures["x: claimed faster"]["value"], figures["x: claimed faster"]["count"]) == (1.0, 1)
    assert figures["x: instances"]["value"] == found.instances / 2
    assert list(false_wins.claims("x", [nothing])) == ["x: instances"]


def test_several_finalists_are_drawn_apart():
    """Each has ratios of its own, and the one with the best bound comes first."""
    result = replay(a_recording(), "quiet", 0, seconds=210.0, finalists=FINALISTS)
    values = {each.ratio.value for each in result.confirmed}
    assert len(values) == FINALISTS
    assert result.confirmed[0].ratio.low == max(each.ratio.low for each in result.confirmed)
    assert all(each.verdict is Verdict.NO_SIGNIFICANT_GAIN for each in result.confirmed)


# --------------------------------------------------------------------------------------------- estimators


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_interval_moves_with_what_it_is_of(way):
    """All ratios larger by a factor: so are the bounds; mirrored ratios have mirrored bounds."""
    rng = random.Random(1)
    instances = [[rng.gauss(0.0, 0.1) for _ in range(5)] for _ in range(8)]
    low, high = way(instances)
    moved = way([[value + 0.3 for value in each] for each in instances])
    mirrored = way([[-value for value in each] for each in instances])
    assert low < high
    assert moved == pytest.approx((low + 0.3, high + 0.3))
    assert mirrored == pytest.approx((-high, -low))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_covers_independent_values(way):
    """On what all of them assume, each holds the truth in about 95% of cases."""
    rng = random.Random(2)
    worlds = [[[rng.gauss(0.0, 0.1) for _ in range(5)] for _ in range(11)] for _ in range(400)]
    covered = [low <= 0 <= high for low, high in map(way, worlds)]
    assert share(sum(covered), 400)["ci95"][1] >= 0.93


def test_neighbours_of_the_synthetic_instances_resemble_one_another():
    """The correlation of neighbouring values is the one that is written above it."""
    rng = random.Random(0)
    values = [autocorrelated(rng, 2) for _ in range(4000)]
    mean = [sum(column) / 4000 for column in zip(*values, strict=True)]
    products = sum((first - mean[0]) * (second - mean[1]) for first, second in values)
    squares = [
        sum((value - each) ** 2 for value in column)
        for each, column in zip(mean, zip(*values, strict=True), strict=True)
    ]
    assert products / math.sqrt(squares[0] * squares[1]) == pytest.approx(0.6, abs=0.05)


def test_many_replays_on_all_cores_are_those_of_their_seeds():
    """Other processes take part, and change neither what is found nor the order."""
    recording = a_recording()
    many = replays(recording, "quiet", FEW_REPLAYS + 1, seconds=20.0)
    few = replays(recording, "quiet", 3, seconds=20.0)
    assert len(many) == FEW_REPLAYS + 1
    ratios = [[each.confirmed[0].ratio for each in results[:3]] for results in (many, few)]
    assert ratios[0] == ratios[1]
    assert len(set(map(str, ratios[1]))) == 3
