"""Compare two batch sizes by the examples that they need to reach the same losses. Pure.

A larger batch trains more samples per second and needs more of them. `same_loss_speedup` puts both together.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.data.figures import LogInterval
from autotune.data.record import ContinuedTraining, Rule
from autotune.stats.intervals import CONFIDENCE, t_quantile

FEWEST_SEEDS = 4  # two to choose the learning-rate rule by, and two to measure it on
DEGREE = 4  # of the polynomial that losses follow
LARGEST_RATIO, SHIFTS = 15.0, 55  # of examples; and the logarithms that are tried, evenly spread, before one is refined
NOT_REACHED = "it does not reach the losses that the baseline reaches"
NOT_COMPARABLE = "not comparable: "
HARDLY_FALLS = "the baseline's own losses hardly fall in so few examples"
TOO_FEW_ENDED = "too few of its trainings came to their end in time"

Losses = Sequence[float | None]
"""Of one training, by probe; None where a loss was not finite. Empty where the training was not ended."""


@dataclass(frozen=True, kw_only=True)
class ExamplesNeeded:
    """Examples that a larger batch needs to the same losses, as multiples of the baseline's."""

    rule: Rule  # of the learning rate, for these figures
    log_ratio: LogInterval  # over seeds; the logarithm of a factor
    by_rule: Mapping[Rule, float | None]  # the same for each rule; None where it does not reach the losses


def log_examples_ratio(
    examples: np.ndarray, losses: np.ndarray, larger_examples: np.ndarray, larger_losses: np.ndarray
) -> float | None:
    """Return ln(n₂/n₁) of two curves of losses, after n₁ and after n₂ examples.

    It is the ratio with which one smooth curve fits both best. Single losses that are reached too early by chance would
    understate it. The curve is a polynomial in ln(1 + n/n₀), with n₀ the first probe of the first one. Below n₀, where
    that curve has no losses, it is nearly straight. A polynomial in ln(n) bends there: of losses that fall evenly it
    finds 1.66 in place of ln(6) = 1.79. None where the second curve does not reach what the first one begins with.
    """
    from scipy import optimize

    if larger_losses[-1] >= losses[0]:
        return None
    both = np.concatenate([losses, larger_losses])

    def misfit(shift: float) -> float:
        at = np.log1p(np.concatenate([examples, larger_examples * math.exp(-shift)]) / examples[0])
        powers = np.vander(at, DEGREE + 1)
        return float(np.sum((powers @ np.linalg.lstsq(powers, both, rcond=None)[0] - both) ** 2))

    shifts = np.linspace(-math.log(LARGEST_RATIO), math.log(LARGEST_RATIO), SHIFTS)
    best = int(np.argmin([misfit(shift) for shift in shifts]))
    if best == SHIFTS - 1:
        return None
    bounds = shifts[max(0, best - 1)], shifts[best + 1]
    return float(optimize.minimize_scalar(misfit, bounds=bounds, method="bounded").x)


def probe_examples(branch: ContinuedTraining) -> list[float]:
    """Return after how many examples since the branch each loss of a training stands."""
    probes = max(map(len, branch.baseline), default=0)
    return [branch.examples * (place + 1) / probes for place in range(probes)]


def whole_trainings(branch: ContinuedTraining) -> tuple[list[Losses], dict[Rule, list[Losses]]]:
    """Return the baseline's trainings, and the leader's by each rule that was tried.

    They are of the seeds with which all trainings came to their end.
    """
    tried = {rule: trainings for rule, trainings in branch.leader.items() if any(trainings)}
    ended = [all(seed) for seed in zip(branch.baseline, *tried.values(), strict=True)]

    def keep_whole(trainings: Sequence[Losses]) -> list[Losses]:
        return [losses for losses, is_whole in zip(trainings, ended, strict=True) if is_whole]

    return keep_whole(branch.baseline), {rule: keep_whole(trainings) for rule, trainings in tried.items()}


def examples_needed(branch: ContinuedTraining) -> ExamplesNeeded | str:
    """Return the examples needed with the best learning-rate rule, or why that is not known, in half a sentence.

    The rule is chosen on one half of the seeds and measured on the other, and the other way round, so that choosing is
    not rewarded. Where both halves choose the same one, all seeds measure it. The losses of seeds are averaged first,
    which the ratio of noisy curves needs; a jackknife over seeds gives its error.
    """
    baseline, leader = whole_trainings(branch)
    rules = tuple((rule, _frozen(leader[rule])) for rule in leader)
    return _examples_needed(tuple(probe_examples(branch)), _frozen(baseline), rules)


def _frozen(trainings: Sequence[Losses]) -> tuple[tuple[float | None, ...], ...]:
    return tuple(map(tuple, trainings))


@functools.lru_cache(maxsize=16)  # a run asks again at each of its decisions
def _examples_needed(
    at: tuple[float, ...], baseline: tuple[Losses, ...], leader: tuple[tuple[Rule, tuple[Losses, ...]], ...]
) -> ExamplesNeeded | str:
    seeds = len(baseline)
    if seeds < FEWEST_SEEDS:
        return TOO_FEW_ENDED
    own = np.array(baseline, float)
    falls = own[:, 0] - own[:, -1]
    error = float(np.std(falls, ddof=1)) / math.sqrt(seeds)
    if not np.mean(falls) > t_quantile(CONFIDENCE, seeds - 1) * error:  # or it is no number
        return HARDLY_FALLS
    known = {rule: np.array(trainings, float) for rule, trainings in leader}
    finite = {rule: losses for rule, losses in known.items() if np.isfinite(losses).all()}

    examples = np.array(at)

    def ratio(rule: Rule, among: Sequence[int]) -> float | None:
        before, after = (losses[list(among)].mean(axis=0) for losses in (own, finite[rule]))
        return log_examples_ratio(examples, before, examples, after)

    def best(among: Sequence[int]) -> Rule | None:
        found = {rule: value for rule in finite if (value := ratio(rule, among)) is not None}
        return min(found, key=found.__getitem__, default=None)

    everyone, halves = range(seeds), (range(0, seeds, 2), range(1, seeds, 2))
    rule, chosen = best(everyone), [best(half) for half in halves]
    if rule is None or None in chosen:
        return NOT_REACHED
    if set(chosen) == {rule}:
        measured = [ratio(rule, everyone)]
    else:
        measured = [ratio(other, half) for other, half in zip(chosen, halves[::-1], strict=True) if other is not None]
    left_out = [ratio(rule, [seed for seed in everyone if seed != left]) for left in everyone]
    if None in measured or None in left_out:
        return NOT_REACHED
    mean = statistics.fmean(value for value in measured if value is not None)
    deviation = statistics.pstdev([value for value in left_out if value is not None])
    margin = t_quantile(CONFIDENCE, seeds - 1) * math.sqrt(seeds - 1) * deviation
    return ExamplesNeeded(
        rule=rule,
        log_ratio=LogInterval(value=mean, low=mean - margin, high=mean + margin, count=seeds),
        by_rule={rule: ratio(rule, everyone) if rule in finite else None for rule, _ in leader},
    )


def same_loss_speedup(
    throughput: LogInterval,  # the logarithm of the ratio of samples per second
    needed: ExamplesNeeded,
    *,
    degrees: float,  # of freedom, of `throughput`
    confidence: float = CONFIDENCE,  # of its interval
    level: float = CONFIDENCE,  # of the result
) -> LogInterval:
    """Return the logarithm of the baseline's time over the larger batch's to reach the same losses."""
    parts = [(throughput, degrees, confidence), (needed.log_ratio, needed.log_ratio.count - 1, CONFIDENCE)]
    variances = [(part.half_width / t_quantile(level, own)) ** 2 for part, own, level in parts]
    value, variance = throughput.value - needed.log_ratio.value, sum(variances)
    if not variance:
        return LogInterval(value=value, low=value, high=value, count=needed.log_ratio.count)
    welch = variance**2 / sum(own**2 / part[1] for own, part in zip(variances, parts, strict=True))
    margin = t_quantile(level, welch) * math.sqrt(variance)
    return LogInterval(value=value, low=value - margin, high=value + margin, count=needed.log_ratio.count)


USUAL_OVER_CRITICAL = 0.16  # with it four times the batch need 1.4 times the examples


def log_examples(batch_ratio: float, over_critical: float) -> float:
    """Return the logarithm of the examples that a batch needs to a loss, over those of one `batch_ratio` times smaller.

    Examples needed go as 1 + B/B_c with the batch size B (McCandlish et al., 2018). `over_critical` is B/B_c of the
    smaller one.
    """
    if math.isinf(over_critical):
        return math.log(batch_ratio)
    return math.log((1 + batch_ratio * over_critical) / (1 + over_critical))


def over_critical_of(log_ratio: float, batch_ratio: float) -> float:
    """Return the smaller batch size over the critical one, by the logarithm of the factor of examples needed."""
    factor = math.exp(log_ratio)
    return math.inf if factor >= batch_ratio else max(0.0, (factor - 1) / (batch_ratio - factor))


def best_batch_size(critical: float, step_seconds: Mapping[int, float]) -> float:
    """Return the batch size that reaches a loss soonest, where a step takes `fixed + per_example × batch` seconds.

    The time goes as (α + βB)(1 + B_c/B), which is least at √(α B_c / β).

    Args:
        critical: The critical batch size.
        step_seconds: The times of steps by batch size, at least two; a common factor does not matter.
    """
    sizes, seconds = np.array([*step_seconds.items()], float).T
    per_example, fixed = np.polyfit(sizes, seconds, 1, w=1 / seconds)  # errors are relative
    if per_example <= 0:
        return math.inf
    return math.sqrt(max(0.0, fixed) * critical / per_example)


def find_step_counter(counted: Mapping[str, Sequence[float]], others: Mapping[str, Sequence[float]]) -> str:
    """Return the value that changes alike from step to step at two batch sizes, so counts steps; or nothing."""
    for name, values in counted.items():
        pairs = [*zip(values, others.get(name, ()), strict=False)]
        if len(pairs) == len(values) and all(math.isclose(one, other, rel_tol=1e-4) for one, other in pairs):
            return name
    return ""
