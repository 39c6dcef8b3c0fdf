"""One run, from the workload to the recipe."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from autotune.errors import ArgumentError, InputError, RunDirectoryError
from autotune.machine import Machine, fingerprint, memory_limit_bytes, require_linux
from autotune.measure.deciding import MIN_GAIN
from autotune.measure.stability import MEMORY_MARGIN
from autotune.recipe.recipe import Recipe
from autotune.run_directory import (
    RunDirectory,
    RunRecord,
    new_run_directory,
)
from autotune.space.search_space import SearchSpace, find_search_space
from autotune.study.confirmed import Limits
from autotune.study.options import Options, seconds_of
from autotune.study.phases import tune_with
from autotune.study.progress import Notice, Observer, RunBegan, silent
from autotune.study.resuming import (
    Earlier,
    note_resumption,
    read_earlier,
    refuse_another_machine,
)
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


def reference_to(workload: object) -> WorkloadReference:
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
    budget: float | str | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    space: str | Path | None = None,
    trials: int | None = None,
    seed: int = 0,
    min_gain: float = MIN_GAIN,
    trial_timeout: float | str | None = None,
    isolation: Literal["template", "spawn"] = "template",
    pairing: Literal["auto", "bracketed"] = "auto",
    max_batch: int | None = None,
    fixed_batch: bool = False,
    memory_margin: float = MEMORY_MARGIN,
    soak: float | str | None = None,
    observe: Observer = silent,
) -> Recipe:
    """Find the fastest stable configuration of a training on this machine.

    Args:
        workload: What is trained: a `Workload` at the top level of a module, or `"path/to/file.py[:name]"`
            or `"package.module[:name]"`.
        budget: Wall-clock time for everything, in seconds or as `"90s"`, `"10m"`, `"1h30m"`; ten minutes when None.
            With `resume`, for what is still to be done; what is left of the run's own when None.
        out: The run directory; below `results/` when None.
        resume: The directory of a run that was stopped: it goes on, and finished trials are not run again. How it
            is to be done is its own, the budget excepted.
        space: A search-space file or the name of a shipped one; chosen by device when None.
        trials: At most so many trials in the search; None leaves it to the budget.
        seed: Makes the samples repeatable, given the same results.
        min_gain: Smallest gain worth a recommendation, as a share.
        trial_timeout: What one trial may take, in seconds or as text; None plans it.
        isolation: `template` forks trials from one process that has imported everything; `spawn`
            imports afresh for each.
        pairing: `auto` keeps the baseline alive beside each candidate where memory allows; `bracketed`
            never has two alive.
        max_batch: No batch size above this one is tried.
        fixed_batch: The batch size stays the baseline's.
        memory_margin: Share of the machine's or container's memory, and of the device's, that the recommended
            configuration must leave free at its peak.
        soak: Time kept at the end in which winner and baseline train continuously, in seconds or as text, to hold the
            claim against and to see memory grow; 0 for not at all, None scales it to the budget. What is left of the
            budget by then is used for it as well.
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
    chosen = None if out is None else _directory("out", out)
    reference = reference_to(workload)
    given = {
        "space": None if space is None else str(space),
        "trials": trials,
        "seed": seed,
        "min_gain": min_gain,
        "trial_timeout": None if trial_timeout is None else seconds_of("trial_timeout", trial_timeout),
        "isolation": isolation,
        "pairing": pairing,
        "max_batch": max_batch,
        "fixed_batch": fixed_batch,
        "memory_margin": memory_margin,
        "soak": None if soak is None else seconds_of("soak", soak, may_be_none=True),
    }
    if resume is not None:
        if chosen is not None:
            raise ArgumentError("out and resume were both given", hint="A resumed run stays where it is.")
        return _resume(RunDirectory(_directory("resume", resume)), reference, given, budget, began, observe)
    options = Options(
        budget=seconds_of("budget", DEFAULT_BUDGET if budget is None else budget),
        **given,  # type: ignore[arg-type]  # Options checks each
    )
    written = None if options.space is None else find_search_space(options.space)
    directory = RunDirectory(chosen) if chosen else new_run_directory(Path("results"), _name_of(reference))
    with _occupied(directory):
        machine = fingerprint()
        directory.write_run(
            RunRecord(run=directory.name, started_at=now_utc(), machine=machine, arguments=asdict(options))
        )
        return _run(directory, machine, reference, written, options, began, observe)


def _directory(name: str, given: str | Path) -> Path:
    if given == "":
        raise ArgumentError(f"{name} is empty", hint="Give the run directory, or leave it out.")
    return Path(given)


def _resume(
    directory: RunDirectory,
    reference: WorkloadReference,
    given: Mapping[str, object],
    budget: float | str | None,
    began: float,
    observe: Observer,
) -> Recipe:
    """Go on with a run that was stopped."""
    earlier = read_earlier(directory)
    options = earlier.options
    usual = Options(budget=options.budget)
    for name, value in given.items():
        if value not in (getattr(usual, name), getattr(options, name)):
            raise ArgumentError(
                f"{name} is {value!r}, and the run to be resumed has {getattr(options, name)!r}",
                hint=f"Leave {name} out: a resumed run is done as it was begun.",
            )
    spent_before = 0.0
    if budget is None:
        began -= earlier.spent_seconds
    else:
        spent_before = earlier.spent_seconds
        options = replace(options, budget=seconds_of("budget", budget))
    written = None if options.space is None else find_search_space(options.space)
    with directory.reopened():
        machine = fingerprint()
        refuse_another_machine(earlier, machine)
        note_resumption(directory, earlier)
        return _run(directory, machine, reference, written, options, began, observe, earlier, spent_before)


def _run(
    directory: RunDirectory,
    machine: Machine,
    reference: WorkloadReference,
    written: SearchSpace | None,
    options: Options,
    began: float,
    observe: Observer,
    earlier: Earlier | None = None,
    spent_before: float = 0.0,
) -> Recipe:
    spent = time.monotonic() - began
    observe(
        RunBegan(directory=directory.path, workload=_name_of(reference), budget=options.budget, spent=spent)
    )
    if earlier is not None:
        observe(Notice(text=f"resumed: {len(earlier.records)} trials were finished before"))
    processes = TrialProcesses(reference, logs=directory.log_directory, isolation=options.isolation)
    with processes:
        return tune_with(
            processes,
            directory=directory,
            machine=machine,
            limits=limits_of(machine, options.memory_margin),
            reference=reference,
            written=written,
            options=options,
            clock=lambda: time.monotonic() - began,
            observe=observe,
            earlier=earlier,
            spent_before=spent_before,
        )


def _name_of(reference: WorkloadReference) -> str:
    stem = Path(reference.file).stem if reference.file else str(reference.module)
    return stem if reference.name == "workload" else reference.name


@contextlib.contextmanager
def _occupied(directory: RunDirectory) -> Iterator[None]:
    """The run directory, created and locked; emptied again where the input was at fault before anything was tried."""
    before = set(directory.path.iterdir()) if directory.path.is_dir() else None
    made_parent = not directory.path.parent.exists()
    directory.create()
    try:
        yield
    except RunDirectoryError:
        raise  # what was finished before stays
    except InputError:
        directory.release()
        if not (directory.trial_directory(1) / "result.json").exists():
            _remove(directory.path, before, parent=made_parent)
        raise
    finally:
        directory.release()


def _remove(path: Path, before: set[Path] | None, *, parent: bool) -> None:
    """Take away what a run put into its directory; the directory as well if it was not there before.

    Args:
        path: The directory.
        before: What was in it; None where it was not there.
        parent: Whether what it is in was not there either.
    """
    if before is None:
        shutil.rmtree(path, ignore_errors=True)
        if parent:
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # results/<workload>, when it is empty now
        return
    for entry in set(path.iterdir()) - before:
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def limits_of(machine: Machine, margin: float = MEMORY_MARGIN) -> Limits:
    """What a trial may take at most of this machine, or of the container it is in."""
    device = min((gpu.memory_bytes for gpu in machine.gpus), default=None)
    return Limits(host_bytes=memory_limit_bytes(), device_bytes=device, margin=margin)
