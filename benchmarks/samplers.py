"""Which sampler needs the fewest candidates: the tuner's own proposals, or one of Optuna's samplers alone.

    python benchmarks/samplers.py [--quick] [--json FILE] [--studies N]

Prints one table: how many candidates it takes to be within 5% of the best configuration, and how fast the one chosen by
then is beside the best. Studies draw a machine by a formula: compute, calls, input and what lies between epochs, with
one of three kinds of deviations from that. Where `oracle.py` has recorded all configurations of a real workload, they
are a further kind. Measured speeds have an error; the true speed of what they favour counts.
"""

import json
import math
import random
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import optuna
from figures import Figure, mean, one, parser, write
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, RandomSampler, TPESampler
from oracle import SPACE, TABLE

from autotune.data.figures import Interval
from autotune.data.record import Outcome, Phase, TrialRecord
from autotune.space.changes import Context
from autotune.space.configuration import Configuration, baseline_configuration
from autotune.space.knobs import Device
from autotune.space.space_file import ResolvedSpace, SearchSpace, find_search_space
from autotune.tuning.beliefs import Observations
from autotune.tuning.candidates import INPUT_BOUND_SHARE, Proposals
from autotune.tuning.sampler import Sampler
from autotune.tuning.trial import now_utc

STUDIES, STUDIES_QUICK = 40, 2
"""Of each kind."""
MOST_CANDIDATES = 40
SHOWN_AFTER = (4, 8, 12, 20)
NEAR = math.log(0.95)
ERROR = 0.03
"""Standard deviation of a measured log-speed."""
BATCH_SIZE = 32
BASELINE = baseline_configuration(BATCH_SIZE, {}, Device.CPU, where="benchmark").replace(jit_compile=False)
REPEATS = 20
"""Known configurations in a row that a sampler may propose; then one is drawn at random."""

Speeds = dict[Configuration, float]
"""True log-speeds over the baseline's."""


# ------------------------------------------------------------------------------------------------- machines


def modelled(space: ResolvedSpace, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Log-speeds of all configurations, by the places of their values; shares of their time that wait for input."""
    values = {
        name: np.array(choices, dtype=object).reshape([-1 if other == name else 1 for other in space.choices])
        for name, choices in space.choices.items()
    }
    compute, calls, source, between = rng.dirichlet((2.0, 2.0, 1.0, 1.0))
    xla, half = np.exp(rng.normal(-0.05, 0.25, size=2))
    inside, best_batch = rng.uniform(0.1, 0.6), rng.integers(5, 12)
    batch = values["batch_size"].astype(float)
    steps = values["steps_per_execution"].astype(float)
    work = compute * np.where(values["jit_compile"] == True, xla, 1.0)  # noqa: E712  # of each element
    work = work * np.where(values["precision"] == "float32", 1.0, half)
    work = work * (1 + 0.1 * np.maximum(0.0, np.log2(batch) - best_batch))
    launches = calls * BATCH_SIZE / batch * (inside + (1 - inside) / steps)
    busy = work + launches
    parallel = np.minimum(4.0, np.maximum(1.0, values["num_parallel_calls"].astype(float)))
    waits = source / parallel * np.where(values["data_threads"] == 0, 1.0, rng.uniform(0.9, 1.1))
    unhidden = np.where(values["prefetch"] == 0, waits, np.maximum(0.0, waits - busy))
    seconds = busy + unhidden + between * np.where(values["persistent_iterator"] == True, 0.3, 1.0)  # noqa: E712
    seconds = seconds * np.where(values["data_autotune"] == True, 1.0, rng.uniform(0.95, 1.05))  # noqa: E712
    waiting = np.broadcast_to(unhidden / seconds, seconds.shape).astype(float)
    return -np.log(seconds.astype(float)), waiting


Deviations = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
DEVIATIONS: dict[str, Deviations] = {
    "smooth": lambda rng, shape: rng.normal(0.0, 0.01, size=shape),
    "crowded": lambda rng, shape: -rng.exponential(0.08, size=shape),
    "outliers": lambda rng, shape: (rng.random(shape) < 0.08) * rng.uniform(0.2, 0.8, size=shape),
}
"""Of a configuration's log-speed from the model, by kind."""


class Machine:
    """A space, and the true log-speed of each of its configurations over the baseline's.

    Args:
        space: What is searched.
        speeds: By the places of the values.
        waiting: The share of its time that each waits for input.
    """

    def __init__(self, space: ResolvedSpace, speeds: np.ndarray, waiting: np.ndarray) -> None:
        self.space = space
        self._waiting = waiting
        self._speeds = speeds - speeds[self._places(space.baseline)]
        self.best = float(self._speeds.max())

    def speed(self, configuration: Configuration) -> float:
        """Its true log-speed."""
        return float(self._speeds[self._places(configuration)])

    def waits(self, configuration: Configuration) -> bool:
        """Whether it waits for input, as the tuner asks."""
        return bool(self._waiting[self._places(configuration)] > INPUT_BOUND_SHARE)

    def _places(self, configuration: Configuration) -> tuple[int, ...]:
        return tuple(choices.index(configuration[name]) for name, choices in self.space.choices.items())


def resolved(written: SearchSpace, baseline: Configuration = BASELINE) -> ResolvedSpace:
    """A search space on two cores without a GPU."""
    return written.resolve(baseline=baseline, device=Device.CPU, cores=2, examples=None, dataset_takes_config=True)


def machines(studies: int) -> Iterator[tuple[str, list[Machine]]]:
    """Each kind, and its machines."""
    space = resolved(find_search_space("quick"))
    shape = tuple(map(len, space.choices.values()))
    for kind, deviations in DEVIATIONS.items():
        drawn = []
        for seed in range(studies):
            rng = np.random.default_rng(seed)
            speeds, waiting = modelled(space, rng)
            drawn.append(Machine(space, speeds + deviations(rng, shape), waiting))
        yield kind, drawn
    if TABLE.exists():
        yield f"recorded, {TABLE.stem}", [recorded()] * studies


def recorded() -> Machine:
    """What `oracle.py` has recorded, of whichever machine."""
    space = resolved(find_search_space(SPACE))
    speeds = np.full(tuple(map(len, space.choices.values())), -math.inf)
    for each in json.loads(TABLE.read_text(encoding="utf-8"))["configurations"]:
        places = tuple(choices.index(each["knobs"][name]) for name, choices in space.choices.items())
        speeds[places] = math.log(each["speedup"]) if each["speedup"] else -math.inf
    return Machine(space, speeds, np.zeros(speeds.shape))


# ------------------------------------------------------------------------------------------------- searchers


class Searcher(Protocol):
    """Proposes configurations, and is told how fast they are."""

    def ask(self, tried: Speeds, waits: Callable[[Configuration], bool]) -> Configuration | None:
        """One that was not tried, given what was measured; None where there is none."""

    def tell(self, configuration: Configuration, speed: float) -> None:
        """The log-speed that was measured of the last one."""


class Ours:
    """The tuner's proposals as they are: changes of the fastest by their worth, then its sampler."""

    def __init__(self, space: ResolvedSpace, seed: int, *, steered: bool = True) -> None:
        self._steered = steered  # a wait for input decides what is tried first
        self._sampler = Sampler(space, file=None, name="benchmark", seed=seed)
        self._proposals = Proposals(space, self._sampler)
        self._optuna_trial: optuna.Trial | None = None
        self._told = 0
        self._sampler.catch_up([record_of(space.baseline, 0, 0.0)])

    def ask(self, tried: Speeds, waits: Callable[[Configuration], bool]) -> Configuration | None:
        """See `Searcher`."""
        best = max(tried, key=lambda configuration: tried[configuration])
        now = Context(waits_for_input=self._steered and waits(best))
        propose = partial(self._proposals.next, tried, best, context=now, observations=Observations(ratios=tried))
        proposed = propose() or propose(last=True)
        if proposed is None:
            return None
        self._optuna_trial, configuration = proposed
        return configuration

    def tell(self, configuration: Configuration, speed: float) -> None:
        """See `Searcher`."""
        assert self._optuna_trial is not None
        self._told += 1
        self._sampler.tell(self._optuna_trial, record_of(configuration, self._told, speed))


def record_of(configuration: Configuration, number: int, speed: float) -> TrialRecord:
    """A trial that was measured, by its log-speed over the baseline's."""
    ratio = math.exp(speed)
    return TrialRecord(
        trial=number,
        phase=Phase.SEARCH if number else Phase.BASELINE,
        configuration=dict(configuration),
        outcome=Outcome.OK,
        started_at=now_utc(),
        seconds=1.0,
        speedup=Interval(value=ratio, low=ratio, high=ratio) if number else None,
    )


class OfOptuna:
    """One of Optuna's samplers alone, on the places of a space's values; it begins with the baseline's speed."""

    def __init__(self, space: ResolvedSpace, sampler: BaseSampler, seed: int) -> None:
        self._space, self._rng = space, random.Random(seed)
        self._distributions: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(choices) - 1)
            if len(choices) > 2 and all(type(choice) is int for choice in choices)
            else CategoricalDistribution(range(len(choices)))
            for name, choices in space.choices.items()
        }
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._optuna_trial: optuna.Trial | None = None
        places = {name: choices.index(space.baseline[name]) for name, choices in space.choices.items()}
        self._study.add_trial(optuna.trial.create_trial(params=places, distributions=self._distributions, value=0.0))

    def ask(self, tried: Speeds, waits: Callable[[Configuration], bool]) -> Configuration | None:
        """See `Searcher`. What is known already is told at once, and costs no candidate."""
        if len(tried) >= self._space.size:
            return None
        for _ in range(REPEATS):
            self._optuna_trial = self._study.ask(self._distributions)
            configuration = self._configuration(self._optuna_trial.params)
            if configuration not in tried:
                return configuration
            self._study.tell(self._optuna_trial, tried[configuration])
        while configuration in tried:
            configuration = self._configuration(
                {name: self._rng.randrange(len(choices)) for name, choices in self._space.choices.items()}
            )
        self._optuna_trial = None
        return configuration

    def tell(self, configuration: Configuration, speed: float) -> None:
        """See `Searcher`."""
        if self._optuna_trial is not None:
            self._study.tell(self._optuna_trial, speed)

    def _configuration(self, places: dict[str, int]) -> Configuration:
        return self._space.configuration({name: choices[places[name]] for name, choices in self._space.choices.items()})


Made = Callable[[ResolvedSpace, int], Searcher]


def _made(sampler: Callable[[int], BaseSampler]) -> Made:
    return lambda space, seed: OfOptuna(space, sampler(seed), seed)


SEARCHERS: dict[str, Made] = {
    "proposals as they are": Ours,
    "proposals, not steered": lambda space, seed: Ours(space, seed, steered=False),
    "TPE, multivariate": _made(lambda seed: TPESampler(seed=seed, multivariate=True)),
    "TPE, one knob at a time": _made(lambda seed: TPESampler(seed=seed, multivariate=False)),
    "GPSampler": _made(lambda seed: GPSampler(seed=seed)),
    "CmaEsSampler": _made(lambda seed: CmaEsSampler(seed=seed)),
    "random": _made(lambda seed: RandomSampler(seed=seed)),
}


NEEDS = {"GPSampler": "torch", "CmaEsSampler": "cmaes"}
"""Packages that are no requirement of Optuna's."""


def available() -> dict[str, Made]:
    """Those whose packages are installed; a line for each of the others."""
    missing = {name: package for name, package in NEEDS.items() if find_spec(package) is None}
    for name, package in missing.items():
        print(f"{name} is left out: {package} is not installed")
    return {name: made for name, made in SEARCHERS.items() if name not in missing}


# ------------------------------------------------------------------------------------------------- studies


@dataclass(frozen=True, kw_only=True)
class Course:
    """How one study went.

    Args:
        regrets: After each candidate, the log-speed of the best configuration over that of the favoured one.
    """

    regrets: Sequence[float]

    @property
    def until_near(self) -> float:
        """Candidates until the favoured one is within 5% of the best, for good or not; infinite where it never is."""
        return next((n for n, each in enumerate(self.regrets, start=1) if -each >= NEAR), math.inf)

    def share_after(self, candidates: int) -> float:
        """The speed of the favoured one over that of the best."""
        return math.exp(-self.regrets[min(candidates, len(self.regrets)) - 1])


def study(machine: Machine, searcher: Searcher, seed: int) -> Course:
    """Try candidates one after another, each measured once."""
    rng = random.Random(seed)
    tried: Speeds = {machine.space.baseline: 0.0}
    regrets = []
    for _ in range(MOST_CANDIDATES):
        configuration = searcher.ask(tried, machine.waits)
        if configuration is None:
            break
        tried[configuration] = machine.speed(configuration) + rng.gauss(0.0, ERROR)
        searcher.tell(configuration, tried[configuration])
        favoured = max(tried, key=lambda configuration: tried[configuration])
        regrets.append(machine.best - machine.speed(favoured))
    return Course(regrets=regrets)


def row(courses: Sequence[Course]) -> dict[str, Figure]:
    """The figures of one sampler on one kind."""
    median = statistics.median(course.until_near for course in courses)
    return {
        "candidates until within 5%": one(median if math.isfinite(median) else None, len(courses)),
        **{f"after {n}": mean([course.share_after(n) for course in courses]) for n in SHOWN_AFTER},
    }


def main() -> None:
    """Search, print, and write."""
    made = parser(__doc__)
    made.add_argument("--studies", type=int, help=f"of each kind; {STUDIES} by default")
    given = made.parse_args()
    studies = given.studies or (STUDIES_QUICK if given.quick else STUDIES)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    searchers, found = available(), dict[str, Figure]()
    columns = ["within 5%", *(f"after {n}" for n in SHOWN_AFTER)]
    print(f"{'kind':<28} {'sampler':<24}" + "".join(f"{column:>11}" for column in columns))
    for kind, drawn in machines(studies):
        for name, searcher in searchers.items():
            courses = [study(machine, searcher(machine.space, seed), seed) for seed, machine in enumerate(drawn)]
            figures = row(courses)
            found |= {f"{kind}, {name}: {what}": figure for what, figure in figures.items()}
            near, *shares = (figure["value"] for figure in figures.values())
            shown = f"{f'over {MOST_CANDIDATES}' if near is None else f'{near:g}':>11}"
            print(f"{kind:<28} {name:<24}{shown}" + "".join(f"{each:>11.2f}" for each in shares))
    write("samplers", found, given.json)


if __name__ == "__main__":
    main()
