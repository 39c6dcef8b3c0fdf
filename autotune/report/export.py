"""Export a run to an experiment tracker: each trial becomes one of the tracker's own runs.

The tracker's package decides where they go, by its own settings such as `MLFLOW_TRACKING_URI` or `WANDB_MODE`.
Parameters are the knobs, metrics and tags the other columns of `load_history`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from autotune.data.errors import ArgumentError, AutotuneError
from autotune.data.options import Tracker
from autotune.data.printable import first_line, mask_text
from autotune.data.record import Outcome
from autotune.data.run_directory import OWN_NAME, RunDirectory
from autotune.report.history import FLOAT, INTEGER, TIME, columns, load_history, rows_of
from autotune.space.knobs import KNOBS

FOLDER = "tensorboard"  # in the run directory
_FIGURES = {name: dtype for name, dtype in columns().items() if name not in {*KNOBS, "trial"}}
METRICS = [name for name, dtype in _FIGURES.items() if dtype in (FLOAT, INTEGER)]
TAGS = [name for name, dtype in _FIGURES.items() if name not in METRICS and dtype != TIME]
_SHOWN_METRICS = ("speedup", "throughput", "same_loss_speedup", "loss", "compile_seconds", "peak_host_bytes")
_SHOWN_TAGS = ("phase", "outcome", "changes")
_MOST_RUNS = 50_000  # that MLflow returns of one search


@dataclass(frozen=True, kw_only=True)
class TrackedTrial:
    """A trial as trackers hold it, by the names of history's columns."""

    name: str  # `0007`
    parameters: dict[str, bool | int | str]
    metrics: dict[str, float]
    tags: dict[str, str]
    succeeded: bool
    began: float  # seconds since the epoch
    ended: float


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as trackers hold it. Its names have no character that a tracker refuses."""

    directory: Path
    id: str
    experiment: str
    trials: Sequence[TrackedTrial]


def read_tracked_run(path: str | Path) -> TrackedRun:
    """Read a run as trackers hold it. Raises RunDirectoryError."""
    directory = RunDirectory(path)
    run = directory.read_run()
    workload = "workload" if run.workload is None else run.workload.name
    trials = []
    for row in rows_of(load_history(path, every_column=True)):
        known = {name: value for name, value in row.items() if value is not None}
        began = known["started_at"].timestamp()
        trial = TrackedTrial(
            name=f"{known['trial']:04d}",
            parameters={name: known[name] for name in KNOBS if name in known},
            metrics={name: float(known[name]) for name in METRICS if name in known},
            tags={name: str(known[name]) for name in TAGS if name in known},
            succeeded=Outcome(known["outcome"]).measured,
            began=began,
            ended=began + known["seconds"],
        )
        trials.append(trial)
    name, workload = (re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:100] for name in (run.run, workload))
    if not OWN_NAME.fullmatch(run.run):  # of a directory that the user has named: others may have the same
        name += f"-{re.sub(r'[^0-9]', '', run.started_at)[:14]}"
    return TrackedRun(directory=directory.path, id=name, experiment=f"autotune-{workload}", trials=trials)


def check_installed(tracker: Tracker) -> None:
    """Raise ArgumentError if the package of a tracker is missing."""
    if importlib.util.find_spec(tracker) is None:
        raise ArgumentError(f"{tracker} is not installed", hint=f"Run pip install {tracker}.")


def export_run(path: str | Path, tracker: Tracker) -> str:
    """Export the trials of a run, and return in words where they are. Exporting again updates them.

    Raises:
        ArgumentError: The tracker's package is missing, or it does not take the trials.
        RunDirectoryError: The run cannot be read, or its directory not be written.
    """
    check_installed(tracker)
    run = read_tracked_run(path)
    # Output of a package is no result. MLflow retries for minutes where no server answers.
    quiet = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    try:
        with mock.patch.dict(os.environ, quiet), contextlib.redirect_stdout(sys.stderr):
            return mask_text(_EXPORTS[tracker](run))
    except AutotuneError:
        raise
    except Exception as error:
        problem = f"{tracker} did not take the trials: {type(error).__name__}: {first_line(mask_text(str(error)))}"
        raise ArgumentError(problem, hint=f"Check the settings of {tracker}, and export the run again.") from error


def _export_to_mlflow(run: TrackedRun) -> str:
    import mlflow
    from mlflow.entities import Metric, Param, RunTag

    client = mlflow.MlflowClient()
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.experiment
    found = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if found is None else found.experiment_id
    earlier = client.search_runs([experiment], f"tags.`autotune.run` = '{run.id}'", max_results=_MOST_RUNS)
    known = {logged.data.tags["autotune.trial"]: logged.info.run_id for logged in earlier}
    for trial in run.trials:
        began, ended = (int(1000 * moment) for moment in (trial.began, trial.ended))
        names = {"autotune.run": run.id, "autotune.trial": trial.name}
        logged = known.get(trial.name)
        if logged is None:
            created = client.create_run(experiment, began, tags=names, run_name=f"{run.id}/{trial.name}")
            logged = created.info.run_id
        client.log_batch(
            logged,
            metrics=[Metric(metric, value, ended, 0) for metric, value in trial.metrics.items()],
            params=[Param(knob, str(value)) for knob, value in trial.parameters.items()],
            tags=[RunTag(tag, value) for tag, value in trial.tags.items()],
        )
        client.set_terminated(logged, "FINISHED" if trial.succeeded else "FAILED", ended)
    return f"experiment {name} at {mlflow.get_tracking_uri()}"


def _export_to_wandb(run: TrackedRun) -> str:
    import wandb

    project = os.environ.get("WANDB_PROJECT") or run.experiment
    where = f"project {project}, group {run.id}"
    for trial in run.trials:
        logged = wandb.init(
            project=project,
            group=run.id,
            job_type=trial.tags["phase"],
            name=f"{run.id}/{trial.name}",
            id=f"{run.id}-{trial.name}",
            resume="allow",
            config={**trial.parameters, **trial.tags},
            settings=wandb.Settings(console="off"),
        )
        logged.summary.update(trial.metrics)
        logged.finish(exit_code=0 if trial.succeeded else 1)
    return where


def _export_to_tensorboard(run: TrackedRun) -> str:
    import tensorflow as tf
    from tensorboard.plugins.hparams import api, api_pb2, summary

    folder = run.directory / FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier export
    shown = {trial.name: {**trial.parameters, **{tag: trial.tags[tag] for tag in _SHOWN_TAGS}} for trial in run.trials}
    values = {name: {row[name] for row in shown.values() if name in row} for name in (*KNOBS, *_SHOWN_TAGS)}
    varied = [api.HParam(name, api.Discrete(list(found))) for name, found in values.items() if len(found) > 1]
    metrics = [api.Metric(name) for name in _SHOWN_METRICS if any(name in trial.metrics for trial in run.trials)]
    with tf.summary.create_file_writer(str(folder)).as_default():
        api.hparams_config(varied, metrics)
    for trial in run.trials:
        status = api_pb2.STATUS_SUCCESS if trial.succeeded else api_pb2.STATUS_FAILURE
        with tf.summary.create_file_writer(str(folder / trial.name)).as_default(step=0):
            api.hparams(shown[trial.name], trial_id=trial.name, start_time_secs=trial.began)
            for name, figure in trial.metrics.items():
                tf.summary.scalar(name, figure)
            tf.summary.experimental.write_raw_pb(summary.session_end_pb(status, trial.ended).SerializeToString())
    return f"tensorboard --logdir {folder}"


_EXPORTS: dict[Tracker, Callable[[TrackedRun], str]] = {
    "mlflow": _export_to_mlflow,
    "wandb": _export_to_wandb,
    "tensorboard": _export_to_tensorboard,
}
