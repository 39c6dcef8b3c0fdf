"""Predict from peaks and failures which configurations run out of memory, alone or with others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune.data.models import KnobValue
from autotune.data.options import MEMORY_MARGIN
from autotune.data.record import Slice, TrialRecord
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS


def known_to_fail(candidate: Configuration, out_of_memory: Iterable[Configuration]) -> bool:
    """Return whether `candidate` surely needs as much memory as one of the configurations that ran out of it."""
    # Each knob ranks its values by the memory they need. A knob whose ranks are unknown must have the same
    # value.
    return any(
        all(_needs_as_much(name, candidate[name], failed[name]) for name in failed if name in candidate)
        for failed in out_of_memory
    )


def fit_on_card(
    baseline: Sequence[Slice],
    beside: Sequence[Configuration],
    records: Iterable[TrialRecord],
    *,
    margin: float = MEMORY_MARGIN,
) -> bool:
    """Return whether a card may hold these configurations beside the baseline; True where nothing tells.

    A process that the card hardly holds gets slower kernels, which need less memory, so a margin must stay free.

    Args:
        baseline: Slices of the baseline's process while it was alone: they tell what it leaves free.
        beside: What would be alive beside it.
        records: Trials, whose peaks are known. What surely needs as much as one of them takes its peak at least.
        margin: Share of the card that must stay free.
    """
    rooms = [
        card.free_bytes - margin * (card.free_bytes + card.used_bytes)
        for measured in baseline[-1:]
        for card in measured.gpus
        if card.free_bytes is not None and card.used_bytes is not None
    ]
    peaks = [(Configuration(record.configuration), record.peak_device_bytes or 0) for record in records]
    wanted = sum(
        max((peak for own, peak in peaks if known_to_fail(configuration, [own])), default=0) for configuration in beside
    )
    return not rooms or wanted <= min(rooms)


def _needs_as_much(name: str, candidate: KnobValue, failed: KnobValue) -> bool:
    own, known = KNOBS[name].memory(candidate), KNOBS[name].memory(failed)
    if own is None or known is None:
        return type(candidate) is type(failed) and candidate == failed
    return own >= known
