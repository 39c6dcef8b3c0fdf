"""A trial while it runs, and the record it leaves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from autotune.data.figures import Bottleneck, Interval, Profile
from autotune.data.options import Objective
from autotune.data.record import Looks, Outcome, Pair, Pairing, Phase, Place, Slice, TrialRecord
from autotune.runtime.executor import TrialFailed, WarmUp
from autotune.runtime.protocol import Finished
from autotune.space.configuration import Configuration
from autotune.stats import ratios
from autotune.stats.bottleneck import StepFigures, find_bottleneck
from autotune.stats.disturbance import find_disturbances, gpu_figures
from autotune.stats.intervals import Spread, mean_interval
from autotune.stats.ratios import RatedPair, by_instance, rate

UNKNOWN_WAIT_ERROR = 0.1  # of the input wait, where a single slice has no spread
MOST_PAIRS_AGAIN = 4  # of an instance, for those that were disturbed


def now_utc() -> str:
    """This moment, ISO 8601 to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# fmt: off
OF_WARM = (
    "launch_seconds", "first_step_seconds", "filling_seconds", "compile_seconds", "warmup_seconds", "warmup_steps",
    "settled", "run_in_seconds", "timed_by", "epoch_overhead_seconds", "boundary", "examples_per_epoch",
    "validation_uncounted", "throughput",
)
# fmt: on
"""Fields of a record that only a warm process tells."""


class Trial:
    """One trial and what was gathered of it."""

    def __init__(
        self, number: int, phase: Phase, configuration: Configuration, objective: Objective = "throughput"
    ) -> None:
        self.number = number
        self.objective: Objective = objective  # what its pairs are compared by
        self.phase = phase
        self.configuration = self.asked = configuration
        self.started_at = now_utc()
        self.place: Place | None = None  # where its latest process runs
        self.pairing: Pairing | None = None
        self.others: Spread | None = None  # how much the pairs of other trials vary, where that is known
        self.stopped_by: str | None = None
        self.instances = 0
        self.seconds = 0.0
        self.rated: list[RatedPair] = []
        self.slices: list[Slice] = []
        self.looks: tuple[Looks, ...] = ()
        self.finished: Finished | None = None
        self._warm: list[WarmUp] = []
        self._instances_of_slices: list[int] = []
        self._before: TrialRecord | None = None  # of an earlier invocation

    @classmethod
    def of_record(cls, record: TrialRecord, reference: TrialRecord, objective: Objective = "throughput") -> Trial:
        """A trial as its record tells it, without a process."""
        trial = cls(record.trial, record.phase, Configuration(record.configuration), objective)
        trial.asked = Configuration(record.asked or record.configuration)
        trial.started_at, trial.seconds, trial.instances = record.started_at, record.seconds, record.instances
        trial.pairing, trial.stopped_by, trial.looks = record.pairing, record.stopped_by, record.looks
        if record.seat is not None:
            trial.place = Place(seat=record.seat, host=record.host or "", device=record.device or "")
        trial.add_slices(record.slices)
        trial._before = record
        bracketed = record.pairing is Pairing.BRACKETED
        trial.rated = [
            RatedPair(
                pair=each,
                baseline=_compared(
                    trial, each.baseline, reference.examples_per_epoch, reference.epoch_overhead_seconds
                ),
                candidate=_compared(trial, each.candidate, record.examples_per_epoch, record.epoch_overhead_seconds),
                bracketed=bracketed,
            )
            for each in record.pairs
        ]
        if record.peak_host_bytes is not None:
            trial.finished = Finished(
                peak_host_bytes=record.peak_host_bytes,
                peak_device_bytes=record.peak_device_bytes,
                input_wait_fraction=record.input_wait_fraction,
                outside_fraction=record.outside_fraction,
                ceilings=record.ceilings,
            )
        return trial

    @property
    def warm(self) -> WarmUp | None:
        """What the latest process told once it was warm; None before the first."""
        return self._warm[-1] if self._warm else None

    def note_warm(self, warm: WarmUp) -> None:
        """Keep what a process has told."""
        self._warm.append(warm)

    def add_pair(self, *, baseline_first: bool, baseline: Slice, candidate: Slice, reference: WarmUp) -> None:
        """Keep two neighbouring slices; `reference` is the baseline's warm-up. Raises TrialFailed without energy."""
        assert self.warm is not None
        pair = Pair(
            instance=max(0, self.instances - 1), baseline_first=baseline_first, baseline=baseline, candidate=candidate
        )
        rated = RatedPair(
            pair=pair,
            baseline=_compared(
                self, baseline, reference.started.examples_per_epoch, reference.ready.epoch_overhead_seconds
            ),
            candidate=_compared(
                self, candidate, self.warm.started.examples_per_epoch, self.warm.ready.epoch_overhead_seconds
            ),
            bracketed=self.pairing is Pairing.BRACKETED,
        )
        # Those of the process, or of a search trial's few, are judged anew: what comes after a burst shows it, too.
        pairs = [*self.rated, rated]
        judged = pairs
        if self.phase is Phase.CONFIRM:
            judged = [each for each in pairs if each.pair.instance == pair.instance]
        causes = find_disturbances([(each.pair.baseline, each.pair.candidate) for each in judged])
        self.rated = pairs[: -len(judged)]
        for each, cause in zip(judged, causes, strict=True):
            marked = each.pair.model_copy(update={"disturbed": cause is not None, "disturbed_by": cause})
            self.rated.append(replace(each, pair=marked))

    def add_slices(self, slices: Sequence[Slice]) -> None:
        """Keep slices of the present process that are no candidate's."""
        self.slices += slices
        self._instances_of_slices += [max(0, self.instances - 1)] * len(slices)

    def note_closing(self, finished: Finished) -> None:
        """Keep a process's closing figures: the highest peaks of all, and the latest input wait."""
        before = self.finished or finished
        waits = finished.input_wait_fraction
        self.finished = Finished(
            peak_host_bytes=max(before.peak_host_bytes, finished.peak_host_bytes),
            peak_device_bytes=max(filter(None, (before.peak_device_bytes, finished.peak_device_bytes)), default=None),
            input_wait_fraction=before.input_wait_fraction if waits is None else waits,
            outside_fraction=before.outside_fraction if waits is None else finished.outside_fraction,
            ceilings=finished.ceilings or before.ceilings,
            no_profile=finished.no_profile or before.no_profile,
        )

    @property
    def pairs(self) -> list[Pair]:
        """The pairs so far."""
        return [each.pair for each in self.rated]

    @property
    def log_ratios(self) -> list[float]:
        """Logarithms of the pairs' speed-ups, without those of disturbed pairs."""
        return [each for of_instance in self.log_ratios_by_instance().values() for each in of_instance]

    def log_ratios_by_instance(self) -> dict[int, list[float]]:
        """The same, by process."""
        return ratios.log_ratios(self.rated, overall=self.phase is Phase.CONFIRM)

    def log_ratios_over(self, other: Trial) -> dict[int, list[float]]:
        """Logarithms of its speed-ups over another trial, by process, from the same slices of the baseline."""
        return ratios.log_ratios_over(self.rated, other.rated, overall=self.phase is Phase.CONFIRM)

    def repeats(self) -> int:
        """How many more pairs the present process may have, for those that were disturbed."""
        last = by_instance(self.rated).get(max(0, self.instances - 1), [])
        return min(MOST_PAIRS_AGAIN, sum(each.pair.disturbed for each in last))

    def record(
        self, outcome: Outcome, *, reason: str = "", log_tail: str = "", failure: TrialFailed | None = None
    ) -> TrialRecord:
        """All that is kept of the trial, now that it ended as `outcome`, or as `failure` says."""
        if failure is not None:
            outcome, reason, log_tail = failure.outcome, failure.whole, failure.log_tail
        warm, finished, pairs = self.warm, self.finished, self.pairs
        own = [pair.candidate for pair in pairs] + self.slices
        instances = [pair.instance for pair in pairs] + self._instances_of_slices
        last_losses = {instance: each.loss for instance, each in zip(instances, own, strict=True)}
        record = TrialRecord(
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
            seat=None if self.place is None else self.place.seat,
            host=None if self.place is None else self.place.host,
            device=None if self.place is None else self.place.device or _device(warm),
            pairing=self.pairing if pairs else None,
            pairs=tuple(pairs),
            slices=tuple(self.slices),
            looks=self.looks,
            stopped_by=self.stopped_by,
            speedup=speedup_of(self),
            peak_host_bytes=None if finished is None else finished.peak_host_bytes,
            peak_device_bytes=None if finished is None else finished.peak_device_bytes,
            input_wait_fraction=None if finished is None else finished.input_wait_fraction,
            outside_fraction=None if finished is None else finished.outside_fraction,
            ceilings=None if finished is None else finished.ceilings,
            profile=Profile(reason=finished.no_profile) if finished is not None and finished.no_profile else None,
            cpu_utilisation=_utilisation(own),
            first_loss=_median([*(each.first_loss for each in self._warm), *self._earlier("first_loss")]),
            last_loss=_median(last_losses.values()),
            retraces=_total(each.retraces for each in own),
            skipped_steps=_total(each.skipped_steps for each in own),
        )
        if outcome is Outcome.OK:
            record = record.model_copy(update={"bottleneck": limit_of(record)})
        if warm is not None:
            return record.model_copy(update=self._when_warm(warm, own))
        return record.model_copy(
            update={name: each for name in OF_WARM for each in self._earlier(name)}  # restored, nothing new
        )

    def _earlier(self, name: str) -> list[Any]:
        """A field of an earlier invocation's record; nothing without one."""
        return [] if self._before is None else [getattr(self._before, name)]

    def _when_warm(self, warm: WarmUp, own: Sequence[Slice]) -> dict[str, object]:
        """The fields that only a warm process tells."""
        started, ready = warm.started, warm.ready
        settled = [each.ready.settled for each in self._warm if each.ready.settled is not None]
        overheads = [
            each.ready.epoch_overhead_seconds
            for each in ([warm] if ready.timed_by == "epochs" else self._warm)
            if each.ready.timed_by == ready.timed_by and each.ready.epoch_overhead_seconds is not None
        ]
        if self._earlier("timed_by") == [ready.timed_by] and ready.timed_by == "steps":
            earlier = self._earlier("epoch_overhead_seconds") * (self.instances - len(self._warm))
            overheads += [each for each in earlier if each is not None]
        overhead = statistics.fmean(overheads) if overheads else None
        rates = [rate(each, started.examples_per_epoch, overhead) for each in own]
        instances = [each.pair.instance for each in self.rated] + self._instances_of_slices
        return {
            "launch_seconds": warm.launch_seconds,
            "first_step_seconds": warm.first_step_seconds,
            "filling_seconds": started.filling_seconds,
            "compile_seconds": ready.compile_seconds,
            "warmup_seconds": ready.warmup_seconds,
            "warmup_steps": ready.warmup_steps,
            "settled": 2 * sum(settled) > len(settled) if settled else None,
            "run_in_seconds": ready.run_in_seconds,
            "timed_by": ready.timed_by,
            "epoch_overhead_seconds": overhead,
            "boundary": ready.boundary,
            "examples_per_epoch": started.examples_per_epoch,
            "validation_uncounted": started.validation_uncounted,
            "throughput": ratios.throughput_interval(
                rates, [each.examples for each in own], instances if self.phase is Phase.CONFIRM else None
            )
            if own
            else None,
        }


def limit_of(record: TrialRecord) -> Bottleneck:
    """Return what limits a trial, by its record.

    The input wait compares calls on a kept batch with those in the slices, which ran at other moments. So the spread
    of the slices tells how well it is known.
    """
    paces = [math.log(measured.seconds / measured.examples) for measured in record.own_slices]
    error = UNKNOWN_WAIT_ERROR
    if len(paces) > 1:
        error = 2 * statistics.stdev(paces) * math.sqrt(1 + 1 / len(paces))
    used = gpu_figures(record)
    return find_bottleneck(
        StepFigures(
            waits=record.input_wait_fraction,
            waits_error=min(1.0, error * (1 - (record.input_wait_fraction or 0.0))),
            outside=record.outside_fraction,
            ceilings=record.ceilings,
            profile=record.profile,
            gpu=used["gpu_utilisation"],
            gpu_memory=used["gpu_memory_utilisation"],
        )
    )


def speedup_of(trial: Trial) -> Interval | None:
    """A trial's speed-up so far; None before the second pair."""
    return mean_interval(trial.log_ratios, others=trial.others).ratio if trial.rated else None


def _device(warm: WarmUp | None) -> str | None:
    """In words, where a seat is all of a host."""
    return None if warm is None else ", ".join(warm.started.gpus) or "CPU"


def rate_of(trial: Trial, each: Slice) -> float:
    """Samples per second of a slice of a trial that is warm."""
    assert trial.warm is not None
    return _rate(each, trial.warm)


def _rate(each: Slice, warm: WarmUp) -> float:
    return rate(each, warm.started.examples_per_epoch, warm.ready.epoch_overhead_seconds)


def _median(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [each for each in values if each is not None]
    return statistics.median(known) if known else None


def _total(counts: Iterable[int | None]) -> int | None:
    """Their sum; None where one is not known, or there is none."""
    known = list(counts)
    return sum(each or 0 for each in known) if known and None not in known else None


def _utilisation(own: Sequence[Slice]) -> float | None:
    seconds = sum(each.seconds for each in own)
    return sum(each.cpu_seconds for each in own) / seconds if seconds else None


def _compared(trial: Trial, each: Slice, examples: int | None, overhead: float | None) -> float:
    found = ratios.compared_rate(each, examples, overhead, trial.objective)
    if found is None:
        failure = TrialFailed(Outcome.ERROR, "the GPU told no energy for a slice (NVML)")
        failure.trial = trial.number
        raise failure
    return found
