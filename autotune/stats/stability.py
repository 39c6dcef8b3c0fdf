"""The rules a configuration must pass before it may be recommended. Pure functions on finished figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DEVICE_MEMORY = "device_memory"
MEMORY_MARGIN = 0.10
"""Share of the memory limit that must stay free at the peak."""
LOSS_RISE = 0.10
"""A loss may end this share above where it, or the baseline's, began and still not count as rising."""
MOST_RETRACES = 1
"""Of one process after its warm-up: a shape that comes seldom is compiled for once."""
RETRACES_OF_BASELINE = 2
"""A configuration may retrace so many times as often as the baseline: a faster one meets more batches meanwhile."""
TAIL_SECONDS = 0.25
"""What a slow call may take beyond the median one in any case: three times what plain `fit` stalls now and then, 70 to
80 ms."""
TAIL_RATIO = 3.0
"""The same, in median calls."""
TAIL_OF_BASELINE = 3.0
"""The same, in what the baseline's slowest calls take beyond its median ones."""
HANG_SECONDS = 1.5
"""A call that takes so much longer than the median one is a hang."""
HANG_RATIO = 2.0
"""... but not where that is less than so many median calls,"""
HANG_OF_BOUNDARY = 5.0
"""... or so many usual boundaries of an epoch, which is one of the calls where epochs are timed whole."""
MOST_HANGS = 2
"""Slices with a hang in them that decide nothing: one burst of whatever else runs on the machine reaches two."""
HANGS_OF_BASELINE = 3
"""Where the baseline hangs, too, a configuration may in so many times as many slices."""
MOST_SKIPPED = 0.05
"""Largest share of steps that a loss scale may skip beyond the baseline's: growing every 2,000 steps it skips one."""
FEW_SKIPPED = 2
"""Skipped steps of a process that are no sign of anything, however few its steps: the scale may still be settling."""

RETRACING_ADVICE = (
    "give all batches one shape (pad, bucket to a few lengths, drop the remainder), and pass tensors instead of "
    "Python numbers to what is traced"
)


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
    return _memory(DEVICE_MEMORY, peak_bytes, limit_bytes, margin)


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

    A first loss is of one call, and as lucky as its batches are: what counts as a rise begins above the higher one of
    both sides', which have the same weights then. A loss that ends where the baseline's does is no rise, whatever
    either began with.

    Args:
        first: Loss after the candidate's first call, the median of its processes.
        last: Its running loss at the trial's end, the same.
        baseline_first: The same of the baseline.
        baseline_last: The same of the baseline.
    """
    name = "loss_falls"
    if first is None or last is None or baseline_first is None or baseline_last is None:
        return Check(name=name, passed=True, value=None, limit=None, detail="the model reports no loss")
    if baseline_last >= baseline_first:
        detail = "the baseline's loss does not fall within a trial either: nothing to hold it against"
        return Check(name=name, passed=True, value=last, limit=None, detail=detail)
    start = max(first, baseline_first)
    limit = start + LOSS_RISE * abs(start)
    return Check(
        name=name,
        passed=last <= limit,
        value=last,
        limit=limit,
        detail=f"from {first:.4g} to {last:.4g} (baseline: {baseline_first:.4g} to {baseline_last:.4g})",
    )


def no_retracing(own: Sequence[int], baseline: Sequence[int]) -> Check:
    """Whether the train function stays as it was traced and compiled once a trial is warm.

    What retraces costs seconds each time, at moments that nobody chose, and memory that is never given back. A
    baseline that retraces as well shows that the workload does, whatever the configuration.

    Args:
        own: How often each process of the configuration retraced after its warm-up.
        baseline: The same of the baseline's processes beside them.
    """
    value, usual = statistics.median_high(own), statistics.median_high(baseline)
    limit = max(MOST_RETRACES, RETRACES_OF_BASELINE * usual)
    detail = f"traced or compiled again {value} times after the warm-up (baseline: {usual})"
    if value > limit:
        detail += "; " + RETRACING_ADVICE
    elif value > MOST_RETRACES:
        detail += ": so does the workload itself, and the configuration is not to blame; " + RETRACING_ADVICE
    return Check(
        name="retracing", passed=value <= limit, value=float(value), limit=float(limit), detail=detail
    )


@dataclass(frozen=True, kw_only=True)
class CallSeconds:
    """Seconds that the calls of the train function took in one slice.

    Args:
        median: Of all of them.
        slow: A high quantile that no boundary between epochs is counted to.
        longest: Of all of them, a call that a boundary belongs to included.
    """

    median: float
    slow: float
    longest: float


def together(parts: Sequence[CallSeconds]) -> CallSeconds:
    """Slices that follow on one another, as one."""
    return CallSeconds(
        median=statistics.median(each.median for each in parts),
        slow=statistics.median(each.slow for each in parts),
        longest=max(each.longest for each in parts),
    )


def slow_quantile(*, p50: float, p90: float, p99: float, boundaries: float) -> float:
    """The highest of these quantiles that boundaries between epochs do not reach.

    Args:
        p50: The median call.
        p90: The 90th percentile.
        p99: The 99th percentile.
        boundaries: The share of calls that have a boundary in them: large batches make it large.
    """
    return p99 if boundaries < 0.01 else p90 if boundaries < 0.1 else p50


def tail(own: Sequence[CallSeconds], baseline: Sequence[CallSeconds]) -> Check:
    """Whether slow calls are about as slow as the baseline's, in the same rounds.

    Figures are medians over slices, so that a burst, which reaches a few of them, decides nothing. They are of calls,
    and in seconds: a ratio to the median call would be ten and more for innocent steps of 2 ms on a noisy machine,
    where `fit` itself stalls by 80 ms. Boundaries between epochs are left out, with validation in them they are most
    of the slow calls: large batches have more of them than the baseline's.

    Args:
        own: Of each slice of the configuration.
        baseline: Of each slice of the baseline's beside them.
    """
    value = statistics.median(each.slow - each.median for each in own)
    median = statistics.median(each.median for each in own)
    usual = statistics.median(each.longest - each.median for each in baseline)
    limit = max(TAIL_SECONDS, TAIL_RATIO * median, TAIL_OF_BASELINE * usual)
    detail = (
        f"slow calls take {_milliseconds(value)} more than the median one, which takes "
        f"{_milliseconds(median)} (baseline: the slowest call {_milliseconds(usual)} more)"
    )
    if value > limit:
        detail += "; look for work that is done in some steps only, or for threads that wait for one another"
    return Check(name="step_tail", passed=value <= limit, value=value, limit=limit, detail=detail)


def hangs(
    own: Sequence[CallSeconds],
    baseline: Sequence[CallSeconds],
    *,
    boundary_seconds: float,
    of: str = "slices",
) -> Check:
    """Whether training stands still for seconds now and then, where the baseline beside it does not.

    Counted are slices with a hang in them; `tail`, by its medians, does not see what comes once in many. Slices in
    which the whole machine stood still are measured again, and are not among these.

    Args:
        own: Of each slice of the configuration.
        baseline: Of each slice of the baseline's beside them.
        boundary_seconds: What an epoch costs beyond its steps.
        of: What these are, in a word.
    """
    least = max(HANG_SECONDS, HANG_OF_BOUNDARY * boundary_seconds)
    value, usual = (_slices_with_a_hang(each, least) for each in (own, baseline))
    limit = max(MOST_HANGS, HANGS_OF_BASELINE * usual)
    longest = max(each.longest - each.median for each in own)
    detail = (
        f"{value} of {len(own)} {of} had a call that took over {least:.3g} s more than the median one, at most "
        f"{_milliseconds(longest)} (baseline: {usual} of {len(baseline)})"
    )
    if value > limit:
        detail += "; look for what is refilled, collected or written now and then"
    return Check(name="hangs", passed=value <= limit, value=float(value), limit=float(limit), detail=detail)


def _slices_with_a_hang(slices: Sequence[CallSeconds], least: float) -> int:
    return sum(each.longest - each.median > max(least, HANG_RATIO * each.median) for each in slices)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def loss_scale_skips(skipped: Sequence[int], steps: Sequence[int], *, baseline_share: float) -> Check:
    """Whether float16's loss scale lets nearly all steps change the weights.

    A scale that has grown too far skips a step and is halved: one in some thousand steps. Gradients that overflow at
    any scale skip step after step, which is fast and teaches nothing.

    Args:
        skipped: Of each process: steps skipped after the warm-up.
        steps: Of each process: all steps after the warm-up.
        baseline_share: The share of its steps that the baseline skips: the workload's own.
    """
    share = min(1.0, sum(skipped) / sum(steps))
    limit = baseline_share + MOST_SKIPPED
    passed = share <= limit or statistics.median(skipped) <= FEW_SKIPPED
    detail = (
        f"the loss scale skipped {sum(skipped)} of {sum(steps)} steps after the warm-up ({share:.1%}; "
        f"baseline: {baseline_share:.1%})"
    )
    if not passed:
        detail += "; use mixed_bfloat16, or make loss and gradients smaller (clip them, normalise the inputs)"
    return Check(name="loss_scale", passed=passed, value=share, limit=limit, detail=detail)
