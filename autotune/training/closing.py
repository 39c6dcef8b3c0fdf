"""What is measured of a trial once its slices are over: peak memory, the wait for input, ceilings, a profile.

Something new to measure then belongs here. Profiled steps are slower, so they come last.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.data.figures import Ceilings
from autotune.data.printable import printable
from autotune.machine.telemetry import peak_host_bytes
from autotune.recipe.lazy import keras, tf
from autotune.runtime.protocol import Channel, Finish, Finished
from autotune.training.gauges import refuse_weights_that_are_not_finite
from autotune.training.gpus import device_bytes

if TYPE_CHECKING:
    from autotune.recipe.apply import TrainingPipeline
    from autotune.training.clock import StepClock

STEPS, LONGEST_SECONDS = 20, 3.0  # that are profiled, and no further one so long after the first; XProf reads 10 s
FOLDER, WINDOW = "profile", "window.json"  # beside the log; and its file of the steps and seconds that were profiled


def tell(
    channel: Channel, model: keras.Model, clock: StepClock, finish: Finish, train: TrainingPipeline, log: Path
) -> None:
    """Send the closing figures: at once, and again with what takes time where that is asked for.

    A profile goes beside the log.
    """
    figures = Finished(
        peak_host_bytes=peak_host_bytes(),
        peak_device_bytes=device_bytes("peak"),
        input_wait_fraction=None,
        outside_fraction=clock.slices.outside_fraction,
    )
    refuse_weights_that_are_not_finite(model, step=clock.progress.steps)
    channel.send(figures)
    seconds, in_slices, training = finish.input_wait_seconds, clock.slices.call_seconds, clock.progress.training
    if seconds <= 0:
        return
    kept = kept_call_seconds(model, clock.iterator, seconds) if in_slices else None
    found: dict[str, Any] = {}
    if kept and in_slices:  # what the pipeline takes from the step's own cores counts as waiting
        found["input_wait_fraction"] = min(1.0, max(0.0, 1.0 - kept / in_slices))
    if finish.ceilings:
        each = None
        if train.source is None:
            endless = train.dataset if train.in_force.get("persistent_iterator") else train.dataset.repeat()
            each = _seconds_each(functools.partial(next, iter(endless)), seconds)
        found["ceilings"] = Ceilings(
            by_input=training.batch_size / each if each else None,
            by_compute=training.batch_size * training.steps_per_call / kept if kept else None,
        )
    folder = log.parent / FOLDER
    if finish.profile and not folder.exists():
        found["no_profile"] = _profile_fit(model, clock.iterator, train.dataset, folder)
    channel.send(figures.model_copy(update=found))


def kept_call_seconds(model: keras.Model, iterator: Any, seconds: float) -> float | None:
    """What a call of the train function takes on a batch that is kept in memory: it does not wait for input.

    The batch is the iterator's next one. None where it has none left, or its batches are spread over devices.
    """
    batch = next(iterator, None) if isinstance(iterator, tf.data.Iterator) else None
    if batch is None:
        return None
    # In the pipeline's shapes, so that nothing is traced again.
    again = tf.data.Dataset.from_generator(lambda: [batch], output_signature=iterator.element_spec)
    return _seconds_each(functools.partial(model.train_function, iter(again.cache().repeat())), seconds)


def _seconds_each(call: Callable[[], Any], seconds: float) -> float | None:
    """What a call takes after a first one, by calls for so long, two at least; None where data runs out."""
    calls, began = -1, 0.0
    try:
        while calls < 2 or time.perf_counter() - began < seconds:
            call()
            calls += 1
            if calls == 0:
                tf.test.experimental.sync_devices()
                began = time.perf_counter()
    except StopIteration:
        return None
    tf.test.experimental.sync_devices()
    return (time.perf_counter() - began) / calls


def profiled_steps(folder: Path, *, steps_per_call: int, synchronise: Callable[[], object]) -> Iterator[int]:
    """Profile what is done at each item, one call of so many steps, into a folder that TensorBoard and XProf open."""
    tf.profiler.experimental.start(str(folder))
    began, calls = time.perf_counter(), 0
    while calls < STEPS and (not calls or time.perf_counter() - began < LONGEST_SECONDS):
        with tf.profiler.experimental.Trace("train", step_num=calls, _r=1):
            yield calls
        calls += 1
    synchronise()
    seconds = time.perf_counter() - began
    tf.profiler.experimental.stop()
    (folder / WINDOW).write_text(json.dumps({"steps": calls * steps_per_call, "seconds": seconds}), encoding="utf-8")


def _profile_fit(model: keras.Model, iterator: Any, dataset: tf.data.Dataset, folder: Path) -> str:
    """Profile steps of a model's train function; why that could not be done, or an empty string."""
    try:
        steps, synchronise = int(model.steps_per_execution), tf.test.experimental.sync_devices
        for _ in profiled_steps(folder, steps_per_call=steps, synchronise=synchronise):
            try:
                model.train_function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                iterator = iter(dataset.repeat())
                model.train_function(iterator)
    except Exception as error:  # a profile that fails is no failed trial
        return printable(f"{type(error).__name__}: {error}")[:300]
    return ""
