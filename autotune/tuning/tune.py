"""Run a tuning, from the workload to the recipe, and watch its winner."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autotune.data.errors import ArgumentError
from autotune.data.facts import Machine, WorkloadReference
from autotune.data.figures import Check, Interval, Profile
from autotune.data.files import write_atomically
from autotune.data.options import Options
from autotune.data.printable import MASK, masked_names
from autotune.data.record import Outcome, Phase, Place, TrialRecord
from autotune.data.run_directory import RESULTS, RunDirectory, RunRecord, follow_latest, new_run_directory
from autotune.machine.device_locks import HOST_CPU, lock_devices
from autotune.machine.fingerprint import fingerprint, require_linux
from autotune.machine.gpu import visible_gpus
from autotune.recipe.compiled import keep_compiled
from autotune.recipe.evidence import Watch
from autotune.recipe.recipe import Recipe, read_recipes
from autotune.runtime.executor import DeviceUnavailable, Isolation, TrialFailed, WarmUp
from autotune.runtime.local import LocalExecutor, group_gpus, restrict_to_seat
from autotune.runtime.ray import RayExecutor
from autotune.script.loading import refuse_while_loading
from autotune.space.configuration import Configuration
from autotune.space.space_file import ResolvedSpace, SearchSpace, find_search_space, shipped_names
from autotune.stats.bottleneck import NOT_INSTALLED
from autotune.stats.same_loss import USUAL_OVER_CRITICAL
from autotune.stats.stability import DEVICE_GROWTH, HOST_GROWTH, check_hangs, check_memory_growth
from autotune.tuning.comparison import MeasuredProcess
from autotune.tuning.costs import slice_length
from autotune.tuning.earlier_runs import (
    Earlier,
    describe_leaders,
    find_leaders,
    note_resumption,
    read_earlier,
    refuse_another_machine,
    refuse_another_question,
    resumption_notes,
    starting_points,
    why_unused,
)
from autotune.tuning.events import Began, Notice, Observer, RunBegan, count_interruptions
from autotune.tuning.loop import Loop, SearchResult
from autotune.tuning.notices import budget_note, samples_of, worth_notes
from autotune.tuning.recommend import recommend
from autotune.tuning.rules import Limits, call_seconds, memory_of, memory_samples
from autotune.tuning.run import CLOSING_SECONDS, Deadline, Invocation, Run
from autotune.tuning.run_setup import (
    choose_space,
    complete_run_record,
    limits_of,
    open_run,
    prepare_script,
    reference_to,
)
from autotune.tuning.sampler import Sampler
from autotune.tuning.seat import BASELINE_SECONDS, Seat
from autotune.tuning.trial import Trial, limit_of, now_utc

DEFAULT_BUDGET_SECONDS = 600.0
WAIT_ADVICE = "; --wait starts this one when that has ended"
SLICES_AT_ONCE = 8  # of a watch, between which the user may stop it
PROFILE_READ_SECONDS = 60.0
PROFILE_FOLDER = "profile"  # of a trial's directory


@dataclass(frozen=True, kw_only=True)
class Request:
    """The request of one call of `tune`, read and checked."""

    directory: RunDirectory
    reference: WorkloadReference
    options: Options
    began: float  # on the monotonic clock, when the budget began
    results: Path | None = None  # the directory below which earlier runs are looked for; None for a resumed run
    earlier: Earlier | None = None  # what an earlier invocation left; None for a new run
    spent_before: float = 0.0  # seconds of earlier invocations that do not count for the budget


def read_request(
    workload: object,
    *,
    args: Sequence[str] | None,
    out: str | Path | None,
    resume: str | Path | None,
    options: Mapping[str, Any],
) -> Request:
    """Read the arguments of `tune`. Raises InputError."""
    began = time.monotonic()
    refuse_while_loading()
    require_linux()
    given = dict(options)
    for name, path in (("out", out), ("resume", resume)):
        if path == "":
            raise ArgumentError(f"{name} is empty")
    reference = reference_to(workload, args)
    budget = given.pop("budget", None)
    if resume is not None:
        if out is not None:
            raise ArgumentError("out and resume were both given")
        given["args"] = () if args is None else reference.args
        return _read_resumption(RunDirectory(follow_latest(Path(resume))), reference, given, budget, began=began)
    chosen = Options(
        budget=DEFAULT_BUDGET_SECONDS if budget is None else budget,
        keeps_budget=budget is not None,
        args=reference.args,
        **given,
    )
    results = Path(RESULTS) if out is None else Path(out).parent
    directory = new_run_directory(results, _name_of(reference)) if out is None else RunDirectory(Path(out))
    return Request(directory=directory, reference=reference, options=chosen, began=began, results=results)


def _read_resumption(
    directory: RunDirectory, reference: WorkloadReference, given: Mapping[str, Any], budget: Any, *, began: float
) -> Request:
    """Read the request to continue a run: for another budget, or for the rest of its own."""
    earlier = read_earlier(directory)
    options, spent_before = earlier.options.resumed_with(given), 0.0
    if budget is not None:
        spent_before = earlier.spent_seconds
        options = replace(options, budget=budget, keeps_budget=True)
    elif earlier.spent_seconds >= options.budget:
        raise ArgumentError(
            f"{directory.path} has used its budget of {options.budget:.0f} s",
            hint="Give it more time: --resume RUN --budget 2m.",
        )
    else:
        began -= earlier.spent_seconds
    return Request(
        directory=directory,
        reference=reference.model_copy(update={"args": options.args}),
        options=options,
        began=began,
        earlier=earlier,
        spent_before=spent_before,
    )


def run_tuning(request: Request, observe: Observer, *, wait: bool = False) -> Recipe:
    """Lock the run directory and the devices, start what runs trials, and tune. Raises as `autotune.tune` does."""
    options, directory, earlier = request.options, request.directory, request.earlier
    written = _read_search_space(directory, options, resumed=earlier is not None)
    begin_with = None if options.begin_with is None or earlier is not None else read_recipes(options.begin_with)
    places = () if options.devices is None else group_gpus(options.devices, options.seat_devices)

    def say(text: str) -> None:
        observe(Notice(text=text))

    with (
        directory.create_and_lock() if earlier is None else directory.reopen(),
        lock_devices(directory.path, _devices_of(options, places), say=say, wait=wait, advice=WAIT_ADVICE) as waited,
    ):
        began = request.began + waited

        def clock() -> float:
            return time.monotonic() - began

        machine = restrict_to_seat(fingerprint(), places)
        _write_beginning(request, machine)
        observe(
            RunBegan(
                directory=directory.path, workload=_name_of(request.reference), budget=options.budget, spent=clock()
            )
        )
        if hidden := masked_names(options.recorded.args):
            say(f"recorded as {MASK}, because it looks like a credential: {', '.join(hidden)}")
        for text in () if earlier is None else resumption_notes(earlier):
            say(text)
        with (
            prepare_script(request.reference, directory, options, say) as reference,
            _executor(
                reference,
                directory,
                options,
                places,
                isolation="template" if earlier is None else earlier.run.isolation,
                say=say,
                left=lambda: options.budget - clock(),
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
                spent_before=request.spent_before,
                results=None if options.fresh else request.results,
                begin_with=begin_with,
                shares_compilations=True,
            )
            return tune_with(invocation, written)


def _read_search_space(directory: RunDirectory, options: Options, *, resumed: bool) -> SearchSpace | None:
    """Read the search space that was asked for; a resumed run has a copy in its directory."""
    if options.space is None or options.space in shipped_names() or not resumed:
        return None if options.space is None else find_search_space(options.space)
    return replace(find_search_space(directory.space_file), source=options.space)


def _devices_of(options: Options, places: Sequence[Place]) -> Sequence[str]:
    """Return the devices of this machine that a run uses; none where its trials run on a cluster."""
    if options.executor == "ray" and (options.ray_address or os.environ.get("RAY_ADDRESS")):
        return ()
    chosen = [device for place in places for device in place.devices]
    return chosen or [gpu.uuid for gpu in visible_gpus()] or [HOST_CPU]


def _write_beginning(request: Request, machine: Machine) -> None:
    """Write run.json and the search space of a new run; check a resumed run's machine, and note that it continues."""
    directory, options = request.directory, request.options
    if request.earlier is not None:
        if options.executor == "local":  # else the first seat's host is not known yet
            refuse_another_machine(request.earlier, machine)
        note_resumption(directory, request.earlier)
        return
    arguments = asdict(options.recorded)
    directory.write_run(RunRecord(run=directory.name, started_at=now_utc(), machine=machine, arguments=arguments))
    if options.space is not None and options.space not in shipped_names():
        write_atomically(directory.space_file, Path(options.space).read_bytes())


def _executor(
    reference: WorkloadReference,
    directory: RunDirectory,
    options: Options,
    places: Sequence[Place],
    *,
    isolation: Isolation,
    say: Callable[[str], None],
    left: Callable[[], float],
) -> LocalExecutor | RayExecutor:
    """Make what runs the trials."""
    if options.executor == "ray":
        return RayExecutor(
            reference,
            isolation=isolation,
            profile=options.profile,
            address=options.ray_address,
            seat_devices=options.seat_devices,
            seats=options.seats,
            upload=options.ray_upload,
            say=say,
            left=left,
        )
    return LocalExecutor(
        reference,
        logs=directory.log_directory,
        isolation=isolation,
        profile=options.profile,
        places=places,
        import_seconds=left(),
    )


def _name_of(reference: WorkloadReference) -> str:
    stem = Path(reference.file).stem if reference.file else str(reference.module)
    return stem if reference.name == "workload" else reference.name


def tune_with(invocation: Invocation, written: SearchSpace | None) -> Recipe:
    """Tune on real, simulated or recorded trials: open, search, recommend. Raises as `autotune.tune` does."""
    directory = invocation.directory
    stopping = f"stopping; the measurements are in {directory.path}, and --resume continues the run"
    with directory.report_removal(), count_interruptions(invocation.observe, stopping) as interruptions:
        try:
            seat = open_run(invocation, interruptions)
            interruptions.answerable = True
            return _search(seat, written)
        finally:
            directory.remove_state()


def _search(seat: Seat, written: SearchSpace | None) -> Recipe:
    """Search and recommend, once the baseline has started."""
    run = seat.run
    directory, options, warm = run.directory, run.options, seat.baseline.warm
    _tell_worth(run, warm)
    written, space = choose_space(written, seat)
    if run.earlier is not None:
        refuse_another_question(run.earlier, baseline=run.baseline, choices=space.choices, parameters=warm.parameters)
        seat.keep_baseline()
    record = _note_leaders(complete_run_record(seat, written.source, space), run, space)
    directory.write_run(record)
    directory.link_latest()
    if run.state_file is not None and "batch_size" not in space.choices:
        run.state_file.unlink(missing_ok=True)
        run.state_file = None
    sampler = Sampler(
        space,
        file=directory.study_file,
        name=run.facts.name,
        seed=options.seed,
        several=run.several,
        over_critical=USUAL_OVER_CRITICAL if options.objective == "time_to_loss" else 0.0,
    )
    found = Loop(seat, space=space, sampler=sampler, first=starting_points(record.leaders, space)).run()
    seat.end_baseline()
    note_profiles(run)
    sampler.write_again(run.records.values(), seconds=options.budget - run.clock())
    recipe = recommend(found=found, watched=watch_winner(found, run), run=run, record=record, options=options.recorded)
    recipe.save(directory.recipe_file)
    if why := keep_compiled(recipe, directory.path):
        run.observe(Notice(text=f"{why}. The training compiles anew, and may get other kernels than those measured"))
    return recipe


def _note_leaders(record: RunRecord, run: Run, space: ResolvedSpace) -> RunRecord:
    """Return the record with the leaders of earlier runs and recipes; a resumed run has those that it began with."""
    source, recipes = run.begin_with, tuple[Recipe, ...]()
    if run.results is None and source is None:
        return record
    if source is not None:
        why = why_unused(source.recipes, record)
        for text in (*source.notes, *([f"{source.path} is not used: {why}"] if why else ())):
            run.observe(Notice(text=text))
        recipes = () if why else source.recipes
    leaders = find_leaders(run.results, record, space, recipes)
    if leaders:
        run.observe(Notice(text=describe_leaders(leaders, space)))
    return record.model_copy(update={"leaders": leaders})


def _tell_worth(run: Run, warm: WarmUp) -> None:
    """Tell what the budget can show, and whether it is in proportion to the training. Raises BudgetError."""
    options = run.options
    if run.earlier is None:
        spent = options.budget - options.searching + run.clock() + CLOSING_SECONDS
        text = budget_note(options.budget, run.records[0], spent=spent, min_gain=options.min_gain)
        run.observe(Notice(text=text))
    script, examples, rate = run.facts.script, warm.started.examples, run.records[0].throughput
    samples = options.train_samples or samples_of(script, examples)
    if samples is None or rate is None:
        return
    whole = samples / rate.value if script is None else script.total_seconds(samples, rate.value, examples)
    training = "the training" if options.train_samples else "one call of fit"
    for text in worth_notes(training, whole, options.budget):
        run.observe(Notice(text=text))


# ----------------------------------------------------------------------------------- the winner, watched


def watch_winner(found: SearchResult, run: Run) -> Watch | None:
    """Watch what would be recommended, where that was asked for."""
    best_leader, seconds = found.state.recommended, run.options.soak
    if not seconds or best_leader is None or run.interrupted():
        return None
    run.observe(Began(text=f"watching the winner for {seconds:.0f} s"))
    if not run.executor.seats:  # all were lost
        return None
    return soak(run, run.records[best_leader.number], seat=run.executor.seats[0], seconds=seconds)


def soak(run: Run, confirmed: TrialRecord, *, seat: str, seconds: float) -> Watch | None:
    """Train one process of the winner without a pause, and keep its slices as a trial; None where nothing was seen."""
    trial = run.new_trial(Phase.SOAK, Configuration(confirmed.configuration))
    run.deadline, failure = Deadline(clock=run.clock), None  # the search's is over
    process = MeasuredProcess(run=run, trial=trial, seat=seat, start_timeout=max(BASELINE_SECONDS, seconds))
    try:
        process.start()
        ends, length = run.clock() + seconds, slice_length(process.warm)
        while run.clock() < ends and not run.interrupted():
            count = max(1, min(SLICES_AT_ONCE, int((ends - run.clock()) / length)))
            trial.add_slices(process.slices_without_pause(length, count))
        process.close(0.0)
    except TrialFailed as failed:
        failure = failed
    finally:
        process.kill()
    record = run.save_record(trial.record(Outcome.OK, failure=failure))
    if isinstance(failure, DeviceUnavailable) or (failure is None and not trial.slices):
        return None
    return Watch(
        seconds=math.fsum(timed.seconds for timed in trial.slices),
        throughput=record.throughput,
        checks=_checks(trial, confirmed, run.limits, record.throughput, run.records.values()),
        failure="" if failure is None else failure.reason or str(failure.outcome),
    )


def _checks(
    trial: Trial, confirmed: TrialRecord, limits: Limits, throughput: Interval | None, searched: Collection[TrialRecord]
) -> tuple[Check, ...]:
    if throughput is None:
        return ()
    found = []
    for of, limit in ((HOST_GROWTH, limits.host_bytes), (DEVICE_GROWTH, limits.device_bytes)):
        samples = memory_samples(trial.slices, of)
        if samples and limit:
            found.append(
                check_memory_growth(
                    [samples],
                    memory_of(confirmed, of, candidate=False, searched=searched),
                    name=of,
                    examples_per_second=throughput.value,
                    held_bytes=round(max(held for _, held in samples)),
                    limit_bytes=limit,
                    margin=limits.margin,
                )
            )
    steps = int(trial.configuration["steps_per_execution"])
    calls = [call_seconds(timed, steps) for timed in trial.slices]
    boundary = trial.epoch_cost.seconds or 0.0
    found.append(check_hangs(calls, calls[:1], boundary_seconds=boundary))
    return tuple(found)


def note_profiles(run: Run) -> None:
    """Read what trials have profiled, and judge them anew by it."""
    folders = {number: run.directory.trial_directory(number) / PROFILE_FOLDER for number in run.records}
    known = [number for number, record in run.records.items() if record.profile is not None and record.profile.steps]
    profiled = [number for number, folder in folders.items() if folder.is_dir() and number not in known]
    read = read_profiles([folders[number] for number in profiled])
    for number, profile in zip(profiled, read, strict=True):
        record = run.records[number]
        record = record.model_copy(update={"profile": profile})
        if record.outcome is Outcome.OK:
            record = record.model_copy(update={"bottleneck": limit_of(record)})
        run.records[number] = record
        run.directory.write_trial(run.records[number])


def read_profiles(folders: Sequence[Path]) -> list[Profile]:
    """Return the profiles in these folders, each with a reason where it cannot be read."""
    if not folders:
        return []
    if importlib.util.find_spec("xprof") is None:
        return [Profile(reason=NOT_INSTALLED)] * len(folders)
    command = [sys.executable, "-P", "-m", "autotune.report.xprof_reader"]
    given = json.dumps([str(folder.resolve()) for folder in folders])
    try:
        ended = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=PROFILE_READ_SECONDS, check=True
        )
        read = [Profile.model_validate_json(line) for line in ended.stdout.splitlines()]
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        return [Profile(reason=f"xprof failed: {type(error).__name__}")] * len(folders)
    missing = len(folders) - len(read)
    return [*read, *[Profile(reason="xprof ended before it")] * missing][: len(folders)]
