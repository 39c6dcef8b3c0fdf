"""Trials without processes: a formula says how fast they are, and their clock waits for nobody.

Everything above `runtime/trial_process.py` runs on these in milliseconds, so that search, statistics and reports are
tested, and search strategies compared, over thousands of runs. What real trials would not survive is
refused here, too.

This module starts no process, reads no real clock and knows no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.data.facts import GpuUse, WorkloadFacts
from autotune.data.models import KnobValue
from autotune.data.record import Boundary, Outcome, Place, Slice, StepSeconds
from autotune.recipe.apply import environment
from autotune.runtime.executor import SEARCH_TIMING, Executor, LiveTrial, TrialFailed, WarmUp, never
from autotune.runtime.protocol import (
    BranchRuns,
    Data,
    Finished,
    LossCurves,
    Ready,
    Started,
    StartedByImport,
    Trainings,
    TrialTiming,
)
from autotune.space.configuration import Configuration
from autotune.stats.steady_state import MOST_SLOW_CALLS, SLOW_CALL_SECONDS, WINDOW_SECONDS, smallest_window
from autotune.training.progress import Training

LAUNCH_SECONDS = 0.01
CORES = 2
FIRST_LOSS = 2.3
EXAMPLES_PER_FALL_OF_THE_LOSS = 1e6
STEPS_PER_FALL_OF_THE_LOSS = 30
SEED_SPREAD = 0.02
"""Largest share by which the losses of different seeds differ."""
HOST_BYTES, HOST_BYTES_PER_EXAMPLE = 512 << 20, 1 << 16
DEVICE_BYTES, DEVICE_BYTES_PER_EXAMPLE = 256 << 20, 1 << 20


def _no_gain(configuration: Configuration) -> float:
    return 1.0


class SimulatedClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """Now, in seconds since the clock was made."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass; it never goes back."""
        assert 0 <= seconds < math.inf, f"time cannot advance by {seconds} s"
        self._now += seconds


class _State(enum.Enum):
    """What a simulated trial can be asked for."""

    LAUNCHED = enum.auto()
    WARM = enum.auto()
    ENDED = enum.auto()


class SimulatedTrial(LiveTrial):
    """One trial of `SimulatedTrials`; see `LiveTrial`.

    Args:
        trials: The machine it runs on.
        configuration: What it runs, `jit_compile` resolved.
        luck: How much faster than the formula this very process is, as a factor.
        timing: How it is timed.
        losses: What to train for the losses alone; None for a trial that is timed.
    """

    seat = log = ""

    def __init__(
        self,
        trials: SimulatedTrials,
        configuration: Configuration,
        *,
        luck: float,
        timing: TrialTiming = SEARCH_TIMING,
        losses: Trainings | None = None,
    ) -> None:
        self.configuration = configuration
        self.timing = timing
        self._epoch_seconds = timing.epoch_seconds
        self._trials = trials
        self._luck = luck
        self.losses = losses
        self._requested_at = trials.clock()
        self._state = _State.LAUNCHED
        self._trained = 0
        self._slices = 0
        self._training = Training(
            steps_per_call=int(configuration["steps_per_execution"]),
            batch_size=configuration.batch_size,
            examples=trials.examples,
            drop_remainder=trials.facts.drop_remainder,
            synchronise=lambda: None,
        )

    @property
    def timed(self) -> bool:
        """Whether it was launched to be timed, and not for its losses."""
        return self.losses is None

    @property
    def alive(self) -> bool:
        """Whether it holds memory."""
        return self._state is not _State.ENDED

    # ------------------------------------------------------------------------------------------ LiveTrial

    def warm_up(self, timeout_seconds: float, on_started: Callable[[Started], None] = lambda started: None) -> WarmUp:
        """See `LiveTrial`. Raises what `failure` says, or OOM where the live trials do not fit."""
        trials = self._trials
        self._require(_State.LAUNCHED)
        deadline = self._requested_at + timeout_seconds
        self._pass(trials.start_seconds, deadline)
        self._fail_as_told(deadline)
        first_step_seconds = trials.clock() - self._requested_at
        on_started(self._started())
        pace = self._pace()
        by_epochs, call_seconds, epoch_seconds = self._shape(pace)
        slow = not by_epochs and call_seconds >= SLOW_CALL_SECONDS
        wanted = max(call_seconds, 2 * max(WINDOW_SECONDS, smallest_window(call_seconds) * call_seconds))
        longest = MOST_SLOW_CALLS * call_seconds if slow else self.timing.warmup_seconds
        warmup_seconds = max(call_seconds, min(longest, wanted))
        timed_boundary = not by_epochs and trials.examples is not None
        self._pass(warmup_seconds, deadline)
        self._trained += round(warmup_seconds * pace)
        self._state = _State.WARM
        if self.timing.save_state:
            state = Path(self.timing.save_state)
            state.parent.mkdir(parents=True, exist_ok=True)
            state.touch()
        return WarmUp(
            started=self._started(),
            ready=Ready(
                timed_by="epochs" if by_epochs else "steps",
                settled=warmup_seconds >= wanted,
                warmup_seconds=warmup_seconds,
                compile_seconds=trials.start_seconds / 2,
                epoch_overhead_seconds=0.0 if timed_boundary else None,
                boundary=Boundary(seconds=0.0, seconds_per_example=1 / pace)
                if timed_boundary and self.timing.boundary is None
                else None,
                call_seconds=call_seconds,
                epoch_seconds=epoch_seconds if by_epochs else None,
                run_in_seconds=self._run_in_seconds(pace),
                uncounted_seconds=0.0 if by_epochs else trials.uncounted_seconds,
                state_steps=self._trained // self.configuration.batch_size if self.timing.save_state else None,
            ),
            launch_seconds=LAUNCH_SECONDS,
            first_step_seconds=first_step_seconds,
            ready_seconds=trials.clock() - self._requested_at,
            first_loss=FIRST_LOSS,
            **trials.model(self.configuration),
        )

    def measure_continuously(self, seconds: float, count: int, timeout_seconds: float) -> tuple[Slice, ...]:
        """See `LiveTrial`: whole epochs where those are short, whole calls elsewhere.

        Before the first slice it was frozen, for as long as another trial has run since.
        """
        trials = self._trials
        deadline, paused = trials.clock() + timeout_seconds, trials.at_work is not self
        self._run_in(deadline)
        return tuple(
            self._slice(seconds, deadline, gain=trials.freeze_gain if paused and index == 0 else _no_gain)
            for index in range(count)
        )

    def _run_in(self, deadline: float) -> None:
        """Train after a freeze what counts in no slice."""
        self._require(_State.WARM)
        seconds = self._run_in_seconds(self._pace())
        self._pass(seconds, deadline)
        self._trained += round(seconds * self._pace())

    def _run_in_seconds(self, pace: float) -> float:
        """An epoch, where epochs are timed whole."""
        by_epochs, _, epoch_seconds = self._shape(pace)
        return epoch_seconds if by_epochs else 0.0

    def _slice(self, seconds: float, deadline: float, *, gain: Callable[[Configuration], float]) -> Slice:
        self._require(_State.WARM)
        nominal = self._pace() * gain(self.configuration)
        load = self._trials.foreign_load(self._trials.clock())
        pace = nominal * (1 - load) * math.exp(self._noise())
        steps, examples, epochs = self._stretch(seconds * pace, by_epochs=self._shape(nominal)[0])
        spent = examples / pace
        self._slices += 1
        self._pass(spent + (self._trials.uncounted_seconds if self._slices == 2 and not epochs else 0.0), deadline)
        self._trained += examples
        step = spent / steps
        slow = step + self._trials.slow_calls(self.configuration) / self._training.steps_per_call
        skipped = self._trials.skipped_share(self.configuration)
        return Slice(
            seconds=spent,
            steps=steps,
            examples=examples,
            epochs=epochs,
            cpu_seconds=spent,
            step_seconds=StepSeconds(p50=step, p90=slow, p99=slow, max=slow),
            loss=self._loss(),
            host_bytes=self._host_bytes(),
            device_bytes=self._device_bytes(),
            cores=CORES,
            foreign_cpu_seconds=load * spent * CORES if self._trials.load_shows else None,
            trained_examples=self._trained,
            retraces=self._trials.retraces(self.configuration),
            skipped_steps=None if skipped is None else round(skipped * steps),
            gpus=self._trials.cards(self.configuration, spent),
        )

    def _noise(self) -> float:
        """How much faster than its pace the next slice is, as a logarithm."""
        return self._trials.random.gauss(0.0, self._trials.noise)

    def finish(self, input_wait_seconds: float, timeout_seconds: float, *, thorough: bool = False) -> Finished:
        """See `LiveTrial`."""
        self._require(_State.WARM)
        self._pass(input_wait_seconds, self._trials.clock() + timeout_seconds)
        self._state = _State.ENDED
        waits = 1.0 - 1.0 / max(1.0, self._trials.freeze_gain(self.configuration))  # else nothing could be gained
        return Finished(
            peak_host_bytes=self._host_bytes(),
            peak_device_bytes=self._device_bytes(),
            input_wait_fraction=waits if input_wait_seconds > 0 else None,
        )

    def loss_curves(self, timeout_seconds: float, stopped: Callable[[], bool] = never) -> LossCurves:
        """See `LiveTrial`. Seeds differ by `SEED_SPREAD`; a configuration that does not learn stays put."""
        trials, runs = self._trials, self.losses
        self._require(_State.LAUNCHED)
        assert runs is not None, "a trial that was launched to be timed was asked for losses"
        deadline = self._requested_at + timeout_seconds
        self._pass(trials.start_seconds, deadline)
        if stopped():
            raise TrialFailed(Outcome.INTERRUPTED, "stopped by the user")
        self._fail_as_told(deadline)
        if isinstance(runs, BranchRuns):
            return self._branch(runs, deadline)
        step_seconds = self.configuration.batch_size / self._pace()
        steps = max(1, min(runs.most_steps, math.ceil(runs.seconds / step_seconds)))
        self._pass(steps * step_seconds * len(runs.seeds), deadline)
        self._state = _State.ENDED
        learns = trials.learns(self.configuration)
        return LossCurves(
            curves=tuple(
                tuple(
                    FIRST_LOSS
                    * (math.exp(-step / STEPS_PER_FALL_OF_THE_LOSS) if learns else 1.0)
                    * (1.0 + SEED_SPREAD * random.Random(seed).uniform(-1.0, 1.0))
                    for step in range(steps)
                )
                for seed in runs.seeds
            ),
            gpus=trials.gpus,
            **trials.model(self.configuration),
        )

    def _branch(self, runs: BranchRuns, deadline: float) -> LossCurves:
        """Losses at probes: a larger batch needs more examples by the critical batch size; the linear rule suits."""
        trials, size = self._trials, self.configuration.batch_size
        each = trials.branch_slowness * runs.examples / self._pace()
        held = min(int(runs.seconds / each), len(runs.seeds) * len(runs.scales))
        self._pass(held * each, deadline)
        self._state = _State.ENDED
        needs = (1 + size / trials.critical_batch) / (1 + runs.recorded_batch_size / trials.critical_batch)
        curves = []
        for place, scale in enumerate(runs.scales):
            off = abs(math.log(size / runs.recorded_batch_size / scale))
            for seed in runs.seeds:
                luck = 1.0 + SEED_SPREAD * random.Random(seed).uniform(-1.0, 1.0)
                at = [runs.examples * (number + 1) / runs.probes for number in range(runs.probes)]
                falls = [done / (needs * (1 + off)) / EXAMPLES_PER_FALL_OF_THE_LOSS for done in at]
                is_whole = runs.seeds.index(seed) * len(runs.scales) + place < held
                curves.append(tuple(FIRST_LOSS * luck * math.exp(-fall) for fall in falls if is_whole))
        return LossCurves(curves=tuple(curves), gpus=trials.gpus, **trials.model(self.configuration))

    def kill(self) -> None:
        """See `LiveTrial`."""
        self._state = _State.ENDED

    # --------------------------------------------------------------------------------------------- failing

    def _require(self, state: _State) -> None:
        """Refuse what a real trial could not do: its template died, or it was asked out of turn."""
        if self in self._trials.orphaned:
            self._state = _State.ENDED
            raise TrialFailed(Outcome.CRASHED, "closed its pipe and did not end, or its template died")
        assert self._state is state, f"a trial that is {self._state.name} was asked as if it were {state.name}"

    def _pass(self, seconds: float, deadline: float) -> None:
        """Let time pass; a trial that would still be busy at its deadline is killed then."""
        clock, self._trials.at_work = self._trials.clock, self
        if clock() + seconds > deadline:
            clock.advance(max(0.0, deadline - clock()))
            raise self._ended(TrialFailed(Outcome.TIMEOUT, "no answer in time"))
        clock.advance(seconds)

    def _fail_as_told(self, deadline: float) -> None:
        trials = self._trials
        failure = trials.failure(self.configuration)
        if failure is not None:
            if failure.outcome is Outcome.TIMEOUT:
                trials.clock.advance(max(0.0, deadline - trials.clock()))
            raise self._ended(failure)
        if not trials.fits_together([trial.configuration for trial in trials.alive]):
            raise self._ended(TrialFailed(Outcome.OOM, "ResourceExhaustedError: out of memory"))

    def _ended(self, failure: TrialFailed) -> TrialFailed:
        self._state = _State.ENDED
        return failure

    # ------------------------------------------------------------------------------------------- training

    def _pace(self) -> float:
        """Samples per second now, but for the noise of a single slice."""
        trials = self._trials
        factor = self._luck * trials.drift(trials.clock()) * trials.progress(self._trained)
        return trials.samples_per_second(self.configuration) * factor

    def _shape(self, pace: float) -> tuple[bool, float, float]:
        """Whether it is timed by epochs, seconds per call, and seconds per epoch (infinite without an end)."""
        training = self._training
        call = training.steps_per_call * training.batch_size / pace
        steps = training.steps_per_epoch
        if steps is None:
            return False, call, math.inf
        epoch = training.examples_in_epoch(max(1, steps)) / pace
        return training.has_few_calls or epoch <= self._epoch_seconds, min(call, epoch), epoch

    def _stretch(self, wanted: float, *, by_epochs: bool) -> tuple[int, int, int]:
        """Steps, examples and epochs of the shortest slice that holds the wanted number of examples."""
        training = self._training
        if by_epochs:
            steps = max(1, training.steps_per_epoch or 1)
            examples = training.examples_in_epoch(steps)
            epochs = max(1, math.ceil(wanted / examples))
            return epochs * steps, epochs * examples, epochs
        calls = max(1, math.ceil(wanted / (training.steps_per_call * training.batch_size)))
        steps = calls * training.steps_per_call
        return steps, steps * training.batch_size, 0

    def _host_bytes(self) -> int:
        leaked = self._trials.leak(self.configuration) * self._trained
        return HOST_BYTES + HOST_BYTES_PER_EXAMPLE * self.configuration.batch_size + round(leaked)

    def _device_bytes(self) -> int | None:
        if not self._trials.gpus:
            return None
        leaked = self._trials.device_leak(self.configuration) * self._trained
        return DEVICE_BYTES + DEVICE_BYTES_PER_EXAMPLE * self.configuration.batch_size + round(leaked)

    def _loss(self) -> float:
        return FIRST_LOSS * math.exp(-self._trained / EXAMPLES_PER_FALL_OF_THE_LOSS)

    def _started(self) -> Started:
        return Started(
            jit_compile=bool(self.configuration["jit_compile"]) and not self._trials.xla_falls_back,
            examples=self._trials.examples,
            examples_per_epoch=self._training.examples_per_epoch,
            endless=self._trials.examples is None,
            element="simulated",
            gpus=self._trials.gpus,
            devices=max(1, len(self._trials.gpus)),
            device_limit_bytes=self._trials.device_limit_bytes,
            set_by_dataset=self._trials.set_by_dataset,
            reads_changing=self._trials.reads_changing,
            not_knobs=self._trials.not_knobs,
            in_force=dict(self._trials.in_force(self.configuration)),
        )


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class SimulatedTrials(Executor):
    """A machine that exists as a formula; see `Executor`.

    The functions among its fields are asked of configurations in which `jit_compile` is resolved.
    """

    facts: WorkloadFacts
    samples_per_second: Callable[[Configuration], float]  # of a long training, epoch boundaries included
    noise: float = 0.0  # standard deviation of a slice's speed, as a logarithm
    instance_noise: float = 0.0  # of a process's speed against others of its configuration
    seed: int = 0  # of all noise
    drift: Callable[[float], float] = lambda seconds: 1.0  # the machine's speed as a factor, by seconds on the clock
    progress: Callable[[int], float] = lambda examples: 1.0  # a process's, by the examples that it has trained on
    foreign_load: Callable[[float], float] = lambda seconds: 0.0  # share of the machine that others take; below 1
    load_shows: bool = True  # whether the slices tell of it
    failure: Callable[[Configuration], TrialFailed | None] = lambda configuration: None  # before it is warm
    start_seconds: float = 1.5  # from the request to the end of the first step
    import_seconds: float = 4.0  # what a template takes to import everything
    jit_resolves_to: bool = False  # what `jit_compile="auto"` comes to here
    xla_falls_back: bool = False  # Keras compiles without XLA whatever it is asked for, as it does for some layers
    gpus: tuple[str, ...] = ()  # names of the GPUs that TensorFlow would see
    device_limit_bytes: int | None = None  # what it might take of them, where that can be told
    set_by_dataset: Mapping[str, bool | int] = dataclasses.field(default_factory=dict)
    not_knobs: tuple[str, ...] = ()
    reads_changing: str = ""  # what the workload's dataset reads that may change
    in_force: Callable[[Configuration], Mapping[str, KnobValue]] = lambda configuration: {}  # where it differs
    examples: int | None = 1437  # per epoch; None for a dataset without an end
    fits_together: Callable[[Sequence[Configuration]], bool] = lambda alive: True  # in memory
    learns: Callable[[Configuration], bool] = lambda configuration: True  # whether its loss falls
    critical_batch: float = math.inf  # the batch size that needs twice the examples of a very small one
    branch_slowness: float = 1.0  # time of trainings that go on from the baseline's state, as a factor
    freeze_gain: Callable[[Configuration], float] = _no_gain
    """How much faster a slice is for the freeze before it: what a pipeline that waits gains from a pause."""
    leak: Callable[[Configuration], float] = lambda configuration: 0.0  # bytes lost with each example
    device_leak: Callable[[Configuration], float] = lambda configuration: 0.0  # on a GPU, where there is one
    retraces: Callable[[Configuration], int | None] = lambda configuration: 0  # of each slice; None where unseen
    skipped_share: Callable[[Configuration], float | None] = lambda configuration: None  # None without a loss scale
    slow_calls: Callable[[Configuration], float] = lambda configuration: 0.0
    """Seconds that the slowest calls of its next slice, one in nine, take beyond the others."""
    cards: Callable[[Configuration, float], tuple[GpuUse, ...]] = lambda configuration, seconds: ()
    uncounted_seconds: float = 0.0
    """What the second slice of a trial that is timed by steps takes beyond what counts in it."""
    model: Callable[[Configuration], Mapping[str, Any]] = lambda configuration: {"parameters": 1000}
    started_by_import: StartedByImport | None = None  # what importing the workload would wake
    seats: tuple[str, ...] = ("simulated",)
    on_launch: Callable[[SimulatedTrial], object] = lambda trial: None  # called with each; where it raises, none starts

    def __post_init__(self) -> None:
        started_by_import = self.started_by_import
        super().__init__()
        self.started_by_import = started_by_import
        self.random = random.Random(self.seed)
        self.clock = SimulatedClock()
        self.at_work: SimulatedTrial | None = None
        self.launched: list[SimulatedTrial] = []
        self.orphaned: set[SimulatedTrial] = set()
        self._ready_at: dict[tuple[tuple[str, str], ...], float] = {}

    @property
    def alive(self) -> list[SimulatedTrial]:
        """The trials that hold memory, in the order they were launched."""
        return [trial for trial in self.launched if trial.alive]

    # --------------------------------------------------------------------------------------------- Trials

    def open(self) -> WorkloadFacts:
        """See `Executor`."""
        self._wait_until(self._start_template({}))
        return self.facts

    def launch(
        self,
        configuration: Configuration,
        *,
        seat: str = "",
        log: str,
        data: Data | None,
        timing: TrialTiming = SEARCH_TIMING,
        losses: Trainings | None = None,
    ) -> SimulatedTrial:
        """See `Executor`; no log is written."""
        known = data in (None, Data(examples=self.examples, endless=self.examples is None))
        assert known, f"the trial was told wrong things of its dataset: {data}"
        self._wait_until(self._start_template(environment(configuration)))
        luck = math.exp(self.random.gauss(0.0, self.instance_noise))
        resolved = configuration
        if configuration["jit_compile"] == "auto":
            resolved = configuration.replace(jit_compile=self.jit_resolves_to)
        trial = self.process(resolved, luck=luck, timing=timing, losses=losses)
        trial.seat, trial.log = seat, log
        self.on_launch(trial)
        self.launched.append(trial)
        return trial

    def process(
        self, configuration: Configuration, *, luck: float, timing: TrialTiming, losses: Trainings | None
    ) -> SimulatedTrial:
        """A trial that `launch` starts."""
        return SimulatedTrial(self, configuration, luck=luck, timing=timing, losses=losses)

    def place(self, seat: str) -> Place:
        """See `Executor`: each seat is a host of its own."""
        return Place(seat=seat, host=seat, device="simulated")

    def drop(self, seat: str) -> None:
        """See `Executor`."""
        self.seats = tuple(name for name in self.seats if name != seat)

    def close(self) -> None:
        """See `Executor`: what a trial is asked from now on, it answers with `crashed`."""
        self._ready_at.clear()
        for trial in self.alive:
            trial.kill()
            self.orphaned.add(trial)

    def _start_template(self, variables: dict[str, str]) -> float:
        """When the template with these environment variables has imported everything."""
        key = tuple(sorted(variables.items()))
        return self._ready_at.setdefault(key, self.clock() + self.import_seconds)

    def _wait_until(self, moment: float) -> None:
        self.clock.advance(max(0.0, moment - self.clock()))
