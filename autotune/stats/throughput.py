"""Samples per second of a long training, from short slices of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Measured = tuple[float, int]
"""A slice as samples per second, and the examples that it trained on."""


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
    if not examples_per_epoch:
        return rate
    return examples_per_epoch / (examples_per_epoch / rate + (epoch_overhead_seconds or 0.0))


def overall_rate(rates: Sequence[float], examples: Sequence[int]) -> float:
    """All examples over all the time, in samples per second: a training pays for its slow stretches.

    Args:
        rates: Of single slices, in samples per second.
        examples: Trained on in each.
    """
    seconds = math.fsum(count / rate for rate, count in zip(rates, examples, strict=True))
    return math.fsum(examples) / seconds


def overall_log_ratios(baseline: Sequence[Measured], candidate: Sequence[Measured]) -> list[float]:
    """For each pair a value that stands for its log-ratio; their mean is the logarithm of the overall rates' ratio.

    The mean of the pairs' own log-ratios is another one, where a side is less steady than the other: slices of as many
    examples, of which every other takes twice as long, show a rate of 0.71 on geometric average, and one of 0.67 over
    all their time, which is what a training pays. How far a pair's value is from the mean is what the pair contributes
    to the overall ratio (its influence), so that the values' spread is the one that the mean's error follows from;
    where speeds differ little from slice to slice, the values are the log-ratios.

    Args:
        baseline: Each pair's slice.
        candidate: The same of the other side, in the same order.
    """
    rates = [overall_rate(*zip(*side, strict=True)) for side in (candidate, baseline)]
    overall = math.log(rates[0] / rates[1])
    own, other = _contributions(candidate), _contributions(baseline)
    # Rounded, so that where speeds are equal the values are, too.
    return [round(overall + one - another, 12) for one, another in zip(own, other, strict=True)]


def _contributions(side: Sequence[Measured]) -> list[float]:
    """By how much, relatively, each slice had more examples than the others, less by how much it took longer."""
    examples = statistics.fmean(count for _, count in side)
    seconds = statistics.fmean(count / rate for rate, count in side)
    return [count / examples - count / rate / seconds for rate, count in side]
