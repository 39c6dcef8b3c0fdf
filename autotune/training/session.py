"""One training inside one process, and the trial that times it for the tuner.

An adapter makes a `TrainingSession`: Keras's `fit` (`training/fit.py`) or a loop of a script's own
(`script/loop_trial.py`). It tells the trial's clock when an epoch begins, a call ends and an epoch ends. What both have
in common is here: the announcement, the gauges, the closing figures and the profile.
"""

from __future__ import annotations

import abc
import json
import math
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from autotune.data.printable import printable
from autotune.machine.telemetry import peak_host_bytes
from autotune.recipe.apply import list_devices, not_knobs
from autotune.recipe.tf_private import tf
from autotune.runtime.protocol import Channel, Data, Finish, Finished, Started, TrialRequest
from autotune.training import gauges
from autotune.training.clock import StepClock
from autotune.training.gauges import Gauge, Weights
from autotune.training.progress import BetweenEpochs, Progress, Training

PROFILED_STEPS, PROFILE_SECONDS = 20, 3.0  # no further step begins that would end later; XProf reads 10 s
PROFILE_FOLDER, WINDOW = "profile", "window.json"  # beside the log; and its file of the profiled steps and seconds
LONGEST_ELEMENT, LONGEST_REASON = 2000, 300
LEAST_FIRST_STEPS, FIRST_SHARE = 10, 0.05  # of a training, before the state that others branch from


class TrainingSession(abc.ABC):
    """One training inside this process."""

    strategy: Any = None
    """The `tf.distribute` strategy that says which GPUs it uses; None where nothing says."""
    planned_steps = 0
    """Of the whole training, where the script says; 0 elsewhere."""
    time_writers: Callable[[], float | None] = staticmethod(lambda: None)
    """Times the writers that the trial omits, at the end of an epoch."""

    def __init__(self, training: Training, data: Data) -> None:
        self.training, self.data = training, data
        self.progress = Progress(training)

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the fields of `Started` that this kind of training knows."""

    @abc.abstractmethod
    def weights(self) -> Weights:
        """Return the weights that are trained, and those beside them."""

    @abc.abstractmethod
    def gauges(self) -> list[Gauge]:
        """Return the gauges that only this kind of training has."""

    def save_state(self, file: Path) -> bool:
        """Save weights and optimizer, where this kind of training can go on from them; return whether it did."""
        return False

    @abc.abstractmethod
    def close(self, finish: Finish, clock: StepClock) -> Generator[int, None, dict[str, Any]]:
        """Measure the fields of `Finished` that take time, and return them; at each item the training makes a step."""


class TimedTrial:
    """Times a session: announces it, cuts it into slices, and sends its closing figures."""

    def __init__(
        self, session: TrainingSession, request: TrialRequest, channel: Channel, *, between_epochs: BetweenEpochs | None
    ) -> None:
        self._session, self._channel = session, channel
        self._profile_folder = Path(request.log).parent / PROFILE_FOLDER
        self._figures: Finished | None = None
        timing, longest = request.timing, request.timing.longest_boundary_epoch_seconds or math.inf
        if timing.boundary is not None:  # as the baseline was timed, so are the others
            longest = math.inf if timing.boundary.measured else 0.0
        # Batch sizes are compared from a state past the chaos of the first steps, while losses still fall.
        first_steps = FIRST_SHARE * session.planned_steps or session.training.steps_per_epoch or math.inf
        state, facts = timing.save_state, session.facts()
        channel.send(
            Started(
                **session.data.model_dump(),
                **facts | {"element": facts["element"][:LONGEST_ELEMENT]},
                examples_per_epoch=session.training.examples_per_epoch,
                gpus=gauges.gpu_names(),
                devices=len(list_devices()),
                device_limit_bytes=gauges.device_limit_bytes(),
                build=gauges.build_versions(),
                not_knobs=not_knobs(),
            )
        )
        self.clock = StepClock(
            session.progress,
            channel,
            warmup_seconds=timing.warmup_seconds,
            epoch_seconds=timing.epoch_seconds,
            between_epochs=between_epochs,
            longest_boundary_epoch_seconds=longest,
            saves_state=lambda: bool(state) and session.save_state(Path(state)),
            save_after=max(LEAST_FIRST_STEPS, first_steps) if state else math.inf,
            time_writers=session.time_writers,
            gauges=[
                *gauges.gpu_gauges(gauges.cards_in_use(session.strategy)),
                gauges.measure_machine,
                lambda: lambda _: {"device_bytes": gauges.device_bytes()},
                *session.gauges(),
                gauges.finite_weights_gauge(session.weights, session.progress),
            ],
            describe_weights=lambda: gauges.describe_weights(session.weights()),
        )

    def close(self, finish: Finish) -> Iterator[int]:
        """Send the closing figures: at once, and again with what takes time where that is asked for.

        Returns:
            More steps, one call of the train function at each item. `send_final` reports what fails in them.
        """
        figures = Finished(
            peak_host_bytes=peak_host_bytes(),
            peak_device_bytes=gauges.device_bytes("peak"),
            input_wait_fraction=None,
            outside_fraction=self.clock.slices.outside_fraction,
            calls_per_epoch=self._session.progress.calls_of_last_epoch or None,
        )
        gauges.check_finite_weights(self._session.weights(), step=self._session.progress.steps)
        self._channel.send(figures)
        if finish.input_wait_seconds <= 0:
            return iter(())
        self._figures = figures
        return self._closing_steps(finish)

    def _closing_steps(self, finish: Finish) -> Iterator[int]:
        assert self._figures is not None
        found = yield from self._session.close(finish, self.clock)
        self._figures = self._figures.model_copy(update=found)
        if finish.profile and not self._profile_folder.exists():
            calls, synchronise = self._session.training.steps_per_call, self._session.training.synchronise
            yield from _profile(self._profile_folder, steps_per_call=calls, synchronise=synchronise)
        self.send_final()

    def send_final(self, no_profile: BaseException | str = "") -> None:
        """Send the closing figures again, with all that was measured, and why there is no profile."""
        assert self._figures is not None
        why = no_profile if isinstance(no_profile, str) else f"{type(no_profile).__name__}: {no_profile}"
        self._channel.send(self._figures.model_copy(update={"no_profile": printable(why)[:LONGEST_REASON]}))


def _profile(folder: Path, *, steps_per_call: int, synchronise: Callable[[], object]) -> Iterator[int]:
    """Profile the work at each item, one call of several steps, into a folder that TensorBoard and XProf open."""
    tf.profiler.experimental.start(str(folder))
    began, calls, taken = time.perf_counter(), 0, 0.0
    while calls < PROFILED_STEPS and taken * (1 + 1 / max(1, calls)) < PROFILE_SECONDS:
        with tf.profiler.experimental.Trace("train", step_num=calls, _r=1):
            yield calls
        calls, taken = calls + 1, time.perf_counter() - began
    synchronise()
    seconds = time.perf_counter() - began
    tf.profiler.experimental.stop()
    (folder / WINDOW).write_text(json.dumps({"steps": calls * steps_per_call, "seconds": seconds}), encoding="utf-8")
