"""A watch over the winner at the end of a run: one fresh process trains without a pause for the time asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.executors.executor import IN_CONFIRMATION, TrialFailed
from autotune.record import Interval, Outcome, Phase, Slice, TrialRecord
from autotune.space.configuration import Configuration
from autotune.stats import growth
from autotune.stats.stability import Check, hangs
from autotune.tuning.beside import PATIENCE_SECONDS
from autotune.tuning.rules import Limits, call_seconds, memory_of, memory_samples
from autotune.tuning.run import Run, never_two_alive
from autotune.tuning.running import Trial
from autotune.tuning.slicing import slice_seconds

SLICES_AT_ONCE = 8
"""Of a watch, between which the user may stop it."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What a watch has shown.

    Args:
        seconds: How long it trained.
        throughput: Samples per second; None where the process failed before its first slice ended.
        checks: Of memory and hangs.
        failure: How it failed, in one sentence; empty where it did not.
    """

    seconds: float
    throughput: Interval | None
    checks: tuple[Check, ...]
    failure: str = ""


def soak(run: Run, confirmed: TrialRecord, *, seconds: float, limits: Limits) -> Watched:
    """Train one process of the winner, and keep its slices as a trial of its own.

    Args:
        run: What all parts share.
        confirmed: The winner's confirmation: its pairs show whether the baseline leaks as well.
        seconds: How long, its start included.
        limits: Memory limits of the machine.
    """
    configuration = Configuration(confirmed.configuration)
    began, trial, failure = run.clock(), run.new_trial(Phase.SOAK, configuration), None
    try:
        with never_two_alive():
            _train(run, trial, ends=began + seconds)
    except TrialFailed as failed:
        failure = failed
    finally:
        if trial.live is not None:
            trial.live.kill()
            trial.live = None
    trial.seconds = run.clock() - began
    record = run.keep(trial.record(Outcome.OK) if failure is None else trial.failed(failure))
    return Watched(
        seconds=math.fsum(each.seconds for each in trial.slices),
        throughput=record.throughput,
        checks=_checks(trial, confirmed, limits, record.throughput),
        failure="" if failure is None else failure.reason or str(failure.outcome),
    )


def _train(run: Run, trial: Trial, *, ends: float) -> None:
    trial.live = run.trials.launch(
        trial.configuration, log=run.log_of(trial), data=run.data, timing=IN_CONFIRMATION
    )
    trial.instances += 1
    warm = trial.live.warm_up(max(PATIENCE_SECONDS, ends - run.clock()))
    trial.note_warm(warm)
    length = slice_seconds(warm)
    while run.clock() < ends and not run.interrupted():
        count = max(1, min(SLICES_AT_ONCE, int((ends - run.clock()) / length)))
        slices = trial.live.measure_continuously(length, count, 3 * count * length + PATIENCE_SECONDS)
        trial.add_slices(_stamped(slices, run.now()))
    trial.note_closing(trial.live.finish(0.0, PATIENCE_SECONDS))


def _stamped(slices: Sequence[Slice], ended: float) -> list[Slice]:
    """Slices without a pause between them, with the second of the run at which each ended."""
    left = [math.fsum(later.seconds for later in slices[place + 1 :]) for place in range(len(slices))]
    return [each.model_copy(update={"at": ended - after}) for each, after in zip(slices, left, strict=True)]


def _checks(
    trial: Trial, confirmed: TrialRecord, limits: Limits, throughput: Interval | None
) -> tuple[Check, ...]:
    if throughput is None:
        return ()
    found = []
    held = {growth.HOST: limits.host_bytes, growth.DEVICE: limits.device_bytes}
    for of, limit in held.items():
        samples = memory_samples(trial.slices, of)
        if samples and limit:
            found.append(
                growth.memory_growth(
                    [samples],
                    memory_of(confirmed, of, candidate=False),
                    of=of,
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
    found.append(hangs(calls, calls[:1], boundary_seconds=boundary))
    return tuple(found)
