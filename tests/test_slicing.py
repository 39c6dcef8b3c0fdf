"""How long a slice is, and what may have a short one."""

import pytest
from simulated_runs import a_slice, a_warm_up

from autotune.tuning.costs import is_busy, length_in_turns, most_waiting, slice_length, taken_seconds


def test_slice_has_the_wanted_length_if_calls_are_short():
    warm = a_warm_up(call_seconds=0.001, epoch_seconds=None)
    assert slice_length(warm, warm, wanted=0.25) == 0.25
    assert slice_length(warm, warm, wanted=2.0) == 2.0


def test_a_slice_holds_several_calls_of_the_slower_one():
    slow, quick = (a_warm_up(call_seconds=seconds, epoch_seconds=None) for seconds in (0.3, 0.001))
    assert slice_length(quick, slow) == slice_length(slow, quick) > 3 * 0.3
    assert slice_length(quick, slow, most=0.5) == 0.5
    assert slice_length(quick, slow, most=0.1) == pytest.approx(0.3)


def test_a_slice_is_one_call_where_all_calls_are_slow():
    larger_batch, baseline = (a_warm_up(call_seconds=seconds, epoch_seconds=None) for seconds in (8.0, 2.0))
    length = slice_length(baseline, larger_batch)
    assert taken_seconds(length, baseline) == pytest.approx(2.0)
    assert taken_seconds(length, larger_batch) == pytest.approx(8.0)


def test_a_slice_holds_a_whole_epoch_where_epochs_are_timed():
    length = slice_length(a_warm_up(epoch_seconds=1.4), most=0.3)
    assert 1.4 / 2 < length < 1.4


def test_what_a_slice_takes_has_its_run_in():
    in_laps = a_warm_up(epoch_seconds=1.4, run_in=1.4)
    assert taken_seconds(1.12, in_laps) == pytest.approx(2.8)
    assert taken_seconds(1.5, in_laps) == pytest.approx(4.2)
    by_steps = a_warm_up(call_seconds=0.3, epoch_seconds=None)
    assert taken_seconds(0.5, by_steps) == pytest.approx(0.6)


def slices(busy, cores=2):
    """Slices of a trial that kept so many of the cores busy; none where that is None."""
    if busy is None:
        return []
    return [
        a_slice(seconds=each).model_copy(update={"cpu_seconds": each * busy, "cores": cores}) for each in (0.5, 0.25)
    ]


@pytest.mark.parametrize(
    ("busy", "input_wait", "expected"),
    [
        (1.9, 0.8, 0.05),  # it decodes images: it waits for its own processors
        (0.2, 0.02, 0.02),  # it waits for a device
        (0.2, 0.95, 0.9),  # it waits for a network
        (1.0, 0.8, 0.5),  # it may: one of its threads works on what came in
        (None, 0.1, 0.1),
        (1.8, None, 0.1),
        (None, None, 0.3),  # nothing is known: slices are neither short nor long
    ],
)
def test_waiting_is_bounded_by_input_wait_and_idle_processors(busy, input_wait, expected):
    assert most_waiting(slices(busy), input_wait) == pytest.approx(expected)


def test_slices_lengthen_with_the_waiting_of_either_side():
    short, longer, longest = length_in_turns(0.0, 0.1), length_in_turns(0.1, 0.2), length_in_turns(0.1, 0.9)
    assert 0.0 < short < longer < longest
    assert length_in_turns(0.9, 0.1) == longest


def test_unknown_waiting_gives_slices_of_medium_length():
    unknown = length_in_turns(most_waiting([], None))
    assert length_in_turns(0.0) < unknown < length_in_turns(1.0)


@pytest.mark.parametrize(("busy", "expected"), [(1.9, True), (1.0, True), (0.2, False)])
def test_what_uses_a_processor_is_busy(busy, expected):
    assert is_busy(slices(busy, cores=16)) is expected
