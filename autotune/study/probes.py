"""Single changes to the baseline that are known to help often, and what to combine of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from autotune.space.configuration import Configuration
from autotune.space.knobs import KnobValue
from autotune.space.search_space import ResolvedSpace

_WISHES: tuple[dict[str, KnobValue | float], ...] = (
    {"batch_size": 4.0},
    {"steps_per_execution": 8},
    {"data_autotune": False},
    {"jit_compile": True},
    {"precision": "mixed_bfloat16"},
    {"num_parallel_calls": 16, "data_threads": 16},
    {"prefetch": 2},
    {"batch_size": 2.0},
    {"precision": "mixed_float16"},
    {"jit_compile": False},
    {"num_parallel_calls": "autotune"},
    {"prefetch": "autotune"},
    {"steps_per_execution": 32},
    {"intra_op_threads": 1},
    {"inter_op_threads": 1},
    {"onednn": False},
    {"tensor_float_32": False},
    {"deterministic": False},
)
"""What to try, the most promising first. A float is a multiple of the baseline's value."""


def probes(space: ResolvedSpace) -> list[Configuration]:
    """The single changes that `space` allows, the most promising first, none twice.

    A wish for a number becomes the nearest choice; `num_parallel_calls` and `data_threads` change together,
    because each without the other does little.
    """
    seen = {space.baseline}
    found = []
    for wish in _WISHES:
        changes = dict(_granted(wish, space))
        configuration = space.baseline.replace(**changes)
        if configuration not in seen:
            seen.add(configuration)
            found.append(configuration)
    return found


def _granted(wish: Mapping[str, KnobValue | float], space: ResolvedSpace) -> Iterator[tuple[str, KnobValue]]:
    for name, wanted in wish.items():
        choices = space.choices.get(name, ())
        if isinstance(wanted, (bool, str)):
            if any(type(each) is type(wanted) and each == wanted for each in choices):
                yield name, wanted
            continue
        target = wanted * int(space.baseline[name]) if isinstance(wanted, float) else wanted
        numbers = [each for each in choices if type(each) is int and each > 0]
        if numbers:
            yield name, min(numbers, key=lambda each: abs(math.log(each / target)))


def doublings(space: ResolvedSpace) -> list[int]:
    """The batch sizes above the baseline's, ascending: to be tried until one runs out of memory."""
    if not space.grows_batch:
        return []
    sizes = [each for each in space.choices["batch_size"] if type(each) is int]
    return [size for size in sizes if size > space.baseline.batch_size]


def combination(space: ResolvedSpace, leads: Mapping[Configuration, float]) -> Configuration:
    """All the single changes that helped, in one configuration: where the sampler should look first.

    Args:
        space: Where it must lie.
        leads: For each configuration measured, its log-ratio less one standard error: what helped surely
            enough is above 0. Of several helpful values of one knob the one with the largest lead is taken.
    """
    changes: dict[str, KnobValue] = {}
    for configuration, lead in sorted(leads.items(), key=lambda item: item[1]):
        single = configuration.differences(space.baseline)
        if lead > 0 and (len(single) == 1 or set(single) == {"num_parallel_calls", "data_threads"}):
            changes.update(single)
    return space.baseline.replace(**changes)


def pushed(space: ResolvedSpace, configuration: Configuration) -> Configuration:
    """The numbers that were raised above the baseline's, each raised to the next choice.

    What helped often helps more. The same configuration comes back when nothing can be raised.
    """
    changes: dict[str, KnobValue] = {}
    for name in ("batch_size", "steps_per_execution"):
        value, before = configuration[name], space.baseline[name]
        numbers = [each for each in space.choices.get(name, ()) if type(each) is int]
        higher = [each for each in numbers if type(value) is int and each > value]
        if type(value) is int and type(before) is int and value > before and higher:
            changes[name] = min(higher)
    return configuration.replace(**changes)
