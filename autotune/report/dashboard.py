"""A run's study in optuna-dashboard, on the loopback address."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from autotune.errors import ArgumentError, RunDirectoryError
from autotune.run_directory import RunDirectory


def serve(run: str | Path, port: int) -> None:
    """Serve until Ctrl-C.

    Raises:
        ArgumentError: optuna-dashboard is not installed, or the port cannot be used.
        RunDirectoryError: There is no such run, or it has no study.
    """
    directory = RunDirectory(run)
    directory.read_run()
    if not directory.study_file.exists():
        raise RunDirectoryError(f"{run} has no study.db", hint="It is written with the first trial of the search.")
    if importlib.util.find_spec("optuna_dashboard") is None:
        raise ArgumentError("optuna-dashboard is not installed", hint="Run pip install 'autotune[dashboard]'.")
    import optuna
    import optuna_dashboard
    from sqlalchemy import URL

    storage = optuna.storages.RDBStorage(
        URL.create("sqlite", database=str(directory.study_file.resolve())).render_as_string()
    )
    try:
        optuna_dashboard.run_server(storage, host="127.0.0.1", port=port)
    except OSError as error:
        raise ArgumentError(f"port {port} cannot be used: {error.strerror}", hint="Give another --port.") from error
