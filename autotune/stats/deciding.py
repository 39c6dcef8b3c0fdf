"""Decide when a trial stops, whether a gain is shown, and whether a claim holds. Pure functions."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence

from autotune.data.figures import LogInterval
from autotune.stats.intervals import BORROWED_DEGREES, Spread, mean_interval

FEWEST_PAIRS = 4  # pairs before anything is decided by a trial's own spread alone


class Stop(enum.StrEnum):
    """The reason why measuring a search trial stops."""

    NARROW = "narrow"
    CANNOT_WIN = "cannot_win"
    BEHIND = "behind"  # it may still win, but its estimate lies below the leader's interval
    AHEAD = "ahead"  # it is surely faster than the leader. The confirmation measures by how much
    TIME = "time"


def stop_measuring(
    log_ratios: Sequence[float], *, leader: LogInterval | None, pooled_spread: Spread | None = None
) -> Stop | None:
    """Return why to stop measuring a search trial, or None to continue; `log_ratios` are of its pairs so far."""
    spread_is_known = pooled_spread is not None and pooled_spread.degrees >= BORROWED_DEGREES
    if leader is not None and len(log_ratios) >= (2 if spread_is_known else FEWEST_PAIRS):
        cautious = mean_interval(
            log_ratios, confidence=0.99, pooled_spread=pooled_spread
        )  # as it is looked at after each pair
        if cautious.high < leader.low:
            return Stop.CANNOT_WIN
        if cautious.low > leader.high:
            return Stop.AHEAD
    if len(log_ratios) < FEWEST_PAIRS:
        return None
    if leader is not None and statistics.fmean(log_ratios) < leader.low:
        return Stop.BEHIND
    return Stop.NARROW if mean_interval(log_ratios).half_width <= 0.02 else None


class Verdict(enum.StrEnum):
    """The conclusion of a run."""

    FASTER = "faster"
    NO_SIGNIFICANT_GAIN = "no_significant_gain"  # gains above a bound are excluded, or the search space is exhausted
    UNDECIDED = "undecided"  # the time was over before the answer was settled
    UNSTABLE = "unstable"  # every faster candidate failed a stability check


class EndedBy(enum.StrEnum):
    """The reason why a run ended."""

    SETTLED = "settled"
    EXHAUSTED = "exhausted"  # every configuration of the search space was tried, or as many as were asked for
    BUDGET = "budget"
    INTERRUPTED = "interrupted"
    FAILED = "failed"  # the baseline kept dying, or no candidate could run beside it: a notice said why


def is_faster(ratio: LogInterval, *, min_gain: float) -> bool:
    """Return whether a confirmation shows a gain: lower bound above 1, and estimate at least `1 + min_gain`."""
    return ratio.low > 0 and ratio.value >= math.log1p(min_gain)


class ClaimResult(enum.StrEnum):
    """The result of verifying a claim."""

    HOLDS = "holds"
    WEAKER = "weaker"  # faster, but surely by less than was claimed
    GONE = "gone"  # not shown to be faster, and surely by less than was claimed
    UNSTABLE = "unstable"  # it failed, or failed a stability check
    UNDECIDED = "undecided"  # what was measured shows neither that the claim holds nor that it does not


def judge_claim(claim: LogInterval, now: LogInterval, *, min_gain: float) -> ClaimResult:
    """Compare a claimed speed-up, as a logarithm, with the one measured now; `min_gain` may be lost in any case."""
    short = claim.value - now.value > max(math.hypot(claim.half_width, now.half_width), math.log1p(min_gain))
    if now.low <= 0:
        return ClaimResult.GONE if short else ClaimResult.UNDECIDED
    if short:
        return ClaimResult.WEAKER
    # An interval from 1.1 to 22 would hold any claim.
    vague = now.low < claim.value and now.half_width > max(claim.half_width, claim.value / 2)
    return ClaimResult.UNDECIDED if vague else ClaimResult.HOLDS
