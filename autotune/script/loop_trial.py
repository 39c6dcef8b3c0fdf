"""One trial of a script that trains by a loop of its own: its steps are timed where they are made."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from autotune.data.facts import ScriptFacts, ScriptSettings, Site, WorkloadReference
from autotune.data.record import Boundary, Outcome
from autotune.machine.telemetry import peak_host_bytes
from autotune.recipe import apply
from autotune.recipe.apply import list_devices
from autotune.runtime import failures, protocol
from autotune.runtime.executor import Data
from autotune.runtime.sources import directory_of
from autotune.script.dataset_trace import batch_calls, drops_remainder, examples_of
from autotune.script.execute import leave
from autotune.script.fit_call import few_steps
from autotune.script.interpose import Hooks, Wrappers
from autotune.script.loop_watch import LoopWatch
from autotune.script.refits import CALLS_PER_EPOCH, Gaps
from autotune.script.sandbox import SideEffects
from autotune.script.settings import Settings
from autotune.space.configuration import Configuration
from autotune.training import datasets, gauges, gpus
from autotune.training.boundary import BetweenEpochs
from autotune.training.clock import LongEpoch, StepClock
from autotune.training.closing import FOLDER, profiled_steps
from autotune.training.session import Training
from autotune.training.slices import TrainingEnded


@dataclass(eq=False)
class TrialHooks(Hooks):
    """What trials do, whichever way the script trains."""

    request: protocol.TrialRequest
    channel: protocol.Channel
    configuration: Configuration
    facts: ScriptFacts
    reference: WorkloadReference

    def __post_init__(self) -> None:
        """Make what acts on the script."""
        self.effects = SideEffects(self.reference, self._failed)
        settings = Settings.of(self.configuration, self.facts)
        self.wrappers = Wrappers(settings, self, directory_of(self.reference), self.effects.scratch)

    def restarted(self) -> bool:
        """The script has ended; whether its training was seen, which is shorter than the trial, and begins anew."""
        return False

    def _obeying(self, act: Callable[[], None]) -> None:
        """Act, and end the trial where that fails: the script must not see it."""
        try:
            with self.wrappers.inert():
                act()
        except protocol.ChannelClosed:
            leave(1)
        except BaseException as error:
            self._failed(error)

    def _failed(self, error: BaseException) -> NoReturn:
        self.effects.training_begins()
        self.channel.send(failures.told(error))
        leave(1)


class LoopTraining(TrialHooks):
    """Times the loop of a trial."""

    def __post_init__(self) -> None:
        """Make what times the loop."""
        super().__post_init__()
        self._clock: StepClock | None = None
        self._restarted = False
        self._waited = self._measured = 0.0  # seconds that slices waited for input, and all of theirs
        self._gaps: Gaps | None = None  # between two long epochs, while they are measured
        self._last_step_at: float | None = None
        self._figures: protocol.Finished | None = None
        self._profiler: Iterator[int] | None = None
        self._watch = LoopWatch(self.wrappers, self.facts)

    def imported(self, name: str) -> None:
        """See `Hooks`."""
        if name == "keras":
            self._watch.install(sys.modules["tensorflow"], sys.modules["keras"])

    def fit(self, model: Any, usual: Callable[..., Any], arguments: dict[str, Any], site: Site) -> Any:
        """See `Hooks`: what is trained by `fit` is not what is tuned."""
        return few_steps(model, usual, arguments, self.effects.without_writers(arguments["callbacks"]))

    def restarted(self) -> bool:
        """See `TrialHooks`."""
        self._restarted = True
        self._watch.restarted()
        self._time_by_steps()
        if self._profiler is not None:
            self._last_words("the training ended while it was profiled")
        return self._clock is not None

    def epoch_began(self) -> None:
        """See `Hooks`."""
        if self._clock is None or self._clock.progress.training.examples is None:
            return
        if self._gaps is not None and self._last_step_at is not None:
            self._gaps.add(time.perf_counter() - self._last_step_at)
            if self._gaps.are_enough:
                self._time_by_steps()
        self._clock.epoch_began()

    def cuts_epoch(self, can_be_cut: Callable[[], bool]) -> bool:
        """See `Hooks`."""
        if self._gaps is None or self._clock is None or self._clock.progress.calls < CALLS_PER_EPOCH:
            return False
        if can_be_cut():
            return True
        self._time_by_steps()  # without what lies between
        return False

    def _time_by_steps(self) -> None:
        """Go on by steps, now that it is known what the script does between two long epochs."""
        if self._gaps is None or self._clock is None:
            return
        training, call_seconds = self._clock.progress.training, self._clock.warm_up.usual_call_seconds
        boundary = Boundary(
            seconds=0.0,
            validation_seconds=self._gaps.usual_seconds,
            seconds_per_example=call_seconds / (training.steps_per_call * training.batch_size),
        )
        self._gaps = None
        self._clock.time_by_steps(BetweenEpochs(boundary=boundary))

    def epoch_ended(self) -> None:
        """See `Hooks`."""
        clock = self._clock
        if clock is None or self._profiler is not None:
            return
        if clock.progress.training.examples is not None and clock.progress.calls:
            self._timed(clock.epoch_ended)

    def stepped(self, examples: int, logs: Any) -> None:
        """See `Hooks`."""
        self._timed(lambda: self._step(examples, logs))

    def _timed(self, act: Callable[[], None]) -> None:
        """Act, and end the trial where the tuner says so."""

        def obey() -> None:
            try:
                act()
            except TrainingEnded as ended:
                self._end(ended.finish)
            except LongEpoch:  # an epoch has ended that took too long to be timed whole
                self._gaps, self._last_step_at = Gaps(), time.perf_counter()

        self._obeying(obey)

    def _step(self, examples: int, logs: Any) -> None:
        if self._profiler is not None:
            if next(self._profiler, None) is None:
                self._last_words()
            return
        if self._clock is None:
            self.wrappers.settings.refuse_missing(self.facts)
            self._clock = self._begin(examples)
        elif self._restarted:
            self._restarted = False
            self._clock.restarted(self._watch.read_at or time.perf_counter())
        self._restarted = False
        loss = (self.reference.script or ScriptSettings()).loss
        if logs and loss in logs:
            logs = {**logs, "loss": logs[loss]}
        try:
            if self._gaps is None:
                self._clock.called(logs)
            else:
                self._clock.progress.calls += 1
        except LongEpoch:
            self._gaps = Gaps()
        if self._gaps is not None:
            self._clock.progress.training.synchronise()
            self._last_step_at = time.perf_counter()

    def _begin(self, examples: int) -> StepClock:
        """Report what is trained, after its first step."""
        import tensorflow as tf

        self.effects.training_begins()
        dataset, request = self._watch.dataset, self.request
        is_dataset = isinstance(dataset, tf.data.Dataset)
        calls = batch_calls(dataset)[0] if is_dataset else []
        if calls and "batch_size" in self.facts.sites and calls[0].used != self.configuration.batch_size:
            raise failures.TrainingFailed(
                Outcome.ERROR,
                f"the script trains in batches of {calls[0].used} in place of {self.configuration.batch_size}: "
                "it tries again with another size by itself",
            )
        size = self._watch.parts * calls[0].used if calls else examples or self.configuration.batch_size
        size = 1 if self.facts.work_varies else size
        began = time.monotonic()
        # Epochs are not seen where each step reads its batch itself, and not known where several replicas read.
        unknown = self._watch.by_call or self._watch.parts > 1
        endless = Data(examples=None, endless=True) if unknown else None
        data = request.data or endless or _counted(dataset, size, self.configuration, request.count_seconds)
        counting_seconds = time.monotonic() - began
        synchronise = partial(_wait_for, self._weights) if self.facts.workers > 1 else tf.test.experimental.sync_devices
        training = Training(
            steps_per_call=max(1, examples // size) if self._watch.by_call else 1,
            batch_size=size,
            examples=data.examples,
            drop_remainder=is_dataset and drops_remainder(dataset),
            synchronise=synchronise,
        )
        weights = [getattr(each, "value", each) for each in self._weights().weights]
        self.channel.send(
            protocol.Started(
                **data.model_dump(),
                counting_seconds=counting_seconds,
                jit_compile=bool(self.wrappers.settings.value("jit_compile", self._watch.jit_compile)),
                examples_per_epoch=training.examples_per_epoch,
                element=str(getattr(dataset, "element_spec", "batches that the script makes"))[:2000],
                batch_ranks=apply.batch_ranks(dataset) if is_dataset else (),
                parameters=sum(int(each.shape.num_elements() or 0) for each in weights),
                gpus=gpus.gpu_names(),
                devices=len(list_devices()),
                device_limit_bytes=gpus.device_limit_bytes(),
                build=gpus.build_versions(),
                not_knobs=apply.not_knobs(),
            )
        )
        measured = [*gauges.gpus(gpus.cards()), gauges.machine, gauges.device_memory, self._waiting]
        known = request.timing.boundary
        if self.facts.workers > 1:  # to end an epoch early, they would have to do so together: nothing counts there
            known = Boundary(seconds=0.0, seconds_per_example=1.0)
        clock = StepClock(
            training,
            self.channel,
            warmup_seconds=request.timing.warmup_seconds,
            epoch_seconds=request.timing.epoch_seconds,
            between_epochs=None if known is None else BetweenEpochs(boundary=known, taken_over=True),
            gauges=measured,
        )
        measured.append(gauges.ruined_weights(self._weights(), clock.progress))
        return clock

    def _weights(self) -> Any:
        """What the optimizers update, as if it were a model's."""
        optimizers = self._watch.optimizers.values()
        variables = [each for one in optimizers for each in getattr(one, "_trainable_variables", ())]
        return SimpleNamespace(weights=variables, trainable_weights=variables)

    def _end(self, finish: protocol.Finish) -> None:
        """Send the closing figures, and end; where a profile is wanted, some steps later."""
        assert self._clock is not None
        gauges.refuse_weights_that_are_not_finite(self._weights(), step=self._clock.progress.steps)
        figures = protocol.Finished(
            peak_host_bytes=peak_host_bytes(), peak_device_bytes=gpus.device_bytes("peak"), input_wait_fraction=None
        )
        self.channel.send(figures)
        if finish.input_wait_seconds <= 0:
            leave(0)
        seen = self._measured and not self._watch.by_call  # a call's own reading is not
        waited = min(1.0, self._waited / self._measured) if seen else None
        self._figures = figures.model_copy(update={"input_wait_fraction": waited})
        folder = Path(self.request.log).parent / FOLDER
        if not finish.profile or folder.exists():
            self._last_words()
        training = self._clock.progress.training
        self._profiler = profiled_steps(
            folder, steps_per_call=training.steps_per_call, synchronise=training.synchronise
        )
        next(self._profiler)

    def _last_words(self, no_profile: str = "") -> NoReturn:
        assert self._figures is not None
        self.channel.send(self._figures.model_copy(update={"no_profile": no_profile}))
        leave(0)

    def _failed(self, error: BaseException) -> NoReturn:
        if self._figures is not None:  # all but the profile was told
            self._last_words(f"{type(error).__name__}: {error}"[:300])
        super()._failed(error)

    def _waiting(self) -> Callable[[float], dict[str, Any]]:
        """A gauge of the time in which the loop waits for its next element."""
        before = self._watch.wait_seconds

        def measured(seconds: float) -> dict[str, Any]:
            self._waited += self._watch.wait_seconds - before
            self._measured += seconds
            return {}

        return measured


class OtherWorker(LoopTraining):
    """Trains along with the worker that is timed, until that one ends."""

    def restarted(self) -> bool:
        """See `TrialHooks`."""
        self._watch.restarted()
        return True

    def stepped(self, examples: int, logs: Any) -> None:
        """See `Hooks`: nothing is timed here."""


def _wait_for(weights: Callable[[], Any]) -> None:
    """Wait for what was updated last: `sync_devices` fails where other workers have devices, too."""
    for each in weights().weights[-1:]:
        each.numpy()


def _counted(dataset: Any, size: int, configuration: Configuration, seconds: float) -> Data:
    import tensorflow as tf

    if not isinstance(dataset, tf.data.Dataset):
        return Data(examples=None, endless=True)
    examples, endless = examples_of(dataset, size), datasets.elements_in(dataset) == datasets.ENDLESS
    if examples is None and not endless:
        examples = datasets.examples_in(dataset, configuration, seconds, batched=True, uneven=True)
    return Data(examples=examples, endless=endless)
