"""Probes: changes of knobs that are tried early, because they usually pay. Each knob has its own in the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Pick = Callable[[Sequence[Any], Any], Any]
"""Picks one of a knob's choices, given its value in the fastest configuration; None where none suits."""


def exactly(value: bool | int | str) -> Pick:
    """This value."""
    return lambda choices, now: next((each for each in choices if (type(each), each) == (type(value), value)), None)


def near(number: float) -> Pick:
    """The choice nearest to a number, on a logarithmic scale."""
    return lambda choices, now: min(_numbers(choices), key=lambda each: abs(math.log(each / number)), default=None)


def times(factor: float) -> Pick:
    """The choice nearest to so many times the value."""
    return lambda choices, now: near(factor * now)(choices, now)


def larger(choices: Sequence[Any], now: Any) -> Any:
    """The next larger choice."""
    return min((each for each in _numbers(choices) if each > now), default=None)


def smaller(choices: Sequence[Any], now: Any) -> Any:
    """The next smaller choice."""
    return max((each for each in _numbers(choices) if each < now), default=None)


def _numbers(choices: Sequence[Any]) -> list[int]:
    return [each for each in choices if type(each) is int and each > 0]


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What decides which probes come first."""

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
    """A probe with the same place in every situation."""
    return Probe(place=lambda now: place, to=to, together=together)


def batch(factor: int) -> tuple[Probe, ...]:
    """The baseline's batch size times a factor; with more steps per execution where steps are short."""
    to, steps = times(factor), {"steps_per_execution": near(8)}
    return (
        Probe(place=lambda now: 0 if now.at_first and now.short_steps else None, to=to, together=steps),
        Probe(place=lambda now: 0 if now.at_first and not now.short_steps else None, to=to),
    )


def for_input(place: int, to: Pick, **together: Pick) -> Probe:
    """What helps a training that waits for its input: early where it does, late where it does not."""
    return Probe(place=lambda now: place if now.waits_for_input else place + 50, to=to, together=together)
