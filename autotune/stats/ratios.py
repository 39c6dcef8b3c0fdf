"""Speed-ups from pairs of slices. Pure: pairs and their rates in, logarithms of ratios out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotune.data.figures import Interval
from autotune.data.models import KnobValue
from autotune.data.options import Objective
from autotune.data.record import Pair, Slice, TrialRecord
from autotune.space.knobs import STRATEGY_KNOBS
from autotune.stats.disturbance import joules_of, usable_pairs
from autotune.stats.intervals import mean_interval, overall_log_ratios, overall_rate

FEW_PROCESSES = 4  # with fewer, slices tell more of a throughput than processes
_Side = tuple[float, int, bool]  # a slice: its rate, examples, and whether it is of whole epochs


@dataclass(frozen=True, kw_only=True)
class EpochCost:
    """The cost of an epoch beyond its steps, and the examples that share it; None if unknown."""

    examples: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class RatedPair:
    """A pair with the rates of its slices, in samples per second, or per joule, of a long training."""

    pair: Pair
    baseline: float
    candidate: float

    @property
    def sides(self) -> tuple[_Side, _Side]:
        """Both slices, as far as they tell of speed."""
        pair = self.pair
        return (
            (self.baseline, pair.baseline.examples, bool(pair.baseline.epochs)),
            (self.candidate, pair.candidate.examples, bool(pair.candidate.epochs)),
        )


def rate(timed: Slice, cost: EpochCost) -> float:
    """Return samples per second of a long training at a slice's pace, with the cost of epoch boundaries in proportion.

    Slices of whole epochs hold their cost.
    """
    overhead = 0.0
    if cost.examples and cost.seconds and not timed.epochs:
        overhead = cost.seconds * timed.examples / cost.examples
    return timed.examples / (timed.seconds + timed.charged_seconds + overhead)


def compared_rate(timed: Slice, cost: EpochCost, objective: Objective) -> float | None:
    """Return the rate that is compared: per second, or per joule at the slice's power; None without its energy."""
    per_second = rate(timed, cost)
    if objective != "energy":
        return per_second
    joules = joules_of(timed)
    return per_second * timed.seconds / joules if joules else None


def recorded_rate(timed: Slice, record: TrialRecord) -> float:
    """Return the rate of a slice that a record holds."""
    return rate(timed, EpochCost(examples=record.examples_per_epoch, seconds=record.epoch_overhead_seconds))


def by_instance(pairs: Sequence[RatedPair]) -> dict[int, list[RatedPair]]:
    """Return the pairs of each process of the candidate."""
    found: dict[int, list[RatedPair]] = {}
    for rated in pairs:
        found.setdefault(rated.pair.instance, []).append(rated)
    return found


def log_ratios(pairs: Sequence[RatedPair], *, overall: bool) -> dict[int, list[float]]:
    """Return logarithms of speed-ups by instance, without disturbed pairs; `overall` as a claim needs it."""
    return {
        instance: _ratios([rated.sides for rated in own], overall=overall and not own[0].pair.in_blocks)
        for instance, own in by_instance([rated for rated in pairs if not rated.pair.disturbed]).items()
    }


def log_ratios_over(
    pairs: Sequence[RatedPair], others: Sequence[RatedPair], *, overall: bool
) -> dict[int, list[float]]:
    """Return logarithms of speed-ups over another trial, from rounds that both were in, by instance."""
    # Rounds that are disturbed for either are left out where enough others remain.
    by_baseline = {rated.pair.baseline: rated for rated in others}
    found = {}
    for instance, own in by_instance(pairs).items():
        both = [(rated, by_baseline[rated.pair.baseline]) for rated in own if rated.pair.baseline in by_baseline]
        keep = usable_pairs([rated.pair.disturbed or other.pair.disturbed for rated, other in both])
        sides = [(other.sides[1], rated.sides[1]) for (rated, other), keeps in zip(both, keep, strict=True) if keeps]
        if sides:
            found[instance] = _ratios(sides, overall=overall and not own[0].pair.in_blocks)
    return found


def _ratios(sides: Sequence[tuple[_Side, _Side]], *, overall: bool) -> list[float]:
    """Return values whose mean is the logarithm of an instance's speed-up."""
    # The ratio of overall rates is what a training pays. Single pairs are compared in a bracket, whose slices are
    # not of the same moments; where only one side is timed in whole epochs, because slices of equal work and of
    # equal time drift apart on a noisy machine; and in the search, where one slice that stalls should not decide.
    is_timed_alike = len({by_epochs for both in sides for *_, by_epochs in both}) == 1
    if not overall or not is_timed_alike:
        return [math.log(own / other) for (other, *_), (own, *_) in sides]
    return overall_log_ratios(*([of_slice[:2] for of_slice in side] for side in zip(*sides, strict=True)))


def throughput_interval(
    rates: Sequence[float], examples: Sequence[int] | None = None, instances: Sequence[int] | None = None
) -> Interval:
    """Return samples per second, with an interval over processes, or over slices of fewer than `FEW_PROCESSES`."""
    # All examples over all the time: a training pays for slow stretches. The bounds of a single slice are its value.
    value = overall_rate(list(zip(rates, examples or [1] * len(rates), strict=True)))
    groups: dict[int, list[float]] = {}
    for instance, process_rate in zip(instances or [0] * len(rates), rates, strict=True):
        groups.setdefault(instance, []).append(math.log(process_rate))
    values = [math.log(value) for value in rates]
    if len(groups) >= FEW_PROCESSES:
        values = [statistics.fmean(of_process) for of_process in groups.values()]
    width = mean_interval(values).half_width
    factor = math.exp(width) if math.isfinite(width) else 1.0
    return Interval(value=value, low=value / factor, high=value * factor)


MAY_DIFFER = {
    *STRATEGY_KNOBS,
    *("batch_size", "steps_per_execution", "jit_compile", "xla_auto_clustering", "prefetch_to_device"),
}
"""Knobs in which the training on one device may differ: the strategy's own, those that it decides, and the batch."""


def scaling_efficiency(record: TrialRecord, records: Iterable[TrialRecord]) -> float | None:
    """Return throughput over replicas × one device's: that of the fastest equal trial of the run on one device.

    None on one device, and without such a trial. Both count as speed-ups over the baseline beside them, so that a drift
    of the machine cancels.
    """
    replicas = replicas_of(record)
    if replicas < 2 or record.speedup is None:
        return None
    alone = [
        1.0 if other.speedup is None else other.speedup.value
        for other in records
        if replicas_of(other) == 1 and _rest(other) == _rest(record)
        if other.trial == 0 or (other.outcome.measured and other.speedup is not None)
    ]
    return record.speedup.value / (replicas * max(alone)) if alone else None


def replicas_of(record: TrialRecord) -> int:
    """Return over how many devices a trial trains."""
    return int(record.configuration.get("replicas", 1))


def _rest(record: TrialRecord) -> dict[str, KnobValue]:
    return {name: value for name, value in record.configuration.items() if name not in MAY_DIFFER}
