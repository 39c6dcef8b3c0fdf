"""Figures that records hold: intervals, checks, bottlenecks and profiles. `stats` computes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from autotune.data.models import Amount, Frozen, Many

TOO_UNCERTAIN = 100.0  # ratio of an interval's bounds above which they are not shown


@dataclass(frozen=True, kw_only=True)
class LogInterval:
    """An estimate of a logarithm with its interval; `low` and `high` may be infinite."""

    value: float
    low: float
    high: float
    count: int  # how many independent values it rests on

    @property
    def half_width(self) -> float:
        """Half the distance between the bounds: 0.02 is about two percent."""
        return (self.high - self.low) / 2

    @property
    def ratio(self) -> Interval | None:
        """The interval of the ratio; None if it is unbounded, or too wide for numbers."""
        if max(abs(self.low), abs(self.high)) > 300:
            return None
        return Interval(value=math.exp(self.value), low=math.exp(self.low), high=math.exp(self.high))


class Interval(Frozen, strict=True):
    """A figure and its confidence interval, as files hold it: `low <= value <= high`."""

    value: Annotated[FiniteFloat, Field(gt=0)]
    low: Annotated[FiniteFloat, Field(ge=0)]
    high: Annotated[FiniteFloat, Field(gt=0)]

    @model_validator(mode="after")
    def _holds_its_value(self) -> Self:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"the value {self.value:g} does not lie in the interval {self.low:g} to {self.high:g}")
        return self

    def shown(self, unit: str = "×", form: str = ".2f") -> str:
        """Return `×2.57 (2.28 to 2.90)`; bounds that are the figure itself are no interval."""
        bounds = f" ({self.low:{form}} to {self.high:{form}})" if self.low < self.high else ""
        if self.high > TOO_UNCERTAIN * self.low:
            bounds = " (too uncertain to tell)"
        return f"{unit}{self.value:{form}}{bounds}"

    @property
    def log(self) -> LogInterval:
        """The interval of the logarithm, for computing."""
        low = math.log(self.low) if self.low else -math.inf
        return LogInterval(value=math.log(self.value), low=low, high=math.log(self.high), count=0)


class Check(Frozen, strict=True):
    """A rule that a configuration passed or failed, with its figure and limit."""

    name: str
    passed: bool
    value: FiniteFloat | None = None
    limit: FiniteFloat | None = None  # what the figure was held against
    detail: str

    @property
    def conclusive(self) -> bool:
        """True if enough was measured to pass or fail."""
        return self.value is not None or not self.passed


Name = Literal[
    "input", "launch", "compute", "memory_bandwidth", "compute_or_memory", "communication", "balanced", "unknown"
]


class Bottleneck(Frozen):
    """The limit of a trial's speed, in XProf's words."""

    name: Name
    share: Amount | None = None  # of a step: the figure that it rests on
    why: str  # one sentence with the figure; of `unknown`, the missing figure


class Ceilings(Frozen):
    """The highest possible throughputs, in samples per second; None where not measured."""

    by_input: Amount | None = None  # the input pipeline alone
    by_compute: Amount | None = None  # the step on a batch that is kept


class Operation(Frozen):
    """An operation of a profiled trial."""

    name: str
    kind: str  # as TensorFlow calls it: `MatMul`
    on: str  # `host` or `device`
    count: int
    self_seconds: Amount  # in all profiled steps
    share: Amount  # of all operations' self time


class Profile(Frozen):
    """The figures of a full profile of a trial."""

    steps: int = 0  # that were profiled
    step_seconds: Amount | None = None  # of a profiled step, which is slower than others
    breakdown: dict[str, Amount] = Field({})  # of a step, in seconds: input, compute, launch, communication, other
    operations: Many[Operation] = ()  # those with most self time, ten at most
    operation_seconds: Amount | None = None  # self time of a step's operations without the input's; on a GPU, kernels'
    usual_operation_seconds: Amount | None = None  # the same of one operation, on average
    matrix_share: Amount | None = None  # of that time: matrix products, convolutions and the like
    kernels: Many[Operation] = ()  # of a GPU, those with most time, ten at most
    tensor_core_share: Amount | None = None  # of all kernels' time, at least: new kernels' names say nothing
    memory_bound_share: Amount | None = None  # of the operations' time, by XProf's roofline model of the GPU
    reason: str = ""  # why there is no profile


Cause = Literal["others", "others_on_gpu", "gpu_clocks"]
