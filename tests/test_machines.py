"""The same training on several machines: what carries over, in tables and in pandas."""

import pytest
from test_folders import GPU_MACHINE, a_recipe, save_all
from test_kind import L4, a_machine

from autotune.front import cli
from autotune.front.results import describe_transfer
from autotune.report.history import compare
from autotune.stats.deciding import Verdict

ON_CPU = a_recipe(jit_compile=True, steps_per_execution=8, evidence={"baseline_limited_by": "launch"})
ON_GPU = a_recipe(GPU_MACHINE, jit_compile=True, batch_size=256)
ON_L4 = a_recipe(a_machine(L4), jit_compile=True, batch_size=256, steps_per_execution=8)
NOTHING = a_recipe(a_machine(cores=64), evidence={"verdict": Verdict.NO_SIGNIFICANT_GAIN}).with_baseline()


@pytest.fixture
def folder(tmp_path):
    """A folder of the recipes of four machines."""
    return save_all(tmp_path, a=ON_CPU, b=ON_GPU, c=ON_L4, d=NOTHING)


def test_changes_common_to_all_recommendations_carry_over():
    assert describe_transfer([ON_CPU, ON_GPU, ON_L4, NOTHING]) == [
        "Carries over to each of the 3 machines with a recommendation: jit_compile=true",
        "Does not carry over: steps_per_execution=8 (only simulated × 2 cores, and NVIDIA L4); batch_size=256 (only "
        "NVIDIA H200, and NVIDIA L4)",
    ]
    assert describe_transfer([ON_GPU, a_recipe(steps_per_execution=8)])[0].endswith(
        "the 2 machines with a recommendation: nothing"
    )


def test_machines_with_the_same_device_are_named_by_version():
    older = a_recipe(a_machine(tensorflow="2.18.0"), jit_compile=True)
    (_, line) = describe_transfer([ON_CPU, older])
    assert line == "Does not carry over: steps_per_execution=8 (only simulated × 2 cores, TensorFlow 2.21, Keras 3)"


@pytest.mark.parametrize("recipes", [[ON_CPU], [ON_CPU, ON_CPU], [ON_CPU, NOTHING], [NOTHING]])
def test_one_recommendation_has_nothing_to_carry_over_to(recipes):
    assert describe_transfer(recipes) == []


def test_recipes_of_a_folder_are_compared_in_pandas(folder):
    frame = compare(folder)
    assert list(frame["recommended"]) == [
        "jit_compile=true steps_per_execution=8",
        "batch_size=256 jit_compile=true",
        "batch_size=256 jit_compile=true steps_per_execution=8",
        "baseline",
    ]
    assert frame["limited_by"][0] == "launch"
    assert "another machine" in frame["differs"][1]


def test_the_command_names_a_limit_in_words(tmp_path, capsys):
    recipe = a_recipe()
    limited = recipe.evidence.model_copy(update={"baseline_limited_by": "compute_or_memory"})
    recipe.model_copy(update={"evidence": limited}).save(tmp_path / "one.json")
    a_recipe().save(tmp_path / "two.json")
    assert cli.main(["compare", str(tmp_path / "one.json"), str(tmp_path / "two.json")]) == 0
    assert "compute or memory" in capsys.readouterr().out
