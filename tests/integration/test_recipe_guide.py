"""docs/recipes.md: each of its code blocks runs as printed, with the recipe of the script that it shows."""

import json

import pytest
from documents import code_blocks
from real_trials import facts_of
from test_long_run import recipe_of

from autotune.data.facts import WorkloadFacts
from autotune.recipe.recipe import Recipe

SCRIPT, *PROGRAMS = code_blocks("recipes.md", "python")
COUNTS = """
trained = globals().get("optimizer") or model.optimizer
steps = int(trained.iterations), keras.config.dtype_policy().name
fits = [bool(model.jit_compile), int(model.steps_per_execution)] if model.compiled else [False, 1]
import json; print(json.dumps([*steps, *fits]))
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> WorkloadFacts:
    """What is known of the guide's script."""
    return facts_of(tmp_path_factory.mktemp("guide") / "scripts", {"train": SCRIPT})["train"]


@pytest.fixture
def ran(facts, run_code, tmp_path):
    """Runs training code beside a recipe with these changes; returns what it printed last."""

    def start(source: str, **changes: object) -> list:
        path = recipe_of(facts, tmp_path, **changes)
        recipe = Recipe.load(path)
        of_batches = {"batched": True, "batch_ranks": (2, 2)}  # as `autotune tune` writes them for this script
        recipe.model_copy(update={"workload": recipe.workload.model_copy(update=of_batches)}).save(path)
        return json.loads(run_code(source, PYTHONWARNINGS="ignore").stdout.splitlines()[-1])

    return start


@pytest.mark.parametrize(("place", "steps"), [(0, 24), (1, 40), (2, 30)], ids=("arrays", "dataset", "loop"))
def test_the_guides_code_runs_as_printed(ran, place, steps):
    changes = {"batch_size": 96, "precision": "mixed_bfloat16", "steps_per_execution": 2, "persistent_iterator": True}
    assert len(PROGRAMS) == 3
    program = PROGRAMS[place]
    told = ran(program + COUNTS, **changes)
    compiled = [False, 1] if "def step" in program else [False, 2]
    assert told == [steps, "mixed_bfloat16", *compiled]
