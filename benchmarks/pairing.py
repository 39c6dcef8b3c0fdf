"""What taking turns buys: intervals of a log speed-up from the same seconds of measuring, four ways.

    python benchmarks/pairing.py [--quick] [--json FILE] [--seed N] [--slice SECONDS] [--repeats N]

Prints one table. Both configurations are the same, so the true ratio is 1 and every estimate is an error. *Paired*: two
live processes take turns in slices, one always frozen; the interval is of the pairs, without those
that were found to be disturbed. *Unpaired*: all these slices, as two groups, though they were taken in turns.
*Without turns*: two live processes, one frozen while the other has all of its slices in one stretch; the interval is
of the means of eight neighbours each, two seconds. *Sequential*: fresh processes A, B, A, B, each alone, its slices in
one stretch; the interval is of the processes' means. Of both there is also the interval of all slices, as if those of
one stretch had nothing in common: narrow, and often beside the truth; no bar is for that. *Disturbed*: another process
burns a core, on and off, in random periods. Each repeat has both conditions and all ways, in random order. Slices of
another length (`--slice`) are as many more or fewer, in the same seconds.

Two workloads: one of equal steps, whose speed is the machine's alone, and one of very short epochs, each of which may
stall for a moment at its end, whatever the machine does: of that, turns have nothing in common.
"""

import contextlib
import math
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import Bar, Figure, factor, parser, report, root_mean_square, share
from scipy import stats

from autotune.data.figures import LogInterval
from autotune.data.record import Phase, Slice
from autotune.runtime.executor import LiveTrial, WarmUp
from autotune.runtime.local import LocalExecutor
from autotune.runtime.protocol import Data
from autotune.script.loading import parse_reference
from autotune.space.configuration import baseline_configuration
from autotune.space.knobs import Device
from autotune.stats.intervals import mean_interval
from autotune.tuning.costs import SHORT_SLICE_SECONDS
from autotune.tuning.trial import Trial

HERE = Path(__file__).resolve().parent
WORKLOADS = {
    "equal steps": f"{HERE / 'equal_steps.py'}:equal",
    "short epochs": str(HERE.parent / "examples" / "digits_mlp.py"),
}
REPEATS: dict[str, int] = {"equal steps": 5, "short epochs": 3}
REPEATS_QUICK: dict[str, int] = {"equal steps": 1}
PAIRS, PAIRS_QUICK = 48, 8
"""Half of what a confirmation of 90 seconds has."""
PROCESSES = 4
"""Of each configuration, in the sequential way."""
NEIGHBOURS, NEIGHBOURS_QUICK = 8, 2
"""Slices of one stretch that count as one: two seconds, in which bursts of the disturbance begin or end."""
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

Found = dict[str, LogInterval]
"""Of one repeat in one condition: the interval that each way gives."""


def two_groups(first: Sequence[float], second: Sequence[float]) -> LogInterval:
    """Difference of two means with Welch's interval."""
    value = statistics.fmean(first) - statistics.fmean(second)
    low, high = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    return LogInterval(value=value, low=float(low), high=float(high), count=len(first) + len(second))


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Args:
        slice_seconds: Of one slice.
        pairs: Slices of each side.
        neighbours: Slices of one stretch that count as one.
    """

    slice_seconds: float
    pairs: int
    neighbours: int


class Bench:
    """Trial processes of one configuration."""

    def __init__(self, processes: LocalExecutor, sizes: Sizes, scratch: Path) -> None:
        self._processes = processes
        self._sizes = sizes
        self._scratch = scratch
        facts = processes.open()
        self._configuration = baseline_configuration(facts.batch_size, facts.baseline, Device.CPU, where="benchmark")
        self._data: Data | None = None

    @contextlib.contextmanager
    def live(self) -> Iterator[tuple[LiveTrial, WarmUp]]:
        """A fresh process that is warm, and frozen between its slices."""
        log = str(self._scratch / "log.txt")
        trial = self._processes.launch(self._configuration, log=log, data=self._data)
        try:
            warm = trial.warm_up(PATIENCE_SECONDS)
            self._data = Data.found_by(warm.started)
            yield trial, warm
        finally:
            trial.kill()

    def alternating(self, rng: random.Random) -> Found:
        """The paired way, and all slices unpaired."""
        trial, reference = (Trial(number, Phase.SEARCH, self._configuration) for number in (1, 0))
        with self.live() as (first, own), self.live() as (second, warm):
            trial.note_warm(own)
            reference.note_warm(warm)
            order: list[LiveTrial] = []
            for number in range(self._sizes.pairs):  # drawn, and turned round, as in a confirmation
                order = order[::-1] if number % 2 else rng.sample((first, second), 2)
                taken = {each: self._slice(each) for each in order}
                trial.add_pair(
                    baseline_first=next(iter(taken)) is second,
                    baseline=taken[second],
                    candidate=taken[first],
                    reference=reference,
                )
        groups = [
            [log_rate(each) for each in side]
            for side in zip(*((p.candidate, p.baseline) for p in trial.pairs), strict=True)
        ]
        return {"paired": mean_interval(trial.log_ratios), "unpaired": two_groups(*groups)}

    def without_turns(self, rng: random.Random) -> Found:
        """As many slices of two live processes, all of the one and then all of the other."""
        with self.live() as (first, _), self.live() as (second, _):
            taken = {each: self._stretch(each, self._sizes.pairs) for each in rng.sample((first, second), 2)}
        sides = taken[first], taken[second]
        means = [[statistics.fmean(few) for few in batched(side, self._sizes.neighbours)] for side in sides]
        return {"without turns": two_groups(*means), "without turns, by slices": two_groups(*sides)}

    def _stretch(self, trial: LiveTrial, count: int) -> list[float]:
        """Logarithms of the rates of so many slices in a row."""
        return [log_rate(self._slice(trial)) for _ in range(count)]

    def _slice(self, trial: LiveTrial) -> Slice:
        return trial.measure(self._sizes.slice_seconds, PATIENCE_SECONDS)

    def sequential(self, rng: random.Random) -> Found:
        """The same number of slices, by processes that run alone, one after another: nothing to draw."""
        stretches: tuple[list[list[float]], list[list[float]]] = ([], [])
        for _ in range(PROCESSES):
            for configuration in stretches:
                with self.live() as (trial, _):
                    configuration.append(self._stretch(trial, self._sizes.pairs // PROCESSES))
        slices = [[rate for stretch in each for rate in stretch] for each in stretches]
        means = [[statistics.fmean(stretch) for stretch in each] for each in stretches]
        return {"sequential": two_groups(*means), "sequential, by slices": two_groups(*slices)}


def batched(values: Sequence[float], size: int) -> list[Sequence[float]]:
    """Whole groups of so many neighbours."""
    return [values[start : start + size] for start in range(0, len(values) - size + 1, size)]


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


def repeats(workload: str, count: int, sizes: Sizes, rng: random.Random, scratch: Path) -> dict[str, list[Found]]:
    """What each repeat with a workload found, by condition."""
    found: dict[str, list[Found]] = {condition: [] for condition in CONDITIONS}
    with LocalExecutor(parse_reference(workload), logs=scratch) as processes:
        bench = Bench(processes, sizes, scratch)
        for _ in range(count):
            for condition in rng.sample(CONDITIONS, 2):
                disturbed = condition == "disturbed"
                with disturbance(rng.randrange(1 << 30)) if disturbed else contextlib.nullcontext():
                    both: Found = {}
                    for way in rng.sample((bench.alternating, bench.without_turns, bench.sequential), 3):
                        both |= way(rng)
                found[condition].append(both)
    return found


def bar(condition: str, way: str) -> Bar | None:
    """How wide a way's interval should be at least, in widths of the paired one's."""
    if way.endswith("by slices"):
        return None
    return {"min": 2.0 if condition == "disturbed" else 1.0}


def figures(workload: str, found: Mapping[str, Sequence[Found]]) -> dict[str, Figure]:
    """All figures of one workload, by name, with their bars."""
    table: dict[str, Figure] = {}
    for condition, each in found.items():
        where = f"{workload}, {condition}"
        ways = sorted(each[0])
        for way in (way for way in ways if way != "paired"):
            ratios = [math.log(one[way].half_width / one["paired"].half_width) for one in each]
            table[f"{where}: width, {way} / paired"] = factor(ratios, bar(condition, way))
        for way in ways:
            table[f"{where}: half-width, {way}"] = factor([math.log(one[way].half_width) for one in each])
            table[f"{where}: true error, {way}"] = root_mean_square([one[way].value for one in each])
            holding = sum(one[way].low <= 0 <= one[way].high for one in each)
            table[f"{where}: holds the truth, {way}"] = share(holding, len(each))
    return table


def main() -> None:
    """Measure, print, and write."""
    made = parser(__doc__)
    made.add_argument("--seed", type=int, default=0, help="of all orders and of the disturbance")
    made.add_argument("--slice", type=float, default=SHORT_SLICE_SECONDS, help="seconds of a slice")
    made.add_argument("--repeats", type=int, help="with each workload")
    arguments = made.parse_args()
    if arguments.repeats is not None and arguments.repeats < 1:
        made.error("--repeats must be 1 or more")
    counts = REPEATS_QUICK if arguments.quick else REPEATS
    counts = {name: arguments.repeats or count for name, count in counts.items()}
    pairs, neighbours = (PAIRS_QUICK, NEIGHBOURS_QUICK) if arguments.quick else (PAIRS, NEIGHBOURS)
    more = SHORT_SLICE_SECONDS / arguments.slice
    sizes = Sizes(arguments.slice, round(pairs * more), round(neighbours * more))
    rng, table = random.Random(arguments.seed), dict[str, Figure]()
    with tempfile.TemporaryDirectory() as folder:
        for name, count in counts.items():
            table |= figures(name, repeats(WORKLOADS[name], count, sizes, rng, Path(folder)))
    report("pairing", table, arguments.json)


if __name__ == "__main__":
    main()
