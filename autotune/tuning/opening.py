"""The opening that `tune` and `verify` share: the workload is imported, the baseline started and timed."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autotune.data.credentials import credential_values
from autotune.data.errors import ArgumentError, NoStableConfigurationError, WorkloadError
from autotune.data.facts import ScriptSettings, Trains, WorkloadFacts, WorkloadReference
from autotune.data.hardware import Machine
from autotune.data.options import Options, checked_args
from autotune.data.printable import with_article
from autotune.data.run_directory import CREATED, SCRATCH, RunDirectory, RunRecord, SearchSpaceRecord, WorkloadRecord
from autotune.machine.fingerprint import memory_limit_bytes
from autotune.runtime.created_files import remove_created
from autotune.runtime.executor import Clock, Executor, SeatLost, WarmUp
from autotune.script.loading import parse_reference, reference_of
from autotune.script.workload import Workload
from autotune.space import variables
from autotune.space.configuration import NOT_ACCUMULATED, Configuration, baseline_configuration, find_conflict
from autotune.space.knobs import Device
from autotune.space.space_file import ResolvedSpace
from autotune.stats.disturbance import joules_of
from autotune.tuning.events import Began, Notice, Observer
from autotune.tuning.resume import Earlier, refuse_another_machine, refuse_another_workload
from autotune.tuning.rules import Limits
from autotune.tuning.run import Run
from autotune.tuning.seat import BASELINE_SECONDS, Seat
from autotune.tuning.surroundings import (
    as_imported,
    foreign_load,
    instabilities,
    oddities,
    refit_notes,
    refuse_knobs_that_cannot_act,
    script_notes,
)
from autotune.tuning.waiting import CLOSING_SECONDS, OVERRUN_SHARE, Deadline

BASELINE_SHARE = 0.35  # of the budget, until the baseline is warm, or `BASELINE_SECONDS` if that is more


def reference_to(workload: object, args: Sequence[str] | None = None) -> WorkloadReference:
    """Where the workload is, however it was handed over, and its file's arguments. Raises ArgumentError."""
    given = {} if args is None else {"args": checked_args(args)}
    if isinstance(workload, Workload):
        return reference_of(workload).model_copy(update=given)
    if isinstance(workload, (str, os.PathLike)):
        return parse_reference(os.fspath(workload)).model_copy(update=given)
    raise ArgumentError(
        f"the workload is {with_article(type(workload).__name__)}, expected an autotune.Workload, or where one is",
        hint='Hand over the Workload itself, or text such as "path/to/file.py:name".',
    )


@contextlib.contextmanager
def prepared(reference: WorkloadReference, directory: RunDirectory, options: Options) -> Iterator[WorkloadReference]:
    """The reference with what the user says about a script. What its trials have made is removed at the end.

    Raises ArgumentError where that is said about a `Workload`.
    """
    said = {name: getattr(options, name) for name in ("fit", "loss", "allow_writes", "allow_cache")}
    if reference.script is None:
        for name, given in said.items():
            if given:
                option = name.replace("_", "-")
                raise ArgumentError(f"--{option} is for scripts, and {reference} is a Workload", hint="Leave it out.")
        yield reference
        return
    created = directory.path.resolve() / CREATED
    with contextlib.suppress(OSError):  # of an earlier process: the user may have written those files since
        created.unlink()
    with contextlib.suppress(OSError):  # a link to somewhere else
        created.with_name(SCRATCH).unlink()
    try:
        yield reference.model_copy(update={"script": ScriptSettings(**said, created=str(created))})
    finally:
        remove_created(created, [os.getcwd(), *reference.search_path])
        shutil.rmtree(created.with_name(SCRATCH), ignore_errors=True)


def limits_of(machine: Machine, margin: float) -> Limits:
    """What a trial may take at most of this machine, or of the container it is in."""
    device = min((gpu.memory_bytes for gpu in machine.gpus), default=None)
    return Limits(host_bytes=memory_limit_bytes(), device_bytes=device, margin=margin)


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """What one invocation of `tune` or `verify` works with."""

    executor: Executor
    directory: RunDirectory
    machine: Machine
    limits: Limits
    reference: WorkloadReference
    options: Options
    clock: Clock  # seconds that count for the budget
    observe: Observer
    earlier: Earlier | None = None  # what an earlier invocation left; None for a new run
    spent_before: float = 0.0  # seconds of earlier invocations that do not count for the budget

    @property
    def isolation(self) -> str:
        """How trials are kept apart: as was asked for, unless importing the workload leaves no choice."""
        return str(getattr(self.executor, "isolation", self.options.isolation))


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A run whose baseline is warm."""

    run: Run
    facts: WorkloadFacts
    seat: Seat  # the first seat, with the live baseline
    warm: WarmUp
    deadline: Deadline
    machine: Machine  # that the first seat runs on
    limits: Limits  # of a process's memory
    import_seconds: float  # of a fresh template; 0 where each trial imports for itself

    @property
    def device(self) -> Device:
        """What the workload trains on."""
        return Device.GPU if self.warm.started.gpus else Device.CPU


def _refuse_without_energy(options: Options, *, tells: bool) -> None:
    if options.objective == "energy" and not tells:
        raise ArgumentError(
            "the objective is energy, and no GPU here counts its energy for NVML",
            hint="Tune for throughput here, without --objective. Data-centre cards since Volta count it; MIG instances "
            "and processors do not.",
        )


def open_run(
    invocation: Invocation,
    interruptions: Callable[[], int],
    check: Callable[[WorkloadFacts], None] = lambda facts: None,
) -> Opened:
    """Import the workload, start its baseline and time it."""
    # Raises ArgumentError, WorkloadError, BudgetError, NoStableConfigurationError.
    executor, clock, observe = invocation.executor, invocation.clock, invocation.observe
    options, earlier = invocation.options, invocation.earlier
    _refuse_without_energy(options, tells=bool(invocation.machine.gpus) or options.executor != "local")
    observe(Began(text="importing the workload"))
    opening = clock()
    facts = executor.open()
    import_seconds = clock() - opening
    if earlier is not None:
        refuse_another_workload(earlier, fingerprint=facts.fingerprint)
    check(facts)
    _tell_isolation(executor, observe)
    if facts.uncontained:
        watched = " Python's own writes are watched." if facts.script is not None else ""
        text = f"what C code and other programs write in trials is not kept out here ({facts.uncontained}).{watched}"
        observe(Notice(text=text))
    machine = executor.machine or invocation.machine
    if earlier is not None and executor.machine is not None and earlier.run.baseline is not None:
        refuse_another_machine(earlier, machine)
    device = Device.GPU if machine.gpus else Device.CPU
    run = Run(
        directory=invocation.directory,
        executor=executor,
        clock=clock,
        observe=observe,
        interruptions=interruptions,
        rng=random.Random(options.seed),
        not_reached={} if facts.script is None else facts.script.not_reached,
        objective=options.objective,
        unit="samples" if facts.script is None else facts.script.unit,
        baseline=_accumulated(
            baseline_of(facts, str(invocation.reference), device, observe), options.global_batch, facts
        ),
        records={} if earlier is None else dict(earlier.records),
        numbers=itertools.count(0 if earlier is None else earlier.next_number),
        spent_before=invocation.spent_before,
        credentials=credential_values(
            invocation.reference.args, {} if facts.script is None else facts.script.variables
        ),
    )
    deadline = Deadline(clock=clock, at=options.searching - CLOSING_SECONDS + OVERRUN_SHARE * options.budget)
    workers = 0 if facts.script is None else facts.script.workers
    if workers > 1:
        text = f"TF_CONFIG names {workers} workers: each trial runs all of them here, beside no other trial"
        observe(Notice(text=text))
    bracketed = workers > 1 or options.pairing == "bracketed"
    seat = Seat(run, deadline, name=executor.seats[0], bracketed=bracketed)
    longest = max(BASELINE_SECONDS, BASELINE_SHARE * options.budget)
    known = [] if earlier is None else earlier.trials()[:1]
    try:
        warm = seat.start_baseline(max(1.0, min(longest, options.budget - clock())), *known)
    except SeatLost as lost:
        observe(Notice(text=f"seat {seat.name} was lost and is started again: {lost.reason}"))
        try:
            executor.restart(seat.name)
            warm = seat.start_baseline(max(1.0, min(longest, options.budget - clock())), *known)
        except SeatLost as again:
            raise NoStableConfigurationError(
                f"seat {seat.name} was lost twice: {again.reason}",
                hint=f"Once it is back, --resume {invocation.directory.path} goes on.",
            ) from again
    _refuse_without_energy(options, tells=all(map(joules_of, seat.baseline.trial.slices)))
    # The process knows better than NVML what it may take: a part of a card, or what the workload allows itself.
    limits = replace(
        invocation.limits,
        device_bytes=run.device_limit_bytes or invocation.limits.device_bytes,
        work_varies=facts.script is not None and facts.script.work_varies,
    )
    opened = Opened(
        run=run,
        facts=facts,
        seat=seat,
        warm=warm,
        deadline=deadline,
        machine=machine,
        limits=limits,
        import_seconds=import_seconds if invocation.isolation == "template" else 0.0,
    )
    if opened.device is Device.GPU and any(executor.place(each).of_cores for each in executor.seats):
        raise ArgumentError(  # XLA tunes its kernels while it compiles, by timing them
            "seats cuts the cores, and this training uses a GPU, which its seats would share",
            hint="Leave --seats out; --devices gives each seat a GPU of its own.",
        )
    if warm.started.devices > 1 and "global_batch" in run.baseline and "strategy" not in run.baseline:
        observe(Notice(text=f"strategy is not varied: {NOT_ACCUMULATED}"))
    notes = (
        ()
        if facts.script is None
        else script_notes(facts.script, warm.ready_seconds, warm.started.devices, opened.device)
    )
    own = {} if facts.script is None else facts.script.variables
    set_ = variables.environment_notes({**os.environ, **own}, machine.packages.get("tensorflow", ""))
    slices = seat.baseline.trial.slices
    odd = (*oddities(facts, warm, opened.device), *refit_notes(facts.script, slices))
    for text in (*set_, *notes, *odd, *instabilities(slices), *foreign_load(slices)):
        observe(Notice(text=text))
    return opened


def baseline_of(facts: WorkloadFacts, where: str, device: Device, observe: Observer) -> Configuration:
    """What the user would run anyway, as far as can be told before anything was built."""
    refuse_knobs_that_cannot_act(facts, where=where)
    named = baseline_configuration(facts.batch_size, facts.baseline, device, where=f"{where}: Workload(baseline=…)")
    if why := find_conflict(named):
        raise WorkloadError(f"{where}: {why}", hint="Change Workload(batch_size=…) or Workload(baseline=…).")
    baseline, notices = as_imported(named, facts, where=where)
    for text in notices:
        observe(Notice(text=text))
    return baseline


def _accumulated(baseline: Configuration, examples: int | None, facts: WorkloadFacts) -> Configuration:
    """The baseline with so many examples per update of the weights. Raises ArgumentError."""
    if examples is None:
        return baseline
    if facts.script is not None and facts.script.trains is Trains.LOOP:
        raise ArgumentError(
            "--global-batch does not reach a training loop of the script's own, which applies its gradients itself",
            hint="Leave it out, with --fixed-batch to keep the batch size.",
        )
    if examples % baseline.batch_size:
        raise ArgumentError(
            f"--global-batch {examples} is no multiple of the workload's batch size, which is {baseline.batch_size}",
            hint=f"Give --global-batch {-(-examples // baseline.batch_size) * baseline.batch_size}.",
        )
    accumulated = baseline.replace(global_batch=examples)
    own = facts.script is not None and "MirroredStrategy" in facts.script.not_reached.get("strategy", "")
    if why := NOT_ACCUMULATED if own else find_conflict(accumulated):
        raise ArgumentError(f"--global-batch {examples} cannot be kept: {why}", hint="Leave it out, or the strategy.")
    return accumulated


def _tell_isolation(executor: Executor, observe: Observer) -> None:
    """A notice where importing the user's file starts what no fork survives."""
    started = executor.started_by_import
    if started is None:
        return
    what = {"runtime": "TensorFlow's runtime", "cuda": "CUDA", "threads": "threads"}[started]
    move = "whatever starts them" if started == "threads" else "tensors, datasets and device queries"
    observe(
        Notice(
            text=f"importing the workload's file starts {what}, so every trial gets a fresh interpreter, "
            f"which costs an import each; move {move} into functions to avoid it"
        )
    )


def completed(opened: Opened, invocation: Invocation, source: str, space: ResolvedSpace) -> RunRecord:
    """run.json with what is known only once the baseline is warm."""
    facts, started = opened.facts, opened.warm.started
    workload = WorkloadRecord(
        name=facts.name,
        reference=str(invocation.reference),
        fingerprint=facts.fingerprint,
        batch_size=facts.batch_size,
        batched=facts.batched,
        drop_remainder=facts.drop_remainder,
        takes_config=facts.dataset_takes_config,
        examples=started.examples,
        endless=started.endless,
        element=started.element,
        batch_ranks=started.batch_ranks or None,
        parameters=started.parameters,
        device=opened.device.value,
        script=None if facts.script is None else facts.script.recorded,
        settings=started.not_knobs,
    )
    return invocation.directory.read_run().model_copy(
        update={
            "machine": _completed_machine(opened, invocation),
            "workload": workload,
            "search_space": SearchSpaceRecord(
                source=source, choices=dict(space.choices), left_out=dict(space.left_out)
            ),
            "baseline": dict(opened.run.baseline),
            "isolation": invocation.isolation,
            "seats": tuple(map(invocation.executor.place, invocation.executor.seats)),
        }
    )


def _completed_machine(opened: Opened, invocation: Invocation) -> Machine:
    """The fingerprint with what only TensorFlow knows; a notice where it does not see a GPU that is there."""
    machine = opened.machine
    if opened.device is Device.CPU:
        if machine.gpus:
            invocation.observe(
                Notice(
                    text=f"there is a GPU ({machine.gpus[0].name}), but TensorFlow does not see it, so the CPU is "
                    "tuned; pip install 'tensorflow[and-cuda]' brings the CUDA libraries"
                )
            )
        return machine
    build = opened.warm.started.build
    return machine.model_copy(
        update={"tensorflow_cuda": build.get("cuda_version"), "cudnn": build.get("cudnn_version")}
    )
