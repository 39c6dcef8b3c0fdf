"""The evidence of a recipe: the models of its `evidence`, and the types that all its parts share."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, FiniteFloat

from autotune.data.errors import ConfigurationError
from autotune.data.figures import Check, Interval
from autotune.data.models import Amount, Count, Frozen, KnobValue, Many, Value
from autotune.data.options import Objective
from autotune.space.configuration import Configuration
from autotune.space.knobs import Device, knobs_on
from autotune.stats.deciding import EndedBy, Verdict


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
    """What one change of the recommended configuration gives, by leaving it out."""

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
    break_even_samples: Count | None = Field(description="Samples that earn a longer compile time back, or 0.")
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
    baseline_limited_by: str | None = Field(None, description="The baseline's bottleneck; null if not known.")
    limited_by: str | None = Field(None, description="The bottleneck of the recommended configuration.")
    advice: Many[str] = Field((), description="What limits the training: three sentences at most.")
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
