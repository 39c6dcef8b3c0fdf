"""What travels between tuner, template and trial, and how: framed JSON on a Unix socket, never pickles.

A frame is four bytes of length (big-endian) and that many bytes of JSON: one message of the models below. A
frame that is too long, cut short, or not one of the expected messages is a `ProtocolError`; nothing of
it is used.

This module may not import TensorFlow, Optuna or pandas: all three kinds of process load it.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import time
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    TypeAdapter,
    ValidationError,
)

from autotune.mistakes import first_mistake
from autotune.printable import LONGEST_MESSAGE, one_line
from autotune.record import Boundary, Outcome, Slice
from autotune.space.knobs import Value
from autotune.workloads.workload import WorkloadFacts

LARGEST_MESSAGE_BYTES = 4 << 20


class ProtocolError(Exception):
    """What came over the pipe is not a message; said in one line, whatever it was."""

    def __init__(self, what: str) -> None:
        super().__init__(one_line(what, longest=LONGEST_MESSAGE))


class ChannelClosed(Exception):
    """The other end is gone."""


Pid = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]
StartedByImport = Literal["runtime", "cuda", "threads"]
"""What no fork survives: TensorFlow's runtime, a device that was opened, threads of Python."""
"""A process, never a group or all processes, as 0 and negative numbers would be to `kill`."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# ---------------------------------------------------------------------------------------- to the template


class LossRuns(_Message):
    """Short trainings on recorded batches, for their losses alone, in place of a timed one.

    Args:
        folder: Where the batches are recorded: written first if it does not exist, read otherwise.
        recorded_batch_size: Examples in each of them; where it is not the configuration's they are batched anew.
        seeds: One training for each, from the weights that the seed gives.
        scales: Factors of the learning rate: all seeds with the first, then all with the second, and so on.
        most_steps: Steps of each training.
        seconds: No step of a training is begun after so long; all have as many steps as the first.
    """

    folder: str
    recorded_batch_size: Annotated[int, Field(ge=1)]
    seeds: Annotated[tuple[int, ...], Field(min_length=1, fail_fast=True)]
    scales: Annotated[tuple[Annotated[FiniteFloat, Field(gt=0)], ...], Field(fail_fast=True)] = (1.0,)
    most_steps: Annotated[int, Field(ge=1)]
    seconds: FiniteFloat


SEARCH_EPOCH_SECONDS = 1.0
CONFIRMATION_EPOCH_SECONDS = 5.0
"""Epochs up to this long are timed whole. Longer ones are timed by steps: they would leave few slices."""
SEARCH_WARMUP_SECONDS = 1.5
CONFIRMATION_WARMUP_SECONDS = 2.0
"""The usual warm-up ends after this long at the latest."""


class TrialRequest(_Message):
    """What a trial process needs to know.

    Args:
        configuration: A value for every knob that exists on the device.
        log: Absolute path of the file that takes the trial's stdout and stderr.
        examine: Check the dataset's elements and count them; later trials are told the count instead.
        examples: Examples per epoch where known from an earlier trial; None when endless or unknown.
        validation_examples: The same of validation data that does not say how long it is.
        validation_uncounted: Whether that took an earlier trial too long to count.
        endless: Whether the dataset is known to have no end.
        count_seconds: How long counting may take, of either.
        warmup_seconds: Usual cap on the warm-up after the first step.
        epoch_seconds: Epochs up to this long are timed whole.
        boundary: The baseline's, taken over instead of measured; None to measure it.
        losses: Nothing is timed; these trainings are run instead.
    """

    kind: Literal["trial"] = "trial"
    configuration: dict[str, Value]
    log: str
    examine: bool = True
    examples: int | None = None
    validation_examples: int | None = None
    validation_uncounted: bool = False
    endless: bool = False
    count_seconds: FiniteFloat = 5.0
    warmup_seconds: FiniteFloat = SEARCH_WARMUP_SECONDS
    epoch_seconds: FiniteFloat = SEARCH_EPOCH_SECONDS
    boundary: Boundary | None = None
    losses: LossRuns | None = None


class Sweep(_Message):
    """Kill a trial and whatever processes trials left behind."""

    kind: Literal["sweep"] = "sweep"
    pid: Pid


# -------------------------------------------------------------------------------------- from the template


class TemplateReady(_Message):
    """The template has imported everything.

    Args:
        workload: What it found; None when it imports afresh in each trial.
        started: What the user's module woke by being imported, or None.
    """

    kind: Literal["ready"] = "ready"
    workload: WorkloadFacts | None
    started: StartedByImport | None = None


class TemplateFailed(_Message):
    """The user's module could not be used, or TensorFlow could not be imported.

    Args:
        users: Whether the cause lies in the user's code.
    """

    kind: Literal["template_failed"] = "template_failed"
    message: str
    hint: str = ""
    detail: str = ""
    users: bool = True


class Forked(_Message):
    """A trial process exists."""

    kind: Literal["forked"] = "forked"
    pid: Pid


class Exited(_Message):
    """A trial process ended and was reaped; exactly one of `code` and `signal` is set."""

    kind: Literal["exited"] = "exited"
    pid: Pid
    code: int | None = None
    signal: int | None = None


# -------------------------------------------------------------------------------------------- to the trial


class Measure(_Message):
    """Train for about this long, and report the slice.

    Args:
        seconds: Of one slice.
        slices: How many to report, one right after the other: only after the last does the trial freeze.
    """

    kind: Literal["measure"] = "measure"
    seconds: FiniteFloat
    slices: Annotated[int, Field(ge=1)] = 1


class Finish(_Message):
    """Take the closing figures, report them, and end.

    Args:
        input_wait_seconds: How long the input-wait counterfactual may take; 0 for none.
    """

    kind: Literal["finish"] = "finish"
    input_wait_seconds: FiniteFloat = 0.0


# ------------------------------------------------------------------------------------------ from the trial


class Started(_Message):
    """The trial has built pipeline and model, and is about to train.

    Args:
        jit_compile: What the knob resolved to.
        examples: In the dataset; None when endless or not counted in time.
        examples_per_epoch: Of those an epoch trains on, fewer where the rest that fills no batch is dropped.
        validation_examples: Of validation data that does not say how long it is; None when not counted in time.
        validation_uncounted: Whether that is so.
        endless: Whether the dataset has no end.
        counting_seconds: What counting took, and filling what the dataset keeps in files: later trials do neither.
        filling_seconds: What filling took that the dataset keeps in memory, which each trial does.
        element: The dataset's element, in words.
        batch_ranks: How many axes each tensor of it has.
        parameters: Trainable and other weights, as a count.
        gpus: Names of the GPUs that TensorFlow sees.
        device_limit_bytes: What it may take of the one that it uses; None where CUDA does not tell.
        build: CUDA and cuDNN versions that TensorFlow was built with, where it was.
        set_by_dataset: Pipeline knobs that the workload's dataset has set itself, with what it has set.
        in_force: Knobs whose value in force differs from what was asked.
    """

    kind: Literal["started"] = "started"
    jit_compile: bool
    examples: int | None
    examples_per_epoch: int | None
    validation_examples: int | None = None
    validation_uncounted: bool = False
    endless: bool
    counting_seconds: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    filling_seconds: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    element: str
    parameters: int
    batch_ranks: Annotated[tuple[int | None, ...], Field(fail_fast=True)] = ()
    gpus: Annotated[tuple[str, ...], Field(fail_fast=True)] = ()
    device_limit_bytes: Annotated[int, Field(gt=0)] | None = None
    build: dict[str, str] = {}
    set_by_dataset: dict[
        Literal["data_autotune", "deterministic", "data_threads"], bool | Annotated[int, Field(ge=1)]
    ] = {}
    in_force: dict[str, Value] = {}


class FirstStep(_Message):
    """The first call of the train function has returned.

    Args:
        at: `time.monotonic()`, which all processes of a machine share.
    """

    kind: Literal["first_step"] = "first_step"
    at: FiniteFloat
    loss: FiniteFloat | None = None


class Ready(_Message):
    """The trial has warmed up, and is frozen until told to measure. Times in seconds.

    Args:
        settled: Whether the steady state was reached, not only the cap; None where too few steps ran to tell.
        warmup_steps: Steps of training that count in no slice, those that show a boundary's cost left out.
        epoch_overhead_seconds: What an epoch is charged beyond its steps. None where epochs have no end, or where whole
            epochs have a single call.
        run_in_seconds: What it trains after each freeze before a slice begins.
        boundary: What this process measured between two epochs. None where epochs are timed whole or have no end, or
            where the boundary was taken over.
        uncounted_seconds: How long a slice may take beyond what counts in it. Where steps are timed, an epoch may end
            within it, or a smaller last batch may be compiled for.
    """

    kind: Literal["trial_ready"] = "trial_ready"
    timed_by: Literal["epochs", "steps"]
    settled: bool | None
    warmup_seconds: FiniteFloat
    compile_seconds: Annotated[FiniteFloat, Field(ge=0)]
    epoch_overhead_seconds: Annotated[FiniteFloat, Field(ge=0)] | None
    call_seconds: Annotated[FiniteFloat, Field(gt=0)]
    epoch_seconds: FiniteFloat | None
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    run_in_seconds: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    boundary: Boundary | None = None
    uncounted_seconds: Annotated[FiniteFloat, Field(ge=0)] = 0.0


class SliceDone(_Message):
    """A slice was measured; after the last one that was asked for, the trial freezes itself."""

    kind: Literal["slice"] = "slice"
    slice: Slice


class LossCurves(_Message):
    """The loss of each step, by training; None where it was not finite.

    Args:
        curves: Empty where the model reports none; a single training is empty whose learning rate cannot be set.
        gpus: Names of the GPUs that TensorFlow sees.
    """

    kind: Literal["loss_curves"] = "loss_curves"
    curves: Annotated[
        tuple[Annotated[tuple[FiniteFloat | None, ...], Field(fail_fast=True)], ...], Field(fail_fast=True)
    ]
    gpus: Annotated[tuple[str, ...], Field(fail_fast=True)]


class Finished(_Message):
    """The trial's closing figures; where its input wait is asked for, once without that and then with it."""

    kind: Literal["finished"] = "finished"
    peak_host_bytes: int
    peak_device_bytes: int | None
    input_wait_fraction: FiniteFloat | None


class Failed(_Message):
    """The trial cannot go on.

    Args:
        outcome: `error`, `oom` or `nonfinite`.
        reason: One sentence.
        hint: The next step, where there is one.
        detail: The user's own frames of the traceback.
        input_error: Whether the workload itself is at fault, whatever the configuration.
    """

    kind: Literal["failed"] = "failed"
    outcome: Outcome
    reason: str
    hint: str = ""
    detail: str = ""
    input_error: bool = False


ToTemplate = Annotated[TrialRequest | Sweep, Field(discriminator="kind")]
FromTemplate = Annotated[TemplateReady | TemplateFailed | Forked | Exited, Field(discriminator="kind")]
ToTrial = Annotated[Measure | Finish, Field(discriminator="kind")]
FromTrial = Annotated[
    Started | FirstStep | Ready | SliceDone | LossCurves | Finished | Failed, Field(discriminator="kind")
]

to_template: TypeAdapter[TrialRequest | Sweep] = TypeAdapter(ToTemplate)
from_template: TypeAdapter[TemplateReady | TemplateFailed | Forked | Exited] = TypeAdapter(FromTemplate)
to_trial: TypeAdapter[Measure | Finish] = TypeAdapter(ToTrial)
from_trial: TypeAdapter[Started | FirstStep | Ready | SliceDone | LossCurves | Finished | Failed] = (
    TypeAdapter(FromTrial)
)


Received = TypeVar("Received")


class Channel(Generic[Received]):
    """One end of a socket that carries framed messages.

    Args:
        end: A connected stream socket; the channel owns it.
        expected: The messages that may come in.
    """

    def __init__(self, end: socket.socket, expected: TypeAdapter[Received]) -> None:
        self._socket = end
        self._expected = expected
        self._buffer = bytearray()  # of the next message only: what follows stays in the socket
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        """The socket's descriptor, for `select`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end, and descriptors that came with a message that was never whole."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        self._socket.close()

    def send(self, message: BaseModel, descriptors: tuple[int, ...] = ()) -> None:
        """Send one message, and open file descriptors along with it.

        Raises:
            ChannelClosed: The other end is gone.
        """
        body = message.model_dump_json().encode()
        frame = struct.pack(">I", len(body)) + body
        try:
            if descriptors:
                sent = socket.send_fds(self._socket, [frame[:4]], list(descriptors))
                self._socket.sendall(frame[sent:])
            else:
                self._socket.sendall(frame)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_seconds: float | None = None) -> Received:
        """The next message.

        Args:
            timeout_seconds: How long to wait; None waits for ever.

        Raises:
            TimeoutError: Nothing whole came in time.
            ChannelClosed: The other end is gone.
            ProtocolError: What came is not one of the expected messages.
        """
        message, descriptors = self.receive_with_descriptors(timeout_seconds)
        for descriptor in descriptors:
            os.close(descriptor)
        return message

    def receive_with_descriptors(self, timeout_seconds: float | None = None) -> tuple[Received, list[int]]:
        """The next message, and the descriptors that came with it. Raises as `receive` does."""
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while missing := self._missing_bytes():
            self._fill(missing, deadline)
        body = bytes(self._buffer[4:])
        self._buffer.clear()
        descriptors, self._descriptors = self._descriptors, []
        try:
            return self._expected.validate_json(body), descriptors
        except ValidationError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ProtocolError(f"not a message: {first_mistake(error)[1]}") from error

    def _missing_bytes(self) -> int:
        if len(self._buffer) < 4:
            return 4 - len(self._buffer)
        (length,) = struct.unpack_from(">I", self._buffer)
        if length > LARGEST_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {length} bytes, at most {LARGEST_MESSAGE_BYTES} expected")
        return int(length) + 4 - len(self._buffer)

    def _fill(self, missing: int, deadline: float) -> None:
        """Read no further than the message's end, so that `select` and descriptors speak of the next one."""
        if self._socket.fileno() < 0:
            raise ChannelClosed("closed at this end")
        remaining = None if math.isinf(deadline) else 1000 * max(0.0, deadline - time.monotonic())
        poll = select.poll()  # `select` ends at descriptor 1,023
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(remaining):
            raise TimeoutError
        try:
            data, received, _, _ = socket.recv_fds(self._socket, min(missing, 1 << 16), 4)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        self._descriptors += received
        for descriptor in received:
            os.set_inheritable(descriptor, False)  # no business of programs that user code starts
        if not data:
            if self._buffer:
                raise ProtocolError("the last message was cut short")
            raise ChannelClosed("end of stream")
        self._buffer += data
