"""From what a run has found to the recipe. Pure but for the moment it is made at."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.printable import first_line
from autotune.recipe.evidence import BestCandidate, Confirmation, Evidence, PeakMemory, Stability, Watch
from autotune.recipe.recipe import CreatedBy, LearningRate, Recipe, RecipeWorkload
from autotune.record import Standing, TrialRecord
from autotune.run_directory import RunRecord
from autotune.space.configuration import Configuration
from autotune.stats import growth, numerics
from autotune.stats.deciding import Verdict
from autotune.stats.intervals import Interval
from autotune.stats.stability import DEVICE_MEMORY, Check
from autotune.tuning import next_action
from autotune.tuning.loop import Found
from autotune.tuning.losses import numerics_of
from autotune.tuning.options import Options
from autotune.tuning.run import Run
from autotune.tuning.soak import Watched
from autotune.tuning.state import Candidate, Leader
from autotune.tuning.trial import now_utc
from autotune.version import __version__

NUMERICS_NOT_CHECKED = "numerics parity with float32 without XLA"
BATCH_NOT_CHECKED = "{} loss after equal numbers of examples at the recommended batch size"
LONG_RUN_NOT_CHECKED = "minutes of uninterrupted training (`--soak 2m` adds them)"
THROTTLING_NOT_CHECKED = "thermal throttling of the device"
DEVICE_MEMORY_NOT_CHECKED = "device memory (the device's size could not be read)"
GROWTH_NOT_CHECKED = "whether this configuration leaks memory or the workload does"
STEADY_NOT_CHECKED = {
    False: "the steady state (the {} was still getting faster when it was measured)",
    None: "the steady state (the {}'s warm-up had too few steps to tell)",
}
EPOCHS_NOT_CHECKED = "the time between epochs (only steps were timed)"
VALIDATION_NOT_CHECKED = "the full cost of validation (its dataset has unknown cardinality)"
MEMORY_NOT_CHECKED = "peak memory and its growth (no process reported it)"
RETRACING_NOT_CHECKED = "retracing after the warm-up (the log does not show XLA's compilations)"
"""What a user must not take for granted; the recipe says so."""
ROUND_TO_SECONDS, MARGIN = 10, 1.5
"""Of the budget that is named to go on with."""
LEAST_GO_ON_SECONDS = 60.0


def recommend(
    *,
    found: Found,
    watched: Watched | None,
    batch_losses: numerics.BatchLosses | None,
    run: Run,
    record: RunRecord,
    options: Options,
) -> Recipe:
    """The recipe: the champion, or the baseline where nothing was confirmed to be faster.

    Args:
        found: What the loop has found.
        watched: What a watch over the champion has shown; None without one.
        batch_losses: What the recommended batch size costs in learning; None where that was not measured.
        run: What all parts shared; its records are the evidence.
        record: run.json.
        options: How the run was done.
    """
    assert record.workload is not None and record.search_space is not None
    workload = record.workload
    champion = found.state.champion
    if watched is not None and not _is_well(watched):
        champion = None
    configuration = run.baseline
    if champion is not None:
        configuration = found.confirmations[champion.number].trial.configuration
    return Recipe(
        configuration=dict(configuration),
        baseline=dict(run.baseline),
        evidence=_evidence(found, champion, watched, run, measured=batch_losses is not None),
        learning_rate=LearningRate.between(
            configuration.batch_size,
            run.baseline.batch_size,
            losses=batch_losses,
        ),
        machine=record.machine,
        workload=RecipeWorkload(
            name=workload.name,
            fingerprint=workload.fingerprint,
            batched=workload.batched,
            drop_remainder=workload.drop_remainder,
            takes_config=workload.takes_config,
            examples=workload.examples,
            batch_ranks=workload.batch_ranks,
        ),
        created_by=CreatedBy(
            autotune=__version__,
            created_at=now_utc(),
            run=run.directory.name,
            search_space=record.search_space.source,
            trials=len(run.records),
            seed=options.seed,
            budget_seconds=options.budget,
            spent_seconds=run.clock(),
        ),
    )


def _is_well(watched: Watched) -> bool:
    return not watched.failure and all(each.passed for each in watched.checks)


def _evidence(
    found: Found, champion: Leader | None, watched: Watched | None, run: Run, *, measured: bool
) -> Evidence:
    state = found.state
    searched = run.records[0]
    reference = chosen = searched
    checks: tuple[Check, ...] = ()
    speedup = Interval(value=1.0, low=1.0, high=1.0)
    verdict = Verdict.FASTER
    if champion is not None:
        confirmation = found.confirmations[champion.number]
        chosen, reference = run.records[champion.number], run.records[confirmation.reference.number]
        checks = found.checks[champion.number]
        speedup = chosen.speedup or speedup
    else:
        verdict = Verdict.UNSTABLE if state.champion is not None else next_action.verdict(state)
    base_rate = reference.throughput or searched.throughput
    assert base_rate is not None
    rate = chosen.throughput or base_rate
    tried = any(each.measured for each in state.candidates)
    return Evidence(
        verdict=verdict,
        ended_by=found.ended_by,
        min_gain=state.min_gain,
        candidates=len(state.candidates),
        excluded_gain=None if champion or not tried else _share(next_action.excluded_above(state)),
        speedup=speedup,
        throughput=rate,
        baseline_throughput=base_rate,
        compile_seconds=chosen.compile_seconds,
        baseline_compile_seconds=reference.compile_seconds,
        break_even_samples=break_even(
            chosen.compile_seconds, reference.compile_seconds, rate=rate.value, baseline_rate=base_rate.value
        ),
        peak_memory_bytes=_peak(chosen, searched if champion is None else chosen),
        baseline_peak_memory_bytes=_peak(reference, searched),
        input_wait_fraction=chosen.input_wait_fraction,
        stability=Stability(
            checks=checks,
            not_checked=()
            if champion is None
            else _not_checked(chosen, reference, checks, run.baseline, watched, measured=measured),
        ),
        confirmation=_confirmation(found, champion or _closest_leader(found), run),
        best_candidate=None if champion is not None else _best_candidate(found, watched, run),
        go_on_seconds=_go_on_seconds(found) if verdict is Verdict.UNDECIDED else None,
        watch=None if watched is None else _watch(watched),
    )


def _share(ratio: float) -> float:
    """A gain as a share; a very wide bound is cut."""
    return math.expm1(min(max(ratio, 0.0), math.log(1e6)))


def _go_on_seconds(found: Found) -> float:
    wanted = MARGIN * next_action.seconds_to_settle(found.state) + found.state.first_pair_seconds
    return math.ceil(max(LEAST_GO_ON_SECONDS, wanted) / ROUND_TO_SECONDS) * float(ROUND_TO_SECONDS)


# ----------------------------------------------------------------------------------------- what came closest


def _closest_leader(found: Found) -> Leader | None:
    """The leader that was not recommended and whose claim was the highest."""
    leaders = [each for each in found.state.leaders if each.ratio is not None]
    return max(leaders, key=lambda each: each.ratio.value if each.ratio else 0.0, default=None)


def _best_candidate(found: Found, watched: Watched | None, run: Run) -> BestCandidate | None:
    """What came closest, and why it is not recommended."""
    state = found.state
    champion = state.champion
    if champion is not None and watched is not None:
        failed = watched.failure or "; ".join(each.detail for each in watched.checks if not each.passed)
        return _described(
            state.candidate(champion.candidate), champion, run, f"it failed while it was watched: {failed}"
        )
    if state.open is not None:
        return _described(state.candidate(state.open.candidate), state.open, run, _so_far(state.open))
    if state.contenders:
        best = state.contenders[0]
        leader = state.standing.get(best.number)
        reason = (
            "the run ended before it was measured in fresh processes" if leader is None else _so_far(leader)
        )
        return _described(best, leader, run, reason)
    tried = [each for each in state.candidates if each.measured]
    if not tried:
        return None
    best = max(tried, key=lambda each: each.ratio)
    leader = state.standing.get(best.number)
    if leader is not None and leader.standing is Standing.UNSTABLE:
        return _described(
            best, leader, run, f"it broke a rule: {first_line(run.records[leader.number].reason)}"
        )
    if best.unstable:
        return _described(
            best, leader, run, f"it broke a rule: {first_line(run.records[best.number].reason)}"
        )
    if leader is not None:
        return _described(best, leader, run, _not_shown(leader))
    return _described(best, None, run, "the search showed no gain beyond chance")


def _so_far(leader: Leader) -> str:
    planned = f"{leader.processes} of {leader.looks.after[-1]} fresh processes a side were measured"
    return f"the run ended before it was decided: {planned}"


def _not_shown(leader: Leader) -> str:
    if leader.ratio is None:
        return "it was not measured in two fresh processes a side"
    return f"{leader.processes} fresh processes a side do not show a gain"


def _described(candidate: Candidate, leader: Leader | None, run: Run, reason: str) -> BestCandidate:
    return BestCandidate(
        configuration=dict(candidate.configuration),
        speedup=None if leader is None or leader.ratio is None else leader.ratio.ratio,
        reason=reason,
        search_speedup=math.exp(candidate.ratio) if candidate.measured else None,
    )


# ------------------------------------------------------------------------------------------------ the parts


def _not_checked(
    winner: TrialRecord,
    reference: TrialRecord,
    checks: Sequence[Check],
    baseline: Configuration,
    watched: Watched | None,
    *,
    measured: bool,
) -> tuple[str, ...]:
    """What was not looked at of the winner; `measured` is whether its batch size's training losses were."""
    missing = [
        STEADY_NOT_CHECKED[record.settled].format(who)
        for who, record in (("recommendation", winner), ("baseline", reference))
        if not record.settled
    ]
    names = {each.name: each for each in checks}
    parity = names.get(numerics.NAME)
    if parity is None and _computes_otherwise(winner, baseline):
        missing.append(NUMERICS_NOT_CHECKED)
    elif parity is not None and not parity.tells:
        missing.append(f"{NUMERICS_NOT_CHECKED} ({parity.detail})")
    if winner.configuration["batch_size"] != baseline.batch_size:
        missing.append(BATCH_NOT_CHECKED.format("held-out" if measured else "training and held-out"))
    if watched is None:
        missing.append(LONG_RUN_NOT_CHECKED)
    if winner.timed_by == "steps" and winner.examples_per_epoch is None:
        missing.append(EPOCHS_NOT_CHECKED)
    elif winner.timed_by == "steps" and winner.validation_uncounted:
        missing.append(VALIDATION_NOT_CHECKED)
    if winner.peak_host_bytes is None:
        missing.append(MEMORY_NOT_CHECKED)
    if winner.peak_device_bytes is not None:
        missing.append(THROTTLING_NOT_CHECKED)
        if DEVICE_MEMORY not in names:
            missing.append(DEVICE_MEMORY_NOT_CHECKED)
    missing += [
        f"{GROWTH_NOT_CHECKED} ({name.replace('_', ' ')}: {names[name].detail})"
        for name in (growth.HOST, growth.DEVICE)
        if name in names and not names[name].tells
    ]
    if "retracing" not in names:
        missing.append(RETRACING_NOT_CHECKED)
    return tuple(missing)


def _computes_otherwise(winner: TrialRecord, baseline: Configuration) -> bool:
    return numerics_of(Configuration(winner.configuration)) != numerics_of(baseline)


def break_even(
    compile_seconds: float | None,
    baseline_compile_seconds: float | None,
    *,
    rate: float,
    baseline_rate: float,
) -> int | None:
    """Samples after which a longer compile time is earned back.

    Args:
        compile_seconds: Of the recommended configuration.
        baseline_compile_seconds: Of the baseline.
        rate: Samples per second of the recommended configuration.
        baseline_rate: Of the baseline.

    Returns:
        0 when the compile time is not longer, None when it is never earned back or not known.
    """
    if compile_seconds is None or baseline_compile_seconds is None:
        return None
    extra = compile_seconds - baseline_compile_seconds
    if extra <= 0:
        return 0
    saved_per_sample = 1 / baseline_rate - 1 / rate
    return None if saved_per_sample <= 0 else round(extra / saved_per_sample)


def _peak(record: TrialRecord, fallback: TrialRecord) -> PeakMemory:
    source = record if record.peak_host_bytes is not None else fallback
    return PeakMemory(host=source.peak_host_bytes, device=source.peak_device_bytes)


def _watch(watched: Watched) -> Watch:
    return Watch(
        seconds=watched.seconds,
        throughput=watched.throughput,
        checks=watched.checks,
        failure=watched.failure,
    )


def _confirmation(found: Found, leader: Leader | None, run: Run) -> Confirmation:
    leaders = len(found.state.leaders)
    if leader is None:
        return Confirmation(
            processes=0, pairs=0, leaders=leaders, looks=(), confidence=None, pairing=None, trials=()
        )
    record = run.records[leader.number]
    return Confirmation(
        processes=leader.processes,
        pairs=len(record.pairs),
        leaders=leaders,
        looks=leader.looks.after,
        confidence=leader.looks.confidence,
        pairing=None if record.pairing is None else record.pairing.value,
        trials=(leader.looks.reference, leader.number),
    )
