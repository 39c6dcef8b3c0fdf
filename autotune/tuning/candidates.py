"""Choose the next configuration: a combination, changes of the fastest one by their worth, then Optuna's samples.

The worth of a configuration is the gain that is expected of it per expected second; see `beliefs`. Every proposal is a
trial of the run's Optuna study, which gets its result.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence

from optuna.trial import Trial

from autotune.data.models import KnobValue
from autotune.space.changes import Situation
from autotune.space.configuration import Configuration, find_conflict
from autotune.space.knobs import KNOBS, Knob
from autotune.space.space_file import ResolvedSpace
from autotune.stats.same_loss import best_batch_size
from autotune.tuning.beliefs import Beliefs, Evidence, Features
from autotune.tuning.expectations import Expectations, load_expectations
from autotune.tuning.sampler import STARTUP_TRIALS, Sampler

MOST_REPEATS = 5  # samples in a row that are known or passed over, before configurations are drawn at random
MOST_DRAWN = 4096  # configurations drawn at random; a smaller space is gone through whole
MOST_OF_OTHERS = 2  # values of a knob without changes of its own, before the sampler has its turn
CLEAR_GAIN = 0.04  # log speed-up from which on a change joins the combination
CLEARLY = 0.45  # standard deviations of it that a joining change must gain: it is faster in two of three cases
MOST_FAILURES = 0.15  # chance to fail of a change that joins
MOST_MEMORY = 0.9  # of what a trial may take, if memory grew with the batch size: more joins no combination
FAR = 4.0  # times the batch size that should reach a loss soonest: samples of larger ones come last
LEAST_IMPROVEMENT = 0.02  # log speed-up to be expected of a change; for less, the sampler proposes

Changes = dict[str, KnobValue]
NOTHING_TRIED = Evidence()


class Proposals:
    """Proposes configurations that were not tried: `first` those of earlier runs, later samples of the study."""

    def __init__(
        self,
        space: ResolvedSpace,
        sampler: Sampler,
        *,
        first: Sequence[Configuration] = (),
        table: Expectations | None = None,
    ) -> None:
        self.space = space
        self._sampler = sampler
        self.first = first
        self._table = load_expectations() if table is None else table
        self._features = Features(space)
        self.exhausted = self.nothing_fits = False  # nothing new is left, or nothing new fits into the time

    def next(
        self,
        tried: Collection[Configuration],
        best: Configuration,
        *,
        situation: Situation,
        evidence: Evidence = NOTHING_TRIED,
        passes_over: Callable[[Configuration], bool] = lambda configuration: False,
        batch_size: int | None = None,
    ) -> tuple[Trial, Configuration] | None:
        """Return the next configuration and its Optuna trial; None where nothing new is left, or fits.

        With a `batch_size` only configurations of it are proposed.
        """
        self.nothing_fits = False
        if len(tried) >= self.space.size:
            self.exhausted = True
            return None
        beliefs = Beliefs(self._features, situation, self._table, evidence)
        acting = [name for name in self.space.choices if KNOBS[name].useful(situation)]
        known = {tuple(configuration[name] for name in acting) for configuration in tried}

        refused = passes_over

        def leaves_out(configuration: Configuration) -> bool:
            return (batch_size is not None and configuration.batch_size != batch_size) or refused(configuration)

        passes_over = leaves_out

        def is_new(configuration: Configuration) -> bool:
            """Return whether it differs from what was tried by a knob that can act here."""
            return tuple(configuration[name] for name in acting) not in known

        for configuration in self.first:
            if configuration not in tried and not passes_over(configuration):
                return self._sampler.ask_for(configuration), configuration
        for configuration in self._promising(best, beliefs, situation, evidence, passes_over):
            if is_new(configuration) and not passes_over(configuration):
                return self._sampler.ask_for(configuration), configuration
        far = far_batch(evidence, self.space.baseline)

        def is_far(configuration: Configuration) -> bool:
            return configuration.batch_size > far

        return self._sample(tried, best, beliefs, is_new, is_far, passes_over, batch_size)

    def _promising(
        self,
        best: Configuration,
        beliefs: Beliefs,
        now: Situation,
        evidence: Evidence,
        passes_over: Callable[[Configuration], bool],
    ) -> Iterator[Configuration]:
        """Yield the combination that is expected to be clearly faster, then changes by their worth."""
        space = self.space
        yield combine(best, beliefs, space, now, passes_over)
        beginnings = dict.fromkeys([best, *evidence.running[-1:], space.baseline])
        changed = {
            space.canonical(found)
            for beginning in beginnings
            for found in (*neighbours(beginning, space, now), *leave_one_out(beginning, space))
        }
        fastest = max([best, *evidence.running], key=lambda known: beliefs.gain(known, best)[0])  # as is expected
        improvements = {found: beliefs.improvement(found, fastest) for found in changed}
        able = [found for found, gain in improvements.items() if gain >= LEAST_IMPROVEMENT and not find_conflict(found)]
        # Equal worth must not leave the order to a set's.
        yield from sorted(able, key=lambda found: (-improvements[found] / beliefs.seconds(found), found.key))

    def _sample(
        self,
        tried: Collection[Configuration],
        best: Configuration,
        beliefs: Beliefs,
        is_new: Callable[[Configuration], bool],
        is_far: Callable[[Configuration], bool],
        passes_over: Callable[[Configuration], bool],
        batch_size: int | None,
    ) -> tuple[Trial, Configuration] | None:
        """Propose a sample by the expectations, later by Optuna's model; else one drawn at random."""
        draw = random.Random(len(tried))
        for _ in range(MOST_REPEATS):
            if len(tried) < STARTUP_TRIALS:
                wanted = self._with_batch(beliefs.draw(draw, best), batch_size)
                asked = self._sampler.ask_for(wanted)
            else:
                asked, configuration = self._sampler.ask()
                wanted = self._with_batch(configuration, batch_size)
                if wanted != configuration:
                    self._sampler.pass_over(asked)
                    asked = self._sampler.ask_for(wanted)
            useless = is_far(wanted) or beliefs.is_slower(wanted, best)
            if is_new(wanted) and not useless and not passes_over(wanted):
                return asked, wanted
            self._sampler.pass_over(asked)
        untried = False
        for must_act in (True, False):  # a change of a knob that should not act here comes last of all
            for configuration in sorted(self._drawn(len(tried)), key=is_far):
                if configuration in tried or (must_act and not is_new(configuration)):
                    continue
                untried = True
                if not passes_over(configuration):
                    return self._sampler.ask_for(configuration), configuration
        self.exhausted = not untried and self.space.size <= MOST_DRAWN
        self.nothing_fits = not self.exhausted
        return None

    def _with_batch(self, configuration: Configuration, batch_size: int | None) -> Configuration:
        """Return a configuration with this batch size; as it is for None."""
        if batch_size is None:
            return configuration
        return self.space.canonical(configuration.replace(batch_size=batch_size))

    def _drawn(self, seed: int) -> Iterator[Configuration]:
        """Draw configurations at random: the whole space where it is small."""
        draw, choices = random.Random(seed), self.space.choices
        if self.space.size <= MOST_DRAWN:
            every = list(itertools.product(*choices.values()))
            draw.shuffle(every)
        else:
            every = [tuple(draw.choice(values) for values in choices.values()) for _ in range(MOST_DRAWN)]
        for values in every:
            yield self.space.configuration(dict(zip(choices, values, strict=True)))


def far_batch(evidence: Evidence, baseline: Configuration) -> float:
    """Return the batch size above which samples come last: far above the one that should reach a loss soonest.

    A step takes a time that is linear in the batch size. It is fitted to configurations that differ in nothing else;
    before there are two, nothing is far.
    """
    steps: dict[Configuration, dict[int, float]] = {}  # seconds by batch size, in those of an example of the baseline's
    for known, ratio in evidence.ratios.items():
        others = known.replace(batch_size=baseline.batch_size)
        steps.setdefault(others, {})[known.batch_size] = known.batch_size * math.exp(-ratio)
    most = max(steps.values(), key=len, default={})
    if not evidence.over_critical or len(most) < 2 or baseline.update_size != baseline.batch_size:
        return math.inf
    critical = baseline.batch_size / evidence.over_critical
    return FAR * max(baseline.batch_size, best_batch_size(critical, most))


def combine(
    best: Configuration,
    beliefs: Beliefs,
    space: ResolvedSpace,
    now: Situation,
    passes_over: Callable[[Configuration], bool] = lambda configuration: False,
) -> Configuration:
    """Add to the fastest configuration all changes that are clearly expected to gain; the same where none is.

    Knobs that it has changed already are left alone: their further steps are tried apart. So is a change with which the
    combination would be passed over, such as a batch whose steps the time does not hold.
    """
    changes: dict[Configuration, tuple[float, Changes]] = {}
    for wanted in _changes(best, space, now):
        if any(best[name] != space.baseline[name] for name in wanted):
            continue
        changed = space.canonical(best.replace(**wanted))
        mean, deviation = beliefs.gain(changed, best)
        is_clear = (
            mean >= max(CLEAR_GAIN, CLEARLY * deviation) and _added_failure(changed, best, beliefs) <= MOST_FAILURES
        )
        if is_clear and _fits_in_memory(changed, space.baseline, now):
            changes[changed] = mean, wanted
    combined = best
    for _, wanted in sorted(changes.values(), key=lambda found: -found[0]):
        if any(combined[name] != best[name] for name in wanted):
            continue  # a larger gain has changed this knob
        joined = space.canonical(combined.replace(**wanted))
        if find_conflict(joined) or passes_over(joined):
            continue
        if all(joined[name] == combined[name] for name in combined if name not in wanted):
            combined = joined
    return combined


def _added_failure(changed: Configuration, best: Configuration, beliefs: Beliefs) -> float:
    """Return the chance that a trial fails because of what is changed."""
    return 1 - (1 - beliefs.failure(changed)) / max(1 - beliefs.failure(best), 1e-6)


def _fits_in_memory(changed: Configuration, baseline: Configuration, now: Situation) -> bool:
    """Return whether a larger batch should fit, if all memory grew with it."""
    growth = changed.batch_size / baseline.batch_size
    return now.memory_share is None or growth <= 1 or now.memory_share * growth <= MOST_MEMORY


def neighbours(best: Configuration, space: ResolvedSpace, now: Situation) -> list[Configuration]:
    """Return the configurations that one change leads to, of the knobs that can act."""
    found = (space.canonical(best.replace(**changes)) for changes in _changes(best, space, now))
    return [changed for changed in dict.fromkeys(found) if changed != best]


def leave_one_out(best: Configuration, space: ResolvedSpace) -> list[Configuration]:
    """Return the configuration without one of its changes of the baseline, for each of them."""
    return [best.replace(**{name: space.baseline[name]}) for name in best.differences(space.baseline)]


def _changes(best: Configuration, space: ResolvedSpace, now: Situation) -> Iterator[Changes]:
    """Yield the changes of the knobs that vary and can act, or two other values of a knob that names none."""
    for name, choices in space.choices.items():
        knob = KNOBS[name]
        if not knob.useful(now):
            continue
        if not knob.changes:
            yield from ({name: value} for value in [value for value in choices if value != best[name]][:MOST_OF_OTHERS])
        yield from _picked(knob, best, space)


def _picked(knob: Knob, best: Configuration, space: ResolvedSpace) -> Iterator[Changes]:
    """Yield what the changes of one knob pick among the choices of a space."""
    for change in knob.changes:
        if (value := change.to(space.choices[knob.name], best[knob.name])) is None:
            continue
        picks = {name: pick for name, pick in change.together.items() if name in space.choices}
        beside = {name: pick(space.choices[name], best[name]) for name, pick in picks.items()}
        yield {knob.name: value, **{name: other for name, other in beside.items() if other is not None}}
