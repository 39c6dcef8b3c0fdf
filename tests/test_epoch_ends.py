"""How epochs end while `tf.data` tunes a pipeline: what is told of stalls, and what they cost a long epoch."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.trial import profiling
from autotune.trial.epoch_ends import EpochEnd, awakening, mean_stall, stalled
from autotune.trial.profiling import _ShortEpochs
from autotune.trial.step_clock import Training


@pytest.mark.parametrize(
    ("age", "awake"),
    [
        (0.0, 0.01),
        (0.02, 0.03),
        (0.9, 1.27),
        (3.5, 5.11),
        (7.0, 10.23),
        (30.0, 40.95),
        (90.0, 141.91),
        (150.0, 201.91),
    ],
)
def test_the_thread_sleeps_twice_as_long_each_time_up_to_a_minute(age, awake):
    """10 ms, 20, 40 and so on, one after the other: it awakes when they are over."""
    assert awakening(age) == pytest.approx(awake)


@given(st.floats(0.0, 20_000.0))
def test_a_stall_takes_no_longer_than_the_epoch_nor_than_a_minute(age):
    """The sleep that an iterator's end falls into is as long as all before it together, at most a minute."""
    assert age < awakening(age) <= min(2 * age + 0.01, age + 60.0) + 1e-6


@pytest.mark.parametrize("length", [0.6, 0.7, 2.0, 9.0, 25.0, 300.0])
def test_the_mean_stall_is_over_lengths_that_differ_a_little(length):
    """Epochs of about the same length: their mean, by a hundred thousand of them."""
    draw = random.Random(0)
    lengths = [length * draw.uniform(0.9, 1.1) for _ in range(100_000)]
    mean = sum(awakening(each) - each for each in lengths) / len(lengths)
    assert mean_stall(length) == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize(
    ("age", "gap", "usual", "told"),
    [
        (0.10, 0.052, 0.002, True),  # until 0.15
        (0.10, 0.080, 0.002, True),  # tuning took its time, too
        (0.10, 0.004, 0.002, False),
        (0.10, 0.022, 0.015, False),
        (0.10, 0.150, 0.002, None),  # too long for the stall: something else
        (0.10, 0.042, 0.002, True),  # it began with the iterator, before the first call
        (0.13, 0.019, 0.002, None),  # too short to be told
        (0.09, 0.060, 0.050, None),
    ],
)
def test_a_gap_that_ends_when_the_thread_awakes_was_a_stall(age, gap, usual, told):
    """One that ends before is none; what is short, or ends much later, is not told."""
    assert stalled(EpochEnd(age=age, gap=gap), usual) is told


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_share_of_stalls_is_recovered(share):
    """Of simulated ends, with gaps and epochs that vary, and even where every end but that before the first is one."""
    draw = random.Random(1)
    now, begins, first_calls, wanted = 0.0, [], [], []
    for epoch in range(400):
        begins.append(now)
        gap = draw.uniform(0.001, 0.004)
        if epoch:
            age = now - first_calls[-1]
            stalls = draw.random() < share
            if stalls:
                gap = max(gap, awakening(age + gap) - age + draw.uniform(0.0, 0.01))
            wanted.append(stalls)
        first_calls.append(now + gap)
        now = first_calls[-1] + draw.uniform(0.08, 0.13)
    found = profiling._stalls(begins, first_calls)
    assert len(found) > 200
    assert sum(each > 0 for each in found) / len(found) == pytest.approx(sum(wanted) / len(wanted), abs=0.05)


@pytest.mark.parametrize(("share", "stalls"), [(None, 0.0), (0.0, 0.0), (0.25, 0.25), (1.0, 1.0)])
@pytest.mark.parametrize("steps", [100, None])
def test_so_many_ends_of_long_epochs_stall_as_of_short_ones(monkeypatch, share, stalls, steps):
    """For as long as a stall takes at the long epoch's end; of an epoch whose length nobody knows nothing is said."""
    short = _ShortEpochs(start=0.5, call=0.07, validating=0.5, stalled_ends=share)
    monkeypatch.setattr(profiling, "_short_epochs", lambda *_: short)
    monkeypatch.setattr(profiling, "_steps_in_shuffle_buffer", lambda *_: None)
    training = Training(
        steps_per_call=1,
        batch_size=32,
        examples=steps and 32 * steps,
        drop_remainder=False,
        iterations=None,
        synchronise=lambda: None,
    )
    found = profiling.boundary(None, None, None, training, call_seconds=0.07)
    assert found.stalled_ends == share
    assert found.seconds == pytest.approx(1.0 + (stalls * mean_stall(8.0) if steps else 0.0))
