"""One trial of a script with a custom training loop: its steps are timed where they are made."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from autotune.data.facts import ScriptFacts, ScriptSettings, Site, WorkloadReference
from autotune.data.record import Boundary, Outcome
from autotune.recipe import apply
from autotune.recipe.tf_private import tf
from autotune.runtime import failures, protocol
from autotune.runtime.executor import TrialFailed
from autotune.runtime.sources import directory_of
from autotune.runtime.supervisor import exit_now
from autotune.script.dataset_trace import batch_calls, drops_remainder, examples_of
from autotune.script.fit_call import few_steps
from autotune.script.graph_step import StepCompiler
from autotune.script.interpose import Hooks, Wrappers
from autotune.script.loop_watch import LoopWatch
from autotune.script.sandbox import SideEffects
from autotune.script.settings import Settings
from autotune.space.configuration import Configuration
from autotune.space.keras_in_use import keras_in_use
from autotune.training.boundary import CALLS_PER_EPOCH, Gaps
from autotune.training.clock import LongEpoch, StepClock
from autotune.training.gauges import Gauge, Weights
from autotune.training.pipeline import count_data
from autotune.training.progress import BetweenEpochs, Training
from autotune.training.session import TimedTrial, TrainingSession
from autotune.training.slices import TrainingEnded


class LoopSession(TrainingSession):
    """A training by a custom loop."""

    def __init__(
        self,
        watch: LoopWatch,
        examples: int,
        request: protocol.TrialRequest,
        configuration: Configuration,
        settings: Settings,
    ) -> None:
        facts, dataset = request.script, watch.dataset
        assert facts is not None
        self._watch, self._settings = watch, settings
        self._shares_reading = facts.workers > 1  # workers read together: one that keeps its element would stop all
        self._is_dataset = isinstance(dataset, tf.data.Dataset)
        self._waited = self._measured = 0.0  # seconds that slices waited for input, and all of theirs
        used = batch_used(watch)
        size = 1 if facts.work_varies else watch.parts * used if used else examples or configuration.batch_size
        began = time.monotonic()
        data, seconds = request.data, request.count_seconds
        # Epochs are not seen where each step reads its batch itself, and not known where several replicas read.
        if data is None and (watch.by_call or watch.parts > 1 or not self._is_dataset):
            data = protocol.Data(examples=None, endless=True)
        data = data or count_data(dataset, batch_size=size, seconds=seconds, known_examples=examples_of(dataset, size))
        self._counting_seconds = time.monotonic() - began
        training = Training(
            steps_per_call=max(1, examples // size) if watch.by_call else 1,
            batch_size=size,
            examples=data.examples,
            drop_remainder=self._is_dataset and drops_remainder(dataset),
            synchronise=self._wait_for_update if facts.workers > 1 else tf.test.experimental.sync_devices,
        )
        super().__init__(training, data)

    def _wait_for_update(self) -> None:
        """Wait for what was updated last: `sync_devices` fails where other workers have devices, too."""
        for variable in self.weights().variables[-1:]:
            variable.numpy()

    def facts(self) -> dict[str, Any]:
        """See `TrainingSession`."""
        dataset, watch = self._watch.dataset, self._watch
        return {
            "counting_seconds": self._counting_seconds,
            "jit_compile": bool(self._settings.value("jit_compile", watch.jit_compile)),
            "element": str(getattr(dataset, "element_spec", "batches that the script makes")),
            "batch_ranks": apply.batch_ranks(dataset) if self._is_dataset else (),
        }

    def weights(self) -> Weights:
        """Return what the optimizers update; in a first step that is one function, what the first of them does.

        The same step has updated no more yet where each operation runs by itself.
        """
        is_first = self._watch.by_call and self.progress.calls < 2 and self._watch.updaters == 1
        variables = self._watch.trained_weights(1 if is_first and "graph_step" in self._settings.changes else None)
        return Weights(variables, variables)

    def gauges(self) -> list[Gauge]:
        """Return a gauge that adds up the time in which the loop waits for its next element."""

        def gauge() -> Callable[[float], dict[str, Any]]:
            before = self._watch.wait_seconds

            def measured(seconds: float) -> dict[str, Any]:
                self._waited += self._watch.wait_seconds - before
                self._measured += seconds
                return {}

            return measured

        return [gauge]

    def close(self, finish: protocol.Finish, clock: StepClock) -> Generator[int, None, dict[str, Any]]:
        """See `TrainingSession`: what the pipeline takes from the step's own cores counts as waiting, too."""
        if not self._measured or self._watch.by_call:  # where a call reads by itself, its wait is not seen
            return {}
        call_seconds = None
        if not self._shares_reading:
            self._watch.keeps_element = True
            call_seconds = yield from timed_calls(clock, finish.input_wait_seconds)
            self._watch.keeps_element = False
        waits, usual = self._waited / self._measured, clock.slices.usual_call_seconds  # a script may rest between some
        if call_seconds is not None and usual:
            waits = max(waits, 1 - call_seconds / usual)
        return {"input_wait_fraction": min(1.0, waits)}


def timed_calls(clock: StepClock, seconds: float) -> Generator[int, None, float | None]:
    """Return a call's median time after a first one, over so long; None where another epoch begins. An item is a call.

    There are two such calls at least.
    """
    progress, ends = clock.progress, list[float]()
    calls = progress.calls
    while len(ends) < 3 or ends[-1] - ends[0] < seconds:
        yield len(ends)
        if progress.calls != calls:
            return None
        progress.training.synchronise()
        ends.append(clock.now())
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def batch_used(watch: LoopWatch) -> int | None:
    """Return the batch size of a loop's dataset; None where it reads none, or no call gives one."""
    calls = batch_calls(watch.dataset)[0] if isinstance(watch.dataset, tf.data.Dataset) else []
    return calls[0].used if calls else None


@dataclass(eq=False)
class TrialHooks(Hooks):
    """The hooks common to all trials, whichever way the script trains."""

    request: protocol.TrialRequest
    channel: protocol.Channel
    configuration: Configuration
    facts: ScriptFacts
    reference: WorkloadReference

    def __post_init__(self) -> None:
        """Make what acts on the script."""
        self.effects = SideEffects(self.reference, self.fail)
        settings = Settings.from_configuration(self.configuration, self.facts)
        self.wrappers = Wrappers(settings, self, directory_of(self.reference), self.effects.scratch)

    def restarts(self) -> bool:
        """Return whether the script, which has ended, is to run again: its training is shorter than the trial."""
        return False

    def fit(self, model: Any, usual: Callable[..., Any], arguments: dict[str, Any], site: Site) -> Any:
        """See `Hooks`: this `fit` is not the one that is tuned."""
        return few_steps(model, usual, arguments, self.effects.without_writers(arguments["callbacks"]))

    def _obey(self, act: Callable[[], None]) -> None:
        """Act, and end the trial where that fails: the script must not see it."""
        try:
            with self.wrappers.inert():
                act()
        except protocol.ChannelClosed:
            exit_now(1)
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Report this error, and end the trial."""
        if isinstance(error, TrialFailed) and error.input_error and self.facts.fit_site is not None:
            where = f"{self.facts.fit_site}: "
            error.reason = where + error.reason.removeprefix(where)
        self.channel.send(failures.encode_failure(error))
        exit_now(1)


class LoopTraining(TrialHooks):
    """Times the training of a script by a loop of its own."""

    def __post_init__(self) -> None:
        """Make what watches and times the loop."""
        super().__post_init__()
        self._watch = LoopWatch(self.wrappers, self.facts, finds_compiled=bool(self.request.timing.compiled))
        self._trial: TimedTrial | None = None
        self._restarted = False
        self._gaps: Gaps | None = None  # between two long epochs, while they are measured
        self._last_step_at: float | None = None
        self._closing_steps: Iterator[int] | None = None
        self._compiler: StepCompiler | None = None
        if self.wrappers.settings.changes.get("graph_step"):
            steps, directory = self.facts.sites["graph_step"], directory_of(self.reference)
            self._compiler = StepCompiler(steps, self.wrappers.settings, directory, self._obey)

    def imported(self, name: str) -> None:
        """See `Hooks`."""
        if name == keras_in_use().package:
            self._watch.install(sys.modules["tensorflow"])
            self._watch.install_keras(sys.modules[name])

    def restarts(self) -> bool:
        """See `TrialHooks`."""
        self._restarted = True
        self._watch.restarted()
        self._time_by_steps()
        if self._closing_steps is not None:
            self._end("the training ended while its last steps were measured")
        return self._trial is not None

    def epoch_began(self) -> None:
        """See `Hooks`."""
        if self._trial is None or self._trial.clock.progress.training.examples is None:
            return
        clock, is_seen_whole = self._trial.clock, self._gaps is None and not self._restarted
        if self._gaps is not None and self._last_step_at is not None:
            self._gaps.add(time.perf_counter() - self._last_step_at)
            if self._gaps.are_enough:
                self._time_by_steps()
        if is_seen_whole and clock.progress.calls:  # the script may have left the epoch before its data ended
            clock.progress.calls_of_last_epoch = clock.progress.calls
        clock.epoch_began()

    def cuts_epoch(self, can_be_cut: Callable[[], bool]) -> bool:
        """See `Hooks`."""
        if self._gaps is None or self._trial is None or self._trial.clock.progress.calls < CALLS_PER_EPOCH:
            return False
        if can_be_cut():
            return True
        self._time_by_steps()  # without what lies between
        return False

    def _time_by_steps(self) -> None:
        """Continue by steps, now that it is known what the script does between two long epochs."""
        if self._gaps is None or self._trial is None:
            return
        clock = self._trial.clock
        training, call_seconds = clock.progress.training, clock.warm_up.usual_call_seconds
        boundary = Boundary(
            seconds=0.0,
            validation_seconds=self._gaps.usual_seconds,
            seconds_per_example=call_seconds / (training.steps_per_call * training.batch_size),
        )
        self._gaps = None
        clock.time_by_steps(BetweenEpochs(boundary=boundary))

    def epoch_ended(self) -> None:
        """See `Hooks`."""
        if self._trial is None or self._closing_steps is not None:
            return
        progress = self._trial.clock.progress
        if progress.training.examples is not None and progress.calls:
            self._trial.clock.epoch_ended()

    def stepped(self, examples: int, logs: Any) -> None:
        """See `Hooks`."""
        self._obey(partial(self._step, examples, logs))

    def _step(self, examples: int, logs: Any) -> None:
        """Time a step, and end the trial where the tuner says so, or some steps later where these measure more."""
        try:
            if self._closing_steps is None:
                self._time(examples, logs)
        except TrainingEnded as ended:
            assert self._trial is not None
            if self._compiler is not None:
                self._compiler.finish()
            self._closing_steps = self._trial.close(ended.finish)
        except LongEpoch:  # the epoch takes too long to be timed whole
            self._gaps = Gaps()
            self._note_step()
        if self._closing_steps is not None and next(self._closing_steps, None) is None:
            exit_now(0)

    def _note_step(self) -> None:
        """Note when the devices have done a step before a gap."""
        assert self._trial is not None
        self._trial.clock.progress.training.synchronise()
        self._last_step_at = time.perf_counter()

    def _time(self, examples: int, logs: Any) -> None:
        if self._trial is None:
            took = time.perf_counter() - (self._watch.step_began_at or time.perf_counter())
            self._trial = self._begin(examples)
            self._trial.clock.note_begun(took)
        elif self._restarted:
            self._trial.clock.restarted(self._watch.read_at or time.perf_counter())
        self._restarted = False
        if self._gaps is None:
            loss = (self.reference.script or ScriptSettings()).loss
            self._trial.clock.call_ended({**logs, "loss": logs[loss]} if logs and loss in logs else logs)
        else:
            self._trial.clock.progress.calls += 1
            self._note_step()

    def _begin(self, examples: int) -> TimedTrial:
        """Announce the training, after its first step, if the configuration is in force."""
        self.wrappers.settings.refuse_missing(self.facts)
        used, wanted = batch_used(self._watch), self.configuration.batch_size
        if used is not None and "batch_size" in self.facts.sites and used != wanted:
            why = f"the script trains in batches of {used} instead of {wanted}: it retries with another size itself"
            raise TrialFailed(Outcome.ERROR, why)
        session = LoopSession(self._watch, examples, self.request, self.configuration, self.wrappers.settings)
        known = self.request.timing.boundary
        if self.facts.workers > 1:  # they would have to end an epoch early together, so nothing counts between epochs
            known = Boundary(seconds=0.0, seconds_per_example=1.0)
        between_epochs = None if known is None else BetweenEpochs(boundary=known, taken_over=True)
        return TimedTrial(session, self.request, self.channel, between_epochs=between_epochs)

    def _end(self, no_profile: BaseException | str) -> NoReturn:
        assert self._trial is not None
        self._trial.send_final(no_profile)
        exit_now(0)

    def fail(self, error: BaseException) -> NoReturn:
        """See `TrialHooks`."""
        if self._closing_steps is not None:  # the closing figures were sent
            self._end(error)
        super().fail(error)


class OtherWorker(LoopTraining):
    """Trains along with the worker that is timed, until that one ends."""

    def restarts(self) -> bool:
        """See `TrialHooks`."""
        self._watch.restarted()
        return True

    def stepped(self, examples: int, logs: Any) -> None:
        """See `Hooks`: nothing is timed here."""
