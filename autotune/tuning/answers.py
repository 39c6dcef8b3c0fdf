"""The two answers of a run, of the same training and of another batch size, as its recipe gives them."""

from __future__ import annotations

import math
from dataclasses import replace

from autotune.data.figures import Interval
from autotune.data.record import Standing
from autotune.recipe.evidence import BestConfiguration, LearningRateRule, SameLoss
from autotune.recipe.learning_rate import factor_of
from autotune.space.configuration import Configuration
from autotune.tuning.knowledge import LearningResult
from autotune.tuning.loop import SearchResult
from autotune.tuning.run import Run
from autotune.tuning.state import Candidate, Leader, State


def best_of(leader: Leader | None, found: SearchResult, run: Run) -> BestConfiguration | None:
    """Return a confirmed leader as the recipe gives it."""
    if leader is None:
        return None
    record = run.records[leader.number]
    assert record.speedup is not None and record.throughput is not None
    return BestConfiguration(
        configuration=dict(Configuration(record.configuration)),
        speedup=record.speedup,
        throughput=record.throughput,
        confirmed=True,
        learning_rate_rule=learning_of(leader, found, run),
    )


def likely_larger_batch(found: SearchResult, run: Run) -> BestConfiguration | None:
    """Return the candidate with another batch size that should reach the same loss soonest, as far as is known."""
    state = found.state
    able = [known for known in stable_candidates(state) if not known.is_same_training and known.ratio > 0]
    best = max(able, key=state.promise, default=None)
    if best is None:
        return None
    leader, speedup = state.standing.get(best.number), measured_speedup(best, state)
    is_fresh = leader is not None and speedup.low < speedup.high
    throughput = run.records[leader.number if leader is not None and is_fresh else best.number].throughput
    if throughput is None:
        return None
    unmeasured = LearningRateRule(batch_ratio=best.batch_ratio, not_measured=_why_not_result(run))
    return BestConfiguration(
        configuration=dict(best.configuration),
        speedup=speedup,
        throughput=throughput,
        confirmed=False,
        learning_rate_rule=unmeasured if leader is None else learning_of(leader, found, run),
    )


def measured_speedup(candidate: Candidate, state: State) -> Interval:
    """Return a measured candidate's speed-up: by fresh processes where there are two, else the search's alone."""
    leader, ratio = state.standing.get(candidate.number), math.exp(candidate.ratio)
    fresh = None if leader is None or leader.ratio is None else leader.ratio.ratio
    return fresh or Interval(value=ratio, low=ratio, high=ratio)


def stable_candidates(state: State) -> list[Candidate]:
    """Return the measured candidates that failed no check, with the ratios of fresh processes where there are some."""
    return [replace(known, ratio=math.log(measured_speedup(known, state).value)) for known in state.stable]


def _why_not_result(run: Run) -> str:
    """Return why nothing is known of how a batch size learns, in half a sentence."""
    if run.objective != "time_to_loss":
        return f"the objective is {run.objective}"
    saved = any(log.state_steps is not None for log in run.records[0].processes)
    unsaved = "" if saved else "the state of the baseline's training could not be saved"
    return run.no_branches or unsaved or "no time was left for it"


def learning_of(leader: Leader, found: SearchResult, run: Run) -> LearningRateRule | None:
    """Return how a leader with another batch size learns, by its record; None for one with the baseline's."""
    confirmation = found.confirmations[leader.number]
    ratio = confirmation.trial.configuration.update_size / run.baseline.update_size
    if ratio == 1:
        return None
    result = found.learning.get(leader.number)
    if result is None or not isinstance(result, LearningResult):
        not_shown = "no gain was shown in fresh processes" if leader.standing is Standing.NOT_SHOWN else ""
        return LearningRateRule(batch_ratio=ratio, not_measured=result or not_shown or _why_not_result(run))
    needed = result.needed
    if result.speedup.ratio is None or needed.log_ratio.ratio is None:
        return LearningRateRule(batch_ratio=ratio, not_measured="its losses vary too much from seed to seed")
    return LearningRateRule(
        batch_ratio=ratio,
        rule=needed.rule,
        factor=factor_of(needed.rule, ratio),
        same_loss=SameLoss(
            speedup=result.speedup.ratio,
            examples_factor=needed.log_ratio.ratio,
            by_rule={rule: None if of is None else math.exp(of) for rule, of in needed.by_rule.items()},
            examples=result.branch.examples,
            after_steps=result.branch.after_steps,
            seeds=needed.log_ratio.count,
        ),
    )
