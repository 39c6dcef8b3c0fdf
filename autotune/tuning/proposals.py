"""Which configuration is tried next: neighbours of the fastest so far, the usually best first; then the sampler's.

Each is enqueued in the Optuna study, or asked of its sampler, and told to it. The order of the neighbours follows from
the knobs' probes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator
from operator import itemgetter

import optuna

from autotune.space.combining import coherent
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS, KnobValue
from autotune.space.probes import Situation
from autotune.space.search_space import ResolvedSpace
from autotune.tuning.sampler import Sampler

MOST_REPEATS = 20  # samples in a row that are known or passed over: then chance proposes
MOST_DRAWN = 4096  # configurations that chance draws; a space of no more is gone through
MOST_OF_OTHERS = 2  # values of a knob without probes, before the sampler has its turn
SHORT_STEP_SECONDS = 0.01  # a call into TensorFlow takes about 1 ms, which several steps may share

Changes = dict[str, KnobValue]


class Proposals:
    """Proposes configurations that were not tried."""

    def __init__(self, space: ResolvedSpace, sampler: Sampler) -> None:
        self._space = space
        self._sampler = sampler
        self.exhausted = self.nothing_fits = False  # whether nothing new is left

    def next(
        self,
        tried: Collection[Configuration],
        best: Configuration,
        *,
        waits: bool,
        step_seconds: float = 0.0,
        passes_over: Callable[[Configuration], bool] = lambda configuration: False,
    ) -> tuple[optuna.Trial, Configuration] | None:
        """The next configuration and the Optuna trial to be told about it; None where nothing new is left."""
        if len(tried) >= self._space.size:
            self.exhausted = True
            return None
        short = step_seconds <= SHORT_STEP_SECONDS
        for configuration in neighbours(best, tried, self._space, waits=waits, short_steps=short):
            if not passes_over(configuration):
                return self._sampler.ask_for(configuration), configuration
        for _ in range(MOST_REPEATS):
            asked, configuration = self._sampler.ask()
            if configuration not in tried and not passes_over(configuration):
                return asked, configuration
            self._sampler.pass_over(asked)
        others = [each for each in self._drawn(len(tried)) if each not in tried]
        for configuration in others:
            if not passes_over(configuration):
                return self._sampler.ask_for(configuration), configuration
        self.exhausted = not others and self._space.size <= MOST_DRAWN
        self.nothing_fits = not self.exhausted
        return None

    def _drawn(self, seed: int) -> list[Configuration]:
        """Configurations by chance: the whole space where it is small."""
        draw, choices = random.Random(seed), self._space.choices
        if self._space.size <= MOST_DRAWN:
            varied = [dict(zip(choices, each, strict=True)) for each in itertools.product(*choices.values())]
            draw.shuffle(varied)
        else:
            varied = [{name: draw.choice(each) for name, each in choices.items()} for _ in range(MOST_DRAWN)]
        return [self._space.configuration(each) for each in varied]


def neighbours(
    best: Configuration,
    tried: Collection[Configuration],
    space: ResolvedSpace,
    *,
    waits: bool,
    short_steps: bool = True,
) -> list[Configuration]:
    """The untried neighbours of the fastest configuration, the most promising first."""
    # A change that was tried anywhere before comes after those that were not.
    now = Situation(at_first=best == space.baseline, waits=waits, short_steps=short_steps)
    known = {item for each in (space.baseline, *tried) for item in each.items()}
    found: dict[Configuration, bool] = {}  # and whether each of its changes was tried before
    for changes in _changes(best, space, now):
        configuration = coherent(best.replace(**changes), space.choices)
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
