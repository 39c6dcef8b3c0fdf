"""What taking turns buys: intervals of a log speed-up from the same seconds of measuring, three ways.

    python benchmarks/pairing.py [--quick] [--json FILE]

Prints one table. Both configurations are the same, so the true ratio is 1 and every estimate is an error. *Paired*: two
live processes take turns in slices, in random order, one always frozen; the interval is of the pairs, without those
that were found to be disturbed. *Unpaired*: the same slices as two groups. *Sequential*: fresh processes A, B, A, B,
each alone, its slices in one stretch; the interval is of the processes' means, which the bar is for, or of all their
slices, as if those of one stretch had nothing in common: narrow, and often beside the truth. *Disturbed*: another
process burns a core, on and off, in random periods. Each repeat has both conditions and all ways, in random order.
"""

import argparse
import contextlib
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotune.machine import fingerprint
from autotune.measure.intervals import LogInterval, mean_interval, t_quantile
from autotune.space.configuration import baseline_configuration
from autotune.space.knobs import Device
from autotune.study.running import Trial
from autotune.study.slicing import SHORT_SLICE_SECONDS
from autotune.trial.live import Data, LiveTrial, WarmUp
from autotune.trial.process import TrialProcesses
from autotune.trial.record import Phase, Slice
from autotune.workload import parse_reference

WORKLOAD = Path(__file__).resolve().parent.parent / "examples" / "digits_mlp.py"
SECONDS, SECONDS_QUICK = 330.0, 0.0
"""No repeat but the first is begun that would probably not end within so long."""
PAIRS, PAIRS_QUICK = 16, 8
PROCESSES = 4
"""Of each configuration, in the sequential way."""
PATIENCE_SECONDS = 120.0
SHORTEST_BURST, LONGEST_BURST = 0.3, 4.0
"""Seconds that the disturbance lasts, and that it pauses."""
BURNING = """
import os, random, sys, time
rng, parent = random.Random(int(sys.argv[1])), os.getppid()
while os.getppid() == parent:
    until = time.monotonic() + rng.uniform(float(sys.argv[2]), float(sys.argv[3]))
    while time.monotonic() < until:
        pass
    time.sleep(rng.uniform(float(sys.argv[2]), float(sys.argv[3])))
"""
CONDITIONS = ("quiet", "disturbed")
RESAMPLES = 2000

Found = dict[str, LogInterval]
"""Of one repeat in one condition: the interval that each way gives."""


def two_groups(first: Sequence[float], second: Sequence[float]) -> LogInterval:
    """Difference of two means with Welch's interval."""
    parts = [statistics.variance(each) / len(each) for each in (first, second)]
    degrees = sum(parts) ** 2 / sum(
        part**2 / (len(each) - 1) for part, each in zip(parts, (first, second), strict=True)
    )
    value = statistics.fmean(first) - statistics.fmean(second)
    margin = t_quantile(0.95, degrees) * math.sqrt(sum(parts))
    return LogInterval(value=value, low=value - margin, high=value + margin, count=len(first) + len(second))


class Bench:
    """Trial processes of one configuration."""

    def __init__(self, processes: TrialProcesses, pairs: int, scratch: Path) -> None:
        self._processes = processes
        self._pairs = pairs
        self._scratch = scratch
        facts = processes.open()
        self._configuration = baseline_configuration(
            facts.batch_size, facts.baseline, Device.CPU, where="benchmark"
        )
        self._data: Data | None = None

    @contextlib.contextmanager
    def live(self) -> Iterator[tuple[LiveTrial, WarmUp]]:
        """A fresh process that is warm, and frozen between its slices."""
        log = str(self._scratch / "log.txt")
        trial = self._processes.launch(self._configuration, log=log, data=self._data)
        try:
            warm = trial.warm_up(PATIENCE_SECONDS)
            self._data = Data(examples=warm.started.examples, endless=warm.started.endless)
            yield trial, warm
        finally:
            trial.kill()

    def alternating(self, rng: random.Random) -> Found:
        """The paired way, and the same slices unpaired."""
        trial = Trial(1, Phase.CONFIRM, self._configuration)
        with self.live() as (first, trial.warm), self.live() as (second, warm):
            for _ in range(self._pairs):
                taken = {
                    each: each.measure(SHORT_SLICE_SECONDS, PATIENCE_SECONDS)
                    for each in rng.sample((first, second), 2)
                }
                trial.add_pair(
                    baseline_first=next(iter(taken)) is second,
                    baseline=taken[second],
                    candidate=taken[first],
                    reference=warm,
                )
        groups = [
            [log_rate(each) for each in side]
            for side in zip(*((p.candidate, p.baseline) for p in trial.pairs), strict=True)
        ]
        return {"paired": mean_interval(trial.log_ratios), "unpaired": two_groups(*groups)}

    def sequential(self, _: random.Random) -> Found:
        """The same number of slices, by processes that run alone, one after another."""
        stretches: tuple[list[list[float]], list[list[float]]] = ([], [])
        for _ in range(PROCESSES):
            for configuration in stretches:
                with self.live() as (trial, _):
                    taken = [
                        trial.measure(SHORT_SLICE_SECONDS, PATIENCE_SECONDS)
                        for _ in range(self._pairs // PROCESSES)
                    ]
                configuration.append([log_rate(each) for each in taken])
        slices = [[rate for stretch in each for rate in stretch] for each in stretches]
        means = [[statistics.fmean(stretch) for stretch in each] for each in stretches]
        return {"sequential": two_groups(*means), "sequential, by slices": two_groups(*slices)}


def log_rate(taken: Slice) -> float:
    """Logarithm of the examples per second in one slice."""
    return math.log(taken.examples / taken.seconds)


@contextlib.contextmanager
def disturbance(seed: int) -> Iterator[None]:
    """Another process that burns one core on and off."""
    bounds = (str(SHORTEST_BURST), str(LONGEST_BURST))
    with subprocess.Popen([sys.executable, "-c", BURNING, str(seed), *bounds]) as process:
        try:
            yield
        finally:
            process.kill()


def repeats(seconds: float, pairs: int, rng: random.Random, scratch: Path) -> dict[str, list[Found]]:
    """What each repeat found, by condition."""
    found: dict[str, list[Found]] = {condition: [] for condition in CONDITIONS}
    with TrialProcesses(parse_reference(str(WORKLOAD)), logs=scratch) as processes:
        bench = Bench(processes, pairs, scratch)
        began, count = time.monotonic(), 0
        while not count or (time.monotonic() - began) * (count + 1) / count <= seconds:
            for condition in rng.sample(CONDITIONS, 2):
                disturbed = condition == "disturbed"
                with disturbance(rng.randrange(1 << 30)) if disturbed else contextlib.nullcontext():
                    both: Found = {}
                    for way in rng.sample((bench.alternating, bench.sequential), 2):
                        both |= way(rng)
                found[condition].append(both)
            count += 1
    return found


def figures(found: dict[str, list[Found]]) -> dict[str, dict[str, Any]]:
    """All figures of the table, by name, with their bars."""
    table: dict[str, dict[str, Any]] = {}
    for condition, each in found.items():
        for way in ("sequential", "sequential, by slices", "unpaired"):
            bar = {("disturbed", "sequential"): 2.0, ("quiet", "sequential"): 1.0, ("quiet", "unpaired"): 1.0}
            least = bar.get((condition, way))
            ratios = [one[way].half_width / one["paired"].half_width for one in each]
            table[f"{condition}: width, {way} / paired"] = _figure(
                ratios, np.median, None if least is None else {"min": least}
            )
        for way in each[0]:
            table[f"{condition}: half-width, {way}"] = _figure(
                [one[way].half_width for one in each], np.median, None
            )
            table[f"{condition}: RMS error, {way}"] = _figure(
                [one[way].value for one in each], _root_mean_square, None
            )
            table[f"{condition}: share that holds the truth, {way}"] = _figure(
                [float(one[way].low <= 0 <= one[way].high) for one in each], np.mean, None
            )
    return table


def _root_mean_square(values: np.ndarray, axis: int | None = None) -> Any:
    return np.sqrt(np.mean(np.square(values), axis=axis))


def _figure(
    values: Sequence[float], statistic: Callable[..., Any], bar: dict[str, float] | None
) -> dict[str, Any]:
    """The statistic with its bootstrap interval over repeats."""
    array = np.array(values)
    drawn = np.random.default_rng(0).choice(array, size=(RESAMPLES, len(array)))
    low, high = np.quantile(statistic(drawn, axis=1), [0.025, 0.975])
    ci95 = [float(low), float(high)] if len(values) > 1 else None
    return {"value": float(statistic(array)), "ci95": ci95, "bar": bar, "count": len(values)}


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="ends within a minute, says less")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=0, help="of all orders and of the disturbance")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds, pairs = (SECONDS_QUICK, PAIRS_QUICK) if arguments.quick else (SECONDS, PAIRS)
        found = figures(repeats(seconds, pairs, random.Random(arguments.seed), Path(folder)))
    print(f"{'what':<66} {'bar':>6} {'value':>7}   95% interval")
    for name, figure in found.items():
        bar = "" if figure["bar"] is None else f"min {figure['bar']['min']:g}"
        bounds = "" if figure["ci95"] is None else "{:.3f} to {:.3f}".format(*figure["ci95"])
        print(f"{name:<66} {bar:>6} {figure['value']:>7.3f}   {bounds}")
    if arguments.json:
        document = {
            "benchmark": "pairing",
            "machine": fingerprint().model_dump(mode="json"),
            "figures": found,
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
