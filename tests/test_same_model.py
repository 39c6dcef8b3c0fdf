"""Processes that build another model than the baseline's: what tells them, and how the run ends."""

import dataclasses
import itertools

import pytest
from simulated_runs import (
    BASELINE,
    a_warm_up,
    an_invocation,
    faster_by,
    go_on,
    on_disk,
    simulated_trials,
    space,
    tune_simulated,
)

from autotune.data.errors import RunDirectoryError, WorkloadError
from autotune.data.facts import WorkloadReference
from autotune.data.record import Outcome
from autotune.data.run_directory import RunDirectory
from autotune.space.configuration import read_trials
from autotune.space.space_file import SearchSpace
from autotune.tuning.same_model import find_model_difference, make_other_models_error
from autotune.tuning.tune import tune_with

ELEMENT = "(TensorSpec(shape=({batch}, {size}), dtype=tf.float32, name=None), TensorSpec(shape=({batch},)))"
SPACE = space(batch_size=(16, 128), steps_per_execution=[1, 8], precision=["float32", "mixed_bfloat16"])


def a_model(*shapes, more=0, batch="None", size=28):
    """What a process with weights of these shapes, and `more` that are not trained, reports once it is warm."""
    warm = a_warm_up()
    started = warm.started.model_copy(update={"element": ELEMENT.format(batch=batch, size=size)})
    count = sum(rows * columns for rows, columns in shapes) + more
    return dataclasses.replace(warm, started=started, parameters=count, shapes=tuple(map(str, sorted(shapes))))


SMALL = a_model((28, 16), (16, 1))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (a_model((28, 99), (99, 1)), "2,871 weights (with one of shape (28, 99)), and the baseline's has 464 weights"),
        (a_model((28, 8), (30, 8)), "464 weights (with one of shape (28, 8)), and the baseline's has 464 weights"),
        (a_model((28, 16), (16, 1), more=7), "471 weights, and the baseline's has 464 weights"),
        (a_model((28, 16), (16, 1), size=32), "batches of shape (batch, 32); the baseline's are (batch, 28)"),
    ],
)
def test_another_number_or_shape_is_named_with_both_sizes(own, said):
    assert said in find_model_difference(SMALL, own, same_batch=True)


@pytest.mark.parametrize(
    ("own", "same_batch"),
    [
        (SMALL, True),
        (a_model((28, 16), (16, 1), batch=64), True),
        (a_model((28, 16), (16, 1), batch=64, size=64, more=64), False),  # a state for each example of a batch
    ],
)
def test_the_size_of_a_batch_makes_no_other_model(own, same_batch):
    assert find_model_difference(SMALL, own, same_batch=same_batch) == ""


def tune(path, model):
    trials = simulated_trials(faster_by(steps_per_execution=1.5), noise=0.02, model=model)
    with on_disk(path / "run") as directory:
        script = path / "train.py"
        script.write_text("import random\nfrom nets import size\n\nunits = random.randint(8, 99)\n")
        (path / "nets.py").write_text("import numpy as np\nsize = np.random.default_rng(3).normal()\n")
        reference = WorkloadReference(file=str(script), search_path=(str(path),))
        invocation = an_invocation(trials, directory, budget=120.0)
        invocation = dataclasses.replace(invocation, reference=reference)
        return tune_with(invocation, SearchSpace.parse(SPACE, source="test.toml"))


def test_two_other_models_end_the_run_with_what_to_seed(tmp_path):
    sizes = itertools.count(1000, 100)
    with pytest.raises(WorkloadError) as caught:
        tune(tmp_path, lambda _: {"parameters": (size := next(sizes)), "shapes": (f"({size},)",)})
    assert caught.value.exit_code == 2
    for said in ("trial 1 trained a model of 1,100 weights", "trial 2", "the baseline's has 1,000 weights"):
        assert said in caught.value.message
    assert "randint() in train.py, line 4" in caught.value.hint
    assert "default_rng" not in caught.value.hint
    outcomes = [record.outcome for record in read_trials(RunDirectory(tmp_path / "run"))]
    assert outcomes == [Outcome.OK, Outcome.OTHER_MODEL, Outcome.OTHER_MODEL]


def test_a_baseline_that_builds_another_model_ends_the_run(tmp_path):
    sizes = itertools.count(1000, 100)

    def model(configuration):
        return {"parameters": next(sizes) if configuration == BASELINE else 1000}

    with pytest.raises(WorkloadError, match="the baseline, started again, trained a model of 1,100 weights"):
        tune(tmp_path, model)


def test_a_run_is_not_continued_with_another_model(tmp_path):
    with on_disk(tmp_path / "run") as directory:
        tune_simulated(simulated_trials(), directory, budget=60.0, trials=1)
    with pytest.raises(RunDirectoryError, match=r"the model \(1,000 weights before, 2,000 now\)"):
        go_on(simulated_trials(model=lambda _: {"parameters": 2000}), tmp_path / "run", budget=60.0)


def test_what_grows_with_the_batch_size_stays_tunable(tmp_path):
    recipe = tune(tmp_path, lambda configuration: {"parameters": 900 + configuration.batch_size})
    assert recipe.changes["steps_per_execution"] == 8


def test_a_workload_without_a_draw_is_told_what_to_look_for(tmp_path):
    (tmp_path / "train.py").write_text("x = 1\n")
    reference = WorkloadReference(file=str(tmp_path / "train.py"), search_path=(str(tmp_path),))
    assert "Python's random" in make_other_models_error(reference, ["trial 1 …"]).hint
