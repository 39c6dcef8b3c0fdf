"""What to do with a candidate, given what was measured of it so far. Pure functions."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence

from autotune.stats.intervals import BORROWED_DEGREES, LogInterval, Spread, mean_interval

FEWEST_PAIRS = 4
"""Pairs before anything is decided by a trial's own spread alone."""
FEWEST_PAIRS_TO_PRUNE = 2
"""Pairs before a trial is given up, where other trials have shown how much pairs vary."""
NARROW = 0.02
"""Half-width of the log-ratio's interval at which a search trial is known well enough."""
PRUNING_CONFIDENCE = 0.99
"""Of the interval whose upper bound must fall below the leader's lower one: it is looked at after each pair."""
MIN_GAIN = 0.02
"""Smallest gain worth a recommendation, as a share."""


class Stop(enum.StrEnum):
    """Why measuring a trial stops."""

    NARROW = "narrow"
    CANNOT_WIN = "cannot_win"
    BEHIND = "behind"
    """It may still win, but its estimate lies below the leader's lower bound: the time is better spent elsewhere."""
    AHEAD = "ahead"
    """It is surely faster than the leader: how much faster is the confirmation's to tell."""
    TIME = "time"


def stop_measuring(
    log_ratios: Sequence[float], *, leader: LogInterval | None, others: Spread | None = None
) -> Stop | None:
    """Whether a search trial has been measured enough.

    Args:
        log_ratios: Of the pairs so far.
        leader: Logarithm of the leader's speed-up; None when there is none yet.
        others: How much the pairs of other trials vary, where that is known.

    Returns:
        Why to stop, or None to go on.
    """
    known = others is not None and others.degrees >= BORROWED_DEGREES
    if leader is not None and len(log_ratios) >= (FEWEST_PAIRS_TO_PRUNE if known else FEWEST_PAIRS):
        cautious = mean_interval(log_ratios, confidence=PRUNING_CONFIDENCE, others=others)
        if cautious.high < leader.low:
            return Stop.CANNOT_WIN
        if cautious.low > leader.high:
            return Stop.AHEAD
    if len(log_ratios) < FEWEST_PAIRS:
        return None
    if leader is not None and statistics.fmean(log_ratios) < leader.low:
        return Stop.BEHIND
    return Stop.NARROW if mean_interval(log_ratios).half_width <= NARROW else None


class Verdict(enum.StrEnum):
    """What a run comes to."""

    FASTER = "faster"
    NO_SIGNIFICANT_GAIN = "no_significant_gain"
    """Gains above a stated bound are excluded for all that was tried, or nothing is left to be tried."""
    UNDECIDED = "undecided"
    """The time was over before the answer was settled."""
    UNSTABLE = "unstable"
    """The only faster ones broke a rule."""


class EndedBy(enum.StrEnum):
    """Why a run ended."""

    SETTLED = "settled"
    EXHAUSTED = "exhausted"
    """Every configuration of the search space was tried, or as many as were asked for."""
    BUDGET = "budget"
    INTERRUPTED = "interrupted"


def is_faster(ratio: LogInterval, *, min_gain: float) -> bool:
    """Whether a confirmation shows a gain: the lower bound is above 1, and the estimate at least `1 + min_gain`.

    Args:
        ratio: Logarithm of the speed-up, from the confirmation only.
        min_gain: As a share: 0.02 is two percent.
    """
    return ratio.low > 0 and ratio.value >= math.log1p(min_gain)


class Finding(enum.StrEnum):
    """What a verification says of a claim."""

    HOLDS = "holds"
    WEAKER = "weaker"
    """Faster, but surely by less than was claimed."""
    GONE = "gone"
    """Not shown to be faster, and surely by less than was claimed."""
    UNSTABLE = "unstable"
    """It failed, or broke a stability rule."""
    UNDECIDED = "undecided"
    """What was measured shows neither that the claim holds nor that it does not."""


VAGUE = 0.5
"""Half-width of what is measured now, as a part of the claimed gain's logarithm, above which it shows nothing."""


def finding(claim: LogInterval, now: LogInterval, *, min_gain: float) -> Finding:
    """Whether a claimed speed-up is what is measured now.

    Both have errors of their own: the two differ where the distance is more than the root of the sum of their
    half-widths' squares, and more than a loss that does not count.

    Args:
        claim: Logarithm of the claimed speed-up.
        now: Logarithm of the one measured now.
        min_gain: What may be lost of the claim in any case, as a share.

    Returns:
        `HOLDS` only where `now` is surely as much, or is known to within half of what is claimed, or as well as the
        claim itself: an interval from 1.1 to 22 would hold any.
    """
    error = math.hypot(claim.half_width, now.half_width)
    short = claim.value - now.value > max(error, math.log1p(min_gain))
    if now.low > 0:
        if short:
            return Finding.WEAKER
        vague = now.low < claim.value and now.half_width > max(claim.half_width, VAGUE * claim.value)
        return Finding.UNDECIDED if vague else Finding.HOLDS
    return Finding.GONE if short else Finding.UNDECIDED
