"""The losses of trainings at two batch sizes, as the page draws them: means over seeds and their spread. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from autotune.data.printable import one_line
from autotune.data.record import TrialRecord
from autotune.recipe.answers import describe_factor
from autotune.recipe.learning_rate import factor_of
from autotune.space.configuration import Configuration
from autotune.stats.same_loss import (
    NOT_REACHED,
    ExamplesNeeded,
    Losses,
    examples_needed,
    probe_examples,
    whole_trainings,
)

MOST_COLOURS = 3  # of the rules that are not chosen


def average_losses(at: Sequence[float], trainings: Sequence[Losses]) -> list[dict[str, float]]:
    """Return a point for each probe; none for a probe at which the loss of a seed was not finite.

    A point has the examples trained since the branch, the mean over seeds, and the lowest and the highest loss of one.
    """
    points = []
    for place, examples in enumerate(at):
        probed = [losses[place] for losses in trainings if place < len(losses)]
        finite = [loss for loss in probed if loss is not None]
        if finite and len(finite) == len(trainings):
            mean = sum(loss / len(finite) for loss in finite)
            points.append({"examples": examples, "mean": mean, "low": min(finite), "high": max(finite)})
    return points


def loss_charts(records: Iterable[TrialRecord], baseline: Configuration | None) -> list[dict[str, Any]]:
    """Return a chart for each leader whose learning was compared with the baseline's, or was to be.

    A chart has a heading, what was found in a sentence, and curves; none where nothing was measured. The first curve is
    the baseline's. The `chosen` kind is of the learning-rate rule that needs fewest examples to the baseline's losses;
    none is chosen where no rule reaches them with every seed.
    """
    if baseline is None:
        return []
    return [_chart(record, baseline) for record in records if record.branch is not None]


def _chart(record: TrialRecord, baseline: Configuration) -> dict[str, Any]:
    branch, size = record.branch, Configuration(record.configuration).update_size
    assert branch is not None
    heading = f"Batch {size} beside {baseline.update_size} (trial {record.trial})"
    if branch.not_measured:
        return {"heading": heading, "found": f"Not measured: {one_line(branch.not_measured)}.", "curves": []}
    (own, by_rule), needed = whole_trainings(branch), examples_needed(branch)
    at = probe_examples(branch)
    curves = [_curve(f"batch {baseline.update_size}, the baseline", "baseline", at, own)]
    others = itertools.count()
    found = f"Batch {size}: {NOT_REACHED if isinstance(needed, ExamplesNeeded) else needed}."
    for rule, trainings in by_rule.items():
        rate = describe_factor(rule, factor_of(rule, size / baseline.update_size))
        is_chosen = isinstance(needed, ExamplesNeeded) and needed.rule == rule
        kind = "chosen" if is_chosen else f"other{min(next(others), MOST_COLOURS - 1)}"
        curves.append(_curve(f"batch {size}, learning rate {rate}", kind, at, trainings))
        if isinstance(needed, ExamplesNeeded) and is_chosen and (factor := needed.log_ratio.ratio) is not None:
            found = f"With the learning rate {rate}, it needs {factor.shown()} the examples of the baseline."
    branched = f"Both branched from the baseline after {branch.after_steps:,} steps"
    return {"heading": heading, "found": f"{branched}. {found}", "curves": curves if own else []}


def _curve(name: str, kind: str, at: Sequence[float], trainings: Sequence[Losses]) -> dict[str, Any]:
    return {"name": name, "kind": kind, "points": average_losses(at, trainings)}
