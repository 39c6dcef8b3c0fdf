"""A new knob is one entry: search space, proposals, applying, recipe, history and the tables take it."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from factories import a_recipe
from simulated_runs import BASELINE, SMALL_SPACE, on_disk, simulated_trials, tune_simulated

from autotune import load_history
from autotune.data.errors import ApplyError, ConfigurationError, RecipeError
from autotune.front.results import show_knobs
from autotune.recipe.apply import apply_before_build, compile_arguments, environment, set_by_dataset
from autotune.recipe.recipe import Recipe
from autotune.space.changes import Context, change, exactly
from autotune.space.configuration import Configuration, baseline_configuration
from autotune.space.knobs import KNOBS, Device, Domain, Knob, Numerics, Stage, knobs_on
from autotune.space.space_file import SearchSpace
from autotune.tuning.beliefs import Observations
from autotune.tuning.candidates import Proposals, neighbours
from autotune.tuning.learning import numerics_of, plain_numerics
from autotune.tuning.rules import known_to_fail
from autotune.tuning.sampler import Sampler


def registered(knob):
    """The table with one more entry, in a `with` statement."""
    return mock.patch.dict(KNOBS, {knob.name: knob})


def set_layout(tf, optimizer_on):
    """A setter, as those of the table."""
    tf.config.optimizer.set_experimental_options({"constant_folding": optimizer_on})


LAYOUT = Knob(
    name="constant_folding",
    summary="Grappler computes constants once",
    domain=Domain(booleans=True),
    default=True,
    stage=Stage.RUNTIME,
    set=set_layout,
    read=lambda tf: tf.config.optimizer.get_experimental_options().get("constant_folding", True),
    memory=lambda on: int(on),
    numerics=Numerics.ARITHMETIC,
    plain=False,
    changes=(change(exactly(False)),),
)
SPACE = (
    SMALL_SPACE
    + """
[knobs.constant_folding]
kind = "categorical"
choices = [true, false]
"""
)


@pytest.fixture
def layout():
    """The table with one more entry."""
    with registered(LAYOUT):
        yield


@pytest.fixture
def tensorflow(monkeypatch):
    """What TensorFlow would be told: the options of its optimizer, in a dict."""
    options = {}
    optimizer = SimpleNamespace(set_experimental_options=options.update, get_experimental_options=lambda: options)
    config = SimpleNamespace(optimizer=optimizer, list_physical_devices=lambda kind: [])
    kinds = {"data": SimpleNamespace(Dataset=SimpleNamespace), "Variable": SimpleNamespace, "Tensor": SimpleNamespace}
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=config, **kinds))
    return options


def baseline():
    """The baseline of a training on a CPU, as it is now."""
    return baseline_configuration(32, {"jit_compile": False}, Device.CPU, where="test")


def space():
    """The search space that varies the new knob, resolved."""
    return SearchSpace.parse(SPACE, source="test.toml").resolve(
        baseline=baseline(), device=Device.CPU, cores=2, examples=1437, dataset_takes_config=True
    )


def test_the_search_varies_it_and_tries_its_change(layout):
    assert baseline()["constant_folding"] is True
    assert space().choices["constant_folding"] == (True, False)
    found = [configuration.differences(baseline()) for configuration in neighbours(baseline(), space(), Context())]
    assert {"constant_folding": False} in found


def test_knob_missing_from_the_expectations_is_tried(layout):
    proposals, tried = Proposals(space(), Sampler(space(), file=None, name="test", seed=0)), {baseline(): 0.0}
    for _ in range(10):
        observations = Observations(ratios=tried)
        _, configuration = proposals.next(
            tried, baseline(), context=Context(short_steps=False), observations=observations
        )
        tried[configuration] = -0.2
    assert baseline().replace(constant_folding=False) in tried


def test_its_values_are_applied_and_read(layout, tensorflow):
    apply_before_build({"constant_folding": True})
    assert tensorflow == {}
    apply_before_build({"constant_folding": False})
    assert tensorflow == {"constant_folding": False}


def test_a_runtime_that_has_started_is_too_late_for_it(layout, tensorflow, monkeypatch):
    def refuse(options):
        raise RuntimeError("the context was initialized")

    optimizer = sys.modules["tensorflow"].config.optimizer
    monkeypatch.setattr(optimizer, "set_experimental_options", refuse)
    with pytest.raises(ApplyError, match="constant_folding=False cannot act any more"):
        apply_before_build({"constant_folding": False})


def test_memory_and_numerics_are_known(layout):
    off = baseline().replace(constant_folding=False)
    assert known_to_fail(baseline(), [off])
    assert not known_to_fail(off, [baseline()])
    assert numerics_of(off) != numerics_of(baseline())
    assert plain_numerics(baseline(), batch_size=64)["constant_folding"] is False


def test_a_run_finds_it_and_recipe_and_history_have_it(layout, tmp_path):
    trials = simulated_trials(lambda configuration: 4000.0 if configuration["constant_folding"] else 6400.0, noise=0.02)
    with on_disk(tmp_path / "run") as directory:
        recipe = tune_simulated(trials, directory, space=SPACE, budget=100.0)
    assert recipe.changes["constant_folding"] is False
    assert Recipe.load(tmp_path / "run" / "recipe.json") == recipe
    frame = load_history(tmp_path / "run")
    assert str(frame["constant_folding"].dtype) == "boolean"
    assert set(frame["constant_folding"]) == {True, False}


def test_the_table_of_knobs_shows_it(layout, capsys):
    show_knobs()
    assert "constant_folding" in capsys.readouterr().out


def test_it_is_gone_afterwards():
    with pytest.raises(ConfigurationError, match="no knob called 'constant_folding'"):
        Configuration({"constant_folding": False})


def test_recipe_may_lack_only_knobs_of_another_workload():
    recipe = a_recipe(configuration=BASELINE.replace(batch_size=64))
    found = Knob(**{**vars(LAYOUT), "of_workload": True})
    with registered(found):
        assert Recipe.parse(recipe.to_json(), source="recipe.json") == recipe
        assert found in knobs_on(Device.CPU)
    with registered(LAYOUT), pytest.raises(RecipeError, match="has no constant_folding"):
        Recipe.parse(recipe.to_json(), source="recipe.json")


XLA = "--tf_xla_auto_jit=2"


def set_clustering(variables, on):
    """Adds or removes one flag of a variable that may hold others."""
    flags = [each for each in variables.get("TF_XLA_FLAGS", "").split() if each != XLA]
    variables["TF_XLA_FLAGS"] = " ".join([*flags, *([XLA] if on else [])])


def test_a_knob_may_be_one_flag_of_a_variable(monkeypatch):
    knob = Knob(
        name="auto_clustering",
        summary="XLA compiles clusters of operations",
        domain=Domain(booleans=True),
        default=False,
        stage=Stage.IMPORT,
        set=set_clustering,
        read=lambda variables: XLA in variables.get("TF_XLA_FLAGS", "").split(),
    )
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_enable_lazy_compilation=false")
    with registered(knob):
        assert environment({"auto_clustering": False}) == {}
        changed = environment({"auto_clustering": True})
        assert changed == {"TF_XLA_FLAGS": f"--tf_xla_enable_lazy_compilation=false {XLA}"}
        monkeypatch.setenv("TF_XLA_FLAGS", changed["TF_XLA_FLAGS"])
        assert environment({"auto_clustering": True}) == {}


def test_a_knob_may_be_an_argument_of_compile():
    knob = Knob(
        name="auto_scale_loss",
        summary="Keras scales the loss in float16",
        domain=Domain(booleans=True),
        default=True,
        stage=Stage.COMPILE,
    )
    with registered(knob):
        assert compile_arguments({"auto_scale_loss": False, "prefetch": 2}) == {"auto_scale_loss": False}


def test_a_knob_may_be_an_option_of_the_dataset():
    knob = Knob(
        name="slack",
        summary="tf.data overlaps the last prefetch",
        domain=Domain(booleans=True),
        default=False,
        stage=Stage.OPTIONS,
        read=lambda options: options.slack,
    )
    own = SimpleNamespace(
        slack=True,
        deterministic=None,
        autotune=SimpleNamespace(enabled=None),
        threading=SimpleNamespace(private_threadpool_size=0),
    )
    with registered(knob):
        assert set_by_dataset(SimpleNamespace(options=lambda: own)) == {"slack": True}
        own.slack = False
        assert set_by_dataset(SimpleNamespace(options=lambda: own)) == {}
