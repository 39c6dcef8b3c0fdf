"""How often intervals of 95% hold the true speed-up, and how wide they are, for seven ways of making them.

    python benchmarks/estimators.py [--quick] [--json FILE] [--recording FILE]

Prints one table, from recorded slices of a quiet and of a disturbed machine (see `false_wins.py`), whose sides are
swapped at random so that the true log-ratio is 0, from synthetic ones in which neighbouring pairs resemble one
another, and from a candidate that is less steady than its baseline: what a training gets is all examples over all the
time, which the mean of log-ratios is not.

Student's interval of the instances' means comes nearest to 95% where both sides are alike. Ours, the one of the claim,
covers as much or more and is some percent wider: beside those means it looks at the slices, and so is not narrow where
few instances agree by chance. The ways that pool all pairs are narrower, and miss the truth too often as soon as pairs
of an instance have something in common. Of the restless candidate, only overall rates have the training's own speed-up.
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

from autotune.stats.intervals import CONFIDENCE, instance_interval, mean_interval, t_quantile
from autotune.stats.throughput import Measured, overall_log_ratios

Sides = tuple[Measured, Measured]
"""The baseline's slice of a pair, and the candidate's."""
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
RESTLESS, EXAMPLES = 0.25, 1000
"""Deviation of the restless candidate's log-rate from slice to slice; examples of each slice."""


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


OURS = "ours, of overall rates"
WAYS: dict[str, Callable[[Instances], Bounds]] = {
    OURS: ours,
    "ours, of log-ratios": ours,
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


def alike(log_ratios: Sequence[float]) -> list[Sides]:
    """Pairs with these log-ratios, to which both sides contribute half."""
    return [((math.exp(-each / 2), EXAMPLES), (math.exp(each / 2), EXAMPLES)) for each in log_ratios]


def restless(rng: random.Random, pairs: int) -> list[Sides]:
    """One synthetic instance whose candidate is less steady than its baseline, in slices of equal work."""

    def side(deviation: float) -> tuple[float, int]:
        return math.exp(rng.gauss(0.0, deviation)), EXAMPLES

    return [(side(DEVIATION), side(RESTLESS)) for _ in range(pairs)]


RESTLESS_TRUTH = (DEVIATION**2 - RESTLESS**2) / 2
"""The logarithm of its speed-up over all the time, where there is enough of it: seconds are log-normal."""


def figures(recording: Recording, replays: int) -> dict[str, Figure]:
    """Coverage and mean width of each way, on each kind of data and of each shape."""

    def from_pool(condition: str) -> Callable[[random.Random, int], list[Sides]]:
        def drawn(rng: random.Random, pairs: int) -> list[Sides]:
            stretch = Stretch(recording.pools[condition], rng)
            return [stretch.sides(index) for index in range(pairs)]

        return drawn

    sources = {name: (from_pool(name), 0.0) for name in recording.pools} | {
        "autocorrelated": (lambda rng, pairs: alike(autocorrelated(rng, pairs)), 0.0),
        "restless candidate": (restless, RESTLESS_TRUTH),
    }
    found: dict[str, Figure] = {}
    for source, (draw, truth) in sources.items():
        for count, pairs in SHAPES:
            rng = random.Random(0)
            worlds = [[draw(rng, pairs) for _ in range(count)] for _ in range(replays)]
            for way, interval in WAYS.items():
                values = overall_values if way == OURS else log_ratios
                bounds = [interval([values(instance) for instance in world]) for world in worlds]
                name = f"{source}, {count}×{pairs}, {way}"
                bar = {"min": CONFIDENCE - 0.02} if way == OURS else None
                covering = sum(low <= truth <= high for low, high in bounds)
                found[f"{name}: covers"] = share(covering, replays, bar)
                found[f"{name}: width"] = mean([high - low for low, high in bounds])
    return found


def overall_values(instance: Sequence[Sides]) -> list[float]:
    """What the claim takes of an instance: values around the ratio of overall rates."""
    return overall_log_ratios(*zip(*instance, strict=True))


def log_ratios(instance: Sequence[Sides]) -> list[float]:
    """The pairs' own."""
    return [math.log(candidate / baseline) for (baseline, _), (candidate, _) in instance]


def main() -> None:
    """Replay, print, and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--recording", type=Path, default=recorded.DEFAULT, help="what is replayed")
    given = arguments.parse_args()
    replays = REPLAYS_QUICK if given.quick else REPLAYS
    report("estimators", figures(Recording.load(given.recording), replays), given.json)


if __name__ == "__main__":
    main()
