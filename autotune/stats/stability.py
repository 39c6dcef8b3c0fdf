"""The rules a configuration must pass before it may be recommended. Pure functions on finished figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.data.figures import Check
from autotune.data.options import MEMORY_MARGIN

HOST_MEMORY, DEVICE_MEMORY = "host_memory", "device_memory"
LOSS_RISE = 0.10  # a loss may end this share above where it began and still not count as rising
MOST_RETRACES = 1  # of one process after its warm-up: a shape that comes seldom is compiled for once
RETRACING_ADVICE = (
    "give all batches one shape (pad, bucket to a few lengths, drop the remainder), and pass tensors instead of "
    "Python numbers to what is traced"
)
MOST_HANGS = 2  # slices that decide nothing: one burst of whatever else runs reaches two
THROTTLING = "throttling"
MOST_THROTTLED = 0.25  # share of slices beyond the baseline's: both sides take turns on one card, and heat it alike
MOST_SKIPPED = 0.05  # share of steps beyond the baseline's: a scale that grows every 2,000 steps skips one


def peak_memory(name: str, peak_bytes: int, limit_bytes: int, *, margin: float = MEMORY_MARGIN) -> Check:
    """Peak memory against the limit of the machine, container or device."""
    detail = f"peak {peak_bytes / 2**30:.2f} GiB of {limit_bytes / 2**30:.2f} GiB, {margin:.0%} kept free"
    return _within(name, peak_bytes, limit_bytes * (1 - margin), detail)


def _within(name: str, value: float, limit: float, detail: str, advice: str = "") -> Check:
    """Passed where the value is within its limit; else the detail ends with the advice."""
    passed = value <= limit
    detail += f"; {advice}" if advice and not passed else ""
    return Check(name=name, passed=passed, value=float(value), limit=float(limit), detail=detail)


def loss_is_finite(losses: Sequence[float | None]) -> Check:
    """At how many looks the model reported a loss. A trial whose loss was not finite has ended before."""
    reported = sum(loss is not None for loss in losses)
    if not reported:
        return Check(name="finite_loss", passed=True, detail="the model reports no loss")
    return Check(name="finite_loss", passed=True, value=float(reported), detail=f"finite at each of {reported} looks")


def loss_does_not_rise(
    first: float | None, last: float | None, *, baseline_first: float | None, baseline_last: float | None
) -> Check:
    """Whether the training loss still falls, where the baseline's does."""
    # Both sides begin with the same weights, so a rise begins above the unluckier one of their first calls.
    name = "loss_falls"
    if first is None or last is None or baseline_first is None or baseline_last is None:
        return Check(name=name, passed=True, detail="the model reports no loss")
    if baseline_last >= baseline_first:
        detail = "the baseline's loss does not fall within a trial either: nothing to hold it against"
        return Check(name=name, passed=True, detail=detail)
    start = max(first, baseline_first)
    detail = f"from {first:.4g} to {last:.4g} (baseline: {baseline_first:.4g} to {baseline_last:.4g})"
    return _within(name, last, start + LOSS_RISE * abs(start), detail)


def no_retracing(own: Sequence[int], baseline: Sequence[int]) -> Check:
    """Whether the train function stays as it was traced and compiled once a trial is warm."""
    # It takes seconds, and memory for good. Twice the baseline's is allowed: a faster one meets more batches.
    value, usual = statistics.median_high(own), statistics.median_high(baseline)
    limit = max(MOST_RETRACES, 2 * usual)
    detail = f"traced or compiled again {value} times after the warm-up (baseline: {usual})"
    if MOST_RETRACES < value <= limit:
        detail += f": so does the workload itself, and the configuration is not to blame; {RETRACING_ADVICE}"
    return _within("retracing", value, limit, detail, RETRACING_ADVICE)


@dataclass(frozen=True, kw_only=True)
class CallSeconds:
    """Seconds that the calls of the train function took in one slice."""

    median: float
    slow: float  # a high quantile that no boundary between epochs is counted to
    longest: float  # of all of them, a call that a boundary belongs to included


def tail(own: Sequence[CallSeconds], baseline: Sequence[CallSeconds]) -> Check:
    """Whether slow calls are about as slow as the baseline's, in the same rounds."""
    # Medians over slices, so a burst decides nothing; plain `fit` stalls by up to 80 ms now and then.
    value = statistics.median(each.slow - each.median for each in own)
    median = statistics.median(each.median for each in own)
    usual = statistics.median(each.longest - each.median for each in baseline)
    detail = (
        f"slow calls take {_seconds(value)} more than the median one, which takes {_seconds(median)} "
        f"(baseline: the slowest call {_seconds(usual)} more)"
    )
    advice = "look for work that is done in some steps only, or for threads that wait for one another"
    return _within("step_tail", value, max(0.25, 3 * median, 3 * usual), detail, advice)


def hangs(own: Sequence[CallSeconds], baseline: Sequence[CallSeconds], *, boundary_seconds: float) -> Check:
    """Whether training stands still for seconds now and then, more often than the baseline beside it."""
    # Slices with a hang are counted: `tail` does not see a rare one.
    least = max(1.5, 5 * boundary_seconds)
    value, usual = (
        sum(each.longest - each.median > max(least, 2 * each.median) for each in side) for side in (own, baseline)
    )
    longest = max(each.longest - each.median for each in own)
    detail = (
        f"{value} of {len(own)} slices had a call that took over {least:.3g} s more than the median one, at most "
        f"{_seconds(longest)} (baseline: {usual} of {len(baseline)})"
    )
    advice = "look for what is refilled, collected or written now and then"
    return _within("hangs", value, max(MOST_HANGS, 3 * usual), detail, advice)


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def loss_scale_skips(skipped: Sequence[int], steps: Sequence[int], *, baseline_share: float) -> Check:
    """Whether float16's loss scale lets nearly all steps change the weights."""
    # A scale that has grown too far skips one step in thousands; gradients that overflow at any scale skip them all.
    share = min(1.0, sum(skipped) / sum(steps))
    limit = baseline_share + MOST_SKIPPED
    passed = share <= limit or statistics.median(skipped) <= 2
    detail = (
        f"the loss scale skipped {sum(skipped)} of {sum(steps)} steps after the warm-up ({share:.1%}; "
        f"baseline: {baseline_share:.1%})"
    )
    if not passed:
        detail += "; use mixed_bfloat16, or make loss and gradients smaller (clip them, normalise the inputs)"
    return Check(name="loss_scale", passed=passed, value=share, limit=limit, detail=detail)


def no_throttling(own: Sequence[bool], baseline: Sequence[bool]) -> Check:
    """Whether the card kept its clocks; each value is whether heat or a hardware slowdown held them down in a slice."""
    # What both sides meet slows both. A configuration that heats the card more than the baseline will do so for hours.
    share, usual = (sum(side) / len(side) for side in (own, baseline))
    detail = (
        f"heat or a hardware slowdown held the card's clocks down in {share:.0%} of the slices (baseline: {usual:.0%})"
    )
    if share > 0:
        detail += "; cool the card: it may train faster or slower than was measured"
    return _within(THROTTLING, share, usual + MOST_THROTTLED, detail)


def gain_exceeds_variation(own: Sequence[float], baseline: Sequence[float]) -> Check:
    """Return whether the gain exceeds what the baseline's own speed varies; each value is a slice's updates per second.

    For trainings whose updates are no constant work: their speed changes with what was learned.
    """
    gain = statistics.median(one / other for one, other in zip(own, baseline, strict=True))
    varies = max(baseline) / min(baseline)
    detail = (
        f"an update is no constant work: the baseline's own updates/s vary by ×{varies:.2f} from slice to slice, "
        f"and the gain is ×{gain:.2f}"
    )
    return Check(name="constant_work", passed=varies < gain, value=varies, limit=gain, detail=detail)
