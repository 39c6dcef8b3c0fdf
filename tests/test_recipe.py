"""The recipe file: reading and writing it, and its JSON Schema."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from simulated_runs import BASELINE, MACHINE, faster_by, quick_tune, simulated_trials, space

from autotune.data.errors import RecipeError, RunDirectoryError
from autotune.data.facts import ScriptFacts, Site, Trains
from autotune.data.figures import Interval
from autotune.data.printable import LONGEST_MESSAGE
from autotune.front.documents import recipe_schema_text
from autotune.recipe import recipe as recipe_module
from autotune.recipe.answer import learning_caveats
from autotune.recipe.apply import environment
from autotune.recipe.evidence import (
    FAILED_A_CHECK,
    SCHEMA_VERSION,
    BestCandidate,
    BestConfiguration,
    Contribution,
    LearningRateRule,
    SameLoss,
)
from autotune.recipe.recipe import MachineMismatchWarning, Recipe
from autotune.space.knobs import KNOBS, Device, Domain, Stage, knobs_on
from autotune.stats.deciding import Verdict

SCHEMA_FILE = Path(recipe_module.__file__).with_name("recipe.schema.json")
SPACE = space(batch_size=[32, 128], onednn=[True, False])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe that recommends another batch size without oneDNN, out of a simulated run."""
    trials = simulated_trials(faster_by(batch_size=1.5, onednn=1.3), noise=0.02)
    made, _ = quick_tune(trials, tmp_path_factory.mktemp("run"), space=SPACE, budget=200.0)
    assert made.changes == {"batch_size": 128, "onednn": False}
    return made


def document_of(recipe):
    """The recipe's JSON, to be damaged."""
    return json.loads(recipe.to_json())


def changed(recipe, path, value):
    """The recipe's JSON text with one value replaced; `path` is keys with dots between."""
    document = document_of(recipe)
    *parents, last = path.split(".")
    place = document
    for key in parents:
        place = place[key]
    place[last] = value
    return json.dumps(document)


def find_conflict(text):
    """The error that reading the text gives: one line of message."""
    with pytest.raises(RecipeError) as caught:
        Recipe.parse(text, source="my.json")
    error = caught.value
    assert error.message.startswith("my.json: ")
    assert error.message.isprintable()
    assert len(error.message) < LONGEST_MESSAGE + 100
    return error


# ----------------------------------------------------------------------------------------- there and back


def test_what_was_saved_is_loaded_and_validates(tmp_path, recipe, recipes):
    assert recipes["watched"].evidence.watch is not None
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    for made in (recipe, *recipes.values()):
        path = tmp_path / "recipe.json"
        made.save(path)
        loaded = Recipe.load(path)
        assert loaded == made
        assert loaded.to_json() == path.read_text()
        jsonschema.validate(document_of(made), schema)


def test_a_byte_order_mark_is_read_over(tmp_path, recipe):
    (tmp_path / "recipe.json").write_text(recipe.to_json(), encoding="utf-8-sig")
    content = (tmp_path / "recipe.json").read_bytes()
    assert Recipe.load(tmp_path / "recipe.json") == recipe
    assert Recipe.parse(content, source="here") == recipe
    assert Recipe.parse(content.decode(), source="here") == recipe


def test_the_file_has_the_promised_fields(recipe):
    document = document_of(recipe)
    assert document["schema_version"] == SCHEMA_VERSION == 1
    assert document["configuration"]["batch_size"] == 128
    assert document["baseline"]["batch_size"] == 32
    evidence = document["evidence"]
    assert evidence["verdict"] == "faster"
    assert evidence["speedup"]["low"] <= evidence["speedup"]["value"] <= evidence["speedup"]["high"]
    assert set(evidence["peak_memory_bytes"]) == {"host", "device"}
    assert set(document["learning_rate_rule"]) == {"batch_ratio", "rule", "factor", "same_loss", "not_measured"}
    assert document["workload"]["fingerprint"].startswith("sha256:")
    assert document["machine"]["cores"] == 2


def test_a_place_that_cannot_be_written_is_an_error(tmp_path, recipe):
    with pytest.raises(RunDirectoryError, match="missing"):
        recipe.save(tmp_path / "missing" / "recipe.json")
    path = tmp_path / "recipe.json"
    path.write_text("older")
    recipe.save(path)
    assert Recipe.load(path) == recipe
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.json"]


def test_reading_sets_nothing(tmp_path, recipe):
    recipe.save(tmp_path / "recipe.json")
    code = (
        "import os, sys\n"
        "before = dict(os.environ)\n"
        "import autotune\n"
        f"recipe = autotune.Recipe.load({str(tmp_path / 'recipe.json')!r})\n"
        "assert recipe.configuration['onednn'] is False\n"
        "assert dict(os.environ) == before\n"
        "assert 'tensorflow' not in sys.modules and 'optuna' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.getcwd()})


# -------------------------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize("name", ["missing.json", "null\0character"])
def test_a_path_without_a_file_is_an_error(tmp_path, name):
    with pytest.raises(RecipeError, match="cannot read ") as caught:
        Recipe.load(f"{tmp_path}/{name}")
    assert caught.value.message.isprintable()
    assert "Give a recipe.json" in caught.value.hint


def test_a_newer_recipe_asks_for_an_upgrade(recipe):
    for text in (changed(recipe, "schema_version", 10**400), '{"schema_version": 2, "recipes": []}'):
        error = find_conflict(text)
        assert "reads recipes of schema_version 1 only" in error.message
        assert "or a later one" in error.hint


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(recipe, number):
    text = changed(recipe, "evidence.speedup.value", "HERE").replace('"HERE"', number)
    assert "evidence.speedup.value" in find_conflict(text).message


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("configuration.bacth_size", 32, "bacth_size"),
        ("configuration.LD_PRELOAD", "/tmp/x.so", "LD_PRELOAD"),
        ("configuration.precision", "float8", "precision"),
        ("configuration.batch_size", 0, "batch_size"),
        ("configuration.batch_size", True, "batch_size"),
        ("configuration.batch_size", 32.5, "batch_size"),
        ("configuration.batch_size", [32], "batch_size"),
        ("configuration.onednn", 1, "onednn"),
        ("configuration.onednn", "no", "onednn"),
        ("baseline.precision", "__import__('os')", "precision"),
        ("configuration", {}, "batch_size"),
        ("evidence.speedup.value", "1.5", "speedup.value"),
        ("created_by.seed", "5", "seed"),
        ("machine.cores", True, "cores"),
        ("candidate", {"configuration": {"nope": 1}, "speedup": None, "reason": ""}, "nope"),
        ("command", "rm -rf /", "command"),
        ("evidence.peak_memory_bytes.host", 10**400, "host"),
        ("machine.memory_bytes", 10**400, "memory_bytes"),
    ],
)
def test_only_knobs_and_fields_that_exist_get_through(recipe, path, value, named):
    assert named in find_conflict(changed(recipe, path, value)).message


@pytest.mark.parametrize(
    ("path", "estimate", "named"),
    [
        ("evidence.speedup", {"value": 5.0, "low": 9.0, "high": 1.0}, "9 to 1"),
        ("evidence.speedup", {"value": 0.9, "low": 1.0, "high": 2.0}, "0.9 does not lie in"),
        ("evidence.speedup", {"value": 2.1, "low": 1.0, "high": 2.0}, "2.1 does not lie in"),
        ("evidence.speedup", {"value": 0.0, "low": 0.0, "high": 2.0}, "evidence.speedup.value"),
        ("evidence.baseline_throughput", {"value": 1.0, "low": 2.0, "high": 3.0}, "evidence.baseline_throughput"),
    ],
)
def test_a_figure_lies_in_its_own_interval(recipe, path, estimate, named):
    assert named in find_conflict(changed(recipe, path, estimate)).message
    Recipe.parse(changed(recipe, path, {"value": 2.0, "low": 2.0, "high": 2.0}), source="my.json")


@pytest.mark.parametrize("part", ["configuration", "baseline"])
@pytest.mark.parametrize("knob", [knob.name for knob in knobs_on(Device.CPU) if not knob.of_workload])
def test_every_knob_of_the_device_is_there(recipe, part, knob):
    document = document_of(recipe)
    del document[part][knob]
    assert find_conflict(json.dumps(document)).message.endswith(f"{part}: has no {knob}")


def test_the_knobs_of_a_gpu_are_as_good_as_those_of_a_cpu(recipe):
    document = document_of(recipe)
    for part in ("configuration", "baseline"):
        del document[part]["onednn"], document[part]["keep_freed_memory"]
        own = {knob.name: knob.default for knob in knobs_on(Device.GPU) if not knob.of_workload}
        document[part] |= {name: default for name, default in own.items() if default is not None} | document[part]
    loaded = Recipe.parse(json.dumps(document), source="my.json")
    assert set(loaded.configuration) == {knob.name for knob in knobs_on(Device.GPU) if not knob.of_workload}
    gpu, document["baseline"] = document["baseline"], dict(recipe.baseline)
    assert "baseline has no tensor_float_32, " in find_conflict(json.dumps(document)).message
    document["baseline"] |= gpu
    assert (
        "configuration has no onednn, keep_freed_memory, and baseline has"
        in find_conflict(json.dumps(document)).message
    )


# ------------------------------------------------------------------------------------------------ the schema


def test_the_shipped_schema_is_the_models():
    """It holds what is required, each bound and each word, so that a model which allows more fails here.

    `python -m autotune.front.documents recipe` prints it anew.
    """
    assert SCHEMA_FILE.read_text(encoding="utf-8") == recipe_schema_text()


# ----------------------------------------------------------------------------------------------- in training


@pytest.fixture
def applied(monkeypatch):
    """What `apply` would set, instead of setting it, in a process where nothing was applied before."""
    calls = []
    monkeypatch.setattr(recipe_module.apply, "_applied", None)
    monkeypatch.setattr(recipe_module.apply, "apply_before_import", lambda configuration: calls.append("import"))
    monkeypatch.setattr(recipe_module.apply, "apply_before_build", lambda configuration: calls.append("build"))
    monkeypatch.setattr(recipe_module, "fingerprint", lambda: MACHINE)
    return calls


def test_applying_follows_the_stages(recipe, applied):
    recipe.apply()
    assert applied == ["import", "build"]


def test_a_machine_of_the_file_cannot_steer_a_terminal(recipe, applied):
    strange = recipe.machine.model_copy(update={"cpu": "Xeon\x1b[2J\n\u202etwo"})
    other = recipe.model_copy(update={"machine": strange})
    with pytest.warns(MachineMismatchWarning, match="Xeon") as warned:
        other.apply()
    assert str(warned[0].message).isprintable()


def test_another_machine_is_warned_of(recipe, applied, monkeypatch):
    monkeypatch.setattr(recipe_module, "fingerprint", lambda: MACHINE.model_copy(update={"cores": 64}))
    with pytest.warns(
        MachineMismatchWarning, match="device: measured on simulated × 2 cores, here simulated × 64 cores"
    ):
        recipe.apply()
    assert applied == ["import", "build"]
    with pytest.warns(MachineMismatchWarning):
        recipe.apply()
    assert applied.count("import") == 1, "the same recipe twice is once"


def test_what_has_changed_on_a_machine_of_this_kind_is_warned_of(recipe, applied, monkeypatch):
    newer = {**MACHINE.packages, "tensorflow": "2.21.3"}
    monkeypatch.setattr(recipe_module, "fingerprint", lambda: MACHINE.model_copy(update={"packages": newer}))
    with pytest.warns(
        MachineMismatchWarning, match=r"TensorFlow: measured on 2\.21\.0, here 2\.21\.3.*autotune verify"
    ):
        recipe.apply()
    recipe.with_baseline().apply()  # which claims nothing


def test_edits_of_the_code_are_named_with_what_they_gave(recipe, applied):
    site = Site(file="train.py", function="<module>", call="map", order=0, line=3)
    facts = ScriptFacts(trains=Trains.FIT, baseline={"batch_size": 32}, sites={"num_parallel_calls": (site,)})
    gain = Contribution(knob="num_parallel_calls", gain=Interval(value=1.4, low=1.2, high=1.6), trial=9)
    update = {
        "configuration": {**recipe.configuration, "num_parallel_calls": 4},
        "workload": recipe.workload.model_copy(update={"script": facts}),
        "evidence": recipe.evidence.model_copy(update={"contributions": (gain,)}),
    }
    with pytest.warns(UserWarning, match=r"num_parallel_calls=4 \(gave ×1\.40\).*show RECIPE --diff SCRIPT") as said:
        assert recipe.model_copy(update=update).apply().batch_size == 128
    assert len(said) == 1
    recipe.apply()  # no knob of it is an edit


def test_what_changed_is_told(recipe):
    assert recipe.batch_size == recipe.dataset_config.batch_size == 128
    assert recipe.changes == {"batch_size": 128, "onednn": False}
    assert recipe.baseline == dict(BASELINE)


def test_either_answer_can_be_taken(recipe):
    rates = {"speedup": Interval(value=2.0, low=1.9, high=2.1), "throughput": recipe.evidence.throughput}
    same = {**recipe.baseline, "prefetch": 1}
    larger = BestConfiguration(
        configuration=recipe.configuration, **rates, confirmed=True, learning_rate_rule=LearningRateRule(batch_ratio=4)
    )
    timed = recipe.model_copy(update={"evidence": recipe.evidence.model_copy(update={"objective": "time_to_loss"})})
    both = timed.model_copy(
        update={"same_training": BestConfiguration(configuration=same, **rates, confirmed=True), "larger_batch": larger}
    )
    assert (both.with_same_training().configuration, both.with_same_training().learning_rate_rule) == (same, None)
    assert both.with_larger_batch().learning_rate_rule.batch_ratio == 4.0
    with pytest.raises(RecipeError, match="looked for throughput at any batch size"):
        recipe.with_same_training()
    neither = timed.model_copy(update={"same_training": None, "larger_batch": None})
    assert neither.with_same_training().changes == {}
    assert neither.with_same_training().evidence.throughput == recipe.evidence.baseline_throughput
    with pytest.raises(RecipeError, match="tried no other batch size"):
        neither.with_larger_batch()


def test_a_notebook_shows_both_answers_as_the_run_ends_with_them(recipe):
    sooner = Interval(value=1.9, low=1.7, high=2.1)
    found = SameLoss(
        speedup=sooner,
        examples_factor=Interval(value=1.1, low=1.0, high=1.2),
        by_rule={"linear": 1.1},
        examples=25_600,
        after_steps=400,
        seeds=8,
    )
    rule = LearningRateRule(batch_ratio=4.0, rule="linear", factor=4.0, same_loss=found)
    rates = {"speedup": Interval(value=2.1, low=2.0, high=2.2), "throughput": recipe.evidence.throughput}
    same = BestConfiguration(configuration={**recipe.baseline, "prefetch": 1}, **rates, confirmed=True)
    larger = BestConfiguration(configuration=recipe.configuration, **rates, confirmed=True, learning_rate_rule=rule)
    answers = {"same_training": same, "larger_batch": larger, "learning_rate_rule": rule}
    workload = recipe.workload.model_copy(update={"name": "<b>digits"})
    both = recipe.model_copy(update={**answers, "workload": workload})
    assert [choice.said for choice in both.answer.choices] == [
        ("×2.10 (2.00 to 2.20) in samples/s", "nothing about learning changes", "prefetch=1"),
        (
            "×1.90 (1.70 to 2.10) sooner to the same losses",
            "batch 128, learning rate ×4 (linear)",
            "×2.10 (2.00 to 2.20) in samples/s",
            "losses of the 25,600 examples after the first 400 steps",
        ),
    ]
    assert both.answer.recommended == "larger batch"
    shown = both._repr_html_()
    assert "&lt;b&gt;digits: Faster: ×1.90 (1.70 to 2.10) sooner to the same losses" in shown
    said = [f"<td>{choice.kind.capitalize()}</td><td>{'; '.join(choice.said)}</td>" for choice in both.answer.choices]
    assert [text in shown for text in said] == [True, True]
    assert both.answer.headline in repr(both)
    alone = recipe.model_copy(update={"larger_batch": None})
    assert alone.answer.choices == ()
    assert "Larger batch" not in alone._repr_html_()


@pytest.mark.parametrize(
    ("baseline", "changes", "said"),
    [
        ({}, {"prefetch": 1}, "nothing about learning changes"),
        ({}, {"precision": "mixed_bfloat16"}, "same batches, lower precision"),
        ({"precision": "float64"}, {"precision": "float32"}, "same batches, lower precision"),
        ({"precision": "mixed_float16"}, {"precision": "float32"}, "same batches, higher precision"),
        ({"tensor_float_32": False}, {"tensor_float_32": True}, "same batches, lower precision"),
        ({"graph_step": False}, {"graph_step": True}, "other random numbers of the script's seed (vae.py, line 9)"),
    ],
)
def test_a_change_of_numbers_is_never_the_same_training(recipe, baseline, changes, said):
    script = ScriptFacts(trains=Trains.LOOP, baseline={"batch_size": 64}, redraws="vae.py, line 9")
    recipe = recipe.model_copy(update={"workload": recipe.workload.model_copy(update={"script": script})})
    before = {**recipe.baseline, **baseline}
    rates = {"speedup": recipe.evidence.speedup, "throughput": recipe.evidence.throughput, "confirmed": True}
    same = BestConfiguration(configuration={**before, **changes}, **rates)
    found = {"baseline": before, "configuration": same.configuration, "same_training": same}
    alone = recipe.model_copy(update={**found, "larger_batch": None, "learning_rate_rule": None})
    larger = BestConfiguration(configuration={**before, "batch_size": 256}, **rates)
    both = alone.model_copy(update={"larger_batch": larger})
    assert both.answer.choices[0].said[1] == said
    assert learning_caveats(both) == []
    assert learning_caveats(alone) == ([] if "nothing" in said else [f"{said.capitalize()}."])
    scaled = alone.model_copy(update={"learning_rate_rule": LearningRateRule(batch_ratio=4.0)})
    draws = [said for said in learning_caveats(scaled) if said.startswith("Other random numbers")]
    assert len(draws) == ("random" in said), "of a larger batch as well"


@pytest.mark.parametrize("value", [True, False, "LD_PRELOAD=/tmp/x.so", "0\nPATH=/tmp"])
def test_the_environment_is_set_by_one_variable_and_two_values(monkeypatch, value):
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    for default in ("0", "1"):
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", default)
        found = environment({"onednn": value, "LD_PRELOAD": value, "precision": value, "batch_size": 1})
        assert set(found.items()) <= {("TF_ENABLE_ONEDNN_OPTS", "0"), ("TF_ENABLE_ONEDNN_OPTS", "1")}
    assert environment({"LD_PRELOAD": value}) == {}


def test_every_knob_that_is_a_variable_is_on_the_list():
    for knob in KNOBS.values():
        if knob.stage is Stage.IMPORT:
            assert knob.domain == Domain(booleans=True)
            assert len(environment({knob.name: not knob.default})) == 1


# ------------------------------------------------------------------------------------- the unconfirmed candidate


def of_search(speedup):
    """A speed-up that the search alone has measured."""
    return Interval(value=speedup, low=speedup, high=speedup)


def undecided(recipe, *, speedup, reason=""):
    """The recipe of a run whose time was over, with the recommended configuration as its candidate."""
    candidate = BestCandidate(configuration=recipe.configuration, speedup=speedup, reason=reason)
    evidence = recipe.evidence.model_copy(update={"verdict": Verdict.UNDECIDED})
    changes = {
        "configuration": recipe.baseline,
        "evidence": evidence,
        "candidate": candidate,
        "learning_rate_rule": None,
    }
    return recipe.model_copy(update=changes)


def test_recipe_of_a_candidate_claims_estimate_and_interval(recipe):
    found = undecided(recipe, speedup=Interval(value=1.5, low=0.9, high=2.0)).with_candidate()
    rate = recipe.evidence.baseline_throughput.value
    assert found.changes == recipe.changes
    assert found.learning_rate_rule.batch_ratio == 4.0
    assert (found.evidence.throughput.low, found.evidence.throughput.high) == (0.9 * rate, 2.0 * rate)


@pytest.mark.parametrize(
    ("candidate", "may"),
    [
        ({"speedup": of_search(1.2)}, True),
        ({"speedup": of_search(0.9)}, False),
        ({"speedup": of_search(1.2), "reason": f"{FAILED_A_CHECK}: hangs"}, False),
        ({"speedup": Interval(value=0.9, low=0.8, high=1.1)}, False),
    ],
)
def test_only_faster_looking_stable_candidate_may_be_run(recipe, candidate, may):
    found = undecided(recipe, **candidate)
    assert found.candidate.may_be_faster is may
    if not may:
        with pytest.raises(RecipeError, match="no faster than the baseline, or unstable"):
            found.with_candidate()


def test_a_recipe_is_a_few_lines_in_a_session(recipe):
    first, second, *_, last = repr(recipe).splitlines()
    assert first == f"Recipe of {recipe.workload.name}: {recipe.answer.headline}"
    assert second.split() == [f"{name}={str(value).lower()}" for name, value in recipe.changes.items()]
    assert last == f"  measured on {recipe.machine.describe()}, run {recipe.created_by.run}"
    assert recipe.evidence.advice[0] in repr(recipe)
    assert str(recipe) == repr(recipe)
