"""One run, from the workload to the recipe."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal

from autotune.data.credentials import MASK, masked_names
from autotune.data.errors import ArgumentError
from autotune.data.facts import WorkloadReference
from autotune.data.files import write_atomically
from autotune.data.options import MEMORY_MARGIN, MIN_GAIN, Objective, Options, seconds_of
from autotune.data.record import Place
from autotune.data.run_directory import RunDirectory, RunRecord, new_run_directory
from autotune.machine.fingerprint import fingerprint, require_linux
from autotune.machine.gpu import visible_gpus
from autotune.machine.other_runs import announced, local_devices
from autotune.recipe.recipe import Recipe
from autotune.report.page import write_page_or_say
from autotune.runtime.local import TrialProcesses
from autotune.runtime.places import cut_cores, machine_of, of_devices
from autotune.runtime.ray_seats import RayTrials
from autotune.script.loading import refuse_while_loading
from autotune.script.workload import Workload
from autotune.space.space_file import SearchSpace, find_search_space, shipped_names
from autotune.tuning.ending import batch_losses, watched
from autotune.tuning.events import Notice, Observer, RunBegan, silent
from autotune.tuning.interruptions import interruptions_noted
from autotune.tuning.loop import Loop
from autotune.tuning.opening import Invocation, completed, limits_of, open_run, prepared, reference_to
from autotune.tuning.profiles import note_profiles
from autotune.tuning.recommend import recommend
from autotune.tuning.resume import (
    Earlier,
    note_resumption,
    read_earlier,
    refuse_another_machine,
    refuse_another_question,
    resumption_notes,
)
from autotune.tuning.run_lock import occupied
from autotune.tuning.sampler import Sampler
from autotune.tuning.spaces import space_of
from autotune.tuning.surroundings import samples_of, worth_notes
from autotune.tuning.trial import now_utc

DEFAULT_BUDGET = "10m"
WAIT_ADVICE = "--wait starts this one once that has ended"
OWN_OPTIONS = sorted({each.name for each in fields(Options)} - {"budget", "keeps_budget"})
"""What `tune` takes as it stands in `Options`."""


def tune(
    workload: Workload | str | os.PathLike[str],
    *,
    args: Sequence[str] | None = None,
    budget: float | str | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    space: str | Path | None = None,
    thorough: bool = False,
    trials: int | None = None,
    seed: int = 0,
    min_gain: float = MIN_GAIN,
    trial_timeout: float | str | None = None,
    isolation: Literal["template", "spawn"] = "template",
    pairing: Literal["auto", "bracketed"] = "auto",
    max_batch: int | None = None,
    fixed_batch: bool = False,
    global_batch: int | None = None,
    memory_margin: float = MEMORY_MARGIN,
    soak: float | str | None = None,
    objective: Objective = "throughput",
    profile: Literal["all", "finalists", "none"] = "finalists",
    fit: int | None = None,
    loss: str | None = None,
    allow_writes: bool = False,
    allow_cache: bool = False,
    train_samples: int | None = None,
    executor: Literal["local", "ray"] = "local",
    seats: int | None = None,
    devices: str | None = None,
    seat_devices: int = 1,
    all_seats: bool = False,
    ray_address: str | None = None,
    ray_upload: bool = False,
    wait: bool = False,
    observe: Observer = silent,
) -> Recipe:
    """Find the fastest stable configuration of a training on this machine.

    Args:
        workload: What is trained: a script, as `"path/to/train.py"` or `"package.module"`; a `Workload` at the top
            level of a module, or `"path/to/file.py[:name]"` or `"package.module[:name]"`. Without a name it is a
            script where the source binds no `workload` at its top level.
        args: `sys.argv[1:]` of the script or the workload's file, in trials. When None there are none; a `Workload`
            has those of the running program, and a resumed run its own.
        budget: Wall-clock time for everything, in seconds or as `"90s"`, `"10m"`, `"1h30m"`. When None the run ends
            as soon as the answer is settled, after ten minutes at most. With `resume`, the time to go on with; what is
            left of the run's own when None.
        out: The run directory; below `results/` when None.
        resume: The directory of a run, ended or stopped: it goes on with all that was measured. How it is to be done
            is its own, `budget`, `trials` and `soak` excepted.
        space: A search-space file or the name of a shipped one; chosen by device when None.
        thorough: The device's wider space is searched, such as `gpu_thorough`.
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
        global_batch: Examples per update of the weights, kept while the batch size is tuned: gradients are accumulated.
        memory_margin: Share of the machine's or container's memory, and of the device's, that the recommended
            configuration must leave free at its peak.
        soak: Time at the end, in seconds or as text, in which the winner trains without a pause and is watched for
            leaks and hangs; None for none.
        objective: What is compared: `throughput`, samples per second; or `energy`, samples per joule of the GPUs, where
            NVML counts their energy.
        profile: Whose steps are profiled once their slices are over: those of all trials, of the baseline and the
            leaders, or of none. XProf and TensorBoard open `trials/NNNN/profile`.
        fit: Which `model.fit` of a script is tuned, from 1, in the order in which they are called; the longest when
            None.
        loss: Which number that a script's own training step returns is the loss: a key, or the place in a tuple.
        allow_writes: A script may write to files that exist, in each trial.
        allow_cache: Keeping what a script's maps have made in memory may be tried: the knob `cache`.
        train_samples: How many samples the long training will take, to say whether tuning is worth it. A script's own
            epochs when None.
        executor: `local` runs trials on this machine, `ray` on a Ray cluster (extra `ray`).
        seats: How many trials run at the same time. Locally the cores are cut into so many parts; with Ray it is the
            most seats that are used.
        devices: `all`, or indices and UUIDs of this machine's GPUs, separated by commas: a seat each.
        seat_devices: GPUs of a seat.
        all_seats: Seats are kept that slow one another down.
        ray_address: The cluster's; RAY_ADDRESS, or a Ray of this machine's own, when None.
        ray_upload: Ray copies the working directory to the hosts. Else they share a file system.
        wait: Wait until runs that were begun earlier on this machine's devices have ended. The budget begins then.
        observe: Is told what happens, see `autotune.tuning.events`.

    Returns:
        The recipe, which is also written to the run directory.

    Raises:
        InputError: An argument, the workload or the search space cannot be used.
        NoStableConfigurationError: The baseline itself fails.
        TuningInterruptedError: Interrupted before anything was measured.
    """
    said, began = locals(), time.monotonic()
    refuse_while_loading()
    require_linux()
    for name, path in (("out", out), ("resume", resume)):
        if path == "":
            raise ArgumentError(f"{name} is empty", hint="Give the run directory, or leave it out.")
    reference = reference_to(workload, args)
    given: dict[str, Any] = {name: said[name] for name in OWN_OPTIONS}
    given["args"] = () if args is None else reference.args
    given["space"] = None if space is None else str(space)
    given["trial_timeout"] = None if trial_timeout is None else seconds_of("trial_timeout", trial_timeout)
    given["soak"] = None if soak is None else seconds_of("soak", soak, may_be_none=True)
    if resume is None:
        seconds = seconds_of("budget", DEFAULT_BUDGET if budget is None else budget)
        options = Options(budget=seconds, keeps_budget=budget is not None, **{**given, "args": reference.args})
        directory = new_run_directory(Path("results"), _name_of(reference)) if out is None else RunDirectory(Path(out))
        return _run(directory, reference, options, observe, began=began, wait=wait)
    if out is not None:
        raise ArgumentError("out and resume were both given", hint="A resumed run stays where it is.")
    directory = RunDirectory(Path(resume))
    earlier = read_earlier(directory)
    options, spent_before = earlier.options.resumed_with(given), 0.0
    reference = reference.model_copy(update={"args": options.args})
    if budget is not None:
        spent_before = earlier.spent_seconds
        options = replace(options, budget=seconds_of("budget", budget), keeps_budget=True)
    elif earlier.spent_seconds >= options.budget:
        raise ArgumentError(
            f"{directory.path} has used its budget of {options.budget:.0f} s",
            hint="Give it more time: --resume RUN --budget 2m.",
        )
    else:
        began -= earlier.spent_seconds
    again: dict[str, Any] = {"earlier": earlier, "spent_before": spent_before}
    return _run(directory, reference, options, observe, began=began, wait=wait, **again)


def _run(
    directory: RunDirectory,
    reference: WorkloadReference,
    options: Options,
    observe: Observer,
    *,
    began: float,
    wait: bool = False,
    earlier: Earlier | None = None,
    spent_before: float = 0.0,
) -> Recipe:
    def say(text: str) -> None:
        observe(Notice(text=text))

    def clock() -> float:
        return time.monotonic() - began

    written = _search_space(directory, options, resumed=earlier is not None)
    places = _places(options)
    with (
        occupied(directory) if earlier is None else directory.reopened(),
        announced(directory.path, _devices_of(options, places), say=say, wait=wait, advice=WAIT_ADVICE) as waited,
    ):
        began += waited
        machine = machine_of(places, fingerprint())
        if earlier is None:
            directory.write_run(
                RunRecord(run=directory.name, started_at=now_utc(), machine=machine, arguments=asdict(options.recorded))
            )
            if options.space is not None and options.space not in shipped_names():
                write_atomically(directory.space_file, Path(options.space).read_bytes())
        else:
            if options.executor == "local":  # else the first seat's host is not known yet
                refuse_another_machine(earlier, machine)
            note_resumption(directory, earlier)
        observe(RunBegan(directory=directory.path, workload=_name_of(reference), budget=options.budget, spent=clock()))
        for text in (*_credential_notes(options), *(() if earlier is None else resumption_notes(earlier))):
            observe(Notice(text=text))
        with (
            prepared(reference, directory, options) as reference,
            _executor(
                reference, directory, options, places, say=say, left=lambda: options.budget - clock()
            ) as processes,
        ):
            invocation = Invocation(
                executor=processes,
                directory=directory,
                machine=machine,
                limits=limits_of(machine, options.memory_margin),
                reference=reference,
                options=options,
                clock=clock,
                observe=observe,
                earlier=earlier,
                spent_before=spent_before,
            )
            recipe = tune_with(invocation, written)
        if problem := write_page_or_say(directory.path):
            observe(Notice(text=problem))
    return recipe


def _credential_notes(options: Options) -> Iterator[str]:
    """Say what is masked, once."""
    if hidden := masked_names(options.recorded.args):
        yield f"recorded as {MASK}, because it looks like a credential: {', '.join(hidden)}"


def _search_space(directory: RunDirectory, options: Options, *, resumed: bool) -> SearchSpace | None:
    """The search space that was asked for, and for a resumed run the copy in its directory. Raises as its reading."""
    if options.space is None or options.space in shipped_names() or not resumed:
        return None if options.space is None else find_search_space(options.space)
    return replace(find_search_space(directory.space_file), source=options.space)


def _places(options: Options) -> Sequence[Place] | None:
    """This machine's seats; None where it is one, or trials run elsewhere. Raises ArgumentError."""
    if options.executor == "ray":
        return None
    if options.devices is not None:
        return of_devices(options.devices, options.seat_devices)
    return None if options.seats is None else cut_cores(options.seats)


def _devices_of(options: Options, places: Sequence[Place] | None) -> Sequence[str]:
    """Return the devices of this machine that a run uses; none where its trials run on a cluster."""
    if options.executor == "ray" and (options.ray_address or os.environ.get("RAY_ADDRESS")):
        return ()
    chosen = [device for place in places or () for device in place.devices]
    return local_devices(chosen or [gpu.uuid for gpu in visible_gpus()])


def _executor(
    reference: WorkloadReference,
    directory: RunDirectory,
    options: Options,
    places: Sequence[Place] | None,
    *,
    say: Callable[[str], None],
    left: Callable[[], float],
) -> TrialProcesses | RayTrials:
    """What runs the trials."""
    if options.executor == "ray":
        return RayTrials(
            reference,
            isolation=options.isolation,
            profile=options.profile,
            address=options.ray_address,
            seat_devices=options.seat_devices,
            seats=options.seats,
            upload=options.ray_upload,
            say=say,
            left=left,
        )
    return TrialProcesses(
        reference,
        logs=directory.log_directory,
        isolation=options.isolation,
        profile=options.profile,
        places=places,
        import_seconds=left(),
    )


def _name_of(reference: WorkloadReference) -> str:
    stem = Path(reference.file).stem if reference.file else str(reference.module)
    return stem if reference.name == "workload" else reference.name


def tune_with(invocation: Invocation, written: SearchSpace | None) -> Recipe:
    """The run itself, on real, simulated or recorded trials. Raises as `tune` does."""
    directory, options = invocation.directory, invocation.options
    stopping = f"stopping with what was measured; the run is in {directory.path}, and --resume goes on with it"
    with directory.told_when_gone(), interruptions_noted(invocation.observe, stopping) as interruptions:
        opened = open_run(invocation, interruptions)
        interruptions.answerable = True
        run, earlier = opened.run, invocation.earlier
        samples = options.train_samples or samples_of(opened.facts.script, opened.warm.started.examples)
        rate = None if run.executor.whole else run.records[0].throughput  # a part of the host tells nothing of all
        what = "the training" if options.train_samples else "one call of fit"
        for text in worth_notes(what, samples, None if rate is None else rate.value, options.budget):
            invocation.observe(Notice(text=text))
        written, space = space_of(written, opened, options)
        if earlier is not None:
            refuse_another_question(earlier, baseline=run.baseline, choices=space.choices)
            opened.seat.keep_baseline()
        record = completed(opened, invocation, written.source, space)
        directory.write_run(record)
        sampler = Sampler(
            space, file=directory.study_file, name=opened.facts.name, seed=options.seed, several=run.several
        )
        found = Loop(
            run,
            opened.seat,
            opened.deadline,
            space=space,
            sampler=sampler,
            options=options,
            limits=opened.limits,
            import_seconds=opened.import_seconds,
            earlier=[] if earlier is None else earlier.trials()[1:],
        ).run()
        opened.seat.end_baseline()
        note_profiles(run)
        sampler.write_again(run.records.values(), seconds=options.budget - run.clock())
        recipe = recommend(
            found=found,
            watched=watched(found, opened, invocation),
            batch_losses=batch_losses(found, run, options),
            run=run,
            record=record,
            options=options.recorded,
        )
        recipe.save(directory.recipe_file)
        return recipe
