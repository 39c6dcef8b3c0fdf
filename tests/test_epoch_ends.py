"""How epochs end while `tf.data` tunes a pipeline: what is told of stalls, and what they cost a long epoch."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.measure.epoch_ends import (
    EpochEnd,
    WholeEpoch,
    mean_stall_seconds,
    share_of_stalls,
    stall_seconds,
    stalls_in,
    variance_of_charge,
)
from autotune.measure.throughput import long_run_rate


@pytest.mark.parametrize(
    ("age", "awake"),
    [
        (0.0, 0.02),
        (0.1, 0.14),
        (0.22, 0.30),
        (0.4, 0.62),
        (0.9, 1.26),
        (2.0, 2.54),
        (3.5, 5.10),
        (7.0, 10.22),
        (30.0, 40.94),
        (90.0, 141.9),
        (150.0, 201.9),
    ],
)
def test_a_stall_ends_when_the_thread_awakes(age, awake):
    """It sleeps 20 ms, 40, 80 and so on, up to a minute: in real trainings stalls ended 1 to 12 ms after these."""
    assert age + stall_seconds(age) == pytest.approx(awake)


@given(st.floats(0.0, 20_000.0))
def test_a_stall_takes_no_longer_than_the_epoch_nor_than_a_minute(age):
    """The sleep that an iterator's end falls into is as long as all before it together and 20 ms, at most a minute."""
    assert 0.0 < stall_seconds(age) <= min(age + 0.02, 60.0) + 1e-6


@pytest.mark.parametrize("length", [0.6, 0.7, 2.0, 9.0, 25.0, 300.0])
def test_the_mean_stall_is_over_lengths_that_differ_a_little(length):
    """Epochs of about the same length: their mean, by a hundred thousand of them."""
    draw = random.Random(0)
    lengths = [length * draw.uniform(0.9, 1.1) for _ in range(100_000)]
    mean = sum(map(stall_seconds, lengths)) / len(lengths)
    assert mean_stall_seconds(length) == pytest.approx(mean, rel=0.05)


AWAKENINGS = (0.02, 0.06, 0.14, 0.30, 0.62, 1.26)


def seen(share, *, ages=(0.16, 0.29), usual=0.003, jitter=0.002, tuning=0.008, count=400):
    """Simulated ends of epochs: a share of them waits until the thread awakes, which tuning makes a little later."""
    draw = random.Random(1)
    ends = []
    for _ in range(count):
        age, gap = draw.uniform(*ages), usual + draw.uniform(-jitter, jitter)
        if draw.random() < share:
            awake = next(each for each in AWAKENINGS if each > age + gap)
            gap = awake - age + draw.uniform(0.0, tuning)
        ends.append(EpochEnd(age=age, gap=gap))
    return ends


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("ages", [(0.16, 0.29), (0.05, 0.2), (0.9, 1.2)])
def test_the_share_of_stalls_is_recovered(share, ages):
    """Of ends at all ages, also where every end is a stall; those close to an awakening count for little."""
    assert share_of_stalls(seen(share, ages=ages), 0.003) == pytest.approx(share, abs=0.08)


def test_taking_a_pipeline_down_is_no_stall():
    """What takes as long without the tuning is the usual gap, however long."""
    ends = seen(0.0, usual=0.06, jitter=0.05)
    assert share_of_stalls(ends, 0.06) < 0.06


def test_a_hiccup_counts_for_no_more_than_a_stall():
    """One gap of ten seconds among forty says that one of forty was a stall."""
    ends = [EpochEnd(age=0.2, gap=0.003)] * 39 + [EpochEnd(age=0.2, gap=10.0)]
    assert share_of_stalls(ends, 0.003) == pytest.approx(1 / 40)


@pytest.mark.parametrize(
    "ends",
    [[], [EpochEnd(age=0.2, gap=0.1)] * 2, [EpochEnd(age=0.295, gap=0.005)] * 9],
    ids=["none", "few", "each too close to an awakening"],
)
def test_what_tells_nothing_is_no_share(ends):
    """None, not 0."""
    assert share_of_stalls(ends, 0.001) is None


@pytest.mark.parametrize(("share", "stalls"), [(None, 0.0), (0.0, 0.0), (0.25, 0.25), (1.0, 1.0)])
def test_a_share_of_long_epochs_takes_as_much_longer_as_a_stall_at_their_end(share, stalls):
    """A thousand examples in seven seconds, and one for the boundary."""
    found = long_run_rate(1000, 7.0, examples_per_epoch=1000, epoch_overhead_seconds=1.0, stalled_ends=share)
    assert found == pytest.approx(1000 / (8.0 + stalls * mean_stall_seconds(8.0)))


@pytest.mark.parametrize(
    ("share", "length"), [(0.34, 5.7), (0.47, 11.3), (0.1, 30.0), (0.7, 6.0), (0.8, 5.8), (0.9, 8.0)]
)
def test_the_luck_of_a_few_ends_is_in_the_variance_of_a_charge(share, length):
    """What processes that see nine ends each would charge, drawn a thousand times, varies as much in logarithm."""
    rng, stall = random.Random(1), mean_stall_seconds(length)
    charges = [
        math.log(length + sum(rng.random() < share for _ in range(9)) / 9 * stall) for _ in range(1000)
    ]
    found = variance_of_charge(share, length + share * stall)
    assert math.sqrt(found) == pytest.approx(statistics.stdev(charges), rel=0.15)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_that_every_process_sees_alike_is_no_luck(share):
    """None stalls, or all do: there is nothing to vary."""
    assert variance_of_charge(share, 12.0) == 0.0


def test_more_to_take_down_in_a_tuned_pipeline_is_no_stall():
    """Ten milliseconds more at each end are its usual gap: of a long epoch they would make seconds."""
    assert share_of_stalls([EpochEnd(age=0.2, gap=0.013)] * 9, 0.003) == 0.0
    some = [EpochEnd(age=0.2, gap=0.013)] * 6 + [EpochEnd(age=0.2, gap=0.104)] * 3
    assert share_of_stalls(some, 0.003) == pytest.approx(1 / 3, abs=0.02)


def test_of_a_week_a_stall_is_told_at_once():
    """Beyond a minute all sleeps are alike: awake at 81.9 s and each minute after it."""
    assert stall_seconds(81.9 + 60.0 * 10**6 + 15.0) == pytest.approx(45.0)


RECORDED = (
    (0.521, 0.083),
    (0.541, 0.090),
    (0.535, 0.141),
    (0.598, 0.090),
    (1.265, 0.689),
    (0.617, 0.109),
    (0.676, 0.109),
    (0.693, 0.136),
    (0.550, 0.080),
    (0.652, 0.103),
    (0.675, 0.130),
    (0.615, 0.100),
    (0.611, 0.128),
    (1.265, 0.651),
)
"""Seconds of epochs of digits_cnn on two shared cores, and of the longest call in each."""


def whole(*epochs):
    """Epochs, by seconds and longest call."""
    return [WholeEpoch(seconds=seconds, longest=longest) for seconds, longest in epochs]


def test_stalls_of_whole_epochs_are_told_from_what_steps_take():
    """Of fourteen recorded epochs two ended at 1.26 s instead of 0.65, and one at 0.61: an eighth of all the time."""
    found = stalls_in(whole(*RECORDED))
    assert found.epochs == 3
    late = 0.689 + 0.651 + 0.128 - 3 * 0.080
    assert found.share == pytest.approx(late / sum(seconds for seconds, _ in RECORDED))


@pytest.mark.parametrize(
    "epochs",
    [
        [],
        whole((1.265, 0.689)),
        whole(*[(2.0, 1.5)] * 5),
        whole(*[(0.6, 0.1)] * 5, (0.70, 0.20)),
        whole(*[(0.6, 0.1)] * 5, (2.6, 2.1)),
        whole(*[(0.5, 0.010)] * 5, (0.518, 0.028)),
        whole(*[(0.35, 0.010)] * 5, *[(0.55, 0.210)] * 5),
        whole(*[(1.0, 0.010)] * 5, *[(1.4, 0.410)] * 5),
    ],
    ids=[
        "nothing",
        "alone",
        "validation",
        "hiccup",
        "seconds",
        "milliseconds",
        "checkpoints",
        "long checkpoints",
    ],
)
def test_what_takes_another_time_than_a_stall_is_none(epochs):
    """Ends that always take long, what is shorter or longer than a stall at that age, and what is too short to tell."""
    assert stalls_in(epochs).epochs == 0
    assert stalls_in(epochs).share == 0.0
