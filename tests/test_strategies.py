"""Knobs of a `tf.distribute` strategy: where they exist, what they exclude, and how a training scales."""

import itertools
import re
from types import SimpleNamespace

import pytest
from simulated_runs import FACTS, SMALL_SPACE, a_record, an_invocation, on_disk, quick_tune, simulated_trials, space

from autotune.data.errors import RecipeError, WorkloadError
from autotune.data.facts import ScriptFacts, Trains
from autotune.recipe.advice import advice, usage
from autotune.recipe.recipe import Recipe
from autotune.script.strategies import refuse_strategies
from autotune.space.changes import Context
from autotune.space.configuration import baseline_configuration, find_conflict, normalize, read_trials
from autotune.space.knobs import STRATEGY_KNOBS, Device
from autotune.space.space_file import SearchSpace, find_search_space
from autotune.stats.deciding import ClaimResult
from autotune.stats.ratios import scaling_efficiency
from autotune.tuning import run_setup
from autotune.tuning.beliefs import Beliefs, Features, Observations, load_expectations
from autotune.tuning.candidates import Proposals, combine, neighbours
from autotune.tuning.events import silent
from autotune.tuning.notices import not_varied_notes, script_notes
from autotune.tuning.run_setup import baseline_of
from autotune.tuning.tune import tune_with
from autotune.tuning.verify import verify_with

SITUATION = Context(on_gpu=True)
SPACE = space(
    strategy=["none", "mirrored"],
    replicas=[2, 4, 8],
    cross_device=["auto", "reduce_to_one"],
    steps_per_execution=[1, 4],
    jit_compile=[False, True],
)


def of_strategy(**knobs):
    """A baseline on a GPU of a seat with several, and these knobs."""
    named = {"strategy": "none", "jit_compile": False, **knobs}
    return baseline_configuration(32, named, Device.GPU, where="test")


def space_on(devices, baseline):
    """The test's search space, resolved for a seat of so many GPUs."""
    return SearchSpace.parse(SPACE, source="test.toml").resolve(
        baseline=baseline, device=Device.GPU, cores=8, examples=4096, dataset_takes_config=True, devices=devices
    )


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"strategy": "mirrored", "replicas": 2}, ""),
        ({"strategy": "one_device", "steps_per_execution": 4, "jit_compile": True}, ""),
        ({"strategy": "mirrored", "replicas": 2, "steps_per_execution": 4, "cross_device": "reduce_to_one"}, ""),
        ({"strategy": "mirrored"}, "replicas of 2 or more"),
        ({"strategy": "mirrored", "replicas": 3}, "batch_size=32 is global, and 3 replicas do not divide it"),
        ({"strategy": "mirrored", "replicas": 2, "steps_per_execution": 4}, "fails inside TensorFlow"),
        ({"strategy": "mirrored", "replicas": 2, "jit_compile": True}, "keras#18145"),
        ({"strategy": "mirrored", "replicas": 2, "xla_auto_clustering": True}, "keras#18145"),
    ],
)
def test_conflicting_strategy_knobs_are_refused_with_a_reason(knobs, why):
    found = find_conflict(of_strategy(**knobs))
    assert why in found
    assert bool(why) == bool(found)


def test_a_workloads_baseline_is_refused_before_anything_runs():
    facts = FACTS.model_copy(update={"batch_size": 33, "baseline": {"strategy": "mirrored", "replicas": 2}})
    with pytest.raises(WorkloadError, match=r"train.py: batch_size=33 is global, and 2 replicas do not divide it"):
        baseline_of(facts, "train.py", Device.CPU, silent)


def test_a_seat_with_one_device_has_none_of_these_knobs():
    alone = baseline_configuration(32, {"jit_compile": False}, Device.GPU, where="test")
    assert set(STRATEGY_KNOBS).isdisjoint(alone)
    assert space_on(1, alone).left_out == {
        "strategy": "the seat has one device",
        "replicas": "the seat has one device",
        "cross_device": "the seat has one device",
    }


def test_replicas_go_up_to_the_seats_devices():
    assert space_on(4, of_strategy()).choices["replicas"] == (1, 2, 4)
    assert space_on(6, of_strategy()).choices["replicas"] == (1, 2, 4, 6)
    text = SPACE.replace('[knobs.replicas]\nkind = "categorical"\nchoices = [2, 4, 8]\n', "")
    space = SearchSpace.parse(text, source="test.toml").resolve(
        baseline=of_strategy(), device=Device.GPU, cores=8, examples=4096, dataset_takes_config=True, devices=6
    )
    assert space.choices["replicas"] == (1, 6)


def test_what_is_proposed_under_mirrored_needs_no_refusal():
    baseline = of_strategy(steps_per_execution=4, jit_compile=True)
    space = space_on(4, baseline)
    for best in (baseline, space.configuration({"strategy": "mirrored"})):
        found = neighbours(best, space, SITUATION)
        assert found
        assert not any(map(find_conflict, found))
        assert all(normalize(each, space.choices) == each for each in found)
    for cross_device, steps in (("auto", 1), ("reduce_to_one", 4)):
        spread = space.configuration({"strategy": "mirrored", "cross_device": cross_device})
        assert [spread[name] for name in ("replicas", "steps_per_execution", "jit_compile")] == [4, steps, False]
    assert space.configuration({"replicas": 4, "cross_device": "reduce_to_one"}) == baseline


def test_knobs_idle_under_a_strategy_have_baseline_values():
    baseline = of_strategy(jit_compile=False)
    space = find_search_space("several_gpus").resolve(
        baseline=baseline, device=Device.GPU, cores=8, examples=4096, dataset_takes_config=True, devices=2
    )
    compiled = baseline.replace(jit_compile=True, xla_gpu_graph_min_graph_size=1)
    spread = space.configuration({"strategy": "mirrored"})
    found = neighbours(compiled, space, SITUATION)
    assert spread in [each.replace(batch_size=baseline.batch_size) for each in found]
    observations = Observations(ratios={baseline: 0.0, compiled: 0.2, spread: 0.4})
    beliefs = Beliefs(Features(space), SITUATION, load_expectations(), observations)
    joined = [combine(each, beliefs, space, SITUATION) for each in (baseline, compiled, spread)]
    drawn = itertools.islice(Proposals(space, None)._drawn(0, space.choices, space.baseline), 50)
    for each in (*found, *joined, *drawn):
        assert not find_conflict(each)
        assert space.canonical(each) == each


def test_the_shipped_space_for_several_gpus_resolves():
    space = find_search_space("several_gpus").resolve(
        baseline=of_strategy(), device=Device.GPU, cores=8, examples=4096, dataset_takes_config=True, devices=2
    )
    assert set(space.left_out.values()) == {"only some scripts have it"}
    assert set(find_search_space("gpu").ranges) <= set(find_search_space("several_gpus").ranges)
    assert space.choices["replicas"] == (1, 2)


def spread_over(replicas, speedup, trial=1, **fields):
    """A trial's record on so many devices."""
    strategy = "none" if replicas == 1 else "mirrored"
    return a_record(of_strategy(strategy=strategy, replicas=replicas, **fields), speedup=speedup, trial=trial)


def test_scaling_is_relative_to_one_otherwise_equal_device():
    baseline = a_record(of_strategy(), trial=0)
    assert scaling_efficiency(spread_over(4, 3.0), [baseline]) == pytest.approx(0.75)
    faster = spread_over(1, 1.5, trial=2, batch_size=128, prefetch_to_device=2)
    assert scaling_efficiency(spread_over(4, 3.0), [baseline, faster]) == pytest.approx(0.5)
    assert scaling_efficiency(spread_over(4, 3.0, precision="mixed_float16"), [baseline]) is None
    assert scaling_efficiency(faster, [baseline]) is None


@pytest.mark.parametrize(("share", "told"), [(0.69, True), (0.71, False), (None, False)])
def test_poor_scaling_is_told_in_one_sentence(share, told):
    spread = spread_over(2, 1.38).model_copy(update={"scaling_efficiency": share})
    said = advice(a_record(), None, None, spread=spread)
    assert any("On 2 devices the training reaches 69%" in each for each in said) == told


def test_a_seat_with_two_gpus_is_searched_for_a_strategy(tmp_path):
    def samples_per_second(configuration):
        return 4000.0 * (1.8 if configuration.get("strategy") == "mirrored" else 1.0)

    trials = simulated_trials(samples_per_second, noise=0.02, gpus=("H200", "H200"))
    recipe, directory = quick_tune(trials, tmp_path / "run", space=SPACE, budget=200.0)
    assert (recipe.changes["strategy"], recipe.changes["replicas"]) == ("mirrored", 2)
    records = [record for record in read_trials(directory) if record.configuration.get("strategy") == "mirrored"]
    assert all(record.scaling_efficiency == pytest.approx(0.9, rel=0.1) for record in records if record.speedup)
    assert Recipe.parse(recipe.to_json(), source="recipe.json") == recipe
    lines = [each.strip() for each in usage(recipe, tmp_path / "recipe.json", "train.py")]
    assert lines.index("with recipe.scope():") < lines.index("model = make_model()")


def test_a_recipe_is_verified_where_a_trial_has_as_many_devices(tmp_path):
    two, one = (simulated_trials(noise=0.02, gpus=gpus) for gpus in (("H200", "H200"), ("H200",)))
    of_one, _ = quick_tune(one, tmp_path / "one", space=SMALL_SPACE, budget=60.0)
    of_two, _ = quick_tune(two, tmp_path / "two", space=SPACE, budget=60.0)
    for name, recipe, gpus in (("b", of_one, ("H200", "H200")), ("a", of_two, ("H200",))):
        with on_disk(tmp_path / name) as directory:
            invocation = an_invocation(simulated_trials(noise=0.02, gpus=gpus), directory, budget=60.0)
            if recipe is of_one:
                assert verify_with(invocation, recipe).finding is ClaimResult.HOLDS
                continue
            with pytest.raises(RecipeError, match="with several devices per trial; here a trial has one"):
                verify_with(invocation, recipe)


def test_only_a_tpu_strategy_that_was_made_is_refused():
    class TPUStrategy:
        def __init__(self, resolver):
            if resolver is None:
                raise ValueError("no TPU")

    refused = []
    distribute = SimpleNamespace(TPUStrategy=TPUStrategy, experimental=SimpleNamespace())
    refuse_strategies(SimpleNamespace(distribute=distribute), refused.append)
    with pytest.raises(ValueError, match="no TPU"):
        TPUStrategy(None)
    assert not refused
    TPUStrategy("a TPU")
    (error,) = refused
    assert re.match(r".*test_strategies\.py, line \d+: makes a TPUStrategy: ", error.message)


def test_strategy_note_appears_only_with_several_devices():
    reasons = {"strategy": "it needs strategy.run"}
    assert list(not_varied_notes(reasons, 2)) == ["not varied: strategy: it needs strategy.run"]
    assert list(not_varied_notes(reasons, 1)) == []


def test_a_loop_whose_work_varies_has_its_speed_in_updates():
    loop = ScriptFacts(trains=Trains.LOOP, baseline={}, work_varies=True)
    assert (loop.unit, loop.model_copy(update={"work_varies": False}).unit) == ("updates", "samples")


def test_note_on_script_start_gives_frequency_and_reason():
    def said(**facts):
        return list(script_notes(ScriptFacts(trains=Trains.FIT, baseline={}, **facts), 10.0))

    reason, advice = "train.py, line 3, starts TensorFlow", "save the prepared data to a file first"
    assert said(before_seconds=3.0, repeats_start=reason) == []
    (note,) = said(before_seconds=9.0, repeats_start=reason)
    assert note.startswith(f"the script runs 9 s before it trains, in every trial: {reason}. Change that, or {advice}")
    (note,) = said(before_seconds=9.0)
    assert note.startswith(f"the script runs 9 s before it trains, in every trial: {advice}")
    assert said(shared_seconds=20.0) == ["the script's first 20 s, before TensorFlow starts, run once for all trials"]


def test_knobs_not_varied_are_grouped_by_reason():
    reasons = {
        "prefetch": "it is so",
        "data_threads": "it is so",
        "batch_size": "another",
        "gpu_thread_mode": "it is so",
    }
    said = list(not_varied_notes(reasons))
    assert said == ["not varied: prefetch, data_threads: it is so", "not varied: batch_size: another"]


def test_on_several_devices_strategies_are_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(run_setup, "missing_xla_flags", lambda names: {})
    trials = simulated_trials(gpus=("NVIDIA H100", "NVIDIA H100"))
    with on_disk(tmp_path / "run") as directory:
        tune_with(an_invocation(trials, directory, budget=60.0, trials=1), None)
        choices = directory.read_run().search_space.choices
    assert choices["strategy"] == ("none", "mirrored")
