"""What cards did while a trial was measured, from its slices. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from autotune.data.record import Slice, TrialRecord
from autotune.stats.disturbance import slowed_by


def joules_of(each: Slice) -> float | None:
    """What all cards of a slice took; None where one of them does not tell, or there is none."""
    told = [card.joules for card in each.gpus]
    return sum(each or 0.0 for each in told) if told and None not in told else None


def gpu_figures(slices: Sequence[Slice], samples_per_second: float | None) -> dict[str, float | None]:
    """Figures of a trial with these slices and this throughput, by the names of history's columns.

    Power and energy are of all its cards, use and clocks the mean over them, the temperature the highest. What a card
    does not tell is None.
    """
    seconds = sum(each.seconds for each in slices)
    cards = [card for each in slices for card in each.gpus]
    joules = [joules_of(each) for each in slices]
    counted = bool(joules) and None not in joules
    watts: float | None = None
    if counted:
        watts = sum(each or 0.0 for each in joules) / seconds
    elif cards and all(card.watts is not None for card in cards):
        watts = sum(sum(card.watts or 0.0 for card in each.gpus) * each.seconds for each in slices) / seconds
    slowed = [bool(limits) for each in slices if (limits := slowed_by(each)) is not None]
    return {
        "joules_per_sample": watts / samples_per_second if counted and watts and samples_per_second else None,
        "gpu_power_watts": watts,
        "gpu_utilisation": _mean([card.utilisation for card in cards]),
        "gpu_memory_utilisation": _mean([card.memory_utilisation for card in cards]),
        "gpu_sm_clock_share": _mean(
            [card.sm_mhz / card.most_sm_mhz if card.sm_mhz and card.most_sm_mhz else None for card in cards]
        ),
        "gpu_temperature": max((card.celsius for card in cards if card.celsius is not None), default=None),
        "gpu_slowed_share": _mean([float(each) for each in slowed]),
    }


def recorded_gpu_figures(record: TrialRecord) -> dict[str, float | None]:
    """Return what a trial's GPUs did while it was measured; see `gpu_figures`."""
    return gpu_figures(record.own_slices, record.throughput.value if record.throughput else None)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return statistics.fmean(known) if known else None
