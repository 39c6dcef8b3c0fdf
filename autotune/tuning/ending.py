"""What is measured of a winner once the search has ended."""

from __future__ import annotations

from autotune.data.options import Options
from autotune.recipe.evidence import Watch
from autotune.stats.numerics import BatchLosses
from autotune.tuning.events import Began
from autotune.tuning.learning import Trainings, compare_batch_sizes
from autotune.tuning.loop import CHECK_SHARE, Found
from autotune.tuning.opening import Invocation, Opened
from autotune.tuning.run import Run
from autotune.tuning.soak import soak
from autotune.tuning.waiting import CLOSING_SECONDS

LEAST_LOSSES_SECONDS = 12.0  # for comparing training losses at another batch size: with less, it is not begun


def watched(found: Found, opened: Opened, invocation: Invocation) -> Watch | None:
    """A watch over what would be recommended, where one was asked for."""
    run, champion, seconds = opened.run, found.state.champion, invocation.options.soak
    if not seconds or champion is None or run.interrupted():
        return None
    run.observe(Began(text=f"watching the winner for {seconds:.0f} s"))
    if not (seat := run.calm_seat):
        return None
    return soak(run, run.records[champion.number], seat=seat, seconds=seconds, limits=opened.limits)


def batch_losses(found: Found, run: Run, options: Options) -> BatchLosses | None:
    """What the recommended batch size costs in learning, where time is left."""
    champion = found.state.champion
    left = options.budget - CLOSING_SECONDS - run.clock()
    if champion is None or run.interrupted() or left < LEAST_LOSSES_SECONDS or not (seat := run.calm_seat):
        return None
    configuration = found.confirmations[champion.number].trial.configuration
    if configuration.update_size == run.baseline.update_size:
        return None
    heading = f"comparing training losses at batch_size={configuration.batch_size}"
    seconds = min(left, max(LEAST_LOSSES_SECONDS, CHECK_SHARE * options.budget))
    ends = run.clock() + seconds
    with Trainings(run, seat=seat, ends=ends, heading=heading) as trainings:
        return compare_batch_sizes(trainings, configuration)
