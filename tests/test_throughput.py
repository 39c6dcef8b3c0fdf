"""Samples per second of a long training."""

import pytest

from autotune.measure.throughput import long_run_rate


def test_without_boundaries_it_is_examples_over_seconds():
    """Slices of whole epochs, or of a dataset without an end, need no correction."""
    assert long_run_rate(1000, 0.5) == 2000.0
    assert long_run_rate(1000, 0.5, examples_per_epoch=None, epoch_overhead_seconds=3.0) == 2000.0
    assert long_run_rate(1000, 0.5, examples_per_epoch=4000, epoch_overhead_seconds=None) == 2000.0


def test_an_epochs_boundary_is_paid_in_proportion():
    """4,000 examples take two seconds of steps and one of boundary: a third of the time is lost."""
    assert long_run_rate(1000, 0.5, examples_per_epoch=4000, epoch_overhead_seconds=1.0) == pytest.approx(
        4000 / 3
    )


def test_the_slices_length_does_not_matter():
    """A slice twice as long at the same pace gives the same rate."""
    settings = {"examples_per_epoch": 4000, "epoch_overhead_seconds": 0.7}
    assert long_run_rate(1000, 0.5, **settings) == pytest.approx(long_run_rate(2000, 1.0, **settings))
