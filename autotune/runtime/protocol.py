"""The messages between driver, template and trial, and the pipe that carries them. Times are in seconds.

A message is JSON in a frame of `multiprocessing.connection`: reading it executes nothing. This module may not import
TensorFlow, Optuna or pandas, as all three kinds of process load it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from autotune.data.facts import KerasVersion, ScriptFacts, WorkloadFacts
from autotune.data.models import Amount, Count, Frozen, Many, Number, Positive, Value, first_mistake
from autotune.data.printable import LONGEST_MESSAGE, one_line
from autotune.data.record import Boundary, ClosingFigures, Outcome, Slice, WarmFigures
from autotune.space.variables import CacheUse

LARGEST_MESSAGE_BYTES = 4 << 20
REST_SECONDS = 5  # how long the rest of a message may take once it has begun to arrive


class ProtocolError(Exception):
    """Something that is no message came over the pipe. The text is one line, whatever came."""


class ChannelClosed(Exception):
    """The other end is gone."""


Pid = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]  # to `kill`, 0 and negative numbers are groups of processes
StartedByImport = Literal["runtime", "cuda", "threads"]  # what no fork survives


class LossRuns(Frozen):
    """Short trainings on recorded batches for their losses alone, instead of a timed training."""

    folder: str  # holds the batches: written if it does not exist, read otherwise
    recorded_batch_size: Number  # of these batches; they are batched anew if another size is needed
    seeds: Annotated[Many[int], Field(min_length=1)]  # each gives one training its weights
    most_steps: Number  # of each training
    # Limit on the start of each step, counted from the end of the first, which compiles. The other trainings have as
    # many steps.
    seconds: FiniteFloat


class BranchRuns(Frozen):
    """Trainings that branch from the baseline's state, for their losses on a fixed probe, instead of a timed training.

    The answer has all seeds of a scale of the learning rate before those of the next scale.
    """

    state: str  # file of the baseline's weights and optimizer
    folder: str  # holds the examples and the probe: written if it does not exist, read otherwise
    recorded_batch_size: Number  # of the batches that are recorded
    seeds: Annotated[Many[int], Field(min_length=1)]  # each gives one training its order of examples, and its dropout
    scales: Many[Positive] = (1.0,)  # factors of the learning rate
    examples: Number  # that each training trains on
    probe_examples: Number
    probes: Number  # after equal numbers of examples
    seconds: FiniteFloat  # limit on the start of each step, counted over all trainings together


Trainings = LossRuns | BranchRuns
"""Trainings for their losses alone."""


class Data(Frozen):
    """The facts about the dataset that the first trial finds out; later trials receive them."""

    examples: int | None  # in the dataset; None when endless or not counted in time
    validation_examples: int | None = None  # of validation data of unknown cardinality, if counted in time
    validation_uncounted: bool = False  # they were not counted in time
    endless: bool  # the dataset is infinite

    @classmethod
    def from_started(cls, started: Started) -> Data:
        """Return the facts that a trial has found."""
        return cls(**started.model_dump(include=set(cls.model_fields)))


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class TrialTiming:
    """The timing settings of a trial."""

    epoch_seconds: FiniteFloat  # epochs up to this long are timed whole: longer ones would leave few slices
    warmup_seconds: FiniteFloat  # the longest usual warm-up after the first step
    boundary: Boundary | None = None  # taken over from the baseline; None to measure it
    longest_boundary_epoch_seconds: Positive | None = None  # that of longer epochs is not measured; None for no limit
    save_state: str = ""  # file that takes the state of the training; empty for none
    compiled: str = ""  # folder of what XLA compiles; empty for none
    compiled_use: CacheUse = "written"


class TrialRequest(Frozen):
    """Run this trial."""

    kind: Literal["trial"] = "trial"
    configuration: dict[str, Value]  # every knob that exists on the device
    log: str  # absolute path of the file that takes the trial's stdout and stderr
    data: Data | None = None  # None to check the dataset's elements and count them
    count_seconds: FiniteFloat = 5.0  # how long each count may take
    timing: TrialTiming
    losses: Trainings | None = None  # run these trainings, and time nothing
    keras: KerasVersion = KerasVersion.KERAS_3  # that the workload trains with
    script: ScriptFacts | None = None  # of a script that is tuned as it is

    @property
    def folders(self) -> list[str]:
        """The directories that it writes to for real."""
        files = [self.log, *([self.losses.folder] if self.losses else [])]
        return [*map(os.path.dirname, files), *([self.timing.compiled] if self.timing.compiled_use == "shared" else [])]


class TemplateReady(Frozen):
    """The template has imported everything."""

    kind: Literal["ready"] = "ready"
    workload: WorkloadFacts | None  # None where each trial imports the workload afresh
    started: StartedByImport | None = None  # what importing the user's module has started
    waits: bool = False  # the process that has surveyed the script waits to go on as the first trial


class Surveying(Frozen):
    """The script that the template looks at has come so far."""

    kind: Literal["surveying"] = "surveying"
    text: str


class Forked(Frozen):
    """A trial process exists. The driver's end of its pipe follows."""

    kind: Literal["forked"] = "forked"
    pid: Pid
    ran_seconds: Amount = 0.0  # how long it has run up to its training before the request


class Exited(Frozen):
    """A trial process ended and was reaped."""

    kind: Literal["exited"] = "exited"
    pid: Pid
    status: int  # the exit status, or the negative number of the signal that killed it


class Measure(Frozen):
    """Train for `slices` slices without a pause, report each slice, then freeze."""

    kind: Literal["measure"] = "measure"
    seconds: FiniteFloat  # of one slice
    slices: Number = 1


class Finish(Frozen):
    """Take the closing figures, report them, and end."""

    kind: Literal["finish"] = "finish"
    input_wait_seconds: FiniteFloat = 0.0  # how long the input-wait counterfactual may take; 0 for none
    ceilings: bool = False  # also measure how fast the input and the step are alone
    profile: bool = False  # profile steps at the end, into `profile/` beside the log


class Started(Data):
    """The trial has built pipeline and model, and is about to train."""

    kind: Literal["started"] = "started"
    jit_compile: bool  # what the knob resolved to
    examples_per_epoch: int | None  # fewer than `examples` where an incomplete last batch is dropped
    counting_seconds: Amount = 0.0  # for counting and for filling caches in files: later trials do neither
    filling_seconds: Amount = 0.0  # for filling caches in memory, which each trial does
    element: str  # the dataset's element, in words
    batch_ranks: Many[int | None] = ()  # axes of each tensor of the element
    gpus: Many[str] = ()  # names of the GPUs that TensorFlow sees
    devices: Number = 1  # over which a strategy could spread the training
    device_limit_bytes: Number | None = None  # of the GPU in use; None if CUDA does not tell
    build: dict[str, str] = Field({})  # CUDA and cuDNN versions that TensorFlow was built with
    set_by_dataset: dict[str, Value] = Field({})  # knobs that the workload's dataset has set itself
    reads_changing: str = ""  # what a workload's dataset reads that may change during the training; empty for nothing
    not_knobs: Many[str] = ()  # settings that act on speed and are no knobs, as `NAME=value`
    in_force: dict[str, Value] = Field({})  # knobs whose value in force differs from what was asked


class FirstStep(Frozen):
    """The first call of the train function has returned."""

    kind: Literal["first_step"] = "first_step"
    loss: FiniteFloat | None = None
    parameters: Count = 0  # weights, trainable and other: some models are built by their first step
    shapes: Many[str] = ()  # of the trained ones, sorted: `(64, 10)`


class Ready(WarmFigures):
    """The trial has warmed up, and stays frozen until a `Measure`."""

    kind: Literal["trial_ready"] = "trial_ready"
    call_seconds: Positive
    epoch_seconds: FiniteFloat | None
    saving_seconds: Amount = 0.0  # for saving the state and timing writers, which later trials do not
    writing_seconds: Amount | None = None  # an epoch's, of writers that trials omit; None if not measured
    uncounted_seconds: Amount = 0.0  # how long a slice may take beyond what counts in it


class SliceDone(Frozen):
    """A slice was measured. After the last one that was asked for, the trial freezes itself."""

    kind: Literal["slice"] = "slice"
    slice: Slice


class LossCurves(Frozen):
    """The loss of each step, or at each probe of a branch, by training; None where it was not finite.

    There are no curves where the model reports no loss. A training that did not end in time is empty.
    """

    kind: Literal["loss_curves"] = "loss_curves"
    curves: Many[Many[FiniteFloat | None]]
    gpus: Many[str]  # names of the GPUs that TensorFlow sees
    parameters: Count = 0  # of the model, as in `FirstStep`
    shapes: Many[str] = ()
    # Of a branch: variables that change at each step, and by how much.
    counted: dict[str, Many[FiniteFloat]] = Field(default_factory=dict)


class Finished(ClosingFigures):
    """The trial's closing figures. They come twice where the input wait is asked for: first without it, then with."""

    kind: Literal["finished"] = "finished"


class Failed(Frozen):
    """The trial cannot continue, or the template cannot import the workload."""

    kind: Literal["failed"] = "failed"
    outcome: Outcome
    reason: str  # one sentence
    hint: str = ""  # the next step, where there is one
    detail: str = ""  # the user's own frames of the traceback
    input_error: bool = False  # the workload itself is at fault, whatever the configuration


Message = Annotated[  # to the template, from it, to the trial, from it; the last is from both
    TrialRequest
    | (TemplateReady | Surveying | Forked | Exited)
    | (Measure | Finish)
    | (Started | FirstStep | Ready | SliceDone | LossCurves | Finished | Failed),
    Field(discriminator="kind"),
]
_message: TypeAdapter[Any] = TypeAdapter(Message)


class Channel:
    """One end of a Unix socket that carries messages. It owns the socket."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", REST_SECONDS, 0))
        self._pipe = Connection(end.detach())

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._pipe.fileno()

    def close(self) -> None:
        """Close this end."""
        self._pipe.close()

    def send(self, message: Frozen, end: socket.socket | None = None) -> None:
        """Send a message, and after it the end of another socket. Raises `ChannelClosed`."""
        try:
            self._pipe.send_bytes(message.model_dump_json().encode())
            if end is not None:
                send_handle(self._pipe, end.fileno(), 0)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_seconds: float | None = None) -> Frozen:
        """Return the next message. Raises `TimeoutError`, `ChannelClosed`, `ProtocolError` for anything else."""
        try:
            body = self._pipe.recv_bytes(LARGEST_MESSAGE_BYTES) if self._pipe.poll(timeout_seconds) else None
        except (EOFError, OSError) as error:
            if isinstance(error, OSError) and error.errno in (None, errno.EAGAIN):  # too long, or cut short
                raise ProtocolError(one_line(f"damaged: {error}", longest=LONGEST_MESSAGE)) from error
            raise ChannelClosed(str(error) or "end of stream") from error
        if body is None:
            raise TimeoutError
        try:
            message: Frozen = _message.validate_json(body)
        except ValidationError as error:
            text = f"not a message: {first_mistake(error)}"
            raise ProtocolError(one_line(text, longest=LONGEST_MESSAGE)) from error
        return message

    def receive_end(self) -> socket.socket:
        """Return the end of a socket that follows a message. Raises `ChannelClosed`."""
        try:
            return socket.socket(fileno=recv_handle(self._pipe))
        except (EOFError, OSError, RuntimeError) as error:
            raise ChannelClosed(str(error) or "end of stream") from error
