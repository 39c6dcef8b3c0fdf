"""Does memory grow for as long as the training goes on? A rule on what is held at the ends of slices. Pure functions.

Allocators and caches fill at the beginning; a leak goes on. What counts is therefore growth that is seen in the later
part of a process's life, does not die down within it, is more than one step up in each process (XLA compiles for the
smaller last batch of an epoch when that comes, and holds some tens of MiB more from then on), and would reach the limit
within a long training.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.stats.intervals import t_quantile
from autotune.stats.stability import MEMORY_MARGIN, Check

HOST, DEVICE = "host_memory_growth", "device_memory_growth"
"""What the rule is called, by whose memory it is."""
SETTLING_SHARE = 1 / 3
"""Of a process's slices: the first ones, in which memory may grow."""
FEWEST_SLICES = 6
"""Of a process that says something."""
LEAST_GROWTH_BYTES = 16 << 20
"""Seen within one process: less is what allocators do."""
GROWTH_CONFIDENCE = 0.99
"""Of the interval whose lower bound must lie above no growth."""
LASTING_SHARE = 0.5
"""Of its pace overall: what the growth must keep in the second half, and without the largest step of each process."""
LONG_TRAINING_SECONDS = 24 * 3600.0
"""A training that long must fit into memory."""
AS_MUCH = 0.5
"""A baseline that grows by this share of the configuration's growth, or more, has the leak too."""

NOT_TOLD = "to tell whose leak it is"
"""How a check's detail ends that passed for want of an answer."""

Samples = Sequence[tuple[float, float]]
"""Of one process: examples trained so far, and bytes held then."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Bytes per example, over processes.

    Args:
        slope: The estimate.
        low: Lower bound.
        seen: Bytes by which the process grew that was watched longest.
        examples: How many that process trained on while it was watched.
        lasts: Whether the second half grows nearly as fast as the whole, and so does what is left without the largest
            step of each process.
    """

    slope: float
    low: float
    seen: float
    examples: float
    lasts: bool

    @property
    def goes_on(self) -> bool:
        """Whether memory grows, and not only at first, however little that has come to."""
        return self.low > 0 and self.lasts

    @property
    def sure(self) -> bool:
        """Whether it grows by more than allocators do, and goes on to."""
        return self.goes_on and self.seen >= LEAST_GROWTH_BYTES


def growth(processes: Sequence[Samples]) -> Growth | None:
    """How fast memory grows; None where no process gave enough slices.

    A straight line is fitted to each process's samples, all with one slope; bytes before the first sample that
    counts do not matter.

    Args:
        processes: Samples of each, in order.
    """
    settled = [each[math.ceil(SETTLING_SHARE * len(each)) :] for each in processes]
    settled = [each for each, whole in zip(settled, processes, strict=True) if len(whole) >= FEWEST_SLICES]
    settled = [each for each in settled if each[-1][0] > each[0][0]]
    if not settled:
        return None
    slope, error, degrees = _common_slope(settled)
    late = [each[len(each) // 2 :] for each in settled]
    later = _common_slope([each for each in late if len(each) > 1])[0]
    elsewhere = _common_slope([_without_largest_step(each) for each in settled])[0]
    longest = max(settled, key=lambda each: each[-1][0] - each[0][0])
    examples = longest[-1][0] - longest[0][0]
    return Growth(
        slope=slope,
        low=slope - t_quantile(GROWTH_CONFIDENCE, degrees) * error if degrees > 0 else -math.inf,
        seen=slope * examples,
        examples=examples,
        lasts=min(later, elsewhere) >= LASTING_SHARE * slope,
    )


def tells(check: Check) -> bool:
    """Whether the rule could say if there is a leak, and whose it is."""
    return check.value is not None and not check.detail.endswith(NOT_TOLD)


def _without_largest_step(samples: Samples) -> Samples:
    """The same process as if its largest step up, from one sample to the next, had not been."""
    steps = [after - before for (_, before), (_, after) in itertools.pairwise(samples)]
    largest = max(range(len(steps)), key=steps.__getitem__)
    return [(x, y - steps[largest] if index > largest else y) for index, (x, y) in enumerate(samples)]


def _common_slope(processes: Sequence[Samples]) -> tuple[float, float, int]:
    """Least squares with one slope and a level for each process: slope, its standard error, degrees of freedom."""
    centred = [
        (x - statistics.fmean(a for a, _ in each), y - statistics.fmean(b for _, b in each))
        for each in processes
        for x, y in each
    ]
    spread = sum(x * x for x, _ in centred)
    if not spread:
        return 0.0, 0.0, 0
    slope = sum(x * y for x, y in centred) / spread
    degrees = len(centred) - len(processes) - 1
    rest = sum((y - slope * x) ** 2 for x, y in centred)
    return slope, math.sqrt(rest / degrees / spread) if degrees > 0 else math.inf, degrees


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
    """Whether memory grows so that a long training would run out of it, where the baseline's does not.

    Args:
        own: Samples of the configuration's processes.
        baseline: Of the baseline's.
        of: `HOST` or `DEVICE`: whose memory it is.
        examples_per_second: The pace of the configuration.
        held_bytes: What it holds at its peak, growth or not.
        limit_bytes: What the machine, container or device has.
        margin: Share of that to keep free.

    Returns:
        Passed where too little was seen, with `value` None if it was of the configuration.
    """
    found = growth(own)
    if found is None:
        return Check(name=of, passed=True, value=None, limit=None, detail="too little was seen to tell")
    day = LONG_TRAINING_SECONDS * examples_per_second
    limit = limit_bytes * (1 - margin) - held_bytes
    seconds = found.examples / examples_per_second
    seen = f"{found.seen / 2**20:+.1f} MiB within {seconds:.0f} s of training"
    value = max(0.0, found.low) * day if found.sure else 0.0
    if not found.sure or value <= limit:
        return Check(name=of, passed=True, value=value, limit=limit, detail=seen)
    beside = growth(baseline)
    if beside is None:
        detail = f"{seen}; too little was seen of the baseline {NOT_TOLD}"
        return Check(name=of, passed=True, value=value, limit=limit, detail=detail)
    if beside.goes_on and beside.slope >= AS_MUCH * found.slope:
        whose = "so it is the workload that leaks" if beside.sure else f"but too little {NOT_TOLD}"
        detail = f"{seen}; the baseline grows as much for each example, {whose}"
        return Check(name=of, passed=True, value=value, limit=limit, detail=detail)
    hours = limit / (found.slope * examples_per_second) / 3600
    return Check(
        name=of,
        passed=False,
        value=value,
        limit=limit,
        detail=f"{seen}, and it goes on: memory is full after {max(0.0, hours):.1f} hours; the baseline does not "
        "grow like that",
    )
