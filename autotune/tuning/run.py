"""The state that all parts of a run share: directory, clock, observer, and the next trial's number."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.data.errors import WorkloadError
from autotune.data.facts import Machine, WorkloadFacts, WorkloadReference
from autotune.data.options import Options
from autotune.data.printable import mask_text
from autotune.data.record import Boundary, Outcome, Phase, TrialRecord
from autotune.data.run_directory import RunDirectory
from autotune.recipe.compiled import ConfirmedCompilations, SharedCompilations
from autotune.recipe.recipe import RecipeSource
from autotune.runtime.executor import Clock, DeviceUnavailable, Executor, TrialFailed, WarmUp
from autotune.runtime.logs import is_busy_gpu_error
from autotune.runtime.protocol import Data, LossCurves
from autotune.space.configuration import Configuration
from autotune.space.knobs import Device
from autotune.stats.ratios import scaling_efficiency
from autotune.tuning.earlier_runs import Earlier
from autotune.tuning.events import Observer, TrialBegan, TrialEnded, TrialMeasured
from autotune.tuning.rules import Limits
from autotune.tuning.same_model import MOST_OTHER_MODELS, find_model_difference, make_other_models_error
from autotune.tuning.trial import Trial

CLOSING_SECONDS = 1.0  # for ending the processes and writing the recipe
OVERRUN_SHARE = 0.03  # of the budget: how far waits may run beyond its end
TIMEOUT_FACTOR = 2.0
"""A timeout after this multiple of the expected time is the trial's failure, not the budget's."""
LEAST_CLOSING_SECONDS = 1.0  # what closing figures may take, however late it is


class DriverLock:
    """The right to change a run's state, which one thread holds at a time. With a single seat nobody acquires it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def acquire(self) -> None:
        """Wait until no other thread holds it, and acquire it."""
        self._lock.acquire()
        self._holder = threading.get_ident()

    def release(self) -> None:
        """Let another thread acquire it."""
        self._holder = None
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Release it for a while, if this thread holds it."""
        held = self._holder == threading.get_ident()
        if held:
            self.release()
        try:
            yield
        finally:
            if held:
                self.acquire()


@dataclass(kw_only=True)
class Invocation:
    """The inputs of one invocation of `tune` or `verify`."""

    executor: Executor
    directory: RunDirectory
    machine: Machine  # from when the run is open, the one that the first seat runs on
    limits: Limits  # of a process's memory
    reference: WorkloadReference  # where the workload is
    options: Options
    clock: Clock  # seconds that count for the budget
    observe: Observer
    earlier: Earlier | None = None  # what an earlier invocation left; None for a new run
    results: Path | None = None  # the directory below which earlier runs are looked for; None for none
    begin_with: RecipeSource | None = None  # recipes whose configurations are the first candidates
    spent_before: float = 0.0  # seconds of earlier invocations that do not count for the budget
    shares_compilations: bool = False  # the search loads what it has compiled before


@dataclass(kw_only=True)
class Run(Invocation):
    """An invocation and its state."""

    # Only the holder of `driver_lock` may change state. A thread releases it while it waits for a trial, so that
    # seats run in parallel.

    interruptions: Callable[[], int]  # how often the user has asked to stop
    facts: WorkloadFacts
    deadline: Deadline  # when every wait must end
    baseline: Configuration  # what the user would run anyway; `jit_compile` is resolved at its start
    import_seconds: float = 0.0  # of a fresh template; 0 where each trial imports for itself
    data: Data | None = None  # what the baseline found out about the dataset; None until then
    not_reached: Mapping[str, str] = field(default_factory=dict)  # knobs that do not reach a script, and why
    boundary: Boundary | None = None  # the baseline's, between epochs; None where they are timed whole
    gpus: tuple[str, ...] | None = None  # names of the GPUs that the baseline saw; None until then
    device_limit_bytes: int | None = None  # what TensorFlow may take of a GPU
    records: dict[int, TrialRecord] = field(default_factory=dict)  # every trial's record, by number
    trials: dict[int, Trial] = field(default_factory=dict)  # every trial, by number: those that run, too
    numbers: Iterator[int] = field(default_factory=itertools.count)
    state_file: Path | None = None  # takes the state of the baseline's training; None where nothing will need it
    shared: SharedCompilations | None = None  # what the search compiles; None where each process compiles for itself
    confirmed: ConfirmedCompilations | None = None  # the same of confirmations
    no_branches: str = ""  # why no training can branch from that state, in half a sentence
    credentials: tuple[str, ...] = ()  # which no record may hold
    model: WarmUp | None = None  # the baseline's first report, which tells its model; None until then
    other_models: list[str] = field(default_factory=list)  # what trained another one, in words
    model_error: WorkloadError | None = None  # the models differ by chance: the run ends
    driver_lock: DriverLock = field(default_factory=DriverLock)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.options.seed)  # draws the order of slices

    @property
    def device(self) -> Device:
        """The kind of device that the workload trains on."""
        return Device.GPU if self.gpus else Device.CPU

    @functools.cached_property
    def several(self) -> bool:
        """Return whether there are, or may be, several seats."""
        return self.executor.elastic or len(self.executor.seats) > 1

    def interrupted(self) -> bool:
        """Return whether the user has asked to stop."""
        return self.interruptions() > 0

    def new_trial(self, phase: Phase, configuration: Configuration) -> Trial:
        """Return a trial with the next number, its directory made, announced."""
        trial = Trial(next(self.numbers), phase, configuration, self.options.objective)
        self.trials[trial.number] = trial
        self.directory.prepare_trial(trial.number)
        self.announce(trial)
        return trial

    def announce(self, trial: Trial) -> None:
        """Tell the observer that the trial runs now."""
        configuration = trial.configuration
        # until a resumed run's baseline has started again, only its record has the values in force
        shown = self.baseline if trial.phase is Phase.BASELINE else configuration
        self.observe(
            TrialBegan(trial=trial.number, phase=trial.phase, configuration=configuration, changes=self.changes(shown))
        )

    def log_of(self, trial: Trial) -> str:
        """Path of the trial's log."""
        return str((self.directory.trial_directory(trial.number) / "log.txt").resolve())

    def now(self) -> float:
        """This moment in seconds of the run: those of earlier invocations included, pauses between them not."""
        return self.spent_before + self.clock()

    def refuse_other_devices(self, seen: Sequence[str]) -> None:
        """Refuse a process without the baseline's GPUs: TensorFlow trains on the processor without a word then."""
        # Raises DeviceUnavailable.
        if self.gpus is not None and tuple(seen) != self.gpus:
            sees, saw = (", ".join(names) or "no GPU" for names in (seen, self.gpus))
            raise DeviceUnavailable(
                Outcome.ERROR,
                f"TensorFlow sees {sees}; the baseline saw {saw}",
                hint="The GPU or container may have lost its driver; check nvidia-smi.",
            )

    def refuse_another_model(self, who: str, configuration: Configuration, own: WarmUp | LossCurves) -> None:
        """Refuse a process that has built another model than the baseline's first. Raises TrialFailed."""
        if self.model is None and isinstance(own, WarmUp):
            self.model = own
        same_batch = configuration.batch_size == self.baseline.batch_size
        difference = "" if self.model is None else find_model_difference(self.model, own, same_batch=same_batch)
        if not difference:
            return
        self.other_models.append(f"{who} {difference}")
        known = [record for record in self.records.values() if record.configuration == dict(configuration)]
        if len(self.other_models) >= MOST_OTHER_MODELS or any(record.outcome.measured for record in known):
            self.model_error = make_other_models_error(self.reference, self.other_models)
        raise TrialFailed(Outcome.OTHER_MODEL, difference)

    def measured(self, trial: Trial) -> None:
        """Tell the observer of the estimate so far."""
        self.observe(TrialMeasured(trial=trial.number, speedup=trial.speedup, pairs=len(trial.log_ratios)))

    def save_record(self, record: TrialRecord, *, announce: bool = True) -> TrialRecord:
        """Write a record, and tell the observer that the trial ended; returns it with the moment at which it did."""
        if record.ended_at_seconds is None:  # else it ended before, and is judged anew
            record = record.model_copy(update={"ended_at_seconds": self.now()})
        if (share := scaling_efficiency(record, self.records.values())) is not None:
            record = record.model_copy(update={"scaling_efficiency": share})
        shown = {name: mask_text(getattr(record, name), self.credentials) for name in ("reason", "log_tail")}
        self.records[record.trial] = record = record.model_copy(update=shown)
        self.directory.write_trial(record)
        if announce:
            changes = self.changes(Configuration(record.configuration))
            unit = "samples" if self.facts.script is None else self.facts.script.unit
            self.observe(TrialEnded(record=record, changes=changes, unit=unit))
        return record

    def changes(self, configuration: Configuration) -> str:
        """Return how a configuration differs from the baseline, in words."""
        return configuration.describe(relative_to=self.baseline)


@contextlib.contextmanager
def reclassify_busy_gpu() -> Iterator[None]:
    """Turn OOM into an unavailable device where no other process of the run is alive: another one has the card."""
    # Raises TrialFailed.
    try:
        yield
    except TrialFailed as failure:
        if failure.outcome is Outcome.OOM and is_busy_gpu_error(failure.reason):
            taken = DeviceUnavailable(
                Outcome.ERROR,
                failure.reason,
                hint="It also failed alone: a process outside this run uses the GPU (see nvidia-smi).",
                detail=failure.detail,
                log_tail=failure.log_tail,
            )
            taken.trial = failure.trial
            raise taken from failure
        raise


class Interrupted(Exception):
    """The user asked to stop."""


class TimeIsUp(Exception):
    """Not enough time for the next step; if it had `begun` all the same, the trial was killed."""

    def __init__(self, *, begun: bool = False) -> None:
        super().__init__()
        self.begun = begun


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """The last moment of a phase, in seconds since the run began."""

    clock: Clock
    at: float = math.inf

    def left(self) -> float:
        """Return the seconds until then; 0 once it is over."""
        return max(0.0, self.at - self.clock())

    def closing(self, cap: float) -> float:
        """Return the seconds to wait for closing figures, which are not worth an overrun."""
        return min(cap, max(LEAST_CLOSING_SECONDS, self.left()))

    @contextlib.contextmanager
    def time_limit(
        self, expected: float, *, cap: float, timeout_factor: float = TIMEOUT_FACTOR, extra_seconds: float = 0.0
    ) -> Iterator[float]:
        """Yield the time limit for a step expected to take so many seconds. Raises TimeIsUp if it does not fit."""
        # If the budget cut the limit below `timeout_factor` times the expected time, a timeout is the budget's fault,
        # not the trial's.
        limit = min(cap + TIMEOUT_FACTOR * extra_seconds, self.left())
        if limit < min(expected, cap):
            raise TimeIsUp
        try:
            yield limit
        except TrialFailed as failure:
            if failure.outcome is Outcome.TIMEOUT and limit < min(cap, timeout_factor * expected) + extra_seconds:
                raise TimeIsUp(begun=True) from failure
            raise
