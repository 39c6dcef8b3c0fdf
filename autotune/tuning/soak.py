"""A watch over the winner at the end of a run: one fresh process trains without a pause for the time asked for."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from autotune.data.figures import Check, Interval
from autotune.data.record import Outcome, Phase, Slice, TrialRecord
from autotune.recipe.evidence import Watch
from autotune.runtime.executor import IN_SEARCH, DeviceUnavailable, TrialFailed
from autotune.space.configuration import Configuration
from autotune.stats.stability import DEVICE_GROWTH, HOST_GROWTH, check_hangs, check_memory_growth
from autotune.tuning.rules import Limits, call_seconds, memory_of, memory_samples
from autotune.tuning.run import Run, never_two_alive
from autotune.tuning.seat import BASELINE_SECONDS
from autotune.tuning.side import PATIENCE_SECONDS, Side
from autotune.tuning.slicing import slice_seconds
from autotune.tuning.trial import Trial
from autotune.tuning.waiting import Deadline

SLICES_AT_ONCE = 8  # of a watch, between which the user may stop it


def soak(run: Run, confirmed: TrialRecord, *, seat: str, seconds: float, limits: Limits) -> Watch | None:
    """Train one process of the winner, and keep its slices as a trial of its own; None where nothing was seen."""
    trial = run.new_trial(Phase.SOAK, Configuration(confirmed.configuration))
    failure = None
    try:
        with never_two_alive():
            _train(run, trial, seat, seconds)
    except TrialFailed as failed:
        failure = failed
    record = run.keep(trial.record(Outcome.OK, failure=failure))
    if isinstance(failure, DeviceUnavailable) or (failure is None and not trial.slices):
        return None
    return Watch(
        seconds=math.fsum(each.seconds for each in trial.slices),
        throughput=record.throughput,
        checks=_checks(trial, confirmed, limits, record.throughput, run.records.values()),
        failure="" if failure is None else failure.reason or str(failure.outcome),
    )


def _train(run: Run, trial: Trial, seat: str, seconds: float) -> None:
    side = Side.start(
        run,
        Deadline(clock=run.clock),
        trial,
        seat=seat,
        usual=0.0,
        at_most=max(BASELINE_SECONDS, seconds),
        timing=IN_SEARCH,
    )
    ends = run.clock() + seconds
    try:
        length = slice_seconds(side.warm)
        while run.clock() < ends and not run.interrupted():
            count = max(1, min(SLICES_AT_ONCE, int((ends - run.clock()) / length)))
            patience = 3 * count * length + PATIENCE_SECONDS
            slices = side.live.measure_continuously(length, count, patience)
            trial.add_slices(_stamped(slices, run.now()))
        side.close(0.0)
    finally:
        side.kill()


def _stamped(slices: Sequence[Slice], ended: float) -> list[Slice]:
    """Slices without a pause between them, with the second of the run at which each ended."""
    left = [math.fsum(later.seconds for later in slices[place + 1 :]) for place in range(len(slices))]
    return [each.model_copy(update={"at": ended - after}) for each, after in zip(slices, left, strict=True)]


def _checks(
    trial: Trial, confirmed: TrialRecord, limits: Limits, throughput: Interval | None, searched: Collection[TrialRecord]
) -> tuple[Check, ...]:
    if throughput is None:
        return ()
    found = []
    held = {HOST_GROWTH: limits.host_bytes, DEVICE_GROWTH: limits.device_bytes}
    for of, limit in held.items():
        samples = memory_samples(trial.slices, of)
        if samples and limit:
            found.append(
                check_memory_growth(
                    [samples],
                    memory_of(confirmed, of, candidate=False, searched=searched),
                    name=of,
                    examples_per_second=throughput.value,
                    held_bytes=round(max(each for _, each in samples)),
                    limit_bytes=limit,
                    margin=limits.margin,
                )
            )
    steps = int(trial.configuration["steps_per_execution"])
    calls = [call_seconds(each, steps) for each in trial.slices]
    warm = trial.warm
    boundary = 0.0 if warm is None else warm.ready.epoch_overhead_seconds or 0.0
    found.append(check_hangs(calls, calls[:1], boundary_seconds=boundary))
    return tuple(found)
