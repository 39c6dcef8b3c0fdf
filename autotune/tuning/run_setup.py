"""Open a run, for `tune` and `verify`: import the workload, start and time the baseline, choose the search space."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from autotune.data.errors import ArgumentError, NoStableConfigurationError, WorkloadError
from autotune.data.facts import Machine, ScriptFacts, ScriptSettings, Trains, WorkloadFacts, WorkloadReference
from autotune.data.files import free_on_local_disk
from autotune.data.options import Options, check_args
from autotune.data.printable import credential_values, with_article
from autotune.data.run_directory import SCRATCH, STATE, RunDirectory, RunRecord, SearchSpaceRecord, WorkloadRecord
from autotune.machine.doctor import ALLOW_NAMESPACES
from autotune.machine.fingerprint import memory_limit_bytes
from autotune.machine.gpu import can_keep_compilations, lowest_capability, missing_xla_flags
from autotune.recipe.compiled import ConfirmedCompilations, SharedCompilations
from autotune.runtime import containment
from autotune.runtime.executor import SeatLost, WarmUp
from autotune.script.changing_state import READS_AHEAD
from autotune.script.loading import parse_reference, reference_of
from autotune.script.notebook import open_notebook
from autotune.script.workload import Workload
from autotune.space import freed_memory, variables
from autotune.space.configuration import NOT_ACCUMULATED, Configuration, baseline_configuration, find_conflict
from autotune.space.knobs import Device
from autotune.space.space_file import ResolvedSpace, SearchSpace, find_search_space
from autotune.stats.disturbance import joules_of
from autotune.tuning.earlier_runs import refuse_another_machine, refuse_another_workload
from autotune.tuning.events import Began, Notice, Observer
from autotune.tuning.notices import (
    adopt_imported_settings,
    baseline_warnings,
    chosen_precision,
    instabilities,
    not_varied_notes,
    other_load,
    refit_notes,
    refuse_knobs_that_cannot_act,
    script_notes,
)
from autotune.tuning.rules import Limits
from autotune.tuning.run import CLOSING_SECONDS, OVERRUN_SHARE, Deadline, Invocation, Run
from autotune.tuning.seat import BASELINE_SECONDS, Seat

BASELINE_SHARE = 0.35  # of the budget, until the baseline is warm, or `BASELINE_SECONDS` if that is more
DEFAULT_SPACE = {Device.CPU: "quick", Device.GPU: "gpu"}
SEVERAL_SPACE = "several_gpus"  # where a seat has several devices, over which the training may be spread
WIDER_SPACE, FEW_KNOBS = "cpu", 4  # where fewer knobs of the default space reach the training


def reference_to(workload: object, args: Sequence[str] | None = None) -> WorkloadReference:
    """Return where the workload is, however it was given, with its file's arguments. Raises ArgumentError."""
    given = {} if args is None else {"args": check_args(args)}
    if isinstance(workload, Workload):
        return reference_of(workload).model_copy(update=given)
    if isinstance(workload, (str, os.PathLike)):
        return parse_reference(os.fspath(workload)).model_copy(update=given)
    raise ArgumentError(
        f"the workload is {with_article(type(workload).__name__)}, expected an autotune.Workload or its path",
        hint='Give the Workload itself, or text such as "path/to/file.py:name".',
    )


@contextlib.contextmanager
def prepare_script(
    reference: WorkloadReference, directory: RunDirectory, options: Options, say: Callable[[str], object]
) -> Iterator[WorkloadReference]:
    """Yield the reference with the options of a script, a notebook as one; remove its trials' own files at the end.

    Raises ArgumentError if such an option is given for a `Workload`.
    """
    names = ("fit", "loss", "skip_cells", "allow_writes", "allow_precision")
    said = {name: getattr(options, name) for name in names}
    if reference.script is None:
        for name, given in said.items():
            if given and name != "allow_precision":
                option = name.replace("_", "-")
                raise ArgumentError(f"--{option} is for scripts, and {reference} is a Workload")
        yield reference
        return
    scratch = directory.path.resolve() / SCRATCH
    with contextlib.suppress(OSError):  # a link to somewhere else
        scratch.unlink()
    try:
        room = min(free_on_local_disk(directory.path.resolve()), containment.LARGEST_LAYER_BYTES) // 2
        settings = ScriptSettings(**said, scratch=str(scratch), disk_bytes=room, since=time.time())
        reference = open_notebook(reference, scratch, options.skip_cells, say)
        yield reference.model_copy(update={"script": settings})
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def limits_of(machine: Machine, margin: float) -> Limits:
    """Return the limits of a trial on this machine or container."""
    device = min((gpu.memory_bytes for gpu in machine.gpus), default=None)
    return Limits(host_bytes=memory_limit_bytes(), device_bytes=device, margin=margin)


def _refuse_without_energy(options: Options, *, tells: bool) -> None:
    if options.objective == "energy" and not tells:
        raise ArgumentError(
            "the objective is energy, but no GPU here reports its energy to NVML",
            hint="Tune for throughput here, without --objective. Data-centre GPUs since Volta report it; MIG instances "
            "and CPUs do not.",
        )


def open_run(
    invocation: Invocation,
    interruptions: Callable[[], int],
    check: Callable[[WorkloadFacts], None] = lambda facts: None,
) -> Seat:
    """Import the workload, start its baseline and time it; return the first seat of the run, with that baseline."""
    # Raises ArgumentError, WorkloadError, BudgetError, NoStableConfigurationError.
    options, executor = invocation.options, invocation.executor
    _refuse_without_energy(options, tells=bool(invocation.machine.gpus) or options.executor != "local")
    facts, import_seconds = _import_workload(invocation, check)
    if executor.machine is not None:
        if invocation.earlier is not None and invocation.earlier.run.baseline is not None:
            refuse_another_machine(invocation.earlier, executor.machine)
        invocation = replace(invocation, machine=executor.machine)
    run = _new_run(invocation, facts, interruptions)
    workers = 0 if facts.script is None else facts.script.workers
    if workers > 1:
        text = f"TF_CONFIG lists {workers} workers: each trial runs all of them on this host"
        run.observe(Notice(text=f"{text}, and no other trial runs meanwhile"))
    seat = Seat(run, name=executor.seats[0], bracketed=workers > 1)
    warm = _start_baseline(seat)
    run.import_seconds = import_seconds if executor.isolation == "template" else 0.0
    if why := warm.started.reads_changing:
        run.not_reached = {**run.not_reached, **{name: why for name in READS_AHEAD if name in run.baseline}}
    _refuse_without_energy(options, tells=all(map(joules_of, seat.baseline.trial.slices)))
    # The process knows better than NVML what it may take: a part of a card, or what the workload allows itself.
    run.limits = replace(
        run.limits,
        device_bytes=run.device_limit_bytes or run.limits.device_bytes,
        work_varies=facts.script is not None and facts.script.work_varies,
    )
    if (script := facts.script) is not None:
        script = script.model_copy(update={"writing_seconds": warm.ready.writing_seconds})
        run.facts = facts.model_copy(update={"script": script})
    for text in _notices(seat):
        run.observe(Notice(text=text))
    return seat


def _import_workload(invocation: Invocation, check: Callable[[WorkloadFacts], None]) -> tuple[WorkloadFacts, float]:
    """Import the workload where trials run; return what it is and the seconds that took."""
    executor, observe = invocation.executor, invocation.observe
    observe(Began(text="importing the workload"))
    executor.tell = lambda text: observe(Began(text=f"looking at the script: {text}", shown=False))
    began = invocation.clock()
    facts = executor.open()
    seconds = invocation.clock() - began
    if invocation.earlier is not None:
        refuse_another_workload(invocation.earlier, fingerprint=facts.fingerprint)
    check(facts)
    if executor.started_by_import is not None:
        thing = {"runtime": "TensorFlow's runtime", "cuda": "CUDA", "threads": "threads"}[executor.started_by_import]
        starts = "the code that starts them" if thing == "threads" else "tensors, datasets and device queries"
        text = (
            f"importing the workload's file starts {thing}, so each trial needs a fresh interpreter and its own import"
        )
        observe(Notice(text=f"{text}; move {starts} into functions to avoid it"))
    if facts.uncontained:
        redirected = "; Python's own writes are redirected" if facts.script is not None else ""
        cannot = f"trials cannot be isolated here ({facts.uncontained})"
        text = f"{cannot}: C code, such as TensorFlow's, can write to your files{redirected}. {ALLOW_NAMESPACES}"
        observe(Notice(text=text))
    return facts, seconds


def _new_run(invocation: Invocation, facts: WorkloadFacts, interruptions: Callable[[], int]) -> Run:
    """Return the run, with the baseline as far as it is known before a trial."""
    options, earlier, script = invocation.options, invocation.earlier, facts.script
    device = Device.GPU if invocation.machine.gpus else Device.CPU
    baseline = baseline_of(facts, str(invocation.reference), device, invocation.observe)
    no_branches = _why_no_branches(invocation, script)
    compares_batches = options.objective == "time_to_loss" and not options.fixed_batch and not options.global_batch
    state_file = invocation.directory.trial_directory(0).resolve() / STATE  # takes the state of the baseline's training
    chosen = {} if options.allow_precision else chosen_precision(baseline)
    shared = None
    if invocation.shares_compilations and invocation.executor.keeps_files:
        shared = SharedCompilations(
            invocation.directory.path, invocation.machine, lambda text: invocation.observe(Notice(text=text))
        )
    ends_at = options.searching - CLOSING_SECONDS + OVERRUN_SHARE * options.budget
    return Run(
        **vars(invocation),
        interruptions=interruptions,
        facts=facts,
        deadline=Deadline(clock=invocation.clock, at=ends_at),
        baseline=_set_global_batch(baseline, options.global_batch, facts),
        not_reached=chosen if script is None else chosen | script.not_reached,
        records={} if earlier is None else dict(earlier.records),
        trials={} if earlier is None else {trial.number: trial for trial in earlier.trials()},
        numbers=itertools.count(0 if earlier is None else earlier.next_number),
        state_file=state_file if compares_batches and not no_branches else None,
        shared=shared,
        no_branches=no_branches,
        credentials=credential_values(invocation.reference.args, {} if script is None else script.variables),
    )


def _why_no_branches(invocation: Invocation, script: ScriptFacts | None) -> str:
    """Return why no other batch size can be trained from the baseline's state, in half a sentence; empty if it can."""
    if script is not None and script.trains is Trains.LOOP:
        return "losses are compared only of trainings by Keras fit"
    if script is not None and script.workers > 1:
        return "several workers train together"
    return "trials on Ray keep no state of the baseline's" if invocation.options.executor != "local" else ""


def _start_baseline(seat: Seat) -> WarmUp:
    """Start the baseline, and once more if its seat was lost. Raises NoStableConfigurationError, BudgetError."""
    run, budget = seat.run, seat.run.options.budget
    longest = max(BASELINE_SECONDS, BASELINE_SHARE * budget)
    known = run.trials.get(0)

    def start() -> WarmUp:
        return seat.start_baseline(max(1.0, min(longest, budget - run.clock())), run.trials.get(0))

    try:
        return start()
    except SeatLost as lost:
        run.observe(Notice(text=f"seat {seat.name} was lost; restarting it: {lost.reason}"))
    try:
        run.executor.restart(seat.name)
        warm = start()
        if known is None:
            seat.keep_baseline()
        return warm
    except SeatLost as again:
        raise NoStableConfigurationError(
            f"seat {seat.name} was lost twice: {again.reason}",
            hint=f"When it is back, --resume {run.directory.path} continues the run.",
        ) from again


def _notices(seat: Seat) -> Iterator[str]:
    """Yield notices about the workload and its baseline, in the order in which they are shown."""
    run, warm, slices = seat.run, seat.baseline.warm, seat.baseline.trial.slices
    script = run.facts.script
    if warm.started.devices > 1 and "global_batch" in run.baseline and "strategy" not in run.baseline:
        yield f"strategy is not varied: {NOT_ACCUMULATED}"
    own = {} if script is None else script.variables
    yield from variables.environment_notes({**os.environ, **own}, run.machine.packages.get("tensorflow", ""))
    yield from not_varied_notes(run.not_reached, warm.started.devices, run.device)
    if script is not None:
        yield from script_notes(script, warm.ready_seconds)
    yield from baseline_warnings(run.facts, warm, run.device)
    yield from refit_notes(script, slices)
    yield from instabilities(slices)
    yield from other_load(slices)


def baseline_of(facts: WorkloadFacts, where: str, device: Device, observe: Observer) -> Configuration:
    """Return the baseline, as far as it is known before anything was built."""
    refuse_knobs_that_cannot_act(facts, where=where)
    named = baseline_configuration(facts.batch_size, facts.baseline, device, where=f"{where}: Workload(baseline=…)")
    if device is Device.CPU and not freed_memory.WHY_NOT:
        named = named.replace(keep_freed_memory="none")
    if why := find_conflict(named):
        raise WorkloadError(f"{where}: {why}", hint="Change Workload(batch_size=…) or Workload(baseline=…).")
    baseline, notices = adopt_imported_settings(named, facts, where=where)
    for text in notices:
        observe(Notice(text=text))
    return baseline


def _set_global_batch(baseline: Configuration, examples: int | None, facts: WorkloadFacts) -> Configuration:
    """Return the baseline with so many examples per update of the weights. Raises ArgumentError."""
    if examples is None:
        return baseline
    if facts.script is not None and facts.script.trains is Trains.LOOP:
        raise ArgumentError(
            "--global-batch does not reach a custom training loop, which applies its gradients itself",
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
        raise ArgumentError(f"--global-batch {examples} cannot be kept: {why}")
    return accumulated


def complete_run_record(seat: Seat, source: str, space: ResolvedSpace) -> RunRecord:
    """Return run.json with the fields that are known only once the baseline is warm."""
    run, warm = seat.run, seat.baseline.warm
    facts, started = run.facts, warm.started
    workload = WorkloadRecord(
        name=facts.name,
        reference=str(run.reference),
        fingerprint=facts.fingerprint,
        batch_size=facts.batch_size,
        batched=facts.batched,
        drop_remainder=facts.drop_remainder,
        takes_config=facts.takes_config,
        examples=started.examples,
        endless=started.endless,
        element=started.element,
        batch_ranks=started.batch_ranks or None,
        parameters=warm.parameters,
        device=run.device.value,
        keras=facts.keras,
        script=None if facts.script is None else facts.script.recorded,
        settings=started.not_knobs,
    )
    choices = SearchSpaceRecord(source=source, choices=dict(space.choices), left_out=dict(space.left_out))
    return run.directory.read_run().model_copy(
        update={
            "machine": _complete_machine(run, started.build),
            "workload": workload,
            "search_space": choices,
            "baseline": dict(run.baseline),
            "isolation": run.executor.isolation,
            "seats": tuple(map(run.executor.place, run.executor.seats)),
        }
    )


def _complete_machine(run: Run, build: Mapping[str, str]) -> Machine:
    """Complete the fingerprint with what only TensorFlow knows; tell of a GPU that it does not see."""
    machine = run.machine
    if run.device is Device.CPU:
        if machine.gpus:
            text = f"there is a GPU ({machine.gpus[0].name}), but TensorFlow does not see it, so the CPU is tuned; "
            text += "pip install 'tensorflow[and-cuda]' installs the CUDA libraries"
            run.observe(Notice(text=text))
        return machine
    return machine.model_copy(
        update={"tensorflow_cuda": build.get("cuda_version"), "cudnn": build.get("cudnn_version")}
    )


def choose_space(written: SearchSpace | None, seat: Seat) -> tuple[SearchSpace, ResolvedSpace]:
    """Resolve the search space that was asked for; else the device's default, or a wider one if that reaches little."""
    run, started = seat.run, seat.baseline.warm.started
    fixed = dict.fromkeys(started.set_by_dataset, "the workload's dataset() sets it itself")
    if run.options.fixed_batch:
        fixed["batch_size"] = "kept by --fixed-batch"
    if freed_memory.WHY_NOT or not run.records[0].faults_often:
        fixed["keep_freed_memory"] = freed_memory.WHY_NOT or "page faults take less than 2% of the baseline's steps"
    fixed |= run.not_reached

    def resolve(space: SearchSpace) -> ResolvedSpace:
        if run.device is Device.GPU:
            fixed.update(_ask_for_flags(run, space.ranges.keys() - fixed.keys()))
        return space.resolve(
            baseline=run.baseline,
            device=run.device,
            cores=run.machine.cores,
            examples=started.examples,
            dataset_takes_config=run.facts.takes_config,
            largest_batch=run.options.max_batch,
            devices=started.devices,
            fixed=fixed,
            capability=lowest_capability(run.machine.gpus),
        )

    if written is not None:
        return written, resolve(written)
    written = find_search_space(SEVERAL_SPACE if "strategy" in run.baseline else DEFAULT_SPACE[run.device])
    resolved = resolve(written)
    if len(resolved.choices) < FEW_KNOBS and run.device is Device.CPU:
        written = find_search_space(WIDER_SPACE)
        resolved = resolve(written)
    return written, resolved


def _ask_for_flags(run: Run, names: Collection[str]) -> dict[str, str]:
    """Return the knobs whose flag the installed TensorFlow lacks, and why; note whether compilations can be kept."""
    has_all = run.executor.keeps_files and can_keep_compilations(names)  # one process, asked for everything
    missing = {} if has_all else missing_xla_flags(names)
    if has_all or (run.executor.keeps_files and can_keep_compilations()):
        run.confirmed = ConfirmedCompilations(lambda text: run.observe(Notice(text=text)))
    if missing:
        run.observe(Notice(text=f"not varied: {', '.join(sorted(missing))}: {min(missing.values())}"))
    return missing
