"""What racing saves: seconds of measuring with and without it, to decisions that are equally good.

    python benchmarks/racing.py [--quick] [--json FILE]

Prints one table, and what fixed numbers of pairs would have given. Each study is the tuner's own search on simulated
trials, with the plan of a real budget; only what is sampled is drawn at random, so that studies are quick. *With
racing*: as the search decides. *Without*: every configuration that the study sampled is measured again, beside the
baseline on the same machine, with one number of pairs for all, and the fastest is taken. Racing competes with the
number that leaves the same mean *regret*: true log-speed of the best that was sampled, less that of the one taken.
That number is known to nobody beforehand. Where no number is as good, the largest one stands: a lower bound. The mean
of kinds is geometric.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from figures import Bar, Figure, mean, parser, report, share
from scipy.optimize import isotonic_regression

import autotune
from autotune.machine import available_cores
from autotune.run_directory import RunDirectory
from autotune.space.configuration import Configuration, baseline_configuration
from autotune.space.knobs import Device
from autotune.space.search_space import ResolvedSpace, find_search_space
from autotune.study.plan import plan_run
from autotune.study.progress import silent
from autotune.study.run import Run
from autotune.study.search import Search
from autotune.study.side_by_side import SideBySide
from autotune.study.slicing import SLICE_SECONDS
from autotune.trial.live import Data
from autotune.trial.record import Outcome, TrialRecord
from autotune.trial.simulated import SimulatedTrials
from autotune.workload import WorkloadFacts

RECORDED = Path(__file__).resolve().parent.parent / "results" / "digits_mlp_two_cores"
STUDIES, STUDIES_QUICK = 60, 5
"""Of each kind."""
MOST_PAIRS = 64
"""Without racing, of each configuration."""
SHOWN_PAIRS = (2, 4, 8, 16, 32, 64)
SAMPLES_PER_SECOND = 40_000.0
"""Of the baseline: a call takes little of a slice."""
DRIFT, DRIFT_STEP_SECONDS, DRIFT_MEMORY_SECONDS = 0.15, 0.25, 20.0
"""Deviation of the whole machine's log-speed, how often it changes, and how long it takes to forget."""
TAIL_SHARE, TAIL = 0.05, 0.5
"""Where tails are heavy: how many slices are slowed down, and the mean logarithm of by how much."""
RESAMPLES = 400

Table = Callable[[random.Random], float]
"""Draws a configuration's true log-speed."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of study.

    Args:
        table: Names what true speeds are drawn from.
        noise: Standard deviation of a slice's log-speed.
        heavy: Whether some slices are slowed down much more than that.
        budget: Of the run whose search this is, in seconds.
    """

    table: str
    noise: float
    heavy: bool = False
    budget: float = 600.0

    def __str__(self) -> str:
        """As the table names it."""
        tails = ", heavy tails" if self.heavy else ""
        return f"{self.table}, noise {self.noise:.0%}{tails}, {self.budget / 60:.0f} min"


@dataclass(frozen=True, kw_only=True)
class Study:
    """What came of one study.

    Args:
        regret: Log-speed that was lost by racing.
        seconds: Of its slices, the baseline's turns included.
        trials: How many configurations it sampled.
        started: How many processes it started for them.
        start_seconds: Of one process, until it is warm.
        best_pruned: Whether the best of them was pruned.
        best_lost: Whether it is no finalist: pruned, left behind, or not told from others.
        fixed: The regret without racing, by number of pairs less one.
    """

    regret: float
    seconds: float
    trials: int
    started: int
    start_seconds: float
    best_pruned: bool
    best_lost: bool
    fixed: np.ndarray


KINDS = (
    *(
        Kind(table=table, noise=noise)
        for table in ("recorded", "crowded", "outliers")
        for noise in (0.03, 0.1, 0.3)
    ),
    *(Kind(table=table, noise=0.1, heavy=True) for table in ("recorded", "crowded")),
    Kind(table="recorded", noise=0.1, budget=180.0),
    Kind(table="crowded", noise=0.1, budget=180.0),
    Kind(table="recorded", noise=0.1, budget=1800.0),
)


@functools.cache
def tables() -> dict[str, Table]:
    """The distributions of true log-speeds, by name."""
    history = autotune.load_history(RECORDED)
    searched = history[history["phase"].isin(["probe", "search"])]
    recorded = [math.log(each) for each in searched["speedup"].dropna()]
    return {
        "recorded": lambda rng: rng.choice(recorded) + rng.gauss(0.0, 0.03),
        "crowded": lambda rng: 0.7 - rng.expovariate(1 / 0.08),
        "outliers": lambda rng: rng.gauss(-0.1, 0.15) + (rng.random() < 0.08) * rng.uniform(0.2, 0.8),
    }


class HeavyTailed(random.Random):
    """Some of the values lie far below."""

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        """A normal value, or one that is less by an exponential one."""
        value = super().gauss(mu, sigma)
        return value - self.expovariate(1 / TAIL) if self.random() < TAIL_SHARE else value


class Drift:
    """The whole machine's speed as a factor: it wanders, and forgets in time."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._kept = math.exp(-DRIFT_STEP_SECONDS / DRIFT_MEMORY_SECONDS)
        self._values = [self._rng.gauss(0.0, DRIFT)]

    def __call__(self, seconds: float) -> float:
        """At this moment."""
        index = int(seconds / DRIFT_STEP_SECONDS)
        fresh = DRIFT * math.sqrt(1 - self._kept**2)
        while len(self._values) <= index:
            self._values.append(self._values[-1] * self._kept + self._rng.gauss(0.0, fresh))
        return math.exp(self._values[index])


class InMemory(RunDirectory):
    """A run directory that is never written."""

    def prepare_trial(self, trial: int) -> Path:
        """Nothing to make."""
        return self.trial_directory(trial)

    def write_trial(self, record: TrialRecord) -> None:
        """Nothing to write: the run has its records."""


class AtRandom:
    """In the sampler's place: any configuration of the space."""

    def __init__(self, space: ResolvedSpace, rng: random.Random) -> None:
        self._space, self._rng = space, rng

    def ask(self) -> tuple[None, Configuration]:
        """Any."""
        drawn = {name: self._rng.choice(choices) for name, choices in self._space.choices.items()}
        return None, self._space.configuration(drawn)

    def ask_for(self, configuration: Configuration) -> None:
        """Nothing is kept."""

    def tell(self, asked: None, record: TrialRecord) -> None:
        """Nothing is learned."""

    def pass_over(self, asked: None) -> None:
        """Nothing is learned."""

    def catch_up(self, records: Iterable[TrialRecord]) -> None:
        """Nothing is learned."""


FACTS = WorkloadFacts(
    name="simulated",
    batch_size=32,
    baseline={},
    batched=False,
    drop_remainder=False,
    dataset_takes_config=True,
    validates=False,
    fingerprint="sha256:00",
)
BASELINE = baseline_configuration(32, {}, Device.CPU, where="benchmark").replace(jit_compile=False)


class Machine:
    """A simulated machine, on which each configuration has a speed of its own."""

    def __init__(self, kind: Kind, table: Table, seed: int) -> None:
        self._speeds: dict[Configuration, float] = {BASELINE: 0.0}
        self._table, self._rng = table, random.Random(seed)
        self.trials = SimulatedTrials(
            facts=FACTS,
            samples_per_second=lambda each: SAMPLES_PER_SECOND * math.exp(self.speed(each)),
            noise=kind.noise,
            drift=Drift(seed + 1),
            examples=None,
            seed=seed + 2,
        )
        if kind.heavy:
            self.trials.random = HeavyTailed(seed + 2)

    def speed(self, configuration: Configuration) -> float:
        """Its true log-speed; the baseline's is 0."""
        if configuration not in self._speeds:
            self._speeds[configuration] = self._table(self._rng)
        return self._speeds[configuration]

    def fixed(self, sampled: Sequence[Configuration], pairs: int) -> np.ndarray:
        """The regret of taking the fastest by its first pairs, for each number of them up to `pairs`."""
        data = Data(examples=None, endless=True)
        baseline = self.trials.launch(BASELINE, log="", data=data)
        baseline.warm_up(60.0)
        ratios = np.zeros((len(sampled) + 1, pairs))  # the last one is the baseline's own
        for row, configuration in enumerate(sampled):
            trial = self.trials.launch(configuration, log="", data=data)
            trial.warm_up(60.0)
            for column in range(pairs):
                first, second = (trial, baseline) if column % 2 else (baseline, trial)
                rates = {}
                for each in (first, second):
                    taken = each.measure(SLICE_SECONDS, 60.0)
                    rates[each] = math.log(taken.examples / taken.seconds)
                ratios[row, column] = rates[trial] - rates[baseline]
            trial.kill()
        means = ratios.cumsum(axis=1) / np.arange(1, pairs + 1)
        truths = np.array([*(self.speed(each) for each in sampled), 0.0])
        regrets: np.ndarray = truths.max() - truths[means.argmax(axis=0)]
        return regrets


def quick_space() -> ResolvedSpace:
    """What `autotune tune` searches on a machine of two cores without a GPU."""
    return find_search_space("quick").resolve(
        baseline=BASELINE, device=Device.CPU, cores=2, examples=None, dataset_takes_config=True
    )


def study(kind: Kind, table: Table, seed: int) -> Study:
    """One search, and the same configurations without racing."""
    machine = Machine(kind, table, 10 * seed)
    trials = machine.trials
    trials.open()
    run = Run(
        directory=InMemory(Path("unwritten")),
        trials=trials,
        clock=trials.clock,
        observe=silent,
        interruptions=lambda: 0,
        rng=random.Random(10 * seed + 3),
        baseline=BASELINE,
    )
    beside = SideBySide(run)
    warm = beside.start_baseline(60.0)
    plan = plan_run(
        kind.budget,
        ready_at=trials.clock(),
        first_step=warm.first_step_seconds,
        ready=warm.ready_seconds,
        trial_timeout=None,
    )
    space = quick_space()
    sampler: Any = AtRandom(space, random.Random(10 * seed + 4))
    search = Search(run, beside, space, sampler, plan, most_trials=None)
    search.search()
    beside.end_baseline()
    records = [each for each in run.records.values() if each.trial]
    sampled = {Configuration(each.configuration): each for each in records}
    best = max(sampled, key=machine.speed)
    finalists = search.finalists()
    taken = Configuration(finalists[0].configuration) if finalists else BASELINE
    return Study(
        regret=max(0.0, machine.speed(best)) - machine.speed(taken),
        seconds=sum(p.candidate.seconds + p.baseline.seconds for r in records for p in r.pairs),
        trials=len(records),
        started=sum(each.instances for each in records),
        start_seconds=warm.ready_seconds,
        best_pruned=sampled[best].outcome is Outcome.PRUNED,
        best_lost=machine.speed(best) > 0
        and best not in [Configuration(each.configuration) for each in finalists],
        fixed=machine.fixed(list(sampled), MOST_PAIRS),
    )


def fixed_curve(studies: Sequence[Study]) -> np.ndarray:
    """Mean regret without racing, by number of pairs less one; made to fall, as it does in the long run."""
    means = np.mean([each.fixed for each in studies], axis=0)
    return np.asarray(isotonic_regression(means, increasing=False).x)


def equal_pairs(studies: Sequence[Study]) -> float:
    """The fixed number of pairs whose mean regret is racing's: the largest one where none is as good."""
    curve = fixed_curve(studies)
    regret = float(np.mean([each.regret for each in studies]))
    reached = np.flatnonzero(curve <= regret)
    if not len(reached):
        return float(len(curve))
    index = int(reached[0])
    if index == 0:
        return 1.0
    return index + float((curve[index - 1] - regret) / (curve[index - 1] - curve[index]))


def savings(studies: Sequence[Study]) -> tuple[float, float]:
    """Seconds of slices without racing over those with it, and the same where starting processes counts, too."""
    pairs = equal_pairs(studies)
    trials = sum(each.trials for each in studies)
    slices = sum(each.seconds for each in studies)
    starts = sum(each.start_seconds * each.trials for each in studies)
    raced = sum(each.start_seconds * each.started for each in studies)
    without = 2 * SLICE_SECONDS * pairs * trials
    return without / slices, (without + starts) / (slices + raced)


def resampled(studies: Sequence[Study], seed: int) -> np.ndarray:
    """Logarithms of the savings in bootstrap samples of the studies, a row for each."""
    rng = random.Random(seed)
    return np.log([savings(rng.choices(studies, k=len(studies))) for _ in range(RESAMPLES)])


def figures(found: dict[Kind, list[Study]]) -> dict[str, Figure]:
    """All figures of the table, by name, with their bars."""
    values = np.log([savings(each) for each in found.values()])
    draws = np.array([resampled(each, seed) for seed, each in enumerate(found.values())])
    count = sum(map(len, found.values()))
    overall = values.mean(axis=0), draws.mean(axis=0)
    table = {
        "seconds without racing / with it, mean of kinds": _ratio(
            overall[0][0], overall[1][:, 0], {"min": 2.0}, count
        ),
        "the same, starting processes included": _ratio(overall[0][1], overall[1][:, 1], None, count),
    }
    for row, (kind, studies) in enumerate(found.items()):
        table[f"{kind}: ratio"] = _ratio(values[row, 0], draws[row, :, 0], None, len(studies))
        table[f"{kind}: regret, log"] = mean([each.regret for each in studies])
    every = [each for studies in found.values() for each in studies]
    table["share of studies whose best was pruned"] = share(
        sum(each.best_pruned for each in every), count, {"max": 0.02}
    )
    table["share of studies whose best was no finalist"] = share(sum(each.best_lost for each in every), count)
    return table


def _ratio(value: float, draws: np.ndarray, bar: Bar | None, count: int) -> Figure:
    low, high = np.exp(np.quantile(draws, [0.025, 0.975]))
    return {"value": math.exp(value), "ci95": [float(low), float(high)], "bar": bar, "count": count}


def notes(found: dict[Kind, list[Study]]) -> Iterator[str]:
    """For each kind what racing spent and lost, and what fixed numbers of pairs would have lost."""
    shown = "".join(f"{pairs:>6}" for pairs in SHOWN_PAIRS)
    title = "mean regret in %, and pairs a configuration"
    yield f"{title:<44} {'racing':>6} {'pairs':>6} {'equal':>6}  without, pairs:{shown}"
    for kind, studies in found.items():
        curve = np.mean([each.fixed for each in studies], axis=0)
        regret = np.mean([each.regret for each in studies])
        spent = sum(each.seconds for each in studies) / sum(each.trials for each in studies)
        fixed = "".join(f"{100 * curve[pairs - 1]:>6.1f}" for pairs in SHOWN_PAIRS)
        yield (
            f"{kind!s:<44} {100 * regret:>6.1f} {spent / (2 * SLICE_SECONDS):>6.1f} {equal_pairs(studies):>6.1f}"
            f"{'':>17}{fixed}"
        )


def _study(asked: tuple[Kind, int]) -> Study:
    kind, seed = asked
    return study(kind, tables()[kind.table], seed)


def all_studies(count: int) -> dict[Kind, list[Study]]:
    """So many studies of each kind, on all cores."""
    asked = [(kind, seed) for kind in KINDS for seed in range(count)]
    with ProcessPoolExecutor(available_cores(), mp_context=get_context("spawn")) as pool:
        done = iter(list(pool.map(_study, asked, chunksize=2)))
    return {kind: list(itertools.islice(done, count)) for kind in KINDS}


def main() -> None:
    """Replay, print, and write."""
    arguments = parser(__doc__).parse_args()
    studies = all_studies(STUDIES_QUICK if arguments.quick else STUDIES)
    report("racing", figures(studies), arguments.json)
    print(*notes(studies), sep="\n")


if __name__ == "__main__":
    main()
