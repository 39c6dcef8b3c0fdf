"""The two answers of a run: the fastest of the same training, and of another batch size with how it learns."""

from __future__ import annotations

from pydantic import Field

from autotune.data.figures import Interval
from autotune.data.models import Count, Positive
from autotune.data.record import Rule
from autotune.recipe.evidence import BestCandidate, Knobs, Part, describe_speedup
from autotune.space.configuration import Configuration
from autotune.space.knobs import PRECISIONS
from autotune.stats.same_loss import NOT_COMPARABLE, NOT_REACHED

NOTHING_SHOWN = "the baseline: nothing faster was shown"
NOT_PROMISED = "Not promised of the other batch size: final accuracy, other schedules, later training."


class SameLoss(Part):
    """How much sooner another batch size reaches the losses that the baseline reaches; not final accuracy."""

    speedup: Interval = Field(description="The baseline's time over the recommendation's, to the same losses.")
    examples_factor: Interval = Field(description="Examples that it needs, over the baseline's.")
    by_rule: dict[str, Positive | None] = Field(description="That factor for each rule; null if it reaches no loss.")
    examples: Count = Field(description="That each training trained on from where they branched.")
    after_steps: Count = Field(description="Steps of the baseline before that.")
    seeds: Count


class LearningRateRule(Part):
    """The learning rate of a configuration that trains other batches than the baseline."""

    batch_ratio: Positive = Field(description="Recommended batch size over the baseline's.")
    rule: Rule = Field("as is", description="That was tested best: `as is`, `sqrt` or `linear` in the ratio.")
    factor: Positive = Field(1.0, description="Of the learning rate, by that rule.")
    same_loss: SameLoss | None = Field(None, description="How it learns; null if that was not measured.")
    not_measured: str = Field("", description="Why not.")


class Answer(Part):
    """The best configuration of one kind: of the same training, or of another batch size."""

    configuration: Knobs
    speedup: Interval = Field(
        description="Samples per second, over the baseline's; without an interval where only the search measured it."
    )
    throughput: Interval = Field(description="Samples per second in a long training.")
    confirmed: bool = Field(description="Else its speed-up is a hint, never a claim.")
    learning_rate_rule: LearningRateRule | None = Field(None, description="Null where the batches are the same.")


def describe_answers(
    same: Answer | None,
    other: Answer | None,
    *,
    closest: BestCandidate | None,
    baseline: Configuration,
    recommended: Configuration,
    unit: str,
    losses: str,
) -> list[tuple[str, str]]:
    """Return both answers and the recommendation as headings and text; empty where no other batch size is known.

    `closest` came closest where nothing is recommended. `unit` is that of speeds, such as `samples`. `losses` is the
    word for the losses that are compared, such as `training losses`.
    """
    if other is None:
        return []
    size = Configuration(other.configuration).update_size
    heading = f"{'Larger' if size > baseline.update_size else 'Smaller'} batch"
    rule = other.learning_rate_rule
    found = None if rule is None else rule.same_loss
    not_confirmed = "" if other.confirmed else ", not confirmed"
    of_other = f"{describe_speedup(other.speedup)} in {unit}/s, batch {size}{not_confirmed}"
    if rule is not None and found is not None:
        how = (
            f"the {losses} of the {found.examples:,} examples after the first {found.after_steps:,} steps are reached "
            f"{how_soon(found.speedup)}"
        )
        of_other = f"{of_other}, learning rate {describe_factor(rule.rule, rule.factor)}"
    else:
        how = _describe_unmeasured(rule)
    advised = heading.lower()
    if recommended.update_size == baseline.update_size:
        advised = "same training" if recommended.differences(baseline) else "your current settings"
    return [
        ("Same training", _describe_same(same, closest, baseline)),
        (heading, of_other),
        ("", how),
        ("Recommended", advised),
    ]


def _describe_same(same: Answer | None, closest: BestCandidate | None, baseline: Configuration) -> str:
    """Return the answer of the same training in words."""
    if same is not None:
        configuration = Configuration(same.configuration)
        effect = describe_precision(configuration, baseline) or "nothing about learning changes"
        return f"{same.speedup.shown()}   {configuration.describe(baseline)}   {effect}"
    if closest is None or not closest.may_be_faster:
        return NOTHING_SHOWN
    candidate = Configuration(closest.configuration)
    if candidate.update_size != baseline.update_size:
        return NOTHING_SHOWN
    best = [
        f"{describe_speedup(closest.speedup)} {candidate.describe(baseline)}",
        describe_precision(candidate, baseline),
    ]
    return f"the baseline; nothing faster is confirmed, and the best so far is {', '.join(filter(None, best))}"


def describe_precision(configuration: Configuration, baseline: Configuration) -> str:
    """Return how the precision of a configuration differs from the baseline's; empty where it does not."""
    sides = [
        (PRECISIONS.index(str(side.get("precision", "float32"))), bool(side.get("tensor_float_32", False)))
        for side in (configuration, baseline)
    ]
    lower = any(own > usual for own, usual in zip(*sides, strict=True))
    return "" if sides[0] == sides[1] else f"same batches, {'lower' if lower else 'higher'} precision"


def how_soon(speedup: Interval) -> str:
    """Return a same-loss speed-up in words."""
    return f"{speedup.shown()} {'sooner' if speedup.value >= 1 else 'as soon'}"


def describe_doubts(other: Answer) -> str:
    """Return what is not known of the answer with another batch size, in one line; empty where all is."""
    doubts, rule = [], other.learning_rate_rule
    if not other.confirmed:
        size = Configuration(other.configuration).update_size
        doubts.append(f"batch {size} is not confirmed: {describe_speedup(other.speedup)}")
    if rule is None or rule.same_loss is None:
        doubts.append(_describe_unmeasured(rule))
    return "; ".join(doubts)


def _describe_unmeasured(rule: LearningRateRule | None) -> str:
    """Return that, and why, it is not known how another batch size learns."""
    if rule is None or not rule.not_measured:
        return "how it learns was not measured"
    why = rule.not_measured
    is_whole = why == NOT_REACHED or why.startswith(NOT_COMPARABLE)
    return why if is_whole else f"how it learns was not measured: {why}"


def describe_factor(rule: Rule, factor: float) -> str:
    """Return how a learning rate is scaled: `×8 (linear)`, or `as it is`."""
    return "as it is" if rule == "as is" else f"×{factor:.3g} ({rule})"
