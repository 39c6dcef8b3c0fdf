"""Which configuration is tried next: neighbours of the fastest so far, the usually best first; then the sampler's.

Each is enqueued in the Optuna study, or asked of its sampler, and told to it. The order of the neighbours follows from
the knobs' probes.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import optuna

from autotune.data.models import KnobValue
from autotune.data.record import TrialRecord
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS
from autotune.space.probes import Limit, Situation
from autotune.space.space_file import ResolvedSpace
from autotune.stats.disturbance import gpu_figures
from autotune.tuning.sampler import Sampler
from autotune.tuning.slicing import is_busy

MOST_REPEATS = 5  # samples in a row that are known or passed over: then chance proposes
MOST_DRAWN = 4096  # configurations that chance draws; a space of no more is gone through
MOST_OF_OTHERS = 2  # values of a knob without probes, before the sampler has its turn
WAITS = 0.15  # share of its time waiting for input from which a pipeline's knobs are tried first
SHORT_STEP_SECONDS = 0.01  # a call into TensorFlow takes about 1 ms, which several steps may share

GAIN = 0.03  # from which on a change is taken along; the logarithm of a speed-up, as large as usual errors
MOST_JOINED = 3  # candidates whose changes are also added to the fastest one by one

Changes = dict[str, KnobValue]


@dataclass(frozen=True, kw_only=True)
class Others:
    """What is known besides the fastest where several seats search: too little has ended to go on step by step."""

    running: Sequence[Configuration]  # the latest last
    ratios: Mapping[Configuration, float]  # logarithms of the speed-ups that were measured, the baseline's included


def has_short_steps(record: TrialRecord) -> bool:
    """Whether a call into TensorFlow takes much of a step."""
    steps = [each.step_seconds.p50 for each in record.slices]
    return not steps or statistics.median(steps) <= SHORT_STEP_SECONDS


def limit_of(best: TrialRecord, others: Sequence[TrialRecord], *, short_steps: bool) -> Limit | None:
    """What limits the fastest trial; where its wait for input was not measured, by the latest of the others."""
    known = [each.input_wait_fraction for each in (best, *reversed(others)) if each.input_wait_fraction is not None]
    if known[0] > WAITS if known else not is_busy(best.slices):
        return "input"
    of_launch = best.bottleneck is not None and best.bottleneck.name == "launch"
    unseen = gpu_figures(best)["gpu_utilisation"] is None  # then short steps are the only sign of it
    return None if of_launch or (short_steps and unseen) else "compute"


class Proposals:
    """Proposes configurations that were not tried."""

    def __init__(self, space: ResolvedSpace, sampler: Sampler) -> None:
        self._space = space
        self._sampler = sampler
        self._begun: dict[Configuration, Configuration] = {}  # the fastest, when each was proposed
        self.exhausted = self.nothing_fits = False  # whether nothing new is left

    def next(
        self,
        tried: Collection[Configuration],
        best: Configuration,
        *,
        limit: Limit | None,
        short_steps: bool = True,
        passes_over: Callable[[Configuration], bool] = lambda configuration: False,
        others: Others | None = None,
    ) -> tuple[optuna.Trial, Configuration] | None:
        """The next configuration and the Optuna trial to be told about it; None where nothing new is left."""
        if len(tried) >= self._space.size:
            self.exhausted = True
            return None
        beginning = others.running[-1] if others and others.running else best  # taken to become the fastest
        near = neighbours(beginning, tried, self._space, limit=limit, short_steps=short_steps)
        if others is not None:
            near = [each for each in self._joined(best, others.ratios) if each in self._space] + near
        proposed = self._first(near, tried, passes_over)
        if proposed is not None:
            self._begun[proposed[1]] = best
        return proposed

    def _first(
        self,
        near: Iterable[Configuration],
        tried: Collection[Configuration],
        passes_over: Callable[[Configuration], bool],
    ) -> tuple[optuna.Trial, Configuration] | None:
        """The first new one of these, else the sampler's, else one by chance."""
        for configuration in near:
            if configuration not in tried and not passes_over(configuration):
                return self._sampler.ask_for(configuration), configuration
        for _ in range(MOST_REPEATS):
            asked, configuration = self._sampler.ask()
            if configuration not in tried and not passes_over(configuration):
                return asked, configuration
            self._sampler.pass_over(asked)
        untried = False
        for configuration in self._drawn(len(tried)):
            if configuration not in tried:
                untried = True
                if not passes_over(configuration):
                    return self._sampler.ask_for(configuration), configuration
        self.exhausted = not untried and self._space.size <= MOST_DRAWN
        self.nothing_fits = not self.exhausted
        return None

    def _joined(self, best: Configuration, ratios: Mapping[Configuration, float]) -> list[Configuration]:
        """The fastest with all changes that made others faster than what was fastest before them; with some of them."""
        gains: list[tuple[float, Changes]] = []
        for configuration, ratio in ratios.items():
            before = self._begun.get(configuration)
            if before is None or before not in ratios or ratio - ratios[before] <= GAIN:
                continue
            changed = configuration.differences(before)
            changes = {each: configuration[each] for each in changed if configuration[each] != best[each]}
            if changes:
                gains.append((ratio - ratios[before], changes))
        gains.sort(key=itemgetter(0))
        everything = {name: value for _, changes in gains for name, value in changes.items()}
        some = [changes for _, changes in gains[: -MOST_JOINED - 1 : -1]]
        return [self._space.canonical(best.replace(**changes)) for changes in (everything, *some)]

    def _drawn(self, seed: int) -> Iterator[Configuration]:
        """Configurations by chance: the whole space where it is small."""
        draw, choices = random.Random(seed), self._space.choices
        if self._space.size <= MOST_DRAWN:
            every = list(itertools.product(*choices.values()))
            draw.shuffle(every)
        else:
            every = [tuple(draw.choice(each) for each in choices.values()) for _ in range(MOST_DRAWN)]
        for values in every:
            yield self._space.configuration(dict(zip(choices, values, strict=True)))


def neighbours(
    best: Configuration,
    tried: Collection[Configuration],
    space: ResolvedSpace,
    *,
    limit: Limit | None,
    short_steps: bool = True,
) -> list[Configuration]:
    """The untried neighbours of the fastest configuration, the most promising first."""
    # A change that was tried anywhere before comes after those that were not.
    now = Situation(at_first=best == space.baseline, limit=limit, short_steps=short_steps)
    known = {item for each in (space.baseline, *tried) for item in each.items()}
    found: dict[Configuration, bool] = {}  # and whether each of its changes was tried before
    for changes in _changes(best, space, now):
        configuration = space.canonical(best.replace(**changes))
        if configuration not in tried:
            found.setdefault(configuration, changes.items() <= known)
    return sorted(found, key=found.__getitem__)


def _changes(best: Configuration, space: ResolvedSpace, now: Situation) -> Iterator[Changes]:
    """What the knobs' probes change, in their order; then a few values of each knob without probes."""
    placed = [
        (place, {knob.name: probe.to, **probe.together})
        for knob in KNOBS.values()
        for probe in knob.probes
        if (place := probe.place(now)) is not None
    ]
    for _, picks in sorted(placed, key=itemgetter(0)):
        wanted = {name: pick(space.choices[name], best[name]) for name, pick in picks.items() if name in space.choices}
        changes = {name: value for name, value in wanted.items() if value is not None}
        if changes:
            yield changes
    for name, choices in space.choices.items():
        if not KNOBS[name].probes:
            others = [value for value in choices if value != best[name]]
            yield from ({name: value} for value in others[:MOST_OF_OTHERS])
