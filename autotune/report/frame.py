"""Runs as one table: a row per trial, in pandas; and that table as a CSV or Parquet file.

Times are in seconds, sizes in bytes, throughput in samples per second; what was not measured is NA. Every
column has its dtype whatever the rows hold, so that tables of several runs can be put together and an empty
one behaves like a full one.

This module does no measuring and no printing.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from pandas.api.extensions import ExtensionDtype

from autotune.files import write_atomically
from autotune.printable import one_line
from autotune.record import Outcome, Phase, TrialRecord
from autotune.report.runs import check_configuration, find_runs, parse_utc
from autotune.run_directory import RunDirectory, damaged
from autotune.space.configuration import format_value
from autotune.space.knobs import KNOBS, Domain, KnobValue
from autotune.stats.deciding import Stop
from autotune.stats.intervals import Interval

_STRING = pd.StringDtype()
_INTEGER = pd.Int64Dtype()
_FLOAT = pd.Float64Dtype()
_LARGEST_INTEGER = (1 << 63) - 1


def _knob_dtype(domain: Domain) -> ExtensionDtype:
    """Booleans and integers keep their type; words and unions of types stand as text."""
    if domain.words or (domain.booleans and domain.integers):
        return _STRING
    return pd.BooleanDtype() if domain.booleans else _INTEGER


_FIRST: dict[str, ExtensionDtype] = {
    "run": _STRING,
    "trial": _INTEGER,
    "phase": pd.CategoricalDtype([str(phase) for phase in Phase]),
    "outcome": pd.CategoricalDtype([str(outcome) for outcome in Outcome]),
}
_FIGURES: dict[str, ExtensionDtype] = {
    "throughput": _FLOAT,
    "speedup": _FLOAT,
    "speedup_low": _FLOAT,
    "speedup_high": _FLOAT,
    "compile_seconds": _FLOAT,
    "warmup_seconds": _FLOAT,
    "warmup_steps": _INTEGER,
    "settled": pd.BooleanDtype(),
    "measured_seconds": _FLOAT,
    "stopped_by": pd.CategoricalDtype([str(stop) for stop in Stop]),
    "first_step_seconds": _FLOAT,
    "filling_seconds": _FLOAT,
    "epoch_overhead_seconds": _FLOAT,
    "peak_host_bytes": _INTEGER,
    "peak_device_bytes": _INTEGER,
    "input_wait_fraction": _FLOAT,
    "cpu_utilisation": _FLOAT,
    "bottleneck": _STRING,
    "started_at": pd.DatetimeTZDtype("us", "UTC"),
    "seconds": _FLOAT,
    "machine": _STRING,
    "workload": _STRING,
    "reason": _STRING,
}


def columns() -> dict[str, ExtensionDtype]:
    """The table's columns, in order, and the dtype of each; every knob has one."""
    return _FIRST | {knob.name: _knob_dtype(knob.domain) for knob in KNOBS.values()} | _FIGURES


def load_history(*runs: str | Path) -> pd.DataFrame:
    """One row per trial of one run or many, failed and pruned trials included.

    Args:
        runs: Run directories, or directories that hold some at any depth, such as `results`.

    Returns:
        The columns of `columns()`, in that order, rows by run and then by trial. `machine` is the machine's id,
        `workload` the workload's name; text is one line, without control characters. A knob that the trial's
        device does not have is NA, and so are the `reason` of a trial that ended well and every figure that was
        not measured. A run of which no trial has finished adds no rows.

    Raises:
        RunDirectoryError: Nothing was given, no run was found at a path, or a file there is damaged.
    """
    rows: list[dict[str, object]] = []
    for directory in find_runs(*runs):
        run = directory.read_run()
        records = sorted(directory.read_trials(), key=lambda record: record.trial)
        of_run = {
            "run": one_line(run.run),
            "machine": run.machine.id,
            "workload": one_line(run.workload.name) if run.workload else None,
        }
        rows.extend(of_run | _row(record, directory) for record in records)
    return pd.DataFrame(
        {name: pd.Series([row.get(name) for row in rows], dtype=dtype) for name, dtype in columns().items()}
    )


def _row(record: TrialRecord, directory: RunDirectory) -> dict[str, object]:
    """What one trial adds to the table; columns that are left out, or None, are NA."""
    file = directory.trial_directory(record.trial) / "result.json"
    row: dict[str, object] = {
        "trial": record.trial,
        "phase": str(record.phase),
        "outcome": str(record.outcome),
        **_knob_cells(record, file),
        "throughput": record.throughput.value if record.throughput else None,
        **_speedup_cells(record.speedup),
        "compile_seconds": record.compile_seconds,
        "warmup_seconds": record.warmup_seconds,
        "warmup_steps": record.warmup_steps,
        "settled": record.settled,
        "measured_seconds": record.measured_seconds if record.pairs or record.slices else None,
        "stopped_by": record.stopped_by,
        "first_step_seconds": record.first_step_seconds,
        "filling_seconds": record.filling_seconds,
        "epoch_overhead_seconds": record.epoch_overhead_seconds,
        "peak_host_bytes": record.peak_host_bytes,
        "peak_device_bytes": record.peak_device_bytes,
        "input_wait_fraction": record.input_wait_fraction,
        "cpu_utilisation": record.cpu_utilisation,
        # No trial is profiled yet; the column keeps its place for when they are.
        "bottleneck": None,
        "started_at": parse_utc(record.started_at, file),
        "seconds": record.seconds,
        # One line, so that a row stays one line in CSV: some readers end a row at a bare carriage return.
        "reason": one_line(" ".join(record.reason.split())) or None,
    }
    for name in ("trial", "warmup_steps", "peak_host_bytes", "peak_device_bytes"):
        value = row[name]
        if isinstance(value, int) and value > _LARGEST_INTEGER:
            raise damaged(file, f"{name} does not fit into 64 bits")
    return row


def _knob_cells(record: TrialRecord, file: Path) -> dict[str, KnobValue]:
    configuration = check_configuration(record.configuration, file, "configuration")
    return {
        name: format_value(value) if _knob_dtype(KNOBS[name].domain) == _STRING else value
        for name, value in configuration.items()
    }


def _speedup_cells(speedup: Interval | None) -> dict[str, float]:
    if speedup is None:
        return {}
    return {
        "speedup": speedup.value,
        "speedup_low": speedup.low,
        "speedup_high": speedup.high,
    }


# ------------------------------------------------------------------------------------------------- writing

_HINT = "Give a file in a directory that exists and that you may write to."


def write_csv(frame: pd.DataFrame, path: str | Path) -> None:
    """Write the table as CSV: UTF-8, one header line, NA as an empty field, the index left out.

    Booleans are `true` and `false` in every column, as in recipes and search spaces. CSV keeps no types; this
    gives the same table back:

        dtypes = {name: dtype for name, dtype in columns().items() if name != "started_at"}
        frame = pandas.read_csv(path, dtype=dtypes, parse_dates=["started_at"])

    Args:
        frame: What `load_history` returned, or some of its rows and columns.
        path: The file; one that stands there is replaced whole, or stays as it was.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    booleans = [name for name in frame.columns if pd.api.types.is_bool_dtype(frame[name].dtype)]
    words = {name: frame[name].astype(_STRING).str.lower() for name in booleans}
    write_atomically(Path(path), frame.assign(**words).to_csv(index=False), hint=_HINT)


def write_parquet(frame: pd.DataFrame, path: str | Path) -> None:
    """Write the table as Parquet, dtypes included: `pandas.read_parquet` gives the same table back.

    The one exception is a table without rows: Parquet keeps the categories of `phase` and `outcome` beside
    their values, so without values they come back as categories of nothing.

    Args:
        frame: What `load_history` returned, or some of its rows and columns.
        path: The file; one that stands there is replaced whole, or stays as it was.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    write_atomically(Path(path), frame.to_parquet(engine="pyarrow", index=False), hint=_HINT)
