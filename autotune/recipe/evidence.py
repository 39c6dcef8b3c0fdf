"""What a recommendation rests on: the models of a recipe's `evidence`, and the types that all its parts share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

from autotune.errors import ConfigurationError
from autotune.space.configuration import Configuration
from autotune.space.knobs import Device, KnobValue, Value, knobs_on
from autotune.stats.deciding import EndedBy, Verdict
from autotune.stats.intervals import Interval
from autotune.stats.stability import Check

NonNegative = Annotated[FiniteFloat, Field(ge=0)]
Count = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]  # bytes, samples; larger ones could not be divided or shown


def _checked_knobs(values: dict[str, KnobValue]) -> dict[str, KnobValue]:
    try:
        configuration = Configuration(values)
    except ConfigurationError as error:
        raise ValueError(f"{error.message.removeprefix('configuration: ')} ({error.hint})") from error
    lacking = [
        [each.name for each in knobs_on(device) if each.name not in configuration and not each.of_workload]
        for device in Device
    ]
    fewest = min(lacking, key=len)
    if fewest:
        raise ValueError(f"has no {', '.join(fewest)}")
    return dict(configuration)


Knobs = Annotated[dict[str, Value], AfterValidator(_checked_knobs)]
"""Every knob of one kind of device: `apply` leaves a missing knob alone, and would run what was never measured."""


class Part(BaseModel):
    """A part of a recipe. The docstrings below its fields are their descriptions in the JSON Schema."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class PeakMemory(Part):
    """Largest memory, in bytes: of the process tree, and on the device (None without one)."""

    host: Count | None
    device: Count | None


class Stability(Part):
    """What was checked of the recommended configuration, and what was not."""

    checks: Annotated[tuple[Check, ...], Field(fail_fast=True)]
    not_checked: Annotated[tuple[str, ...], Field(fail_fast=True)]


class Confirmation(Part):
    """How the claim was measured."""

    processes: Count
    """Fresh processes a side."""
    pairs: Count
    """Pairs of neighbouring slices."""
    leaders: Count
    """Candidates that were confirmed, one after another. The interval allows for all of them."""
    looks: Annotated[tuple[Count, ...], Field(fail_fast=True)]
    """Processes a side after which the result was to be looked at. The interval allows for all looks."""
    confidence: Annotated[FiniteFloat, Field(gt=0, lt=1)] | None
    """Of the interval: all looks at all leaders together err in at most 5%."""
    pairing: Literal["alternating", "bracketed"] | None
    trials: Annotated[tuple[int, ...], Field(fail_fast=True)]
    """Numbers of the trials in the run's history: the baseline's, then the leader's."""


class BestCandidate(Part):
    """What came closest, where it was not recommended."""

    configuration: Knobs
    speedup: Interval | None
    """As confirmed so far; null where too little was measured for an interval."""
    reason: str
    """Why it is not recommended, with the figure."""
    search_speedup: NonNegative | None = None
    """What it looked like in the search: a hint, never a claim."""


class Watch(Part):
    """A watch over the recommended configuration: one process trained without a pause (`--soak`)."""

    seconds: NonNegative
    throughput: Interval | None
    """Samples per second; null where it failed before its first slice ended."""
    checks: Annotated[tuple[Check, ...], Field(fail_fast=True)]
    failure: str = ""
    """How it failed; empty where it did not."""


class Evidence(Part):
    """What the recommendation rests on."""

    verdict: Verdict
    """With every verdict but `faster`, the configuration is the baseline's."""
    ended_by: EndedBy
    min_gain: NonNegative
    """Smallest gain that counts, as a share."""
    candidates: Count
    """Configurations that were tried."""
    excluded_gain: NonNegative | None
    """No candidate gains more than this share, with 95% confidence for all together; null where that is not known."""
    speedup: Interval
    """Of the recommended configuration over the baseline."""
    throughput: Interval
    """Samples per second of the recommended configuration in a long training."""
    baseline_throughput: Interval
    """Samples per second of the baseline in the same minutes."""
    compile_seconds: NonNegative | None
    """Trace and compile time of the recommended configuration."""
    baseline_compile_seconds: NonNegative | None
    break_even_samples: Count | None
    """Samples after which a longer compile time is earned back; 0 when it is not longer."""
    peak_memory_bytes: PeakMemory
    baseline_peak_memory_bytes: PeakMemory
    input_wait_fraction: NonNegative | None
    """Share of the step spent waiting for input."""
    advice: Annotated[tuple[str, ...], Field(fail_fast=True)] = ()
    """What limits the baseline and the recommendation, with figures: three sentences at most."""
    stability: Stability
    confirmation: Confirmation
    best_candidate: BestCandidate | None = None
    """What came closest, when nothing is recommended."""
    go_on_seconds: NonNegative | None = None
    """A budget with which `--resume` may settle an undecided run; null with the other verdicts."""
    watch: Watch | None = None
