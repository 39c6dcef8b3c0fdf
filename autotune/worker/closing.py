"""What is measured of a trial once its slices are over: peak memory, and how long a step waits for input.

Something new to measure then belongs here.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.devices.telemetry import peak_host_bytes
from autotune.record import Outcome
from autotune.worker.failures import TrainingFailed
from autotune.worker.gauges import Gauge
from autotune.worker.gpus import device_bytes
from autotune.worker.messages import Channel, Finish, Finished
from autotune.worker.profiling import FOLDER, ceilings, profile_fit
from autotune.worker.training import Progress

if TYPE_CHECKING:
    import keras

    from autotune.recipe.apply import TrainingPipeline
    from autotune.worker.step_clock import StepClock


def tell(
    channel: Channel, model: keras.Model, clock: StepClock, finish: Finish, train: TrainingPipeline, log: Path
) -> None:
    """Send the closing figures: at once, and again with what takes time where that is asked for.

    Args:
        channel: The pipe to the tuner.
        model: What was trained.
        clock: That timed it.
        finish: The tuner's command.
        train: What was trained on.
        log: The trial's; a profile goes beside it.
    """
    figures = Finished(
        peak_host_bytes=peak_host_bytes(),
        peak_device_bytes=device_bytes("peak"),
        input_wait_fraction=None,
        outside_fraction=clock.slices.outside_fraction,
    )
    refuse_weights_that_are_not_finite(model, step=clock.progress.steps)
    channel.send(figures)
    if finish.input_wait_seconds <= 0:
        return
    waits, in_slices = None, clock.slices.call_seconds
    kept = in_slices and kept_call_seconds(model, clock.iterator, finish.input_wait_seconds)
    if kept and in_slices:  # what the pipeline takes from the step's own cores counts as waiting
        waits = min(1.0, max(0.0, 1.0 - kept / in_slices))
    found: dict[str, Any] = {"input_wait_fraction": waits}
    if finish.ceilings:
        training = clock.progress.training
        found["ceilings"] = ceilings(
            train.dataset if train.source is None else None,
            examples_per_call=training.batch_size * training.steps_per_call,
            batch_size=training.batch_size,
            kept=kept,
            seconds=finish.input_wait_seconds,
        )
    folder = log.parent / FOLDER
    if finish.profile and not folder.exists():
        found["no_profile"] = profile_fit(model, clock.iterator, train.dataset, folder)
    channel.send(figures.model_copy(update=found))


def refuse_weights_that_are_not_finite(model: keras.Model, *, step: int) -> None:
    """Raise TrainingFailed where training has ruined a weight: no number that a step returns need show it."""
    import tensorflow as tf

    trained = {id(each) for each in model.trainable_weights}  # others may hold infinities, as masks do
    weights = [each for each in model.weights if tf.as_dtype(each.dtype).is_floating]
    ruined = [
        tf.reduce_any(tf.logical_not(tf.math.is_finite(each)) if id(each) in trained else tf.math.is_nan(each))
        for each in (each.value for each in weights)
    ]
    for weight, is_ruined in zip(weights, ruined, strict=True):
        if is_ruined:
            reason = f"the weight {weight.path} is not finite after {step} steps"
            raise TrainingFailed(Outcome.NONFINITE, reason)


def ruined_weights(model: keras.Model, progress: Progress) -> Gauge:
    """A gauge that measures nothing: it looks at the weights once, at the end of the first slice."""
    looked: list[bool] = []

    def measured(_: float) -> dict[str, Any]:
        if not looked:
            looked.append(True)
            refuse_weights_that_are_not_finite(model, step=progress.steps)
        return {}

    return lambda: measured


def kept_call_seconds(model: keras.Model, iterator: Any, seconds: float) -> float | None:
    """What a call of the train function takes on a batch that is kept in memory: it does not wait for input.

    The batch is the next one of the training's own iterator: no pipeline is opened again.

    Args:
        model: Compiled, and trained already.
        iterator: No training goes on with it.
        seconds: How long calls are timed, two of them at least.

    Returns:
        None where the iterator has no batch left, or its batches are spread over devices.
    """
    import tensorflow as tf

    if not isinstance(iterator, tf.data.Iterator):  # one that a strategy distributes
        return None
    batch = next(iterator, None)
    if batch is None:
        return None
    spec = iterator.element_spec

    def as_in_pipeline(*parts: Any) -> Any:
        """The batch in the pipeline's shapes, so that nothing is traced again."""
        whole = parts if isinstance(spec, tuple) else parts[0]
        shaped = [
            tf.raw_ops.PlaceholderWithDefault(input=each, shape=wanted.shape)
            if isinstance(wanted, tf.TensorSpec)
            else each
            for each, wanted in zip(tf.nest.flatten(whole), tf.nest.flatten(spec), strict=True)
        ]
        return tf.nest.pack_sequence_as(spec, shaped)

    as_it_is = tf.autograph.experimental.do_not_convert(as_in_pipeline)  # a conversion leaves a file in /tmp
    kept = iter(tf.data.Dataset.from_tensors(batch).map(as_it_is).cache().repeat())
    model.train_function(kept)
    tf.test.experimental.sync_devices()
    began, calls = time.perf_counter(), 0
    while calls < 2 or time.perf_counter() - began < seconds:
        model.train_function(kept)
        calls += 1
    tf.test.experimental.sync_devices()
    return (time.perf_counter() - began) / calls
