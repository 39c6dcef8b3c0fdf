"""Exports to trackers: trials as a tracker's own runs, by the real packages where these are installed."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from autotune.front import cli
from autotune.report.export import _EXPORTS, FOLDER, export_run, read_tracked_run
from autotune.report.history import load_history


@pytest.fixture
def run(finished, tmp_path):
    """The directory of a finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def test_knobs_are_parameters_figures_metrics_and_words_tags(run):
    trials = read_tracked_run(run).trials
    rows = load_history(run, every_column=True)
    assert [trial.name for trial in trials] == [f"{number:04d}" for number in rows["trial"]]
    for trial, (_, row) in zip(trials, rows.iterrows(), strict=True):
        assert trial.parameters["batch_size"] == row["batch_size"]
        assert type(trial.parameters["jit_compile"]) is bool
        assert trial.metrics["throughput"] == row["throughput"]
        assert trial.tags["changes"] == row["changes"]
        assert trial.ended - trial.began == pytest.approx(row["seconds"], abs=1e-3)
    assert "speedup" not in trials[0].metrics, "what was not measured is left out"


def test_a_failed_trial_is_a_failed_run(run):
    file = run / "trials" / "0001" / "result.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"outcome": "oom", "reason": "out of memory", "pairs": []}))
    failed = read_tracked_run(run).trials[1]
    assert not failed.succeeded
    assert (failed.tags["outcome"], failed.tags["reason"]) == ("oom", "out of memory")


def test_names_have_no_character_that_a_tracker_refuses(run):
    record = json.loads((run / "run.json").read_text())
    record["run"], record["workload"]["name"] = "it's/mine?", "a b:c"
    (run / "run.json").write_text(json.dumps(record))
    tracked = read_tracked_run(run)
    assert (tracked.id, tracked.experiment) == (f"it_s_mine_-{stamp_of(record)}", "autotune-a_b_c")


def stamp_of(record):
    """The digits of the second in which a run started."""
    return "".join(filter(str.isdigit, record["started_at"]))[:14]


def test_runs_in_directories_of_equal_name_have_distinct_ids(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "elsewhere" / "run")
    record = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps(record | {"started_at": "2026-11-20T07:00:00.000+00:00"}))
    assert read_tracked_run(other).id != read_tracked_run(run).id
    (other / "run.json").write_text(json.dumps(record | {"run": "20261120-191001-1a2b3c"}))
    assert read_tracked_run(other).id == "20261120-191001-1a2b3c"


def test_a_package_that_is_missing_is_named_before_anything_runs(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["export", "nowhere", "--log-to", "wandb"]) == 2
    assert capsys.readouterr().err == "autotune: wandb is not installed\nRun pip install wandb.\n"


@pytest.mark.parametrize(("users", "used"), [(None, "1"), ("9", "9")])
def test_an_export_retries_once_unless_the_user_says_how_often(run, monkeypatch, users, used):
    name, seen = "MLFLOW_HTTP_REQUEST_MAX_RETRIES", []
    monkeypatch.delenv(name, raising=False)
    if users is not None:
        monkeypatch.setenv(name, users)
    monkeypatch.setattr("autotune.report.export.check_installed", lambda tracker: None)
    monkeypatch.setitem(_EXPORTS, "mlflow", lambda tracked: seen.append(os.environ[name]) or "there")
    assert export_run(run, "mlflow") == "there"
    assert (seen, os.environ.get(name)) == ([used], users)


def summaries_of(folder):
    """The summaries in a folder's one file of events."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    (file,) = [path for path in folder.iterdir() if path.is_file()]
    return [value for event in LegacyEventFileLoader(str(file)).Load() for value in event.summary.value]


@pytest.mark.slow
def test_tensorboard_gets_a_session_for_each_trial(run):
    pytest.importorskip("tensorboard")
    from tensorboard.plugins.hparams import api_pb2, metadata
    from tensorboard.util.tensor_util import make_ndarray

    code = "import sys; from autotune.front.cli import main; sys.exit(main())"
    for _ in range(2):  # the second replaces the first
        command = [sys.executable, "-c", code, "export", str(run), "--log-to", "tensorboard"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"tensorboard --logdir {run / FOLDER}\n"
    (config,) = summaries_of(run / FOLDER)
    experiment = metadata.parse_experiment_plugin_data(config.metadata.plugin_data.content)
    assert {info.name.tag for info in experiment.metric_infos} >= {"speedup", "throughput"}
    names = {info.name for info in experiment.hparam_infos}
    assert "batch_size" in names
    assert "onednn" not in names, "a knob that no trial varied is no column"
    for trial in read_tracked_run(run).trials:
        start, *scalars, end = summaries_of(run / FOLDER / trial.name)
        session = metadata.parse_session_start_info_plugin_data(start.metadata.plugin_data.content)
        assert session.hparams["batch_size"].number_value == trial.parameters["batch_size"]
        assert session.hparams["phase"].string_value == trial.tags["phase"]
        figures = {value.tag: make_ndarray(value.tensor).item() for value in scalars}
        assert figures == pytest.approx(trial.metrics, rel=1e-6)
        ended = metadata.parse_session_end_info_plugin_data(end.metadata.plugin_data.content)
        assert ended.status == api_pb2.STATUS_SUCCESS


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # MLflow's own use of deprecated functions
def test_mlflow_gets_a_run_for_each_trial_once(run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    for _ in range(2):
        told = export_run(run, "mlflow")
    assert told == f"experiment autotune-simulated at sqlite:///{tmp_path / 'mlflow.db'}"
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("autotune-simulated").experiment_id
    logged = {one.data.tags["autotune.trial"]: one for one in client.search_runs([experiment])}
    trials = read_tracked_run(run).trials
    assert sorted(logged) == [trial.name for trial in trials]
    for trial in trials:
        one = logged[trial.name]
        assert one.data.metrics == pytest.approx(trial.metrics)
        assert one.data.params == {name: str(value) for name, value in trial.parameters.items()}
        assert one.data.tags["changes"] == trial.tags["changes"]
        assert (one.info.status, one.info.run_name) == ("FINISHED", f"{read_tracked_run(run).id}/{trial.name}")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_wandb_gets_a_run_for_each_trial(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    told = export_run(run, "wandb")
    assert told == f"project autotune-simulated, group {read_tracked_run(run).id}"
    kept = sorted(path.name.rpartition("-")[2] for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert kept == [trial.name for trial in read_tracked_run(run).trials]
