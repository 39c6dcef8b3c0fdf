"""Make the recipe from what a run has found. Pure, except for the time that it names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autotune.data.figures import Check, Interval
from autotune.data.options import Options
from autotune.data.printable import first_line
from autotune.data.record import Standing, TrialRecord, baseline_with_ceilings
from autotune.data.run_directory import RunRecord, WorkloadRecord
from autotune.recipe.advice import advice, diagnose
from autotune.recipe.answer import LARGEST_BOUND
from autotune.recipe.evidence import (
    FAILED_A_CHECK,
    NUMERICS_NOT_CHECKED,
    BestCandidate,
    BestConfiguration,
    Confirmation,
    Contribution,
    CreatedBy,
    Evidence,
    LearningRateRule,
    PeakMemory,
    RecipeWorkload,
    SameLoss,
    Stability,
    Watch,
)
from autotune.recipe.learning_rate import factor_of
from autotune.recipe.recipe import Recipe
from autotune.space.configuration import Configuration
from autotune.stats.deciding import EndedBy, Verdict
from autotune.stats.disturbance import gpu_figures
from autotune.stats.stability import DEVICE_GROWTH, DEVICE_MEMORY, HOST_GROWTH, PARITY, THROTTLING
from autotune.tuning import policy
from autotune.tuning.learning import numerics_of
from autotune.tuning.loop import SearchResult
from autotune.tuning.notices import samples_of
from autotune.tuning.rules import changing_work, epoch_seen, epoch_work
from autotune.tuning.run import Run
from autotune.tuning.standings import LearningResult
from autotune.tuning.state import Candidate, Leader, State
from autotune.tuning.trial import now_utc
from autotune.version import __version__

GROWTH_NOT_CHECKED = "whether this configuration leaks memory or the workload does"
LOSS_NOT_CHECKED = {"finite_loss": "a finite training loss", "loss_falls": "whether the training loss falls"}
NEW_KERNELS_NOT_CHECKED = "kernels that another compilation chooses (with --diff or other code, or without `compiled/`)"
STEADY_NOT_CHECKED = {
    False: "the steady state (the {} had not reached a steady speed)",
    None: "the steady state (the {}'s warm-up had too few steps to tell)",
}
ROUND_TO_SECONDS, MARGIN = 10, 1.5  # of the budget that is named to go on with
LEAST_BUDGET_SECONDS = 60.0
MOST_BUDGETS = 10  # of the run, in the budget that is named to go on with; a longer one could show only a gain near 1
SLOW_CANDIDATE_LOG = 0.05  # as a logarithm, below the baseline: such a candidate says nothing of each of its changes
FEWEST_VERIFYING = 4  # processes a side, with which `verify` can judge a claim


def recommend(*, found: SearchResult, watched: Watch | None, run: Run, record: RunRecord, options: Options) -> Recipe:
    """Make the recipe: of the best leader, or of the baseline if nothing was confirmed to be faster."""
    assert record.workload is not None and record.search_space is not None
    workload = record.workload
    best_leader, same, larger = found.state.recommended, found.state.same_training, found.state.larger_batch
    if watched is not None and (watched.failure or not all(check.passed for check in watched.checks)):
        failed, best_leader = best_leader, None
        same, larger = (None if leader is failed else leader for leader in (same, larger))
    changes = changing_work(run.records.values())
    if changes is not None:  # a claim about its beginning is none about the training
        best_leader = same = larger = None
    configuration = run.baseline
    if best_leader is not None:
        configuration = found.confirmations[best_leader.number].trial.configuration
    rule = None if best_leader is None else learning_of(best_leader, found, run)
    return Recipe(
        configuration=dict(configuration),
        baseline=dict(run.baseline),
        evidence=_evidence(
            found, best_leader, watched, run, workload, measured=rule is not None and rule.same_loss is not None
        ),
        candidate=None
        if best_leader is not None or changes is not None
        else _best_candidate(found, watched, run, options.min_gain),
        learning_rate_rule=rule,
        same_training=None if run.options.objective != "time_to_loss" else best_of(same, found, run),
        larger_batch=best_of(larger, found, run)
        if found.state.larger_batch or changes is not None
        else likely_larger_batch(found, run),
        machine=record.machine,
        workload=RecipeWorkload(
            **{name: known for name, known in workload if name in RecipeWorkload.model_fields},
            args=options.args,
            train_samples=options.train_samples or samples_of(workload.script, workload.examples),
        ),
        created_by=CreatedBy(
            autotune=__version__,
            created_at=now_utc(),
            run=record.run,
            search_space=record.search_space.source,
            trials=sum(not known.is_repeat for known in run.records.values()),
            seed=options.seed,
            budget_seconds=options.budget,
            spent_seconds=run.clock(),
            started_from=tuple(dict.fromkeys(leader.run for leader in record.leaders)),
        ),
    )


def _evidence(
    found: SearchResult,
    best_leader: Leader | None,
    watched: Watch | None,
    run: Run,
    workload: WorkloadRecord,
    *,
    measured: bool,
) -> Evidence:
    """Gather what the verdict rests on: of the best leader beside its baseline, or of the baseline's trial alone."""
    state, searched = found.state, run.records[0]
    chosen = reference = searched
    changes = changing_work(run.records.values())
    checks: tuple[Check, ...] = () if changes is None else (changes,)
    if best_leader is not None:
        chosen, checks = run.records[best_leader.number], found.checks[best_leader.number]
        reference = run.records[found.confirmations[best_leader.number].reference.number]
    verdict = policy.verdict(state) if changes is None else Verdict.UNDECIDED
    if verdict is Verdict.FASTER and best_leader is None:  # it failed while it was watched
        verdict = Verdict.UNSTABLE
    is_undecided = verdict is Verdict.UNDECIDED and changes is None
    if best_leader is None:
        missing = _list_masked(state.candidates, run.baseline, verdict)
    else:
        missing = _list_unchecked(chosen, reference, checks, run, watched, measured=measured)
    if found.untried:
        missing.insert(0, f"{', '.join(found.untried)} (no time was left to try them)")
    claims = [(leader.ratio.value, leader) for leader in state.leaders if leader.ratio and leader.is_same_training]
    closest = max(claims, key=lambda claim: claim[0], default=(0.0, None))[1]
    is_bounded = any(known.measured and known.is_same_training for known in state.candidates)
    excluded = math.expm1(min(max(0.0, policy.excluded_above(state)), math.log(1e6)))  # a very wide bound is cut
    base_rate = reference.throughput or searched.throughput
    assert base_rate is not None
    rate = chosen.throughput or base_rate
    unity = Interval(value=1.0, low=1.0, high=1.0)
    return Evidence(
        verdict=verdict,
        ended_by=found.ended_by,
        min_gain=state.min_gain,
        candidates=len(state.candidates),
        excluded_gain=excluded if best_leader is None and is_bounded else None,
        objective=run.options.objective,
        speedup=unity if best_leader is None else chosen.speedup or unity,
        throughput=rate,
        baseline_throughput=base_rate,
        compile_seconds=chosen.compile_seconds,
        baseline_compile_seconds=reference.compile_seconds,
        examples_per_epoch=_examples_per_epoch(chosen),
        epoch_seen=epoch_seen(run.records.values() if best_leader is None else [chosen]),
        peak_memory_bytes=_peak(chosen, searched if best_leader is None else chosen),
        baseline_peak_memory_bytes=_peak(reference, searched),
        joules_per_sample=gpu_figures(chosen)["joules_per_sample"],
        baseline_joules_per_sample=gpu_figures(reference)["joules_per_sample"],
        input_wait_fraction=chosen.input_wait_fraction,
        baseline_limited_by=_limit(_known_baseline(run), list(run.records.values())),
        limited_by=_limit(chosen),
        advice=(
            *_advice(None if best_leader is None else chosen, run, workload),
            *_excluded_by_knob(state, verdict, run),
        ),
        stability=Stability(checks=tuple(check for check in checks if check.conclusive), not_checked=tuple(missing)),
        confirmation=_confirmation(found, best_leader or closest, run),
        smallest_gain_shown=math.expm1(policy.smallest_gain_shown(state)) if is_undecided else None,
        go_on_seconds=None if changes is not None else _go_on_seconds(found, run, is_undecided=is_undecided),
        verify_seconds=None
        if best_leader is None  # as many fresh pairs as the claim rests on, after its start
        else _rounded_budget(MARGIN * (max(best_leader.processes, FEWEST_VERIFYING) + 1) * best_leader.pair_seconds),
        contributions=tuple(
            Contribution(knob=ablation.knob, gain=ablation.gain, trial=trial)
            for trial, record in sorted(run.records.items())
            if (ablation := record.ablation) is not None and ablation.gain is not None
            if best_leader is not None and ablation.leader == best_leader.number
        ),
        watch=watched,
    )


def _advice(recommended: TrialRecord | None, run: Run, workload: WorkloadRecord) -> tuple[str, ...]:
    """Describe the limits of the training, in sentences."""
    unreached = {*run.not_reached, *(() if workload.takes_config else ("num_parallel_calls",))}
    known = [trial for trial in run.records.values() if trial.scaling_efficiency is not None and trial.outcome.measured]
    spread = max(known, key=lambda trial: trial.scaling_efficiency or 0.0, default=None)  # that scales best
    chosen = recommended or run.records[0]
    if chosen.scaling_efficiency is not None:
        spread = chosen
    trials = [trial for trial in run.records.values() if not trial.is_repeat]
    return tuple(advice(_known_baseline(run), recommended, workload.script, trials, spread, unreached))


def _limit(record: TrialRecord, trials: Sequence[TrialRecord] = ()) -> str | None:
    """Return the name of a trial's limit; None where it is unknown."""
    return None if (limit := diagnose(record, trials)).name == "unknown" else limit.name


def _excluded_by_knob(state: State, verdict: Verdict, run: Run) -> tuple[str, ...]:
    """Say what each knob that was tried can gain at most, where nothing is faster."""
    most = dict[str, float]()
    for candidate in state.stable if verdict is Verdict.NO_SIGNIFICANT_GAIN else ():
        for name in candidate.configuration.differences(run.baseline):
            most[name] = max(most.get(name, 0.0), state.equal_loss_upper_bound(candidate))
    known = [(gain, name) for name, gain in most.items() if gain < math.log1p(LARGEST_BOUND)]
    gains = ", ".join(f"{name} {math.ceil(100 * math.expm1(gain))}%" for gain, name in sorted(known, reverse=True))
    return (f"Most that a knob can still gain: {gains}.",) if gains else ()


def _known_baseline(run: Run) -> TrialRecord:
    """Return the baseline's record by which its bottleneck is judged."""
    return baseline_with_ceilings([run.records[number] for number in sorted(run.records)]) or run.records[0]


def _go_on_seconds(found: SearchResult, run: Run, *, is_undecided: bool) -> float | None:
    """Return a budget that can settle what the run left open, within bounds; None where it left nothing open."""
    state, out_of_time = found.state, found.ended_by in (EndedBy.BUDGET, EndedBy.INTERRUPTED)
    settles = is_undecided or (out_of_time and bool(state.likely_leaders))
    learning, settling = policy.seconds_to_learn(state), policy.seconds_to_settle(state) if settles else 0.0
    needed = max(learning, policy.LEARNING_AGAIN_SHARE * learning + settling)
    needed += len(found.untried) * state.candidate_seconds
    begins = max(state.first_pair_seconds, run.records[0].ended_at_seconds or 0.0)  # with the baseline, once more
    longest = MOST_BUDGETS * run.options.budget
    return min(_rounded_budget(MARGIN * needed + begins), longest) if is_undecided or needed > 0 else None


def _rounded_budget(seconds: float) -> float:
    return math.ceil(max(LEAST_BUDGET_SECONDS, seconds) / ROUND_TO_SECONDS) * float(ROUND_TO_SECONDS)


# ----------------------------------------------------------------------------------------- what came closest


def _best_candidate(found: SearchResult, watched: Watch | None, run: Run, min_gain: float) -> BestCandidate | None:
    """Return the best candidate that is not recommended, and why it is not."""
    state = found.state
    leader = state.recommended or next((known for known in state.open_leaders if known.is_same_training), None)
    tried = [candidate for candidate in state.candidates if candidate.measured and candidate.is_same_training]
    likely_leaders = [candidate for candidate in state.likely_leaders if candidate.is_same_training]
    tried = [candidate for candidate in stable_candidates(state) if candidate.is_same_training] or tried
    if leader is not None:
        best = state.candidate(leader.candidate)
    elif likely_leaders or tried:
        best = likely_leaders[0] if likely_leaders else max(tried, key=lambda known: known.ratio)
        leader = state.leaders_by_candidate.get(best.number)
    else:
        return None
    speedup = measured_speedup(best, state)
    by_chance = leader is None and not likely_leaders and not best.unstable and speedup.value > 1 + min_gain
    if by_chance or round(speedup.value, 2) <= 1:
        return None
    return BestCandidate(
        configuration=dict(best.configuration),
        speedup=speedup,
        reason=_why_not(best, leader, found, watched, run, min_gain),
    )


def _why_not(
    best: Candidate, leader: Leader | None, found: SearchResult, watched: Watch | None, run: Run, min_gain: float
) -> str:
    state = found.state
    if state.recommended is not None and watched is not None:
        failed = watched.failure or "; ".join(check.detail for check in watched.checks if not check.passed)
        return f"it failed while it was watched: {failed}"
    if leader is not None and leader.standing is Standing.UNSTABLE:
        return f"{FAILED_A_CHECK}: {first_line(run.records[leader.number].reason)}"
    if best.unstable:
        return f"{FAILED_A_CHECK}: {first_line(run.records[best.number].reason)}"
    opened, waiting = state.open_leaders, state.likely_leaders
    if any(known.is_same_training for known in opened) or any(known.is_same_training for known in waiting):
        if leader is None or not leader.processes:
            return "the run ended before it was measured in fresh processes"
        if broken := [check for check in found.checks.get(leader.number, ()) if not check.passed]:
            return f"{FAILED_A_CHECK}: {broken[0].name}: {broken[0].detail}"
        if memory := found.confirmations[leader.number].why_memory_unclear(run):
            return f"too few slices to tell whether it leaks memory ({memory})"
        return f"{_processes(leader)} did not decide it before the run ended"
    if leader is None or best.ratio <= math.log1p(min_gain):
        return f"its gain is below the {min_gain:.0%} of --min-gain"
    if leader.ratio is None:
        return "it was not measured in two fresh processes a side"
    return f"{_processes(leader)} do not show a gain"


def _processes(leader: Leader) -> str:
    return f"{leader.processes} fresh process{'' if leader.processes == 1 else 'es'} a side"


# ------------------------------------------------------------------------------------------------ the parts


def _list_masked(candidates: Sequence[Candidate], baseline: Configuration, verdict: Verdict) -> list[str]:
    """List the knobs of which no gain is excluded: each was tried only together with something slow."""
    tried: dict[str, bool] = {}
    for candidate in candidates if verdict is Verdict.NO_SIGNIFICANT_GAIN else ():
        changed = candidate.configuration.differences(baseline) if candidate.measured else {}
        is_clear = len(changed) == 1 or candidate.ratio > -SLOW_CANDIDATE_LOG
        tried.update((knob, tried.get(knob, False) or is_clear) for knob in changed)
    return [f"{knob} by itself: it was tried only together with slower changes" for knob in tried if not tried[knob]]


def _list_unchecked(
    winner: TrialRecord,
    reference: TrialRecord,
    checks: Sequence[Check],
    run: Run,
    watched: Watch | None,
    *,
    measured: bool,
) -> list[str]:
    """List what was not checked of the winner; `measured`: the training losses at its batch size were."""
    baseline, boundary = run.baseline, run.boundary
    missing = [
        STEADY_NOT_CHECKED[record.settled].format(who)
        for who, record in (("recommendation", winner), ("baseline", reference))
        if not record.settled
    ]
    names = {check.name: check for check in checks}
    parity = names.get(PARITY)
    if parity is None and numerics_of(Configuration(winner.configuration)) != numerics_of(baseline):
        missing.append(NUMERICS_NOT_CHECKED)
    elif parity is not None and not parity.conclusive:
        missing.append(f"{NUMERICS_NOT_CHECKED} ({parity.detail})")
    if Configuration(winner.configuration).update_size != baseline.update_size:
        gap = "loss of a whole training at the recommended batch size"
        missing.append(f"the held-out {gap}" if measured else f"the training and held-out {gap}")
    if watched is None:
        missing.append("minutes of uninterrupted training (`--soak 2m` adds them)")
    if winner.timed_by == "steps" and winner.examples_per_epoch is None:
        missing.append("the time between epochs (only steps were timed)")
    elif winner.timed_by == "steps" and boundary is not None and not boundary.measured:
        missing.append("the time between epochs and of validation (an epoch takes longer than the budget)")
    elif winner.timed_by == "steps" and winner.validation_uncounted:
        missing.append("the full cost of validation (its dataset has unknown cardinality)")
    if (seen := epoch_seen([winner])) is not None:
        missing.append(f"the last {100 - max(1, math.ceil(100 * seen))}% of an epoch (no trial came so far)")
    if any(log.saved_seconds is not None for log in winner.processes):
        missing.append(NEW_KERNELS_NOT_CHECKED)
    compiled = [log.saved_seconds is None for log in reference.processes]
    if len(compiled) > 1 and sum(compiled) == 1:
        missing.append("how the baseline varies between compilations (all its processes ran one)")
    if winner.peak_host_bytes is None:
        missing.append("peak memory and its growth (no process reported them)")
    if winner.peak_device_bytes is not None:
        if THROTTLING not in names:
            missing.append("thermal throttling of the device (NVML does not report it)")
        if DEVICE_MEMORY not in names:
            missing.append("device memory (the device's size could not be read)")
    missing += [
        f"{GROWTH_NOT_CHECKED} ({name.replace('_', ' ')}: {names[name].detail})"
        for name in (HOST_GROWTH, DEVICE_GROWTH)
        if name in names and not names[name].conclusive
    ]
    missing += [
        f"{check} ({names[name].detail})"
        for name, check in LOSS_NOT_CHECKED.items()
        if name in names and not names[name].conclusive
    ]
    if "retracing" not in names:
        missing.append("retracing after the warm-up (the log does not show XLA's compilations)")
    return missing


def _examples_per_epoch(record: TrialRecord) -> int | None:
    """Return the examples of an epoch: by the data, or by the calls that were seen if the script ends it earlier."""
    work = epoch_work(record)
    if work.calls is None or work.examples is None:
        return work.examples
    seen = work.calls * work.examples_per_call
    return work.examples if abs(seen - work.examples) < work.examples_per_call else seen


def _peak(record: TrialRecord, fallback: TrialRecord) -> PeakMemory:
    source = record if record.peak_host_bytes is not None else fallback
    return PeakMemory(host=source.peak_host_bytes, device=source.peak_device_bytes)


def _confirmation(found: SearchResult, leader: Leader | None, run: Run) -> Confirmation:
    leaders = len(found.state.leaders)
    if leader is None:
        return Confirmation(processes=0, pairs=0, leaders=leaders, confidence=None, pairing=None, trials=())
    record = run.records[leader.number]
    return Confirmation(
        processes=leader.processes,
        pairs=len(record.pairs),
        leaders=leaders,
        confidence=leader.looks.confidence,
        pairing=None if record.pairing is None else record.pairing.value,
        trials=(leader.looks.reference, leader.number),
    )


# ---------------------------------------------------------------------------------------------- its two answers


def best_of(leader: Leader | None, found: SearchResult, run: Run) -> BestConfiguration | None:
    """Return a confirmed leader as the recipe gives it."""
    if leader is None:
        return None
    record = run.records[leader.number]
    assert record.speedup is not None and record.throughput is not None
    return BestConfiguration(
        configuration=dict(Configuration(record.configuration)),
        speedup=record.speedup,
        throughput=record.throughput,
        confirmed=True,
        learning_rate_rule=learning_of(leader, found, run),
    )


def likely_larger_batch(found: SearchResult, run: Run) -> BestConfiguration | None:
    """Return the candidate with another batch size that should reach the same loss soonest, as far as is known."""
    state = found.state
    able = [known for known in stable_candidates(state) if not known.is_same_training and known.ratio > 0]
    best = max(able, key=state.min_equal_loss_gain, default=None)
    if best is None:
        return None
    leader, speedup = state.leaders_by_candidate.get(best.number), measured_speedup(best, state)
    is_fresh = leader is not None and speedup.low < speedup.high
    throughput = run.records[leader.number if leader is not None and is_fresh else best.number].throughput
    if throughput is None:
        return None
    unmeasured = LearningRateRule(batch_ratio=best.batch_ratio, not_measured=_why_not_result(run))
    return BestConfiguration(
        configuration=dict(best.configuration),
        speedup=speedup,
        throughput=throughput,
        confirmed=False,
        learning_rate_rule=unmeasured if leader is None else learning_of(leader, found, run),
    )


def measured_speedup(candidate: Candidate, state: State) -> Interval:
    """Return a measured candidate's speed-up: by fresh processes where there are two, else the search's alone."""
    leader, ratio = state.leaders_by_candidate.get(candidate.number), math.exp(candidate.ratio)
    fresh = None if leader is None or leader.ratio is None else leader.ratio.ratio
    return fresh or Interval(value=ratio, low=ratio, high=ratio)


def stable_candidates(state: State) -> list[Candidate]:
    """Return the measured candidates that failed no check, with the ratios of fresh processes where there are some."""
    return [replace(known, ratio=math.log(measured_speedup(known, state).value)) for known in state.stable]


def _why_not_result(run: Run) -> str:
    """Return why nothing is known of how a batch size learns, in half a sentence."""
    if run.options.objective != "time_to_loss":
        return f"the objective is {run.options.objective}"
    saved = any(log.state_steps is not None for log in run.records[0].processes)
    unsaved = "" if saved else "the state of the baseline's training could not be saved"
    return run.no_branches or unsaved or "no time was left for it"


def learning_of(leader: Leader, found: SearchResult, run: Run) -> LearningRateRule | None:
    """Return how a leader with another batch size learns, by its record; None for one with the baseline's."""
    confirmation = found.confirmations[leader.number]
    ratio = confirmation.trial.configuration.update_size / run.baseline.update_size
    if ratio == 1:
        return None
    result = found.learning.get(leader.number)
    if result is None or not isinstance(result, LearningResult):
        not_shown = "no gain was shown in fresh processes" if leader.standing is Standing.NOT_SHOWN else ""
        return LearningRateRule(batch_ratio=ratio, not_measured=result or not_shown or _why_not_result(run))
    needed = result.needed
    if result.speedup.ratio is None or needed.log_ratio.ratio is None:
        return LearningRateRule(batch_ratio=ratio, not_measured="its losses vary too much from seed to seed")
    return LearningRateRule(
        batch_ratio=ratio,
        rule=needed.rule,
        factor=factor_of(needed.rule, ratio),
        same_loss=SameLoss(
            speedup=result.speedup.ratio,
            examples_factor=needed.log_ratio.ratio,
            by_rule={rule: None if of is None else math.exp(of) for rule, of in needed.by_rule.items()},
            examples=result.branch.examples,
            after_steps=result.branch.after_steps,
            seeds=needed.log_ratio.count,
        ),
    )
