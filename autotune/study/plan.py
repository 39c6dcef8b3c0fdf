"""How a run's time is spent. Pure: seconds in, seconds out."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autotune.errors import ArgumentError, BudgetError

CONFIRMATION_SHARE = 0.35
PROBE_SHARE = 0.4
"""Of the search's time, at most."""
SMALLEST_TRIAL_TIMEOUT = 20.0
FIRST_STEP_FACTOR = 4.0
READY_FACTOR = 2.0
SLOWEST_START = 1.5
"""A candidate may take so much longer to start than the baseline, whatever the budget: larger batches and other
precisions compile for longer."""
LARGEST_TRIAL_SHARE = 0.10
NUMERICS_SHARE = 0.10
"""Of the budget: for the loss curves of finalists, where the space varies what is computed in."""
MOST_NUMERICS_SHARE = 0.15
"""Of the budget: what they may take where the search has ended early."""
NUMERICS_SHARE_OF_SEARCH = 0.25
"""Of the search's time: what they may take from it at most."""
SECOND_LOOK_SHARE = 0.25
"""Of the search's time: kept for measuring the leaders again before one is sent to the confirmation."""
SOAK_SHARE, MOST_SOAK_SECONDS = 0.10, 300.0
"""Of the budget: for a continuous run of the winner, where that leaves the confirmation enough."""
LEAST_SOAK_SECONDS = 6.0
"""Below this, starting its processes not counted, a soak says nothing."""
ENOUGH_INSTANCES = 4
"""What a confirmation has wherever they fit, and keeps time for: a soak and plain float32 get what that leaves."""
INSTANCES_OF_SEVERAL = 8
"""What several finalists side by side must leave time for: one claim to bet on is worth more than three loose ones."""
LONG_BUDGET = 300.0
"""Below this budget, one finalist is confirmed; from it on, as many as time allows."""
FINALISTS = 3
SETTING_UP_SECONDS = 2.0
"""From the plan to the first trial of the search: the run's files, the sampler's study."""
CLOSING_SECONDS = 1.0
"""For ending the processes and writing the recipe."""
TRIALS_WORTH_HAVING = 40
LEAST_MEASURED, MOST_MEASURED = 3.0, 10.0
LEAST_INSTANCE_SECONDS, MOST_INSTANCE_SECONDS = 4.0, 12.0
"""Slices of one instance with one finalist, the baseline's turns included."""
MANY_INSTANCES, MOST_INSTANCES = 12, 24
"""Time for more than many makes each longer first, and only then more of them; the most end a confirmation."""
FEWEST_INSTANCES = 2
FEWEST_ROUNDS = 3
"""In an instance that has the time for it."""
FEWEST_PAIRS_OF_SLICES = 2
"""At least, in a trial or an instance, where a slice cannot be short because an epoch is long."""
OVERRUN_SHARE = 0.03
"""Of the budget: how far the search may run into the confirmation's time where that has some to spare, and waits of
the confirmation beyond its end."""
BASELINE_SHARE = 0.35
"""Of the budget: what the baseline may take to warm up, and each of its first slices."""
ADVICE_MARGIN = 1.2
"""An advised budget is this much more than was needed this time: no two runs take the same."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Seconds since the run began at which things end, and seconds that things may take.

    Args:
        budget: For everything.
        search_ends: When the last search trial should have ended.
        search_last: When no search trial is waited for any more.
        sampling_ends: When new configurations give way to second looks at the leaders.
        probes_end: When single changes give way to the sampler.
        numerics_ends: When the finalists' loss curves must have been compared.
        ends: When the confirmation must have ended.
        trial_timeout: Seconds that one search trial may take, from request to end; one that runs out of memory beside
            the baseline is tried again alone, for as long.
        measured: Slices of one search trial, the baseline's turns included.
        finalists: How many configurations are confirmed side by side, at most.
        import_seconds: What a fresh template takes to import everything.
        slice_seconds: The shortest slice that the baseline can be timed in.
        least_trial: The shortest search trial, from request to end.
        soak: What the confirmation keeps for a continuous run of its winner, processes' starts included.
        soak_wanted: Whether that run is asked for, and not only made where there is time.
        confirmation_share: Of a budget, what its confirmation has.
    """

    budget: float
    search_ends: float
    sampling_ends: float
    probes_end: float
    ends: float
    trial_timeout: float
    measured: float
    finalists: int
    import_seconds: float = 0.0
    slice_seconds: float = 0.0
    least_trial: float = 0.0
    search_last: float = math.inf
    numerics_ends: float = 0.0
    soak: float = 0.0
    soak_wanted: bool = False
    confirmation_share: float = CONFIRMATION_SHARE


def baseline_timeout(budget: float) -> float:
    """How long the baseline may take until it is warm."""
    return max(1.0, budget * BASELINE_SHARE)


def plan_run(
    budget: float,
    *,
    ready_at: float,
    first_step: float,
    ready: float = 0.0,
    import_seconds: float = 0.0,
    slice_seconds: float = 0.0,
    bracketed: bool = False,
    numerics: bool = False,
    trial_timeout: float | None,
    soak: float | None = None,
    searched: bool = False,
) -> Plan:
    """Spread what is left of the budget once the baseline is warm.

    The confirmation has its share of the budget, and more where that would not do for the fewest instances; where the
    search's time is over already, what is left.

    Args:
        budget: Seconds for everything.
        ready_at: Seconds since the run began at which the baseline was warm.
        first_step: Seconds the baseline took from request to first step.
        ready: Seconds the baseline took from request to its steady state.
        import_seconds: Seconds a template takes to import everything.
        slice_seconds: The shortest slice that the baseline can be timed in.
        bracketed: Whether two processes are never alive at once.
        numerics: Whether the search space varies what is computed in.
        trial_timeout: The user's own limit for a trial, or None.
        soak: Seconds of the soak where the user names them, 0 for none; None to have it scaled to the budget.
        searched: Whether an earlier invocation has found something to confirm: then no time for another trial need be
            left, and there is no search where there is none.

    Raises:
        BudgetError: Nothing could be both searched and confirmed in what is left; the hint names a budget that does.
    """
    start = max(first_step, ready)
    shortest_trial = least_trial(start, slice_seconds=slice_seconds, bracketed=bracketed)
    first_trial = SETTING_UP_SECONDS + shortest_trial
    instance = least_instance((3 if bracketed else 2) * start, slice_seconds=slice_seconds)
    confirmation = import_seconds + FEWEST_INSTANCES * instance + CLOSING_SECONDS
    of_enough = (ENOUGH_INSTANCES - FEWEST_INSTANCES) * instance
    wanted = bool(soak)
    if soak:
        soak += 2 * start
        confirmation += soak
    search_ends = budget - max(CONFIRMATION_SHARE * budget, confirmation)
    over = searched and search_ends - ready_at < first_trial and budget - ready_at >= confirmation
    unneeded = (budget - ready_at if over else CONFIRMATION_SHARE * budget) - confirmation - of_enough
    numerics_of_rest = min(NUMERICS_SHARE * budget, max(0.0, unneeded)) if over and numerics else 0.0
    if soak is None:
        soak = min(SOAK_SHARE * budget, MOST_SOAK_SECONDS, unneeded - numerics_of_rest)
        soak = soak if soak >= LEAST_SOAK_SECONDS + 2 * start else 0.0
    if over:
        search_ends = ready_at
    elif search_ends - ready_at < first_trial:
        raise _too_small(budget, ready_at=ready_at, trial=shortest_trial, confirmation=confirmation)
    numerics_ends = search_ends
    if over:
        numerics_ends += numerics_of_rest
    elif numerics:
        share = min(NUMERICS_SHARE * budget, NUMERICS_SHARE_OF_SEARCH * (search_ends - ready_at))
        search_ends = max(search_ends - share, ready_at + first_trial)
    usual_limit = _usual_limit(budget, first_step=first_step, ready=ready)
    return Plan(
        budget=budget,
        search_ends=search_ends,
        sampling_ends=search_ends - (search_ends - ready_at) * SECOND_LOOK_SHARE,
        probes_end=ready_at + (search_ends - ready_at) * PROBE_SHARE,
        ends=budget - CLOSING_SECONDS,
        trial_timeout=trial_timeout or max(shortest_trial + (SLOWEST_START - 1) * start, usual_limit),
        measured=min(MOST_MEASURED, max(LEAST_MEASURED, (search_ends - ready_at) / TRIALS_WORTH_HAVING)),
        finalists=FINALISTS if budget >= LONG_BUDGET else 1,
        import_seconds=import_seconds,
        slice_seconds=slice_seconds,
        least_trial=shortest_trial,
        search_last=min(search_ends + OVERRUN_SHARE * budget, budget - confirmation),
        numerics_ends=numerics_ends,
        soak=soak,
        soak_wanted=wanted,
    )


def _usual_limit(budget: float, *, first_step: float, ready: float) -> float:
    """Seconds that one trial may take, where the shortest one is shorter."""
    limit = max(SMALLEST_TRIAL_TIMEOUT, FIRST_STEP_FACTOR * first_step, READY_FACTOR * ready)
    return min(limit, LARGEST_TRIAL_SHARE * budget)


def _too_small(budget: float, *, ready_at: float, trial: float, confirmation: float) -> BudgetError:
    """What is said of a budget that does not hold a trial of so many seconds and its confirmation."""
    one_trial = ready_at + SETTING_UP_SECONDS + trial
    needed = max(one_trial / (1 - CONFIRMATION_SHARE), one_trial + confirmation)
    return BudgetError(
        f"a budget of {budget:.0f} s is too small: {ready_at:.1f} s were over when the baseline was warm, one trial "
        f"takes {trial:.0f} s, and its confirmation in fresh processes {confirmation:.0f} s",
        hint=f"Give --budget {math.ceil(needed * ADVICE_MARGIN)}s or more; a few minutes are sensible here.",
    )


def least_trial(start: float, *, slice_seconds: float, bracketed: bool) -> float:
    """Seconds that the shortest search trial takes; a bracketed one starts the baseline again, too."""
    slices = max(LEAST_MEASURED, 2 * FEWEST_PAIRS_OF_SLICES * slice_seconds)
    return max((2 if bracketed else 1) * start + slices + 2.0, usual_trial(LEAST_MEASURED))


def usual_trial(measured: float) -> float:
    """Seconds that a trial with so many of slices is expected to take while none has been run."""
    return measured + 3.0


def least_instance(start: float, *, slice_seconds: float) -> float:
    """Seconds that the shortest instance with one finalist takes; `start` is of all its processes."""
    return start + max(LEAST_INSTANCE_SECONDS, 2 * FEWEST_PAIRS_OF_SLICES * slice_seconds)


def budget_to_confirm(plan: Plan, *, start: float, slice_seconds: float = 0.0) -> float:
    """Seconds for a run whose confirmation has time for enough instances, which its share has to hold.

    Args:
        plan: Of the run that had not enough.
        start: Seconds to start all the processes of one instance.
        slice_seconds: The shortest slice that it can be timed in.
    """
    each = start + least_slices(1, slice_seconds=slice_seconds)
    confirmation = plan.import_seconds + ENOUGH_INSTANCES * each + CLOSING_SECONDS
    needed = max(plan.budget, confirmation / plan.confirmation_share)
    return math.ceil(needed * ADVICE_MARGIN / 10) * 10.0


def least_slices(finalists: int, *, slice_seconds: float) -> float:
    """Seconds that the slices of an instance are to have at least, the baseline's included."""
    return (1 + finalists) * max(LEAST_INSTANCE_SECONDS / 2, FEWEST_ROUNDS * slice_seconds)


def plan_instances(
    available: float, *, start: float, finalists: int = 1, slice_seconds: float = 0.0, done: int = 0
) -> tuple[int, float]:
    """How many more instances a confirmation has, and how long the slices of each may take.

    Many short instances say more than few long ones, down to where starting them eats the time: slices take as long as
    the start before them, or longer. Whether processes differ or slices do, no split of the time would give the mean
    half the variance of that one. Only where the time would not hold `ENOUGH_INSTANCES` so are there shorter ones:
    few instances have a wide interval, whatever their variance. Where many fit, each is longer first, and then there
    are more: a claim goes on getting narrower with the budget.

    Args:
        available: Seconds for all of it.
        start: Seconds to start one instance of everything that is confirmed.
        finalists: How many are confirmed side by side.
        slice_seconds: The shortest slice that they can be timed in.
        done: How many instances have been measured; the available seconds are for the rest.
    """
    sides = 1 + finalists
    shortest = least_slices(finalists, slice_seconds=slice_seconds)
    balanced = max(start, shortest)
    longest = max(balanced, sides * MOST_INSTANCE_SECONDS / 2)
    count = int(available / (start + balanced))
    if done + count < ENOUGH_INSTANCES:
        count = min(ENOUGH_INSTANCES - done, int(available / (start + shortest)))
    elif done + count > MANY_INSTANCES:
        count = max(MANY_INSTANCES - done, int(available / (start + longest)))
    count = max(1, FEWEST_INSTANCES - done, min(MOST_INSTANCES - done, count))
    return count, min(max(0.0, available / count - start), longest)


def parse_duration(text: str, *, name: str, may_be_none: bool = False) -> float:
    """Seconds in `90`, `90s`, `10m`, `1.5h` or `1h30m`.

    Args:
        text: What was given.
        name: The argument, for messages.
        may_be_none: Whether it may be no time at all.

    Raises:
        ArgumentError: The text is none of these, or no time where there must be some.
    """
    match = re.fullmatch(
        r"(?:(?P<h>\d{1,6}(?:\.\d{1,6})?)h)?(?:(?P<m>\d{1,6}(?:\.\d{1,6})?)m)?(?:(?P<s>\d{1,8}(?:\.\d{1,6})?)s?)?",
        text.strip().lower(),
    )
    seconds = -1.0
    if match and match[0]:
        seconds = sum(float(match[unit] or 0) * scale for unit, scale in (("h", 3600), ("m", 60), ("s", 1)))
    if seconds < 0 or (seconds == 0 and not may_be_none):
        raise ArgumentError(
            f"{name}: {text!r} is not a duration", hint="Durations look like 90s, 10m, 1.5h or 1h30m."
        )
    return seconds
