"""The situation of a search, derived from records: what limits its training, and what a trial of it takes. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence

from autotune.data.record import Slice, TrialRecord
from autotune.machine.fingerprint import units_for
from autotune.space.changes import Situation
from autotune.stats.disturbance import gpu_figures
from autotune.tuning.costs import is_busy
from autotune.tuning.rules import Limits

WAITS = 0.15  # share of its time waiting for input from which a training is limited by it
SHORT_STEP_SECONDS = 0.01  # a call into TensorFlow takes about 1 ms, which several steps may share
LAUNCH_STEP_SECONDS = 0.004  # the same is a quarter of a step, and limits the training
BUSY_GPU = 0.8  # share of the time in which a kernel runs: such a training hardly waits for input
COMPUTES = 0.5  # cores that a wait for input keeps busy: with fewer, it waits for a disk or a network
TAKEN = 0.9  # share of the cores that others left free: who takes so much gains nothing by more threads
LEAST_LEFT = 0.3  # share of the cores: if others take more, they may only fill what a trial that waits leaves
SHORT_EPOCH = 0.02  # share of an epoch that passes between epochs


def describe_situation(
    baseline: TrialRecord,
    best: TrialRecord,
    others: Sequence[TrialRecord],
    *,
    units: Collection[str],
    limits: Limits,
    on_gpu: bool,
    measured_seconds: float,
    import_seconds: float,
) -> Situation:
    """Return the situation in which the next candidate is chosen; the other trials have the latest last."""
    cores = next((timed.cores for timed in baseline.own_slices if timed.cores), math.inf)
    # TensorFlow has a thread for each core, whatever the quota. Under one, slices do not tell what others take.
    has_quota = all(timed.foreign_cpu_seconds is None for timed in baseline.own_slices)
    sets_threads = any(baseline.configuration.get(f"{pool}_op_threads") for pool in ("intra", "inter"))
    short_steps = _usual_step(baseline) <= SHORT_STEP_SECONDS
    known = next((trial for trial in (best, *reversed(others)) if trial.input_wait_fraction is not None), None)
    return Situation(
        on_gpu=on_gpu,
        units=units_for(units, on_gpu=on_gpu),
        waits_for_input=waits_for_input(known or best),
        may_wait=short_steps and known is None,
        most_calls=math.inf if known is None else most_calls(known),
        most_threads=cores if has_quota or sets_threads else cores - 1,
        short_steps=short_steps,
        launch_bound=_usual_step(baseline) <= LAUNCH_STEP_SECONDS,
        faults_often=best.faults_often,
        short_epochs=has_short_epochs(baseline),
        memory_share=_memory_share(baseline, limits),
        start_seconds=baseline.start_seconds,
        measured_seconds=(baseline.warmup_seconds or 0.0) + measured_seconds,
        import_seconds=import_seconds,
    )


def _usual_step(record: TrialRecord) -> float:
    """Return the seconds of a step; 0 where none was timed."""
    return statistics.median([measured.step_seconds.p50 for measured in record.slices] or [0.0])


def has_short_epochs(record: TrialRecord) -> bool:
    """Return whether what lies between epochs takes much of them; False where that is not known."""
    if record.timed_by == "epochs":
        return True
    overhead, examples = record.epoch_overhead_seconds, record.examples_per_epoch
    if not overhead or not examples or record.throughput is None:
        return False
    return overhead >= SHORT_EPOCH * examples / record.throughput.value


def waits_for_input(record: TrialRecord) -> bool:
    """Return whether a trial waits for input, as was measured, or as what it leaves idle tells."""
    if record.input_wait_fraction is not None:
        return record.input_wait_fraction > WAITS
    gpu = gpu_figures(record)["gpu_utilisation"]
    is_idle = not is_busy(record.own_slices) and share_taken(record.own_slices) < TAKEN
    return is_idle and (gpu is None or gpu < BUSY_GPU)


def share_taken(slices: Sequence[Slice]) -> float:
    """Return the share that a trial takes of what others leave of its cores; 0 where that is not known."""
    offered = sum((part.cores or 0) * part.seconds for part in slices)
    free = max(LEAST_LEFT * offered, offered - sum(part.foreign_cpu_seconds or 0.0 for part in slices))
    return sum(part.cpu_seconds for part in slices if part.cores) / free if free else 0.0


def most_calls(record: TrialRecord) -> float:
    """Return how many parallel calls can make the input faster: 1 if it takes all cores, no limit if it only waits."""
    waits, cores = record.input_wait_fraction, next((part.cores for part in record.own_slices if part.cores), None)
    if not waits or cores is None:
        return math.inf
    taken = share_taken(record.own_slices)
    # While it does not wait, a step takes all that is free at most: the rest is the input's.
    computes = cores * (taken - 1 + waits) / waits
    if computes < COMPUTES:
        return math.inf
    return 1 if taken >= TAKEN else math.ceil(cores / min(1.0, computes))


def _memory_share(baseline: TrialRecord, limits: Limits) -> float | None:
    """Return the share that the baseline takes of the memory it may take, the host's or the device's; None: unknown."""
    slices = baseline.own_slices
    taken = (
        (max((part.host_bytes or 0 for part in slices), default=0), limits.host_bytes),
        (max((part.device_bytes or 0 for part in slices), default=0), limits.device_bytes or 0),
    )
    return max((used / limit for used, limit in taken if used and limit), default=None)
