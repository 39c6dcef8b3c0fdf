"""Slices and operations in long form, and the study beside the history: over whole simulated runs."""

import json
import shutil
from pathlib import Path

import optuna
import pytest
from simulated_runs import faster_by, on_disk, simulated_trials, space, tune_simulated

from autotune.data.figures import Operation, Profile
from autotune.report.history import compare, load_history, load_ops, load_slices
from autotune.space.configuration import read_trials

SPACE = space(batch_size=[32, 128], steps_per_execution=[1, 4, 16], data_autotune=[True, False])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run in which only the batch size changes anything: it makes training 1.5 times as fast."""
    trials = simulated_trials(faster_by(batch_size=1.5), noise=0.02)
    with on_disk(tmp_path_factory.mktemp("tables") / "run") as directory:
        tune_simulated(trials, directory, space=SPACE, budget=300.0)
    return directory


def test_every_slice_is_a_row(run):
    slices = load_slices(run.path)
    records = list(read_trials(run))
    assert len(slices) == sum(2 * len(record.pairs) + len(record.slices) for record in records)
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
        for load in (load_slices, load_ops):
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


def test_notebook_runs_on_recorded_runs_and_stores_its_outputs(monkeypatch):
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


def test_tables_distinguish_runs_of_equal_id_by_path(run, tmp_path):
    here, there = (shutil.copytree(run.path, tmp_path / name / "run") for name in ("here", "there"))
    frame = load_history(here, there)
    names = [f"{run.name} ({path})" for path in (here, there)]
    assert list(frame["run"].unique()) == names
    assert list(compare(here, there)["run"]) == names
    assert set(load_slices(here, there)["run"]) == set(names)


def test_tables_name_a_run_alike_in_a_renamed_directory(run, tmp_path):
    copy = shutil.copytree(run.path, tmp_path / "renamed")
    history = load_history(copy)
    assert set(load_slices(copy)["run"]) == set(history["run"])
