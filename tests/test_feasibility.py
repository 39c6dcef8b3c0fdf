"""Predict from peaks and failures which configurations run out of memory, alone or with others."""

import pytest
from simulated_runs import BASELINE, FAST, Fresh, Searching, a_record, a_slice, simulated_trials

from autotune.data.facts import GpuUse
from autotune.data.record import Pairing
from autotune.tuning.rules import fit_on_card, known_to_fail

FAILED = BASELINE.replace(batch_size=256, prefetch=2)


@pytest.mark.parametrize(
    "changes", [{}, {"batch_size": 512}, {"prefetch": 4}, {"batch_size": 1024, "prefetch": 16}, {"intra_op_threads": 1}]
)
def test_what_needs_as_much_or_more_is_known_to_fail(changes):
    assert known_to_fail(FAILED.replace(**changes), [FAILED])


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 128},
        {"prefetch": 0},
        {"prefetch": "autotune"},
        {"precision": "mixed_bfloat16"},
        {"jit_compile": True},
        {"steps_per_execution": 8},
        {"batch_size": 512, "prefetch": 0},
        {"batch_size": 512, "jit_compile": True},
    ],
)
def test_what_may_need_less_is_tried(changes):
    assert not known_to_fail(FAILED.replace(**changes), [FAILED])


def test_float32_needs_what_mixed_precision_needed():
    failed = FAILED.replace(precision="mixed_float16")
    assert known_to_fail(FAILED, [failed])
    assert known_to_fail(FAILED.replace(precision="mixed_bfloat16"), [failed])


def test_one_failure_is_enough():
    small = FAILED.replace(batch_size=1024, jit_compile=True)
    assert known_to_fail(FAILED, [small, FAILED])
    assert not known_to_fail(FAILED, [small])
    assert not known_to_fail(FAILED, [])


def test_parallel_calls_hold_memory():
    failed = BASELINE.replace(num_parallel_calls=64, data_threads=32)
    assert not known_to_fail(BASELINE.replace(num_parallel_calls=1), [failed])
    assert known_to_fail(BASELINE.replace(num_parallel_calls=128, data_threads=32), [failed])
    assert not known_to_fail(BASELINE.replace(num_parallel_calls="autotune", data_threads=32), [failed])


def test_automatic_thread_count_is_not_comparable_to_a_number():
    failed = FAILED.replace(data_threads=0)
    assert not known_to_fail(failed.replace(data_threads=4), [failed])
    assert not known_to_fail(failed, [failed.replace(data_threads=4)])
    assert known_to_fail(failed.replace(batch_size=512), [failed])
    assert known_to_fail(failed.replace(data_threads=8), [failed.replace(data_threads=4)])


# -------------------------------------------------------------------------------------------- two on one card

LARGE = BASELINE.replace(batch_size=256)


def leaves(free_bytes, used_bytes=600):
    """A slice of a baseline that leaves so much of its card free."""
    return a_slice().model_copy(update={"gpus": (GpuUse(free_bytes=free_bytes, used_bytes=used_bytes),)})


@pytest.mark.parametrize(("peak", "fits"), [(300, True), (301, False)])
def test_candidate_must_fit_beside_the_baseline_with_a_margin(peak, fits):
    records = [a_record(LARGE, peak_device_bytes=peak)]
    assert fit_on_card([leaves(400)], [LARGE], records) is fits


def test_what_needs_more_takes_as_much_at_least():
    records = [a_record(LARGE, peak_device_bytes=500)]
    assert not fit_on_card([leaves(400)], [LARGE.replace(batch_size=512)], records)
    assert fit_on_card([leaves(400)], [LARGE.replace(batch_size=128)], records)


def test_a_leader_and_a_champion_must_fit_together():
    records = [a_record(LARGE, peak_device_bytes=200), a_record(FAST, peak_device_bytes=200)]
    assert fit_on_card([leaves(400)], [LARGE], records)
    assert fit_on_card([leaves(400)], [FAST], records)
    assert not fit_on_card([leaves(400)], [LARGE, FAST], records)


def test_fit_on_card_uses_the_fullest_card_and_latest_slice():
    both = leaves(400).model_copy(update={"gpus": (*leaves(9000).gpus, *leaves(400).gpus)})
    records = [a_record(LARGE, peak_device_bytes=500)]
    assert not fit_on_card([leaves(9000), both], [LARGE], records)
    assert fit_on_card([both, leaves(9000)], [LARGE], records)


@pytest.mark.parametrize("slices", [[], [a_slice()], [leaves(None)]])
def test_without_a_card_or_its_figures_two_are_tried_together(slices):
    assert fit_on_card(slices, [LARGE], [a_record(LARGE, peak_device_bytes=1 << 40)])


def on_full_card(configuration, seconds):
    """A card on which the baseline leaves 300 MiB."""
    return (GpuUse(free_bytes=300 << 20, used_bytes=300 << 20),)


def test_a_candidate_that_does_not_fit_is_measured_in_blocks(tmp_path):
    searching = Searching(tmp_path, simulated_trials(gpus=("H200",), cards=on_full_card))
    trial, record = searching.measure(FAST)
    assert record.pairing is Pairing.ALTERNATING
    _, record = searching.measure(trial=trial)
    assert record.pairing is Pairing.BRACKETED
    assert searching.measure(FAST.replace(batch_size=64))[1].pairing is Pairing.BRACKETED


def test_a_leader_that_does_not_fit_is_confirmed_in_blocks(tmp_path):
    cramped = Fresh(tmp_path / "cramped", simulated_trials(gpus=("H200",), cards=on_full_card))
    cramped.measure()
    assert cramped.record.pairing is Pairing.BRACKETED
    roomy = Fresh(tmp_path / "roomy", simulated_trials(gpus=("H200",)))
    roomy.measure()
    assert roomy.record.pairing is Pairing.ALTERNATING
