"""What applying a configuration computes before TensorFlow is there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.recipe.apply import largest_divisor


@pytest.mark.parametrize(
    ("steps", "asked", "found"), [(12, 16, 12), (12, 8, 6), (23, 16, 1), (5, 4, 1), (45, 32, 15), (12, 1, 1)]
)
def test_steps_per_execution_become_a_divisor_of_the_epochs_steps(steps, asked, found):
    """It is the largest one that is not above what was asked for."""
    assert largest_divisor(steps, asked) == found


@given(st.integers(1, 10_000), st.integers(1, 4096))
def test_no_larger_divisor_would_do(number, at_most):
    """The result divides, and nothing between it and the limit does."""
    found = largest_divisor(number, at_most)
    assert number % found == 0
    assert not [each for each in range(found + 1, at_most + 1) if number % each == 0]
