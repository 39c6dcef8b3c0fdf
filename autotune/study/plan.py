"""How a run's time is spent. Pure: seconds in, seconds out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autotune.errors import ArgumentError, BudgetError

CONFIRMATION_SHARE = 0.35
PROBE_SHARE = 0.4
"""Of the search's time, at most."""
SMALLEST_TRIAL_TIMEOUT = 20.0
FIRST_STEP_FACTOR = 4.0
READY_FACTOR = 2.0
LARGEST_TRIAL_SHARE = 0.10
SECOND_LOOK_SHARE = 0.25
"""Of the search's time: kept for measuring the leaders again before one is sent to the confirmation."""
LONG_BUDGET = 300.0
"""From this budget on, more than one finalist is confirmed."""
FINALISTS = 3
CLOSING_SECONDS = 1.0
"""For ending the processes and writing the recipe."""
TRIALS_WORTH_HAVING = 40
LEAST_MEASURED, MOST_MEASURED = 3.0, 10.0
LEAST_INSTANCE_SECONDS, MOST_INSTANCE_SECONDS = 4.0, 12.0
"""Slices of one instance with one finalist, the baseline's turns included."""
MOST_INSTANCES = 8
FEWEST_INSTANCES = 2
BASELINE_SHARE = 0.35
"""Of the budget: what the baseline may take to warm up."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Seconds since the run began at which things end, and seconds that things may take.

    Args:
        budget: For everything.
        search_ends: When the last search trial must have ended.
        sampling_ends: When new configurations give way to second looks at the leaders.
        probes_end: When single changes give way to the sampler.
        ends: When the confirmation must have ended.
        trial_timeout: One search trial, from request to end.
        measured: Slices of one search trial, the baseline's turns included.
        finalists: How many configurations are confirmed.
    """

    budget: float
    search_ends: float
    sampling_ends: float
    probes_end: float
    ends: float
    trial_timeout: float
    measured: float
    finalists: int


def baseline_timeout(budget: float) -> float:
    """How long the baseline may take until it is warm."""
    return max(1.0, budget * BASELINE_SHARE)


def plan_run(
    budget: float, *, ready_at: float, first_step: float, ready: float = 0.0, trial_timeout: float | None
) -> Plan:
    """Spread what is left of the budget once the baseline is warm.

    Args:
        budget: Seconds for everything.
        ready_at: Seconds since the run began at which the baseline was warm.
        first_step: Seconds the baseline took from request to first step.
        ready: Seconds the baseline took from request to its steady state.
        trial_timeout: The user's own limit for a trial, or None.

    Raises:
        BudgetError: Nothing could be both searched and confirmed in what is left.
    """
    search_ends = budget * (1 - CONFIRMATION_SHARE)
    shortest_trial = max(first_step, ready) + LEAST_MEASURED + 2.0
    if search_ends - ready_at < shortest_trial:
        needed = (ready_at + shortest_trial) / (1 - CONFIRMATION_SHARE)
        raise BudgetError(
            f"a budget of {budget:.0f} s is too small: the baseline was warm after {ready_at:.1f} s, and "
            "one trial and its confirmation need more than what is left",
            hint=f"Give --budget {needed * 1.2:.0f}s or more; a few minutes are sensible here.",
        )
    limit = max(SMALLEST_TRIAL_TIMEOUT, FIRST_STEP_FACTOR * first_step, READY_FACTOR * ready)
    return Plan(
        budget=budget,
        search_ends=search_ends,
        sampling_ends=search_ends - (search_ends - ready_at) * SECOND_LOOK_SHARE,
        probes_end=ready_at + (search_ends - ready_at) * PROBE_SHARE,
        ends=budget - CLOSING_SECONDS,
        trial_timeout=trial_timeout or max(shortest_trial, min(limit, LARGEST_TRIAL_SHARE * budget)),
        measured=min(MOST_MEASURED, max(LEAST_MEASURED, (search_ends - ready_at) / TRIALS_WORTH_HAVING)),
        finalists=FINALISTS if budget >= LONG_BUDGET else 1,
    )


def plan_instances(available: float, *, start: float, finalists: int = 1) -> tuple[int, float]:
    """How many instances a confirmation has, and how long the slices of each may take.

    Many short instances say more than few long ones, down to where starting them eats the time.

    Args:
        available: Seconds for all of it.
        start: Seconds to start one instance of everything that is confirmed.
        finalists: How many are confirmed side by side.
    """
    count = int(available / (start + LEAST_INSTANCE_SECONDS * (1 + finalists) / 2))
    count = max(FEWEST_INSTANCES, min(MOST_INSTANCES, count))
    seconds = max(0.0, available / count - start)
    return count, min(seconds, MOST_INSTANCE_SECONDS * (1 + finalists) / 2)


def parse_duration(text: str) -> float:
    """Seconds in `90`, `90s`, `10m`, `1.5h` or `1h30m`.

    Raises:
        ArgumentError: The text is none of these, or not above zero.
    """
    match = re.fullmatch(
        r"(?:(?P<h>\d{1,6}(?:\.\d{1,6})?)h)?(?:(?P<m>\d{1,6}(?:\.\d{1,6})?)m)?(?:(?P<s>\d{1,8}(?:\.\d{1,6})?)s?)?",
        text.strip().lower(),
    )
    seconds = 0.0
    if match:
        seconds = sum(float(match[unit] or 0) * scale for unit, scale in (("h", 3600), ("m", 60), ("s", 1)))
    if seconds <= 0:
        raise ArgumentError(
            f"{text!r} is not a duration", hint="Durations look like 90s, 10m, 1.5h or 1h30m."
        )
    return seconds
