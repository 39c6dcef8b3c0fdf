"""How long a slice is, and what may have a short one."""

import pytest
from simulated_runs import BASELINE, a_warm_up, simulated_trials
from test_confirmation import FAST, SPEED, Bench

from autotune.study.plan import ENOUGH_INSTANCES
from autotune.study.slicing import (
    CALLS_IN_A_SLICE,
    LONG_SLICE_SECONDS,
    MOST_WAITING,
    MUCH_WAITING,
    SHORT_SLICE_SECONDS,
    SLICE_SECONDS,
    SLICES_IN_A_TRIAL,
    counted_seconds,
    most_waiting,
    shortest_taken,
    slice_seconds,
    taken_seconds,
    wanted_seconds,
)
from autotune.trial.record import Outcome, Pairing, Phase, Slice, StepSeconds, TrialRecord


def test_a_slice_is_half_a_second_of_quick_steps():
    """Where calls and epochs are short, and time is not, slices have their usual length."""
    warm = a_warm_up(call_seconds=0.01, epoch_seconds=0.1)
    assert slice_seconds(warm, warm, measured=60.0) == SLICE_SECONDS


def test_a_slice_holds_several_calls_of_the_slower_one():
    """Slow calls stretch the slices, as long as a trial holds several slices."""
    slow, quick = a_warm_up(call_seconds=0.3, epoch_seconds=None), a_warm_up(call_seconds=0.01)
    assert slice_seconds(quick, slow, measured=60.0) == pytest.approx(CALLS_IN_A_SLICE * 0.3)
    assert slice_seconds(quick, slow, measured=4.0) == pytest.approx(4.0 / SLICES_IN_A_TRIAL)
    assert slice_seconds(quick, slow, measured=1.0) == pytest.approx(0.3), "one call of the slow one"


def test_a_slice_holds_a_whole_epoch_where_epochs_are_timed():
    """However little time there is: most of an epoch is asked for, which is one whole epoch and never two."""
    length = slice_seconds(a_warm_up(epoch_seconds=1.4), measured=3.0)
    assert 1.4 / 2 < length < 1.4


def test_what_a_slice_takes_has_its_run_in():
    """Whole epochs or calls, and after a pause one epoch that does not count: waits and plans are for all of it."""
    in_laps = a_warm_up(epoch_seconds=1.4, run_in=1.4)
    assert taken_seconds(1.12, in_laps) == pytest.approx(2.8)
    assert taken_seconds(1.5, in_laps) == pytest.approx(4.2)
    assert counted_seconds(1.12, in_laps) == pytest.approx(1.4)
    assert shortest_taken(in_laps, measured=3.0) == pytest.approx(2.8)
    by_steps = a_warm_up(call_seconds=0.3, epoch_seconds=None)
    assert taken_seconds(0.5, by_steps) == pytest.approx(0.6)
    assert shortest_taken(by_steps, measured=60.0) == slice_seconds(by_steps, measured=60.0)


def seen(*, busy=None, input_wait=None, cores=2):
    """A record of a trial that kept so many cores busy, and waited for input so long."""
    step = StepSeconds(p50=0.01, p90=0.01, p99=0.01, max=0.01)
    slices = [
        Slice(
            seconds=s, steps=10, examples=100, epochs=0, cpu_seconds=s * busy, step_seconds=step, cores=cores
        )
        for s in ([] if busy is None else [0.5, 0.25])
    ]
    return TrialRecord(
        trial=1,
        phase=Phase.SEARCH,
        configuration=dict(BASELINE),
        outcome=Outcome.OK,
        started_at="2026-11-21T12:00:00+00:00",
        seconds=1.0,
        slices=tuple(slices),
        input_wait_fraction=input_wait,
    )


@pytest.mark.parametrize(
    ("busy", "input_wait", "expected"),
    [
        (1.9, 0.8, 0.05),  # it decodes images: it waits for its own processors
        (0.2, 0.02, 0.02),  # it waits for a device
        (0.2, 0.95, 0.9),  # it waits for a network
        (1.0, 0.8, 0.5),  # it may: one of its threads works on what came in
        (None, 0.1, 0.1),
        (1.8, None, 0.1),
        (None, None, 1.0),
    ],
)
def test_a_trial_waits_no_longer_than_for_input_and_with_idle_processors(busy, input_wait, expected):
    """The smaller of both bounds holds; what is not known bounds nothing."""
    assert most_waiting(seen(busy=busy, input_wait=input_wait)) == pytest.approx(expected)


def test_slices_are_short_only_where_nothing_waits():
    """One trial that may wait makes them all long: they take turns in slices of one length."""
    works, waits = seen(input_wait=MOST_WAITING), seen(input_wait=MOST_WAITING + 0.01)
    assert wanted_seconds(works, works) == SHORT_SLICE_SECONDS
    assert wanted_seconds(works, waits) == wanted_seconds(waits, works) == SLICE_SECONDS


def test_slices_are_long_only_where_one_is_known_to_wait():
    """Idle processors alone do not say so: a training on one core of many has those as well."""
    works, may_wait = seen(input_wait=0.0), seen(busy=0.2)
    waits = seen(busy=0.2, input_wait=MUCH_WAITING + 0.01)
    assert wanted_seconds(works, may_wait) == SLICE_SECONDS
    assert wanted_seconds(works, waits) == wanted_seconds(waits, may_wait) == LONG_SLICE_SECONDS
    assert wanted_seconds(works, seen(busy=1.9, input_wait=0.9)) < LONG_SLICE_SECONDS, "for its processors"


@pytest.mark.parametrize(("gain", "expected"), [(1.0, SHORT_SLICE_SECONDS), (1.6, SLICE_SECONDS)])
def test_a_confirmation_takes_the_slices_that_its_processes_deserve(tmp_path, gain, expected):
    """What the search measured of its waiting was too brief to rely on; from the second instance on, it is known."""
    trials = simulated_trials(
        SPEED,
        noise=0.02,
        examples=None,
        start_seconds=5.0,  # instances long enough for longer slices
        freeze_gain=lambda each: gain if each == FAST else 1.0,
    )
    (found,) = Bench(tmp_path, trials).confirm(FAST).confirmed
    later = [pair.baseline.seconds for pair in found.record.pairs if pair.instance]
    first = [pair.baseline.seconds for pair in found.record.pairs if not pair.instance]
    assert first
    assert later
    assert first == pytest.approx([SLICE_SECONDS] * len(first), rel=0.2)
    assert later == pytest.approx([expected] * len(later), rel=0.2)


@pytest.mark.parametrize(("left", "long"), [(100.0, True), (50.0, False)])
def test_where_the_baseline_waits_much_slices_are_long(tmp_path, left, long):
    """As far as the time holds enough processes all the same: those are planned for slices of two seconds."""
    trials = simulated_trials(SPEED, noise=0.02, examples=None, freeze_gain=lambda each: 1.6)
    (found,) = Bench(tmp_path, trials, left=left).confirm(FAST).confirmed
    lengths = {pair.instance: pair.baseline.seconds for pair in found.record.pairs}
    assert len(lengths) >= ENOUGH_INSTANCES
    assert all((each > 1.2) is long for each in lengths.values())


@pytest.mark.parametrize(("waiting", "long"), [(0.5, True), (0.1, False)])
def test_where_the_finalist_is_seen_to_wait_much_slices_are_long(tmp_path, waiting, long):
    """A quick look that shows a wait is believed: a winner that waits gains from pauses, whatever the baseline does."""
    trials = simulated_trials(
        SPEED, noise=0.02, examples=None, freeze_gain=lambda each: 1.6 if each == FAST else 1.0
    )
    (found,) = Bench(tmp_path, trials).confirm(FAST, input_wait=waiting).confirmed
    lengths = {pair.instance: pair.baseline.seconds for pair in found.record.pairs}
    assert len(lengths) >= ENOUGH_INSTANCES
    assert all((each > 1.2) is long for each in lengths.values())


def test_in_brackets_slices_stay_as_they_are(tmp_path):
    """There a side's slices follow on one another: no pauses, so nothing that longer ones would make less of."""
    trials = simulated_trials(SPEED, noise=0.02, examples=None, freeze_gain=lambda each: 1.6)
    (found,) = Bench(tmp_path, trials, left=200.0).confirm(FAST, pairing=Pairing.BRACKETED).confirmed
    assert found.record.pairs
    assert all(pair.candidate.seconds < 1.2 for pair in found.record.pairs)
