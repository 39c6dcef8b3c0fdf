"""The fields of a recipe file: the configuration to use, the evidence for it, where it was measured."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, FiniteFloat, model_validator

from autotune.data.errors import ArgumentError, ConfigurationError
from autotune.data.facts import KnownWorkload, Machine
from autotune.data.figures import Check, Interval
from autotune.data.models import Amount, Count, Frozen, KnobValue, Many, Positive, Value
from autotune.data.options import Objective
from autotune.data.printable import masked_names
from autotune.data.record import Rule
from autotune.space.configuration import Configuration
from autotune.space.knobs import Device, knobs_on
from autotune.stats.deciding import EndedBy, Verdict

SCHEMA_VERSION = 1


def _checked_knobs(values: dict[str, KnobValue]) -> dict[str, KnobValue]:
    try:
        configuration = Configuration(values)
    except ConfigurationError as error:
        raise ValueError(f"{error.message.removeprefix('configuration: ')} ({error.hint})") from error
    missing = [
        [knob.name for knob in knobs_on(device) if knob.name not in configuration and not knob.of_workload]
        for device in Device
    ]
    if fewest := min(missing, key=len):
        raise ValueError(f"has no {', '.join(fewest)}")
    return dict(configuration)


Knobs = Annotated[dict[str, Value], AfterValidator(_checked_knobs)]
"""Every knob of a device: `apply` leaves a missing knob alone, and would run what was never measured."""


class Part(Frozen, strict=True):
    """A part of a recipe."""


class PeakMemory(Part):
    """Peak memory in bytes: of the process tree, and on the device (None without one)."""

    host: Count | None
    device: Count | None


NUMERICS_NOT_CHECKED = "numerics parity with float32 without XLA"


class Stability(Part):
    """The checks of the recommended configuration, and what was not checked."""

    checks: Many[Check]
    not_checked: Many[str]

    @property
    def unknown_numerics(self) -> str:
        """A sentence on numerics that could not be compared; empty if they were, or need not be."""
        gap = next((gap for gap in self.not_checked if gap.startswith(NUMERICS_NOT_CHECKED)), None)
        if gap is None:
            return ""
        reason = gap.removeprefix(NUMERICS_NOT_CHECKED).strip(" ()").removeprefix("cannot tell: ")
        return f"Its numerics could not be compared with float32 without XLA{reason and f' ({reason})'}."


class Confirmation(Part):
    """The measurement of the claim."""

    processes: Count = Field(description="Fresh processes a side.")
    pairs: Count = Field(description="Pairs of neighbouring slices.")
    leaders: Count = Field(description="Candidates that were confirmed. The interval allows for all of them.")
    confidence: FiniteFloat | None = Field(
        gt=0, lt=1, description="Of the interval, which is looked at after each process: all looks err in at most 5%."
    )
    pairing: Literal["alternating", "bracketed"] | None
    trials: Many[int] = Field(description="Numbers in the run's history: the baseline's trial, the leader's.")


FAILED_A_CHECK = "it failed a stability check"


def describe_speedup(speedup: Interval) -> str:
    """Return a speed-up in words; one without an interval is the search's."""
    return f"{speedup.shown()}{' (search only)' if speedup.low == speedup.high else ''}"


class BestCandidate(Part):
    """The best candidate, where none is recommended."""

    configuration: Knobs
    speedup: Interval = Field(
        description="As fresh processes have it; a hint without an interval where only the search measured it."
    )
    reason: str = Field(description="Why it is not recommended, with the figure.")

    @property
    def may_be_faster(self) -> bool:
        """True if it looked faster than the baseline and failed no stability check."""
        return self.speedup.value > 1 and not self.reason.startswith(FAILED_A_CHECK)


class Contribution(Part):
    """The gain of one change of the recommended configuration, measured by leaving it out."""

    knob: str
    gain: Interval = Field(description="The speed with the change over the speed without it; not part of the claim.")
    trial: Count = Field(description="Its number in the run's history.")


class Watch(Part):
    """A long look at the recommended configuration: one process trained without a pause (`--soak`)."""

    seconds: Amount
    throughput: Interval | None = Field(description="Samples per second; null where no slice ended.")
    checks: Many[Check]
    failure: str = Field("", description="How it failed; empty where it did not.")


class Evidence(Part):
    """The evidence for the recommendation."""

    verdict: Verdict = Field(description="With all but `faster`, the configuration is the baseline's.")
    ended_by: EndedBy
    min_gain: Amount = Field(description="Smallest gain that counts, as a share.")
    candidates: Count = Field(description="Configurations that were tried.")
    excluded_gain: Amount | None = Field(description="No candidate gains more, with 95% confidence; null if not known.")
    objective: Objective = Field("throughput", description="What the speed-up is of: samples per second, or per joule.")
    speedup: Interval = Field(description="Of the recommended configuration over the baseline.")
    throughput: Interval = Field(description="Samples per second of the recommended configuration in a long training.")
    baseline_throughput: Interval = Field(description="Samples per second of the baseline in the same minutes.")
    compile_seconds: Amount | None = Field(description="Trace and compile time of the recommended configuration.")
    baseline_compile_seconds: Amount | None
    examples_per_epoch: Count | None = Field(
        None, description="Examples that an epoch trained on with the recommended configuration; null if not known."
    )
    epoch_seen: Amount | None = Field(
        None,
        le=1.0,
        description="Share of an epoch within which the claim was measured; null for whole epochs, or if unknown.",
    )
    peak_memory_bytes: PeakMemory
    baseline_peak_memory_bytes: PeakMemory
    joules_per_sample: Amount | None = Field(None, description="Energy of the GPUs; null if they do not report it.")
    baseline_joules_per_sample: Amount | None = None
    input_wait_fraction: Amount | None = Field(description="Share of the step spent waiting for input.")
    baseline_limited_by: str | None = Field(None, description="What limits the baseline; null if that cannot be told.")
    limited_by: str | None = Field(None, description="The same of the recommended configuration.")
    advice: Many[str] = Field((), description="First what limits the training, or that this cannot be told.")
    stability: Stability
    confirmation: Confirmation
    smallest_gain_shown: Amount | None = Field(
        None, description="The smallest gain, as a share, that an undecided run could have shown; else null."
    )
    go_on_seconds: Amount | None = Field(
        None, description="A budget that may settle what the run left open; else null."
    )
    verify_seconds: Amount | None = Field(
        None, description="A budget in which `autotune verify` can judge the claim; null without a claim."
    )
    contributions: Many[Contribution] = Field(
        (), description="What single changes give, as far as the time allowed; they claim nothing."
    )
    watch: Watch | None = None

    @property
    def part_of_epoch(self) -> str:
        """The part of an epoch that the claim covers, in words; empty for all of it, or if unknown."""
        return "" if self.epoch_seen is None else f"the first {max(1, math.ceil(100 * self.epoch_seen))}% of an epoch"


class SameLoss(Part):
    """The speed-up to the baseline's losses with another batch size; not final accuracy."""

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


class BestConfiguration(Part):
    """The best configuration of one kind: of the same training, or of another batch size."""

    configuration: Knobs
    speedup: Interval = Field(
        description="Samples per second, over the baseline's; without an interval where only the search measured it."
    )
    throughput: Interval = Field(description="Samples per second in a long training.")
    confirmed: bool = Field(description="Else its speed-up is a hint, never a claim.")
    learning_rate_rule: LearningRateRule | None = Field(None, description="Null where the batches are the same.")


class RecipeWorkload(KnownWorkload, Part):
    """The workload that was trained."""

    args: Many[str] = Field((), description="`sys.argv[1:]` of its file.")
    train_samples: Count | None = Field(None, description="Of the long training; null when not known.")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The stored arguments of its file. Raises ArgumentError where one of them is masked."""
        if masked_names(self.args):
            raise ArgumentError(
                "the recipe stores no credentials, but its script got some",
                hint=f"Give the script's arguments again: -- {shlex.join(self.args)}",
            )
        return self.args


class CreatedBy(Part):
    """Provenance: which run of which version, when, with what limits."""

    autotune: str
    run: str
    created_at: str
    search_space: str
    trials: Count
    seed: int
    budget_seconds: Amount
    spent_seconds: Amount
    started_from: Many[str] = Field((), description="Earlier runs and recipes whose configurations were tried first.")


class RecipeContent(Part):
    """The content of a recipe file."""

    schema_version: Annotated[int, Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    configuration: Knobs
    baseline: Knobs
    evidence: Evidence
    candidate: BestCandidate | None = Field(None, description="What came closest, when nothing is recommended.")
    learning_rate_rule: LearningRateRule | None = Field(description="Null where the batches are the same.")
    same_training: BestConfiguration | None = Field(
        None, description="The fastest at the script's own batch size, if confirmed."
    )
    larger_batch: BestConfiguration | None = Field(
        None, description="The best with another batch size; null where none was tried."
    )
    machine: Machine
    workload: RecipeWorkload
    created_by: CreatedBy

    @model_validator(mode="after")
    def _same_knobs_everywhere(self) -> Self:
        sides = {"configuration": self.configuration, "baseline": self.baseline}
        for (has, knobs), (lacks, others) in itertools.permutations(sides.items()):
            if missing := ", ".join(name for name in knobs if name not in others):
                raise ValueError(f"{lacks} has no {missing}, and {has} has")
        return self

    @property
    def changes(self) -> Mapping[str, KnobValue]:
        """The knobs in which the configuration differs from the baseline."""
        return Configuration(self.configuration).differences(Configuration(self.baseline))

    @property
    def unit(self) -> str:
        """The unit of speeds: `samples`, or `updates` of a loop whose work per update varies."""
        return "samples" if self.workload.script is None else self.workload.script.unit
