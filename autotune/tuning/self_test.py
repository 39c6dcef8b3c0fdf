"""Does autotune find here what is so? A against A, and a planted delay, measured as a claim is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from autotune.data.errors import ArgumentError
from autotune.data.figures import Interval
from autotune.data.options import Options
from autotune.data.record import Phase, TrialRecord
from autotune.script import self_test_workload
from autotune.space.configuration import Configuration
from autotune.stats.intervals import process_prior
from autotune.tuning.confirmation import LeaderTrials
from autotune.tuning.events import Observer, count_interruptions, silent
from autotune.tuning.opening import Invocation, open_run, reference_to
from autotune.tuning.policy import gain_shown_in
from autotune.tuning.run import CLOSING_SECONDS
from autotune.tuning.verify import measure_in_passing, measure_pairs, measured_claim

PLANTED_SHARE = 0.2  # of a step
MINUTES = (2, 5, 10)


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """The findings of a self-test, as ratios of speeds."""

    same: Interval  # of a configuration that trains as the baseline does
    planted: float  # of the one with the delay, by what the delay and a step take
    found: Interval  # the same as measured
    instances: tuple[int, int]  # fresh processes a side, of both
    gains: dict[int, float]  # by minutes: the smallest gain, as a share, that a run of such a training can show

    @property
    def holds_one(self) -> bool:
        """True if no difference was found where there is none; by chance that fails once in twenty times."""
        return self.same.low <= 1 <= self.same.high

    @property
    def finds_delay(self) -> bool:
        """True if the delay was found, and its size is in the interval."""
        return self.found.low <= self.planted <= self.found.high < 1


def run_self_test(budget: float, *, observe: Observer = silent) -> SelfTest:
    """Measure A against A and a planted delay on this machine, for so many seconds.

    Raises:
        ArgumentError: The time is too short for two fresh processes a side of both.
        NoStableConfigurationError: TensorFlow cannot train here.
    """
    options = Options(budget=budget, fixed_batch=True)
    reference = reference_to(f"{self_test_workload.__name__}:workload")
    return measure_in_passing(reference, options, observe, self_test_with, reason_of=lambda _: "")


def self_test_with(invocation: Invocation) -> SelfTest:
    """Measure on real or simulated trials."""
    budget = invocation.options.budget
    with count_interruptions(invocation.observe, "stopping") as interruptions:
        opened = open_run(invocation, interruptions)
        opened.seat.end_baseline()
        run, end, tick = opened.run, budget - CLOSING_SECONDS, self_test_workload.TICK_SECONDS
        step = fmean(alone.seconds / alone.steps for alone in run.records[0].slices)
        ticks = max(1, round(PLANTED_SHARE * step / tick))
        same = run.baseline.replace(deterministic=False)  # of data whose order nothing changes
        delayed = run.baseline.replace(num_parallel_calls=ticks)
        ends = ((same, (run.clock() + end) / 2), (delayed, end))
        measured = [measure_pairs(_trains_as(run.records[0], side), opened, until=at)[0] for side, at in ends]
    claims = [measured_claim(trials, opened) for trials in measured]
    ratios = [claim.ratio for claim in claims if claim is not None and claim.ratio is not None]
    if len(ratios) < 2:
        raise ArgumentError(
            f"{budget:.0f} s are too short for two fresh processes a side of both measurements",
            hint=f"Give --self-test {math.ceil(2 * budget / 10) * 10}s.",
        )
    step = fmean(pair.baseline.seconds / pair.baseline.steps for pair in measured[1].trial.pairs)
    return SelfTest(
        same=ratios[0],
        planted=step / (step + ticks * tick),
        found=ratios[1],
        instances=(len(measured[0].measured), len(measured[1].measured)),
        gains=_smallest_gains(measured),
    )


def _trains_as(baseline: TrialRecord, configuration: Configuration) -> TrialRecord:
    """Return what a search would know of a configuration that starts and steps as the baseline does."""
    return baseline.model_copy(update={"trial": 1, "phase": Phase.SEARCH, "configuration": dict(configuration)})


def _smallest_gains(measured: list[LeaderTrials]) -> dict[int, float]:
    """Return the smallest gain that runs of some minutes can show, by how long pairs of processes took and varied."""
    rounds = min(len(values) for trials in measured for values in trials.instances)
    prior = process_prior([trials.instances for trials in measured], rounds=rounds)
    seconds = fmean(taken for trials in measured for taken in trials.trial.instance_seconds)
    return {minutes: math.expm1(gain_shown_in(60.0 * minutes, seconds, prior)) for minutes in MINUTES}
