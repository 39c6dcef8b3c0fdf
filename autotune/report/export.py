"""Export a run to an experiment tracker: each trial becomes one of the tracker's own runs.

The tracker's package decides where they go, by its own settings such as `MLFLOW_TRACKING_URI` or `WANDB_MODE`.
Parameters are the knobs, metrics and tags the other columns of `load_history`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from autotune.data.credentials import mask_text
from autotune.data.errors import ArgumentError, AutotuneError, RunDirectoryError
from autotune.data.files import write_atomically
from autotune.data.options import Tracker
from autotune.data.printable import first_line
from autotune.data.record import Outcome
from autotune.data.run_directory import OWN_NAME, RunDirectory
from autotune.report.history import FLOAT, INTEGER, TIME, columns, load_history, rows_of
from autotune.space.knobs import KNOBS

FOLDER = "tensorboard"  # in the run directory
EVENTS = "events.out.tfevents.autotune"  # TensorBoard reads files whose names hold `tfevents`
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
    trials = [_tracked(row) for row in rows_of(load_history(path, every_column=True))]
    name = _plain(run.run)
    if not OWN_NAME.fullmatch(run.run):  # of a directory that the user has named: others may have the same
        name += f"-{re.sub(r'[^0-9]', '', run.started_at)[:14]}"
    return TrackedRun(directory=directory.path, id=name, experiment=f"autotune-{_plain(workload)}", trials=trials)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:100]


def _tracked(row: dict[str, Any]) -> TrackedTrial:
    known = {name: value for name, value in row.items() if value is not None}
    began = known["started_at"].timestamp()
    return TrackedTrial(
        name=f"{known['trial']:04d}",
        parameters={name: known[name] for name in KNOBS if name in known},
        metrics={name: float(known[name]) for name in METRICS if name in known},
        tags={name: str(known[name]) for name in TAGS if name in known},
        succeeded=Outcome(known["outcome"]).measured,
        began=began,
        ended=began + known["seconds"],
    )


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
    # What a package prints is no result. MLflow retries for minutes where no server answers.
    few_retries = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", **os.environ}
    try:
        with mock.patch.dict(os.environ, few_retries), contextlib.redirect_stdout(sys.stderr):
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
    from tensorboard.plugins.hparams import summary_v2 as api  # `api` itself imports TensorFlow

    folder = run.directory / FOLDER
    shown = {trial.name: {**trial.parameters, **{tag: trial.tags[tag] for tag in _SHOWN_TAGS}} for trial in run.trials}
    values = {name: {row[name] for row in shown.values() if name in row} for name in (*KNOBS, *_SHOWN_TAGS)}
    varied = [api.HParam(name, api.Discrete(list(found))) for name, found in values.items() if len(found) > 1]
    metrics = [api.Metric(name) for name in _SHOWN_METRICS if any(name in trial.metrics for trial in run.trials)]
    began = min((trial.began for trial in run.trials), default=0.0)
    _write_events(folder, [(began, api.hparams_config_pb(varied, metrics, time_created_secs=began))])
    for trial in run.trials:
        start = api.hparams_pb(shown[trial.name], trial_id=trial.name, start_time_secs=trial.began)
        events = [(trial.began, start), (trial.ended, _scalars_of(trial)), (trial.ended, _end_of(trial))]
        _write_events(folder / trial.name, events)
    return f"tensorboard --logdir {folder}"


def _scalars_of(trial: TrackedTrial) -> Any:
    """Return a trial's metrics as a TensorBoard summary."""
    from tensorboard.compat.proto import summary_pb2

    value = summary_pb2.Summary.Value
    return summary_pb2.Summary(value=[value(tag=name, simple_value=figure) for name, figure in trial.metrics.items()])


def _end_of(trial: TrackedTrial) -> Any:
    """Return how a trial ended as a TensorBoard summary."""
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.STATUS_SUCCESS if trial.succeeded else api_pb2.STATUS_FAILURE
    ended = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=trial.ended)
    about = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=ended))
    return summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=about)])


def _write_events(folder: Path, summaries: Sequence[tuple[float, Any]]) -> None:
    """Write summaries, each with its time, as the only event file of a folder."""
    # TensorBoard's own writer of event files imports TensorFlow.
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    written = io.BytesIO()
    records = RecordWriter(written)
    records.write(event_pb2.Event(wall_time=summaries[0][0], file_version="brain.Event:2").SerializeToString())
    for moment, summary in summaries:
        records.write(event_pb2.Event(wall_time=moment, step=0, summary=summary).SerializeToString())
    hint = "Make the run directory writable, or export a copy of it."
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"cannot write to {folder}: {error.strerror}", hint=hint) from error
    write_atomically(folder / EVENTS, written.getvalue(), hint=hint)


_EXPORTS: dict[Tracker, Callable[[TrackedRun], str]] = {
    "mlflow": _export_to_mlflow,
    "wandb": _export_to_wandb,
    "tensorboard": _export_to_tensorboard,
}
