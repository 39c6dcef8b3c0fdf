"""What is said of files and messages that are damaged: the first mistake, soon and with little memory."""

import json

import pytest
from pydantic import TypeAdapter, ValidationError

from autotune.data.facts import Machine
from autotune.data.models import first_mistake
from autotune.data.record import TrialRecord
from autotune.data.run_directory import RunRecord
from autotune.recipe.recipe import Recipe
from autotune.runtime import protocol


def mistakes_in(model, document):
    """The error that reading the document as JSON gives."""
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(model).validate_json(json.dumps(document))
    return caught.value


def test_the_first_of_a_few_is_told_with_its_place():
    error = mistakes_in(dict[str, list[int]], {"a": [1, "x", "y"], "b": ["z"]})
    assert error.error_count() == 3
    assert first_mistake(error).startswith("a.1: Input should be a valid integer")


@pytest.mark.parametrize(
    ("model", "document", "way"),
    [
        (TrialRecord, {"pairs": "HERE"}, "pairs"),
        (TrialRecord, {"slices": "HERE"}, "slices"),
        (Machine, {"gpus": "HERE"}, "gpus"),
        (RunRecord, {"workload": {"batch_ranks": "HERE"}}, "workload.batch_ranks"),
        (RunRecord, {"search_space": {"choices": {"a": "HERE"}}}, "search_space.choices"),
        (Recipe, {"evidence": {"stability": {"checks": "HERE"}}}, "evidence.stability.checks"),
        (Recipe, {"evidence": {"stability": {"not_checked": "HERE"}}}, "evidence.stability.not_checked"),
        (Recipe, {"evidence": {"confirmation": {"trials": "HERE"}}}, "evidence.confirmation.trials"),
        (Recipe, {"workload": {"batch_ranks": "HERE"}}, "workload.batch_ranks"),
        (protocol.LossCurves, {"curves": "HERE"}, "curves"),
        (protocol.LossCurves, {"curves": ["HERE"]}, "curves"),
        (protocol.LossRuns, {"seeds": "HERE"}, "seeds"),
        (protocol.Started, {"batch_ranks": "HERE"}, "batch_ranks"),
        (protocol.Started, {"gpus": "HERE"}, "gpus"),
    ],
)
def test_a_list_of_mistakes_is_given_up_at_the_first(model, document, way):
    text = json.dumps(document).replace('"HERE"', json.dumps([{"no": "good"}] * 1000))
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(model).validate_json(text)
    assert caught.value.error_count() < 100
    assert any(".".join(map(str, error["loc"])).startswith(way) for error in caught.value.errors())


@pytest.mark.parametrize("model", [TrialRecord, RunRecord, Recipe, protocol.Message])
def test_every_list_in_the_models_is_given_up_at_the_first(model):
    assert list(_patient(TypeAdapter(model).core_schema)) == []


def _patient(schema):
    """The sequences of a pydantic schema that collect every mistake in them."""
    if isinstance(schema, dict):
        if schema.get("variadic_item_index") is not None and not schema.get("fail_fast"):
            yield schema
        for part in schema.values():
            yield from _patient(part)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            yield from _patient(part)
