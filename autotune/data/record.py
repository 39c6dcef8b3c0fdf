"""The record of a trial: its outcome, slices and figures. Written as `trials/NNNN/result.json`.

Times are in seconds, sizes in bytes, throughput in samples per second. A figure that was not measured is None.
Version history of the format: 1, the first.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, FiniteFloat, SerializerFunctionWrapHandler, model_serializer, model_validator

from autotune.data.facts import GpuUse
from autotune.data.figures import Bottleneck, Cause, Ceilings, Check, Interval, Profile
from autotune.data.models import Amount, Count, Frozen, Many, Number, Positive, Value


class Place(Frozen):
    """The host and devices on which the trials of a seat run."""

    seat: str
    host: str
    device: str = ""  # in words, such as `NVIDIA H200 GPU-5c…`; empty for all that there is
    devices: Many[str] = ()  # what stands in CUDA_VISIBLE_DEVICES; empty for all of the process's


class Outcome(enum.StrEnum):
    """The outcome of a trial."""

    OK = "ok"
    PRUNED = "pruned"  # ended early because it could not win any more; what was measured is kept
    OOM = "oom"
    INFERRED_OOM = "inferred_oom"  # not run, because a smaller one ran out of memory
    TIMEOUT = "timeout"
    CRASHED = "crashed"  # the process died by a signal, a fatal check, or without a word
    ERROR = "error"  # a Python exception in the user's code or in TensorFlow
    NONFINITE = "nonfinite"
    UNSTABLE = "unstable"
    OTHER_MODEL = "other_model"  # its process built another model than the baseline's
    INTERRUPTED = "interrupted"

    @property
    def measured(self) -> bool:
        """True if the trial's figures may be compared with those of others."""
        return self in (Outcome.OK, Outcome.PRUNED)


class Phase(enum.StrEnum):
    """The purpose of a trial."""

    BASELINE = "baseline"
    SEARCH = "search"
    CONFIRM = "confirm"  # fresh processes of a leader and the baseline, for the claim
    ABLATION = "ablation"  # a confirmed leader without one of its changes, beside that leader
    SOAK = "soak"  # a watch over the winner at the end of a run


class Pairing(enum.StrEnum):
    """The order in which slices of candidate and baseline were measured."""

    ALTERNATING = "alternating"  # both alive, taking turns, each frozen while it is not its turn
    BRACKETED = "bracketed"  # baseline, candidate, baseline again: both did not fit in memory together


WRITTEN_IF_ANY = ("gpus", "disturbed_by", "charged_seconds", "process", "in_blocks")


class OmitEmptyFields(Frozen):
    """Base of records that files hold by the thousand: omits the fields in `WRITTEN_IF_ANY` when empty."""

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = write(self)
        return {name: value for name, value in written.items() if value or name not in WRITTEN_IF_ANY}


class StepSeconds(Frozen):
    """The seconds per step within a slice, as quantiles over calls of the train function."""

    p50: Amount
    p90: Amount
    p99: Amount
    max: Amount


class Slice(OmitEmptyFields):
    """A short timed stretch of training.

    A slice may leave out stretches between what it times. Processor, foreign and stolen time are then the slice's part,
    in proportion.
    """

    seconds: Annotated[FiniteFloat, Field(ge=1e-9)]  # wall clock, without the freezes before and after
    steps: Number  # optimizer steps
    examples: Annotated[int, Field(ge=1, le=10**18)]
    epochs: Count  # whole epochs, boundaries included; 0 when timed by steps
    cpu_seconds: Amount  # processor time of the trial process, all threads
    step_seconds: StepSeconds
    loss: FiniteFloat | None = None  # the running training loss at its end; None where the model reports none
    host_bytes: Count | None = None  # memory of the trial's processes at its end, without pages of files
    device_bytes: Count | None = None  # what TensorFlow holds at its end on the GPU where it holds most
    charged_seconds: Amount = 0.0  # not in `seconds`: what further calls of `fit` cost for its examples
    at: FiniteFloat | None = None  # when it ended, in seconds of the run
    cores: Number | None = None  # that the process could use; `foreign_cpu_seconds` is counted over them
    foreign_cpu_seconds: Amount | None = None  # processor time of others, the kernel's for all included
    steal_seconds: Amount | None = None  # what the host of this virtual machine gave to others
    page_faults: Count | None = None  # pages that the kernel gave to the trial process
    trained_examples: Count | None = None  # by its end, in slices or not; None if epochs have unknown length
    retraces: Count | None = None  # traces and compilations since the slice before; None if unseen
    skipped_steps: Count | None = None  # steps with overflowed gradients; None without a loss scale
    gpus: Many[GpuUse] = ()  # that it trained on, in CUDA's order
    process: Count = 0  # of the trial, from 0; what a pair's slice came from is with the pair


class Pair(OmitEmptyFields):
    """Two neighbouring slices: the candidate's and the baseline's."""

    instance: Count = 0  # which process of the trial the candidate's slice came from, from 0
    baseline_first: bool
    baseline: Slice
    candidate: Slice
    disturbed: bool = False  # left out of the speed-up
    disturbed_by: Cause | None = None
    in_blocks: bool = False  # the two are not of the same moments


class Boundary(Frozen):
    """The cost between two epochs of a training that is timed by steps."""

    seconds: Amount  # an epoch's cost beyond steps and validation: a new iterator, a refilled shuffle buffer
    validation_seconds: Amount = 0.0
    seconds_per_example: Positive  # the pace at which both were measured
    # Slices leave out an epoch's last steps, which a full shuffle buffer feeds. `seconds` is smaller by what they save.
    tail_excluded: bool = False
    measured: bool = True  # False where an epoch takes longer than the budget: nothing is charged then

    def seconds_at(self, seconds_per_example: float) -> float:
        """Return the seconds between epochs at another training speed; validation scales with the speed."""
        return self.seconds + self.validation_seconds * seconds_per_example / self.seconds_per_example


class WarmFigures(Frozen):
    """The figures of a process that has warmed up."""

    timed_by: Literal["epochs", "steps"]
    settled: bool | None = None  # it is steady, not only at the cap; None if too few steps ran to tell
    warmup_seconds: FiniteFloat
    warmup_steps: Count | None = None  # steps that count in no slice
    compile_seconds: Amount
    epoch_overhead_seconds: Amount | None = None  # charged beyond its steps; None if an epoch has one call, or no end
    run_in_seconds: Amount = 0.0  # trained after each freeze before a slice begins
    boundary: Boundary | None = None  # measured here; None if taken over, or epochs are whole or endless
    state_steps: Count | None = None  # steps that it had trained when its state was saved; None if it was not


class ClosingFigures(Frozen):
    """The figures of a process at its end; None where it has not reported them."""

    peak_host_bytes: Count | None = None
    peak_device_bytes: Count | None = None
    input_wait_fraction: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    outside_fraction: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None  # of a call: outside of TensorFlow
    calls_per_epoch: Count | None = None  # of the train function, in the last epoch seen whole
    ceilings: Ceilings | None = None
    no_profile: str = ""  # why there is none, where one was asked for


class ProcessLog(WarmFigures, ClosingFigures):
    """The reports of a trial's process, once warm and at its end. Names are those of the pipe."""

    launch_seconds: Amount  # from asking for the process to the fork
    first_step_seconds: Amount  # from asking for the process, or from its survey, to the end of its first step
    # By how much that was shorter because it loaded what another process had compiled; None where none is shared.
    saved_seconds: Amount | None = None
    ready_seconds: Amount  # from asking for the process, or from its survey, to the steady state
    first_loss: FiniteFloat | None = None  # training loss after the first call
    filling_seconds: Amount = 0.0
    examples_per_epoch: Count | None = None
    validation_uncounted: bool | None = None


Rule = Literal["as is", "sqrt", "linear"]
"""The rule by which a learning rate scales with the batch size."""


class ContinuedTraining(Frozen):
    """Losses on a fixed probe, of trainings at the baseline's batch size and a leader's from the baseline's state."""

    not_measured: str = ""  # why there are none, in half a sentence
    needs_seconds: Amount | None = None  # that it should need, where there was too little time
    seconds: Amount = 0.0  # that it took of the budget
    after_steps: Count = 0  # that the baseline had trained when the trainings branched
    examples: Count = 0  # that each training has trained on at its last probe; probes are at equal distances
    baseline: Many[Many[FiniteFloat | None]] = ()  # by seed and probe; None where a loss was not finite
    # The same by rule of the learning rate.
    leader: dict[Rule, Many[Many[FiniteFloat | None]]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_equal_seeds(self) -> Self:
        if len({len(trainings) for trainings in (self.baseline, *self.leader.values())}) > 1:
            raise ValueError("its baseline and its leader were trained with different numbers of seeds")
        if self.examples < max(map(len, self.baseline), default=0):
            raise ValueError("it has too few examples between its probes")
        return self


class Standing(enum.StrEnum):
    """The standing of a leader's confirmation."""

    OPEN = "open"  # more pairs are to come
    OUT_OF_TIME = "out_of_time"  # the run ended before it was decided
    CONFIRMED = "confirmed"
    NOT_SHOWN = "not_shown"  # its error is spent, or it is surely slower than what counts
    UNSTABLE = "unstable"  # it failed, or failed a stability check


FAULT_SECONDS = 1e-6  # that the kernel takes for a page: half of it on bare metal, up to five times it in a VM
MANY_FAULTS = 0.02  # share of a step that page faults take
LOOK_SHARE = 0.2
"""Share of a leader's error at each look. Twelve looks at growing data err together about five times as often as one:
Pocock's constant boundary (Pocock 1977; Jennison and Turnbull 2000, table 2.1). `benchmarks/looks.py` checks it."""


class InterimAnalysis(Frozen):
    """The error that a leader's confirmation may spend; the interval is looked at after every pair of processes."""

    leader: Number  # which leader of the run this is; one that is planned anew counts again
    candidate: Number  # the leader's trial in the search
    error: Annotated[FiniteFloat, Field(gt=0, lt=1)]  # the chance to err that all these looks share
    most: Number  # processes a side after which the error is spent
    standing: Standing = Standing.OPEN
    reference: Number  # the trial of the baseline's processes beside it
    champion: Number | None = None  # the trial of the leader confirmed before, which it must beat
    confirmed_at_seconds: Amount | None = None  # when it was first confirmed, in seconds of the run

    @property
    def confidence(self) -> float:
        """The confidence of the interval at each look."""
        return 1 - LOOK_SHARE * self.error


class Ablation(Frozen):
    """A change that a trial leaves out of a confirmed leader, to see what the change gives; never a claim."""

    knob: str
    leader: Number  # the leader's trial in its confirmation
    reference: Number  # the trial of the leader's process that the slices stand beside
    gain: Interval | None = None  # the leader's speed over the speed without the change; None where that failed


class TrialRecord(Frozen):
    """All that is kept of one trial."""

    schema_version: Literal[1] = 1
    trial: Count  # the trial's number within its run; 0 is the baseline
    phase: Phase
    configuration: dict[str, Value]  # what was in force
    asked: dict[str, Value] | None = None  # what was asked for, where that differs
    outcome: Outcome
    reason: str = ""  # why it ended so, in one line; below it the next step and the user's own frames
    log_tail: str = ""  # the last lines of its log, where it failed
    started_at: str  # UTC, ISO 8601
    seconds: Amount  # from asking for the process to its end; the partner's turns count only in the search
    ended_at_seconds: Amount | None = None  # in seconds of the run, over all its invocations
    instances: Count = 1  # processes it was measured in
    seat: str | None = None  # where the last of them ran
    host: str | None = None
    device: str | None = None
    launch_seconds: Amount | None = None  # from asking for the process to the fork
    first_step_seconds: Amount | None = None  # from asking for it, or from its survey, to the end of its first step
    filling_seconds: Amount | None = None  # the part of that for filling caches in memory
    compile_seconds: Amount | None = None  # what the first calls took beyond steady ones
    warmup_seconds: Amount | None = None  # from the first step to the steady state
    warmup_steps: Count | None = None  # steps up to then, which count in no slice
    settled: bool | None = None  # most of its processes became steady; None if too few steps ran to tell
    run_in_seconds: Amount | None = None  # trained after each pause before a slice begins
    timed_by: Literal["epochs", "steps"] | None = None  # with steps, boundaries are charged in proportion
    epoch_overhead_seconds: Amount | None = None  # charged to an epoch beyond its steps
    boundary: Boundary | None = None  # as measured by its own process
    examples_per_epoch: Count | None = None  # None when endless or unknown
    validation_uncounted: bool | None = None  # if so, only the beginning of validation may be charged
    pairing: Pairing | None = None
    pairs: Many[Pair] = ()  # slices beside the baseline's
    slices: Many[Slice] = ()  # slices taken alone (the baseline's own)
    looks: Many[InterimAnalysis] = ()  # of a leader's confirmation; the last ones are in force
    checks: Many[Check] = ()  # a leader's stability checks at the last look, and its losses compared
    branch: ContinuedTraining | None = None  # of a leader with another batch size: how it learns beside the baseline
    ablation: Ablation | None = None  # of a trial that leaves a change out; it has no speed-up over the baseline
    processes: Many[ProcessLog] = ()  # those that became warm, in order; the figures below follow from them
    stopped_by: Literal["narrow", "cannot_win", "behind", "ahead", "time"] | None = None
    throughput: Interval | None = None  # of a long training, epoch boundaries included
    speedup: Interval | None = None  # candidate over baseline, from the pairs: throughput, or samples per joule
    scaling_efficiency: Positive | None = None  # throughput over replicas × one device's; None on one device
    peak_host_bytes: Count | None = None  # resident memory of the process tree
    peak_device_bytes: Count | None = None  # memory taken by TensorFlow on the device
    input_wait_fraction: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None  # of the step
    cpu_utilisation: Amount | None = None  # cores' worth of processor time while measured
    first_loss: FiniteFloat | None = None  # training loss after the first call, the median of its processes
    last_loss: FiniteFloat | None = None  # running training loss when a process ended, the same
    retraces: Count | None = None  # after the warm-up, all slices together
    skipped_steps: Count | None = None  # all slices together
    outside_fraction: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None  # of a call, outside of TensorFlow
    bottleneck: Bottleneck | None = None  # of an `ok` trial
    ceilings: Ceilings | None = None  # of the baseline and of leaders
    profile: Profile | None = None  # the same, where a full profile was asked for

    @property
    def is_repeat(self) -> bool:
        """True if it was not measured, because it is equivalent to another trial."""
        return self.outcome is Outcome.PRUNED and not self.pairs

    @property
    def start_seconds(self) -> float:
        """The seconds from asking for a process to the end of its first step, where it compiles everything itself."""
        saved = self.processes[-1].saved_seconds if self.processes else None
        return (self.first_step_seconds or 1.0) + (saved or 0.0)

    @property
    def own_slices(self) -> tuple[Slice, ...]:
        """The slices of this trial, without the baseline's turns beside it."""
        return (*(pair.candidate for pair in self.pairs), *self.slices)

    @property
    def measured_seconds(self) -> float:
        """The seconds of its own slices."""
        return sum(measured.seconds for measured in self.own_slices)

    @property
    def page_faults_per_step(self) -> float | None:
        """The pages that the kernel gives to the trial's process in a step; None where they were not counted."""
        counted = [(part.page_faults, part.steps) for part in self.own_slices if part.page_faults is not None]
        return sum(faults for faults, _ in counted) / sum(steps for _, steps in counted) if counted else None

    @property
    def faults_often(self) -> bool:
        """True if page faults take a part of its steps that matters; False where none were counted."""
        faults = sum(part.page_faults or 0 for part in self.own_slices)
        return faults * FAULT_SECONDS > MANY_FAULTS * self.measured_seconds


def baseline_trial(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the baseline's own trial; None if it cannot be read."""
    return next((record for record in records if record.phase is Phase.BASELINE), None)


def baseline_with_ceilings(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the baseline's record that knows its ceilings: the search's own, or that of a confirmation."""
    searched = baseline_trial(records)
    same = [record for record in records if searched and record.configuration == searched.configuration]
    return next((record for record in same if record.ceilings is not None), searched)


def reference_of(record: TrialRecord, records: Sequence[TrialRecord]) -> TrialRecord:
    """Return the record of the baseline, or leader, measured with a trial; the baseline's own trial if that is lost."""
    baseline = baseline_trial(records) or record
    if (left_out := record.ablation) is not None:
        return next((known for known in records if known.trial == left_out.reference), baseline)
    if record.phase is not Phase.CONFIRM:
        return baseline
    references = [
        looks.reference for known in records for looks in known.looks if record.trial in (known.trial, looks.champion)
    ]
    for known in reversed(records):
        is_own = not references and known.phase is Phase.CONFIRM and known.slices and known.trial <= record.trial
        if is_own or known.trial in references[-1:]:
            return known
    return baseline
