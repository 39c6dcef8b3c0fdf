"""How often intervals of 95% hold the true speed-up, and how wide they are, for six ways of making them.

    python benchmarks/estimators.py [--quick] [--json FILE] [--recording FILE]

Prints one table, from recorded slices of a quiet and of a disturbed machine (see `false_wins.py`), whose sides are
swapped at random so that the true log-ratio is 0, and from synthetic ones in which neighbouring pairs resemble one
another.

Student's interval of the instances' means comes nearest to 95% everywhere. Ours, the one of the claim, covers as much
or more and is some percent wider: beside those means it looks at the slices, and so is not narrow where few instances
agree by chance. The ways that pool all pairs are narrower, and miss the truth too often as soon as pairs of an instance
have something in common.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import recorded
from figures import Figure, mean, parser, report, share
from recorded import Recording, Stretch

from autotune.measure.intervals import CONFIDENCE, instance_interval, mean_interval, t_quantile

Instances = Sequence[Sequence[float]]
Bounds = tuple[float, float]

REPLAYS, REPLAYS_QUICK = 2000, 200
SHAPES = ((3, 4), (11, 4))
"""Instances, and pairs of each: what 25 s and 90 s of confirmation hold."""
TRIMMED = 0.2
"""Share of the values that is cut off at each end."""
RESAMPLES = 400
BLOCK = 3
"""Neighbouring pairs that are resampled together."""
CORRELATION, DEVIATION, INSTANCE_DEVIATION = 0.6, 0.1, 0.01
"""Of the synthetic log-ratios: of neighbouring pairs; of a pair within its instance; between instances."""


def ours(instances: Instances) -> Bounds:
    """The interval of the claim: means of instances, and the spread of slices or of instances."""
    found = instance_interval(instances)
    return found.low, found.high


def student_of_pairs(instances: Instances) -> Bounds:
    """Student's interval of all pairs, whichever instance they came from."""
    found = mean_interval([value for each in instances for value in each])
    return found.low, found.high


def student_of_instances(instances: Instances) -> Bounds:
    """Student's interval of the instances' means."""
    found = mean_interval([statistics.fmean(each) for each in instances])
    return found.low, found.high


def trimmed_mean(instances: Instances) -> Bounds:
    """Tukey and McLaughlin's interval of the trimmed mean of all pairs."""
    values = np.sort(np.concatenate([np.asarray(each) for each in instances]))
    cut = int(TRIMMED * len(values))
    kept = values[cut : len(values) - cut]
    winsorised = np.clip(values, kept[0], kept[-1])
    error = winsorised.std(ddof=1) / ((1 - 2 * cut / len(values)) * math.sqrt(len(values)))
    margin = t_quantile(CONFIDENCE, len(kept) - 1) * error
    return float(kept.mean() - margin), float(kept.mean() + margin)


def hodges_lehmann(instances: Instances) -> Bounds:
    """Wilcoxon's interval of the pseudo-median of all pairs, by the normal approximation."""
    values = np.concatenate([np.asarray(each) for each in instances])
    count = len(values)
    rows, columns = np.triu_indices(count)
    walsh = np.sort((values[rows] + values[columns]) / 2)
    spread = math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    outside = max(0, math.floor(len(walsh) / 2 - t_quantile(CONFIDENCE, math.inf) * spread))
    return float(walsh[outside]), float(walsh[-1 - outside])


def block_bootstrap(instances: Instances) -> Bounds:
    """Percentiles of means, of instances drawn again and of blocks of neighbouring pairs drawn from each."""
    values = np.asarray(instances)
    count, pairs = values.shape
    rng = np.random.default_rng(seed=0)
    blocks = math.ceil(pairs / BLOCK)
    drawn = rng.integers(count, size=(RESAMPLES, count, 1))
    starts = rng.integers(pairs, size=(RESAMPLES, count, blocks, 1))
    places = ((starts + np.arange(BLOCK)) % pairs).reshape(RESAMPLES, count, -1)[:, :, :pairs]
    means = values[drawn, places].mean(axis=(1, 2))
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


WAYS: dict[str, Callable[[Instances], Bounds]] = {
    "instance_interval (ours)": ours,
    "t of instances": student_of_instances,
    "t of all pairs": student_of_pairs,
    "trimmed mean of all pairs": trimmed_mean,
    "Hodges-Lehmann of all pairs": hodges_lehmann,
    "block bootstrap": block_bootstrap,
}


def autocorrelated(rng: random.Random, pairs: int) -> list[float]:
    """One synthetic instance: an autoregression of the first order about its own centre."""
    centre = rng.gauss(0.0, INSTANCE_DEVIATION)
    step = DEVIATION * math.sqrt(1 - CORRELATION**2)
    values = [rng.gauss(0.0, DEVIATION)]
    while len(values) < pairs:
        values.append(CORRELATION * values[-1] + rng.gauss(0.0, step))
    return [centre + value for value in values]


def figures(recording: Recording, replays: int) -> dict[str, Figure]:
    """Coverage and mean width of each way, on each kind of data and of each shape."""

    def from_pool(condition: str) -> Callable[[random.Random, int], list[float]]:
        def drawn(rng: random.Random, pairs: int) -> list[float]:
            stretch = Stretch(recording.pools[condition], rng)
            return [math.log(stretch.ratio(index)) for index in range(pairs)]

        return drawn

    sources = {name: from_pool(name) for name in recording.pools} | {"autocorrelated": autocorrelated}
    found: dict[str, Figure] = {}
    for source, draw in sources.items():
        for count, pairs in SHAPES:
            rng = random.Random(0)
            worlds = [[draw(rng, pairs) for _ in range(count)] for _ in range(replays)]
            for way, interval in WAYS.items():
                bounds = [interval(each) for each in worlds]
                name = f"{source}, {count}×{pairs}, {way}"
                bar = {"min": CONFIDENCE - 0.02} if interval is ours else None
                found[f"{name}: covers"] = share(sum(low <= 0 <= high for low, high in bounds), replays, bar)
                found[f"{name}: width"] = mean([high - low for low, high in bounds])
    return found


def main() -> None:
    """Replay, print, and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--recording", type=Path, default=recorded.DEFAULT, help="what is replayed")
    given = arguments.parse_args()
    replays = REPLAYS_QUICK if given.quick else REPLAYS
    report("estimators", figures(Recording.load(given.recording), replays), given.json)


if __name__ == "__main__":
    main()
