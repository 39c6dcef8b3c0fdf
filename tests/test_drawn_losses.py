"""The losses over time that the page draws: at the speeds of the answer, with the gap of its claim."""

from pathlib import Path

import pytest

from autotune.data.run_directory import RunDirectory
from autotune.recipe.recipe import Recipe
from autotune.report.charts import average_losses, draw_losses
from autotune.report.page import page_data
from autotune.space.configuration import read_trials

RECORDED = Path(__file__).parents[1] / "results" / "recorded"
DIGITS = RECORDED / "cpu" / "two_cores" / "train_digits_command_one"


@pytest.fixture(scope="module")
def recipe():
    """A recorded recipe with both answers: a larger batch is recommended."""
    return Recipe.load(DIGITS / "recipe.json")


def test_average_losses_gives_mean_and_range_over_seeds():
    points = average_losses([1.5, 3.0, 4.5], [(3.0, None, 2.0), (5.0, 1.0, 2.5)])
    assert [tuple(point.values()) for point in points] == [(1.5, 4.0, 3.0, 5.0), (4.5, 2.25, 2.0, 2.5)]
    assert average_losses([1.0, 2.0], []) == []


def test_the_gap_and_the_curves_have_the_answers_figures(recipe):
    drawn = page_data(RunDirectory(DIGITS)).losses
    (own, same, other), gap = drawn["curves"], drawn["gap"]
    assert [curve["kind"] for curve in (own, same, other)] == ["baseline", "same", "other"]
    assert other["name"] == "batch 128, learning rate ×4 (linear)"
    ends = [curve["points"][-1]["seconds"] for curve in (own, same, other)]
    assert ends[0] / ends[1] == pytest.approx(recipe.same_training.speedup.value)
    assert ends[0] / ends[2] == pytest.approx(recipe.larger_batch.speedup.value)
    claimed = recipe.answer.speedup
    assert gap["before"] / gap["after"] == pytest.approx(claimed.value)
    assert [gap["before"] / bound for bound in gap["bounds"]] == pytest.approx([claimed.high, claimed.low])
    reached = min(other["points"], key=lambda point: abs(point["seconds"] - gap["after"]))
    assert reached["low"] <= gap["loss"] <= reached["high"], "the arrow ends at the other curve"


def test_curve_of_a_batch_that_reaches_no_loss_uses_best_rule(recipe):
    records = [*read_trials(RunDirectory(DIGITS))]
    place = next(place for place, record in enumerate(records) if record.branch is not None)
    branch = records[place].branch
    never = {
        rule: tuple((add,) * len(branch.baseline[0]) for _ in branch.baseline)
        for rule, add in (("as is", 9.0), ("sqrt", 8.0))
    }
    records[place] = records[place].model_copy(update={"branch": branch.model_copy(update={"leader": never})})
    other = draw_losses(records, recipe, recipe.answer)["curves"][-1]
    assert other["name"] == "batch 128, learning rate ×2 (sqrt)"


def test_without_compared_learning_they_are_losses_of_slices(recipe):
    records = [record.model_copy(update={"branch": None}) for record in read_trials(RunDirectory(DIGITS))]
    drawn = draw_losses(records, recipe.with_same_training(), recipe.with_same_training().answer)
    assert drawn["losses"] == "training loss"
    assert [curve["kind"] for curve in drawn["curves"]] == ["baseline", "same"]
    assert drawn["gap"]["before"] == pytest.approx(drawn["curves"][0]["points"][-1]["seconds"])
    silent = [record.model_copy(update={"slices": ()}) for record in records]
    assert draw_losses(silent, recipe, recipe.answer) is None


def test_an_answer_that_claims_no_time_has_no_gap(recipe):
    records = [*read_trials(RunDirectory(DIGITS))]
    energy = recipe.model_copy(update={"evidence": recipe.evidence.model_copy(update={"objective": "energy"})})
    assert draw_losses(records, energy, energy.answer)["gap"] is None
    assert draw_losses(records, recipe.with_baseline(), recipe.with_baseline().answer)["gap"] is None
