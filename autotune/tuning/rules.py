"""The stability checks, applied to a leader's record beside the baseline's. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from autotune.data.figures import Check
from autotune.data.models import KnobValue
from autotune.data.options import MEMORY_MARGIN
from autotune.data.record import Pairing, Phase, Slice, TrialRecord
from autotune.recipe.apply import largest_divisor
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS, Numerics
from autotune.stats import stability
from autotune.stats.disturbance import HEAT, slowed_by

MOST_OF_EPOCH = 0.99  # that stands for all of it


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a trial, and whether its work varies."""

    host_bytes: int
    device_bytes: int | None  # None where no GPU is, or nothing tells
    margin: float = MEMORY_MARGIN  # the share to keep free
    work_varies: bool = False  # the work per update of the weights varies


def checks_of(
    record: TrialRecord, baseline: TrialRecord, limits: Limits, *, searched: Collection[TrialRecord] = ()
) -> tuple[Check, ...]:
    """Apply the stability checks to a leader's record beside the baseline's; `searched` are the run's records."""
    losses = [pair.candidate.loss for pair in record.pairs]
    checks = [
        stability.check_finite_loss(losses),
        stability.check_falling_loss(
            record.first_loss, record.last_loss, baseline_first=baseline.first_loss, baseline_last=baseline.last_loss
        ),
    ]
    for name, of, peak, limit in (
        (stability.HOST_MEMORY, stability.HOST_GROWTH, record.peak_host_bytes, limits.host_bytes),
        (stability.DEVICE_MEMORY, stability.DEVICE_GROWTH, record.peak_device_bytes, limits.device_bytes),
    ):
        if peak is None or not limit:
            continue
        checks.append(stability.check_peak_memory(name, peak, limit, margin=limits.margin))
        if record.throughput is not None:
            grows = stability.check_memory_growth(
                memory_of(record, of, candidate=True, searched=searched),
                memory_of(record, of, candidate=False, searched=searched),
                name=of,
                examples_per_second=record.throughput.value,
                held_bytes=peak,
                limit_bytes=limit,
                margin=limits.margin,
            )
            checks.append(grows)
    if record.pairs:
        checks += _checks_of_slices(record, baseline)
    if (work := stability.check_epoch_work(epoch_work(record), epoch_work(baseline))) is not None:
        checks.append(work)
    if limits.work_varies and (pairs := [pair for pair in record.pairs if not pair.disturbed]):
        own = [pair.candidate.steps / pair.candidate.seconds for pair in pairs]
        rates = [pair.baseline.steps / pair.baseline.seconds for pair in pairs]
        checks.append(stability.check_constant_work(own, rates))
    return tuple(checks)


def changing_work(records: Iterable[TrialRecord]) -> Check | None:
    """Return the failed check of a baseline whose work changes as it trains on; None without one."""
    baselines = [record for record in records if record.phase is Phase.BASELINE]
    return next((check for record in baselines for check in record.checks if check.name == stability.STEADY_WORK), None)


def epoch_seen(records: Iterable[TrialRecord]) -> float | None:
    """Return the share of an epoch that the candidates among these have trained on; None for all, or if unknown."""
    shares = [
        (pair.candidate.trained_examples or record.examples_per_epoch) / record.examples_per_epoch
        for record in records
        if record.phase in (Phase.SEARCH, Phase.CONFIRM) and record.timed_by == "steps" and record.examples_per_epoch
        for pair in record.pairs
    ]
    return share if (share := max(shares, default=1.0)) <= MOST_OF_EPOCH else None


def epoch_work(record: TrialRecord) -> stability.EpochWork:
    """Return the work of one epoch of a trial."""
    batch_size, steps = (int(record.configuration[name]) for name in ("batch_size", "steps_per_execution"))
    calls = next((log.calls_per_epoch for log in reversed(record.processes) if log.calls_per_epoch), None)
    return stability.EpochWork(
        examples=record.examples_per_epoch, calls=calls, examples_per_call=steps * batch_size, batch_size=batch_size
    )


def memory_of(
    record: TrialRecord, of: str, *, candidate: bool, searched: Iterable[TrialRecord] = ()
) -> list[list[tuple[float, float]]]:
    """Return examples trained so far and memory held after each slice, by process."""
    before_and_after = record.pairing is Pairing.BRACKETED and not candidate  # two processes of the baseline
    processes: dict[tuple[object, ...], list[Slice]] = {}
    for pair in record.pairs:
        process = (record.trial, pair.instance, before_and_after and pair.baseline_first)
        processes.setdefault(process, []).append(pair.candidate if candidate else pair.baseline)
    live: dict[str | None, list[Slice]] = {}  # the live baselines of the search, by seat
    for other in searched:
        if other.phase is not Phase.SEARCH:
            continue
        live.setdefault(other.seat, []).extend(pair.baseline for pair in other.pairs)
        if candidate and other.configuration == record.configuration:
            for pair in other.pairs:
                processes.setdefault((other.trial, pair.instance), []).append(pair.candidate)
    alive = [] if candidate else chain.from_iterable(map(_cut_by_process, live.values()))
    return [samples for slices in (*processes.values(), *alive) if (samples := memory_samples(slices, of))]


def _cut_by_process(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Cut the slices of a live baseline where it was started again."""
    processes: list[list[Slice]] = []
    trained = 0
    for piece in sorted((timed for timed in slices if timed.trained_examples), key=lambda timed: timed.at or 0.0):
        if not processes or (piece.trained_examples or 0) <= trained:
            processes.append([])
        processes[-1].append(piece)
        trained = piece.trained_examples or 0
    return processes


def why_memory_unclear(record: TrialRecord, searched: Collection[TrialRecord], baseline_batch: int) -> str:
    """Return why a memory leak cannot be excluded yet of a configuration that is confirmed; empty if that is clear.

    `searched` are the run's records.
    """
    ratio = max(1.0, int(record.configuration["batch_size"]) / baseline_batch)
    for of in (stability.HOST_GROWTH, stability.DEVICE_GROWTH):
        sides = (memory_of(record, of, candidate=is_candidate, searched=searched) for is_candidate in (True, False))
        if reason := stability.explain_unclear_growth(*sides, batch_ratio=ratio):
            return f"{of.replace('_', ' ')}: {reason}"
    return ""


def memory_samples(slices: Sequence[Slice], of: str) -> list[tuple[float, float]]:
    """Return examples trained so far and memory held, at the end of each slice of a process."""
    counted = accumulate(timed.examples for timed in slices)
    held = [timed.host_bytes if of == stability.HOST_GROWTH else timed.device_bytes for timed in slices]
    return [
        (float(examples if timed.trained_examples is None else timed.trained_examples), float(memory))
        for examples, timed, memory in zip(counted, slices, held, strict=True)
        if memory is not None
    ]


def _checks_of_slices(record: TrialRecord, baseline: TrialRecord) -> list[Check]:
    """Apply the rules on slices, each beside the baseline's of the same round."""
    own, baseline_slices = (_by_process(record, candidate=is_candidate) for is_candidate in (True, False))
    boundary = max(record.epoch_overhead_seconds or 0.0, baseline.epoch_overhead_seconds or 0.0)
    calls, usual = _calls(own, record), _calls(baseline_slices, baseline)
    checks = [stability.check_slow_calls(calls, usual), stability.check_hangs(calls, usual, boundary_seconds=boundary)]
    if retraces := _sums(own, lambda timed: timed.retraces):
        checks.append(stability.check_retracing(retraces, _sums(baseline_slices, lambda timed: timed.retraces) or [0]))
    throttled = [
        [not heat.isdisjoint(HEAT) for timed in chain(*side.values()) if (heat := slowed_by(timed)) is not None]
        for side in (own, baseline_slices)
    ]
    if all(throttled):
        checks.append(stability.check_throttling(*throttled))
    if skipped := _sums(own, lambda timed: timed.skipped_steps):
        baseline_skipped = _sums(baseline_slices, lambda timed: timed.skipped_steps) or [0]
        checks.append(
            stability.check_loss_scale(
                skipped,
                _sums(own, lambda timed: timed.steps) or [],
                baseline_share=sum(baseline_skipped) / sum(_sums(baseline_slices, lambda timed: timed.steps) or [1]),
            )
        )
    return checks


def _calls(by_process: Mapping[int, Sequence[Slice]], record: TrialRecord) -> list[stability.CallSeconds]:
    steps = int(record.configuration["steps_per_execution"])
    return [call_seconds(timed, steps) for timed in chain(*by_process.values())]


def call_seconds(timed: Slice, steps: int) -> stability.CallSeconds:
    """Return seconds of the calls of the train function in a slice, with so many steps in a call."""
    # The slow call is the highest quantile that boundaries between epochs do not reach.
    seconds = timed.step_seconds
    boundaries = timed.epochs * steps / timed.steps  # per call: large batches have many
    slow = seconds.p99 if boundaries < 0.01 else seconds.p90 if boundaries < 0.1 else seconds.p50
    return stability.CallSeconds(median=steps * seconds.p50, slow=steps * slow, longest=steps * seconds.max)


def _by_process(record: TrialRecord, *, candidate: bool) -> dict[int, list[Slice]]:
    """Return one side's slices of a leader's pairs."""
    found: dict[int, list[Slice]] = {}
    for pair in record.pairs:
        found.setdefault(pair.instance, []).append(pair.candidate if candidate else pair.baseline)
    return found


def _sums(slices: Mapping[int, Sequence[Slice]], count: Callable[[Slice], int | None]) -> list[int] | None:
    """Return the sum over the slices of each process; None where one was not counted."""
    counts = [[count(timed) for timed in of_process] for of_process in slices.values()]
    if any(number is None for of_process in counts for number in of_process):
        return None
    return [sum(number or 0 for number in of_process) for of_process in counts]


def known_to_fail(candidate: Configuration, out_of_memory: Iterable[Configuration]) -> bool:
    """Return whether `candidate` surely needs as much memory as one of the configurations that ran out of it."""
    # Each knob ranks its values by the memory they need. A knob whose ranks are unknown must have the same
    # value.
    return any(
        all(_needs_as_much(name, candidate[name], failed[name]) for name in failed if name in candidate)
        for failed in out_of_memory
    )


def expected_in_force(configuration: Configuration, baseline: TrialRecord) -> Configuration:
    """Return the values that should be in force: one iterator for all epochs lowers the steps per call."""
    examples = baseline.examples_per_epoch
    if not examples or not configuration.get("persistent_iterator"):
        return configuration
    requested, steps = int(configuration["steps_per_execution"]), examples / configuration.batch_size
    drops = examples % int(baseline.configuration["batch_size"]) == 0  # it may drop an incomplete last batch
    whole = {largest_divisor(max(1, way(steps)), requested) for way in (math.ceil, *([math.floor] if drops else []))}
    return configuration.replace(steps_per_execution=whole.pop()) if len(whole) == 1 else configuration


def needs_as_long(candidate: Configuration, timed_out: Configuration) -> bool:
    """Return whether calls of `candidate` compute at least as much as those of a configuration that timed out."""
    sizes = ("batch_size", "steps_per_execution")
    more = all(int(candidate[name]) >= int(timed_out[name]) for name in sizes)
    alike = (known for known, knob in KNOBS.items() if knob.numerics is Numerics.ARITHMETIC and known in candidate)
    return more and all(candidate[name] == timed_out[name] for name in alike)


def fit_on_card(
    baseline: Sequence[Slice],
    configurations: Sequence[Configuration],
    records: Iterable[TrialRecord],
    *,
    margin: float = MEMORY_MARGIN,
) -> bool:
    """Return whether a card may hold these configurations beside the baseline; True where nothing tells.

    A process that the card hardly holds gets slower kernels, which need less memory, so a margin must stay free. The
    baseline's slices while it was alone tell what it leaves free. What surely needs as much memory as the trial of a
    record takes that one's peak at least.
    """
    rooms = [
        card.free_bytes - margin * (card.free_bytes + card.used_bytes)
        for measured in baseline[-1:]
        for card in measured.gpus
        if card.free_bytes is not None and card.used_bytes is not None
    ]
    peaks = [(Configuration(record.configuration), record.peak_device_bytes or 0) for record in records]
    wanted = sum(
        max((peak for own, peak in peaks if known_to_fail(configuration, [own])), default=0)
        for configuration in configurations
    )
    return not rooms or wanted <= min(rooms)


def _needs_as_much(name: str, candidate: KnobValue, failed: KnobValue) -> bool:
    own, known = KNOBS[name].memory(candidate), KNOBS[name].memory(failed)
    if own is None or known is None:
        return type(candidate) is type(failed) and candidate == failed
    return own >= known
