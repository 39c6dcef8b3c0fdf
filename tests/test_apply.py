"""What applying a configuration computes before TensorFlow is there."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.data.errors import ApplyError
from autotune.recipe import apply
from autotune.recipe.apply import accumulate, as_dataset, largest_divisor


@given(st.integers(1, 10_000), st.integers(1, 4096))
def test_no_larger_divisor_would_do(number, at_most):
    found = largest_divisor(number, at_most)
    assert number % found == 0
    assert not [each for each in range(found + 1, at_most + 1) if number % each == 0]


def test_only_the_recipe_that_was_applied_is_in_force(monkeypatch):
    monkeypatch.setattr(apply, "_applied", {"precision": "mixed_bfloat16"})
    monkeypatch.setattr(apply, "overridden", lambda configuration: {"precision": "float64"})
    with pytest.raises(ApplyError, match="not in force: another one was applied since"):
        apply.refuse_overridden({"precision": "float32"})
    with pytest.raises(ApplyError, match="precision=mixed_bfloat16, and a later line has set it to float64"):
        apply.refuse_overridden({"precision": "mixed_bfloat16"})


def test_gradients_are_accumulated_below_a_loss_scale():
    inner = SimpleNamespace(gradient_accumulation_steps=None, built=False)
    outer = SimpleNamespace(gradient_accumulation_steps=None, built=False, inner_optimizer=inner)
    accumulate(outer, {"global_batch": 64, "batch_size": 16})
    assert (inner.gradient_accumulation_steps, outer.gradient_accumulation_steps) == (4, None)


def test_as_dataset_drops_missing_sample_weights(monkeypatch):
    def flatten(parts):
        return list(parts)

    tensorflow = SimpleNamespace(
        nest=SimpleNamespace(flatten=flatten),
        Tensor=bytes,
        data=SimpleNamespace(Dataset=SimpleNamespace(from_tensor_slices=lambda parts: parts)),
    )
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
    x, y = np.zeros(3), np.ones(3)
    assert as_dataset((x, y, None)) == (x, y)
    assert as_dataset(x) is x
    assert as_dataset((x, "labels")) == (x, "labels")
