"""From what was confirmed to the recipe. Pure but for the moment it is made at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from autotune.machine import Machine
from autotune.measure import growth, numerics
from autotune.measure.deciding import Shortfall, Verdict
from autotune.measure.disturbance import NOTABLE_SHARE
from autotune.measure.intervals import FEW_INSTANCES, LogInterval
from autotune.measure.stability import DEVICE_MEMORY, Check
from autotune.measure.throughput import Measured
from autotune.printable import first_line
from autotune.recipe.recipe import (
    BatchSizeLosses,
    BestCandidate,
    Confirmation,
    ContinuousRun,
    CreatedBy,
    Estimate,
    Evidence,
    Factor,
    LearningRate,
    PeakMemory,
    PlainBaseline,
    Recipe,
    RecipeWorkload,
    Stability,
    StabilityCheck,
    Throughput,
)
from autotune.space.configuration import Configuration
from autotune.study.confirmed import Confirmed, Result, stalls_of_baseline
from autotune.study.parity import plain
from autotune.study.running import leaves_stalls_out, now_utc, ratio_interval, throughput_interval
from autotune.trial.record import Interval, Outcome, TrialRecord
from autotune.version import __version__

NUMERICS_NOT_CHECKED = "numerics parity with float32 without XLA"
BATCH_NOT_CHECKED = "{} loss after equal numbers of examples at the recommended batch size"
LONG_RUN_NOT_CHECKED = "a continuous run"
PAUSES_NOT_CHECKED = "what pauses between slices gave the speed-up (the continuous run was too short to tell)"
THROTTLING_NOT_CHECKED = "thermal throttling of the device"
DEVICE_MEMORY_NOT_CHECKED = "memory on the device (how much it has could not be read)"
GROWTH_NOT_CHECKED = "whether it is this configuration that leaks memory, or the workload"
STEADY_NOT_CHECKED = {
    False: "the steady state (the {} was still getting faster when it was measured)",
    None: "the steady state (the {}'s warm-up had too few steps to tell)",
}
INTERRUPTED_NOT_CHECKED = "further processes (the user stopped the confirmation when these had been measured)"
EPOCHS_NOT_CHECKED = "what lies between epochs (steps alone were timed)"
VALIDATION_NOT_CHECKED = "what validation costs beyond its beginning (its data does not say how long it is)"
STALLS_NOT_CHECKED = "stalls at ends of epochs (short epochs did not tell those of the {})"
STALLS_MOVE = (
    "how the speed-up changes with the machine's speed, on which it hangs how many epochs end in a stall of "
    "`tf.data`'s tuning ({})"
)
STALLS_IN_PART = "stalls at ends of epochs (short epochs told those of the {} in some processes only)"
MEMORY_NOT_CHECKED = "peak memory, and whether it grows (no process has told it)"
RETRACING_NOT_CHECKED = "retracing after the warm-up (the log does not tell of XLA's compilations)"
"""What a user must not take for granted; the recipe says so."""


def recommend(
    *,
    result: Result | None,
    search_records: Sequence[TrialRecord],
    batch_losses: Mapping[int, numerics.BatchLosses] | None = None,
    baseline: Configuration,
    machine: Machine,
    workload: RecipeWorkload,
    provenance: dict[str, Any],
    min_gain: float,
) -> Recipe:
    """The recipe: the confirmed winner, or the baseline where nothing was confirmed to be faster.

    Args:
        result: Of the confirmation; None when nothing in the search was faster.
        search_records: The trials of the search, the baseline first.
        batch_losses: What larger batches cost in learning, by batch size.
        baseline: What the user would run anyway.
        machine: Where it was measured.
        workload: What was trained.
        provenance: The remaining fields of `CreatedBy`.
        min_gain: Smallest gain that counts, as a share.
    """
    winner = None if result is None else result.winner
    configuration = baseline if winner is None else winner.configuration
    losses = _losses((batch_losses or {}).get(configuration.batch_size))
    return Recipe(
        configuration=dict(configuration),
        baseline=dict(baseline),
        evidence=_evidence(result, winner, search_records, min_gain, baseline, losses is not None),
        learning_rate=LearningRate.between(configuration.batch_size, baseline.batch_size, losses=losses),
        machine=machine,
        workload=workload,
        created_by=CreatedBy(autotune=__version__, created_at=now_utc(), **provenance),
    )


def _losses(measured: numerics.BatchLosses | None) -> BatchSizeLosses | None:
    return None if measured is None else BatchSizeLosses(**asdict(measured))


def _evidence(
    result: Result | None,
    winner: Confirmed | None,
    search_records: Sequence[TrialRecord],
    min_gain: float,
    baseline: Configuration,
    measured: bool,
) -> Evidence:
    searched = search_records[0]
    reference = searched
    if result is not None and result.baseline.throughput is not None:
        reference = result.baseline
    chosen = reference if winner is None else winner.record
    base_rate = reference.throughput or searched.throughput
    assert base_rate is not None
    rate = chosen.throughput or base_rate
    if winner is not None and winner.soaked is not None and winner.replaced:  # rates that no pause has raised
        rate, base_rate = map(_rate_of_legs, (winner.soaked.slices, winner.soaked.baseline_slices))
    speedup = Interval(value=1.0, low=1.0, high=1.0)
    if winner is not None and winner.speedup is not None:
        speedup = winner.speedup
    shortfall, best = _shortfall(result, search_records, min_gain) if winner is None else (None, None)
    lacked_time = result is not None and shortfall is Shortfall.NO_TIME
    return Evidence(
        verdict=Verdict.NO_SIGNIFICANT_GAIN if winner is None else Verdict.FASTER,
        min_gain=min_gain,
        speedup=_estimate(speedup),
        throughput=_throughput(rate),
        baseline_throughput=_throughput(base_rate),
        compile_seconds=chosen.compile_seconds,
        baseline_compile_seconds=reference.compile_seconds,
        break_even_samples=break_even(
            chosen.compile_seconds,
            reference.compile_seconds,
            rate=rate.value,
            baseline_rate=base_rate.value,
        ),
        peak_memory_bytes=_peak(chosen, searched if winner is None else chosen),
        baseline_peak_memory_bytes=_peak(reference, searched),
        input_wait_fraction=chosen.input_wait_fraction,
        stability=Stability(
            checks=() if winner is None else tuple(_check(each) for each in winner.checks),
            not_checked=_not_checked(winner, result, baseline, measured) if winner and result else (),
        ),
        confirmation=_confirmation(result, winner),
        best_candidate=best,
        shortfall=shortfall,
        continuous=_continuous(winner),
        sufficient_budget_seconds=result.sufficient_budget if result is not None and lacked_time else None,
        plain=_plain(
            result,
            winner,
            baseline,
            speedup=speedup,
            base_rate=base_rate,
            refused=shortfall is Shortfall.UNSTABLE,
        ),
    )


def _rate_of_legs(legs: Sequence[Sequence[Measured]]) -> Interval:
    """Samples per second of a continuous run; few legs tell nothing of their spread, and their slices do then."""
    return throughput_interval(
        [rate for leg in legs for rate, _ in leg],
        [examples for leg in legs for _, examples in leg],
        instances=[index for index, leg in enumerate(legs) for _ in leg],
    )


def _continuous(winner: Confirmed | None) -> ContinuousRun | None:
    if winner is None or winner.soaked is None:
        return None
    pauses = ratio_interval(winner.soaked.pauses)
    assert pauses is not None  # there are at least two legs of each
    slices = None if winner.in_slices is None else ratio_interval(winner.in_slices)
    return ContinuousRun(
        seconds=winner.soaked.seconds,
        pauses=Factor(value=pauses.value, ci95=(pauses.low, pauses.high)),
        slices=None if slices is None else _estimate(slices),
        tells=winner.soaked.tells,
        replaces_slices=winner.replaced,
    )


def _plain(
    result: Result | None,
    winner: Confirmed | None,
    baseline: Configuration,
    *,
    speedup: Interval,
    base_rate: Interval,
    refused: bool,
) -> PlainBaseline:
    """What is known of the baseline in float32 without XLA; where it is the baseline, all is known already.

    `refused` is whether what was faster broke a rule.
    """
    configuration = plain(baseline, baseline)
    if configuration == baseline:
        return PlainBaseline(
            configuration=dict(configuration),
            found="is_the_baseline",
            throughput=_throughput(base_rate),
            speedup_over_plain=_estimate(speedup),
            baseline_over_plain=_estimate(Interval(value=1.0, low=1.0, high=1.0)),
        )
    measured = None if result is None else result.plain
    if measured is None or measured.ratio is None:
        reason = "nothing was faster, so there was no confirmation"
        if measured is not None:
            reason = measured.left_out
        elif refused:
            reason = "what was faster broke a stability rule, so there was no confirmation"
        record = None if measured is None else measured.record
        return PlainBaseline(
            configuration=dict(configuration),
            found="not_measured",
            reason=reason,
            trial=None if record is None else record.trial,
        )
    assert measured.record is not None and measured.record.throughput is not None
    over_plain = measured.ratio.inverse
    return PlainBaseline(
        configuration=dict(configuration),
        found="measured",
        throughput=_throughput(measured.record.throughput),
        speedup_over_plain=None
        if winner is not None and winner.replaced  # by slices that pauses have raised
        else _ratio(over_plain if winner is None else winner.over_plain),
        baseline_over_plain=_ratio(over_plain),
        trial=measured.record.trial,
    )


def _ratio(estimate: LogInterval | None) -> Estimate | None:
    interval = None if estimate is None else ratio_interval(estimate)
    return None if interval is None else _estimate(interval)


def _not_checked(
    winner: Confirmed, result: Result, baseline: Configuration, measured: bool
) -> tuple[str, ...]:
    """What was not looked at of the winner; `measured` is whether its batch size's training losses were."""
    missing = []
    if result.stopped:
        missing.append(INTERRUPTED_NOT_CHECKED)
    missing += [
        STEADY_NOT_CHECKED[record.settled].format(who)
        for who, record in (("recommendation", winner.record), ("baseline", result.baseline))
        if not record.settled
    ]
    parity = next((check for check in winner.checks if check.name == numerics.NAME), None)
    if parity is None:
        missing.append(NUMERICS_NOT_CHECKED)
    elif not numerics.tells(parity):
        missing.append(f"{NUMERICS_NOT_CHECKED} ({parity.detail})")
    if winner.configuration.batch_size != baseline.batch_size:
        missing.append(BATCH_NOT_CHECKED.format("held-out" if measured else "training and held-out"))
    if winner.soaked is None:
        missing.append(LONG_RUN_NOT_CHECKED)
    elif not winner.soaked.tells and not winner.replaced:
        missing.append(PAUSES_NOT_CHECKED)
    if winner.record.timed_by == "steps" and winner.record.examples_per_epoch is None:
        missing.append(EPOCHS_NOT_CHECKED)
    elif winner.record.timed_by == "steps" and winner.record.validation_uncounted:
        missing.append(VALIDATION_NOT_CHECKED)
    missing += [
        (STALLS_NOT_CHECKED if record.stalled_ends is None else STALLS_IN_PART).format(who)
        for who, record in (("recommendation", winner.record), ("baseline", result.baseline))
        if record.timed_by == "steps"
        and record.examples_per_epoch is not None
        and (record.stalled_ends is None or record.stalls_untold)
    ]
    if stalled := _stalled(winner.record, result.baseline):
        missing.append(STALLS_MOVE.format(stalled))
    if winner.record.peak_host_bytes is None:
        missing.append(MEMORY_NOT_CHECKED)
    if winner.record.peak_device_bytes is not None:
        missing.append(THROTTLING_NOT_CHECKED)
        if not any(check.name == DEVICE_MEMORY for check in winner.checks):
            missing.append(DEVICE_MEMORY_NOT_CHECKED)
    missing += [
        f"{GROWTH_NOT_CHECKED} ({check.name.replace('_', ' ')}: {check.detail})"
        for check in winner.checks
        if check.name in (growth.HOST, growth.DEVICE) and not growth.tells(check)
    ]
    if not any(check.name == "retracing" for check in winner.checks):
        missing.append(RETRACING_NOT_CHECKED)
    return tuple(missing)


def _stalled(winner: TrialRecord, baseline: TrialRecord) -> str:
    """How many epochs ended in a stall, in words; nothing where hardly any did."""
    stalls, epochs = stalls_of_baseline(winner, baseline)
    if stalls.share > NOTABLE_SHARE:
        return f"{stalls.epochs} of {epochs} of the baseline's did, for {stalls.share:.0%} of its time"
    sides = {"baseline": baseline, "recommendation": winner}
    shares = {who: each.stalled_ends for who, each in sides.items() if each.stalled_ends is not None}
    if any(map(leaves_stalls_out, sides.values())):
        return ""  # neither is charged
    if max(shares.values(), default=0.0) > NOTABLE_SHARE:
        return (
            " and ".join(f"{share:.0%} of the {who}'s" for who, share in shares.items()) + ", by short epochs"
        )
    return ""


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


def _estimate(interval: Interval) -> Estimate:
    return Estimate(value=interval.value, ci95=(interval.low, interval.high))


def _throughput(interval: Interval) -> Throughput:
    return Throughput(value=interval.value, ci95=(interval.low, interval.high))


def _peak(record: TrialRecord, fallback: TrialRecord) -> PeakMemory:
    source = record if record.peak_host_bytes is not None else fallback
    return PeakMemory(host=source.peak_host_bytes, device=source.peak_device_bytes)


def _check(check: Check) -> StabilityCheck:
    return StabilityCheck(
        name=check.name, passed=check.passed, value=check.value, limit=check.limit, detail=check.detail
    )


def _confirmation(result: Result | None, winner: Confirmed | None) -> Confirmation:
    if result is None:
        return Confirmation(instances=0, templates=0, pairs=0, finalists=0, pairing=None, trials=())
    shown = winner or (result.confirmed[0] if result.confirmed else None)
    return Confirmation(
        instances=0 if shown is None or shown.ratio is None else shown.ratio.count,
        templates=0 if shown is None else shown.templates,
        pairs=0 if shown is None else len(shown.record.pairs),
        finalists=len(result.confirmed),
        pairing=None if shown is None or shown.record.pairing is None else shown.record.pairing.value,
        trials=(result.baseline.trial, *(each.record.trial for each in result.confirmed)),
    )


def _shortfall(
    result: Result | None, search_records: Sequence[TrialRecord], min_gain: float
) -> tuple[Shortfall, BestCandidate | None]:
    """Why nothing is recommended, and what came closest."""
    if result is None or not result.confirmed:
        refused = [each for each in search_records if each.trial and each.outcome is Outcome.UNSTABLE]
        if refused:
            return Shortfall.UNSTABLE, _refused(refused)
        measured = any(each.trial and each.speedup is not None for each in search_records)
        return (Shortfall.NOTHING_FASTER if measured else Shortfall.NOTHING_MEASURED), None
    best = result.confirmed[0]
    shortfall, reason = _rule_failed(best, result, min_gain)
    return shortfall, BestCandidate(
        configuration=dict(best.configuration),
        speedup=None if best.speedup is None else _estimate(best.speedup),
        reason=reason,
        search_speedup=None if best.in_search is None else best.in_search.value,
    )


def _refused(records: Sequence[TrialRecord]) -> BestCandidate:
    """The fastest of those that were not confirmed because they do not learn as they should."""
    best = max(records, key=lambda each: 0.0 if each.speedup is None else each.speedup.value)
    return BestCandidate(
        configuration=dict(best.configuration),
        speedup=None,
        reason=f"it broke a stability rule: {best.reason}",
        search_speedup=None if best.speedup is None else best.speedup.value,
    )


def _rule_failed(best: Confirmed, result: Result, min_gain: float) -> tuple[Shortfall, str]:
    """The first rule of the decision that a finalist failed, and in words with its figure."""
    broken = [f"{check.name}: {check.detail}" for check in best.checks if not check.passed]
    if broken:
        return Shortfall.UNSTABLE, "it broke a stability rule: " + "; ".join(broken)
    if best.record.outcome not in (Outcome.OK, Outcome.INTERRUPTED):
        reason = first_line(best.record.reason)
        return Shortfall.UNSTABLE, f"it failed ({best.record.outcome})" + (f": {reason}" if reason else "")
    speedup, instances = best.speedup, 0 if best.ratio is None else best.ratio.count
    if speedup is None:
        return result.cut_short, f"{_WHY_CUT_SHORT[result.cut_short]} ({instances} measured of at least 2)"
    if best.barred:
        return Shortfall.NO_TIME, (
            "the budget ended before its own continuous run, and another finalist's had shown that pauses made it "
            "look fast"
        )
    if best.templates < 2:
        return (
            result.cut_short,
            f"{_WHY_CUT_SHORT[result.cut_short]} (all {instances} forks of one interpreter)",
        )
    interval = f"{speedup.low:.3f} to {speedup.high:.3f}"
    if best.replaced and speedup.low <= 1:
        return Shortfall.INTERVAL_INCLUDES_1, (
            f"in a continuous run its interval, {interval}, does not lie above 1: only slices with pauses between "
            "them were faster"
        )
    if speedup.low <= 1:
        too_few = instances < FEW_INSTANCES and speedup.value >= 1 + min_gain
        return result.cut_short if too_few else Shortfall.INTERVAL_INCLUDES_1, (
            f"its interval, {interval} over {instances} fresh processes, does not lie above 1"
            + (": they were too few" if too_few else "")
        )
    gain = speedup.value - 1
    return Shortfall.BELOW_MIN_GAIN, f"its gain of {gain:.2%} is below the {min_gain:.2%} that count"


_WHY_CUT_SHORT = {
    Shortfall.NO_TIME: "the budget ended before it was measured in enough fresh processes",
    Shortfall.INTERRUPTED: "its confirmation was stopped before it was measured in enough fresh processes",
    Shortfall.BASELINE_FAILED: "the baseline kept failing beside it in fresh processes, or these had no device",
}
