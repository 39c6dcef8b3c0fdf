"""One run's phases, in order: baseline, search, numerics, confirmation, recipe."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.errors import BudgetError, TuningInterruptedError
from autotune.machine import Machine, available_cores
from autotune.measure.numerics import BatchLosses
from autotune.measure.stability import Check
from autotune.recipe.recipe import Recipe, RecipeWorkload
from autotune.run_directory import RunDirectory, RunRecord, SearchSpaceRecord, WorkloadRecord
from autotune.space.configuration import Configuration, baseline_configuration
from autotune.space.knobs import Device
from autotune.space.search_space import ResolvedSpace, SearchSpace, find_search_space
from autotune.study.batch_loss import measure_batch_losses
from autotune.study.confirmation import Confirmer
from autotune.study.confirmed import Limits, Result
from autotune.study.options import Options
from autotune.study.parity import Parity, plain, varies_what_is_learned
from autotune.study.plan import (
    CONFIRMATION_SHARE,
    LEAST_MEASURED,
    MOST_NUMERICS_SHARE,
    Plan,
    baseline_timeout,
    plan_run,
)
from autotune.study.progress import Notice, Observer, PhaseBegan
from autotune.study.recommendation import recommend
from autotune.study.resuming import Earlier, refuse_another_question, refuse_another_workload
from autotune.study.run import Run
from autotune.study.sampler import Sampler
from autotune.study.search import Search
from autotune.study.side_by_side import SideBySide
from autotune.study.slicing import shortest_taken
from autotune.study.surroundings import as_imported, instabilities, oddities, refuse_knobs_that_cannot_act
from autotune.study.trainings import Trainings
from autotune.trial.live import Clock, Trials, WarmUp
from autotune.trial.record import Outcome, Phase, Slice, TrialRecord
from autotune.workload import WorkloadFacts, WorkloadReference


@dataclass(frozen=True, kw_only=True)
class Learning:
    """What trainings for their losses alone showed: by configuration, and by batch size."""

    parity: Mapping[Configuration, Check]
    batches: Mapping[int, BatchLosses]


SEARCH_IS_OVER = (
    "the search's time was over when the run was stopped: what it had found is confirmed in the rest; for more trials, "
    "give --resume a --budget of its own"
)
DEFAULT_SPACE = {Device.CPU: "quick", Device.GPU: "gpu"}


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
    known = [] if earlier is None else earlier.trials()
    with _interruptions(observe) as interruptions, _stopped_rather_than_refused(interruptions, directory):
        facts, import_seconds = _open(trials, clock, observe, earlier)
        run = Run(
            directory=directory,
            trials=trials,
            clock=clock,
            observe=observe,
            interruptions=interruptions,
            rng=random.Random(options.seed),
            baseline=baseline_of(facts, reference, Device.GPU if machine.gpus else Device.CPU, observe),
            records={} if earlier is None else dict(earlier.records),
            numbers=itertools.count(0 if earlier is None else earlier.next_number),
            spent_before=spent_before,
        )
        beside = SideBySide(run, bracketed=options.pairing == "bracketed")
        warm = beside.start_baseline(baseline_timeout(options.budget), known[0] if known else None)
        device = Device.GPU if warm.started.gpus else Device.CPU
        tell_what_is_odd(facts, warm, device, beside.baseline.slices, observe)
        written = written or find_search_space(DEFAULT_SPACE[device])
        space = _resolved(written, run.baseline, device, warm, facts, options)
        if earlier is not None:
            refuse_another_question(earlier, baseline=run.baseline, choices=space.choices)
        if known:
            beside.keep_baseline()
        # Who names a budget for the rest wants a search as well, and is told where it is too small for one.
        found_before = earlier is not None and spent_before == 0 and earlier.found_something
        plan = _planned(run, warm, space, import_seconds, options, searched=found_before)
        if plan.search_ends <= clock():
            observe(Notice(text=SEARCH_IS_OVER))
        record = _completed_run(run, facts, reference, warm, device, machine, written, space, options)
        directory.write_run(record)
        sampler = Sampler(space, file=directory.study_file, name=facts.name, seed=options.seed)
        search = Search(run, beside, space, sampler, plan, most_trials=options.trials, earlier=known[1:])
        search.search()
        beside.end_baseline()
        finalists, learning = _losses(search.finalists(), run, plan, options)
        trials.retire(0)
        searched = list(run.records.values())
        result = _confirm(finalists, learning.parity, run, plan, limits, options)
        recipe = _recipe(result, searched, learning, run, record, options)
        recipe.save(directory.recipe_file)
        return recipe


@contextlib.contextmanager
def _stopped_rather_than_refused(interruptions: Callable[[], int], directory: RunDirectory) -> Iterator[None]:
    """Who has asked to stop is not told that the budget is too small for going on."""
    try:
        yield
    except BudgetError as refused:
        if interruptions() > 0:
            raise TuningInterruptedError(
                "interrupted before the search began",
                hint=f"--resume {directory.path} goes on with it. Its budget was too small as well: {refused.hint}",
            ) from refused
        raise


def _open(
    trials: Trials, clock: Clock, observe: Observer, earlier: Earlier | None
) -> tuple[WorkloadFacts, float]:
    """Import the workload: what it is, and the seconds that took."""
    observe(PhaseBegan(phase=Phase.BASELINE, ends=None, detail="importing the workload"))
    opening = clock()
    facts = trials.open()
    import_seconds = clock() - opening
    if earlier is not None:
        refuse_another_workload(earlier, fingerprint=facts.fingerprint)
    tell_isolation(trials, observe)
    return facts, import_seconds


def _completed_run(
    run: Run,
    facts: WorkloadFacts,
    reference: WorkloadReference,
    warm: WarmUp,
    device: Device,
    machine: Machine,
    written: SearchSpace,
    space: ResolvedSpace,
    options: Options,
) -> RunRecord:
    """run.json with what is known only once the baseline is warm."""
    return run.directory.read_run().model_copy(
        update={
            "machine": _completed(machine, warm, device, run.observe),
            "workload": _workload_record(facts, reference, warm, device),
            "search_space": SearchSpaceRecord(
                source=written.source, choices=dict(space.choices), left_out=dict(space.left_out)
            ),
            "baseline": dict(run.baseline),
            "isolation": isolation_of(run.trials, options.isolation),
        }
    )


def isolation_of(trials: Trials, asked_for: str) -> str:
    """How trials are kept apart: as was asked for, unless importing the workload leaves no choice."""
    return str(getattr(trials, "isolation", asked_for))


def _resolved(
    written: SearchSpace,
    baseline: Configuration,
    device: Device,
    warm: WarmUp,
    facts: WorkloadFacts,
    options: Options,
) -> ResolvedSpace:
    return written.resolve(
        baseline=baseline,
        device=device,
        cores=available_cores(),
        examples=warm.started.examples,
        dataset_takes_config=facts.dataset_takes_config,
        largest_batch=options.max_batch,
        fixed_batch=options.fixed_batch,
        set_by_dataset=warm.started.set_by_dataset,
    )


def _planned(
    run: Run, warm: WarmUp, space: ResolvedSpace, import_seconds: float, options: Options, *, searched: bool
) -> Plan:
    forked = isolation_of(run.trials, options.isolation) == "template"
    return plan_run(
        options.budget,
        ready_at=run.clock(),
        first_step=warm.first_step_seconds,
        ready=warm.ready_seconds,
        import_seconds=import_seconds if forked else 0.0,  # else each start has its own
        slice_seconds=shortest_taken(warm, measured=LEAST_MEASURED),
        bracketed=options.pairing == "bracketed",
        numerics=varies_what_is_learned(space),
        trial_timeout=options.trial_timeout,
        soak=options.soak,
        searched=searched,
    )


def baseline_of(
    facts: WorkloadFacts, reference: WorkloadReference, device: Device, observe: Observer
) -> Configuration:
    """What the user would run anyway, as far as can be told before anything was built."""
    where = str(reference)
    refuse_knobs_that_cannot_act(facts, where=where)
    named = baseline_configuration(
        facts.batch_size, facts.baseline, device, where=f"{where}: Workload(baseline=…)"
    )
    baseline, notices = as_imported(named, facts, where=where)
    for text in notices:
        observe(Notice(text=text))
    return baseline


def tell_what_is_odd(
    facts: WorkloadFacts, warm: WarmUp, device: Device, slices: Sequence[Slice], observe: Observer
) -> None:
    """A word for each thing of the baseline that the timing leaves out, or that makes it unstable."""
    for text in (*oddities(facts, warm, device), *instabilities(slices)):
        observe(Notice(text=text))


def tell_isolation(trials: Trials, observe: Observer) -> None:
    """A word where importing the user's file starts what no fork survives."""
    started = trials.started_by_import
    if started is not None:
        what = {"runtime": "TensorFlow's runtime", "cuda": "CUDA", "threads": "threads"}[started]
        move = "whatever starts them" if started == "threads" else "tensors, datasets and device queries"
        observe(
            Notice(
                text=f"importing the workload's file starts {what}, so every trial gets a fresh interpreter, "
                f"which costs an import each; move {move} into functions to avoid it"
            )
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


def _losses(
    finalists: Sequence[TrialRecord], run: Run, plan: Plan, options: Options
) -> tuple[Sequence[TrialRecord], Learning]:
    """The finalists that learn as they should, and what was found of them."""
    ends = min(plan.numerics_ends, run.clock() + MOST_NUMERICS_SHARE * options.budget)
    asked = [each for each in finalists if Parity.asks(Configuration(each.configuration), run.baseline)]
    if asked:
        run.observe(PhaseBegan(phase=Phase.CONFIRM, ends=ends, detail="does it still learn?"))
    with Trainings(run, ends=ends) as trainings:
        kept, parity = Parity(trainings).sift(finalists, wanted=plan.finalists)
        batches = measure_batch_losses(trainings, kept[: plan.finalists])
    return kept, Learning(parity=parity, batches=batches)


def _confirm(
    shortlist: Sequence[TrialRecord],
    numerics: Mapping[Configuration, Check],
    run: Run,
    plan: Plan,
    limits: Limits,
    options: Options,
) -> Result | None:
    """Confirm the finalists; None when there is nothing to confirm."""
    if not shortlist:
        refused = any(each.trial and each.outcome is Outcome.UNSTABLE for each in run.records.values())
        if run.interrupted() and not refused:
            raise TuningInterruptedError(
                "interrupted before any configuration was measured to be faster than the baseline",
                hint=f"What was measured is in {run.directory.path}: autotune history {run.directory.path}; "
                f"--resume {run.directory.path} goes on with it.",
            )
        return None
    if run.interrupted():  # who stops the search wants an answer soon; else time that it left is used
        plan = replace(plan, ends=min(plan.ends, run.clock() + CONFIRMATION_SHARE * options.budget), soak=0.0)
    return Confirmer(
        run,
        plan,
        limits,
        min_gain=options.min_gain,
        numerics=numerics,
        plain=plain(run.baseline, run.baseline),
    ).confirm(shortlist)


def _recipe(
    result: Result | None,
    searched: Sequence[TrialRecord],
    learning: Learning,
    run: Run,
    first: RunRecord,
    options: Options,
) -> Recipe:
    assert first.workload is not None and first.search_space is not None
    workload = first.workload
    return recommend(
        result=result,
        search_records=searched,
        batch_losses=learning.batches,
        baseline=run.baseline,
        machine=first.machine,
        workload=RecipeWorkload(
            name=workload.name,
            fingerprint=workload.fingerprint,
            batched=workload.batched,
            drop_remainder=workload.drop_remainder,
            takes_config=workload.takes_config,
            examples=workload.examples,
            batch_ranks=workload.batch_ranks,
        ),
        provenance={
            "run": run.directory.name,
            "search_space": first.search_space.source,
            "trials": len(run.records),
            "seed": options.seed,
            "budget_seconds": options.budget,
            "spent_seconds": run.clock(),
        },
        min_gain=options.min_gain,
    )


@contextlib.contextmanager
def _interruptions(observe: Observer) -> Iterator[Callable[[], int]]:
    """Counts Ctrl-C: the first asks the run to wind up, the second raises `KeyboardInterrupt` as usual.

    The first is acknowledged at once, by a thread: a signal's handler may have come in the midst of printing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0  # signals reach the main thread only; its owner decides
        return
    count = 0
    reading, writing = os.pipe()

    def acknowledge() -> None:
        if os.read(reading, 1) == b"!":
            observe(
                Notice(
                    text="winding up: what was found so far is confirmed and written; Ctrl-C again stops at once"
                )
            )

    def note(number: int, frame: object) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        os.write(writing, b"!")

    thread = threading.Thread(target=acknowledge, daemon=True)
    thread.start()
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: count
    finally:
        signal.signal(signal.SIGINT, before)
        os.write(writing, b".")
        thread.join()
        os.close(reading)
        os.close(writing)
