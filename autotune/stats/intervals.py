"""Estimates and confidence intervals, from paired slices and from instances of them.

Everything is computed on logarithms of ratios: a speed-up of 2 and one of 1/2 are equally far from none.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

CONFIDENCE = 0.95
INSTANCE_DEVIATION = 0.01
"""Log deviation between instances that is allowed for even where the slices show none."""
DEVIATION_OF_FEW = 0.02
"""The same where there are too few instances for their agreement to be evidence."""
TEMPLATE_DEVIATION = 0.02
"""Log deviation that is allowed for between forks of two templates that import the same, which they would keep for as
long as they live. `benchmarks/templates.py` found 0 to 0.015, an earlier look at the shortest epochs 0.02 to 0.03."""
TEMPLATE_DEGREES = 14
"""Degrees of freedom of that benchmark."""
BORROWED_DEGREES = 8
"""At most so many values' worth is taken of other trials' spread: a trial that is noisier than the others shows it."""
FEW_INSTANCES = 4
"""Below this many, agreement between instances is no evidence that they agree."""


@dataclass(frozen=True, kw_only=True)
class LogInterval:
    """An estimate of a logarithm with its interval; `low` and `high` may be infinite.

    Args:
        value: The estimate.
        low: Lower bound.
        high: Upper bound.
        count: How many independent values it rests on.
    """

    value: float
    low: float
    high: float
    count: int

    @property
    def half_width(self) -> float:
        """Half the distance between the bounds: 0.02 is about two percent."""
        return (self.high - self.low) / 2

    @property
    def inverse(self) -> LogInterval:
        """The same of the ratio the other way round."""
        return LogInterval(value=-self.value, low=-self.high, high=-self.low, count=self.count)


def log_interval(value: float, low: float, high: float) -> LogInterval:
    """A ratio and its bounds, which are above 0 or unbounded below, as a logarithm's."""
    return LogInterval(
        value=math.log(value), low=math.log(low) if low > 0 else -math.inf, high=math.log(high), count=0
    )


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How far single log-ratios lie from their trial's mean, pooled over trials.

    Args:
        deviation: Standard deviation of a single log-ratio.
        degrees: Degrees of freedom that it rests on.
    """

    deviation: float
    degrees: int


@functools.lru_cache(maxsize=512)
def t_quantile(confidence: float, degrees: float) -> float:
    """Two-sided Student-t quantile: 1.96 for 0.95 and many degrees of freedom, 4.30 for two."""
    from scipy import special  # costs 0.2 s to import: only where something is decided

    return float(special.stdtrit(degrees, 0.5 + confidence / 2))


def mean_interval(
    values: Sequence[float], *, confidence: float = CONFIDENCE, others: Spread | None = None
) -> LogInterval:
    """Mean of log-ratios with its Student-t interval (infinite where nothing is known of their spread).

    Args:
        values: One log-ratio per pair of neighbouring slices.
        confidence: Two-sided coverage.
        others: The spread of other trials, which counts as up to `BORROWED_DEGREES` values of this one's: two values
            say next to nothing about their own spread (the moderated t of Smyth, 2004).
    """
    mean, own = statistics.fmean(values), len(values) - 1
    borrowed = min(others.degrees, BORROWED_DEGREES) if others else 0
    if own + borrowed < 1:
        return LogInterval(value=mean, low=-math.inf, high=math.inf, count=len(values))
    squares = sum((each - mean) ** 2 for each in values)
    if others:
        squares += borrowed * others.deviation**2
    error = math.sqrt(squares / (own + borrowed) / len(values))
    margin = t_quantile(confidence, own + borrowed) * error
    return LogInterval(value=mean, low=mean - margin, high=mean + margin, count=len(values))


def instance_interval(instances: Sequence[Sequence[float]], *, confidence: float = CONFIDENCE) -> LogInterval:
    """Mean over instances, with an interval that allows for differences between instances.

    The standard error is the larger of two: the spread between the instances' means, and what the spread
    of the slices within them predicts (of a single slice, what the others' spread does); each with its own degrees of
    freedom. Where instances differ, a
    claim that rests on few of them has a wide interval, however many slices each gave. (Always taking the
    degrees of freedom of the instances covers 99% and more, and needs twice the time for the same width.
    `benchmarks/estimators.py` compares it with other intervals.)

    Args:
        instances: For each instance (a fresh pair of processes) the log-ratios of its pairs.
        confidence: Two-sided coverage.
    """
    means = [statistics.fmean(each) for each in instances]
    mean = statistics.fmean(means)
    count = len(means)
    if count < 2:
        return LogInterval(value=mean, low=-math.inf, high=math.inf, count=count)
    allowed = INSTANCE_DEVIATION if count >= FEW_INSTANCES else DEVIATION_OF_FEW
    between, floor = statistics.variance(means) / count, allowed**2 / count
    spread = [each for each in instances if len(each) > 1]
    degrees = sum(len(each) - 1 for each in spread) or count - 1
    pooled = sum(statistics.variance(each) * (len(each) - 1) for each in spread) / degrees
    variances = [statistics.variance(each) if len(each) > 1 else pooled for each in instances]
    within = sum(one / len(each) for one, each in zip(variances, instances, strict=True)) / count**2
    margin = t_quantile(confidence, degrees) * math.sqrt(within + floor)
    if between >= within or count < FEW_INSTANCES:
        margin = max(margin, t_quantile(confidence, count - 1) * math.sqrt(between))
    return LogInterval(value=mean, low=mean - margin, high=mean + margin, count=count)


def between_templates(interval: LogInterval, *, confidence: float = CONFIDENCE) -> LogInterval:
    """The same for sides that are forks of different templates, whose luck is in every instance alike.

    Where both sides are forks of one template, what it gives to both cancels out. Where each has a template of its own,
    that stays, and instances show little of it.

    Args:
        interval: Over instances.
        confidence: As for `instance_interval`.
    """
    luck = t_quantile(confidence, TEMPLATE_DEGREES) * TEMPLATE_DEVIATION * math.sqrt(2)
    margin = math.hypot(interval.half_width, luck)
    return replace(interval, low=interval.value - margin, high=interval.value + margin)


def pooled_spread(groups: Sequence[Sequence[float]]) -> Spread:
    """Spread of a single log-ratio, pooled over trials; 0 when no trial has two.

    Most of the spread is the baseline's, which all trials share: pooled, a trial with three pairs need not
    be judged by its own three values.

    Args:
        groups: The log-ratios of each trial.
    """
    means = [statistics.fmean(each) if each else 0.0 for each in groups]
    squares = sum((value - mean) ** 2 for each, mean in zip(groups, means, strict=True) for value in each)
    degrees = sum(len(each) - 1 for each in groups if len(each) > 1)
    return Spread(deviation=math.sqrt(squares / degrees) if degrees else 0.0, degrees=degrees)
