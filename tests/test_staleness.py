"""A long training says once what has changed since its recipe was measured, and how to measure it again."""

from pathlib import Path

import pytest
from simulated_runs import BASELINE, MACHINE
from test_folders import a_recipe
from test_kind import a_machine

from autotune.script.long_run import Staleness, verify_command

COMMAND = "autotune verify recipe.json train.py --budget 100s"


def said(recipe, *parameters, here=MACHINE):
    """What a training says whose model is seen so often."""
    lines = []
    staleness = Staleness(recipe, COMMAND, here=here, say=lines.append)
    for count in parameters:
        staleness.warn(count)
    return lines


def test_versions_and_the_model_are_named_once_with_the_command():
    (line,) = said(a_recipe(), 85010, 85010, here=a_machine(tensorflow="2.21.3"))
    assert line == (
        "changed since the recipe was measured: TensorFlow: measured on 2.21.0, here 2.21.3; the model: measured with "
        f"85,002 weights, here 85,010. To measure its claim again: {COMMAND}"
    )


@pytest.mark.parametrize("parameters", [85002, None])
def test_nothing_is_said_of_what_did_not_change(parameters):
    assert said(a_recipe(), parameters) == []


def test_a_machine_that_is_not_asked_for_is_not_compared():
    assert said(a_recipe(a_machine(tensorflow="2.18.0")), 85002, here=None) == []


def test_a_recipe_without_a_claim_cannot_be_stale():
    baseline = a_recipe().model_copy(update={"configuration": dict(BASELINE)})
    assert said(baseline, 7, here=a_machine(tensorflow="2.21.3")) == []


def test_the_command_has_a_budget_that_suffices():
    recipe = a_recipe(evidence={"verify_seconds": 240.0})
    assert verify_command(recipe, Path("my recipe.json"), "train.py") == (
        "autotune verify 'my recipe.json' train.py --budget 240s"
    )
    assert verify_command(a_recipe(), Path("recipe.json"), "train.py") == COMMAND
