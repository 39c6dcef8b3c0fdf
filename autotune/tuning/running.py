"""A trial while it runs, and the record it leaves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Literal

from autotune.executors.executor import LiveTrial, TrialFailed, WarmUp
from autotune.record import Interval, Looks, Outcome, Pair, Pairing, Phase, Slice, TrialRecord
from autotune.space.configuration import Configuration
from autotune.stats.disturbance import Disturbance, Timing, disturbances, kept, load_of
from autotune.stats.intervals import (
    FEW_INSTANCES,
    LogInterval,
    Spread,
    instance_interval,
    mean_interval,
)
from autotune.stats.throughput import long_run_rate, overall_log_ratios, overall_rate
from autotune.worker.messages import Finished

MOST_REPEATS, MOST_REPEAT_SECONDS = 4, 4.0
"""Pairs of an instance that are taken again because foreign load disturbed them: so many, or more if they are short."""


_Side = tuple[float, int, bool]
"""A slice: samples per second, examples, and whether it is of whole epochs."""


def now_utc() -> str:
    """This moment, ISO 8601 to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def rate(each: Slice, *, examples_per_epoch: int | None, epoch_overhead_seconds: float | None) -> float:
    """Samples per second that a long training would have at this slice's pace.

    Args:
        each: The slice.
        examples_per_epoch: None when endless or unknown.
        epoch_overhead_seconds: What an epoch costs beyond its steps, where the slice leaves it out.
    """
    if each.epochs:
        return long_run_rate(each.examples, each.seconds)
    return long_run_rate(
        each.examples,
        each.seconds,
        examples_per_epoch=examples_per_epoch,
        epoch_overhead_seconds=epoch_overhead_seconds,
    )


def recorded_rate(each: Slice, record: TrialRecord) -> float:
    """The same of a slice that a record holds."""
    return rate(
        each,
        examples_per_epoch=record.examples_per_epoch,
        epoch_overhead_seconds=record.epoch_overhead_seconds,
    )


def _rate(each: Slice, warm: WarmUp) -> float:
    return rate(
        each,
        examples_per_epoch=warm.started.examples_per_epoch,
        epoch_overhead_seconds=warm.ready.epoch_overhead_seconds,
    )


def _timing(each: Slice, samples_per_second: float) -> Timing:
    load = load_of(
        seconds=each.seconds,
        cores=each.cores,
        foreign_cpu_seconds=each.foreign_cpu_seconds,
        steal_seconds=each.steal_seconds,
    )
    return Timing(at=each.at or 0.0, log_rate=math.log(samples_per_second), load=load)


LARGEST_LOGARITHM = 300.0
"""Of a bound that is written down; e to the power of 710 is no number any more."""


def ratio_interval(estimate: LogInterval) -> Interval | None:
    """A logarithm's interval as one of the ratio; None while it is unbounded, or too wide for a number."""
    if max(abs(estimate.low), abs(estimate.high)) > LARGEST_LOGARITHM:
        return None
    return Interval(value=math.exp(estimate.value), low=math.exp(estimate.low), high=math.exp(estimate.high))


class Trial:
    """One trial: its number, its live process while it has one, and what was gathered of it.

    Args:
        number: Within the run; 0 is the baseline.
        phase: What it is for.
        configuration: What it runs.

    Attributes:
        asked: What was asked for; `configuration` is what turned out to be in force.
        others: How much the pairs of other trials vary, where that is known.
    """

    def __init__(self, number: int, phase: Phase, configuration: Configuration) -> None:
        self.number = number
        self.phase = phase
        self.configuration = self.asked = configuration
        self.started_at = now_utc()
        self.live: LiveTrial | None = None
        self._warm: list[WarmUp] = []
        self.pairing: Pairing | None = None
        self.others: Spread | None = None
        self.stopped_by: str | None = None
        self.instances = 0
        self.seconds = 0.0
        self.pairs: list[Pair] = []
        self.slices: list[Slice] = []
        self._instances_of_slices: list[int] = []
        self.looks: tuple[Looks, ...] = ()
        self._timings: list[tuple[Timing, Timing]] = []
        self._bracketed: set[int] = set()
        self.finished: Finished | None = None

    @property
    def warm(self) -> WarmUp | None:
        """What the present process told once it was warm, or the last one did; None before the first."""
        return self._warm[-1] if self._warm else None

    def note_warm(self, warm: WarmUp) -> None:
        """Keep what a process has told."""
        self._warm.append(warm)

    def add_pair(self, *, baseline_first: bool, baseline: Slice, candidate: Slice, reference: WarmUp) -> None:
        """Keep two neighbouring slices; `reference` is the baseline's warm-up."""
        assert self.warm is not None
        pair = Pair(
            instance=max(0, self.instances - 1),
            baseline_first=baseline_first,
            baseline=baseline,
            candidate=candidate,
        )
        self.restore_pair(
            pair,
            baseline_rate=_rate(baseline, reference),
            candidate_rate=_rate(candidate, self.warm),
        )
        # All are judged anew: a burst shows by what comes after it, too.
        for place, disturbed in enumerate(disturbances(self._timings)):
            if self.pairs[place].disturbed is not disturbed:
                self.pairs[place] = self.pairs[place].model_copy(update={"disturbed": disturbed})

    def add_slices(self, slices: Sequence[Slice]) -> None:
        """Keep slices of the present process that are no candidate's."""
        self.slices += slices
        self._instances_of_slices += [max(0, self.instances - 1)] * len(slices)

    def restore_pair(self, pair: Pair, *, baseline_rate: float, candidate_rate: float) -> None:
        """Keep a pair as it is; its rates are in samples per second of a long training."""
        self.pairs.append(pair)
        if self.pairing is Pairing.BRACKETED:
            self._bracketed.add(pair.instance)
        self._timings.append((_timing(pair.baseline, baseline_rate), _timing(pair.candidate, candidate_rate)))

    def note_closing(self, finished: Finished) -> None:
        """Keep a process's closing figures: of several processes the highest peaks, and what only some of them told."""
        before = self.finished
        if before is None:
            self.finished = finished
            return
        self.finished = Finished(
            peak_host_bytes=max(before.peak_host_bytes, finished.peak_host_bytes),
            peak_device_bytes=_highest(before.peak_device_bytes, finished.peak_device_bytes),
            input_wait_fraction=before.input_wait_fraction
            if finished.input_wait_fraction is None
            else finished.input_wait_fraction,
        )

    @property
    def log_ratios(self) -> list[float]:
        """Logarithms of the pairs' speed-ups, without those of disturbed pairs; see `log_ratios_by_instance`."""
        return [each for of_instance in self.log_ratios_by_instance().values() for each in of_instance]

    def log_ratios_by_instance(self) -> dict[int, list[float]]:
        """The same, by instance: one that has too few pairs without the disturbed ones keeps them all."""
        return {
            instance: self._log_ratios(
                instance,
                [
                    self._sides(place)
                    for place, keep in zip(places, kept(self._disturbed(places)), strict=True)
                    if keep
                ],
            )
            for instance, places in self._places().items()
        }

    def log_ratios_over(self, other: Trial) -> dict[int, list[float]]:
        """Logarithms of its speed-ups over another trial, by instance, from the same slices of the baseline.

        What is disturbed of either counts as in `log_ratios_by_instance`.
        """
        beside = {pair.baseline: place for place, pair in enumerate(other.pairs)}
        found = {}
        for instance, places in self._places().items():
            both = [
                (place, beside[self.pairs[place].baseline])
                for place in places
                if self.pairs[place].baseline in beside
            ]
            disturbed = [
                self.pairs[own].disturbed is not None or other.pairs[others].disturbed is not None
                for own, others in both
            ]
            sides = [
                (other._sides(others)[1], self._sides(own)[1])
                for (own, others), keep in zip(both, kept(disturbed), strict=True)
                if keep
            ]
            if sides:
                found[instance] = self._log_ratios(instance, sides)
        return found

    def _log_ratios(self, instance: int, sides: Sequence[tuple[_Side, _Side]]) -> list[float]:
        """Values whose mean is the logarithm of an instance's speed-up: that of overall rates, for a claim.

        The pairs' own log-ratios where those would be no fair comparison: in a bracket, whose slices are not of the
        same moments, or where one side is timed in whole epochs and the other by steps. A machine that drifts
        makes slices of equal work take longer, and slices of equal time do less: it cancels out in pairs only. And
        in the search, where a few pairs decide, and one slice that stalls should not.
        """
        alike = len({by_epochs for both in sides for *_, by_epochs in both}) == 1
        if self.phase is not Phase.CONFIRM or instance in self._bracketed or not alike:
            return [math.log(own / other) for (other, *_), (own, *_) in sides]
        return overall_log_ratios(*([each[:2] for each in side] for side in zip(*sides, strict=True)))

    def _sides(self, place: int) -> tuple[_Side, _Side]:
        """Baseline's and candidate's slice of a pair."""
        pair, (baseline, candidate) = self.pairs[place], self._timings[place]
        return (
            (math.exp(baseline.log_rate), pair.baseline.examples, bool(pair.baseline.epochs)),
            (math.exp(candidate.log_rate), pair.candidate.examples, bool(pair.candidate.epochs)),
        )

    def repeats(self) -> int:
        """How many more pairs the present instance may have, for those that foreign load disturbed.

        How fast anything was does not enter it: measuring would else go on for as long as a result is not liked.
        """
        last = [self.pairs[place] for place in self._places().get(max(0, self.instances - 1), [])]
        seconds = sum(each.baseline.seconds + each.candidate.seconds for each in last)
        most = max(MOST_REPEATS, int(MOST_REPEAT_SECONDS * len(last) / seconds)) if seconds else MOST_REPEATS
        return min(most, sum(each.disturbed is Disturbance.LOAD for each in last))

    def _places(self) -> dict[int, list[int]]:
        """Where in `pairs` those of each instance are."""
        places: dict[int, list[int]] = {}
        for place, pair in enumerate(self.pairs):
            places.setdefault(pair.instance, []).append(place)
        return places

    def _disturbed(self, places: Sequence[int]) -> list[bool]:
        return [self.pairs[place].disturbed is not None for place in places]

    def _disturbed_pairs(self) -> Literal["left_out", "used"] | None:
        """What became of the disturbed pairs; None where there are none."""
        if all(pair.disturbed is None for pair in self.pairs):
            return None
        all_kept = (
            all(kept(marks)) and any(marks) for marks in map(self._disturbed, self._places().values())
        )
        return "used" if any(all_kept) else "left_out"

    def rate(self, each: Slice) -> float:
        """Samples per second of a long training at the pace of one of its slices."""
        assert self.warm is not None
        return _rate(each, self.warm)

    @property
    def estimate(self) -> LogInterval | None:
        """Logarithm of the speed-up so far; None before the first pair."""
        return mean_interval(self.log_ratios, others=self.others) if self.pairs else None

    @property
    def speedup(self) -> Interval | None:
        """The speed-up so far; None before the second pair."""
        return None if self.estimate is None else ratio_interval(self.estimate)

    def record(self, outcome: Outcome, *, reason: str = "", log_tail: str = "") -> TrialRecord:
        """All that is kept of the trial, now that it ended as `outcome`."""
        own = self._own()
        ready = None if self.warm is None else self.warm.ready
        peak = None if self.finished is None else self.finished.peak_host_bytes
        return TrialRecord(
            trial=self.number,
            phase=self.phase,
            configuration=dict(self.configuration),
            asked=None if self.asked == self.configuration else dict(self.asked),
            outcome=outcome,
            reason=reason,
            log_tail=log_tail,
            started_at=self.started_at,
            seconds=self.seconds,
            instances=self.instances,
            launch_seconds=None if self.warm is None else self.warm.launch_seconds,
            first_step_seconds=None if self.warm is None else self.warm.first_step_seconds,
            filling_seconds=None if self.warm is None else self.warm.started.filling_seconds,
            compile_seconds=None if ready is None else ready.compile_seconds,
            warmup_seconds=None if ready is None else ready.warmup_seconds,
            warmup_steps=None if ready is None else ready.warmup_steps,
            settled=self._settled(),
            run_in_seconds=None if ready is None else ready.run_in_seconds,
            timed_by=None if ready is None else ready.timed_by,
            epoch_overhead_seconds=self._epoch_overhead_seconds(),
            boundary=None if ready is None else ready.boundary,
            examples_per_epoch=None if self.warm is None else self.warm.started.examples_per_epoch,
            validation_uncounted=None if self.warm is None else self.warm.started.validation_uncounted,
            pairing=self.pairing if self.pairs else None,
            pairs=tuple(self.pairs),
            disturbed_pairs=self._disturbed_pairs(),
            slices=tuple(self.slices),
            looks=self.looks,
            stopped_by=self.stopped_by,
            throughput=self._throughput(own),
            speedup=self.speedup,
            peak_host_bytes=peak,
            peak_device_bytes=None if self.finished is None else self.finished.peak_device_bytes,
            input_wait_fraction=None if self.finished is None else self.finished.input_wait_fraction,
            cpu_utilisation=_utilisation(own),
            first_loss=_median(each.first_loss for each in self._warm),
            last_loss=_median(self._last_losses()),
            retraces=_total(each.retraces for each in own),
            skipped_steps=_total(each.skipped_steps for each in own),
        )

    def _own(self) -> list[Slice]:
        return [pair.candidate for pair in self.pairs] + self.slices

    def _throughput(self, own: Sequence[Slice]) -> Interval | None:
        if self.warm is None or not own:
            return None
        rates = [
            rate(
                each,
                examples_per_epoch=self.warm.started.examples_per_epoch,
                epoch_overhead_seconds=self._epoch_overhead_seconds(),
            )
            for each in own
        ]
        instances = None
        if self.phase is Phase.CONFIRM:
            instances = [pair.instance for pair in self.pairs] + self._instances_of_slices
        return throughput_interval(rates, [each.examples for each in own], instances)

    def _epoch_overhead_seconds(self) -> float | None:
        """What an epoch costs beyond its steps: the mean of all processes that were timed so, which saw a few each."""
        by_steps = [each.ready for each in self._warm if each.ready.timed_by == "steps"]
        if self.warm is not None and self.warm.ready.timed_by == "epochs":
            by_steps = [self.warm.ready]
        return _mean(each.epoch_overhead_seconds for each in by_steps)

    def _last_losses(self) -> Iterable[float | None]:
        """What each process reported last; of a process of the baseline, its slices."""
        last = {pair.instance: pair.candidate.loss for pair in self.pairs}
        last |= {
            instance: each.loss for instance, each in zip(self._instances_of_slices, self.slices, strict=True)
        }
        return last.values()

    def _settled(self) -> bool | None:
        told = [each.ready.settled for each in self._warm if each.ready.settled is not None]
        return 2 * sum(told) > len(told) if told else None

    def failed(self, failure: TrialFailed) -> TrialRecord:
        """The record of a trial that failed."""
        return self.record(failure.outcome, reason=failure.whole, log_tail=failure.log_tail)


def throughput_interval(
    rates: Sequence[float], examples: Sequence[int] | None = None, instances: Sequence[int] | None = None
) -> Interval:
    """Samples per second with its interval: all examples over all the time, for a training pays for slow stretches.

    With one slice only, the bounds are the value itself.

    Args:
        rates: Of single slices.
        examples: Trained on in each; equally many where None.
        instances: The process that each is of, where the interval is to be over processes. Of fewer than
            `FEW_INSTANCES` it would tell nothing, and is over slices.
    """
    value = overall_rate(rates, examples or [1] * len(rates))
    by_instance: dict[int, list[float]] = {}
    for instance, each in zip(instances or [0] * len(rates), rates, strict=True):
        by_instance.setdefault(instance, []).append(math.log(each))
    groups = list(by_instance.values())
    if len(groups) < FEW_INSTANCES:
        groups = [[math.log(each) for each in rates]]
    width = (instance_interval(groups) if len(groups) > 1 else mean_interval(groups[0])).half_width
    factor = math.exp(width) if math.isfinite(width) else 1.0
    return Interval(value=value, low=value / factor, high=value * factor)


def _highest(*counts: int | None) -> int | None:
    """The highest of those that are known."""
    return max((each for each in counts if each is not None), default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that are known."""
    known = [each for each in values if each is not None]
    return statistics.fmean(known) if known else None


def _median(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [each for each in values if each is not None]
    return statistics.median(known) if known else None


def _total(counts: Iterable[int | None]) -> int | None:
    """Their sum; None where any of them is not known, or there is none."""
    known = list(counts)
    return sum(each for each in known if each is not None) if known and None not in known else None


def _utilisation(own: Sequence[Slice]) -> float | None:
    seconds = sum(each.seconds for each in own)
    return sum(each.cpu_seconds for each in own) / seconds if seconds else None
