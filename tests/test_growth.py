"""Memory that grows for as long as the training goes on, told from allocators that settle."""

import math
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.stats.stability import (
    FEWEST_SLICES,
    HOST_GROWTH,
    LEAST_GROWTH_BYTES,
    check_memory_growth,
    estimate_growth,
    explain_unclear_growth,
)

MIB = 1 << 20
LIMIT = 16 << 30
PACE = 4000.0


def samples(per_example, *, count=40, examples=2000, noise=0.0, settling=0.0, seed=0):
    """Memory at the ends of slices of 2,000 examples: a level, a leak, noise, and what settles."""
    drawn = random.Random(seed)
    return [
        (
            float(n * examples),
            500 * MIB + per_example * n * examples + settling * (1 - math.exp(-n / 3)) + drawn.gauss(0, noise) * MIB,
        )
        for n in range(1, count + 1)
    ]


def check(own, baseline=None, limit=LIMIT):
    """The rule, for a process that holds 500 MiB and trains 4,000 examples a second; the baseline's memory stays."""
    baseline = [samples(0.0)] if baseline is None else baseline
    return check_memory_growth(
        own, baseline, name=HOST_GROWTH, examples_per_second=PACE, held_bytes=500 * MIB, limit_bytes=limit
    )


def test_a_leak_is_refused_with_the_hours_until_memory_is_full():
    found = check([samples(2048, noise=1.0)])
    assert not found.passed
    assert re.search(r"memory is full after \d+ min;", found.detail)
    assert found.value > found.limit


@pytest.mark.parametrize(
    ("baseline", "tells", "detail"),
    [
        (samples(2000, seed=1), True, "the workload that leaks"),
        (samples(2048, count=FEWEST_SLICES - 1), False, "whose leak"),
    ],
)
def test_a_leak_that_the_baseline_has_or_may_have_is_no_fault(baseline, tells, detail):
    found = check([samples(2048)], [baseline])
    assert (found.passed, found.conclusive) == (True, tells)
    assert detail in found.detail


def test_leak_also_in_a_slow_baseline_passes_inconclusively():
    slow = [(examples / 16, 500 * MIB + 2048 * examples / 16) for examples, _ in samples(0.0)]
    assert slow[-1][1] - slow[0][1] < LEAST_GROWTH_BYTES, "the case is another one"
    found = check([samples(2048)], [slow])
    assert found.passed
    assert not found.conclusive, "or the baseline's memory only settles: it was seen for too short a time"
    assert "too little of the baseline" in found.detail


def test_a_baseline_of_too_few_examples_leaves_a_leak_unclear():
    slow = [samples(0.0, examples=100, noise=1.0)]
    found = check([samples(2048, noise=1.0)], slow)
    assert found.passed
    assert "whose leak" in found.detail
    assert not check([samples(20_480, noise=1.0)], slow).passed, "of so large a leak they would show something"


def test_a_baseline_that_leaks_far_less_is_no_excuse():
    assert not check([samples(2048)], [samples(205)]).passed


@pytest.mark.parametrize("settling", [0, 200 * MIB])
@pytest.mark.parametrize("seed", range(10))
def test_memory_that_only_varies_or_settles_is_no_leak(seed, settling):
    assert check([samples(0.0, noise=0.5 if settling else 2.0, settling=settling, seed=seed)]).passed


def test_growth_that_dies_down_is_no_leak():
    slow = [(x, y + 150 * MIB * (1 - math.exp(-x / 15000))) for x, y in samples(0.0)]
    assert slow[-1][1] - slow[len(slow) // 3][1] > LEAST_GROWTH_BYTES, "the case is another one"
    assert estimate_growth([slow])[0] == 0
    assert check([slow]).passed


TRANSFORMER = [
    (448, 5772, 19, 538, 2, 558),
    (896, 9868, 11, 571, 11, 573),
    (512, 8908, 15, 559, 11, 585),
    (832, 7724, 11, 562, 6, 633),
    (480, 5772, 18, 564, 1, 643),
]
"""Of each process: examples at first and last slice, slices that held so many MiB, and those that held more after."""


def test_one_step_up_in_each_process_is_no_leak():
    processes = [
        [(first + (last - first) * n / (low + high - 1), (level if n < low else more) * MIB) for n in range(low + high)]
        for first, last, low, level, high, more in TRANSFORMER
    ]
    found = check_memory_growth(
        processes, [samples(0.0)], name=HOST_GROWTH, examples_per_second=600.0, held_bytes=640 * MIB, limit_bytes=LIMIT
    )
    assert found.passed, found.detail


@given(st.integers(FEWEST_SLICES, 60), st.data())
def test_one_step_is_no_leak_wherever_it_comes(count, data):
    at = data.draw(st.lists(st.integers(0, count), min_size=1, max_size=4))
    high = data.draw(st.floats(1.0, 4096.0))
    stepped = [[(2000.0 * n, (500 + high * (n > each)) * MIB) for n in range(count)] for each in at]
    assert estimate_growth(stepped)[0] == 0


@pytest.mark.parametrize("every", [2, 3, 5])
def test_a_leak_that_comes_in_steps_is_one(every):
    found = check([[(2000.0 * n, (500 + 30 * (n // every)) * MIB) for n in range(1, 41)]])
    assert not found.passed


def test_leak_that_a_day_of_training_survives_passes():
    found = check([samples(2048)], limit=1 << 40)
    assert found.passed
    assert 0 < found.value < found.limit


def test_levels_of_different_processes_do_not_matter():
    higher = [(x, y + 300 * MIB) for x, y in samples(0.0, noise=0.5, seed=3)]
    assert check([samples(0.0, noise=0.5), higher]).passed
    assert not check([samples(2048), [(x, y + 300 * MIB) for x, y in samples(2048)]]).passed


def test_too_few_slices_say_nothing():
    found = check([samples(1e6, count=FEWEST_SLICES - 1)])
    assert (found.passed, found.value) == (True, None)
    assert "too few slices" in found.detail


@given(st.floats(0, 1e5), st.integers(FEWEST_SLICES, 60), st.integers(1, 4))
def test_the_slope_of_an_exact_line_is_found(per_example, count, processes):
    pace, examples = estimate_growth([samples(per_example, count=count, seed=n) for n in range(processes)])
    assert pace == pytest.approx(per_example, rel=1e-6, abs=1e-3)
    assert examples < 2000 * count


FEW = FEWEST_SLICES - 3


@pytest.mark.parametrize(
    ("own", "batch_ratio", "reason"),
    [
        ([samples(20_000.0, count=FEW)], 1.0, "it grew by"),
        ([samples(0.0, count=FEW), samples(20_000.0, count=FEW)], 1.0, "it grew by"),
        ([[(x, 4 * y) for x, y in samples(0.0, count=FEW)]], 1.0, "2000 MiB against the baseline's 500 MiB"),
        ([[(x, 4 * y) for x, y in samples(0.0, count=FEW)]], 4.0, ""),
        ([[(x, 1.2 * y) for x, y in samples(0.0, count=FEW)]], 1.0, ""),
        ([samples(0.0, count=FEW)], 1.0, ""),
        ([[(x, 4 * y) for x, y in samples(0.0)]], 1.0, ""),
        ([samples(20_000.0)], 1.0, ""),
        ([samples(0.0), samples(20_000.0, count=FEW)], 1.0, "it grew by"),
        ([samples(0.0, count=40)[20:], samples(20_000.0, count=FEW)], 1.0, ""),
        ([], 1.0, ""),
    ],
)
def test_few_slices_leave_unexplained_memory_growth_unclear(own, batch_ratio, reason):
    found = explain_unclear_growth(own, [samples(0.0)], batch_ratio=batch_ratio)
    assert found.startswith(reason) or reason in found
    assert bool(found) == bool(reason)


def test_leak_is_unclear_if_the_baseline_was_seen_too_briefly():
    assert "of the baseline" in explain_unclear_growth([samples(2048)], [samples(2048, count=FEW)], batch_ratio=1.0)


@pytest.mark.parametrize(("times", "why"), [(1, ""), (3, "it grew by 76 MiB within 3 slices")])
def test_a_short_process_is_judged_beyond_the_pace_of_long_ones(times, why):
    long, flat = ([(1000.0 * at, pace * at) for at in range(12)] for pace in (20e6, 0.0))
    short = [(1000.0 * at, times * 20e6 * at) for at in range(3)]
    assert explain_unclear_growth([long, short], [flat], batch_ratio=1.0) == why


def test_memory_that_settles_in_longer_processes_is_clear():
    """A search trial of three slices was on its way to what confirmations held throughout."""
    settled = [(1000.0 * at, 600e6 + min(at, 3) * 20e6) for at in range(10)]
    assert explain_unclear_growth([settled[:3]], [settled], batch_ratio=1.0)
    assert not explain_unclear_growth([settled, settled[:3]], [settled], batch_ratio=1.0)
