"""Charts of the page: losses over seconds, from one to the answer, the search space; and HTML from elements. Pure.

Text is always text, whoever wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, tostring

import numpy as np
from pydantic import computed_field

from autotune.data.figures import Interval
from autotune.data.models import Frozen, KnobValue
from autotune.data.printable import one_line
from autotune.data.record import Phase, TrialRecord, baseline_with_ceilings
from autotune.data.run_directory import RunRecord
from autotune.recipe.answer import Answer, describe_factor
from autotune.recipe.learning_rate import factor_of
from autotune.recipe.recipe import Recipe
from autotune.space.configuration import Configuration, format_value
from autotune.stats.deciding import Verdict
from autotune.stats.same_loss import ExamplesNeeded, Losses, examples_needed, probe_examples, whole_trainings

Child = Element | str | None
EXPLANATION = (
    "Each change was left out of the recommended configuration once. These figures are no part of the claim. Changes "
    "act together, so single gains do not multiply to the whole."
)
TOGETHER = "acting together"
FEWEST_POINTS = 3


def element(tag: str, *children: Child, **attributes: str | None) -> Element:
    """Return an element; None is left out. `class_` is the attribute `class`, `data_label` is `data-label`."""
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    made, last = Element(tag, given), None
    for child in children:
        if isinstance(child, Element):
            made.append(child)
            last = child
        elif child is not None and last is None:
            made.text = (made.text or "") + child
        elif child is not None and last is not None:
            last.tail = (last.tail or "") + child
    return made


def with_code(text: str) -> list[Child]:
    """Return text as children of an element: what stands in backticks is code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one of them has no partner
        return [text]
    return [element("code", part) if index % 2 else part for index, part in enumerate(parts)]


def to_html(elements: Iterable[Element]) -> str:
    """Return the elements as HTML, with all text escaped."""
    text = "\n".join(tostring(made, encoding="unicode", method="html") for made in elements)
    return text.encode("utf-8", "backslashreplace").decode()


class Spot(NamedTuple):
    """A value of a knob. It was not reached where it has neither a ratio nor a reason."""

    value: str
    ratio: float = 0.0  # the best speed-up of a trial with it
    trial: int | None = None  # that one
    why: str = ""  # it has none
    kinds: tuple[str, ...] = ()  # of `now` and `chosen`


def map_space(
    run: RunRecord, records: Sequence[TrialRecord], recommended: Mapping[str, KnobValue] | None
) -> dict[str, list[Spot]]:
    """Return the values of the knobs that vary, then what does not vary. `records`: with repeats."""
    if run.search_space is None or run.baseline is None:
        return {}
    left_out, mapped = dict(run.search_space.left_out), dict[str, list[Spot]]()
    for name, choices in run.search_space.choices.items():
        start, marks = f"{name}=", {"now": run.baseline, "chosen": recommended or {}}
        reasons = {key.removeprefix(start): left_out.pop(key) for key in [*left_out] if key.startswith(start)}
        values = {format_value(value): value for value in choices}
        best: dict[str, TrialRecord] = {}
        for record in records:
            if name not in record.configuration:
                continue
            value = format_value(record.configuration[name])
            asked = format_value((record.asked or record.configuration).get(name, record.configuration[name]))
            if asked != value:
                values.pop(asked, None)  # another value was in force
            values[value] = record.configuration[name]
            if _ratio(record):
                best[value] = max(best.get(value, record), record, key=_ratio)
            elif record.reason:
                reasons.setdefault(value, record.reason.splitlines()[0])
        numbers = all(type(value) is int for value in values.values())
        mapped[name], others = [], [value for value in reasons if value not in values]
        for value in [*(sorted(values, key=int) if numbers else values), *others]:
            kinds = tuple(kind for kind, of in marks.items() if name in of and format_value(of[name]) == value)
            spot = Spot(value, why=one_line(reasons.get(value, "")), kinds=kinds)
            if known := best.get(value):
                spot = spot._replace(ratio=_ratio(known), trial=known.trial, why="")
            mapped[name].append(spot)
    for why in dict.fromkeys(left_out.values()):
        mapped[", ".join(name for name in left_out if left_out[name] == why)] = [Spot("ruled out", why=one_line(why))]
    return mapped


def _ratio(record: TrialRecord) -> float:
    if record.phase is Phase.BASELINE:
        return 1.0
    return 0.0 if record.speedup is None else record.speedup.value


class Step(Frozen):
    """A step from the baseline to the recommendation."""

    name: str  # the change, as `knob=value`; the last step is the rest
    gain: Interval  # a factor
    begins_at: float  # the speed-up before the step: steps are multiplied

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ends_at(self) -> float:
        """The speed-up after the step."""
        return self.begins_at * self.gain.value


def waterfall(recipe: Recipe) -> Sequence[Step]:
    """Return the steps from 1 to a recipe's answer, the largest first; none where nothing is recommended.

    After them comes what the single changes do not explain: how they act together, and the changes that were not left
    out, which it names. The last is the effect of a larger batch on the examples that the same losses need.
    """
    if not recipe.changes:
        return ()
    steps, reached, whole = [], 1.0, recipe.evidence.speedup
    known_changes = [known for known in recipe.evidence.contributions if known.knob in recipe.changes]
    measured = sorted(known_changes, key=lambda known: -known.gain.value)
    for known in measured:
        name = f"{known.knob}={format_value(recipe.configuration[known.knob])}"
        steps.append(Step(name=name, gain=known.gain, begins_at=reached))
        reached *= known.gain.value
    left = whole.value / reached
    others = [name for name in recipe.changes if name not in {known.knob for known in measured}]
    name = f"{', '.join(others)} (not left out), {TOGETHER}" if others else TOGETHER
    if not steps:
        named = [f"{name}={format_value(value)}" for name, value in recipe.changes.items()]
        name = ", ".join(named) if len(named) <= 2 else f"{len(named)} changes together"
        steps.append(Step(name=name, gain=whole, begins_at=1.0))
    elif others or not math.isclose(left, 1.0, rel_tol=0.005):
        steps.append(Step(name=name, gain=Interval(value=left, low=left, high=left), begins_at=reached))
    rule = recipe.learning_rate_rule
    if rule is not None and rule.same_loss is not None:
        factor = rule.same_loss.examples_factor
        gain = Interval(value=1 / factor.value, low=1 / factor.high, high=1 / max(factor.low, 1e-3 * factor.value))
        name = f"the same losses need ×{factor.value:.2f} the examples"
        steps.append(Step(name=name, gain=gain, begins_at=whole.value))
    return steps


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
    """Return the name of the losses, their curves, and the claimed gap; None where the baseline has no losses.

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
