"""The losses of both batch sizes as the page draws them: means over seeds, and their spread."""

import pytest
from pydantic import ValidationError
from simulated_runs import BASELINE, a_record

from autotune.data.record import Branch
from autotune.report.page import average_losses, loss_charts
from autotune.stats.same_loss import NOT_REACHED

PROBES = range(1, 9)


def losses(needs=1.0, luck=0.0):
    """A training that needs so many times the examples of the baseline."""
    return tuple((1 + luck) * 0.8 ** (probe / needs) for probe in PROBES)


def trainings(needs=1.0, seeds=4):
    """The losses of so many seeds."""
    return tuple(losses(needs, luck=seed / 100) for seed in range(seeds))


def chart_of(**branch):
    """The chart of a leader of batch 128 beside the baseline's 32."""
    branch = Branch(**{"after_steps": 1234, "examples": 8000, **branch})
    record = a_record(BASELINE.replace(batch_size=128), trial=7, branch=branch)
    (chart,) = loss_charts([a_record(), record], BASELINE)
    return chart


def test_a_point_is_the_mean_of_the_seeds_between_their_lowest_and_highest():
    assert average_losses([100, 200], [(3.0, 2.0), (5.0, 2.5)]) == [
        {"examples": 100, "mean": 4.0, "low": 3.0, "high": 5.0},
        {"examples": 200, "mean": 2.25, "low": 2.0, "high": 2.5},
    ]


def test_a_probe_at_which_a_seed_has_no_finite_loss_has_no_point():
    found = average_losses([1, 2, 3, 4], [(1.0, None, 1.0), (1.0, 1.0, 1.0)])
    assert [point["examples"] for point in found] == [1, 3]
    assert average_losses([1, 2], []) == []


def test_a_chart_has_the_baseline_the_chosen_rule_and_the_others():
    chart = chart_of(
        baseline=trainings(), leader={"as is": trainings(3.0), "sqrt": trainings(1.2), "linear": trainings(2.0)}
    )
    assert chart["heading"] == "Batch 128 beside 32 (trial 7)"
    assert [(curve["name"], curve["kind"]) for curve in chart["curves"]] == [
        ("batch 32, the baseline", "baseline"),
        ("batch 128, learning rate as it is", "other0"),
        ("batch 128, learning rate ×2 (sqrt)", "chosen"),
        ("batch 128, learning rate ×4 (linear)", "other1"),
    ]
    first = chart["curves"][0]["points"][0]
    assert first == pytest.approx({"examples": 1000, "mean": 0.8 * 1.015, "low": 0.8, "high": 0.8 * 1.03})
    assert len(chart["curves"][0]["points"]) == len(PROBES)
    assert chart["found"].startswith(
        "Both branched from the baseline after 1,234 steps. With the learning rate ×2 (sqrt), it needs ×1.2"
    )


def test_only_seeds_whose_trainings_all_ended_are_drawn():
    own, other = trainings(seeds=5), (*trainings(seeds=4), ())
    chart = chart_of(baseline=own, leader={"linear": other, "sqrt": ((),) * 5})
    assert [curve["kind"] for curve in chart["curves"]] == ["baseline", "chosen"]
    assert chart["curves"][0]["points"][0]["high"] == pytest.approx(0.8 * 1.03)


def test_what_could_not_be_compared_is_said():
    never = chart_of(baseline=trainings(), leader={"linear": tuple((9.0,) * len(PROBES) for _ in range(4))})
    assert never["found"].endswith("Batch 128: it does not reach the losses that the baseline reaches.")
    assert [curve["kind"] for curve in never["curves"]] == ["baseline", "other0"]
    few = chart_of(baseline=trainings(seeds=2), leader={"linear": trainings(seeds=2)})
    assert few["found"].endswith("Batch 128: too few of its trainings came to their end in time.")
    reason = chart_of(not_measured="the model reports no loss")
    assert (reason["found"], reason["curves"]) == ("Not measured: the model reports no loss.", [])


def test_without_a_baseline_there_is_no_chart():
    assert loss_charts([a_record(branch=Branch(not_measured=NOT_REACHED))], None) == []


@pytest.mark.parametrize(
    ("branch", "mistake"),
    [
        ({"baseline": trainings(seeds=2), "leader": {"linear": trainings(seeds=3)}}, "different numbers of seeds"),
        (
            {"baseline": trainings(), "leader": {"linear": trainings()}, "examples": 7},
            "too few examples between its probes",
        ),
    ],
)
def test_a_branch_that_no_run_could_write_is_refused(branch, mistake):
    with pytest.raises(ValidationError, match=mistake):
        Branch(**{"examples": 8000, **branch})
