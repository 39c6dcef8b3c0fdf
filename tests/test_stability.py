"""The rules a configuration must pass before it may be recommended."""

import math

import pytest

from autotune.measure.stability import (
    LOSS_RISE,
    MEMORY_MARGIN,
    device_memory,
    host_memory,
    loss_does_not_rise,
    loss_is_finite,
)

LIMIT = 10 << 30


@pytest.mark.parametrize(("rule", "name"), [(host_memory, "host_memory"), (device_memory, "device_memory")])
def test_a_tenth_of_the_memory_stays_free(rule, name):
    """A peak that leaves the margin passes; one byte more does not."""
    allowed = int(LIMIT * (1 - MEMORY_MARGIN))
    fits, too_much = rule(allowed, LIMIT), rule(allowed + 1, LIMIT)
    assert MEMORY_MARGIN == 0.10
    assert fits.passed
    assert not too_much.passed
    assert (fits.name, fits.value, fits.limit) == (name, allowed, LIMIT * (1 - MEMORY_MARGIN))


def test_the_memory_rule_says_how_much_there_was():
    """Its detail has peak and limit in GiB."""
    assert host_memory(5 << 30, LIMIT).detail == "peak 5.00 GiB of 10.00 GiB, 10% kept free"


def test_the_margin_can_be_another():
    """A margin of half the memory is held against half of it."""
    assert not host_memory(6 << 30, LIMIT, margin=0.5).passed


def test_looks_at_the_loss_are_counted():
    """Looks at which the model reported none do not count, and it is said when it reports none at all."""
    assert loss_is_finite([2.0, None, 1.0]).value == 2
    assert "no loss" in loss_is_finite([None]).detail


def rising(first, last, *, baseline_first=2.3, baseline_last=1.5):
    """The loss rule, beside a baseline whose loss falls."""
    return loss_does_not_rise(first, last, baseline_first=baseline_first, baseline_last=baseline_last)


@pytest.mark.parametrize(
    ("first", "last", "passed"),
    [
        (2.3, 1.0, True),
        (2.3, 2.3 * (1 + LOSS_RISE) - 1e-9, True),
        (2.3, 2.3 * (1 + LOSS_RISE) + 1e-9, False),
        (2.3, 9.0, False),
        (2.3, math.nan, False),
        (-1.0, -2.0, True),
        (-1.0, -0.5, False),
    ],
)
def test_a_loss_that_rises_fails(first, last, passed):
    """More than a tenth above its start, of whatever sign, is a rise; so is no number at all."""
    assert rising(first, last).passed is passed


def test_nothing_is_held_against_a_baseline_that_does_not_fall():
    """Where the baseline's own loss does not fall within a trial, a rise says nothing."""
    found = rising(2.3, 9.0, baseline_last=2.3)
    assert found.passed
    assert "baseline" in found.detail


@pytest.mark.parametrize("missing", range(4))
def test_a_model_without_a_loss_passes(missing):
    """Where any of the losses is not reported there is nothing to hold it against."""
    losses = [2.3, 9.0, 2.3, 1.5]
    losses[missing] = None
    first, last, baseline_first, baseline_last = losses
    found = rising(first, last, baseline_first=baseline_first, baseline_last=baseline_last)
    assert found.passed
    assert "no loss" in found.detail
