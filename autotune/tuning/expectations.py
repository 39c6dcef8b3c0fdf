"""The table of expectations: how much a change of a knob usually gains, by what limits a training and on what.

`benchmarks/expectations.py` makes `expectations.json`: rows of recorded runs, and of literature where few runs cover a
change. Each row names its source.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from autotune.data.models import Amount, Count, Frozen, KnobValue, Many, Positive
from autotune.space.changes import Situation
from autotune.space.configuration import format_value
from autotune.space.knobs import KNOBS

TABLE = Path(__file__).with_name("expectations.json")
NO_UNIT = "none"  # the value has fast units on some machines, and this one has none of them
HOST_LIMITS = ("input", "launch")
DECAY = 0.7  # each further doubling of a number gains so much of what the one before has gained


class Expectation(Frozen):
    """A row: the gain of a change, among trainings that are limited in one way, on one kind of hardware."""

    knob: str
    change: str  # `up` or `down` for a doubling or halving; `some` for a number in place of none; else the new value
    device: Literal["cpu", "gpu"]
    limit: Literal["input", "launch", "compute", ""] = ""  # see `Situation.limit`; empty: any
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

    def find(self, knob: str, change: str, now: Situation, unit: str) -> Expectation:
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
