"""Real trials on this host: forks of templates, one for each seat and environment; and the seats that its GPUs make."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from autotune.data.errors import ArgumentError, NoStableConfigurationError, WorkloadError
from autotune.data.facts import Machine, WorkloadFacts, WorkloadReference
from autotune.data.record import Place
from autotune.data.run_directory import LAYERS
from autotune.machine.gpu import VisibleGpu, visible_gpus
from autotune.recipe.apply import environment
from autotune.runtime.containment import remove_all_layers
from autotune.runtime.executor import Executor, Isolation, TrialFailed
from autotune.runtime.protocol import TrialRequest
from autotune.runtime.sources import fingerprint_of, fingerprint_of_script
from autotune.runtime.trial_process import IMPORT_SECONDS, Mode, Profiled, Template, TemplateDied, TrialProcess

Result = TypeVar("Result")


class LocalSeat:
    """Devices of this host, and the templates whose forks run on them; see `executor.SeatHandle`."""

    def __init__(self, place: Place, executor: LocalExecutor, profile: Profiled) -> None:
        self.place = place
        self._executor, self._profile = executor, profile
        self._templates: dict[frozenset[tuple[str, str]], Template] = {}  # by the variables of the knobs

    def launch(self, request: TrialRequest) -> TrialProcess:
        """See `executor.SeatHandle`. Raises `WorkloadError` if the workload's file has changed since it was opened."""
        facts = self._executor.facts
        assert facts is not None  # it is open
        request = request.model_copy(update={"keras": facts.keras, "script": facts.script})
        variables = environment(request.configuration) if self._executor.isolation == "template" else {}

        def fork(template: Template) -> TrialProcess:
            self._executor.refuse_changes(template.wait_ready().workload)
            return TrialProcess(template, request, self._profile)

        return self.use_template(variables, fork)

    def use_template(self, variables: Mapping[str, str], use: Callable[[Template], Result]) -> Result:
        """Call `use` with the template of these variables; restart one that dies meanwhile, once."""
        with contextlib.suppress(TemplateDied):
            return use(self._template(variables))
        return use(self._template(variables))

    def _template(self, variables: Mapping[str, str]) -> Template:
        key = frozenset(variables.items())
        for other in [other for other, template in self._templates.items() if template.waits and other != key]:
            self._templates.pop(other).close()  # the process that waits there would take memory from this trial
        found = self._templates.get(key)
        if found is None or not found.alive:
            if found is not None:
                found.close()
            devices = {"CUDA_VISIBLE_DEVICES": ",".join(self.place.devices)} if self.place.devices else {}
            found = self._templates[key] = self._executor.start_template({**devices, **variables})
        return found

    def close(self) -> None:
        """End every template and every trial."""
        for template in self._templates.values():
            template.close()
        self._templates.clear()


class LocalExecutor(Executor):
    """Real trials of one workload on this host; see `executor.Executor`."""

    keeps_files = True
    facts: WorkloadFacts | None = None  # once it is open

    def __init__(
        self,
        reference: WorkloadReference,
        *,
        logs: Path,  # directory for the templates' logs
        isolation: Isolation = "template",
        profile: Profiled = "none",  # which trials are profiled at their end
        places: Sequence[Place] = (),  # its seats; one that is the whole host where none is given
        import_seconds: float = IMPORT_SECONDS,  # that importing the workload may take
    ) -> None:
        self._wanted, self._import_seconds = isolation, min(import_seconds, IMPORT_SECONDS)
        self._reference, self._logs, self._layers = reference, logs, logs.resolve() / LAYERS
        self._count = 0  # of templates
        remove_all_layers(self._layers)  # of a run that was killed, and is resumed now
        places = places or [Place(seat="local", host=platform.node())]
        super().__init__()
        self._handles: dict[str, LocalSeat] = {place.seat: LocalSeat(place, self, profile) for place in places}

    def open(self) -> WorkloadFacts:
        """See `executor.Executor`. Raises `WorkloadError`, or `NoStableConfigurationError` for want of memory."""
        first = self._handles[self.seats[0]]
        try:
            ready = first.use_template({}, lambda template: template.wait_ready(self._import_seconds, self.tell))
        except TrialFailed as failure:
            raise NoStableConfigurationError(failure.reason, hint=failure.hint, detail=failure.log_tail) from failure
        assert ready.workload is not None
        self.started_by_import = ready.started
        self.facts = ready.workload
        if self._wanted == "spawn" or ready.started is not None:
            self.use_fresh_interpreters()
        return self.facts

    def use_fresh_interpreters(self) -> None:
        """See `executor.Executor`."""
        self.close()
        self.isolation = "spawn"
        if self.facts is not None and (script := self.facts.script) is not None:  # then trials share no start
            before = script.before_seconds + script.shared_seconds
            script = script.model_copy(update={"before_seconds": before, "shared_seconds": 0.0})
            self.facts = self.facts.model_copy(update={"script": script})

    def start_template(self, variables: Mapping[str, str]) -> Template:
        """Start a template; the first one imports the workload."""
        mode: Mode = "new"
        if self.facts is not None and self.facts.script is not None:
            mode = "shared" if self.facts.script.shared_seconds else "known"
            variables = {**self.facts.script.variables, **variables}
        if self.isolation == "spawn":
            mode = "later"
        script = self._reference.script
        layers = None if script is not None and script.allow_writes else self._layers
        self._count += 1
        log = self._logs / f"template-{self._count}.log"
        return Template(self._reference, mode, variables=variables, log=log, layers=layers)

    def refuse_changes(self, workload: WorkloadFacts | None) -> None:
        """Raise `WorkloadError` rather than measure other code than the run began with."""
        assert self.facts is not None
        found = workload.fingerprint if workload else None
        with contextlib.suppress(OSError):  # the trial will report it better
            if self.facts.script is not None:  # each trial reads it
                found = fingerprint_of_script(self._reference)
            elif found is None and self._reference.file is not None:  # fresh interpreters read it each time
                found = fingerprint_of(self._reference.file, self._reference.name)
        if found not in (None, self.facts.fingerprint):
            raise WorkloadError(
                f"{self._reference}: the file has changed since the run began",
                hint="The measurements stay in the run directory. Start a new run.",
            )

    def close(self) -> None:
        """End every template and every trial, and remove what contained ones have written."""
        super().close()
        remove_all_layers(self._layers)


# --------------------------------------------------------------------------------------------------------------- seats


def group_gpus(wanted: str, size: int, visible: Sequence[VisibleGpu] | None = None) -> tuple[Place, ...]:
    """Return seats with `size` GPUs each: of `all` that are visible, or of indices and UUIDs between commas.

    Raises `ArgumentError` for a GPU that does not exist or was named twice, and for unlike or too few GPUs.
    """
    gpus = list(visible_gpus() if visible is None else visible)
    if not gpus:
        raise ArgumentError("--devices was given, and no GPU can be used here", hint="See what autotune doctor says.")
    chosen = gpus if wanted == "all" else [_find_gpu(entry.strip(), gpus) for entry in wanted.split(",")]
    if len({gpu.uuid for gpu in chosen}) < len(chosen):
        raise ArgumentError(f"--devices {wanted} names a GPU twice")
    names = sorted({gpu.name for gpu in chosen})
    if len(names) > 1:
        raise ArgumentError(f"--devices {wanted} names unlike GPUs: {', '.join(names)}")
    if len(chosen) % size:
        raise ArgumentError(f"{len(chosen)} GPUs do not make seats of {size} GPUs")
    return tuple(
        Place(
            seat=f"gpu{number}",
            host=platform.node(),
            device=" + ".join(f"{gpu.name} {gpu.uuid}" for gpu in part),
            devices=tuple(gpu.uuid for gpu in part),
        )
        for number, part in enumerate(chosen[start : start + size] for start in range(0, len(chosen), size))
    )


def _find_gpu(entry: str, gpus: Sequence[VisibleGpu]) -> VisibleGpu:
    if entry.isdecimal() and int(entry) < len(gpus):
        return gpus[int(entry)]
    found = [gpu for gpu in gpus if gpu.uuid.startswith(entry) and entry.startswith(("GPU-", "MIG-"))]
    if len(found) != 1:
        choices = ", ".join(f"{number} ({gpu.uuid})" for number, gpu in enumerate(gpus))
        raise ArgumentError(f"--devices: {entry!r} names no GPU that can be used here", hint=f"There are {choices}.")
    return found[0]


def restrict_to_seat(machine: Machine, places: Sequence[Place]) -> Machine:
    """Return the machine with the GPUs of one seat only, where its GPUs make seats: a recipe describes one seat."""
    devices = places[0].devices if places else ()
    if not devices:
        return machine
    gpus = zip(machine.gpus, visible_gpus(), strict=False)
    return machine.model_copy(update={"gpus": tuple(gpu for gpu, seen in gpus if seen.uuid in devices)})
