"""Which configuration is tried next: neighbours of the fastest so far, the usually best first; then the sampler's.

Each is enqueued in the Optuna study, or asked of its sampler, and told to it. The order follows what usually pays: a
larger batch together with more steps per execution, then what the input pipeline waits for, then XLA and precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

import optuna

from autotune.space.configuration import Configuration
from autotune.space.knobs import KnobValue
from autotune.space.search_space import ResolvedSpace
from autotune.tuning.sampler import Sampler

REPEATS_THAT_END_IT = 20
"""Samples in a row that were known already: the space is explored."""
STEPS_PER_EXECUTION = 8
"""What a larger batch is first tried with."""

MOST_OF_OTHERS = 2
"""Values of a knob that nothing here names, before the sampler has its turn."""
_NAMED = (
    *("batch_size", "steps_per_execution", "persistent_iterator", "num_parallel_calls", "data_threads"),
    *("prefetch", "jit_compile", "precision", "data_autotune"),
)

SHORT_STEP_SECONDS = 0.01
"""Of a step that more steps per execution may make clearly faster: calling TensorFlow takes a millisecond or so."""

Changes = dict[str, KnobValue]


class Proposals:
    """Proposes configurations that were not tried.

    Args:
        space: Where they lie.
        sampler: The study.

    Attributes:
        exhausted: Whether nothing new is left.
        nothing_fits: Whether what is left cannot be run in the time there is.
    """

    def __init__(self, space: ResolvedSpace, sampler: Sampler) -> None:
        self._space = space
        self._sampler = sampler
        self.exhausted = self.nothing_fits = False

    def next(
        self,
        tried: Collection[Configuration],
        best: Configuration,
        *,
        waits: bool,
        step_seconds: float = 0.0,
        passes_over: Callable[[Configuration], bool] = lambda configuration: False,
    ) -> tuple[optuna.Trial, Configuration] | None:
        """The next configuration and the Optuna trial to be told about it; None where nothing new is left.

        Args:
            tried: What was tried, in whichever outcome; the baseline is among them.
            best: The fastest so far.
            waits: Whether the fastest so far waits for its input.
            step_seconds: What a step of the baseline takes.
            passes_over: Whether a configuration cannot be run in the time there is.
        """
        if len(tried) >= self._space.size:
            self.exhausted = True
            return None
        short = step_seconds <= SHORT_STEP_SECONDS
        for configuration in neighbours(best, tried, self._space, waits=waits, short_steps=short):
            if not passes_over(configuration):
                return self._sampler.ask_for(configuration), configuration
        passed_over = False
        for _ in range(REPEATS_THAT_END_IT):
            asked, configuration = self._sampler.ask()
            if configuration not in tried:
                if not passes_over(configuration):
                    return asked, configuration
                passed_over = True
            self._sampler.pass_over(asked)
        self.nothing_fits = passed_over
        self.exhausted = not passed_over
        return None


def neighbours(
    best: Configuration,
    tried: Collection[Configuration],
    space: ResolvedSpace,
    *,
    waits: bool,
    short_steps: bool = True,
) -> Iterator[Configuration]:
    """The untried neighbours of the fastest configuration, the most promising first.

    A change that was tried anywhere before comes after those that were not.

    Args:
        best: The fastest so far; the baseline at first.
        tried: What was tried.
        space: Where they must lie.
        waits: Whether it waits for its input.
        short_steps: Whether steps are so short that more of them per execution are likely to help.
    """
    values = {(name, each[name]) for each in tried for name in each if each[name] != space.baseline[name]}
    fresh: list[Configuration] = []
    again: list[Configuration] = []
    for changes in _changes(best, space, waits=waits, short_steps=short_steps):
        configuration = best.replace(**changes)
        if configuration in tried or configuration in fresh or configuration in again:
            continue
        known = all(
            (name, value) in values or value == space.baseline[name] for name, value in changes.items()
        )
        (again if known else fresh).append(configuration)
    yield from fresh
    yield from again


def _changes(
    best: Configuration, space: ResolvedSpace, *, waits: bool, short_steps: bool
) -> Iterator[Changes]:
    at_first = best == space.baseline
    batch, steps = int(best["batch_size"]), int(best["steps_per_execution"])
    if at_first:
        more = _nearest(space, "steps_per_execution", STEPS_PER_EXECUTION) if short_steps else {}
        for factor in (4, 2):
            yield _nearest(space, "batch_size", factor * batch) | more
    yield _next(space, "batch_size", batch, up=True)
    if short_steps:
        yield _nearest(space, "steps_per_execution", 4 * steps)
    yield from _set(space, "persistent_iterator", True)
    pipeline = [*_input_changes(space)]
    if waits:
        yield from pipeline
    yield from _toggled(space, best, "jit_compile")
    for precision in ("mixed_bfloat16", "mixed_float16", "float32"):
        yield from _set(space, "precision", precision)
    yield from _toggled(space, best, "data_autotune")
    yield _next(space, "steps_per_execution", steps, up=True)
    yield _next(space, "steps_per_execution", steps, up=False)
    yield _next(space, "batch_size", batch, up=False)
    if not waits:
        yield from pipeline
    for name in space.choices:
        if name not in _NAMED:
            others = [value for value in space.choices[name] if value != best[name]]
            yield from ({name: value} for value in others[:MOST_OF_OTHERS])


def _input_changes(space: ResolvedSpace) -> Iterator[Changes]:
    """What helps a training that waits for its input; parallel calls need threads to run on."""
    parallel = _nearest(space, "num_parallel_calls", 16) | _nearest(space, "data_threads", 16)
    yield parallel
    yield from _set(space, "prefetch", 2)
    yield from _set(space, "prefetch", "autotune")
    yield from _set(space, "num_parallel_calls", "autotune")


def _toggled(space: ResolvedSpace, best: Configuration, name: str) -> Iterator[Changes]:
    if name in space.choices:
        yield from _set(space, name, not best[name])


def _set(space: ResolvedSpace, name: str, value: KnobValue) -> Iterator[Changes]:
    if any(type(each) is type(value) and each == value for each in space.choices.get(name, ())):
        yield {name: value}


def _numbers(space: ResolvedSpace, name: str) -> list[int]:
    return [each for each in space.choices.get(name, ()) if type(each) is int and each > 0]


def _nearest(space: ResolvedSpace, name: str, target: int) -> Changes:
    """The knob at the choice nearest to a number; nothing where it is not varied."""
    numbers = _numbers(space, name)
    return {name: min(numbers, key=lambda each: abs(math.log(each / target)))} if numbers else {}


def _next(space: ResolvedSpace, name: str, value: int, *, up: bool) -> Changes:
    """The knob at the next larger, or smaller, choice; nothing where there is none."""
    numbers = [each for each in _numbers(space, name) if (each > value if up else each < value)]
    return {name: min(numbers) if up else max(numbers)} if numbers else {}
