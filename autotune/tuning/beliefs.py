"""Beliefs about configurations: the table's expectations, corrected by what a run has measured.

The logarithm of a configuration's speed-up is taken to be a sum of normally distributed effects of its values, and of a
rest that similar configurations share: a Gaussian process with a linear kernel and one of the knobs that differ.
Measurements of whole configurations then tell of all their parts: of a combination that disappoints, the doubtful parts
get most of the blame. A number's effect is the sum of the steps from the baseline's value to it.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, FiniteFloat

from autotune.data.models import Amount, Count, Frozen, KnobValue, Many, Positive
from autotune.space.changes import Context
from autotune.space.configuration import Configuration, format_value
from autotune.space.knobs import KNOBS, Stage
from autotune.space.space_file import ResolvedSpace
from autotune.stats.same_loss import log_examples

NOISE = 0.03  # standard deviation of a measured log speed-up
REST = 0.2  # the same of what the effects of a configuration's values do not explain
ALIKE = 32  # so many knobs make the rests of two configurations differ by much
MOST_OBSERVED = 200  # the latest measurements count: the time to decide grows with their square
LEAST_SPREAD = 0.02  # of an effect: no row is surer than that
MIN_Z_SLOWER = 2.0  # standard deviations below another one: a sample is almost surely slower
SAME_KNOB = 0.5  # correlation between the steps of one number
TABLE_WEIGHT = 2.0  # trials that the table's share of failures counts for
TABLE = Path(__file__).with_name("expectations.json")
NO_UNIT = "none"  # the value has fast units on some machines, and this one has none of them
HOST_LIMITS = ("input", "launch")
DECAY = 0.7  # each further doubling of a number gains so much of what the one before has gained


class Expectation(Frozen):
    """A row: the gain of a change, among trainings that are limited in one way, on one kind of hardware."""

    knob: str
    change: str  # `up` or `down` for a doubling or halving; `some` for a number in place of none; else the new value
    device: Literal["cpu", "gpu"]
    limit: Literal["input", "launch", "compute", ""] = ""  # see `Context.limit`; empty: any
    unit: str = ""  # that the value computes on, or `none`; empty where the value needs no unit
    speedup: Positive  # the median
    spread: Amount  # standard deviation of its logarithm, between trainings
    failures: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.05  # share of trials that failed because of it
    start: Positive = 1.0  # factor on the seconds up to the first step
    trials: Count = 0  # that the row rests on; 0 for literature
    source: str

    @property
    def gain(self) -> float:
        """The logarithm of the speed-up."""
        return math.log(self.speedup)


NEUTRAL = Expectation(knob="", change="", device="cpu", speedup=1.0, spread=0.08, source="a change without a row")


class ExpectationsFile(Frozen):
    """The file of the table."""

    schema_version: Literal[1] = 1
    rows: Many[Expectation]


class Expectations:
    """The rows, by what they are about."""

    def __init__(self, rows: Iterable[Expectation]) -> None:
        self._rows = {(row.knob, row.change, row.device, row.limit, row.unit): row for row in rows}

    def find(self, knob: str, change: str, now: Context, unit: str) -> Expectation:
        """Return the row that fits best: of the same limit, else of any; a neutral one where there is none.

        The host limits a training alike on a processor and a GPU: there the other device's row is the last resort.
        """
        device, other = ("gpu", "cpu") if now.on_gpu else ("cpu", "gpu")
        keys = [(knob, change, device, limit, unit) for limit in (now.limit, "")]
        if now.limit in HOST_LIMITS:
            keys.append((knob, change, other, now.limit, unit))
        return next((self._rows[key] for key in keys if key in self._rows), NEUTRAL)


@functools.cache
def load_expectations() -> Expectations:
    """Read the table of the package."""
    return Expectations(ExpectationsFile.model_validate_json(TABLE.read_bytes()).rows)


def is_number(value: KnobValue) -> bool:
    """Return whether a value is a positive number, whose doublings count."""
    return type(value) is int and value > 0


def classify_change(before: KnobValue, after: KnobValue) -> str:
    """Return the kind of a change, as rows name it."""
    if is_number(before) and is_number(after):
        return "up" if int(after) > int(before) else "down"
    return "some" if is_number(after) else format_value(after)


def find_unit(knob: str, value: KnobValue, units: Iterable[str]) -> str:
    """Return the unit that makes a value of a knob fast on a machine with these units, as rows name it."""
    wanted = KNOBS[knob].units.get(value, ())
    present = frozenset(units)
    return next((unit for unit in wanted if unit in present), NO_UNIT if wanted else "")


def size_of_change(before: KnobValue, after: KnobValue, baseline: KnobValue) -> float:
    """Return how many first doublings of a number a change away from the baseline gains; 1 for other changes."""
    if not (is_number(before) and is_number(after) and is_number(baseline)):
        return 1.0
    return effective_doublings(int(after) / int(baseline)) - effective_doublings(int(before) / int(baseline))


def effective_doublings(ratio: float) -> float:
    """Return how many first doublings gain as much as multiplying or dividing a number by `ratio`."""
    return (1 - math.pow(DECAY, abs(math.log2(ratio)))) / (1 - DECAY)


@dataclass(frozen=True, kw_only=True)
class Observations:
    """The trials of a run so far, derived from its records."""

    ratios: Mapping[Configuration, float] = field(default_factory=dict)  # log speed-ups, the baseline's included
    failed: Collection[Configuration] = ()
    running: Sequence[Configuration] = ()  # on other seats, the latest last
    over_critical: float = (
        0.0  # the baseline's batch size over the critical one; 0 where samples per second are the aim
    )


@dataclass(frozen=True, kw_only=True)
class KnobStep:
    """A step from one value of a knob to another one, away from the baseline's."""

    knob: str
    before: KnobValue
    after: KnobValue
    size: float  # how many first doublings of a number it gains; 1 for other steps


class Features:
    """The steps of a search space, and configurations as vectors of them."""

    def __init__(self, space: ResolvedSpace) -> None:
        self.space = space
        self.steps: list[KnobStep] = []
        self._paths: dict[tuple[str, str], list[int]] = {}  # of each value, the steps that lead to it
        self._vectors: dict[Configuration, np.ndarray] = {}
        self._codes: dict[Configuration, np.ndarray] = {}
        for name, choices in space.choices.items():
            self._add_steps(name, choices, space.baseline[name])

    def _add_steps(self, name: str, choices: Sequence[KnobValue], baseline: KnobValue) -> None:
        numbers = [int(value) for value in choices if is_number(value)] if is_number(baseline) else []
        for value in choices:
            if value not in numbers and format_value(value) != format_value(baseline):
                self._add_path(name, baseline, [value])
        above = sorted(number for number in numbers if number > int(baseline))
        below = sorted((number for number in numbers if number < int(baseline)), reverse=True)
        self._add_path(name, baseline, above)
        self._add_path(name, baseline, below)

    def _add_path(self, name: str, baseline: KnobValue, values: Sequence[KnobValue]) -> None:
        path: list[int] = []
        for before, after in itertools.pairwise([baseline, *values]):
            path = [*path, len(self.steps)]
            size = size_of_change(before, after, baseline)
            self.steps.append(KnobStep(knob=name, before=before, after=after, size=size))
            self._paths[name, format_value(after)] = path

    def vector(self, configuration: Configuration) -> np.ndarray:
        """Return 1 for each step that a configuration has taken, else 0."""
        if configuration not in self._vectors:
            vector = np.zeros(len(self.steps))
            for name in self.space.choices:
                vector[self._paths.get((name, format_value(configuration[name])), [])] = 1.0
            self._vectors[configuration] = vector
        return self._vectors[configuration]

    def code(self, configuration: Configuration) -> np.ndarray:
        """Return the place of each varied knob's value among its choices."""
        if configuration not in self._codes:
            places = [choices.index(configuration[name]) for name, choices in self.space.choices.items()]
            self._codes[configuration] = np.array(places)
        return self._codes[configuration]


class Beliefs:
    """Expected speed of configurations in a context, given the table and the measurements."""

    def __init__(self, features: Features, now: Context, table: Expectations, observations: Observations) -> None:
        self._features, self._now = features, now
        self._over_critical = observations.over_critical
        rows = [
            table.find(
                step.knob, classify_change(step.before, step.after), now, find_unit(step.knob, step.after, now.units)
            )
            for step in features.steps
        ]
        self._start = np.log([row.start for row in rows])
        self._mean, self._covariance = self._expect(rows)
        self._observe(observations)
        self._failures = self._blame(np.array([row.failures for row in rows]), observations)

    def _expect(self, rows: Sequence[Expectation]) -> tuple[np.ndarray, np.ndarray]:
        """Return means and covariance of all effects by the table."""
        steps = self._features.steps
        sizes = np.array([step.size for step in steps])
        deviations = np.array([max(LEAST_SPREAD, row.spread) for row in rows]) * sizes
        correlation = np.eye(len(steps))
        for (first, step), (second, other) in itertools.combinations(enumerate(steps), 2):
            kinds = {classify_change(known.before, known.after) for known in (step, other)}
            if step.knob == other.knob and kinds in ({"up"}, {"down"}):  # of a number, in one direction
                correlation[first, second] = correlation[second, first] = SAME_KNOB
        return np.array([row.gain for row in rows]) * sizes, correlation * np.outer(deviations, deviations)

    def _observe(self, observations: Observations) -> None:
        """Take measurements into account. A running trial is taken to be as fast as expected."""
        space, vector = self._features.space, self._features.vector
        measured = {known: ratio for known, ratio in observations.ratios.items() if known in space}
        measured = dict(list(measured.items())[-MOST_OBSERVED:]) | {space.baseline: 0.0}
        running = [known for known in observations.running if known not in measured]
        self._seen = [*measured, *running]
        self._vectors = np.array([vector(known) for known in self._seen])
        expected = self._vectors @ self._mean
        noise = np.array([1e-4 if known == space.baseline else NOISE for known in self._seen])
        self._inverse = np.linalg.inv(self._kernel(self._seen, self._seen) + np.diag(noise**2))
        errors = np.array([*measured.values(), *expected[len(measured) :]]) - expected
        self._weights = self._inverse @ errors

    def _kernel(self, some: Sequence[Configuration], others: Sequence[Configuration]) -> np.ndarray:
        """Return the covariances of configurations before anything was measured."""
        first, second = ([self._features.vector(known) for known in group] for group in (some, others))
        codes, other_codes = ([self._features.code(known) for known in group] for group in (some, others))
        differences = (np.array(codes)[:, None, :] != np.array(other_codes)[None, :, :]).sum(axis=2)
        linear = np.array(first) @ self._covariance @ np.array(second).T
        return np.asarray(linear + REST**2 * np.exp(-differences / ALIKE))

    def _blame(self, table: np.ndarray, observations: Observations) -> np.ndarray:
        """Return each step's chance to make a trial fail: a failed trial's blame is shared by its steps' chances."""
        blame, trials = TABLE_WEIGHT * table, np.full(len(table), TABLE_WEIGHT)
        for known in observations.ratios:
            trials += self._features.vector(known) if known in self._features.space else 0.0
        for failed in observations.failed:
            taken = self._features.vector(failed) > 0
            chances = np.where(taken, np.maximum(blame / trials, 1e-3), 0.0)
            shared = np.minimum(1.0, chances / max(1 - math.prod(1 - chances), 1e-3))
            blame, trials = blame + shared, trials + np.where(taken, shared, 0.0)
        return np.asarray(np.minimum(1.0, blame / trials))

    def gain(self, configuration: Configuration, over: Configuration) -> tuple[float, float]:
        """Return mean and standard deviation of the log speed-up to the same loss over another configuration."""
        both = [configuration, over]
        covariance = self._kernel(both, self._seen)
        prior = np.array([self._features.vector(known) for known in both]) @ self._mean
        means = prior + covariance @ self._weights
        left = self._kernel(both, both) - covariance @ self._inverse @ covariance.T
        variance = left[0, 0] + left[1, 1] - left[0, 1] - left[1, 0]
        more = [self._more_examples(known) for known in both]
        return float(means[0] - means[1]) - more[0] + more[1], math.sqrt(max(0.0, float(variance)))

    def _more_examples(self, configuration: Configuration) -> float:
        """Return the logarithm of the examples that a larger batch should need, over the baseline's."""
        ratio = configuration.update_size / self._features.space.baseline.update_size
        return log_examples(max(1.0, ratio), self._over_critical)

    def is_slower(self, configuration: Configuration, over: Configuration) -> bool:
        """Return whether a configuration is almost surely slower to the same loss than another one."""
        mean, deviation = self.gain(configuration, over)
        return mean + MIN_Z_SLOWER * deviation < 0

    def failure(self, configuration: Configuration) -> float:
        """Return the chance that its trial fails."""
        return float(1 - math.prod(1 - self._failures[self._features.vector(configuration) > 0]))

    def improvement(self, configuration: Configuration, over: Configuration) -> float:
        """Return the log speed-up to be expected of a trial, where a slower one or a failure gains nothing."""
        mean, deviation = self.gain(configuration, over)
        deviation = math.hypot(deviation, NOISE / 3)
        score = mean / deviation
        density = math.exp(-(score**2) / 2) / math.sqrt(2 * math.pi)
        expected = deviation * density + mean * (1 + math.erf(score / math.sqrt(2))) / 2
        return expected * (1 - self.failure(configuration))

    def seconds(self, configuration: Configuration) -> float:
        """Return the expected seconds of its trial."""
        start = self._now.start_seconds * math.exp(float(self._features.vector(configuration) @ self._start))
        imports = any(
            KNOBS[name].stage is Stage.IMPORT for name in configuration.differences(self._features.space.baseline)
        )
        return start + self._now.measured_seconds + (self._now.import_seconds if imports else 0.0)

    def draw(self, rng: random.Random, best: Configuration, useful: Mapping[str, Sequence[KnobValue]]) -> Configuration:
        """Return the fastest of useful values if effects were as drawn from these beliefs."""
        known = self._covariance @ self._vectors.T
        mean, covariance = self._mean + known @ self._weights, self._covariance - known @ self._inverse @ known.T
        generator = np.random.default_rng(rng.getrandbits(32))
        effects = generator.multivariate_normal(mean, covariance, method="eigh")
        space = self._features.space

        def effect(name: str, value: KnobValue) -> float:
            varied = space.baseline.replace(**{name: value})
            return float(self._features.vector(varied) @ effects) - self._more_examples(varied)

        drawn = {name: max(choices, key=lambda value: effect(name, value)) for name, choices in useful.items()}
        return space.canonical(best.replace(**drawn))
