"""Samples per second of a long training, from short slices of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Measured = tuple[float, int]  # a slice as samples per second, and the examples that it trained on


def long_run_rate(
    examples: int, seconds: float, *, examples_per_epoch: int | None = None, epoch_overhead_seconds: float | None = None
) -> float:
    """Samples per second, with the cost of epoch boundaries in proportion."""
    overhead = (epoch_overhead_seconds or 0.0) * examples / examples_per_epoch if examples_per_epoch else 0.0
    return examples / (seconds + overhead)


def overall_rate(slices: Sequence[Measured]) -> float:
    """All examples over all the time, in samples per second: a training pays for its slow stretches."""
    return sum(examples for _, examples in slices) / math.fsum(examples / rate for rate, examples in slices)


def overall_log_ratios(baseline: Sequence[Measured], candidate: Sequence[Measured]) -> list[float]:
    """For each pair a value that stands for its log-ratio; their mean is the logarithm of the overall rates' ratio."""
    # A value's distance from the mean is the pair's influence on it: so their spread gives the error of the mean.
    overall = math.log(overall_rate(candidate) / overall_rate(baseline))
    own, other = _influences(candidate), _influences(baseline)
    # Rounded: where speeds are equal the values are, too.
    return [round(overall + one - another, 12) for one, another in zip(own, other, strict=True)]


def _influences(side: Sequence[Measured]) -> list[float]:
    """By how much, relatively, each slice had more examples than the others, less by how much it took longer."""
    examples = statistics.fmean(count for _, count in side)
    seconds = statistics.fmean(count / rate for rate, count in side)
    return [count / examples - count / rate / seconds for rate, count in side]
