"""Does a recipe's claim hold here and now? The confirmation again, of one configuration, held against the claim."""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from autotune.errors import RecipeError
from autotune.machine import Machine, fingerprint, require_linux
from autotune.measure.deciding import MIN_GAIN, Finding, Shortfall, finding
from autotune.measure.intervals import LogInterval, log_interval
from autotune.measure.stability import MEMORY_MARGIN
from autotune.printable import first_line
from autotune.recipe.recipe import Recipe
from autotune.run_directory import RunDirectory
from autotune.space.configuration import Configuration
from autotune.space.knobs import Device
from autotune.study.confirmation import Confirmer
from autotune.study.confirmed import Confirmed, Limits
from autotune.study.options import Options, seconds_of
from autotune.study.phases import baseline_of, tell_isolation, tell_what_is_odd
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
from autotune.workload import Workload, WorkloadReference, refuse_while_loading

DEFAULT_BUDGET = "100s"
CONTINUOUS_SHARE = 0.25
"""Of the budget: for a continuous run, where the claim comes from one."""


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
    memory_margin: float = MEMORY_MARGIN,
    observe: Observer = silent,
) -> Verification:
    """Measure a recipe against its baseline again, on this machine, and say whether its claim holds.

    Args:
        recipe: The recipe, or the path of one.
        workload: What is trained, as for `autotune.tune`.
        budget: Wall-clock time for everything, in seconds or as text.
        seed: Of the order in which slices are taken.
        memory_margin: As for `autotune.tune`: the share of memory that must stay free.
        observe: Is told what happens.

    Returns:
        The finding. Nothing is written but to a temporary directory.

    Raises:
        InputError: Recipe or workload cannot be used, or do not belong together.
        NoStableConfigurationError: The baseline itself fails.
    """
    began = time.monotonic()
    refuse_while_loading()
    require_linux()
    loaded = recipe if isinstance(recipe, Recipe) else Recipe.load(Path(recipe))
    options = Options(budget=seconds_of("budget", budget), seed=seed, memory_margin=memory_margin)
    reference = reference_to(workload)
    if not loaded.changes:
        return Verification(
            finding=Finding.HOLDS,
            claimed=None,
            measured=None,
            instances=0,
            reason="the recipe is the baseline, and claims nothing",
        )
    machine = fingerprint()
    with tempfile.TemporaryDirectory(prefix="autotune-verify-") as folder:
        directory = RunDirectory(Path(folder) / "run")
        directory.create()
        try:
            with TrialProcesses(reference, logs=directory.log_directory) as trials:
                return verify_with(
                    trials,
                    loaded,
                    directory=directory,
                    machine=machine,
                    limits=limits_of(machine, options.memory_margin),
                    reference=reference,
                    budget=options.budget,
                    seed=options.seed,
                    clock=lambda: time.monotonic() - began,
                    observe=observe,
                )
        finally:
            directory.release()


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
) -> Verification:
    """The same on real or simulated trials."""
    for difference in recipe.machine.differences(machine):
        observe(Notice(text=f"the recipe was measured on another machine: {difference}"))
    observe(PhaseBegan(phase=Phase.BASELINE, ends=None, detail="importing the workload"))
    opening = clock()
    facts = trials.open()
    import_seconds = clock() - opening
    tell_isolation(trials, observe)
    if facts.fingerprint != recipe.workload.fingerprint:
        observe(
            Notice(
                text=f"{reference}: not as it was when the recipe was made; where the training itself has changed, run "
                "`autotune tune` again"
            )
        )
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
    plan = _plan(budget, warm, import_seconds, recipe)
    confirmer = Confirmer(run, plan, limits, min_gain=MIN_GAIN)
    result = confirmer.confirm([_as_if_searched(recipe, warm)])
    confirmed = result.confirmed[0]
    if plan.soak and confirmed.soaked is None and confirmed.stable:
        return replace(
            _verification(recipe, confirmed, result.cut_short),
            finding=Finding.UNDECIDED,
            reason="the claim comes from a continuous run, for which the budget left no time; give more",
        )
    return _verification(recipe, confirmed, result.cut_short)


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
    return Plan(
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
        soak=CONTINUOUS_SHARE * budget if continuous is not None and continuous.replaces_slices else 0.0,
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
        pairing=None if evidence.confirmation.pairing is None else Pairing(evidence.confirmation.pairing),
    )


def _verification(recipe: Recipe, confirmed: Confirmed, cut_short: Shortfall) -> Verification:
    estimate = recipe.evidence.speedup
    low, high = estimate.ci95
    claimed = Interval(value=estimate.value, low=low, high=high)
    found, reason = _judged(confirmed, log_interval(estimate.value, low, high), cut_short)
    return Verification(
        finding=found,
        claimed=claimed,
        measured=confirmed.speedup,
        instances=0 if confirmed.ratio is None else confirmed.ratio.count,
        reason=reason,
    )


def _judged(confirmed: Confirmed, claim: LogInterval, cut_short: Shortfall) -> tuple[Finding, str]:
    if not confirmed.stable and confirmed.record.outcome is not Outcome.INTERRUPTED:
        reason = first_line(confirmed.record.reason)
        return Finding.UNSTABLE, f"{confirmed.record.outcome}: {reason}"
    if confirmed.speedup is None and cut_short is Shortfall.BASELINE_FAILED:
        return Finding.UNDECIDED, "the baseline kept failing beside it in fresh processes"
    if confirmed.ratio is None or confirmed.speedup is None:
        return Finding.UNDECIDED, "the budget ended before it was measured in two fresh processes; give more"
    found = finding(claim, confirmed.ratio)
    return found, _REASONS[found]


_REASONS = {
    Finding.HOLDS: "it is faster than the baseline here, by about what is claimed or more",
    Finding.WEAKER: "it is faster than the baseline here, but by less than is claimed",
    Finding.GONE: "it is not faster than the baseline here, and what is claimed lies outside what was measured",
    Finding.UNDECIDED: "what was measured includes both no gain and the claim; give a larger budget",
}
