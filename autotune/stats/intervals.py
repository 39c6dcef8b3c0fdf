"""Estimate rates and speed-ups, with confidence intervals, from paired slices and from processes.

Intervals are computed on logarithms of ratios, so a speed-up of 2 and one of 1/2 are equally far from none.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.data.figures import LogInterval

CONFIDENCE = 0.95
Measured = tuple[float, int]  # a slice as samples per second, and the examples that it trained on
BORROWED_DEGREES = 8  # most that a trial borrows from the others: one that is noisier shows it
LEAST_DEVIATION = 0.02  # log deviation between processes that is allowed for even where slices show none
DISTURBED_SHARE, DISTURBED_DEVIATION = 0.2, 0.35  # how often machines are disturbed; log deviation between pairs then
PRIOR_DEGREES = 4  # that recordings, and at most that a run's other processes, lend to a claim
NOISY_DEVIATION = 0.179  # log deviation of single slice pairs on a disturbed machine, assumed before any is known
COMPILATION_DEVIATION, COMPILATION_DEGREES = 0.03, 14  # log deviation between kernels that XLA chooses by timing them
TEMPLATE_DEVIATION, TEMPLATE_DEGREES = 0.02, 14  # log deviation between forks of two templates that import the same


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The spread of single log-ratios around their trial's mean, pooled over trials."""

    deviation: float
    degrees: int


@functools.lru_cache(maxsize=512)
def t_quantile(confidence: float, degrees: float) -> float:
    """Return the two-sided Student-t quantile: 1.96 for 0.95 and many degrees of freedom, 4.30 for two."""
    from scipy import special  # takes 0.2 s to import; scipy.stats takes 1 s

    return float(special.stdtrit(degrees, 0.5 + confidence / 2))


def _around(mean: float, margin: float, count: int) -> LogInterval:
    return LogInterval(value=mean, low=mean - margin, high=mean + margin, count=count)


def mean_interval(
    values: Sequence[float], *, confidence: float = CONFIDENCE, pooled_spread: Spread | None = None
) -> LogInterval:
    """Return the mean of log-ratios with its Student-t interval; infinite where nothing is known of their spread."""
    # The spread of other trials is a prior (the moderated t of Smyth, 2004).
    mean, own = statistics.fmean(values), len(values) - 1
    borrowed = min(pooled_spread.degrees, BORROWED_DEGREES) if pooled_spread else 0
    if own + borrowed < 1:
        return _around(mean, math.inf, len(values))
    squares = _squared_deviations(values)
    if pooled_spread:
        squares += borrowed * pooled_spread.deviation**2
    error = math.sqrt(squares / (own + borrowed) / len(values))
    return _around(mean, t_quantile(confidence, own + borrowed) * error, len(values))


@dataclass(frozen=True, kw_only=True)
class ProcessPrior:
    """Prior for the variance between process pairs, estimated from all data except those pairs.

    The machine is quiet or disturbed. Of a disturbed one, pairs vary by `DISTURBED_DEVIATION` or more.
    """

    deviation: float  # on a quiet machine
    degrees: int
    least: float = 0.0  # deviation that the processes of other trials have shown: no claim takes less
    least_degrees: int = 0  # of that
    disturbed: float = DISTURBED_SHARE  # the chance that the machine is disturbed

    def half_width(self, count: int, confidence: float) -> float:
        """Return the half-width that an interval should have after so many pairs, if they vary as on a quiet machine.

        One process shows nothing of its spread: the quiet machine's is taken.
        """
        if count < 2:
            return t_quantile(confidence, self.degrees) * self.deviation
        return _half_width(self, self.deviation**2, count, confidence)


def _log_likelihood(expected: float, lent: float, own: float, degrees: int) -> float:
    """Return how likely a variance between pairs is where `lent` degrees expect another, as a logarithm.

    The variance has a scaled inverse chi-square prior, over which this is integrated; a constant is left out.
    """
    total = lent + degrees
    squares = lent * expected + degrees * own
    gammas = math.lgamma(total / 2) - math.lgamma(lent / 2)
    return gammas + (lent * math.log(lent * expected) - total * math.log(squares)) / 2


@functools.lru_cache(maxsize=4096)
def _half_width(prior: ProcessPrior, own: float, count: int, confidence: float, predicted: float = 0.0) -> float:
    """Return the half-width of an interval over pairs whose variance is `own`, and at least as `predicted`."""
    from scipy import special

    disturbed = max(DISTURBED_DEVIATION, prior.deviation, prior.least)
    states = []
    for share, deviation, lent in (
        (1 - prior.disturbed, prior.deviation, prior.degrees),
        (prior.disturbed, disturbed, PRIOR_DEGREES),
    ):
        expected, degrees = max(deviation**2, predicted), lent + count - 1
        variance = max(predicted, (lent * expected + (count - 1) * own) / degrees)
        likelihood = share * math.exp(_log_likelihood(expected, lent, own, count - 1))
        states.append((likelihood, math.sqrt(variance / count), degrees))
    total = sum(likelihood for likelihood, _, _ in states)
    low, high = sorted(t_quantile(confidence, degrees) * error for _, error, degrees in states)
    for _ in range(40):
        middle = (low + high) / 2
        outside = sum(2 * part * float(special.stdtr(degrees, -middle / error)) for part, error, degrees in states)
        low, high = (middle, high) if outside > (1 - confidence) * total else (low, middle)
    return high


def claim_interval(
    processes: Sequence[Sequence[float]],  # log-ratios of the slices of each pair of processes
    *,
    prior: ProcessPrior,
    confidence: float = CONFIDENCE,
    different_template: bool = False,  # both sides are forks of different templates, whose luck does not cancel
    compilations: int | None = None,  # of the baseline, where pairs share one; None where each has its own
) -> LogInterval:
    """Return the mean over fresh pairs of processes, with a moderated Student-t interval.

    Of a quiet and of a disturbed machine, the variance between pairs is `(d0 * s0**2 + d * s**2) / (d0 + d)`, with
    `d0 + d` degrees of freedom (empirical Bayes: Smyth 2004, doi:10.2202/1544-6115.1027). Both are mixed by how likely
    they make the variance that was seen, so pairs that vary much leave the prior without losing all its degrees. The
    variance is never smaller than what other trials of the run have shown, nor than the slices within the pairs
    predict: a noisy candidate must not profit from quiet ones.
    """
    means = [statistics.fmean(values) for values in processes]
    mean, count = statistics.fmean(means), len(means)
    if count < 2:
        return _around(mean, math.inf, count)
    within = pooled_spread(processes).deviation ** 2  # of slices, which predicts how the means of processes vary
    predicted = max(statistics.fmean(within / len(values) for values in processes), LEAST_DEVIATION**2)
    margin = _half_width(prior, statistics.variance(means), count, confidence, predicted)
    if prior.least:
        margin = max(margin, t_quantile(confidence, prior.least_degrees + count - 1) * prior.least / math.sqrt(count))
    if different_template:
        luck = t_quantile(confidence, TEMPLATE_DEGREES) * TEMPLATE_DEVIATION * math.sqrt(2)
        margin = math.hypot(margin, luck)
    if compilations and compilations < count:  # the part of their luck that the variance between pairs does not show
        unseen = (count - compilations) / (compilations * (count - 1))
        luck = t_quantile(confidence, COMPILATION_DEGREES) * COMPILATION_DEVIATION * math.sqrt(unseen)
        margin = math.hypot(margin, luck)
    return _around(mean, margin, count)


def process_prior(trials: Sequence[Sequence[Sequence[float]]], *, rounds: int) -> ProcessPrior:
    """Return how much fresh pairs of processes, of so many rounds of slices, should vary before any was measured.

    `trials` are the log-ratios of the slices of each process of other trials of the run. The slices tell how noisy this
    machine is: on recorded machines they predict how much processes vary (by 0.98 and 0.99 of it, `benchmarks/looks.py
    --fit`). Where other trials had several processes, these add what slices do not explain.
    """
    slices = pooled_spread([values for processes in trials for values in processes])
    deviation = slices.deviation if slices.degrees else NOISY_DEVIATION
    expected = deviation**2 / rounds + LEAST_DEVIATION**2
    repeated = [processes for processes in trials if len(processes) > 1]
    seen = pooled_spread([[statistics.fmean(values) for values in processes] for processes in repeated])
    explained = [deviation**2 / len(values) for processes in repeated for values in processes]
    unexplained = max(0.0, seen.deviation**2 - statistics.fmean(explained)) if seen.degrees else 0.0
    lent = min(PRIOR_DEGREES, seen.degrees)
    pooled = expected + unexplained * lent / (PRIOR_DEGREES + lent)
    least = math.sqrt(expected + unexplained) if seen.degrees else 0.0
    odds = DISTURBED_SHARE / (1 - DISTURBED_SHARE)
    if lent:
        rough = max(DISTURBED_DEVIATION**2, expected)
        likelihoods = (_log_likelihood(of, PRIOR_DEGREES, seen.deviation**2, lent) for of in (rough, expected))
        odds *= math.exp(next(likelihoods) - next(likelihoods))
    return ProcessPrior(
        deviation=math.sqrt(pooled),
        degrees=PRIOR_DEGREES + lent,
        least=least,
        least_degrees=lent,
        disturbed=odds / (1 + odds),
    )


def pooled_spread(groups: Sequence[Sequence[float]]) -> Spread:
    """Return the spread of a log-ratio about its group's mean, pooled over groups; 0 where no group has two."""
    several = [group for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in several)
    squares = sum(_squared_deviations(group) for group in several)
    return Spread(deviation=math.sqrt(squares / degrees) if degrees else 0.0, degrees=degrees)


def _squared_deviations(values: Sequence[float]) -> float:
    """Return the sum of the squared distances from the mean."""
    # `statistics.variance` computes in fractions, which took a fifth of the driver's time in simulated runs.
    mean = statistics.fmean(values)
    return math.fsum((value - mean) ** 2 for value in values)


def overall_rate(slices: Sequence[Measured]) -> float:
    """Return all examples over all the time, in samples per second: a training pays for its slow stretches."""
    return sum(examples for _, examples in slices) / math.fsum(examples / rate for rate, examples in slices)


def overall_log_ratios(baseline: Sequence[Measured], candidate: Sequence[Measured]) -> list[float]:
    """Return a value for each pair that stands for its log-ratio; their mean is the log-ratio of the overall rates."""
    # A value's distance from the mean is the pair's influence on it: so their spread gives the error of the mean.
    overall = math.log(overall_rate(candidate) / overall_rate(baseline))
    influences = zip(_influences(candidate), _influences(baseline), strict=True)
    # Rounded: where speeds are equal the values are, too.
    return [round(overall + own - other, 12) for own, other in influences]


def _influences(side: Sequence[Measured]) -> list[float]:
    """Return each slice's relative excess in examples over the others, less its relative excess in time."""
    examples = statistics.fmean(count for _, count in side)
    seconds = statistics.fmean(count / rate for rate, count in side)
    return [count / examples - count / rate / seconds for rate, count in side]
