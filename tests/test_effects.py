"""What each knob did, slices and operations in long form: over whole simulated runs."""

import json
import math
import shutil
from pathlib import Path

import optuna
import pytest
from simulated_runs import BASELINE, a_record, faster_by, on_disk, simulated_trials, tune_simulated

from autotune.data.figures import Interval, Operation, Profile
from autotune.data.record import Phase
from autotune.report.compare import compare
from autotune.report.effects import effects_in, knob_effects, load_ops, load_slices
from autotune.report.history import load_history
from autotune.space.configuration import read_trials

SPACE = """
schema_version = 1
[knobs.batch_size]
kind = "categorical"
choices = [32, 128]
[knobs.steps_per_execution]
kind = "categorical"
choices = [1, 4, 16]
[knobs.data_autotune]
kind = "categorical"
choices = [true, false]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run in which only the batch size changes anything: it makes training 1.5 times as fast."""
    trials = simulated_trials(faster_by(batch_size=1.5), noise=0.02)
    with on_disk(tmp_path_factory.mktemp("effects") / "run") as directory:
        tune_simulated(trials, directory, space=SPACE, budget=300.0)
    return directory


def test_the_effect_of_a_knob_is_found_and_that_of_others_is_none(run):
    effects = knob_effects(run.path).set_index(["knob", "before", "after"])
    batch = effects.loc[("batch_size", "32", "128")]
    assert batch["low"] <= 1.5 <= batch["high"]
    assert batch["effect"] == pytest.approx(1.5, rel=0.1)
    others = effects.drop("batch_size", level="knob")
    assert len(others) > 0
    assert others["effect"].between(0.9, 1.1).all()
    assert effects.index[0][0] == "batch_size", "the largest effect comes first"


def test_importances_stand_beside_the_effects(run):
    importances = knob_effects(run.path).groupby("knob")["importance"].first()
    assert set(importances.index) == {"batch_size", "steps_per_execution", "data_autotune"}
    assert importances.between(0, 1).all()
    assert importances.sum() == pytest.approx(1.0)


def test_every_slice_is_a_row(run):
    slices = load_slices(run.path)
    records = list(read_trials(run))
    assert len(slices) == sum(2 * len(each.pairs) + len(each.slices) for each in records)
    assert set(slices["side"]) == {"alone", "baseline", "candidate"}
    assert (slices["throughput"] == slices["examples"] / slices["seconds"]).all()
    assert slices.loc[slices["side"] == "alone", "disturbed"].isna().all()


def test_the_operations_of_profiled_trials_are_rows(run, tmp_path):
    empty = load_ops(run.path)
    assert empty.empty
    (record, *_) = read_trials(run)
    operation = Operation(name="dense/MatMul", kind="MatMul", on="host", count=20, self_seconds=0.01, share=0.8)
    run.write_trial(record.model_copy(update={"profile": Profile(steps=20, operations=(operation,))}))
    try:
        (row,) = load_ops(run.path).to_dict("records")
    finally:
        run.write_trial(record)
    assert (row["trial"], row["operation"], row["kind"], row["share"]) == (0, "dense/MatMul", "MatMul", 0.8)
    assert dict(load_ops(run.path).dtypes) == dict(empty.dtypes)


def test_tables_without_rows_keep_their_columns(tmp_path):
    with on_disk(tmp_path / "run") as directory:
        for load in (knob_effects, load_slices, load_ops):
            frame = load(directory.path)
            assert frame.empty
            assert len(frame.columns) > 5
            assert "object" not in {str(dtype) for dtype in frame.dtypes}


def test_the_study_agrees_with_the_history_row_by_row(run):
    storage = f"sqlite:///{run.study_file}"
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage).trials_dataframe()
    history = load_history(run.path)
    ours = history[(history["phase"] == "search") & (history["outcome"] == "ok")]
    told = study[study["state"] == "COMPLETE"]
    by_trial = told.set_index("user_attrs_trial")
    assert set(by_trial.index) == {0, *ours["trial"]}  # 0 is the baseline
    assert list(by_trial.loc[ours["trial"], "value_speedup"]) == pytest.approx(list(ours["speedup"]), rel=1e-9)
    for knob in ("batch_size", "steps_per_execution"):
        assert sorted(told[f"params_{knob}"]) == sorted([*ours[knob], history[knob][0]])


def test_the_notebook_runs_on_the_recorded_runs_and_holds_its_outputs(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: matplotlib.pyplot.close("all"))
    examples = Path(__file__).parents[1] / "examples"
    notebook = json.loads((examples / "compare_runs.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(examples)
    scope: dict[str, object] = {}
    kinds = set()
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), scope)
            kinds |= {kind for output in cell["outputs"] for kind in output.get("data", {"error": ""})}
            assert cell["outputs"]
    assert kinds == {"text/plain", "text/html", "image/png"}
    assert set(scope["trials"]["on"]) == set(scope["RUNS"])


def test_runs_are_compared_in_a_table(run, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(run.path, again)
    table = compare(run.path, again)
    assert list(table["verdict"]) == ["faster", "faster"]
    assert table["claim"].between(1.3, 1.7).all()
    assert table["differs"].eq("").all()


def test_pairs_of_trials_count_by_their_precision():
    def record(trial, phase, speedup, error, **changes):
        low, high = speedup * math.exp(-1.96 * error), speedup * math.exp(1.96 * error)
        return a_record(BASELINE.replace(**changes), trial=trial, phase=phase, speedup=1.0, pairs=()).model_copy(
            update={"speedup": Interval(value=speedup, low=low, high=high)}
        )

    records = [
        a_record(BASELINE, trial=0, phase=Phase.BASELINE),
        record(1, Phase.SEARCH, 1.2, 0.01, batch_size=128),
        record(2, Phase.SEARCH, 1.0, 0.03, jit_compile=True),
        record(3, Phase.SEARCH, 2.0, 0.04, jit_compile=True, batch_size=128),
    ]
    rows = {row["knob"]: row for row in effects_in(records)}
    weights = 1 / 0.01**2, 1 / (0.03**2 + 0.04**2)
    mean = (weights[0] * math.log(1.2) + weights[1] * math.log(2.0)) / sum(weights)
    assert rows["batch_size"]["effect"] == pytest.approx(math.exp(mean), rel=1e-6)
    assert rows["batch_size"]["high"] == pytest.approx(math.exp(mean + 1.96 / math.sqrt(sum(weights))), rel=1e-6)
    assert rows["batch_size"]["pairs"] == 2


def test_runs_of_one_id_are_told_apart_by_their_paths_in_all_tables(run, tmp_path):
    here, there = (shutil.copytree(run.path, tmp_path / name / "run") for name in ("here", "there"))
    frame = load_history(here, there)
    names = [f"{run.name} ({path})" for path in (here, there)]
    assert list(frame["run"].unique()) == names
    assert list(compare(here, there)["run"]) == names
    assert set(knob_effects(here, there)["run"]) == set(load_slices(here, there)["run"]) == set(names)


def test_all_tables_name_a_run_alike_whatever_its_directory_is_called(run, tmp_path):
    copy = shutil.copytree(run.path, tmp_path / "renamed")
    history = load_history(copy)
    for frame in (knob_effects(copy), load_slices(copy)):
        assert set(frame["run"]) == set(history["run"])
    assert len(knob_effects(copy).merge(history, on="run")) > 0
