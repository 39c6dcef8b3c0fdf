"""Does memory grow for as long as the training goes on? A rule on the memory at the ends of slices. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from autotune.data.figures import Check
from autotune.data.options import MEMORY_MARGIN
from autotune.data.printable import time_in_words

HOST, DEVICE = "host_memory_growth", "device_memory_growth"  # what the rule is called, by whose memory it is
FEWEST_SLICES = 6  # of a process that says something
UNEXPLAINED = 1.5  # times the baseline's memory, per ratio of batch sizes: more may be a leak
LEAST_GROWTH_BYTES = 16 << 20  # within one process: allocators vary by less
DAY_SECONDS = 24 * 3600.0  # a training that long must fit into memory

Samples = Sequence[tuple[float, float]]  # of one process: examples trained so far, and bytes held then


def growth(processes: Sequence[Samples]) -> tuple[float, float] | None:
    """Bytes per example, the median over processes, and the most examples that one was watched for; or None."""
    settled = [each[-(-len(each) // 3) :] for each in processes if len(each) >= FEWEST_SLICES]
    settled = [each for each in settled if all(x < later for (x, _), (later, _) in pairwise(each))]
    if not settled:
        return None
    pace = statistics.median(map(_lasting_pace, settled))
    return pace, max(each[-1][0] - each[0][0] for each in settled)


def why_unclear(own: Sequence[Samples], baseline: Sequence[Samples], *, batch_ratio: float) -> str:
    """Say why memory may be leaking where too few slices were seen to tell; empty where they tell, or nothing grew.

    Args:
        own: Of the configuration's processes.
        baseline: Of the baseline's.
        batch_ratio: The configuration's batch size over the baseline's, or 1 where it is smaller.
    """
    # Of a process of few slices counts what it grew by where longer ones were watched, beyond their pace.
    found = growth(own)
    pace = 0.0 if found is None else found[0]
    since = min((process[0][0] for process in own if len(process) >= FEWEST_SLICES), default=0.0)
    short = [[each for each in process if each[0] >= since] for process in own if len(process) < FEWEST_SLICES]
    risen, slices = max((_risen(process, pace) for process in short if process), default=(0.0, 0))
    if risen >= LEAST_GROWTH_BYTES:
        return f"it grew by {risen / 2**20:.0f} MiB within {slices} slices"
    if found is not None:
        unknown = _grows(own) and growth(baseline) is None
        return "it grew, and too little was seen of the baseline to tell whose leak it is" if unknown else ""
    held, usual = (max((process[-1][1] for process in side), default=0.0) for side in (own, baseline))
    if usual and held > UNEXPLAINED * batch_ratio * usual:
        return f"it holds {held / 2**20:.0f} MiB against the baseline's {usual / 2**20:.0f} MiB"
    return ""


def _risen(process: Samples, pace: float) -> tuple[float, int]:
    """Return the bytes by which a process grew beyond a pace in bytes per example, and its slices."""
    (began, before), (ended, after) = process[0], process[-1]
    return after - before - pace * (ended - began), len(process)


def _grows(own: Sequence[Samples]) -> bool:
    found = growth(own)
    return found is not None and found[0] * found[1] >= LEAST_GROWTH_BYTES


def _lasting_pace(samples: Samples) -> float:
    """Bytes per example by which both halves surely grow: least squares, less a standard error."""
    # Neither a single step up is a leak, nor what settles, as allocators, caches and XLA's last compilation do.
    from scipy import stats  # takes a second to import: only where memory is judged

    middle = len(samples) // 2
    first, second = (stats.linregress(*zip(*half, strict=True)) for half in (samples[: middle + 1], samples[middle:]))
    if second.slope < first.slope / 2:
        return 0.0
    return max(0.0, min(float(each.slope - each.stderr) for each in (first, second)))


def memory_growth(
    own: Sequence[Samples],
    baseline: Sequence[Samples],
    *,
    of: str,
    examples_per_second: float,
    held_bytes: int,
    limit_bytes: int,
    margin: float = MEMORY_MARGIN,
) -> Check:
    """Whether a day of training would run out of memory, where the baseline's memory does not grow as fast."""
    if (found := growth(own)) is None:
        return Check(name=of, passed=True, detail="too little was seen to tell")
    pace, examples = found
    grown = pace * examples
    value = pace * examples_per_second * DAY_SECONDS if grown >= LEAST_GROWTH_BYTES else 0.0
    limit = limit_bytes * (1 - margin) - held_bytes
    seen = f"{grown / 2**20:+.1f} MiB within {examples / examples_per_second:.0f} s of training"
    if not value or value <= limit:
        return Check(name=of, passed=True, value=value, limit=limit, detail=seen)
    beside = growth(baseline)
    if beside is None or beside[0] >= pace / 2:
        told = beside is not None and beside[0] * beside[1] >= LEAST_GROWTH_BYTES
        leaks = "the baseline grows as much for each example, so it is the workload that leaks"
        whose = leaks if told else "too little was seen of the baseline to tell whose leak it is"
        return Check(name=of, passed=True, value=value if told else None, limit=limit, detail=f"{seen}; {whose}")
    full = time_in_words(max(0.0, limit) / (pace * examples_per_second))
    detail = f"{seen}, and it goes on: memory is full after {full}; the baseline does not grow like that"
    return Check(name=of, passed=False, value=value, limit=limit, detail=detail)
