"""One trial of a script that trains by a loop of its own: its steps are timed where they are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from autotune.devices.telemetry import peak_host_bytes
from autotune.executors.executor import Data
from autotune.recipe import apply
from autotune.record import Boundary
from autotune.scripts.chain import batch_calls, examples_of
from autotune.scripts.facts import ScriptFacts, Site
from autotune.scripts.leaving import few_steps, leave
from autotune.scripts.loop_watch import LoopWatch
from autotune.scripts.side_effects import SideEffects
from autotune.scripts.wrapping import Wrappers
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS, Stage
from autotune.worker import datasets, failures, gauges, gpus, messages
from autotune.worker.boundary import BetweenEpochs
from autotune.worker.closing import FOLDER, profiled_steps
from autotune.worker.slices import TrainingEnded
from autotune.worker.step_clock import StepClock
from autotune.worker.training import Training


def read_with(wrappers: Wrappers, facts: ScriptFacts, dataset: Any) -> Any:
    """The dataset as a loop reads it with the changed options, and prefetched where the script does not."""
    changes = wrappers.settings.changes
    acting = {name: value for name, value in changes.items() if KNOBS[name].stage is Stage.OPTIONS}
    if "prefetch" in changes and "prefetch" not in facts.sites:
        acting["prefetch"] = changes["prefetch"]
    if not acting or not hasattr(dataset, "with_options"):
        return dataset
    with wrappers.inert():
        return apply.pipeline(dataset, Configuration({**acting}), batched=True)


class LoopTraining:
    """Times the loop of a trial.

    Args:
        request: The trial's.
        channel: The pipe to the tuner.
        configuration: The trial's.
        facts: Of the script.
        side_effects: What this process leaves out.
        loss: Which of the numbers that a step returns is the loss, where the user says so.
    """

    def __init__(
        self,
        request: messages.TrialRequest,
        channel: messages.Channel,
        configuration: Configuration,
        facts: ScriptFacts,
        side_effects: SideEffects,
        loss: str | None = None,
    ) -> None:
        self._loss = loss
        self._request, self._channel, self._configuration = request, channel, configuration
        self._facts, self._side_effects = facts, side_effects
        self._clock: StepClock | None = None
        self._restarted = False
        self._waited = 0.0, 0.0  # seconds that slices waited for input, and all of theirs
        self._figures: messages.Finished | None = None
        self._profiler: Iterator[int] | None = None
        self.wrappers: Wrappers
        self.watch: LoopWatch

    @property
    def has_trained(self) -> bool:
        """Whether a step was seen."""
        return self._clock is not None

    def fit(self, model: Any, usual: Callable[..., Any], arguments: dict[str, Any], site: Site) -> Any:
        """See `wrapping.Hooks`: what is trained by `fit` is not what is tuned."""
        return few_steps(model, usual, arguments, self._side_effects.kept(arguments["callbacks"]))

    def restarted(self) -> None:
        """The script has ended before the tuner ends the trial, and begins anew."""
        self._restarted = True
        self.watch.restarted()
        if self._profiler is not None:
            self._last_words("the training ended while it was profiled")

    def reads(self, dataset: Any) -> Any:
        """See `LoopHooks`."""
        return read_with(self.wrappers, self._facts, dataset)

    def epoch_began(self) -> None:
        """See `LoopHooks`."""
        if self._clock is not None and self._clock.progress.training.examples is not None:
            self._clock.epoch_began()

    def epoch_ended(self) -> None:
        """See `LoopHooks`."""
        clock = self._clock
        if clock is None or self._profiler is not None:
            return
        if clock.progress.training.examples is not None and clock.progress.calls:
            self._obeying(clock.epoch_ended)

    def stepped(self, examples: int, logs: Any) -> None:
        """See `LoopHooks`."""
        self._obeying(lambda: self._step(examples, logs))

    def _obeying(self, act: Callable[[], None]) -> None:
        """Act, and end the trial where the tuner says so or something fails: the script must not see it."""
        try:
            with self.wrappers.inert():
                try:
                    act()
                except TrainingEnded as ended:
                    self._end(ended.finish)
        except messages.ChannelClosed:
            leave(1)
        except BaseException as error:
            if self._figures is not None:  # all but the profile was told
                self._last_words(f"{type(error).__name__}: {error}"[:300])
            self._channel.send(failures.told(error))
            leave(1)

    def _step(self, examples: int, logs: Any) -> None:
        if self._profiler is not None:
            if next(self._profiler, None) is None:
                self._last_words()
            return
        if self._clock is None:
            self.wrappers.settings.refuse_missing(self._facts)
            self._clock = self._begin(examples)
        elif self._restarted:
            self._clock.restarted(self.watch.read_at or time.perf_counter())
        self._restarted = False
        self._clock.called(self._with_loss(logs))

    def _with_loss(self, logs: Any) -> Any:
        """The step's numbers, the one that the user names as `loss`."""
        name = self._loss
        return logs if name is None or not logs or name not in logs else {**logs, "loss": logs[name]}

    def _begin(self, examples: int) -> StepClock:
        """Report what is trained, after its first step."""
        import tensorflow as tf

        dataset, request = self.watch.dataset, self._request
        calls, _ = batch_calls(dataset) if isinstance(dataset, tf.data.Dataset) else ([], "")
        size = calls[0].used if calls else examples or self._configuration.batch_size
        began = time.monotonic()
        data = request.data or self._counted(dataset, size)
        counting_seconds = time.monotonic() - began
        training = Training(
            steps_per_call=1,
            batch_size=size,
            examples=data.examples,
            drop_remainder=bool(calls and calls[0].drop_remainder),
            synchronise=tf.test.experimental.sync_devices,
        )
        variables = self._variables()
        self._channel.send(
            messages.Started(
                **data.model_dump(),
                counting_seconds=counting_seconds,
                jit_compile=bool(self.wrappers.settings.value("jit_compile", self.watch.jit_compile)),
                examples_per_epoch=training.examples_per_epoch,
                element=str(getattr(dataset, "element_spec", "batches that the script makes"))[:2000],
                parameters=sum(int(each.shape.num_elements() or 0) for each in map(_tensor, variables)),
                gpus=gpus.gpu_names(),
                device_limit_bytes=gpus.device_limit_bytes(),
                build=gpus.build_versions(),
                not_knobs=apply.not_knobs(),
            )
        )
        measured = [gauges.machine, gauges.device_memory, self._waiting]
        clock = StepClock(
            training,
            self._channel,
            warmup_seconds=request.timing.warmup_seconds,
            epoch_seconds=request.timing.epoch_seconds,
            between_epochs=BetweenEpochs(boundary=_NOT_COUNTED, taken_over=True),
            gauges=measured,
        )
        measured.append(gauges.ruined_weights(self._weights(), clock.progress))
        return clock

    def _counted(self, dataset: Any, size: int) -> Data:
        import tensorflow as tf

        if not isinstance(dataset, tf.data.Dataset):
            return Data(examples=None, endless=True)
        examples = examples_of(dataset, size)
        if examples is None and datasets.elements_in(dataset) != datasets.ENDLESS:
            examples = datasets.examples_in(
                dataset, self._configuration, self._request.count_seconds, batched=True, uneven=True
            )
        return Data(examples=examples, endless=datasets.elements_in(dataset) == datasets.ENDLESS)

    def _variables(self) -> list[Any]:
        return [each for one in self.watch.optimizers for each in getattr(one, "_trainable_variables", ())]

    def _weights(self) -> Any:
        """What the optimizers update, as if it were a model's."""
        variables = self._variables()
        return SimpleNamespace(weights=variables, trainable_weights=variables)

    def _end(self, finish: messages.Finish) -> None:
        """Send the closing figures, and end; where a profile is wanted, some steps later."""
        clock = self._clock
        assert clock is not None
        gauges.refuse_weights_that_are_not_finite(self._weights(), step=clock.progress.steps)
        waited, seconds = self._waited
        figures = messages.Finished(
            peak_host_bytes=peak_host_bytes(), peak_device_bytes=gpus.device_bytes("peak"), input_wait_fraction=None
        )
        self._channel.send(figures)
        if finish.input_wait_seconds <= 0:
            leave(0)
        self._figures = figures.model_copy(
            update={"input_wait_fraction": min(1.0, waited / seconds) if seconds else None}
        )
        folder = Path(self._request.log).parent / FOLDER
        if not finish.profile or folder.exists():
            self._last_words()
        self._profiler = profiled_steps(folder)
        next(self._profiler)

    def _last_words(self, no_profile: str = "") -> NoReturn:
        assert self._figures is not None
        self._channel.send(self._figures.model_copy(update={"no_profile": no_profile}))
        leave(0)

    def _waiting(self) -> Callable[[float], dict[str, Any]]:
        """A gauge of the time in which the loop waits for its next element."""
        before = self.watch.wait_seconds

        def measured(seconds: float) -> dict[str, Any]:
            waited, measured_seconds = self._waited
            self._waited = waited + self.watch.wait_seconds - before, measured_seconds + seconds
            return {}

        return measured


_NOT_COUNTED = Boundary(seconds=0.0, validation_seconds=0.0, seconds_per_example=1.0, tail_excluded=False)
"""What lies between two long epochs of a loop: it is not known which of the script's lines belong to it."""


def _tensor(variable: Any) -> Any:
    return getattr(variable, "value", variable)


def losses_unknown(request: messages.TrialRequest, channel: messages.Channel) -> None:
    """Answer that a loop's losses cannot be compared: its weights cannot be made anew."""
    channel.send(messages.LossCurves(curves=(), gpus=gpus.gpu_names()))
