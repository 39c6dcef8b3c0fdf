"""What is kept of a trial: its outcome, its slices, its figures. Written as `trials/NNNN/result.json`.

Times are in seconds, sizes in bytes, throughput in samples per second. What was not measured is None.
Version history of the format: 1, the first.

This module holds data only: no processes, no clocks, no TensorFlow.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from autotune.space.knobs import Value
from autotune.stats.disturbance import Disturbance
from autotune.stats.stability import Check

Seconds = Annotated[FiniteFloat, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class Outcome(enum.StrEnum):
    """How a trial ended."""

    OK = "ok"
    PRUNED = "pruned"
    """Ended early because it could not win any more; what was measured is kept."""
    OOM = "oom"
    INFERRED_OOM = "inferred_oom"
    """Not run, because a smaller one ran out of memory."""
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    """The process died by a signal, a fatal check, or without a word."""
    ERROR = "error"
    """A Python exception in the user's code or in TensorFlow."""
    NONFINITE = "nonfinite"
    UNSTABLE = "unstable"
    INTERRUPTED = "interrupted"

    @property
    def measured(self) -> bool:
        """Whether the trial's figures may be compared with others'."""
        return self in (Outcome.OK, Outcome.PRUNED)


class Phase(enum.StrEnum):
    """What a trial was for."""

    BASELINE = "baseline"
    SEARCH = "search"
    CONFIRM = "confirm"
    """Fresh processes of a leader and the baseline, for the claim."""
    SOAK = "soak"
    """A watch over the winner at the end of a run."""


class Pairing(enum.StrEnum):
    """How a candidate's slices were set against the baseline's."""

    ALTERNATING = "alternating"
    """Both alive, taking turns, each frozen while it is not its turn."""
    BRACKETED = "bracketed"
    """Baseline, candidate, baseline again: both did not fit in memory together."""


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StepSeconds(_Data):
    """Seconds per step within a slice, as quantiles over calls of the train function."""

    p50: Seconds
    p90: Seconds
    p99: Seconds
    max: Seconds


class Slice(_Data):
    """A short timed stretch of training.

    Args:
        seconds: Wall-clock length, the freeze before and after it not counted.
        steps: Optimizer steps taken.
        examples: Examples trained on.
        epochs: Whole epochs in it, boundaries included; 0 when timed by steps.
        cpu_seconds: Processor time that the trial process took, all threads; its part, as `foreign_cpu_seconds` is.
        step_seconds: Quantiles of the time per step.
        loss: The running training loss at its end, None where the model reports none.
        host_bytes: Memory of the trial's processes at its end that cannot be had back by reading files again.
        device_bytes: What TensorFlow holds at its end on the GPU where it holds most; None without one.
        at: When it ended, in seconds of the run.
        cores: Cores that the process could use; `foreign_cpu_seconds` is counted over them.
        foreign_cpu_seconds: Processor time that others took meanwhile, the kernel on behalf of all included. Where
            the slice leaves out stretches between what it times, its part, in proportion, of this and what follows.
        steal_seconds: What the host of this virtual machine gave to others meanwhile.
        throttled_seconds: How long quotas held the process's control groups back meanwhile, summed over cores.
        cpu_megahertz: Mean clock rate of the cores at its end.
        trained_examples: What its process had trained on by its end, most of its warm-up and what counts in no slice
            included (short epochs that show a boundary's cost are not); None where an epoch's length is unknown.
        retraces: How often the train function was traced or compiled again since the trial was warm or the slice
            before had ended; None where that could not be seen.
        skipped_steps: In how many steps a loss scale left the weights alone, because gradients had overflowed; None
            without a loss scale.
        standstills: In how many attempts at it, or at the ones that it was to follow on, the whole machine stood still.
            Those were thrown away, but for the last one that is allowed: where there are as many, this is it.
    """

    seconds: Annotated[FiniteFloat, Field(gt=0)]
    steps: Annotated[int, Field(ge=1)]
    examples: Annotated[int, Field(ge=1)]
    epochs: Annotated[int, Field(ge=0)]
    cpu_seconds: Seconds
    step_seconds: StepSeconds
    loss: FiniteFloat | None = None
    host_bytes: Bytes | None = None
    device_bytes: Bytes | None = None
    at: FiniteFloat | None = None
    cores: Annotated[int, Field(ge=1)] | None = None
    foreign_cpu_seconds: Seconds | None = None
    steal_seconds: Seconds | None = None
    throttled_seconds: Seconds | None = None
    cpu_megahertz: Annotated[FiniteFloat, Field(ge=0)] | None = None
    trained_examples: Count | None = None
    retraces: Count | None = None
    skipped_steps: Count | None = None
    standstills: Count = 0


class Pair(_Data):
    """Two neighbouring slices: the candidate's and the baseline's.

    Args:
        instance: Which process of the trial the candidate's slice came from, from 0.
        baseline_first: Which of the two ran first.
        disturbed: What disturbed it, None for nothing.
    """

    instance: Annotated[int, Field(ge=0)] = 0
    baseline_first: bool
    baseline: Slice
    candidate: Slice
    disturbed: Disturbance | None = None


class Boundary(_Data):
    """What lies between two epochs of a training that is timed by steps.

    Args:
        seconds: What an epoch costs beyond its steps without validation: a new iterator, a refilled shuffle buffer.
        validation_seconds: What its validation costs.
        seconds_per_example: The pace of training at which both were measured: validation scales with it.
        tail_excluded: Whether slices leave out an epoch's last steps, which a full shuffle buffer feeds. They are
            faster than the others; `seconds` is smaller by what they save.
    """

    seconds: Seconds
    validation_seconds: Seconds = 0.0
    seconds_per_example: Annotated[FiniteFloat, Field(gt=0)]
    tail_excluded: bool = False

    def seconds_at(self, seconds_per_example: float) -> float:
        """What an epoch costs beyond its steps, validation included, at another pace of training."""
        return self.seconds + self.validation_seconds * seconds_per_example / self.seconds_per_example


class Interval(_Data):
    """An estimate and its 95% confidence interval, `low <= value <= high`."""

    value: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat


class Standing(enum.StrEnum):
    """How a leader's confirmation stands."""

    OPEN = "open"
    """There are looks to come."""
    OUT_OF_TIME = "out_of_time"
    """The run ended before all looks were taken as planned, and the last one, taken then, did not decide."""
    CONFIRMED = "confirmed"
    NOT_SHOWN = "not_shown"
    """All looks were taken, and none showed that it is faster."""
    UNSTABLE = "unstable"
    """It failed, or broke a rule."""


class Looks(_Data):
    """When a leader's confirmation is looked at, and the error that may be made in it.

    A look at the result is another chance to err: looks are fixed when they are planned, and share one error.

    Args:
        leader: Which leader of the run this is, from 1; one that is planned anew counts again.
        candidate: The leader's trial in the search.
        error: The chance to err that all these looks share.
        after: Processes a side after which the result is looked at, ascending.
        standing: What they have shown.
        reference: The trial of the baseline's processes beside it.
        champion: The trial of the processes of the leader confirmed before, which it must beat; None without one.
    """

    leader: Annotated[int, Field(ge=1)]
    candidate: Annotated[int, Field(ge=1)]
    error: Annotated[FiniteFloat, Field(gt=0, lt=1)]
    after: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, fail_fast=True)]
    standing: Standing = Standing.OPEN
    reference: Annotated[int, Field(ge=1)]
    champion: Annotated[int, Field(ge=1)] | None = None

    @property
    def confidence(self) -> float:
        """Of the interval at each look."""
        return 1 - self.error / len(self.after)


class TrialRecord(_Data):
    """All that is kept of one trial.

    Args:
        trial: The trial's number within its run; 0 is the baseline.
        configuration: What was in force.
        asked: What was asked for, where that was another configuration; None elsewhere.
        instances: How many processes it was measured in.
        reason: Why it ended as it did, in one line; below it the next step and the user's own frames, where there are
            any. Empty for `ok`.
        log_tail: The last lines of its log, where it failed.
        started_at: UTC, ISO 8601.
        seconds: From asking for the process to its end, all instances together, the partner's turns included;
            of a confirmation's trials what starting them and their own slices took.
        ended_at_seconds: When it ended, in seconds of the run: what all its invocations had taken by then, by a clock
            that nobody can set.
        launch_seconds: From asking for the process to the fork having happened.
        first_step_seconds: From asking for the process to the end of the first train step.
        filling_seconds: What of that went into filling what the dataset keeps in memory (`.cache()`).
        compile_seconds: Trace and compile: what the first calls took beyond steady ones.
        warmup_seconds: From the first step to the steady state.
        warmup_steps: Steps up to then: they compile, or are not at the usual pace yet, and count in no slice.
        settled: Whether most of its processes had reached the steady state when they were measured; None where none
            was warm, or all ran too few steps to tell.
        run_in_seconds: What it trains after each pause before a slice begins.
        timed_by: `epochs` (whole ones) or `steps` (boundary cost added in proportion).
        epoch_overhead_seconds: What an epoch is charged beyond its steps.
        boundary: What lies between two epochs, measured by the trial's own process. None where epochs are timed whole
            or have no end, or where the boundary was taken over from the baseline.
        examples_per_epoch: None when endless or unknown.
        validation_uncounted: Whether the validation data does not say how long it is and counting took too long: where
            epochs are timed by steps, only its beginning is in `epoch_overhead_seconds`.
        pairs: Slices beside the baseline's.
        disturbed_pairs: What became of the pairs that were disturbed: `left_out` of the speed-up, or `used` where
            too few others remained in an instance; None where there are none.
        slices: Slices taken alone (the baseline's own).
        looks: When its confirmation is looked at; empty for all but leaders. The last ones are in force.
        checks: The stability rules at the last look, and what comparing losses has shown; empty for all but leaders.
        stopped_by: Why measuring stopped: `narrow`, `cannot_win`, `behind`, `ahead`, `time`, or None.
        throughput: Samples per second of a long training, epoch boundaries included.
        speedup: Ratio of throughputs, candidate over baseline, from the pairs.
        peak_host_bytes: Largest resident memory of the process tree.
        peak_device_bytes: Largest memory taken by TensorFlow on the device.
        input_wait_fraction: Share of the step spent waiting for input.
        cpu_utilisation: Cores' worth of processor time taken while measured.
        first_loss: Training loss at the end of the first call, the median of its processes.
        last_loss: Running training loss when a process ended, the same.
        retraces: How often the train function was traced or compiled again after the warm-up, all slices together.
        skipped_steps: How many steps a loss scale skipped, all slices together.
    """

    schema_version: Literal[1] = 1
    trial: Annotated[int, Field(ge=0)]
    phase: Phase
    configuration: dict[str, Value]
    asked: dict[str, Value] | None = None
    outcome: Outcome
    reason: str = ""
    log_tail: str = ""
    started_at: str
    seconds: Seconds
    ended_at_seconds: Seconds | None = None
    instances: Annotated[int, Field(ge=0)] = 1
    launch_seconds: Seconds | None = None
    first_step_seconds: Seconds | None = None
    filling_seconds: Seconds | None = None
    compile_seconds: Seconds | None = None
    warmup_seconds: Seconds | None = None
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    settled: bool | None = None
    run_in_seconds: Seconds | None = None
    timed_by: Literal["epochs", "steps"] | None = None
    epoch_overhead_seconds: Seconds | None = None
    boundary: Boundary | None = None
    examples_per_epoch: int | None = None
    validation_uncounted: bool | None = None
    pairing: Pairing | None = None
    pairs: Annotated[tuple[Pair, ...], Field(fail_fast=True)] = ()
    disturbed_pairs: Literal["left_out", "used"] | None = None
    slices: Annotated[tuple[Slice, ...], Field(fail_fast=True)] = ()
    looks: Annotated[tuple[Looks, ...], Field(fail_fast=True)] = ()
    checks: Annotated[tuple[Check, ...], Field(fail_fast=True)] = ()
    stopped_by: Literal["narrow", "cannot_win", "behind", "ahead", "time"] | None = None
    throughput: Interval | None = None
    speedup: Interval | None = None
    peak_host_bytes: Bytes | None = None
    peak_device_bytes: Bytes | None = None
    input_wait_fraction: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    cpu_utilisation: Annotated[FiniteFloat, Field(ge=0)] | None = None
    first_loss: FiniteFloat | None = None
    last_loss: FiniteFloat | None = None
    retraces: Count | None = None
    skipped_steps: Count | None = None

    @property
    def measured_seconds(self) -> float:
        """Seconds of timed slices of this trial, the baseline's turns beside it not counted."""
        return sum(pair.candidate.seconds for pair in self.pairs) + sum(each.seconds for each in self.slices)
