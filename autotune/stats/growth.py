"""Does memory grow for as long as the training goes on? A rule on the memory at the ends of slices. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from autotune.printable import time_in_words
from autotune.stats.stability import MEMORY_MARGIN, Check

HOST, DEVICE = "host_memory_growth", "device_memory_growth"  # what the rule is called, by whose memory it is
FEWEST_SLICES = 6  # of a process that says something
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
