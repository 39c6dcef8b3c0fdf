"""The rules a configuration must pass before it may be recommended. Pure functions on finished figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MEMORY_MARGIN = 0.10
"""Share of the memory limit that must stay free at the peak."""
LOSS_RISE = 0.10
"""A loss may end this share above where it began and still not count as rising."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One rule, applied.

    Args:
        name: What was looked at.
        passed: Whether it may be recommended on this account.
        value: The figure.
        limit: What the figure was held against.
        detail: In words, with units.
    """

    name: str
    passed: bool
    value: float | None
    limit: float | None
    detail: str


def host_memory(peak_bytes: int, limit_bytes: int, *, margin: float = MEMORY_MARGIN) -> Check:
    """Peak memory of the trial's processes against the machine's or container's limit."""
    return _memory("host_memory", peak_bytes, limit_bytes, margin)


def device_memory(peak_bytes: int, limit_bytes: int, *, margin: float = MEMORY_MARGIN) -> Check:
    """Peak memory on the device against what it has."""
    return _memory("device_memory", peak_bytes, limit_bytes, margin)


def _memory(name: str, peak_bytes: int, limit_bytes: int, margin: float) -> Check:
    allowed = limit_bytes * (1 - margin)
    return Check(
        name=name,
        passed=peak_bytes <= allowed,
        value=float(peak_bytes),
        limit=allowed,
        detail=f"peak {peak_bytes / 2**30:.2f} GiB of {limit_bytes / 2**30:.2f} GiB, {margin:.0%} kept free",
    )


def loss_is_finite(losses: Sequence[float | None]) -> Check:
    """Whether the model reported a loss; a trial whose loss was not finite has ended before."""
    reported = [loss for loss in losses if loss is not None]
    return Check(
        name="finite_loss",
        passed=True,
        value=float(len(reported)),
        limit=None,
        detail=f"finite at each of {len(reported)} looks" if reported else "the model reports no loss",
    )


def loss_does_not_rise(
    first: float | None, last: float | None, *, baseline_first: float | None, baseline_last: float | None
) -> Check:
    """Whether the training loss still falls, where the baseline's does.

    Args:
        first: Loss after the candidate's first step.
        last: Its running loss at the trial's end.
        baseline_first: The same of the baseline.
        baseline_last: The same of the baseline.
    """
    name = "loss_falls"
    if first is None or last is None or baseline_first is None or baseline_last is None:
        return Check(name=name, passed=True, value=None, limit=None, detail="the model reports no loss")
    if baseline_last >= baseline_first:
        detail = "the baseline's loss does not fall within a trial either: nothing to hold it against"
        return Check(name=name, passed=True, value=last, limit=None, detail=detail)
    limit = first + LOSS_RISE * abs(first)
    return Check(
        name=name,
        passed=last <= limit,
        value=last,
        limit=limit,
        detail=f"from {first:.4g} to {last:.4g} (baseline: {baseline_first:.4g} to {baseline_last:.4g})",
    )
