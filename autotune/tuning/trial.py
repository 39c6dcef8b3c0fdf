"""A trial: what its processes reported, as they reported it, and the record that follows from that."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from autotune.data.figures import Bottleneck, Check, Interval, Profile
from autotune.data.options import Objective
from autotune.data.record import (
    ContinuedTraining,
    InterimAnalysis,
    Outcome,
    Pair,
    Pairing,
    Phase,
    Place,
    ProcessLog,
    Slice,
    TrialRecord,
)
from autotune.runtime.executor import TrialFailed, WarmUp
from autotune.runtime.protocol import Finished
from autotune.space.configuration import Configuration
from autotune.stats import ratios
from autotune.stats.bottleneck import StepFigures, find_bottleneck
from autotune.stats.disturbance import find_disturbances, gpu_figures
from autotune.stats.intervals import Spread, mean_interval
from autotune.stats.ratios import EpochCost, RatedPair, by_instance, rate

UNKNOWN_WAIT_ERROR = 0.1  # of the input wait, where a single slice has no spread
MOST_PAIRS_AGAIN = 4  # of an instance, for those that were disturbed
_RAW = (
    *("started_at", "pairing", "stopped_by", "instances", "seconds"),
    *("processes", "pairs", "slices", "looks", "checks", "branch"),
)
"""Fields of a record that a trial holds as they are."""
_LATEST = (
    *("launch_seconds", "first_step_seconds", "filling_seconds", "compile_seconds", "warmup_seconds", "warmup_steps"),
    *("run_in_seconds", "timed_by", "boundary", "examples_per_epoch", "validation_uncounted"),
)
"""Figures of a record that are those of the latest process."""


def now_utc() -> str:
    """Return this moment, ISO 8601 to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Trial:
    """One trial as it grows: raw data. Figures are properties, or derived in its record."""

    def __init__(
        self, number: int, phase: Phase, configuration: Configuration, objective: Objective = "throughput"
    ) -> None:
        self.number = number
        self.objective: Objective = objective  # what its pairs are compared by
        self.phase = phase
        self.configuration = self.requested = configuration
        self.reference: Trial | None = None  # the baseline that its pairs stand beside
        self.started_at = now_utc()
        self.place: Place | None = None  # where its latest process runs
        self.pairing: Pairing | None = None
        self.pooled_spread: Spread | None = None  # how much the pairs of other trials vary, where that is known
        self.stopped_by: str | None = None
        self.instances = 0
        self.seconds = 0.0
        self.processes: tuple[ProcessLog, ...] = ()
        self.pairs: tuple[Pair, ...] = ()
        self.slices: tuple[Slice, ...] = ()  # that are no candidate's
        self.looks: tuple[InterimAnalysis, ...] = ()
        self.checks: tuple[Check, ...] = ()
        self.branch: ContinuedTraining | None = None  # of a leader: how it learns
        self.failure: TrialFailed | None = None  # of a leader: why it cannot be recommended at all
        self.instance_seconds: list[float] = []  # of a leader: what each pair of processes took in this invocation
        self._rated: tuple[object, list[RatedPair]] = (None, [])  # for which pairs and costs, and the pairs rated

    @classmethod
    def from_record(cls, record: TrialRecord, objective: Objective = "throughput") -> Trial:
        """Return a trial as its record tells it, without a process."""
        trial = cls(record.trial, record.phase, Configuration(record.configuration), objective)
        trial.requested = Configuration(record.asked or record.configuration)
        for name in _RAW:
            setattr(trial, name, getattr(record, name))
        if record.seat is not None:
            trial.place = Place(seat=record.seat, host=record.host or "", device=record.device or "")
        return trial

    # ----------------------------------------------------------------------------------------------- reporting

    def note_warm(self, warm: WarmUp) -> None:
        """Keep what a process has reported."""
        reported = {**dict(warm.started), **dict(warm.ready), **vars(warm)}
        log = ProcessLog(**{name: reported[name] for name in ProcessLog.model_fields if name in reported})
        self.processes = (*self.processes, log)
        if self.place is not None and not self.place.device:  # a seat that is all of a host
            self.place = self.place.model_copy(update={"device": ", ".join(warm.started.gpus) or "CPU"})

    def note_closing(self, finished: Finished) -> None:
        """Keep the closing figures of the process that reported last."""
        *others, latest = self.processes
        reported = dict(finished)
        update = {name: reported[name] for name in ProcessLog.model_fields if name in reported}
        self.processes = (*others, latest.model_copy(update=update))

    def add_pair(self, *, baseline_first: bool, baseline: Slice, candidate: Slice, reference: Trial) -> None:
        """Keep two neighbouring slices; `reference` is the baseline's trial. Raises TrialFailed without energy."""
        self.reference = reference
        pair = Pair(
            instance=max(0, self.instances - 1),
            baseline_first=baseline_first,
            baseline=baseline,
            candidate=candidate,
            in_blocks=self.pairing is Pairing.BRACKETED,
        )
        if self._rate(pair) is None:
            failure = TrialFailed(Outcome.ERROR, "the GPU reported no energy for a slice (NVML)")
            failure.trial = self.number
            raise failure
        # Those of the process, or of a search trial's few, are judged anew: what comes after a burst shows it, too.
        pairs = (*self.pairs, pair)
        first = 0
        if self.phase is Phase.CONFIRM:
            first = next(place for place, known in enumerate(pairs) if known.instance == pair.instance)
        causes = find_disturbances([(judged.baseline, judged.candidate) for judged in pairs[first:]])
        marked = [
            judged.model_copy(update={"disturbed": cause is not None, "disturbed_by": cause})
            for judged, cause in zip(pairs[first:], causes, strict=True)
        ]
        self.pairs = (*pairs[:first], *marked)

    def add_slices(self, slices: Sequence[Slice]) -> None:
        """Keep slices of the present process that are no candidate's."""
        process = max(0, self.instances - 1)
        self.slices = (*self.slices, *(timed.model_copy(update={"process": process}) for timed in slices))

    # ------------------------------------------------------------------------------------ what follows from it

    @property
    def epoch_cost(self) -> EpochCost:
        """The seconds between epochs: the mean over its processes."""
        if not self.processes:
            return EpochCost()
        latest = self.processes[-1]
        comparable = [latest] if latest.timed_by == "epochs" else self.processes
        seen = [
            log.epoch_overhead_seconds
            for log in comparable
            if log.timed_by == latest.timed_by and log.epoch_overhead_seconds is not None
        ]
        return EpochCost(examples=latest.examples_per_epoch, seconds=statistics.fmean(seen) if seen else None)

    @property
    def rated(self) -> list[RatedPair]:
        """Its pairs with their rates, corrected for the time between epochs on either side."""
        known = (self.pairs, self.epoch_cost, None if self.reference is None else self.reference.epoch_cost)
        if self._rated[0] != known:
            self._rated = known, [rated for pair in self.pairs if (rated := self._rate(pair)) is not None]
        return self._rated[1]

    def _rate(self, pair: Pair) -> RatedPair | None:
        baseline_cost = EpochCost() if self.reference is None else self.reference.epoch_cost
        baseline = ratios.compared_rate(pair.baseline, baseline_cost, self.objective)
        candidate = ratios.compared_rate(pair.candidate, self.epoch_cost, self.objective)
        if baseline is None or candidate is None:
            return None
        return RatedPair(pair=pair, baseline=baseline, candidate=candidate)

    @property
    def log_ratios(self) -> list[float]:
        """Logarithms of the pairs' speed-ups, without those of disturbed pairs."""
        return [value for values in self.log_ratios_by_instance().values() for value in values]

    def log_ratios_by_instance(self) -> dict[int, list[float]]:
        """Return the same by process."""
        return ratios.log_ratios(self.rated, overall=self.phase is Phase.CONFIRM)

    def log_ratios_over(self, other: Trial) -> dict[int, list[float]]:
        """Return logarithms of speed-ups over another trial, by process, from the same slices of the baseline."""
        return ratios.log_ratios_over(self.rated, other.rated, overall=self.phase is Phase.CONFIRM)

    def extra_pairs_allowed(self) -> int:
        """Return how many more pairs the present process may have, for those that were disturbed."""
        last = by_instance(self.rated).get(max(0, self.instances - 1), [])
        return min(MOST_PAIRS_AGAIN, sum(rated.pair.disturbed for rated in last))

    @property
    def speedup(self) -> Interval | None:
        """Its speed-up so far; None before the first pair."""
        return mean_interval(self.log_ratios, pooled_spread=self.pooled_spread).ratio if self.pairs else None

    def rate_of(self, timed: Slice) -> float:
        """Return samples per second of a slice of its own."""
        return rate(timed, self.epoch_cost)

    def latest(self, name: str) -> Any:
        """Return a closing figure of the latest process that reported it; None if none did."""
        return next((figure for log in reversed(self.processes) if (figure := getattr(log, name)) is not None), None)

    def record(
        self, outcome: Outcome, *, reason: str = "", log_tail: str = "", failure: TrialFailed | None = None
    ) -> TrialRecord:
        """Return all that is kept of the trial, now that it ended as `outcome`, or as `failure` says."""
        if failure is not None:
            outcome, reason, log_tail = failure.outcome, failure.whole, failure.log_tail
        place = self.place
        record = TrialRecord(
            trial=self.number,
            phase=self.phase,
            configuration=dict(self.configuration),
            asked=None if self.requested == self.configuration else dict(self.requested),
            outcome=outcome,
            reason=reason,
            log_tail=log_tail,
            seat=None if place is None else place.seat,
            host=None if place is None else place.host,
            device=None if place is None else place.device or None,
            speedup=self.speedup,
            **{name: getattr(self, name) for name in _RAW if name != "pairing" or self.pairs},
            **self._figures(),
        )
        return record.model_copy(update={"bottleneck": limit_of(record)}) if outcome is Outcome.OK else record

    def _figures(self) -> dict[str, Any]:
        """Return the figures of its processes and slices under the names of a record."""
        logs = self.processes
        compiled = [log for log in logs if log.saved_seconds is None]  # not loaded what others have
        own = [*(pair.candidate for pair in self.pairs), *self.slices]
        processes = [*(pair.instance for pair in self.pairs), *(timed.process for timed in self.slices)]
        last_losses = {process: timed.loss for process, timed in zip(processes, own, strict=True)}
        cost, settled = self.epoch_cost, [log.settled for log in logs if log.settled is not None]
        waits = next((log for log in reversed(logs) if log.input_wait_fraction is not None), None)
        no_profile = next((log.no_profile for log in reversed(logs) if log.no_profile), "")
        seconds = sum(timed.seconds for timed in own)
        return {
            **({name: getattr(logs[-1], name) for name in _LATEST} if logs else {}),
            **({"compile_seconds": compiled[-1].compile_seconds} if compiled else {}),
            "epoch_overhead_seconds": cost.seconds,
            "settled": 2 * sum(settled) > len(settled) if settled else None,
            "throughput": ratios.throughput_interval(
                [rate(timed, cost) for timed in own],
                [timed.examples for timed in own],
                processes if self.phase is Phase.CONFIRM else None,
            )
            if own and logs
            else None,
            "first_loss": _median(log.first_loss for log in logs),
            "last_loss": _median(last_losses.values()),
            "peak_host_bytes": max(
                (log.peak_host_bytes for log in logs if log.peak_host_bytes is not None), default=None
            ),
            "peak_device_bytes": max(
                (log.peak_device_bytes for log in logs if log.peak_device_bytes is not None), default=None
            ),
            "input_wait_fraction": None if waits is None else waits.input_wait_fraction,
            "outside_fraction": None if waits is None else waits.outside_fraction,
            "ceilings": self.latest("ceilings"),
            "profile": Profile(reason=no_profile) if no_profile else None,
            "cpu_utilisation": sum(timed.cpu_seconds for timed in own) / seconds if seconds else None,
            "retraces": _total(timed.retraces for timed in own),
            "skipped_steps": _total(timed.skipped_steps for timed in own),
        }


def limit_of(record: TrialRecord) -> Bottleneck:
    """Return the limit of a trial, by its record.

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


def _median(values: Iterable[float | None]) -> float | None:
    """Return the median of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _total(counts: Iterable[int | None]) -> int | None:
    """Return their sum; None where one is not known, or there is none."""
    known = list(counts)
    return sum(count or 0 for count in known) if known and None not in known else None
