"""The rules a configuration must pass before it may be recommended. Pure functions on finished figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autotune.data.figures import Check
from autotune.data.options import MEMORY_MARGIN
from autotune.data.printable import time_in_words
from autotune.stats.intervals import CONFIDENCE, t_quantile

HOST_MEMORY, DEVICE_MEMORY = "host_memory", "device_memory"
HOST_GROWTH, DEVICE_GROWTH = "host_memory_growth", "device_memory_growth"
LOSS_RISE = 0.10  # a loss may end this share above where it began and still not count as rising
MOST_RETRACES = 1  # of one process after its warm-up: a rare shape is compiled for once
RETRACING_ADVICE = (
    "give all batches one shape (pad, bucket to a few lengths, drop the remainder), and pass tensors instead of "
    "Python numbers to what is traced"
)
MOST_HANGS = 2  # slices that decide nothing: one burst of whatever else runs reaches two
THROTTLING = "throttling"
STEADY_WORK = "steady_work"
MOST_THROTTLED = 0.25  # share of slices beyond the baseline's: both sides take turns on one GPU, and heat it equally
MOST_SKIPPED = 0.05  # share of steps beyond the baseline's: a scale that grows every 2,000 steps skips one
FEWEST_SLICES = 6  # of a process whose memory is judged
UNEXPLAINED = 1.5  # times the baseline's memory, per ratio of batch sizes: more may be a leak
LEAST_GROWTH_BYTES = 16 << 20  # within one process: allocators vary by less
DAY_SECONDS = 24 * 3600.0  # a training that long must fit into memory
PARITY = "numerics_parity"
LEAST_TOLERANCE = 0.05  # of the fall of float32's loss: what may be lost even where seeds make no difference
FEWEST_STEPS = 9

Curve = Sequence[float | None]  # losses by step; None for one that was not finite


def check_peak_memory(name: str, peak_bytes: int, limit_bytes: int, *, margin: float = MEMORY_MARGIN) -> Check:
    """Check peak memory against the limit of the machine, container or device."""
    detail = f"peak {peak_bytes / 2**30:.2f} GiB of {limit_bytes / 2**30:.2f} GiB, {margin:.0%} kept free"
    return _within(name, peak_bytes, limit_bytes * (1 - margin), detail)


def _within(name: str, value: float, limit: float, detail: str, advice: str = "") -> Check:
    """Pass where the value is within its limit; else end the detail with the advice."""
    passed = value <= limit
    detail += f"; {advice}" if advice and not passed else ""
    return Check(name=name, passed=passed, value=float(value), limit=float(limit), detail=detail)


def check_finite_loss(losses: Sequence[float | None]) -> Check:
    """Count the looks at which the model reported a loss. A trial whose loss was not finite has ended before."""
    reported = sum(loss is not None for loss in losses)
    if not reported:
        return Check(name="finite_loss", passed=True, detail="the model reports no loss")
    return Check(name="finite_loss", passed=True, value=float(reported), detail=f"finite at each of {reported} looks")


def check_falling_loss(
    first: float | None, last: float | None, *, baseline_first: float | None, baseline_last: float | None
) -> Check:
    """Check that the training loss still falls, where the baseline's does."""
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


def check_retracing(own: Sequence[int], baseline: Sequence[int]) -> Check:
    """Check that the train function is not traced and compiled again once a trial is warm."""
    # It takes seconds, and memory for good. Twice the baseline's is allowed: a faster one meets more batches.
    value, usual = statistics.median_high(own), statistics.median_high(baseline)
    limit = max(MOST_RETRACES, 2 * usual)
    detail = f"traced or compiled again {value} times after the warm-up (baseline: {usual})"
    if MOST_RETRACES < value <= limit:
        detail += f": so does the workload itself, and the configuration is not to blame; {RETRACING_ADVICE}"
    return _within("retracing", value, limit, detail, RETRACING_ADVICE)


@dataclass(frozen=True, kw_only=True)
class CallSeconds:
    """The seconds that calls of the train function took in one slice."""

    median: float
    slow: float  # a high quantile that excludes calls with a boundary between epochs
    longest: float  # of all calls, those with a boundary included


def check_slow_calls(own: Sequence[CallSeconds], baseline: Sequence[CallSeconds]) -> Check:
    """Check that slow calls are about as slow as the baseline's, in the same rounds."""
    # Medians over slices, so a burst decides nothing; plain `fit` stalls by up to 80 ms now and then.
    value = statistics.median(calls.slow - calls.median for calls in own)
    median = statistics.median(calls.median for calls in own)
    usual = statistics.median(calls.longest - calls.median for calls in baseline)
    detail = (
        f"slow calls take {_seconds(value)} more than the median one, which takes {_seconds(median)} "
        f"(baseline: the slowest call {_seconds(usual)} more)"
    )
    advice = "look for work that is done in some steps only, or for threads that wait for one another"
    return _within("step_tail", value, max(0.25, 3 * median, 3 * usual), detail, advice)


def check_hangs(own: Sequence[CallSeconds], baseline: Sequence[CallSeconds], *, boundary_seconds: float) -> Check:
    """Check that training stands still for seconds no more often than the baseline beside it."""
    # Slices with a hang are counted: `check_slow_calls` does not see a rare one.
    least = max(1.5, 5 * boundary_seconds)
    value, usual = (
        sum(calls.longest - calls.median > max(least, 2 * calls.median) for calls in side) for side in (own, baseline)
    )
    longest = max(calls.longest - calls.median for calls in own)
    detail = (
        f"{value} of {len(own)} slices had a call that took over {least:.3g} s more than the median one, at most "
        f"{_seconds(longest)} (baseline: {usual} of {len(baseline)})"
    )
    advice = "look for periodic work, such as refilling, garbage collection or writing"
    return _within("hangs", value, max(MOST_HANGS, 3 * usual), detail, advice)


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def check_loss_scale(skipped: Sequence[int], steps: Sequence[int], *, baseline_share: float) -> Check:
    """Check that float16's loss scale lets nearly all steps change the weights."""
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


def check_throttling(own: Sequence[bool], baseline: Sequence[bool]) -> Check:
    """Check for throttling. One value per slice: did heat or a hardware slowdown limit the clock?"""
    # Throttling of both sides slows both. A configuration that heats the card more will do so for hours.
    share, usual = (sum(side) / len(side) for side in (own, baseline))
    detail = (
        f"heat or a hardware slowdown held the GPU's clocks down in {share:.0%} of the slices (baseline: {usual:.0%})"
    )
    if share > 0:
        detail += "; cool the GPU: it may train faster or slower than was measured"
    return _within(THROTTLING, share, usual + MOST_THROTTLED, detail)


def check_constant_work(own: Sequence[float], baseline: Sequence[float]) -> Check:
    """Check that the gain exceeds what the baseline's own speed varies; a value is a slice's updates per second.

    For trainings whose work per update varies: their speed changes with what was learned.
    """
    gain = statistics.median(rate / other for rate, other in zip(own, baseline, strict=True))
    varies = max(baseline) / min(baseline)
    detail = (
        f"the work per update varies: the baseline's updates/s vary by ×{varies:.2f} between slices, and the gain is "
        f"×{gain:.2f}"
    )
    return Check(name="constant_work", passed=varies < gain, value=varies, limit=gain, detail=detail)


def check_steady_work(ratio: float, *, examples: int) -> Check:
    """Return a failed check: after `examples`, the baseline trains `ratio` times as fast as a fresh process."""
    detail = (
        f"after {examples:,} examples the baseline trains ×{ratio:.2f} as fast as a fresh process of it beside it: the "
        "work of a step depends on the progress of the training, by the order or size of its data, a growing buffer or "
        "layers that are frozen for a while; tune with the work of its longest phase, held fixed"
    )
    return Check(name=STEADY_WORK, passed=False, value=ratio, limit=1.0, detail=detail)


@dataclass(frozen=True, kw_only=True)
class EpochWork:
    """The work of one epoch, as far as it is known."""

    examples: int | None  # by the data
    calls: int | None  # of the train function, as seen
    examples_per_call: int  # of a call with all its steps
    batch_size: int


def check_epoch_work(own: EpochWork, baseline: EpochWork) -> Check | None:
    """Check that an epoch trains on as many examples as the baseline's; None where neither data nor calls tell.

    A last batch that is smaller or dropped, and a last call with fewer steps, are allowed for.
    """
    name, advice = (
        "epoch_work",
        (
            "the batch size does not explain that: let the script compute its number of steps from "
            "autotune.tuned(batch_size=N), or pass --fixed-batch"
        ),
    )
    checks = []
    if own.examples is not None and baseline.examples is not None:
        detail = f"an epoch has {own.examples:,} examples (baseline: {baseline.examples:,})"
        most = max(own.batch_size, baseline.batch_size) - 1
        checks.append(_within(name, abs(own.examples - baseline.examples), most, detail, advice))
    if own.calls is not None and baseline.calls is not None:
        detail = (
            f"an epoch has {own.calls:,} calls of {own.examples_per_call:,} examples "
            f"(baseline: {baseline.calls:,} of {baseline.examples_per_call:,})"
        )
        difference = abs(own.calls * own.examples_per_call - baseline.calls * baseline.examples_per_call)
        most = own.examples_per_call + baseline.examples_per_call - 1
        checks.append(_within(name, difference, most, detail, advice))
    return min(checks, key=lambda check: check.passed, default=None)


Samples = Sequence[tuple[float, float]]
"""Of one process, at the ends of its slices: examples trained so far, and bytes held then."""


def check_memory_growth(
    own: Sequence[Samples],
    baseline: Sequence[Samples],
    *,
    name: str,
    examples_per_second: float,
    held_bytes: int,
    limit_bytes: int,
    margin: float = MEMORY_MARGIN,
) -> Check:
    """Check that a day of training does not run out of memory, where the baseline's memory does not grow as fast."""
    if (found := estimate_growth(own)) is None:
        return Check(name=name, passed=True, detail="too few slices to tell")
    pace, examples = found
    grown = pace * examples
    value = pace * examples_per_second * DAY_SECONDS if grown >= LEAST_GROWTH_BYTES else 0.0
    limit = limit_bytes * (1 - margin) - held_bytes
    seen = f"{grown / 2**20:+.1f} MiB within {examples / examples_per_second:.0f} s of training"
    if not value or value <= limit:
        return Check(name=name, passed=True, value=value, limit=limit, detail=seen)
    usual = estimate_growth(baseline)
    # A baseline that is much slower trains too few examples for the same leak to show.
    if usual is None or usual[0] >= pace / 2 or pace * usual[1] < LEAST_GROWTH_BYTES:
        if usual is not None and usual[0] >= pace / 2 and usual[0] * usual[1] >= LEAST_GROWTH_BYTES:
            detail = f"{seen}; the baseline grows as much for each example, so it is the workload that leaks"
            return Check(name=name, passed=True, value=value, limit=limit, detail=detail)
        detail = f"{seen}; too little of the baseline was seen to tell whose leak it is"
        return Check(name=name, passed=True, limit=limit, detail=detail)
    full = time_in_words(max(0.0, limit) / (pace * examples_per_second))
    detail = f"{seen}, and it continues: memory is full after {full}; the baseline does not grow like that"
    return Check(name=name, passed=False, value=value, limit=limit, detail=detail)


def estimate_growth(processes: Sequence[Samples]) -> tuple[float, float] | None:
    """Return bytes per example, the median over processes, and the most examples that one was watched for; or None."""
    settled = [samples[-(-len(samples) // 3) :] for samples in processes if len(samples) >= FEWEST_SLICES]
    settled = [samples for samples in settled if all(x < later for (x, _), (later, _) in pairwise(samples))]
    if not settled:
        return None
    pace = statistics.median(map(_lasting_pace, settled))
    return pace, max(samples[-1][0] - samples[0][0] for samples in settled)


def _lasting_pace(samples: Samples) -> float:
    """Return bytes per example by which both halves surely grow: least squares, less a standard error."""
    # Neither a single step up is a leak, nor what settles, as allocators, caches and XLA's last compilation do.
    from scipy import stats  # takes a second to import: only where memory is judged

    middle = len(samples) // 2
    first, second = (stats.linregress(*zip(*half, strict=True)) for half in (samples[: middle + 1], samples[middle:]))
    if second.slope < first.slope / 2:
        return 0.0
    return max(0.0, min(float(line.slope - line.stderr) for line in (first, second)))


def explain_unclear_growth(own: Sequence[Samples], baseline: Sequence[Samples], *, batch_ratio: float) -> str:
    """Say why memory may be leaking where too few slices were seen to tell; empty where they tell, or nothing grew.

    `batch_ratio` is the configuration's batch size over the baseline's, or 1 where it is smaller.
    """
    # A process of few slices counts by its growth beyond the pace of longer ones, and beyond what one of them held by
    # then: memory grows in all of them until it settles.
    found = estimate_growth(own)
    pace, examples = found or (0.0, 0.0)
    long = [process for process in own if len(process) >= FEWEST_SLICES]
    since = min((process[0][0] for process in long), default=0.0)
    growths = []
    for process in own:
        short = [sample for sample in process if sample[0] >= since] if len(process) < FEWEST_SLICES else []
        if short:
            (began, before), (ended, now) = short[0], short[-1]
            settled = max((memory for other in long for trained, memory in other if trained <= ended), default=0.0)
            growths.append((min(now - before - pace * (ended - began), now - settled), len(short)))
    risen, slices = max(growths, default=(0.0, 0))
    if risen >= LEAST_GROWTH_BYTES:
        return f"it grew by {risen / 2**20:.0f} MiB within {slices} slices"
    if found is not None:
        unknown = pace * examples >= LEAST_GROWTH_BYTES and estimate_growth(baseline) is None
        return "it grew, and too few slices of the baseline to tell whose leak it is" if unknown else ""
    held, usual = (max((process[-1][1] for process in side), default=0.0) for side in (own, baseline))
    if usual and held > UNEXPLAINED * batch_ratio * usual:
        return f"it holds {held / 2**20:.0f} MiB against the baseline's {usual / 2**20:.0f} MiB"
    return ""


def check_parity(float32: Sequence[Curve], curve: Curve, precision: str = "float32") -> Check:
    """Check that a loss curve ends where float32 without XLA may end, or another `precision` of the reference."""
    # The first of `float32` begins with the weights of `curve`; the spread over all shows the effect of the weights.
    steps = min([len(curve), *map(len, float32)], default=0)
    if steps < FEWEST_STEPS:
        return cannot_tell(f"{steps} step{' was' if steps == 1 else 's were'} seen, {FEWEST_STEPS} are needed")
    if any(None in losses[:steps] for losses in float32):
        return cannot_tell(f"{precision} without XLA itself has a loss that is not finite")
    if None in curve[:steps]:
        return Check(name=PARITY, passed=False, detail=f"no finite loss at step {curve.index(None) + 1}")
    ends = [_late(losses[:steps]) for losses in float32]
    fall = statistics.fmean(_mean(losses[:3]) for losses in float32) - statistics.fmean(ends)
    tolerance = max(_half_width(ends) * math.sqrt(2), LEAST_TOLERANCE * fall)
    falls = f"by {fall:.3g}, and other weights make {tolerance:.3g} of difference"
    if fall <= tolerance:
        return cannot_tell(f"within {steps} steps {precision} falls {falls}")
    own = _late(curve[:steps])
    return Check(
        name=PARITY,
        passed=own - ends[0] <= tolerance,
        value=own - ends[0],
        limit=tolerance,
        detail=f"after {steps} steps the loss is {own:.4g}, in {precision} without XLA {ends[0]:.4g} from the same "
        f"weights and batches; it fell {falls}",
    )


def cannot_tell(why: str) -> Check:
    """Return the check where too little was seen; `why` is half a sentence."""
    return Check(name=PARITY, passed=True, detail=f"cannot tell: {why}")


def _late(curve: Curve) -> float:
    return _mean(curve[-max(1, round(len(curve) / 3)) :])


def _mean(losses: Curve) -> float:
    """Return the mean; NaN where a loss is missing, or there is none."""
    return statistics.fmean(math.nan if loss is None else loss for loss in losses or [None])


def _half_width(ends: Sequence[float]) -> float:
    """Return the half-width of the interval of one loss; 0 for a single one, which shows no spread."""
    return t_quantile(CONFIDENCE, len(ends) - 1) * statistics.stdev(ends) if len(ends) > 1 else 0.0
