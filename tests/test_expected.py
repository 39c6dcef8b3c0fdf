"""How long the parts of a confirmation are expected to take."""

import math

import pytest
from simulated_runs import BASELINE, a_record, a_slice

from autotune.study.expected import BETWEEN_SECONDS, WARM_UP_EPOCHS, Expected, epoch_seconds
from autotune.trial.record import Interval, Pairing


def rate(value):
    """A throughput."""
    return Interval(value=value, low=value, high=value)


def record(**changes):
    """Of a trial whose first step came after two seconds, and which was warm a second later."""
    return a_record(BASELINE, **{"first_step_seconds": 2.0, "warmup_seconds": 1.0, **changes})


def test_an_epoch_of_unknown_length_is_longer_than_any():
    """So that it is never expected to be timed whole."""
    assert epoch_seconds(record(examples_per_epoch=None, throughput=rate(10.0))) == math.inf
    assert epoch_seconds(record(examples_per_epoch=100, throughput=None)) == math.inf
    assert epoch_seconds(record(examples_per_epoch=100, throughput=rate(10.0))) == 10.0


@pytest.mark.parametrize(
    ("pairings", "processes"),
    [
        ([Pairing.ALTERNATING], 2),
        ([Pairing.ALTERNATING] * 3, 4),
        ([Pairing.BRACKETED], 3),
        ([Pairing.BRACKETED] * 2, 6),
        ([Pairing.ALTERNATING, Pairing.BRACKETED], 5),
    ],
)
def test_one_baseline_stands_beside_all_and_two_bracket_each(pairings, processes):
    """What starting them all takes follows from how many processes there are."""
    expected = Expected(record(), slice_seconds=0.5)
    records = [record(pairing=each) for each in pairings]
    assert expected.instance_start_seconds(records) == pytest.approx(processes * (3.0 + BETWEEN_SECONDS))


def test_epochs_that_are_now_timed_whole_take_longer_to_warm_up():
    """The search has timed an epoch of two seconds by steps; by epochs, each of the warm-up's takes two."""
    expected, by_steps = (
        Expected(record(), slice_seconds=0.5),
        record(timed_by="steps", examples_per_epoch=200, throughput=rate(100.0)),
    )
    assert expected.start_seconds(by_steps) == 3.0 + BETWEEN_SECONDS
    expected.whole_up_to = 5.0
    assert expected.start_seconds(by_steps) == 2.0 + WARM_UP_EPOCHS * 2.0 + BETWEEN_SECONDS
    assert expected.slice_seconds(by_steps) == 4.0, "the epoch, and another one before it"


def test_no_slice_is_expected_to_take_less_than_those_before():
    """What slices took is the least from then on; what the plan says is the least before."""
    expected = Expected(record(), slice_seconds=0.5)
    assert expected.shortest_slice_seconds([]) == 0.5
    expected.note_slice(2.0)
    expected.note_slice(1.0)
    assert expected.shortest_slice_seconds([record()]) == 2.0


def test_stalls_do_not_make_an_epoch_too_long_to_be_timed_whole():
    """Two seconds of steps and a boundary of half a second: what stalls add in some epochs, timing them whole shows."""
    often = record(
        timed_by="steps",
        examples_per_epoch=200,
        throughput=rate(40.0),
        slices=(a_slice(100.0), a_slice(100.0)),
        epoch_overhead_seconds=0.5,
        stalled_ends=1.0,
    )
    assert epoch_seconds(often) == 2.5
