"""Probes: changes of knobs that usually pay, and are tried early. Each knob's own are in its entry of the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Pick = Callable[[Sequence[Any], Any], Any]
"""Picks one of a knob's choices, given its value in the fastest configuration; None where none suits."""


def exactly(value: bool | int | str) -> Pick:
    """Pick this value."""
    return lambda choices, now: next((found for found in choices if (type(found), found) == (type(value), value)), None)


def near(number: float) -> Pick:
    """Pick the choice nearest to a number, on a logarithmic scale."""
    return lambda choices, now: min(_positive(choices), key=lambda found: abs(math.log(found / number)), default=None)


def times(factor: float) -> Pick:
    """Pick the choice nearest to so many times the value."""
    return lambda choices, now: near(factor * now)(choices, now)


def larger(choices: Sequence[Any], now: Any) -> Any:
    """Pick the next larger choice."""
    return min((number for number in _positive(choices) if number > now), default=None)


def smaller(choices: Sequence[Any], now: Any) -> Any:
    """Pick the next smaller choice."""
    return max((number for number in _positive(choices) if number < now), default=None)


def _positive(choices: Sequence[Any]) -> list[int]:
    return [value for value in choices if type(value) is int and value > 0]


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The state of the search that decides which probes come first."""

    at_first: bool  # the baseline is still the fastest
    waits_for_input: bool  # the fastest configuration does
    short_steps: bool  # more steps per execution are likely to help


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A change that is tried early."""

    place: Callable[[Situation], int | None]  # the lowest of all knobs' probes is first; None: not tried now
    to: Pick
    together: Mapping[str, Pick] = field(default_factory=dict)  # other knobs that change too, where they vary


def probe(place: int, to: Pick, **together: Pick) -> Probe:
    """Return a probe that has the same place in every situation."""
    return Probe(place=lambda now: place, to=to, together=together)


def for_batch(factor: int) -> tuple[Probe, ...]:
    """Multiply the baseline's batch size; where steps are short, raise the steps per execution too."""
    to, steps = times(factor), {"steps_per_execution": near(8)}
    return (
        Probe(place=lambda now: 0 if now.at_first and now.short_steps else None, to=to, together=steps),
        Probe(place=lambda now: 0 if now.at_first and not now.short_steps else None, to=to),
    )


def for_input(place: int, to: Pick, **together: Pick) -> Probe:
    """Feed a training faster: early where it waits for its input, late where it does not."""
    return Probe(place=lambda now: place if now.waits_for_input else place + 50, to=to, together=together)
