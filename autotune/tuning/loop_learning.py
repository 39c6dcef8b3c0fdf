"""Compare how a leader with another batch size learns, where the script trains by a loop of its own.

Each training is a run of the script in a fork of its own: its start is paid for each seed and each rule.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from autotune.data.record import Branch, Outcome, Rule, TrialRecord
from autotune.recipe.learning_rate import RULES, factor_of, usual_rule
from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import LoopBranch
from autotune.script.loop_branch import NO_LOSS
from autotune.space.configuration import Configuration
from autotune.tuning.learning import (
    BRANCH_SEEDS,
    FEWEST_BRANCH_SEEDS,
    FINISHING,
    PROBES,
    STEP_SECONDS,
    NotMeasured,
    Trainings,
    batch_size_of,
    most_and_least,
    state_steps,
)
from autotune.tuning.run import Run

Curve = tuple[float | None, ...]

SUMMED = "the loss that the script's step returns grows with the batch size: return the batch's mean loss from it"
ALIKE = 1e-4  # relative: between the first losses of two trainings that see the same examples in the same order
SAME_TRAININGS = "the script trains alike with every seed, which does not tell how much its losses vary"


def branch_loop(trainings: Trainings, leader: TrialRecord) -> Branch:
    """Train the baseline and a leader with another batch size from the same state, for the losses of their steps.

    Raises:
        NotMeasured: There is no state to begin with, too little time, or the training has no such losses.
        Interrupted: The user stops the run.
    """
    run, steps = trainings.run, state_steps(trainings.run)
    if run.records[0].first_loss is None:
        raise NotMeasured(NO_LOSS)
    seeds, rules, examples = _affordable(trainings, leader)
    sides: list[Rule | None] = [None, *rules]  # None for the baseline
    curves: dict[Rule | None, list[Curve]] = {side: [] for side in sides}
    firsts: dict[Rule | None, list[float | None]] = {side: [] for side in sides}
    for seed, side in itertools.product(range(seeds), sides):
        try:
            curve, (first,) = _train(trainings, leader, side, seed=seed, examples=examples)
        except TrialFailed as failure:
            if failure.outcome is Outcome.TIMEOUT:
                break
            raise NotMeasured(failure.reason) from failure
        curves[side].append(curve)
        firsts[side].append(first)
    whole = min(map(len, curves.values()))
    if whole < FEWEST_BRANCH_SEEDS:
        raise NotMeasured("its losses did not come within the time there was")
    _refuse_unfit(curves[None], [firsts[None], firsts["as is"]], _batch_ratio(leader, run))
    return Branch(
        after_steps=steps,
        examples=examples,
        own_losses=True,
        baseline=tuple(curves[None][:whole]),
        leader={rule: tuple(curves[rule][:whole]) for rule in rules},
    )


def _train(
    trainings: Trainings, leader: TrialRecord, rule: Rule | None, *, seed: int, examples: int
) -> tuple[Curve, Curve]:
    """Return the losses of one training, of the leader by a rule or of the baseline, and its first loss alone."""
    run, of_leader = trainings.run, Configuration(leader.configuration)
    training = LoopBranch(
        state=str(run.state_file),
        seed=seed,
        scale=1.0 if rule is None else factor_of(rule, _batch_ratio(leader, run)),
        first_examples=max(batch_size_of(leader), run.baseline.batch_size),
        examples=examples,
        windows=PROBES,
    )
    windows, first = trainings.train(run.baseline if rule is None else of_leader, training)
    return tuple(windows), tuple(first)


def _batch_ratio(leader: TrialRecord, run: Run) -> float:
    return Configuration(leader.configuration).update_size / run.baseline.update_size


def _refuse_unfit(curves: Sequence[Curve], firsts: Sequence[Sequence[float | None]], batch_ratio: float) -> None:
    """Refuse losses that cannot be compared. Raises NotMeasured.

    Args:
        curves: Of the baseline.
        firsts: The first losses of the baseline and of the leader: both then have the same weights.
        batch_ratio: The leader's batch size over the baseline's.
    """
    starts = [curve[0] for curve in curves]
    finite = [start for start in starts if start is not None]
    if len(finite) == len(starts) and all(math.isclose(start, finite[0], rel_tol=ALIKE) for start in finite):
        raise NotMeasured(SAME_TRAININGS)
    sides = [[abs(loss) for loss in losses if loss] for losses in firsts]
    if all(sides):
        before, after = map(statistics.median, sides)
        if math.log(after / before) / math.log(batch_ratio) > 0.5:  # it would be 0, or 1 of sums
            raise NotMeasured(SUMMED)


def _affordable(trainings: Trainings, leader: TrialRecord) -> tuple[int, tuple[Rule, ...], int]:
    """Return seeds, rules and the examples of each training, as many as the time allows. Raises NotMeasured."""
    run, left = trainings.run, trainings.left()
    most, least = most_and_least(run.records[0], leader)
    # The learning rate is that of an optimizer of Keras; without one there is no other rule.
    every: tuple[Rule, ...] = RULES if run.loop_optimizer else RULES[:1]
    few: tuple[Rule, ...] = (RULES[0], usual_rule(run.loop_optimizer)) if run.loop_optimizer else every
    choices: list[tuple[int, tuple[Rule, ...]]] = [
        (BRANCH_SEEDS, every),
        (FEWEST_BRANCH_SEEDS, every),
        (FEWEST_BRANCH_SEEDS, few),
    ]
    for seeds, rules in choices:
        starts, per_example = _costs(run.records[0], leader, seeds * len(rules), seeds)
        held = int((left - starts) / per_example)
        if held >= least:
            return seeds, rules, min(held, most) // least * least
    starts, per_example = _costs(run.records[0], leader, FEWEST_BRANCH_SEEDS * len(few), FEWEST_BRANCH_SEEDS)
    raise NotMeasured(f"it takes about {starts + least * per_example:.0f} s, and {left:.0f} s were kept for it")


def loop_branch_seconds(baseline: TrialRecord, leader: TrialRecord) -> float:
    """Return what comparing the learning of two configurations takes at most."""
    most, _ = most_and_least(baseline, leader)
    starts, per_example = _costs(baseline, leader, BRANCH_SEEDS * len(RULES), BRANCH_SEEDS)
    return starts + most * per_example


def _costs(baseline: TrialRecord, leader: TrialRecord, of_leader: int, of_baseline: int) -> tuple[float, float]:
    """Return the seconds of all starts, and those per example of each training, for so many trainings of both sides."""
    starts = per_example = 0.0
    for record, count in ((baseline, of_baseline), (leader, of_leader)):
        own = STEP_SECONDS / batch_size_of(record) if record.throughput is None else 1 / record.throughput.value
        first = max(batch_size_of(baseline), batch_size_of(leader))  # read before the training branches
        starts += count * ((record.first_step_seconds or 1.0) + first * own)
        per_example += count * own
    return starts / FINISHING, per_example / FINISHING
