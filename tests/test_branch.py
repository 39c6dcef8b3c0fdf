"""Which batches of a recording are for the probe, and which are trained on."""

import pytest

from autotune.training.branch import probe_distance


@pytest.mark.parametrize(
    ("batches", "probes", "kept"), [(19, 16, 3), (100, 16, 14), (100, 40, 20), (800, 16, 16), (5, 16, 1), (2, 16, 1)]
)
def test_a_fifth_at_most_is_for_the_probe_and_never_more_than_is_wanted(batches, probes, kept):
    distance = probe_distance(batches, probes)
    assert len(range(distance - 1, batches, distance)) == kept
