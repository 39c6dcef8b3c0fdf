"""Samples per second of a long training, from short slices of it."""

from __future__ import annotations


def long_run_rate(
    examples: int,
    seconds: float,
    *,
    examples_per_epoch: int | None = None,
    epoch_overhead_seconds: float | None = None,
) -> float:
    """Samples per second, with the cost of epoch boundaries in proportion.

    Args:
        examples: Trained on in the slice or slices.
        seconds: Their length. Slices of whole epochs hold their boundaries already: leave the rest None.
        examples_per_epoch: None when endless.
        epoch_overhead_seconds: What an epoch costs beyond its steps, where slices leave it out.

    Returns:
        Samples per second: the epoch's examples over the time of its steps and its boundary.
    """
    rate = examples / seconds
    if not examples_per_epoch or not epoch_overhead_seconds:
        return rate
    return examples_per_epoch / (examples_per_epoch / rate + epoch_overhead_seconds)
