"""One run, from the workload to the recipe."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from autotune.errors import ArgumentError, InputError, RunDirectoryError
from autotune.machine import Machine, fingerprint, memory_limit_bytes, require_linux
from autotune.measure.deciding import MIN_GAIN
from autotune.recipe.recipe import Recipe
from autotune.run_directory import (
    RunDirectory,
    RunRecord,
    new_run_directory,
)
from autotune.space.search_space import find_search_space
from autotune.study.confirmed import Limits
from autotune.study.options import Options, seconds_of
from autotune.study.phases import tune_with
from autotune.study.progress import Observer, RunBegan, silent
from autotune.study.running import now_utc
from autotune.trial.process import TrialProcesses
from autotune.workload import (
    Workload,
    WorkloadReference,
    parse_reference,
    reference_of,
    refuse_while_loading,
)

DEFAULT_BUDGET = "10m"


def _reference(workload: object) -> WorkloadReference:
    """Where the workload is, however it was handed over."""
    if isinstance(workload, Workload):
        return reference_of(workload)
    if isinstance(workload, (str, os.PathLike)):
        return parse_reference(os.fspath(workload))
    raise ArgumentError(
        f"the workload is a {type(workload).__name__}, expected an autotune.Workload, or where one is",
        hint='Hand over the Workload itself, or text such as "path/to/file.py:name".',
    )


def tune(
    workload: Workload | str | os.PathLike[str],
    *,
    budget: float | str = DEFAULT_BUDGET,
    out: str | Path | None = None,
    space: str | Path | None = None,
    trials: int | None = None,
    seed: int = 0,
    min_gain: float = MIN_GAIN,
    trial_timeout: float | str | None = None,
    isolation: Literal["template", "spawn"] = "template",
    pairing: Literal["auto", "bracketed"] = "auto",
    observe: Observer = silent,
) -> Recipe:
    """Find the fastest stable configuration of a training on this machine.

    Args:
        workload: What is trained: a `Workload` at the top level of a module, or `"path/to/file.py[:name]"`
            or `"package.module[:name]"`.
        budget: Wall-clock time for everything, in seconds or as `"90s"`, `"10m"`, `"1h30m"`.
        out: The run directory; below `results/` when None.
        space: A search-space file or the name of a shipped one; chosen by device when None.
        trials: At most so many trials in the search; None leaves it to the budget.
        seed: Makes the samples repeatable, given the same results.
        min_gain: Smallest gain worth a recommendation, as a share.
        trial_timeout: What one trial may take, in seconds or as text; None plans it.
        isolation: `template` forks trials from one process that has imported everything; `spawn`
            imports afresh for each.
        pairing: `auto` keeps the baseline alive beside each candidate where memory allows; `bracketed`
            never has two alive.
        observe: Is told what happens, see `autotune.study.progress`.

    Returns:
        The recipe, which is also written to the run directory.

    Raises:
        InputError: An argument, the workload or the search space cannot be used.
        NoStableConfigurationError: The baseline itself fails.
        TuningInterruptedError: Interrupted before anything could be recommended.
    """
    began = time.monotonic()
    refuse_while_loading()
    require_linux()
    options = Options(
        budget=seconds_of("budget", budget),
        space=None if space is None else str(space),
        trials=trials,
        seed=seed,
        min_gain=min_gain,
        trial_timeout=None if trial_timeout is None else seconds_of("trial_timeout", trial_timeout),
        isolation=isolation,
        pairing=pairing,
    )
    if out == "":
        raise ArgumentError(
            "out is empty", hint="Give the run directory, or leave it out for one in results/."
        )
    reference = _reference(workload)
    written = None if options.space is None else find_search_space(options.space)
    directory = new_run_directory(Path("results"), _name_of(reference)) if out is None else RunDirectory(out)
    with _occupied(directory):
        machine = fingerprint()
        directory.write_run(
            RunRecord(run=directory.name, started_at=now_utc(), machine=machine, arguments=asdict(options))
        )
        observe(RunBegan(directory=directory.path, workload=_name_of(reference), budget=options.budget))
        processes = TrialProcesses(reference, logs=directory.log_directory, isolation=options.isolation)
        with processes:
            return tune_with(
                processes,
                directory=directory,
                machine=machine,
                limits=_limits(machine),
                reference=reference,
                written=written,
                options=options,
                clock=lambda: time.monotonic() - began,
                observe=observe,
            )


def _name_of(reference: WorkloadReference) -> str:
    stem = Path(reference.file).stem if reference.file else str(reference.module)
    return stem if reference.name == "workload" else reference.name


@contextlib.contextmanager
def _occupied(directory: RunDirectory) -> Iterator[None]:
    """The run directory, created and locked; emptied again where the input was at fault before anything was tried."""
    before = set(directory.path.iterdir()) if directory.path.is_dir() else None
    directory.create()
    try:
        yield
    except RunDirectoryError:
        raise  # what was finished before stays
    except InputError:
        directory.release()
        if not (directory.trial_directory(1) / "result.json").exists():
            _remove(directory.path, before)
        raise
    finally:
        directory.release()


def _remove(path: Path, before: set[Path] | None) -> None:
    """Take away what a run put into its directory; the directory as well if it was not there before."""
    if before is None:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # results/<workload>, when it is empty now
        return
    for entry in set(path.iterdir()) - before:
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _limits(machine: Machine) -> Limits:
    device = min((gpu.memory_bytes for gpu in machine.gpus), default=None)
    return Limits(host_bytes=memory_limit_bytes(), device_bytes=device)
