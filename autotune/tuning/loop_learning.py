"""Compare how a leader with another batch size learns, where the script trains by a loop of its own.

Each training is a run of the script in a fork of its own: its start is paid for each seed and each rule. All trainings
of a seed read the same examples in the same order. One of them has a learning rate of 0: its losses tell how hard the
examples of each window are, which would hide how losses fall.
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
    TooLittleTime,
    Trainings,
    batch_size_of,
    most_and_least,
    refuse_lost,
    state_steps,
)

Curve = tuple[float | None, ...]

NO_OPTIMIZER = "no optimizer of Keras updates the weights, so no learning-rate rule can be tried"
SUMMED = "the loss that the script's step returns grows with the batch size: return the batch's mean loss from it"
ALIKE = 1e-4  # relative: between the first losses of two trainings that see the same examples in the same order
SAME_TRAININGS = "the script trains alike with every seed, which does not tell how much its losses vary"


def branch_loop(trainings: Trainings, leader: TrialRecord) -> Branch:
    """Train the baseline and a leader with another batch size from the same state, for the losses of their steps.

    Raises:
        NotMeasured: There is no state to begin with, too little time, or the training has no such losses.
        Interrupted: The user stops the run.
    """
    run, steps, of_leader = trainings.run, state_steps(trainings.run), Configuration(leader.configuration)
    kept = trainings.left()
    if run.records[0].first_loss is None or not run.loop_optimizer:
        raise NotMeasured(NO_LOSS if run.loop_optimizer else NO_OPTIMIZER)
    seeds, rules, examples = _affordable(trainings, leader)
    ratio = of_leader.update_size / run.baseline.update_size
    sides = {"baseline": (run.baseline, 1.0), "frozen": (of_leader, 0.0)}  # with factors of the learning rate
    sides |= {rule: (of_leader, factor_of(rule, ratio)) for rule in rules}
    curves: dict[str, list[Curve]] = {side: [] for side in sides}
    firsts: dict[str, list[float | None]] = {side: [] for side in sides}
    for seed, side in itertools.product(range(seeds), sides):
        configuration, scale = sides[side]
        training = LoopBranch(
            state=str(run.state_file),
            seed=seed,
            scale=scale,
            first_examples=max(of_leader.batch_size, run.baseline.batch_size),
            examples=examples,
            windows=PROBES,
        )
        try:
            windows, (first,) = trainings.train(configuration, training)
        except TrialFailed as failure:
            if failure.outcome is Outcome.TIMEOUT:
                break
            refuse_lost(failure, run)
            raise NotMeasured(failure.reason) from failure
        curves[side].append(tuple(windows))
        firsts[side].append(first)
    whole = min(map(len, curves.values()))
    if whole < FEWEST_BRANCH_SEEDS:
        raise TooLittleTime(kept=kept)
    _refuse_unfit(curves["baseline"], [firsts["baseline"], firsts["frozen"]], ratio)
    comparable = {side: _without_difficulty(curves[side][:whole], curves["frozen"][:whole]) for side in sides}
    return Branch(
        after_steps=steps,
        examples=examples,
        batch_sizes=(run.baseline.batch_size, of_leader.batch_size),
        baseline=comparable["baseline"],
        leader={rule: comparable[rule] for rule in rules},
    )


def _without_difficulty(curves: Sequence[Curve], frozen: Sequence[Curve]) -> tuple[Curve, ...]:
    """Return losses less those of frozen weights on the same examples, at the mean level of those."""
    known = [loss for curve in frozen for loss in curve if loss is not None]
    level = statistics.fmean(known) if known else 0.0
    return tuple(
        tuple(
            None if loss is None or own is None else level + loss - own for loss, own in zip(curve, still, strict=True)
        )
        for curve, still in zip(curves, frozen, strict=True)
    )


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
    few: tuple[Rule, ...] = ("as is", usual_rule(run.loop_optimizer or ""))
    choices: list[tuple[int, tuple[Rule, ...]]] = [
        (BRANCH_SEEDS, RULES),
        (FEWEST_BRANCH_SEEDS, RULES),
        (FEWEST_BRANCH_SEEDS, few),
    ]
    for seconds, (seeds, rules) in itertools.product((trainings.planned(), left), choices):
        starts, per_example = _costs(run.records[0], leader, seeds, len(rules))
        held = int((seconds - starts) / per_example)
        if held >= least:
            return seeds, rules, min(held, most) // least * least
    starts, per_example = _costs(run.records[0], leader, FEWEST_BRANCH_SEEDS, len(few))
    raise TooLittleTime(kept=left, needs=starts + least * per_example)


def loop_branch_seconds(baseline: TrialRecord, leader: TrialRecord) -> float:
    """Return what comparing the learning of two configurations takes at most."""
    most, _ = most_and_least(baseline, leader)
    starts, per_example = _costs(baseline, leader, BRANCH_SEEDS, len(RULES))
    return starts + most * per_example


def _costs(baseline: TrialRecord, leader: TrialRecord, seeds: int, rules: int) -> tuple[float, float]:
    """Return the seconds of all starts, and those of all trainings for each example that one of them trains on."""
    starts = per_example = 0.0
    for record, count in ((baseline, seeds), (leader, seeds * (rules + 1))):  # the leader's weights are also frozen
        own = STEP_SECONDS / batch_size_of(record) if record.throughput is None else 1 / record.throughput.value
        first = max(batch_size_of(baseline), batch_size_of(leader))  # read before the training branches
        starts += count * ((record.first_step_seconds or 1.0) + first * own)
        per_example += count * own
    return starts / FINISHING, per_example / FINISHING
