"""Changes of knobs that are worth a trial, and the context that decides which of them can act.

The entry of each knob names its changes. How much they gain is in the table of expectations, `tuning.beliefs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Pick = Callable[[Sequence[Any], Any], Any]
"""Picks one of a knob's choices, given its present value; None where none suits."""


def exactly(value: bool | int | str) -> Pick:
    """Pick this value."""
    return lambda choices, now: next((found for found in choices if (type(found), found) == (type(value), value)), None)


def near(number: float) -> Pick:
    """Pick the choice nearest to a number, on a logarithmic scale."""
    return lambda choices, now: min(_positive(choices), key=lambda found: abs(math.log(found / number)), default=None)


def times(factor: float) -> Pick:
    """Pick the choice nearest to a multiple of the value."""
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
class Change:
    """A change of a knob that is worth a trial where the knob can act."""

    to: Pick
    together: Mapping[str, Pick] = field(default_factory=dict)  # other knobs that change too, where they vary


def change(to: Pick, **together: Pick) -> Change:
    """Return a change to what `to` picks, together with those of other knobs."""
    return Change(to=to, together=together)


@dataclass(frozen=True, kw_only=True)
class Context:
    """The facts of the machine and of the fastest configuration that decide which changes are worth a trial."""

    on_gpu: bool = False
    units: frozenset[str] = frozenset()  # that compute in low precision; see `machine.units`
    waits_for_input: bool = False  # the fastest configuration does
    may_wait: bool = False  # whether it does is not known yet, and its steps are short
    most_calls: float = math.inf  # parallel calls that can make the input faster; 1 where it takes all cores
    most_threads: float = math.inf  # of TensorFlow's pools that differ from its own choice, and have cores
    short_steps: bool = True  # a call into TensorFlow takes a tenth of a step or more
    launch_bound: bool = False  # calls take so much that they limit the training
    faults_often: bool = False  # the kernel's page faults take a part of the fastest configuration's steps
    short_epochs: bool = True  # what lies between epochs takes much of them
    memory_share: float | None = None  # that the baseline takes of the memory it may take; None: unknown
    start_seconds: float = 1.0  # of a trial, up to its first step
    measured_seconds: float = 1.0  # of a trial after that
    import_seconds: float = 0.0  # of a template for other import-time variables

    @property
    def limit(self) -> str:
        """The part of a training that limits it: `input`, `launch` or `compute`."""
        if self.waits_for_input:
            return "input"
        return "launch" if self.launch_bound else "compute"
