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

from autotune.devices.machine import Machine, available_cores, fingerprint, memory_limit_bytes, require_linux
from autotune.errors import ArgumentError, InputError, RunDirectoryError
from autotune.executors.executor import Clock, Trials, WarmUp
from autotune.executors.process import TrialProcesses
from autotune.recipe.recipe import Recipe
from autotune.run_directory import (
    RunDirectory,
    RunRecord,
    SearchSpaceRecord,
    WorkloadRecord,
    new_run_directory,
)
from autotune.space.knobs import Device
from autotune.space.search_space import ResolvedSpace, SearchSpace, find_search_space
from autotune.stats.deciding import MIN_GAIN
from autotune.stats.numerics import BatchLosses
from autotune.stats.stability import MEMORY_MARGIN
from autotune.tuning.batch_loss import measure_batch_losses
from autotune.tuning.loop import CHECK_SHARE, CLOSING_SECONDS, Found, Loop
from autotune.tuning.opening import Opened, interruptions_noted, isolation_of, open_run
from autotune.tuning.options import Options, seconds_of
from autotune.tuning.progress import Began, Notice, Observer, RunBegan, silent
from autotune.tuning.recommendation import recommend
from autotune.tuning.resuming import (
    Earlier,
    note_resumption,
    read_earlier,
    refuse_another_machine,
    refuse_another_question,
)
from autotune.tuning.rules import Limits
from autotune.tuning.run import Run
from autotune.tuning.running import now_utc
from autotune.tuning.sampler import Sampler
from autotune.tuning.soak import Watched, soak
from autotune.tuning.trainings import Trainings
from autotune.workloads.workload import (
    Workload,
    WorkloadFacts,
    WorkloadReference,
    parse_reference,
    reference_of,
    refuse_while_loading,
)

DEFAULT_BUDGET = "10m"
DEFAULT_SPACE = {Device.CPU: "quick", Device.GPU: "gpu"}
MAY_CHANGE = ("trials", "soak")
"""Options that a resumed run may be given anew."""
LEAST_LOSSES_SECONDS = 12.0
"""For comparing training losses at another batch size: with less, it is not begun."""


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
        budget: Wall-clock time for everything, in seconds or as `"90s"`, `"10m"`, `"1h30m"`. When None the run ends
            as soon as the answer is settled, after ten minutes at most. With `resume`, the time to go on with; what is
            left of the run's own when None.
        out: The run directory; below `results/` when None.
        resume: The directory of a run, ended or stopped: it goes on with all that was measured. How it is to be done
            is its own, `budget`, `trials` and `soak` excepted.
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
        soak: Time at the end, in seconds or as text, in which the winner trains without a pause and is watched for
            leaks and hangs; None for none.
        observe: Is told what happens, see `autotune.tuning.progress`.

    Returns:
        The recipe, which is also written to the run directory.

    Raises:
        InputError: An argument, the workload or the search space cannot be used.
        NoStableConfigurationError: The baseline itself fails.
        TuningInterruptedError: Interrupted before anything was measured.
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
        keeps_budget=budget is not None,
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
    """Go on with a run, whether it has ended or was stopped."""
    earlier = read_earlier(directory)
    options = earlier.options
    usual = Options(budget=options.budget)
    for name, value in given.items():
        if name in MAY_CHANGE and value is not None:
            options = replace(options, **{name: value})  # type: ignore[arg-type]  # Options checks it
        elif value not in (getattr(usual, name), getattr(options, name)):
            raise ArgumentError(
                f"{name} is {value!r}, and the run to be resumed has {getattr(options, name)!r}",
                hint=f"Leave {name} out: a resumed run is done as it was begun.",
            )
    spent_before = 0.0
    if budget is None:
        began -= earlier.spent_seconds
        if time.monotonic() - began >= options.budget:
            raise ArgumentError(
                f"{directory.path} has used its budget of {options.budget:.0f} s",
                hint="Give it more time: --resume RUN --budget 2m.",
            )
    else:
        spent_before = earlier.spent_seconds
        options = replace(options, budget=seconds_of("budget", budget), keeps_budget=True)
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


def tune_with(
    trials: Trials,
    *,
    directory: RunDirectory,
    machine: Machine,
    limits: Limits,
    reference: WorkloadReference,
    written: SearchSpace | None,
    options: Options,
    clock: Clock,
    observe: Observer,
    earlier: Earlier | None = None,
    spent_before: float = 0.0,
) -> Recipe:
    """The run itself, on real, simulated or recorded trials. Raises as `tune` does.

    `clock` has the seconds that count for the budget, `spent_before` those of earlier invocations that do not.
    """
    stopping = (
        f"stopping with what was measured; the run is in {directory.path}, and --resume goes on with it"
    )
    with interruptions_noted(observe, stopping) as interruptions:
        opened = open_run(
            trials,
            directory=directory,
            machine=machine,
            reference=reference,
            budget=options.budget,
            seed=options.seed,
            bracketed=options.pairing == "bracketed",
            clock=clock,
            observe=observe,
            interruptions=interruptions,
            earlier=earlier,
            spent_before=spent_before,
        )
        interruptions.answerable = True
        run = opened.run
        written = written or find_search_space(DEFAULT_SPACE[opened.device])
        space = _resolved(written, opened, options)
        if earlier is not None:
            refuse_another_question(earlier, baseline=run.baseline, choices=space.choices)
            opened.beside.keep_baseline()
        record = _completed_run(opened, reference, machine, written, space, options)
        directory.write_run(record)
        sampler = Sampler(space, file=directory.study_file, name=opened.facts.name, seed=options.seed)
        found = Loop(
            run,
            opened.beside,
            opened.deadline,
            space=space,
            sampler=sampler,
            options=options,
            limits=limits,
            import_seconds=opened.import_seconds,
            earlier=[] if earlier is None else earlier.trials()[1:],
        ).run()
        opened.beside.end_baseline()
        recipe = recommend(
            found=found,
            watched=_watched(found, run, options, limits),
            batch_losses=_batch_losses(found, run, options),
            run=run,
            record=record,
            options=options,
        )
        recipe.save(directory.recipe_file)
        return recipe


def _watched(found: Found, run: Run, options: Options, limits: Limits) -> Watched | None:
    """A watch over what would be recommended, where one was asked for."""
    champion = found.state.champion
    if not options.soak or champion is None or run.interrupted():
        return None
    run.observe(Began(text=f"watching the winner for {options.soak:.0f} s"))
    return soak(run, run.records[champion.number], seconds=options.soak, limits=limits)


def _batch_losses(found: Found, run: Run, options: Options) -> Mapping[int, BatchLosses]:
    """What the recommended batch size costs in learning, where time is left."""
    champion = found.state.champion
    left = options.budget - CLOSING_SECONDS - run.clock()
    if champion is None or run.interrupted() or left < LEAST_LOSSES_SECONDS:
        return {}
    configuration = found.confirmations[champion.number].trial.configuration
    if configuration.batch_size == run.baseline.batch_size:
        return {}
    run.observe(Began(text=f"comparing training losses at batch_size={configuration.batch_size}"))
    seconds = min(left, max(LEAST_LOSSES_SECONDS, CHECK_SHARE * options.budget))
    with Trainings(run, ends=run.clock() + seconds) as trainings:
        return measure_batch_losses(trainings, [configuration])


def _completed_run(
    opened: Opened,
    reference: WorkloadReference,
    machine: Machine,
    written: SearchSpace,
    space: ResolvedSpace,
    options: Options,
) -> RunRecord:
    """run.json with what is known only once the baseline is warm."""
    run, warm = opened.run, opened.warm
    return run.directory.read_run().model_copy(
        update={
            "machine": _completed(machine, warm, opened.device, run.observe),
            "workload": _workload_record(opened.facts, reference, warm, opened.device),
            "search_space": SearchSpaceRecord(
                source=written.source, choices=dict(space.choices), left_out=dict(space.left_out)
            ),
            "baseline": dict(run.baseline),
            "isolation": isolation_of(run.trials, options.isolation),
        }
    )


def _resolved(written: SearchSpace, opened: Opened, options: Options) -> ResolvedSpace:
    started = opened.warm.started
    return written.resolve(
        baseline=opened.run.baseline,
        device=opened.device,
        cores=available_cores(),
        examples=started.examples,
        dataset_takes_config=opened.facts.dataset_takes_config,
        largest_batch=options.max_batch,
        fixed_batch=options.fixed_batch,
        set_by_dataset=started.set_by_dataset,
    )


def _completed(machine: Machine, warm: WarmUp, device: Device, observe: Observer) -> Machine:
    """The fingerprint with what only TensorFlow knows; a word where it sees no GPU that is there."""
    if machine.gpus and device is Device.CPU:
        observe(
            Notice(
                text=f"there is a GPU ({machine.gpus[0].name}), but TensorFlow does not see it, so the CPU is "
                "tuned; pip install 'tensorflow[and-cuda]' brings the CUDA libraries"
            )
        )
    if device is Device.CPU:
        return machine
    build = warm.started.build
    return machine.model_copy(
        update={"tensorflow_cuda": build.get("cuda_version"), "cudnn": build.get("cudnn_version")}
    )


def _workload_record(
    facts: WorkloadFacts, reference: WorkloadReference, warm: WarmUp, device: Device
) -> WorkloadRecord:
    return WorkloadRecord(
        name=facts.name,
        reference=str(reference),
        fingerprint=facts.fingerprint,
        batch_size=facts.batch_size,
        batched=facts.batched,
        drop_remainder=facts.drop_remainder,
        takes_config=facts.dataset_takes_config,
        examples=warm.started.examples,
        endless=warm.started.endless,
        element=warm.started.element,
        batch_ranks=warm.started.batch_ranks or None,
        parameters=warm.started.parameters,
        device=device.value,
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
    except (InputError, KeyboardInterrupt) as error:
        directory.release()
        needed = 0 if isinstance(error, KeyboardInterrupt) else 1
        if not (directory.trial_directory(needed) / "result.json").exists():
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
