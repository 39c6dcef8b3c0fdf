"""Compute the scaling efficiency of a training over several devices. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.data.models import KnobValue
from autotune.data.record import TrialRecord
from autotune.space.knobs import STRATEGY_KNOBS

MAY_DIFFER = {
    *STRATEGY_KNOBS,
    *("batch_size", "steps_per_execution", "jit_compile", "xla_auto_clustering", "prefetch_to_device"),
}
"""Knobs in which the training on one device may differ: the strategy's own, those that it decides, and the batch."""


def scaling_efficiency(record: TrialRecord, records: Iterable[TrialRecord]) -> float | None:
    """Return throughput over replicas × one device's: that of the fastest equal trial on one device.

    Both count as speed-ups over the baseline beside them, so that a drift of the machine cancels.

    Args:
        record: A trial's.
        records: All of its run.

    Returns:
        The share; None on one device, and without an equal trial on one device.
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
