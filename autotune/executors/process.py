"""The driver's side of trials: start, talk, freeze, time-limit, kill, say how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from autotune.errors import NoStableConfigurationError, WorkloadError
from autotune.executors.executor import IN_SEARCH, Data, TrialFailed, TrialTiming, WarmUp
from autotune.executors.log import cap, fatal_line, tail
from autotune.executors.no_memory import kernel_oom_kills, says_no_memory
from autotune.executors.standstill import LOOK_SECONDS, AwakeClock
from autotune.executors.template_process import EXIT_SECONDS, Template, TemplateDied, status_in_words
from autotune.recipe.apply import environment
from autotune.record import Outcome, Slice
from autotune.scripts.execute import fingerprint_of_script
from autotune.scripts.facts import ScriptFacts
from autotune.space.configuration import Configuration
from autotune.worker import messages
from autotune.worker.messages import ChannelClosed, ProtocolError
from autotune.workloads.loading import fingerprint_of
from autotune.workloads.workload import WorkloadFacts, WorkloadReference

MOST_REPEATS = 3  # of a slice in which the machine stood still: where it always does, that is how it runs
FREEZE_SECONDS = 5.0  # how long a process group may take to stop

# What a trial does while each of its messages is waited for.
_DOING: dict[type, str] = {
    messages.Started: "while building the model and dataset",
    messages.FirstStep: "in the first step, which traces and compiles",
    messages.Ready: "while warming up",
    messages.SliceDone: "in a slice",
    messages.Finished: "over the closing figures",
    messages.LossCurves: "while training for loss curves",
}

Profiled = Literal["all", "finalists", "none"]
Message = TypeVar("Message")
Used = TypeVar("Used")


class TrialProcess:
    """A real trial: a fork of a template; see `executor.LiveTrial`."""

    def __init__(self, template: Template, request: messages.TrialRequest, profile: Profiled) -> None:
        self.template = template
        self._profile = profile
        self._log = Path(request.log)
        self._clock = AwakeClock()
        self._requested = self._clock()
        self._kernel_kills = kernel_oom_kills()
        self._killed = False
        self.pid, self._channel = template.fork(request)
        self._launch_seconds = self._clock() - self._requested

    def warm_up(self, timeout_seconds: float) -> WarmUp:
        """See `executor.LiveTrial`."""
        deadline = self._requested + timeout_seconds
        self._clock.watch()
        started = self._expect(messages.Started, deadline)
        since = self._requested + started.counting_seconds
        first = self._expect(messages.FirstStep, deadline)
        first_step_seconds = max(0.0, self._clock() - since)
        ready = self._expect(messages.Ready, deadline)
        self.freeze()
        return WarmUp(
            started=started,
            ready=ready,
            launch_seconds=self._launch_seconds,
            first_step_seconds=first_step_seconds,
            ready_seconds=max(0.0, self._clock() - since),
            first_loss=first.loss,
        )

    def measure(self, seconds: float, timeout_seconds: float) -> Slice:
        """See `executor.LiveTrial`."""
        return self.measure_continuously(seconds, 1, timeout_seconds)[0]

    def measure_continuously(self, seconds: float, count: int, timeout_seconds: float) -> tuple[Slice, ...]:
        """See `executor.LiveTrial`. All slices are measured again if the machine stood still in one."""
        deadline = self._clock() + timeout_seconds
        thrown_away = 0
        while True:
            before = self._clock.standstills
            self._command(messages.Measure(seconds=seconds, slices=count))
            slices = [self._expect(messages.SliceDone, deadline).slice for _ in range(count)]
            self.freeze()
            thrown_away += self._clock.standstills > before
            if self._clock.standstills == before or thrown_away == MOST_REPEATS:
                return tuple(each.model_copy(update={"standstills": thrown_away}) for each in slices)

    def finish(self, input_wait_seconds: float, timeout_seconds: float, *, thorough: bool = False) -> messages.Finished:
        """See `executor.LiveTrial`."""
        before, deadline = self._clock.standstills, self._clock() + timeout_seconds
        profile = self._profile == "all" or (self._profile == "finalists" and thorough)
        self._command(messages.Finish(input_wait_seconds=input_wait_seconds, ceilings=thorough, profile=profile))
        told = self._expect(messages.Finished, deadline)
        if input_wait_seconds > 0:
            with contextlib.suppress(TrialFailed):  # it is ended; what it told before stands
                answer = self._expect(messages.Finished, deadline)
                told = answer if self._clock.standstills == before else told
        self.kill()
        return told

    def loss_curves(self, timeout_seconds: float) -> messages.LossCurves:
        """See `executor.LiveTrial`."""
        self._clock.watch()
        answer = self._expect(messages.LossCurves, self._requested + timeout_seconds)
        self.kill()
        return answer

    def kill(self) -> None:
        """Kill the whole process group, and wait for it to be gone; the template kills what left the group."""
        if self._killed:
            return
        self._killed = True
        self._channel.close()
        # A trial dies with its template, and its number may be another process's then.
        if self.template.wait_exit(self.pid, 0.0) is None and self.template.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.template.wait_exit(self.pid, EXIT_SECONDS)
        cap(self._log)

    def freeze(self) -> None:
        """Wait until every thread of the trial has stopped, which stops its own process group after each report."""
        deadline, looked_at = time.monotonic() + FREEZE_SECONDS, 0.0
        while not is_stopped(self.pid):
            if looked_at > deadline:  # not the time now: this process itself may have been kept from looking
                raise self._failed(Outcome.TIMEOUT, f"could not be frozen within {FREEZE_SECONDS:.0f} s")
            time.sleep(0.0005)
            looked_at = time.monotonic()

    def thaw(self) -> None:
        """Let the process group go on."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)

    def _command(self, command: messages.Measure | messages.Finish) -> None:
        self._clock.watch()  # from before the trial goes on
        try:
            self._channel.send(command)
        except ChannelClosed as error:
            raise self._died() from error
        self.thaw()

    def _receive(self, deadline: float) -> object:
        """The next message. Raises as `messages.Channel.receive` does."""
        while True:
            answer = None
            with contextlib.suppress(TimeoutError):
                answer = self._channel.receive(min(max(0.0, deadline - self._clock()), LOOK_SECONDS))
            self._clock.look()
            cap(self._log)
            if answer is not None:
                return answer
            if not self.template.alive:  # a child of the trial's may hold its end of the pipe open
                raise ChannelClosed("the template is gone")
            if deadline <= self._clock():
                raise TimeoutError

    def _expect(self, kind: type[Message], deadline: float) -> Message:
        """The next message, which must be of this kind."""
        try:
            answer = self._receive(deadline)
        except TimeoutError as error:
            reason = f"timed out after {self._clock() - self._requested:.1f} s {_DOING[kind]}"
            raise self._failed(Outcome.TIMEOUT, reason) from error
        except ChannelClosed as error:
            raise self._died() from error
        except ProtocolError as error:
            raise self._failed(Outcome.CRASHED, f"sent something that is no report: {error}") from error
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, messages.Failed):
            raise self._failed(**answer.model_dump(exclude={"kind"}))
        found = getattr(answer, "kind", answer)
        raise self._failed(Outcome.CRASHED, f"sent {found!r} out of turn {_DOING[kind]}")

    def _failed(self, outcome: Outcome, reason: str, **more: Any) -> TrialFailed:
        """The failure of this trial, which is killed."""
        self.kill()
        return TrialFailed(outcome, reason, log_tail=tail(self._log), **more)

    def _died(self) -> TrialFailed:
        """The failure of a trial whose end of the pipe closed without a word."""
        exited = self.template.wait_exit(self.pid, EXIT_SECONDS)
        if exited is None:
            death = self.template.death()
            if kernel_oom_kills() > self._kernel_kills:
                return self._failed(Outcome.OOM, f"its template process died ({death}): out of memory")
            why = f"its template process died ({death})" if death else "closed its pipe and did not end"
            return self._failed(Outcome.CRASHED, why)
        if exited == -signal.SIGKILL and kernel_oom_kills() > self._kernel_kills:
            return self._failed(Outcome.OOM, "killed by the kernel: out of memory")
        how = f"{'' if exited < 0 else 'ended with '}{status_in_words(exited)}"
        fatal = fatal_line(self._log).strip()
        outcome = Outcome.OOM if says_no_memory(fatal) else Outcome.CRASHED
        return self._failed(outcome, f"{how}: {fatal[:400]}" if fatal else how)


def is_stopped(pid: int) -> bool:
    """Whether every thread of a process is stopped, or the process is gone."""
    states = set()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                states.add(file.read().rpartition(b")")[2].split()[0])
    except (FileNotFoundError, ProcessLookupError):
        return not os.path.exists(f"/proc/{pid}") or is_stopped(pid)
    stopped = {b"T", b"t"}
    # A thread that waits in the kernel (D) stops before it runs on, once the others have. One that starts a program
    # waits for the new process, which is stopped.
    return states <= stopped | {b"Z", b"X", b"D"} and (b"D" not in states or bool(states & stopped))


class TrialProcesses(contextlib.AbstractContextManager["TrialProcesses"]):
    """Real trials of one workload; see `executor.Executor`. A context manager that leaves no process behind."""

    def __init__(
        self,
        reference: WorkloadReference,
        *,
        logs: Path,  # directory for the templates' logs
        isolation: Literal["template", "spawn"] = "template",  # forks, or fresh interpreters
        profile: Profiled = "none",  # which trials are profiled at their end
    ) -> None:
        self.seats: tuple[str, ...] = ("local",)
        self.isolation: Literal["template", "spawn"] = "template"  # the first template imports the workload
        self.started_by_import: messages.StartedByImport | None = None
        self._reference = reference
        self._logs = logs
        self._wanted = isolation
        self._profile: Profiled = profile
        self._templates: dict[frozenset[tuple[str, str]], Template] = {}
        self._count = 0
        self._fingerprint: str | None = None
        self._script: ScriptFacts | None = None

    def __exit__(self, *_: object) -> None:
        """End every process."""
        self.close()

    def open(self) -> WorkloadFacts:
        """See `executor.Executor`. Raises `WorkloadError`, or `NoStableConfigurationError` for want of memory."""
        try:
            ready = self._with_template({}, Template.wait_ready)
        except TrialFailed as failure:
            raise NoStableConfigurationError(failure.reason, hint=failure.hint, detail=failure.log_tail) from failure
        assert ready.workload is not None
        self._fingerprint, self._script = ready.workload.fingerprint, ready.workload.script
        self.started_by_import = ready.started
        if self._wanted == "spawn" or ready.started is not None:
            self.close()
            self.isolation = "spawn"
        return ready.workload

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
        """See `executor.Executor`. Raises `WorkloadError` if the workload's file has changed since `open`."""
        request = messages.TrialRequest(
            configuration=dict(configuration), log=log, data=data, timing=timing, losses=losses, script=self._script
        )

        def fork(template: Template) -> TrialProcess:
            self._refuse_changes(template.wait_ready().workload)
            return TrialProcess(template, request, self._profile)

        variables = environment(configuration) if self.isolation == "template" else {}
        return self._with_template(variables, fork)

    def apart(self, one: Configuration, other: Configuration) -> bool:
        """See `executor.Executor`; never where all trials are fresh interpreters."""
        return self.isolation == "template" and environment(one) != environment(other)

    def close(self) -> None:
        """End every template and every trial."""
        for template in self._templates.values():
            template.close()
        self._templates.clear()

    def _refuse_changes(self, workload: WorkloadFacts | None) -> None:
        """Refuse to measure other code than the run began with."""
        found = workload.fingerprint if workload else None
        with contextlib.suppress(OSError):  # which the trial will say better
            if self._script is not None:  # each trial reads it
                found = fingerprint_of_script(self._reference)
            elif found is None and self._reference.file is not None:  # fresh interpreters read it each time
                found = fingerprint_of(self._reference.file, self._reference.name)
        if found is not None and self._fingerprint not in (None, found):
            raise WorkloadError(
                f"{self._reference}: the file has changed since the run began",
                hint="What was measured stays in the run directory. Start a new run.",
            )

    def _with_template(self, variables: Mapping[str, str], use: Callable[[Template], Used]) -> Used:
        """What `use` makes of the template with these variables; one that dies over it is started once more."""
        with contextlib.suppress(TemplateDied):
            return use(self._template(variables))
        return use(self._template(variables))

    def _template(self, variables: Mapping[str, str]) -> Template:
        key = frozenset(variables.items())
        found = self._templates.get(key)
        if found is not None and found.alive:
            return found
        if found is not None:
            found.close()
        self._count += 1
        log = self._logs / f"template-{self._count}.log"
        preload = self.isolation == "template"
        script = self._script
        if script is not None:
            variables = {**script.variables, **variables}
        known = script is not None
        made = Template(self._reference, preload=preload, known=known, variables=variables, log=log)
        self._templates[key] = made
        return made
