"""What applying a configuration computes before TensorFlow is there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.data.errors import ApplyError
from autotune.recipe import apply
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


def test_only_the_recipe_that_was_applied_is_held_against_later_lines(monkeypatch):
    """A program may load a second recipe, whose values nobody has set."""
    monkeypatch.setattr(apply, "_applied", {"precision": "mixed_bfloat16"})
    monkeypatch.setattr(apply, "overridden", lambda configuration: {"precision": "float64"})
    apply.refuse_overridden({"precision": "float32"})
    with pytest.raises(ApplyError, match="precision=mixed_bfloat16, and a later line has set it to float64"):
        apply.refuse_overridden({"precision": "mixed_bfloat16"})
