"""The answer of a run, made once of its recipe: all that terminal, page, JSON, notebook and tables show is in it."""

from __future__ import annotations

import math
from typing import Literal

from autotune.data.facts import ScriptFacts, Trains
from autotune.data.figures import Interval
from autotune.data.models import Amount, Frozen, Many
from autotune.data.printable import plural, rate_text, time_in_words
from autotune.data.record import Rule
from autotune.recipe.evidence import (
    BestConfiguration,
    LearningRateRule,
    PeakMemory,
    RecipeContent,
    Watch,
    describe_speedup,
)
from autotune.space.configuration import Configuration, format_value
from autotune.space.knobs import KNOBS, PRECISIONS
from autotune.stats.deciding import EndedBy, Verdict
from autotune.stats.same_loss import NOT_COMPARABLE, NOT_REACHED
from autotune.stats.stability import STEADY_WORK, THROTTLING

NOTHING_SHOWN = "the baseline: nothing faster was shown"
NOT_PROMISED = "Not promised of the other batch size: final accuracy, other schedules, later training."
UNUSED_SHARE, CLOSING_SECONDS = 0.05, 2.0  # that may be left of a budget that has ended
WORTH_A_LINE_SECONDS = 60.0  # of the user's training: a shorter one needs no tuning
LARGEST_BOUND = 9.0  # gain, as a share, above which a bound says nothing
CommandName = Literal["train", "edit", "other", "go on", "candidate", ""]
Kind = Literal["same training", "larger batch", "smaller batch", "baseline"]


class Choice(Frozen):
    """One of the two answers: the best of the same training, or of another batch size."""

    kind: Kind
    speedup: Interval | None  # over the baseline; None where it is the baseline
    said: Many[str]  # the figure with its unit, then what belongs to it
    recommended: bool


class Change(Frozen):
    """A knob in which the recommended configuration differs from the baseline."""

    knob: str
    baseline: str
    recommended: str
    gain: Interval | None  # the speed with the change over the speed without it, where that was measured


class Side(Frozen):
    """The figures of the baseline, or of the recommended configuration, as the claim has them."""

    throughput: Interval  # in samples, or updates, per second
    compile_seconds: Amount | None
    peak_memory: PeakMemory
    joules_per_sample: Amount | None


class TrainingTime(Frozen):
    """The length of the user's own training, before and after."""

    of: str  # `Your training of 28,740 samples`
    before_seconds: Amount
    after_seconds: Amount
    tuning_seconds: Amount
    note: str = ""  # its omissions, and claims of a part only


class Command(Frozen):
    """A next step: its name, a sentence, and the lines to copy that belong to it."""

    name: CommandName
    heading: str
    lines: Many[str] = ()


class Answer(Frozen):
    """The answer of a run. Surfaces format it, and compute nothing.

    `speedup` is the headline's figure, of which `unit` says what it is of; it is exactly 1 for the baseline.
    """

    verdict: Verdict
    headline: str
    speedup: Interval
    unit: str  # `sooner to the same losses`, `in samples/s`, `in samples per joule`
    rests_on: str  # how the claim was measured; empty without one
    diagnosis: str  # the limit of the training as it is, or that it is unknown
    recommended: Kind
    choices: Many[Choice]  # both answers; empty where no other batch size is known
    candidate: str  # what came closest, where nothing is recommended
    baseline_is: str  # how the baseline trains
    samples: str  # the unit of throughput: `samples` or `updates`
    baseline: Side
    after: Side
    changes: Many[Change]
    training: TrainingTime | None  # None where its length is not known
    caveats: Many[str]  # on how it learns, and what failed
    advice: Many[str]
    unchecked: Many[str]  # what was not reached or not checked
    commands: Many[Command] = ()  # none where the file of the recipe is not known


def answer_of(recipe: RecipeContent) -> Answer:
    """Make the answer of a recipe, without its commands."""
    evidence, rule, best = recipe.evidence, recipe.learning_rate_rule, recipe.candidate
    baseline, recommended = Configuration(recipe.baseline), Configuration(recipe.configuration)
    found, candidate, rests_on = None if rule is None else rule.same_loss, "", ""
    if evidence.verdict is Verdict.FASTER and recipe.changes:
        seeds = "" if found is None else f" and {found.seeds} seeds"
        rests_on = f"confirmed in {evidence.confirmation.processes} fresh processes a side{seeds}, 95% intervals"
    if best is not None:
        candidate = Configuration(best.configuration).describe(baseline)
        candidate += f": {describe_speedup(best.speedup)}; {best.reason}"
    speedup, unit = evidence.speedup, f"in {recipe.unit}/s"
    if evidence.objective == "energy":
        unit = "in samples per joule"
    elif found is not None:
        speedup, unit = found.speedup, "sooner to the same losses"
    gains = {known.knob: known.gain for known in evidence.contributions}
    return Answer(
        verdict=evidence.verdict,
        headline=_headline(recipe, speedup, unit),
        speedup=speedup,
        unit=unit,
        rests_on=rests_on,
        diagnosis=next(iter(evidence.advice), ""),
        recommended=kind_of(recommended, baseline),
        choices=_choices(recipe, baseline, recommended),
        candidate=candidate,
        baseline_is=_describe_baseline(recipe),
        samples=recipe.unit,
        baseline=Side(
            throughput=evidence.baseline_throughput,
            compile_seconds=evidence.baseline_compile_seconds,
            peak_memory=evidence.baseline_peak_memory_bytes,
            joules_per_sample=evidence.baseline_joules_per_sample,
        ),
        after=Side(
            throughput=evidence.throughput,
            compile_seconds=evidence.compile_seconds,
            peak_memory=evidence.peak_memory_bytes,
            joules_per_sample=evidence.joules_per_sample,
        ),
        changes=[
            Change(
                knob=name, baseline=format_value(baseline[name]), recommended=format_value(value), gain=gains.get(name)
            )
            for name, value in recipe.changes.items()
        ],
        training=_training_time(recipe),
        caveats=[*learning_caveats(recipe), *_warnings(recipe)],
        advice=evidence.advice[1:],
        unchecked=evidence.stability.not_checked,
    )


def kind_of(configuration: Configuration, baseline: Configuration) -> Kind:
    """Return which answer a configuration is of."""
    if configuration.update_size != baseline.update_size:
        return "larger batch" if configuration.update_size > baseline.update_size else "smaller batch"
    return "same training" if configuration.differences(baseline) else "baseline"


# ---------------------------------------------------------------------------------------------- the headline


def _headline(recipe: RecipeContent, speedup: Interval, unit: str) -> str:
    """Return the verdict in a sentence, with the figure that it rests on."""
    evidence = recipe.evidence
    within = evidence.part_of_epoch and f", within {evidence.part_of_epoch}"
    if evidence.verdict is Verdict.FASTER:
        if not recipe.changes:
            return "The baseline: your current settings"
        return f"{'Less energy' if evidence.objective == 'energy' else 'Faster'}: {speedup.shown()} {unit}{within}"
    tried = f"{plural(evidence.candidates, 'candidate') if evidence.candidates else 'no candidates'} tried"
    if evidence.verdict is Verdict.NO_SIGNIFICANT_GAIN:
        if evidence.ended_by is EndedBy.EXHAUSTED:
            tried += ", the search space is exhausted"
        where = "" if recipe.larger_batch is None else " at your batch size"
        found = f"no candidate could be measured{where}"
        if evidence.excluded_gain is not None:  # rounded up: a smaller bound would claim too much
            percent = math.ceil(round(100 * evidence.excluded_gain, 6))
            found = f"nothing tried{where} can be more than {percent}% faster"
            if evidence.objective == "energy":
                found = f"nothing tried can gain more than {percent}% in energy per sample"
            if evidence.excluded_gain > LARGEST_BOUND:
                found = "nothing tried was shown to be faster, and the figures vary too much to exclude a gain"
        return f"No significant gain: {found} ({tried}{within}). Keep your current settings."
    if evidence.verdict is Verdict.UNSTABLE:
        better = "more economical" if evidence.objective == "energy" else "faster"
        failed = f"every {better} candidate failed a stability check"
        return f"Unstable: {failed} ({tried}). Keep your current settings."
    if any(check.name == STEADY_WORK for check in evidence.stability.checks):
        why = "the speed of its steps changes as the training goes on, and brief trials cannot stand for all of it"
        return f"Undecided: {why} ({tried}). Keep your current settings."
    budget, spent = recipe.created_by.budget_seconds, recipe.created_by.spent_seconds
    ended = f"the remaining {budget - spent:.0f} s were too short for another trial"
    if budget - spent <= max(UNUSED_SHARE * budget, CLOSING_SECONDS):
        ended = "the budget ended"
    stopped = {EndedBy.INTERRUPTED: "the run was stopped", EndedBy.FAILED: "measuring could not continue"}
    sentence = f"Undecided: {stopped.get(evidence.ended_by, ended)} before the answer was settled ({tried})."
    if evidence.smallest_gain_shown is not None:
        if evidence.smallest_gain_shown > LARGEST_BOUND:
            return f"{sentence} The figures vary too much on this machine as it is now to show any gain."
        sentence += f" Only gains of {math.ceil(100 * evidence.smallest_gain_shown)}% or more could have been shown."
    return sentence


def _describe_baseline(recipe: RecipeContent) -> str:
    """Return how the baseline trains: what the claim is against, and what a recipe without changes stands for."""
    workload, size = recipe.workload, recipe.baseline["batch_size"]
    dropping = ", drop_remainder=True" if workload.drop_remainder else ""
    if workload.script is not None:
        whole = f", {recipe.baseline['global_batch']} per update" if "global_batch" in recipe.baseline else ""
        batches = "" if workload.script.work_varies else f", in batches of {size}{whole}"
        return f"{workload.name} as it is{batches}"
    data = f"dataset(config), batches of {size}," if workload.batched else f"dataset().batch({size}{dropping})"
    named = [
        f"{name}={format_value(value)}"
        for name, value in recipe.baseline.items()
        if value not in (None, KNOBS[name].default) and name != "batch_size"
    ]
    replicas = recipe.baseline.get("replicas", 1)
    on = "on one device" if replicas == 1 else f"on {replicas} devices"
    return f"model.fit on {data} {on}, {', '.join(named) or 'all else by default'}"


def _training_time(recipe: RecipeContent) -> TrainingTime | None:
    """Return the time of the user's training before and after; None where its length is not known."""
    evidence, workload = recipe.evidence, recipe.workload
    ends_early = "" if workload.train_samples is not None or workload.script is None else workload.script.ends_early
    samples = evidence.examples_per_epoch if ends_early else workload.train_samples
    if samples is None or not recipe.changes:
        return None
    script = workload.script or ScriptFacts(trains=Trains.FIT, baseline={})
    rates = evidence.baseline_throughput.value, evidence.throughput.value
    before, after = (script.total_seconds(samples, rate, evidence.examples_per_epoch) for rate in rates)
    writing = after - samples / rates[1]
    omitted = f"{time_in_words(writing)} of it for" if writing else "without the time of"
    notes = [f"{omitted} {', '.join(script.left_out)}"] if script.left_out else []
    notes += [f"if all of an epoch trains like {evidence.part_of_epoch}"] if evidence.part_of_epoch else []
    notes += [f"{ends_early} may end your training early, so no total is claimed"] if ends_early else []
    return TrainingTime(
        of="An epoch" if ends_early else f"Your training of {samples:,} samples",
        before_seconds=before,
        after_seconds=after,
        tuning_seconds=recipe.created_by.spent_seconds,
        note="; ".join(notes),
    )


# ------------------------------------------------------------------------------------------ both answers


def _choices(recipe: RecipeContent, baseline: Configuration, recommended: Configuration) -> list[Choice]:
    """Return both answers; none where no other batch size is known."""
    other, script = recipe.larger_batch, recipe.workload.script
    if other is None:
        return []
    configuration, advised = Configuration(other.configuration), kind_of(recommended, baseline)
    rule = other.learning_rate_rule
    found = None if rule is None else rule.same_loss
    size = f"batch {configuration.update_size}"
    rate = f"{describe_speedup(other.speedup)} in {recipe.unit}/s{'' if other.confirmed else ', not confirmed'}"
    if rule is not None and found is not None:
        # The losses of a loop are those of its own steps.
        losses = "training losses" if script is not None and script.trains is Trains.LOOP else "losses"
        of_losses = f"{losses} of the {found.examples:,} examples after the first {found.after_steps:,} steps"
        factor = describe_factor(rule.rule, rule.factor)
        said = [f"{how_soon(found.speedup)} to the same losses", f"{size}, learning rate {factor}", rate, of_losses]
    else:
        said = [rate, size, _describe_unmeasured(rule)]
    return [
        Choice(
            kind="same training",
            speedup=None if recipe.same_training is None else recipe.same_training.speedup,
            said=_describe_same(recipe, baseline),
            recommended=advised == "same training",
        ),
        Choice(
            kind=kind_of(configuration, baseline),
            speedup=other.speedup if found is None else found.speedup,
            said=said,
            recommended=advised in ("larger batch", "smaller batch"),
        ),
    ]


def _describe_same(recipe: RecipeContent, baseline: Configuration) -> list[str]:
    """Return the answer of the same training in words."""
    same, closest = recipe.same_training, recipe.candidate
    if same is not None:
        configuration = Configuration(same.configuration)
        effect = _describe_effect(recipe, configuration) or "nothing about learning changes"
        said = [f"{same.speedup.shown()} in {recipe.unit}/s", effect]
        return said if same.configuration == recipe.configuration else [*said, configuration.describe(baseline)]
    if closest is None or not closest.may_be_faster:
        return [NOTHING_SHOWN]
    candidate = Configuration(closest.configuration)
    if candidate.update_size != baseline.update_size:
        return [NOTHING_SHOWN]
    effect = _describe_effect(recipe, candidate)
    return ["the baseline; nothing faster is confirmed", *([f"the best so far: {effect}"] if effect else [])]


def _describe_effect(recipe: RecipeContent, configuration: Configuration) -> str:
    """Return a configuration's changes of the training besides its batch size; empty for none."""
    own, usual = (
        (PRECISIONS.index(str(side.get("precision", "float32"))), bool(side.get("tensor_float_32", False)))
        for side in (configuration, recipe.baseline)
    )
    lower = any(digits > before for digits, before in zip(own, usual, strict=True))
    precision = "" if own == usual else f"same batches, {'lower' if lower else 'higher'} precision"
    return "; ".join(filter(None, [precision, _describe_draws(recipe, configuration)]))


def _describe_draws(recipe: RecipeContent, configuration: Configuration) -> str:
    script = recipe.workload.script
    redraws = "" if script is None or not configuration.get("graph_step") else script.redraws
    return f"other random numbers of the script's seed ({redraws})" if redraws else ""


def how_soon(speedup: Interval) -> str:
    """Return a same-loss speed-up in words."""
    return f"{speedup.shown()} {'sooner' if speedup.value >= 1 else 'as soon'}"


def describe_doubts(other: BestConfiguration) -> str:
    """Return the unknowns of the answer with another batch size, in one line; empty where there are none."""
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


def learning_caveats(recipe: RecipeContent) -> list[str]:
    """Return the limits of the claim for the recommended precision or batch size, and what the script must change."""
    rule, script = recipe.learning_rate_rule, recipe.workload.script
    if rule is None:
        effect = _describe_effect(recipe, Configuration(recipe.configuration))
        return [f"{effect[0].upper()}{effect[1:]}."] if effect and recipe.larger_batch is None else []
    draws = _describe_draws(recipe, Configuration(recipe.configuration))
    said = [NOT_PROMISED]
    if rule.same_loss is None:
        size = Configuration(recipe.configuration).update_size
        said = [f"Compare the held-out loss of batch size {size} before a long training: {rule.not_measured}."]
    if script is not None and script.schedule is not None:
        said.append(
            f"The learning rate follows a {script.schedule} in steps, and the number of steps per epoch changes: "
            "scale its steps."
        )
    said += [f"{draws[0].upper()}{draws[1:]}."] if draws else []
    return said + [f"{change}." for change in (() if script is None else script.batch_notes)]


def _warnings(recipe: RecipeContent) -> list[str]:
    """Return failures and observations of the recommended configuration, and the findings of its watch."""
    stability, watch = recipe.evidence.stability, recipe.evidence.watch
    said = [f"Failed: {check.name}: {check.detail}" for check in stability.checks if not check.passed]
    said += [
        f"Note: {check.name}: {check.detail}"
        for check in stability.checks
        if check.name == THROTTLING and check.value and check.passed
    ]
    said += [stability.unknown_numerics] if stability.unknown_numerics and recipe.changes else []
    return said + ([] if watch is None else [_describe_watch(watch, recipe.unit)])


def _describe_watch(watch: Watch, unit: str) -> str:
    if watch.failure:
        return f"It failed while it trained without a pause (`--soak`): {watch.failure}."
    rate = "" if watch.throughput is None else f" at {rate_text(watch.throughput.value)} {unit}/s"
    failed = [check.detail for check in watch.checks if not check.passed]
    sound = "no memory leak and no hang"
    if not all(check.conclusive for check in watch.checks):
        sound = "no hang; it was too short to see whether memory grows"
    found = "; ".join(failed) if failed else sound
    return f"It trained for {watch.seconds:.0f} s without a pause{rate} (`--soak`): {found}."
