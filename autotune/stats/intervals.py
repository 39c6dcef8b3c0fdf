"""Estimates with confidence intervals, from paired slices and from instances of them.

Everything is computed on logarithms of ratios, so a speed-up of 2 and one of 1/2 are equally far from none.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, FiniteFloat, model_validator

from autotune.models import Frozen

CONFIDENCE = 0.95
BORROWED_DEGREES = 8  # most that a trial borrows from the others: one that is noisier shows it
FEW_INSTANCES = 4  # fewer that agree are no evidence that instances agree
TEMPLATE_DEVIATION, TEMPLATE_DEGREES = 0.02, 14  # log deviation between forks of two templates that import the same


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
        """The same of the ratio, as it is written; None where it is unbounded, or too wide for numbers."""
        if max(abs(self.low), abs(self.high)) > 300:
            return None
        return Interval(value=math.exp(self.value), low=math.exp(self.low), high=math.exp(self.high))


class Interval(Frozen, strict=True):
    """A figure and its confidence interval, as they are written: `low <= value <= high`."""

    value: Annotated[FiniteFloat, Field(gt=0)]
    low: Annotated[FiniteFloat, Field(ge=0)]
    high: Annotated[FiniteFloat, Field(gt=0)]

    @model_validator(mode="after")
    def _holds_its_value(self) -> Self:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"the value {self.value:g} does not lie in the interval {self.low:g} to {self.high:g}")
        return self

    def shown(self, unit: str = "×", form: str = ".2f") -> str:
        """`×2.57 (2.28 to 2.90)`; bounds that are the figure itself are no interval."""
        bounds = f" ({self.low:{form}} to {self.high:{form}})" if self.low < self.high else ""
        return f"{unit}{self.value:{form}}{bounds}"

    @property
    def log(self) -> LogInterval:
        """The same of the logarithm, for computing."""
        low = math.log(self.low) if self.low else -math.inf
        return LogInterval(value=math.log(self.value), low=low, high=math.log(self.high), count=0)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How far single log-ratios lie from their trial's mean, pooled over trials."""

    deviation: float
    degrees: int


@functools.lru_cache(maxsize=512)
def t_quantile(confidence: float, degrees: float) -> float:
    """Two-sided Student-t quantile: 1.96 for 0.95 and many degrees of freedom, 4.30 for two."""
    from scipy import special  # takes 0.2 s to import; scipy.stats takes 1 s

    return float(special.stdtrit(degrees, 0.5 + confidence / 2))


def _around(mean: float, margin: float, count: int) -> LogInterval:
    return LogInterval(value=mean, low=mean - margin, high=mean + margin, count=count)


def mean_interval(
    values: Sequence[float], *, confidence: float = CONFIDENCE, others: Spread | None = None
) -> LogInterval:
    """Mean of log-ratios with its Student-t interval; infinite where nothing is known of their spread."""
    # The spread of other trials is a prior (the moderated t of Smyth, 2004).
    mean, own = statistics.fmean(values), len(values) - 1
    borrowed = min(others.degrees, BORROWED_DEGREES) if others else 0
    if own + borrowed < 1:
        return _around(mean, math.inf, len(values))
    squares = sum((each - mean) ** 2 for each in values)
    if others:
        squares += borrowed * others.deviation**2
    error = math.sqrt(squares / (own + borrowed) / len(values))
    return _around(mean, t_quantile(confidence, own + borrowed) * error, len(values))


def instance_interval(
    instances: Sequence[Sequence[float]], *, confidence: float = CONFIDENCE, apart: bool = False
) -> LogInterval:
    """Mean over instances, with an interval that allows for differences between them."""
    # The larger of two: by the spread between the instances, and by what the slices within them predict.
    means = [statistics.fmean(each) for each in instances]
    mean, count = statistics.fmean(means), len(means)
    if count < 2:
        return _around(mean, math.inf, count)
    allowed = 0.01 if count >= FEW_INSTANCES else 0.02  # between instances, even where slices show no difference
    between = statistics.variance(means) / count
    pooled = pooled_spread(instances)
    variances = [statistics.variance(each) if len(each) > 1 else pooled.deviation**2 for each in instances]
    within = sum(one / len(each) for one, each in zip(variances, instances, strict=True)) / count**2
    degrees = pooled.degrees or count - 1
    margin = t_quantile(confidence, degrees) * math.sqrt(within + allowed**2 / count)
    if between >= within or count < FEW_INSTANCES:
        margin = max(margin, t_quantile(confidence, count - 1) * math.sqrt(between))
    if apart:  # forks of two templates: what a template gives to its forks does not cancel
        luck = t_quantile(confidence, TEMPLATE_DEGREES) * TEMPLATE_DEVIATION * math.sqrt(2)
        margin = math.hypot(margin, luck)
    return _around(mean, margin, count)


def pooled_spread(groups: Sequence[Sequence[float]]) -> Spread:
    """Spread of a single log-ratio about its group's mean, pooled over groups; 0 where no group has two."""
    several = [each for each in groups if len(each) > 1]
    degrees = sum(len(each) - 1 for each in several)
    squares = sum(statistics.variance(each) * (len(each) - 1) for each in several)
    return Spread(deviation=math.sqrt(squares / degrees) if degrees else 0.0, degrees=degrees)
