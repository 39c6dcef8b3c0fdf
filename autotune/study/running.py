"""A trial while it runs, and the record it leaves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

from autotune.measure.intervals import LogInterval, mean_interval
from autotune.measure.throughput import long_run_rate
from autotune.space.configuration import Configuration
from autotune.trial.live import LiveTrial, TrialFailed, WarmUp
from autotune.trial.messages import Finished
from autotune.trial.record import Interval, Outcome, Pair, Pairing, Phase, Slice, TrialRecord


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


def _rate(each: Slice, warm: WarmUp) -> float:
    return rate(
        each,
        examples_per_epoch=warm.started.examples,
        epoch_overhead_seconds=warm.ready.epoch_overhead_seconds,
    )


def ratio_interval(estimate: LogInterval) -> Interval | None:
    """A logarithm's interval as one of the ratio; None while it is unbounded."""
    if not math.isfinite(estimate.low) or not math.isfinite(estimate.high):
        return None
    return Interval(value=math.exp(estimate.value), low=math.exp(estimate.low), high=math.exp(estimate.high))


class Trial:
    """One trial: its number, its live process while it has one, and what was gathered of it.

    Args:
        number: Within the run; 0 is the baseline.
        phase: What it is for.
        configuration: What it runs.
    """

    def __init__(self, number: int, phase: Phase, configuration: Configuration) -> None:
        self.number = number
        self.phase = phase
        self.configuration = configuration
        self.started_at = now_utc()
        self.live: LiveTrial | None = None
        self.warm: WarmUp | None = None
        self.pairing: Pairing | None = None
        self.stopped_by: str | None = None
        self.instances = 0
        self.seconds = 0.0
        self.pairs: list[Pair] = []
        self.slices: list[Slice] = []
        self.legs: list[tuple[Slice, ...]] = []
        self.log_ratios: list[float] = []
        self.finished: Finished | None = None

    def add_pair(self, *, baseline_first: bool, baseline: Slice, candidate: Slice, reference: WarmUp) -> None:
        """Keep two neighbouring slices; `reference` is the baseline's warm-up."""
        assert self.warm is not None
        self.pairs.append(
            Pair(
                instance=max(0, self.instances - 1),
                baseline_first=baseline_first,
                baseline=baseline,
                candidate=candidate,
            )
        )
        self.log_ratios.append(math.log(_rate(candidate, self.warm) / _rate(baseline, reference)))

    def rate(self, each: Slice) -> float:
        """Samples per second of a long training at the pace of one of its slices."""
        assert self.warm is not None
        return _rate(each, self.warm)

    @property
    def estimate(self) -> LogInterval | None:
        """Logarithm of the speed-up so far; None before the first pair."""
        return mean_interval(self.log_ratios) if self.log_ratios else None

    @property
    def speedup(self) -> Interval | None:
        """The speed-up so far; None before the second pair."""
        return None if self.estimate is None else ratio_interval(self.estimate)

    def record(self, outcome: Outcome, *, reason: str = "", log_tail: str = "") -> TrialRecord:
        """All that is kept of the trial, now that it ended as `outcome`."""
        own = [pair.candidate for pair in self.pairs] + self.slices
        ready = None if self.warm is None else self.warm.ready
        peak = None if self.finished is None else self.finished.peak_host_bytes
        return TrialRecord(
            trial=self.number,
            phase=self.phase,
            configuration=dict(self.configuration),
            outcome=outcome,
            reason=reason,
            log_tail=log_tail,
            started_at=self.started_at,
            seconds=self.seconds,
            instances=self.instances,
            launch_seconds=None if self.warm is None else self.warm.launch_seconds,
            first_step_seconds=None if self.warm is None else self.warm.first_step_seconds,
            compile_seconds=None if ready is None else ready.compile_seconds,
            warmup_seconds=None if ready is None else ready.warmup_seconds,
            warmup_steps=None if ready is None else ready.warmup_steps,
            settled=None if ready is None else ready.settled,
            timed_by=None if ready is None else ready.timed_by,
            epoch_overhead_seconds=None if ready is None else ready.epoch_overhead_seconds,
            examples_per_epoch=None if self.warm is None else self.warm.started.examples,
            pairing=self.pairing if self.pairs else None,
            pairs=tuple(self.pairs),
            slices=tuple(self.slices),
            legs=tuple(self.legs),
            stopped_by=self.stopped_by,
            throughput=self._throughput(own),
            speedup=self.speedup,
            peak_host_bytes=peak,
            peak_device_bytes=None if self.finished is None else self.finished.peak_device_bytes,
            input_wait_fraction=None if self.finished is None else self.finished.input_wait_fraction,
            cpu_utilisation=_utilisation(own),
            first_loss=None if self.warm is None else self.warm.first_loss,
            last_loss=own[-1].loss if own else None,
        )

    def _throughput(self, own: Sequence[Slice]) -> Interval | None:
        if self.warm is None or not own:
            return None
        return throughput_interval([_rate(each, self.warm) for each in own], [each.examples for each in own])

    def failed(self, failure: TrialFailed) -> TrialRecord:
        """The record of a trial that failed."""
        reason = "\n".join(part for part in (failure.reason, failure.detail) if part)
        return self.record(failure.outcome, reason=reason, log_tail=failure.log_tail)


def throughput_interval(rates: Sequence[float], examples: Sequence[int]) -> Interval:
    """Samples per second with its interval: all examples over all the time, for a training pays for slow stretches.

    With one slice only, the bounds are the value itself.

    Args:
        rates: Of single slices.
        examples: Trained on in each.
    """
    value = statistics.harmonic_mean(rates, weights=examples)
    width = mean_interval([math.log(each) for each in rates]).half_width
    factor = math.exp(width) if math.isfinite(width) else 1.0
    return Interval(value=value, low=value / factor, high=value * factor)


def _utilisation(own: Sequence[Slice]) -> float | None:
    seconds = sum(each.seconds for each in own)
    return sum(each.cpu_seconds for each in own) / seconds if seconds else None
