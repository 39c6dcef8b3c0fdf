"""What need not be run, because something that needs less memory has run out of it."""

import pytest
from simulated_runs import BASELINE

from autotune.tuning.feasibility import known_to_fail

FAILED = BASELINE.replace(batch_size=256, prefetch=2)


@pytest.mark.parametrize(
    "changes", [{}, {"batch_size": 512}, {"prefetch": 4}, {"batch_size": 1024, "prefetch": 16}, {"intra_op_threads": 1}]
)
def test_what_needs_as_much_or_more_is_known_to_fail(changes):
    """A larger batch, a deeper prefetch, the same with other threads: all run out of memory as well."""
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
    """Nothing is inferred of a knob whose hunger is not known, or where one knob asks for less."""
    assert not known_to_fail(FAILED.replace(**changes), [FAILED])


def test_float32_needs_what_mixed_precision_needed():
    """Where half the bytes did not fit, all of them do not; float16 and bfloat16 take the same."""
    failed = FAILED.replace(precision="mixed_float16")
    assert known_to_fail(FAILED, [failed])
    assert known_to_fail(FAILED.replace(precision="mixed_bfloat16"), [failed])


def test_one_failure_is_enough():
    """Any of the configurations that failed can rule one out; without failures nothing is."""
    small = FAILED.replace(batch_size=1024, jit_compile=True)
    assert known_to_fail(FAILED, [small, FAILED])
    assert not known_to_fail(FAILED, [small])
    assert not known_to_fail(FAILED, [])


def test_parallel_calls_hold_memory():
    """What ran out with many calls in flight says nothing of the same batch with one."""
    failed = BASELINE.replace(num_parallel_calls=64, data_threads=32)
    assert not known_to_fail(BASELINE.replace(num_parallel_calls=1), [failed])
    assert known_to_fail(BASELINE.replace(num_parallel_calls=128, data_threads=32), [failed])
    assert not known_to_fail(BASELINE.replace(num_parallel_calls="autotune", data_threads=32), [failed])


def test_tensorflows_own_threads_are_neither_more_nor_less_than_a_number():
    """Its pool is as wide as the machine: what ran out of memory with it says nothing of four threads."""
    failed = FAILED.replace(data_threads=0)
    assert not known_to_fail(failed.replace(data_threads=4), [failed])
    assert not known_to_fail(failed, [failed.replace(data_threads=4)])
    assert known_to_fail(failed.replace(batch_size=512), [failed])
    assert known_to_fail(failed.replace(data_threads=8), [failed.replace(data_threads=4)])
