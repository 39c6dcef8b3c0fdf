"""From the baseline to the recommendation, a change at a time: what each change gives by leaving it out. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.data.figures import Interval
from autotune.recipe.recipe import Recipe
from autotune.space.configuration import format_value

EXPLANATION = (
    "Each change was left out of the recommended configuration once. These figures are no part of the claim. Changes "
    "act together, so single gains do not multiply to the whole."
)
TOGETHER = "acting together"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step from the baseline to the recommendation."""

    name: str  # the change, as `knob=value`; of the last step what is left
    gain: Interval  # a factor
    begins_at: float  # the speed-up before the step: steps are multiplied

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
