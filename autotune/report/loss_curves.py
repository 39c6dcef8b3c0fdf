"""Losses over seconds: of the training as it is, of the same training, and with another batch size. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune.data.record import TrialRecord, baseline_with_ceilings
from autotune.recipe.answers import Answer, describe_factor
from autotune.recipe.learning_rate import factor_of
from autotune.recipe.recipe import Recipe
from autotune.space.configuration import Configuration
from autotune.stats.deciding import Verdict
from autotune.stats.same_loss import ExamplesNeeded, Losses, examples_needed, probe_examples, whole_trainings

FEWEST_POINTS = 3


def average_losses(seconds: Sequence[float], trainings: Sequence[Losses]) -> list[dict[str, float]]:
    """Return a point for each probe, over seeds; none for a probe at which the loss of a seed was not finite."""
    points = []
    for place, at in enumerate(seconds):
        probed = [losses[place] for losses in trainings if place < len(losses)]
        finite = [loss for loss in probed if loss is not None]
        if finite and len(finite) == len(trainings):
            points.append({"seconds": at, "mean": float(np.mean(finite)), "low": min(finite), "high": max(finite)})
    return points


def draw_losses(records: Sequence[TrialRecord], recipe: Recipe, answer: Answer) -> dict[str, Any] | None:
    """Return what the losses are, their curves, and the gap that is claimed; None where the baseline has no losses.

    Seconds follow from examples by the speeds of the answer. Where no other batch size was trained for its losses, they
    are those of the baseline's slices.
    """
    rate, same, other = answer.baseline.throughput.value, recipe.same_training, recipe.larger_batch
    branches = [record for record in records if record.branch is not None and record.branch.baseline]
    wanted = [record for record in branches if other is not None and record.configuration == other.configuration]
    record = next(iter(wanted[-1:] or branches[-1:]), None)
    if record is None or record.branch is None:
        losses, (examples, trainings) = "training loss", _losses_of_slices(records)
    else:
        losses, examples = "loss on a fixed probe", probe_examples(record.branch)
        trainings, by_rule = whole_trainings(record.branch)

    def curve(kind: str, name: str, ratio: float, trainings: Sequence[Losses] = trainings) -> dict[str, Any]:
        points = average_losses([seen / (rate * ratio) for seen in examples], trainings)
        return {"kind": kind, "name": name, "points": points}

    curves = [curve("baseline", "as it is", 1.0)]
    if same is not None:
        curves.append(curve("same", "same training", same.speedup.value))
    if record is not None and record.branch is not None and record.speedup is not None and trainings:
        needed = examples_needed(record.branch)
        ends = {rule: [np.inf if losses[-1] is None else losses[-1] for losses in by_rule[rule]] for rule in by_rule}
        best = min(ends, key=lambda rule: float(np.mean(ends[rule])))
        rule = needed.rule if isinstance(needed, ExamplesNeeded) else best
        size, speedup = Configuration(record.configuration).update_size, record.speedup
        factor = describe_factor(rule, factor_of(rule, size / Configuration(recipe.baseline).update_size))
        ratio = other.speedup.value if other is not None and wanted else speedup.value
        curves.append(curve("other", f"batch {size}, learning rate {factor}", ratio, by_rule[rule]))
    curves = [drawn for drawn in curves if len(drawn["points"]) >= FEWEST_POINTS]
    if not curves or curves[0]["kind"] != "baseline":
        return None
    return {"losses": losses, "curves": curves, "gap": _gap(curves, answer)}


def _losses_of_slices(records: Sequence[TrialRecord]) -> tuple[list[float], list[Losses]]:
    """Return the examples and losses of the baseline's process with the most slices."""
    baseline, found = baseline_with_ceilings(records), dict[tuple[int, int], dict[float, float]]()
    for record in records:
        for part in record.slices if baseline and record.configuration == baseline.configuration else ():
            if part.loss is not None and part.trained_examples:
                found.setdefault((record.trial, part.process), {})[part.trained_examples] = part.loss
    longest = max(found.values(), key=len, default={})
    return sorted(longest), [[longest[examples] for examples in sorted(longest)]]


def _gap(curves: Sequence[dict[str, Any]], answer: Answer) -> dict[str, Any] | None:
    """Return the answer's speed-up at the lowest loss that both sides reach; None without a claim of time."""
    kind = {"same training": "same", "baseline": ""}.get(answer.recommended, "other")
    reached = next((curve["points"][-1]["mean"] for curve in curves if curve["kind"] == kind), None)
    if reached is None or answer.verdict is not Verdict.FASTER or answer.unit == "in samples per joule":
        return None
    seconds, means = ([point[name] for point in curves[0]["points"]] for name in ("seconds", "mean"))
    loss, ratio = max(means[-1], reached), answer.speedup
    before = float(np.interp(-loss, [-mean for mean in means], seconds))
    ends = {"after": before / ratio.value, "bounds": (before / ratio.high, before / ratio.low)}
    return {"loss": loss, "before": before, **ends, "text": f"{ratio.shown()} sooner"}
