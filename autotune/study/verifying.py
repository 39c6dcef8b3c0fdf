"""Does a recipe's claim hold here and now? The confirmation again, of one configuration, held against the claim."""

from __future__ import annotations

import math
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal

from autotune.errors import NoStableConfigurationError, RecipeError, TrialProcessError
from autotune.machine import Machine, fingerprint, require_linux
from autotune.measure.deciding import MIN_GAIN, Finding, Shortfall, Verdict, finding
from autotune.measure.intervals import LogInterval, log_interval
from autotune.measure.stability import MEMORY_MARGIN
from autotune.printable import first_line
from autotune.recipe.recipe import Evidence, Recipe
from autotune.run_directory import RunDirectory
from autotune.space.configuration import Configuration
from autotune.space.knobs import Device
from autotune.study.confirmation import GROUPS, Confirmer
from autotune.study.confirmed import Confirmed, Limits, Result
from autotune.study.options import Options, seconds_of
from autotune.study.phases import baseline_of, isolation_of, tell_isolation, tell_what_is_odd
from autotune.study.plan import CLOSING_SECONDS, LEAST_MEASURED, Plan, baseline_timeout
from autotune.study.progress import Notice, Observer, PhaseBegan, silent
from autotune.study.run import Run
from autotune.study.running import now_utc
from autotune.study.side_by_side import SideBySide
from autotune.study.slicing import shortest_taken
from autotune.study.tune import limits_of, reference_to
from autotune.trial.live import Clock, Trials, WarmUp
from autotune.trial.process import TrialProcesses
from autotune.trial.record import Interval, Outcome, Pairing, Phase, TrialRecord
from autotune.workload import Workload, WorkloadFacts, WorkloadReference, refuse_while_loading

DEFAULT_BUDGET = "100s"
CONTINUOUS_SHARE = 0.25
"""Of the budget: for a continuous run, where the claim comes from one."""
CONFIRMATION_SHARE_HERE = 0.75
"""A continuous run included. The rest is for importing the workload and the baseline's start; nothing is searched."""
LARGER = 2.0
"""A budget that is advised where nothing tells how much would do: so many times the one that did not."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found of a claim.

    Args:
        finding: Whether it holds.
        claimed: The recipe's speed-up; None where it claims none.
        measured: The speed-up here and now; None where no interval came about.
        instances: Fresh pairs of processes that it rests on.
        reason: Why, in one sentence.
    """

    finding: Finding
    claimed: Interval | None
    measured: Interval | None
    instances: int
    reason: str


def verify(
    recipe: Recipe | str | PathLike[str],
    workload: Workload | str | PathLike[str],
    *,
    budget: float | str = DEFAULT_BUDGET,
    seed: int = 0,
    isolation: Literal["template", "spawn"] = "template",
    memory_margin: float = MEMORY_MARGIN,
    observe: Observer = silent,
) -> Verification:
    """Measure a recipe against its baseline again, on this machine, and say whether its claim holds.

    Args:
        recipe: The recipe, or the path of one.
        workload: What is trained, as for `autotune.tune`.
        budget: Wall-clock time for everything, in seconds or as text.
        seed: Of the order in which slices are taken.
        isolation: As for `autotune.tune`: `spawn` where the workload trains in fresh interpreters only.
        memory_margin: As for `autotune.tune`: the share of memory that must stay free.
        observe: Is told what happens.

    Returns:
        The finding. Nothing is written but to a temporary directory, which stays only where the finding's reason, or
        an error, names a place in it.

    Raises:
        InputError: Recipe or workload cannot be used, or do not belong together.
        NoStableConfigurationError: The baseline itself fails.
    """
    began = time.monotonic()
    refuse_while_loading()
    require_linux()
    loaded = recipe if isinstance(recipe, Recipe) else Recipe.load(Path(recipe))
    options = Options(
        budget=seconds_of("budget", budget), seed=seed, isolation=isolation, memory_margin=memory_margin
    )
    reference = reference_to(workload)
    machine = fingerprint()

    def verified(directory: RunDirectory) -> Verification:
        processes = TrialProcesses(reference, logs=directory.log_directory, isolation=options.isolation)
        with processes as trials:
            return verify_with(
                trials,
                loaded,
                directory=directory,
                machine=machine,
                limits=limits_of(machine, options.memory_margin),
                reference=reference,
                found_by_object=isinstance(workload, Workload) and workload.name is None,
                budget=options.budget,
                seed=options.seed,
                clock=lambda: time.monotonic() - began,
                observe=observe,
            )

    return _in_temporary_directory(verified)


def _in_temporary_directory(verified: Callable[[RunDirectory], Verification]) -> Verification:
    """What comes of a directory that is gone afterwards, unless the user was told of a log in it."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-verify-")).resolve()
    directory, told = RunDirectory(folder), ""
    try:
        directory.create()
        verification = verified(directory)
        told = verification.reason
        return verification
    except (NoStableConfigurationError, TrialProcessError) as error:
        told = str(error)
        raise
    finally:
        directory.release()
        if str(folder) not in told:
            shutil.rmtree(folder, ignore_errors=True)


def verify_with(
    trials: Trials,
    recipe: Recipe,
    *,
    directory: RunDirectory,
    machine: Machine,
    limits: Limits,
    reference: WorkloadReference,
    budget: float,
    seed: int,
    clock: Clock,
    observe: Observer,
    found_by_object: bool = False,
) -> Verification:
    """The same on real or simulated trials.

    `found_by_object` says that the workload was handed over as an object without a name of its own: name and source
    are those of the module that it was found in first, which may have imported it from the recipe's.
    """
    for difference in recipe.machine.differences(machine):
        observe(Notice(text=f"the recipe was measured on another machine: {difference}"))
    observe(PhaseBegan(phase=Phase.BASELINE, ends=None, detail="importing the workload"))
    opening = clock()
    facts = trials.open()
    import_seconds = clock() - opening
    tell_isolation(trials, observe)
    _compare_workloads(recipe, facts, reference, observe, may_be_imported=found_by_object)
    run = Run(
        directory=directory,
        trials=trials,
        clock=clock,
        observe=observe,
        interruptions=lambda: 0,
        rng=random.Random(seed),
        baseline=baseline_of(facts, reference, Device.GPU if machine.gpus else Device.CPU, observe),
    )
    beside = SideBySide(run)
    warm = beside.start_baseline(baseline_timeout(budget))
    device = Device.GPU if warm.started.gpus else Device.CPU
    tell_what_is_odd(facts, warm, device, beside.baseline.slices, observe)
    _refuse_another_baseline(recipe, run.baseline)
    beside.end_baseline()
    trials.retire(0)
    if not recipe.changes:
        return Verification(
            finding=Finding.HOLDS,
            claimed=None,
            measured=None,
            instances=0,
            reason="the recipe is the baseline, and claims nothing",
        )
    forked = isolation_of(trials, "template") == "template"
    plan = _plan(budget, warm, import_seconds if forked else 0.0, recipe)  # else each start has its own
    confirmer = Confirmer(run, plan, limits, min_gain=recipe.evidence.min_gain)
    return _verification(recipe, confirmer.confirm([_as_if_searched(recipe, warm)]), budget, directory)


def _compare_workloads(
    recipe: Recipe,
    facts: WorkloadFacts,
    reference: WorkloadReference,
    observe: Observer,
    *,
    may_be_imported: bool,
) -> None:
    """A word where the workload is not as it was.

    Raises:
        RecipeError: It is another one: neither its name nor its source is the recipe's.
    """
    made_for = recipe.workload
    if facts.fingerprint == made_for.fingerprint:
        return
    if facts.name == made_for.name:
        changed = "not as it was when the recipe was made"
    elif may_be_imported:
        changed = f"{facts.name!r} by the module that it was found in, and the recipe is of {made_for.name!r}"
    else:
        raise RecipeError(
            f"{reference} is {facts.name!r}, by name and by source another workload than the recipe's, which is "
            f"{made_for.name!r}",
            hint=f"Give the workload that the recipe was made for. Where this is the same training under another name, "
            f"say Workload(name={made_for.name!r}).",
        )
    observe(
        Notice(
            text=f"{reference}: {changed}; where the training itself has changed, run `autotune tune` again"
        )
    )


def _refuse_another_baseline(recipe: Recipe, baseline: Configuration) -> None:
    claimed_against = Configuration(recipe.baseline)
    if claimed_against != baseline:
        raise RecipeError(
            "the recipe's claim is against another baseline: "
            f"{claimed_against.describe(baseline)} there, {baseline.describe(claimed_against)} here",
            hint="Verify it with the workload that it was made for, or tune again.",
        )


def _plan(budget: float, warm: WarmUp, import_seconds: float, recipe: Recipe) -> Plan:
    """All of the time that is left is the confirmation's."""
    continuous = recipe.evidence.continuous
    start = warm.ready_seconds + (recipe.evidence.compile_seconds or 0.0)
    soaks = continuous is not None and continuous.replaces_slices
    return Plan(
        confirmation_share=CONFIRMATION_SHARE_HERE - (CONTINUOUS_SHARE if soaks else 0.0),
        budget=budget,
        search_ends=0.0,
        sampling_ends=0.0,
        probes_end=0.0,
        ends=budget - CLOSING_SECONDS,
        trial_timeout=max(20.0, 4 * start),
        measured=LEAST_MEASURED,
        finalists=1,
        import_seconds=import_seconds,
        slice_seconds=shortest_taken(warm, measured=LEAST_MEASURED),
        soak=CONTINUOUS_SHARE * budget if soaks else 0.0,
        soak_wanted=soaks,
    )


def _as_if_searched(recipe: Recipe, warm: WarmUp) -> TrialRecord:
    """What the confirmation must know beforehand: how long its processes take to start, and whether two fit."""
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


def _verification(recipe: Recipe, result: Result, budget: float, directory: RunDirectory) -> Verification:
    (confirmed,) = result.confirmed
    estimate = recipe.evidence.speedup
    low, high = estimate.ci95
    if failed := _failed(confirmed, result):
        found, what, trial = failed
        reason = f"{what} (see {directory.trial_directory(trial)})"
    else:
        found, reason = _judged(recipe, confirmed, result, budget)
    return Verification(
        finding=found,
        claimed=Interval(value=estimate.value, low=low, high=high),
        measured=confirmed.speedup,
        instances=0 if confirmed.ratio is None else confirmed.ratio.count,
        reason=reason,
    )


def _failed(confirmed: Confirmed, result: Result) -> tuple[Finding, str, int] | None:
    """What failed, and the number of its trial; None where the speed-up decides."""
    record = confirmed.record
    if not confirmed.stable and record.outcome is not Outcome.INTERRUPTED:
        broke = record.outcome is Outcome.UNSTABLE
        what = "it broke a stability rule" if broke else f"it failed ({record.outcome})"
        why = first_line(record.reason)
        return Finding.UNSTABLE, f"{what}: {why}" if why else what, record.trial
    if confirmed.speedup is None and result.cut_short is Shortfall.BASELINE_FAILED:
        why = "the baseline failed beside it in a fresh process, or one had no device"
        return Finding.UNDECIDED, why, result.baseline.trial
    return None


def _judged(recipe: Recipe, confirmed: Confirmed, result: Result, budget: float) -> tuple[Finding, str]:
    """What the speed-up says of the claim, and why."""
    evidence, now = recipe.evidence, confirmed.ratio
    counts = min(evidence.min_gain, MIN_GAIN)  # of a gain that has to be large, no large part may be lost
    if now is None or confirmed.speedup is None or confirmed.templates < len(GROUPS):
        more = _option(result.sufficient_budget or LARGER * budget)
        return (
            Finding.UNDECIDED,
            f"the budget ended before it was measured in fresh processes of two interpreters; give {more}",
        )
    claim = log_interval(evidence.speedup.value, *evidence.speedup.ci95)
    found = finding(claim, now, min_gain=counts)
    more = _option(max(result.sufficient_budget or 0.0, LARGER * budget))
    if found is Finding.UNDECIDED:
        return found, _why_undecided(claim, now, counts, more)
    if not _in_slices_only(evidence, confirmed):
        return found, _why(found, counts)
    if found is not Finding.HOLDS and _flattered(evidence):
        return found, f"{_why(found, counts)}, even in slices, which pauses have made look faster"
    return Finding.UNDECIDED, _why_not_continuous(confirmed, evidence.min_gain, more)


def _why(found: Finding, min_gain: float) -> str:
    """Of a finding that is none of want of knowledge."""
    if found is Finding.HOLDS:
        return (
            "it is faster than the baseline here, by what is claimed or more, within the errors or the "
            f"{_percent(min_gain)} that count"
        )
    if found is Finding.WEAKER:
        return "it is faster than the baseline here, but surely by less than is claimed"
    return "it is not surely faster than the baseline here, and surely gains less than is claimed"


def _in_slices_only(evidence: Evidence, confirmed: Confirmed) -> bool:
    """Whether the claim is free of what pauses between slices give, and nothing tells how much that is here."""
    if evidence.continuous is None or not evidence.continuous.replaces_slices:
        return False
    soaked = confirmed.soaked
    return soaked is None or not (soaked.tells or soaked.contradicts)


def _flattered(evidence: Evidence) -> bool:
    """Whether pauses made it look faster than it was: without them it would be slower still."""
    return evidence.continuous is not None and evidence.continuous.pauses.value > 1


def _why_not_continuous(confirmed: Confirmed, min_gain: float, more: str) -> str:
    if confirmed.soaked is not None:
        return (
            "the claim comes from a continuous run, and the one here was too short to tell what pauses give; "
            f"give {more}"
        )
    if confirmed.verdict is Verdict.FASTER:
        return f"the claim comes from a continuous run, and none came to its end here; give {more}"
    return (
        f"the claim comes from a continuous run, which only what is surely faster in slices, by {_percent(min_gain)} "
        "or more, has here; tune again"
    )


def _why_undecided(claim: LogInterval, now: LogInterval, min_gain: float, more: str) -> str:
    """Why what was measured neither holds nor refutes the claim, and what would tell."""
    if now.low > 0:
        return f"it is faster than the baseline here, but what is known of how much is too vague to judge; give {more}"
    if claim.value - now.value > math.hypot(claim.half_width, now.half_width):
        return (
            "it is not surely faster than the baseline here, but what it lacks of the claim is less than the "
            f"{_percent(min_gain)} that count; give {more}"
        )
    if claim.half_width > now.half_width:
        return (
            "it is not surely faster than the baseline here, but the claim itself is too uncertain to be refuted: "
            "its interval is the wider one; tune again with a larger budget"
        )
    return f"it is not surely faster than the baseline here, nor surely below the claim; give {more}"


def _option(seconds: float) -> str:
    """A budget as it is given, in whole tens of seconds."""
    return f"--budget {math.ceil(seconds / 10) * 10}s"


def _percent(share: float) -> str:
    return f"{100 * share:g}%"
