"""Check a recipe's claim on this machine: confirm its configuration again, and compare with the claim."""

from __future__ import annotations

import math
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TypeVar

from autotune.data.errors import NoStableConfigurationError, RecipeError, TrialProcessError, TuningInterruptedError
from autotune.data.facts import Trains, WorkloadFacts, WorkloadReference
from autotune.data.figures import Interval, LogInterval
from autotune.data.options import MEMORY_MARGIN, MIN_GAIN, VERIFY_SECONDS, Options
from autotune.data.printable import first_line, mask_arguments
from autotune.data.record import Outcome, Pairing, Phase, TrialRecord
from autotune.data.run_directory import RunDirectory
from autotune.machine.device_locks import HOST_CPU, lock_devices
from autotune.machine.fingerprint import fingerprint, require_linux
from autotune.machine.gpu import visible_gpus
from autotune.recipe.compiled import ConfirmedCompilations, load_compiled
from autotune.recipe.recipe import Recipe, find_recipe
from autotune.runtime.executor import TrialFailed, WarmUp
from autotune.runtime.local import LocalExecutor
from autotune.script.loading import refuse_while_loading
from autotune.script.workload import Workload
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS
from autotune.stats.deciding import ClaimResult, judge_claim
from autotune.stats.intervals import CONFIDENCE, claim_interval, process_prior
from autotune.tuning import costs
from autotune.tuning.confirmation import BASELINE_FAILURES, FreshPairs, LeaderTrials, SlicePlan
from autotune.tuning.events import Notice, Observer, count_interruptions, silent
from autotune.tuning.rules import Limits, checks_of
from autotune.tuning.run import CLOSING_SECONDS, Interrupted, Invocation, Run, TimeIsUp
from autotune.tuning.run_setup import limits_of, open_run, prepare_script, reference_to
from autotune.tuning.seat import Seat
from autotune.tuning.trial import now_utc

DEFAULT_BUDGET = f"{VERIFY_SECONDS:.0f}s"
VERIFY_MIN_PROCESSES, VERIFY_MAX_PROCESSES = 4, 16  # a side: fewer tell next to nothing, more are not measured
LARGER = 2.0  # ratio of the budget that is advised to one that was too small


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The finding of a verification."""

    finding: ClaimResult
    claimed: Interval | None  # the recipe's speed-up; None where it claims none
    measured: Interval | None  # the speed-up here and now; None where no interval came about
    instances: int  # fresh pairs of processes that it rests on
    reason: str  # of the finding, in one sentence


def verify(
    recipe: Recipe | str | PathLike[str],
    workload: Workload | str | PathLike[str],
    *,
    args: Sequence[str] | None = None,
    budget: float | str = DEFAULT_BUDGET,
    seed: int = 0,
    memory_margin: float = MEMORY_MARGIN,
    observe: Observer = silent,
) -> Verification:
    """Measure a recipe against its baseline again, on this machine, and say whether its claim holds.

    Args:
        recipe: The recipe; or the path of one, of a run, or of a folder of recipes, of which the one of this kind of
            machine is taken, or else the nearest.
        workload: The workload, as for `autotune.tune`.
        args: `sys.argv[1:]` of the workload's file; those it was tuned with when None.
        budget: Wall-clock time for everything, in seconds or as text.
        seed: Of the order in which slices are taken.
        memory_margin: As for `autotune.tune`: the share of memory that must stay free.
        observe: Receives each event, see `autotune.tuning.events`.

    Returns:
        The finding. Nothing is written but to a temporary directory, which stays only where the finding's reason, or
        an error, names a place in it.

    Raises:
        InputError: Recipe or workload cannot be used, or do not belong together.
        NoStableConfigurationError: The baseline itself fails.
        TuningInterruptedError: Interrupted before two fresh processes a side were measured.
    """
    if isinstance(recipe, Recipe):
        loaded = recipe
    else:
        loaded = find_recipe(Path(recipe), lambda text: observe(Notice(text=text)), nearest=True).recipe
    script = loaded.workload.script
    options = Options(
        objective=loaded.evidence.objective,
        global_batch=loaded.baseline.get("global_batch"),  # type: ignore[arg-type]  # checked there
        skip_cells=None if script is None else script.skip_cells,
        fit=script.fit if script is not None and script.trains is Trains.FIT else None,
        budget=budget,  # type: ignore[arg-type]  # text too
        seed=seed,
        memory_margin=memory_margin,
    )
    reference = reference_to(workload, loaded.workload.arguments if args is None else args)
    by_object = isinstance(workload, Workload) and workload.name is None
    return run_in_temporary_directory(
        reference,
        options,
        observe,
        lambda invocation: verify_with(invocation, loaded, found_by_object=by_object),
        reason_of=lambda verification: verification.reason,
    )


T = TypeVar("T")


def run_in_temporary_directory(
    reference: WorkloadReference,
    options: Options,
    observe: Observer,
    measure: Callable[[Invocation], T],
    *,
    reason_of: Callable[[T], str],
) -> T:
    """Measure on this machine in a temporary run directory, and return what was found.

    The directory stays only where the reason of what was found, or an error, names a place in it.
    """
    began = time.monotonic()
    refuse_while_loading()
    require_linux()
    machine = fingerprint()

    def say(text: str) -> None:
        observe(Notice(text=text))

    folder = Path(tempfile.mkdtemp(prefix="autotune-verify-")).resolve()
    directory, reported = RunDirectory(folder), ""
    try:
        directory.create()
        with (
            prepare_script(reference, directory, options, say) as reference,
            lock_devices(directory.path, [gpu.uuid for gpu in visible_gpus()] or [HOST_CPU], say=say),
            LocalExecutor(reference, logs=directory.log_directory, import_seconds=options.budget) as processes,
        ):
            found = measure(
                Invocation(
                    executor=processes,
                    directory=directory,
                    machine=machine,
                    limits=limits_of(machine, options.memory_margin),
                    reference=reference,
                    options=options,
                    clock=lambda: time.monotonic() - began,
                    observe=observe,
                )
            )
        reported = reason_of(found)
        return found
    except (NoStableConfigurationError, TrialProcessError) as error:
        reported = str(error)
        raise
    finally:
        directory.release()
        if str(folder) not in reported:  # else the user was shown a log in it
            shutil.rmtree(folder, ignore_errors=True)


def verify_with(invocation: Invocation, recipe: Recipe, *, found_by_object: bool = False) -> Verification:
    """Verify on real or simulated trials."""
    # A workload found by object has the name of the module where it was found first, which may have imported it.
    observe = invocation.observe
    for difference in recipe.machine.differences(invocation.machine):
        observe(Notice(text=f"the recipe was measured on another machine: {difference}"))
    with count_interruptions(observe, "stopping; the claim is judged by the measurements so far") as interruptions:

        def check(facts: WorkloadFacts) -> None:
            _compare_workloads(recipe, facts, invocation, may_be_imported=found_by_object)

        seat = open_run(invocation, interruptions, check)
        interruptions.answerable = True
        run = seat.run
        _refuse_another_baseline(recipe, run.baseline)
        seat.end_baseline()
        if not recipe.changes:
            return Verification(
                finding=ClaimResult.HOLDS,
                claimed=None,
                measured=None,
                instances=0,
                reason="the recipe is the baseline, so there is no claim to check",
            )

        def say(text: str) -> None:
            observe(Notice(text=text))

        keeps = run.executor.keeps_files  # else the long training compiles, too
        if keeps and (carried := load_compiled(recipe, recipe._folder, invocation.machine, say)) is not None:
            run.confirmed = ConfirmedCompilations(say)
            side = Configuration(recipe.configuration)
            run.confirmed.carry(side, carried, recipe.evidence.compile_seconds or 0.0)
        until = run.options.budget - CLOSING_SECONDS
        search_record = _make_search_record(recipe, seat.baseline.warm)
        confirmation, baseline_failure = measure_pairs(search_record, seat, until=until)
        if run.interrupted() and len(confirmation.measured) < 2 and confirmation.failure is None:
            raise TuningInterruptedError("interrupted before the claim was judged")
        now = measured_claim(confirmation, run)
        failed = _find_failure(confirmation, run.limits)
        if failed is not None:
            place = run.directory.trial_directory(confirmation.trial.number)
            found, reason = ClaimResult.UNSTABLE, f"{failed} (see {place})"
        elif baseline_failure and now is None:
            place = run.directory.trial_directory(confirmation.reference.number)
            found, reason = ClaimResult.UNDECIDED, f"the baseline kept failing: {baseline_failure} (see {place})"
        else:
            found, reason = _judge(recipe, now, run.options.budget)
            memory = confirmation.why_memory_unclear(run)
            if found is ClaimResult.HOLDS and memory:
                reason = f"too few slices to tell whether it leaks memory ({memory}); give a larger --budget"
                found = ClaimResult.UNDECIDED
        return Verification(
            finding=found,
            claimed=recipe.evidence.speedup,
            measured=None if now is None else now.ratio,
            instances=len(confirmation.measured),
            reason=reason,
        )


def measure_pairs(search_record: TrialRecord, seat: Seat, *, until: float) -> tuple[LeaderTrials, str]:
    """Measure as many fresh pairs as there is time for; also return why the baseline kept failing, if it did.

    `search_record` is what a search would know of the configuration.
    """
    run = seat.run
    records = [run.records[0], search_record]
    confirmation = LeaderTrials(
        reference=run.new_trial(Phase.CONFIRM, run.baseline),
        trial=run.new_trial(Phase.CONFIRM, Configuration(search_record.configuration)),
        best_leader=None,
        search_record=search_record,
    )
    timeout = costs.trial_timeout(
        run.options.budget, first_step=search_record.start_seconds, ready=seat.baseline.warm.ready_seconds
    )
    pairs, failures, why = FreshPairs(run, timeout=timeout), 0, ""
    expected = costs.pair_seconds(records)
    while (
        len(confirmation.measured) < VERIFY_MAX_PROCESSES
        and confirmation.failure is None
        and failures < BASELINE_FAILURES
        and until - run.clock() >= expected
    ):
        try:
            pairs.measure(confirmation, SlicePlan(seconds=costs.slices_seconds(records)), seat=seat.name)
            failures = 0
        except TrialFailed as failure:
            failures += 1
            why = first_line(failure.reason) or str(failure.outcome)
            run.observe(Notice(text=f"the baseline failed in a fresh process ({why}); this pair is not counted"))
        except (TimeIsUp, Interrupted):
            break
        if taken := confirmation.trial.instance_seconds:
            expected = sum(taken) / len(taken)
    if run.model_error is not None:
        raise run.model_error
    if confirmation.reference.slices:
        run.save_record(confirmation.reference.record(Outcome.OK), announce=False)
    now = measured_claim(confirmation, run)  # over processes, not over all slices
    run.save_record(confirmation.record().model_copy(update={"speedup": now and now.ratio}))
    return confirmation, why if failures == BASELINE_FAILURES else ""


def _compare_workloads(recipe: Recipe, facts: WorkloadFacts, invocation: Invocation, *, may_be_imported: bool) -> None:
    """Notify of a workload that is not as it was. Raises RecipeError."""
    made_for, reference = recipe.workload, invocation.reference
    if reference.args or made_for.args:
        given = mask_arguments(reference.args)
        text = f"the file's arguments are {shlex.join(given) or 'none'}"
        tuned = "as the recipe says" if given == made_for.args else shlex.join(made_for.args) or "none"
        invocation.observe(Notice(text=f"{text}; it was tuned with {tuned}"))
    if facts.keras is not made_for.keras:
        raise RecipeError(
            f"{reference} trains with {facts.keras.label}, but the recipe was tuned with {made_for.keras.label}"
        )
    if facts.fingerprint == made_for.fingerprint:
        return
    if facts.name == made_for.name:
        changed = "the file changed after the recipe was made"
    elif may_be_imported:
        changed = f"its name here is {facts.name!r}, from its module; the recipe calls it {made_for.name!r}"
    else:
        raise RecipeError(
            f"{reference} is the workload {facts.name!r}, but the recipe was made for {made_for.name!r}",
            hint=f"Give the workload that the recipe was made for. If this is the same training under another name, "
            f"set Workload(name={made_for.name!r}).",
        )
    text = f"{reference}: {changed}; if the training changed, run `autotune tune` again"
    invocation.observe(Notice(text=text))


def _refuse_another_baseline(recipe: Recipe, baseline: Configuration) -> None:
    claimed_against = Configuration(recipe.baseline)
    if "strategy" in claimed_against and "strategy" not in baseline:
        raise RecipeError("the recipe was measured with several devices per trial; here a trial has one")
    own = {name: value for name, value in baseline.items() if name in claimed_against or not KNOBS[name].of_workload}
    if claimed_against != (baseline := Configuration(own)):
        raise RecipeError(
            "the recipe's claim is against another baseline: "
            f"{claimed_against.describe(baseline)} there, {baseline.describe(claimed_against)} here"
        )


def _make_search_record(recipe: Recipe, warm: WarmUp) -> TrialRecord:
    """Return a record as a search would make it: how long its processes take to start, and whether two fit."""
    evidence = recipe.evidence
    longer = (evidence.compile_seconds or 0.0) - (evidence.baseline_compile_seconds or 0.0)
    return TrialRecord(
        trial=1,
        phase=Phase.SEARCH,
        configuration=dict(recipe.configuration),
        outcome=Outcome.OK,
        started_at=now_utc(),
        seconds=0.0,
        first_step_seconds=warm.first_step_seconds + max(0.0, longer),
        warmup_seconds=warm.ready.warmup_seconds,
        input_wait_fraction=evidence.input_wait_fraction,  # slices are as long as the claim's
        pairing=None if evidence.confirmation.pairing is None else Pairing(evidence.confirmation.pairing),
    )


def measured_claim(leader: LeaderTrials, run: Run, *, confidence: float = CONFIDENCE) -> LogInterval | None:
    """Return the logarithm of the speed-up over processes; None before the second."""
    instances = leader.instances
    if len(instances) < 2:
        return None
    prior = process_prior([[values] for values in instances], rounds=min(map(len, instances)))
    different_template = run.executor.needs_different_template(leader.trial.configuration, run.baseline)
    return claim_interval(
        instances,
        prior=prior,
        confidence=confidence,
        different_template=different_template,
        compilations=leader.baseline_compilations,
    )


def _find_failure(confirmation: LeaderTrials, limits: Limits) -> str | None:
    """Return the failure or the failed stability check; None where the speed-up decides."""
    failure = confirmation.failure
    if failure is not None:
        why = first_line(failure.reason)
        return f"it failed ({failure.outcome})" + (f": {why}" if why else "")
    if len(confirmation.measured) < 2:
        return None
    checks = checks_of(confirmation.record(), confirmation.reference.record(Outcome.OK), limits)
    broken = [f"{check.name}: {check.detail}" for check in checks if not check.passed]
    return f"it failed a stability check: {'; '.join(broken)}" if broken else None


def _judge(recipe: Recipe, now: LogInterval | None, budget: float) -> tuple[ClaimResult, str]:
    """Judge the claim by the speed-up, and say why."""
    evidence = recipe.evidence
    counts = min(evidence.min_gain, MIN_GAIN)  # of a gain that has to be large, no large part may be lost
    more = f"give --budget {math.ceil(LARGER * budget / 10) * 10}s"
    if now is None or not math.isfinite(now.half_width):
        return ClaimResult.UNDECIDED, f"there was time for fewer than two fresh processes a side; {more}"
    claim = evidence.speedup.log
    found = judge_claim(claim, now, min_gain=counts)
    if found is ClaimResult.HOLDS:
        reason = "both are gains, and they agree within their intervals, or the gain here is larger"
    elif found is ClaimResult.WEAKER:
        reason = "this measurement shows a gain over the baseline, but clearly less than claimed"
    elif found is ClaimResult.GONE:
        reason = "this measurement shows no gain over the baseline, which is clearly less than claimed"
    elif now.low > 0:
        reason = f"faster than the baseline here, but too uncertain to check the claim; {more}"
    elif claim.half_width > now.half_width:
        reason = (
            "this measurement shows no gain, but the claim's interval is too wide to be refuted; tune again for longer"
        )
    else:
        reason = f"this measurement shows no gain, but does not refute the claim; {more}"
    return found, reason
