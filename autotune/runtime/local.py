"""Real trials on this host: forks of templates, a template for each seat and environment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from autotune.data.errors import NoStableConfigurationError, WorkloadError
from autotune.data.facts import ScriptFacts, WorkloadFacts, WorkloadReference
from autotune.data.hardware import Machine
from autotune.data.record import Place
from autotune.data.run_directory import LAYERS
from autotune.recipe.apply import environment
from autotune.runtime import protocol
from autotune.runtime.containment import remove_all_layers
from autotune.runtime.executor import IN_SEARCH, Data, TrialFailed, TrialTiming
from autotune.runtime.places import CORES_VARIABLE, WHOLE, whole_host
from autotune.runtime.sources import fingerprint_of, fingerprint_of_script
from autotune.runtime.template_process import IMPORT_SECONDS, Mode, Template, TemplateDied
from autotune.runtime.trial_process import Profiled, TrialProcess
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS

Used = TypeVar("Used")


def scaled_for(place: Place, configuration: Configuration) -> Configuration:
    """A configuration for the whole host, on a part of its cores: numbers of threads shrink with it."""
    if not place.of_cores:
        return configuration
    share = len(place.cores) / place.of_cores
    threads = {
        name: max(1, round(value * share))
        for name, value in configuration.items()
        if KNOBS[name].per_core and type(value) is int and value > 0
    }
    return configuration.replace(**threads)


class TrialProcesses(contextlib.AbstractContextManager["TrialProcesses"]):
    """Real trials of one workload; see `executor.Executor`. A context manager that leaves no process behind."""

    def __init__(
        self,
        reference: WorkloadReference,
        *,
        logs: Path,  # directory for the templates' logs
        isolation: Literal["template", "spawn"] = "template",  # forks, or fresh interpreters
        profile: Profiled = "none",  # which trials are profiled at their end
        places: Sequence[Place] | None = None,  # its seats; one that is the whole host when None
        import_seconds: float = IMPORT_SECONDS,  # that importing the workload may take
    ) -> None:
        places = [whole_host()] if places is None else places
        self._places = {each.seat: each for each in places}
        self.seats: tuple[str, ...] = tuple(self._places)
        self.whole = WHOLE if any(each.of_cores for each in places) else None
        if self.whole is not None:
            self._places[WHOLE] = Place(seat=WHOLE, host=places[0].host, device=f"all {places[0].of_cores} cores")
        self.elastic = False
        self.machine: Machine | None = None
        self.isolation: Literal["template", "spawn"] = "template"  # the first template imports the workload
        self.started_by_import: protocol.StartedByImport | None = None
        self._reference = reference
        self._logs = logs
        self._wanted, self._import_seconds = isolation, min(import_seconds, IMPORT_SECONDS)
        self._layers = logs.resolve() / LAYERS
        remove_all_layers(self._layers)  # of a run that was killed, and goes on now
        self._profile: Profiled = profile
        self._templates: dict[frozenset[tuple[str, str]], Template] = {}  # by their environment, of the seat and knobs
        self._count = 0
        self._fingerprint: str | None = None
        self._script: ScriptFacts | None = None

    def __exit__(self, *_: object) -> None:
        """End every process."""
        self.close()

    def open(self) -> WorkloadFacts:
        """See `executor.Executor`. Raises `WorkloadError`, or `NoStableConfigurationError` for want of memory."""
        try:
            ready = self._with_template(
                self._variables_of(self.seats[0]), lambda template: template.wait_ready(self._import_seconds)
            )
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
        losses: protocol.LossRuns | None = None,
    ) -> TrialProcess:
        """See `executor.Executor`. Raises `WorkloadError` if the workload's file has changed since `open`."""
        seat = seat or self.seats[0]
        scaled = scaled_for(self._places[seat], configuration)
        request = protocol.TrialRequest(
            configuration=dict(scaled), log=log, data=data, timing=timing, losses=losses, script=self._script
        )

        def fork(template: Template) -> TrialProcess:
            self._refuse_changes(template.wait_ready().workload)
            return TrialProcess(
                template,
                request,
                self._profile,
                {name: configuration[name] for name in scaled.differences(configuration)},
            )

        variables = environment(configuration) if self.isolation == "template" else {}
        return self._with_template({**self._variables_of(seat), **variables}, fork)

    def place(self, seat: str) -> Place:
        """See `executor.Executor`."""
        return self._places[seat]

    def refresh(self) -> None:
        """See `executor.Executor`; nothing comes or goes here."""

    def restart(self, seat: str) -> None:
        """See `executor.Executor`; a template that is gone is started again by the next trial."""

    def drop(self, seat: str) -> None:
        """See `executor.Executor`."""
        self.seats = tuple(each for each in self.seats if each != seat)

    def apart(self, one: Configuration, other: Configuration) -> bool:
        """See `executor.Executor`; never where all trials are fresh interpreters."""
        return self.isolation == "template" and environment(one) != environment(other)

    def _variables_of(self, seat: str) -> dict[str, str]:
        place = self._places[seat]
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(place.devices)} if place.devices else {}
        if place.cores:
            variables[CORES_VARIABLE] = ",".join(map(str, place.cores))
        return variables

    def close(self) -> None:
        """End every template and every trial."""
        for template in self._templates.values():
            template.close()
        self._templates.clear()
        remove_all_layers(self._layers)

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
        mode: Mode = "new"
        if self._script is not None:
            mode, variables = "known", {**self._script.variables, **variables}
        if self.isolation == "spawn":
            mode = "later"
        script = self._reference.script
        layers = None if script is not None and script.allow_writes else self._layers
        self._templates[key] = Template(self._reference, mode, variables=variables, log=log, layers=layers)
        return self._templates[key]
