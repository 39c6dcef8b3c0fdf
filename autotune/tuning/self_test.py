"""Does autotune find here what is so? A against A, and a planted delay, measured as a claim is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.data.errors import ArgumentError
from autotune.data.figures import Interval
from autotune.data.options import Options
from autotune.script import self_test_workload
from autotune.script.self_test_workload import TICK_SECONDS
from autotune.stats.intervals import process_prior
from autotune.tuning.confirmation import LeaderTrials
from autotune.tuning.events import Observer, count_interruptions, silent
from autotune.tuning.opening import Invocation, open_run, reference_to
from autotune.tuning.policy import gain_shown_in
from autotune.tuning.run import CLOSING_SECONDS
from autotune.tuning.verify import make_search_record, measure_in_passing, measure_pairs, measured_claim

PLANTED_SHARE = 0.2  # of a step
MINUTES = (2, 5, 10)


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """The findings of a self-test. Ratios are of speeds.

    Args:
        same: Of a configuration that is the baseline's but in name.
        planted: Of the configuration with the delay, by the delay and by what a step takes.
        found: The same as measured.
        instances: Fresh processes a side, of both measurements.
        gains: The smallest gain, as a share, that a run of so many minutes can show of a training that starts and
            varies as this one.
    """

    same: Interval
    planted: float
    found: Interval
    instances: tuple[int, int]
    gains: dict[int, float]

    @property
    def holds_one(self) -> bool:
        """True if no difference was found where there is none; by chance that fails once in twenty times."""
        return self.same.low <= 1 <= self.same.high

    @property
    def finds_delay(self) -> bool:
        """True if the delay was found, and its size is in the interval."""
        return self.found.low <= self.planted <= self.found.high < 1

    @property
    def passed(self) -> bool:
        """True if both are so."""
        return self.holds_one and self.finds_delay


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
        run, end = opened.run, budget - CLOSING_SECONDS
        step = _step_seconds([part.seconds / part.steps for part in run.records[0].slices])
        delayed = run.baseline.replace(num_parallel_calls=max(1, round(PLANTED_SHARE * step / TICK_SECONDS)))
        same, delay = (
            measure_pairs(make_search_record(configuration, opened.warm), opened, until=until)[0]
            for configuration, until in (
                (run.baseline.replace(deterministic=False), (run.clock() + end) / 2),
                (delayed, end),
            )
        )
        claims = [measured_claim(trials, opened) for trials in (same, delay)]
        ratios = [None if claim is None else claim.ratio for claim in claims]
        if ratios[0] is None or ratios[1] is None:
            raise ArgumentError(
                f"{budget:.0f} s are too short for two fresh processes a side, twice",
                hint=f"Give --self-test {math.ceil(2 * budget / 10) * 10}s.",
            )
        step = _step_seconds([pair.baseline.seconds / pair.baseline.steps for pair in delay.trial.pairs])
        planted = step / (step + TICK_SECONDS * int(delayed["num_parallel_calls"]))
        return SelfTest(
            same=ratios[0],
            planted=planted,
            found=ratios[1],
            instances=(len(same.measured), len(delay.measured)),
            gains=_gains_in(same, delay),
        )


def _step_seconds(steps: list[float]) -> float:
    return sum(steps) / len(steps)


def _gains_in(*measured: LeaderTrials) -> dict[int, float]:
    """Return the smallest gain that runs of some minutes can show, by what pairs of processes took and varied."""
    rounds = min(len(values) for trials in measured for values in trials.instances)
    prior = process_prior([trials.instances for trials in measured], rounds=rounds)
    seconds = [taken for trials in measured for taken in trials.trial.instance_seconds]
    pair_seconds = sum(seconds) / len(seconds)
    return {minutes: math.expm1(gain_shown_in(60.0 * minutes, pair_seconds, prior)) for minutes in MINUTES}
