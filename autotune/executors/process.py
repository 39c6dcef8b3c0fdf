"""The tuner's side of templates and trials: start, talk, freeze, time-limit, kill, say how it ended.

This module may not import TensorFlow: it runs in the tuner process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

from autotune.errors import TrialProcessError, WorkloadError
from autotune.executors.executor import IN_SEARCH, Data, TrialFailed, TrialTiming, WarmUp
from autotune.executors.log import fatal_line, tail
from autotune.executors.no_memory import says_no_memory
from autotune.executors.standstill import LOOK_SECONDS as STANDSTILL_LOOK_SECONDS
from autotune.executors.standstill import Standstill
from autotune.executors.template_process import EXIT_SECONDS, Template, TemplateDied, signal_name
from autotune.recipe.apply import environment
from autotune.record import Outcome, Slice
from autotune.space.configuration import Configuration
from autotune.worker import messages
from autotune.worker.messages import ChannelClosed, ProtocolError, StartedByImport
from autotune.workloads.loading import fingerprint_of
from autotune.workloads.workload import WorkloadFacts, WorkloadReference

MOST_REPEATS = 3
"""Of a slice in which the machine stood still: where it always does, that is how it runs."""
FREEZE_SECONDS = 5.0
"""How long a process group may take to stop once it is told to."""

_DOING: dict[type, str] = {
    messages.Started: "while building data and model, and filling what the dataset keeps by .cache()",
    messages.FirstStep: "in the first step, which traces and compiles",
    messages.Ready: "while warming up",
    messages.SliceDone: "in a slice",
    messages.Finished: "over the closing figures",
    messages.LossCurves: "while training for loss curves",
}
"""What a trial does while each of its messages is waited for."""

Message = TypeVar("Message")


class TrialProcess:
    """A real trial: a fork of a template; see `live.LiveTrial`."""

    def __init__(self, template: Template, request: messages.TrialRequest) -> None:
        self.template = template
        self._log = Path(request.log)
        self._requested = time.monotonic()
        self._stood_still = 0.0
        self._standstill = Standstill()
        self._kernel_kills = _kernel_oom_kills()
        self.killed = False
        self.pid, end = template.fork(request)
        self._launch_seconds = time.monotonic() - self._requested
        self._channel = messages.Channel(end, messages.from_trial)

    # ------------------------------------------------------------------------------------------ LiveTrial

    def warm_up(self, timeout_seconds: float) -> WarmUp:
        """See `live.LiveTrial`. What a standstill took is not in the figures."""
        deadline = self._requested + timeout_seconds
        self._standstill = Standstill()
        started = self._expect(messages.Started, deadline)
        before_first = self._stood_still
        first = self._expect(messages.FirstStep, deadline)
        in_first = self._stood_still - before_first
        ready = self._expect(messages.Ready, deadline)
        after_first = self._stood_still - before_first - in_first
        self.freeze()
        return WarmUp(
            started=started,
            ready=ready.model_copy(
                update={
                    "compile_seconds": max(0.0, ready.compile_seconds - in_first),
                    "warmup_seconds": max(0.0, ready.warmup_seconds - after_first),
                }
            ),
            launch_seconds=self._launch_seconds,
            first_step_seconds=max(
                0.0, first.at - self._requested - before_first - in_first - started.counting_seconds
            ),
            ready_seconds=max(0.0, self._now() - self._requested - started.counting_seconds),
            first_loss=first.loss,
        )

    def measure(self, seconds: float, timeout_seconds: float) -> Slice:
        """See `live.LiveTrial`. A slice in which the machine stood still is measured again."""
        return self.measure_continuously(seconds, 1, timeout_seconds)[0]

    def measure_continuously(self, seconds: float, count: int, timeout_seconds: float) -> tuple[Slice, ...]:
        """See `live.LiveTrial`. Slices in which the machine stood still are measured again, all of them."""
        deadline = self._now() + timeout_seconds
        standstills = 0
        for _ in range(MOST_REPEATS):
            self._command(messages.Measure(seconds=seconds, slices=count))
            slices = [self._expect(messages.SliceDone, deadline).slice for _ in range(count)]
            self.freeze()
            if not self._standstill.found:
                break
            standstills += 1
        return tuple(each.model_copy(update={"standstills": standstills}) for each in slices)

    def finish(self, input_wait_seconds: float, timeout_seconds: float) -> messages.Finished:
        """See `live.LiveTrial`."""
        self._command(messages.Finish(input_wait_seconds=input_wait_seconds))
        deadline = self._now() + timeout_seconds
        peaks = self._expect(messages.Finished, deadline)
        if input_wait_seconds <= 0:
            self._end()
            return peaks
        try:
            answer = self._expect(messages.Finished, deadline)
        except TrialFailed:  # it is ended; what it told before stands
            return peaks
        self._end()
        return peaks if self._standstill.found else answer

    def loss_curves(self, timeout_seconds: float) -> messages.LossCurves:
        """See `live.LiveTrial`."""
        self._standstill = Standstill()
        answer = self._expect(messages.LossCurves, self._requested + timeout_seconds)
        self._end()
        return answer

    def kill(self) -> None:
        """See `live.LiveTrial`."""
        if not self.killed:
            self._end()

    # -------------------------------------------------------------------------------------------- freezing

    def freeze(self) -> None:
        """Wait until every thread of the trial has stopped.

        The trial stops its own process group right after each report, which no signal from here could do
        as soon. (Sending another from here would race with it: the trial, let go on, would stop again.)
        """
        deadline, looked_at = time.monotonic() + FREEZE_SECONDS, 0.0
        while not is_stopped(self.pid):
            if looked_at > deadline:  # not the time now: what keeps this process from looking blames nobody
                raise self._failed(Outcome.TIMEOUT, f"could not be frozen within {FREEZE_SECONDS:.0f} s")
            time.sleep(0.0005)
            looked_at = time.monotonic()

    def thaw(self) -> None:
        """Let the process group go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    # ------------------------------------------------------------------------------------------- messages

    def _command(self, command: messages.Measure | messages.Finish) -> None:
        self._standstill = Standstill()  # from before the trial goes on
        try:
            self._channel.send(command)
        except ChannelClosed as error:
            raise self._died() from error
        self.thaw()

    def _now(self) -> float:
        """Seconds since any moment, without those in which the machine stood still while this was waiting."""
        return time.monotonic() - self._stood_still

    def _receive(self, deadline: float) -> object:
        """The next message. Raises as `messages.Channel.receive` does."""
        try:
            while True:
                left = deadline - self._now()
                try:
                    return self._channel.receive(min(max(0.0, left), STANDSTILL_LOOK_SECONDS))
                except TimeoutError:
                    self._stood_still += self._standstill.look()
                    if not self.template.alive:  # a child of the trial's may hold its end of the pipe open
                        raise ChannelClosed("the template is gone") from None
                    if deadline <= self._now():
                        raise
        finally:
            self._stood_still += self._standstill.look()

    def _expect(self, kind: type[Message], deadline: float) -> Message:
        """The next message, which must be of this kind."""
        try:
            answer = self._receive(deadline)
        except TimeoutError as error:
            spent = self._now() - self._requested
            raise self._failed(
                Outcome.TIMEOUT,
                f"no answer in time {_DOING[kind]}, {spent:.1f} s after the trial was asked for",
            ) from error
        except ChannelClosed as error:
            raise self._died() from error
        except ProtocolError as error:
            raise self._failed(Outcome.CRASHED, f"sent something that is no report: {error}") from error
        if isinstance(answer, messages.Failed):
            raise self._failed(
                answer.outcome,
                answer.reason,
                hint=answer.hint,
                detail=answer.detail,
                input_error=answer.input_error,
            )
        if not isinstance(answer, kind):
            found = getattr(answer, "kind", answer)
            raise self._failed(Outcome.CRASHED, f"sent {found!r} out of turn {_DOING[kind]}")
        return answer

    def _failed(
        self, outcome: Outcome, reason: str, *, hint: str = "", detail: str = "", input_error: bool = False
    ) -> TrialFailed:
        self._end()
        return TrialFailed(
            outcome, reason, hint=hint, detail=detail, input_error=input_error, log_tail=tail(self._log)
        )

    def _died(self) -> TrialFailed:
        """The failure of a trial whose end of the pipe closed without a word."""
        exited = self.template.wait_exit(self.pid, EXIT_SECONDS)
        if exited is None:
            death = self.template.death()
            why = (
                "closed its pipe and did not end" if death is None else f"its template process died ({death})"
            )
            return self._failed(Outcome.CRASHED, why)
        self._end()
        if exited.signal == signal.SIGKILL and _kernel_oom_kills() > self._kernel_kills:
            return self._failed(Outcome.OOM, "killed by the kernel: out of memory")
        how = (
            f"killed by {signal_name(exited.signal)}"
            if exited.signal is not None
            else f"ended with exit status {exited.code}"
        )
        fatal = fatal_line(self._log).strip()
        outcome = Outcome.OOM if says_no_memory(fatal) else Outcome.CRASHED
        return self._failed(outcome, f"{how}: {fatal[:400]}" if fatal else how)

    def _end(self) -> None:
        """Kill the whole family, and wait for it to be gone."""
        if self.killed:
            return
        self.killed = True
        self._channel.close()
        exited = self.template.wait_exit(self.pid, 0.0)
        if exited is None:
            self._signal(signal.SIGKILL)
            self.template.sweep(self.pid)
            self.template.wait_exit(self.pid, EXIT_SECONDS)


def is_stopped(pid: int) -> bool:
    """Whether every thread of a process is stopped (or the process is gone).

    A thread that waits in the kernel (D) stops before it runs on, once the others have: one that starts a program
    waits so until that has begun, for as long as the stopped new process has not.
    """
    states = set()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                states.add(file.read().rpartition(b")")[2].split()[0])
    except (FileNotFoundError, ProcessLookupError):
        return not os.path.exists(f"/proc/{pid}") or is_stopped(pid)
    stopped = {b"T", b"t"}
    return states <= stopped | {b"Z", b"X", b"D"} and (b"D" not in states or bool(states & stopped))


def _kernel_oom_kills() -> int:
    """How often the kernel has killed for want of memory since it started; 0 where it does not say."""
    with contextlib.suppress(OSError), open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class TrialProcesses:
    """Real trials of one workload; see `live.Trials`. A context manager that leaves no process behind.

    Args:
        reference: The workload.
        logs: Directory for the templates' logs.
        isolation: `template` (fork from one that has imported everything) or `spawn` (a fresh
            interpreter per trial).
    """

    def __init__(self, reference: WorkloadReference, *, logs: Path, isolation: str = "template") -> None:
        self.seats: tuple[str, ...] = ("local",)
        self._reference = reference
        self._logs = logs
        self._spawn = isolation == "spawn"
        self._preload = True
        self._templates: dict[tuple[tuple[str, str], ...], Template] = {}
        self._trials: list[TrialProcess] = []
        self._count = 0
        self._fingerprint: str | None = None
        self.started_by_import: StartedByImport | None = None

    def __enter__(self) -> TrialProcesses:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End every process."""
        self.close()

    def open(self) -> WorkloadFacts:
        """Import the workload in a first template, and say what it is.

        Where importing it starts TensorFlow's runtime, `started_by_import` says so, and fresh interpreters
        are used from then on.

        Raises:
            WorkloadError: It cannot be imported.
        """
        _, ready = self._ready_template({})
        assert ready.workload is not None
        self._fingerprint = ready.workload.fingerprint
        self.started_by_import = ready.started
        if self._spawn or ready.started is not None:
            self.close()
            self._preload = False
        return ready.workload

    @property
    def isolation(self) -> Literal["template", "spawn"]:
        """How trials are kept apart."""
        return "template" if self._preload else "spawn"

    def _same_workload(self, ready: messages.TemplateReady) -> None:
        """Refuse to measure other code than the run began with.

        Raises:
            WorkloadError: The file has changed.
        """
        found = None if ready.workload is None else ready.workload.fingerprint
        if found is None and self._reference.file is not None:  # fresh interpreters read it each time
            with contextlib.suppress(OSError):  # which the trial will say better
                found = fingerprint_of(self._reference.file, self._reference.name)
        if None not in (found, self._fingerprint) and found != self._fingerprint:
            raise WorkloadError(
                f"{self._reference}: the file has changed since the run began",
                hint="What was measured stays in the run directory. Start a new run.",
            )

    def launch(
        self,
        configuration: Configuration,
        *,
        seat: str = "",
        log: str,
        data: Data | None,
        timing: TrialTiming = IN_SEARCH,
        losses: messages.LossRuns | None = None,
    ) -> TrialProcess:
        """Fork a trial from its template, which is restarted if it died."""
        request = messages.TrialRequest(
            configuration=dict(configuration),
            log=log,
            examine=data is None,
            examples=None if data is None else data.examples,
            validation_examples=None if data is None else data.validation_examples,
            validation_uncounted=data is not None and data.validation_uncounted,
            endless=data is not None and data.endless,
            epoch_seconds=timing.epoch_seconds,
            warmup_seconds=timing.warmup_seconds,
            boundary=timing.boundary,
            losses=losses,
        )
        variables = environment(configuration) if self._preload else {}
        for attempt in (1, 2):
            template, ready = self._ready_template(variables)
            self._same_workload(ready)
            try:
                self._trials = [each for each in self._trials if not each.killed]
                self._trials.append(TrialProcess(template, request))
                return self._trials[-1]
            except (ChannelClosed, TimeoutError, ProtocolError) as error:
                template.close()
                if attempt == 2:
                    raise TrialProcessError(
                        f"the template process cannot start trials: {error}",
                        hint=f"Its log is in {self._logs}.",
                    ) from error
        raise AssertionError("unreachable")

    def apart(self, one: Configuration, other: Configuration) -> bool:
        """See `live.Trials`; never where all trials are fresh interpreters."""
        return self._preload and environment(one) != environment(other)

    def close(self) -> None:
        """End every template and every trial."""
        for template in self._templates.values():
            for trial in self._trials:
                if trial.template is template:
                    trial.kill()
            template.close()
        self._templates.clear()

    def _ready_template(self, variables: Mapping[str, str]) -> tuple[Template, messages.TemplateReady]:
        """A template that has imported everything, and what it found; one that dies over it is started once more."""
        with contextlib.suppress(TemplateDied):
            template = self._template(variables)
            return template, template.wait_ready()
        template = self._template(variables)
        return template, template.wait_ready()

    def _template(self, variables: Mapping[str, str]) -> Template:
        key = tuple(sorted(variables.items()))
        found = self._templates.get(key)
        if found is None or not found.alive:
            if found is not None:
                found.close()
            self._count += 1
            found = Template(
                self._reference,
                preload=self._preload,
                variables=variables,
                log=self._logs / f"template-{self._count}.log",
            )
            self._templates[key] = found
        return found
