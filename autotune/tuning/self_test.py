"""Check that autotune measures correctly on this machine: A against A, and a planted delay."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from autotune.data.errors import BudgetError
from autotune.data.figures import Interval, LogInterval
from autotune.data.options import Options
from autotune.data.printable import first_line
from autotune.data.record import Pair, Phase
from autotune.script import self_test_workload
from autotune.stats.disturbance import load_of
from autotune.stats.intervals import process_prior
from autotune.tuning.confirmation import LeaderTrials
from autotune.tuning.events import Event, Observer, TrialBegan, TrialEnded, count_interruptions, silent
from autotune.tuning.policy import gain_shown_in
from autotune.tuning.run import CLOSING_SECONDS, Invocation, Run
from autotune.tuning.run_setup import open_run, reference_to
from autotune.tuning.verify import measure_pairs, measured_claim, run_in_temporary_directory

PLANTED_SHARE = 0.2  # of a step
MINUTES = (2, 5, 10)
SHOWN = {"deterministic": "the same training", "num_parallel_calls": "a planted delay"}
"""Names of the trials in lines of progress, by the knob in which they differ."""
SELF_TEST_CONFIDENCE = (
    0.999  # confidence of the interval that must contradict the known difference before autotune is said to be wrong
)
QUIET = 0.1  # largest share of the processors that others may take while it is said to be wrong


class Judgement(enum.StrEnum):
    """Result of measuring a known difference."""

    HOLDS = "holds"
    CANNOT_TELL = "cannot_tell"  # too uncertain, disturbed, or what happens by chance once in twenty times
    WRONG = "wrong"


@dataclass(frozen=True, kw_only=True)
class KnownDifference:
    """A measured ratio of speeds beside the true one."""

    true: float
    measured: Interval | None  # None before two fresh processes a side
    processes: int  # fresh ones a side
    judgement: Judgement


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """The findings of a self-test."""

    same: KnownDifference  # a configuration that trains as the baseline does
    delayed: KnownDifference  # the one with the delay
    others_share: float | None  # of the processors, that other programs took meanwhile; None if unknown
    gains: dict[int, float]  # by minutes: the smallest gain, as a share, that a run of such a training can show
    advice: str  # next step where one of them cannot be measured; else empty

    @property
    def fails(self) -> bool:
        """True if autotune is wrong here."""
        return Judgement.WRONG in (self.same.judgement, self.delayed.judgement)


def run_self_test(budget: float, *, observe: Observer = silent) -> SelfTest:
    """Measure A against A and a planted delay on this machine, for so many seconds.

    Raises:
        BudgetError: The time is too short for the baseline.
        NoStableConfigurationError: TensorFlow cannot train here.
    """
    options = Options(budget=budget, fixed_batch=True)
    reference = reference_to(f"{self_test_workload.__name__}:workload")
    try:
        return run_in_temporary_directory(reference, options, observe, self_test_with, reason_of=lambda _: "")
    except BudgetError as error:
        raise BudgetError(error.message, hint=f"Give {_longer(budget)}.", detail=error.detail) from error


def self_test_with(invocation: Invocation) -> SelfTest:
    """Measure on real or simulated trials."""

    def observe(event: Event) -> None:
        if isinstance(event, TrialBegan | TrialEnded):
            event = replace(event, changes=SHOWN.get(event.changes.partition("=")[0], event.changes))
        invocation.observe(event)

    budget = invocation.options.budget
    with count_interruptions(invocation.observe, "stopping") as interruptions:
        seat = open_run(replace(invocation, observe=observe), interruptions)
        seat.end_baseline()
        run, end, tick = seat.run, budget - CLOSING_SECONDS, self_test_workload.TICK_SECONDS
        step = fmean(alone.seconds / alone.steps for alone in run.records[0].slices)
        ticks = max(1, round(PLANTED_SHARE * step / tick))
        same = run.baseline.replace(deterministic=False)  # of data whose order nothing changes
        delayed = run.baseline.replace(num_parallel_calls=ticks)
        ends = ((same, (run.clock() + end) / 2), (delayed, end))
        trials = []
        for side, at in ends:  # which start and step as the baseline does
            known = {"trial": 1, "phase": Phase.SEARCH, "configuration": dict(side)}
            trials.append(measure_pairs(run.records[0].model_copy(update=known), seat, until=at)[0])
    return _judge_trials(trials, run, delay=ticks * tick, step=step, budget=budget)


def _judge_trials(trials: Sequence[LeaderTrials], run: Run, *, delay: float, step: float, budget: float) -> SelfTest:
    """Return the findings of A against A, and of what waits for `delay` seconds in each step."""
    same, delayed = trials
    planted = planted_ratio(delayed.trial.pairs, delay) or math.log(step / (step + delay))
    loads = [load_of(part) for side in trials for pair in side.trial.pairs for part in (pair.baseline, pair.candidate)]
    known = [load for load in loads if load is not None]
    others_share = fmean(known) if known else None
    quiet = others_share is None or others_share <= QUIET
    found = []
    for side, true, other in ((same, 0.0, planted), (delayed, planted, 0.0)):
        interval = measured_claim(side, run)
        sure = measured_claim(side, run, confidence=SELF_TEST_CONFIDENCE)
        judgement = judge_interval(interval, sure, true=true, other=other, quiet=quiet)
        ratio = None if interval is None else interval.ratio
        found.append(
            KnownDifference(true=math.exp(true), measured=ratio, processes=len(side.measured), judgement=judgement)
        )
    failure = next((side.failure for side in trials if side.failure is not None), None)
    advice = ""
    if Judgement.CANNOT_TELL in (side.judgement for side in found):
        why = "" if failure is None else f" (one of its trainings failed: {first_line(failure.reason)})"
        calm = "" if quiet else f" while nothing else runs: other programs took {others_share:.0%} of the processors"
        advice = f"Repeat it with {_longer(budget)}{calm}{why}."
    return SelfTest(
        same=found[0], delayed=found[1], others_share=others_share, gains=_smallest_gains(trials), advice=advice
    )


def _longer(budget: float) -> str:
    return f"--self-test {math.ceil(2 * budget / 10) * 10}s"


def planted_ratio(pairs: Sequence[Pair], delay: float) -> float | None:
    """Return the logarithm of the speed-up that a delay in each step must show, by what the baseline's steps took.

    It is the mean over processes, from the pairs that count, as the claim is. None without pairs.
    """
    taken: dict[int, list[float]] = {}
    for pair in pairs:
        if not pair.disturbed:
            sums = taken.setdefault(pair.instance, [0.0, 0.0])
            sums[0] += pair.baseline.seconds
            sums[1] += pair.baseline.steps
    steps = [seconds / count for seconds, count in taken.values()]
    return fmean(math.log(step / (step + delay)) for step in steps) if steps else None


def judge_interval(
    interval: LogInterval | None, sure: LogInterval | None, *, true: float, other: float, quiet: bool
) -> Judgement:
    """Judge a measurement by the true value; `sure` is its interval with a confidence of `SELF_TEST_CONFIDENCE`.

    An interval that also holds the `other` value is too wide to tell. Only a contradiction while it was `quiet` is
    autotune's own.
    """
    if interval is None or sure is None:
        return Judgement.CANNOT_TELL
    if interval.low <= true <= interval.high:
        return Judgement.CANNOT_TELL if interval.low <= other <= interval.high else Judgement.HOLDS
    is_excluded = not sure.low <= true <= sure.high
    return Judgement.WRONG if quiet and is_excluded else Judgement.CANNOT_TELL


def _smallest_gains(measured: Sequence[LeaderTrials]) -> dict[int, float]:
    """Return the smallest gain that runs of some minutes can show, by how long pairs of processes took and varied."""
    known = [trials for trials in measured if trials.instances]
    if not known:
        return {}
    rounds = min(len(values) for trials in known for values in trials.instances)
    prior = process_prior([trials.instances for trials in known], rounds=rounds)
    seconds = fmean(taken for trials in known for taken in trials.trial.instance_seconds)
    return {minutes: math.expm1(gain_shown_in(60.0 * minutes, seconds, prior)) for minutes in MINUTES}
