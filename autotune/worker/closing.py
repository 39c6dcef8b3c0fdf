"""What is measured of a trial once its slices are over: peak memory, and how long a step waits for input.

Something new to measure then belongs here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from autotune.devices.telemetry import peak_host_bytes
from autotune.worker.gpus import device_bytes
from autotune.worker.messages import Channel, Finish, Finished

if TYPE_CHECKING:
    import keras

    from autotune.worker.step_clock import StepClock


def tell(channel: Channel, model: keras.Model, clock: StepClock, finish: Finish) -> None:
    """Send the closing figures: before the input wait is measured and, where that is asked for, with it."""
    figures = Finished(
        peak_host_bytes=peak_host_bytes(),
        peak_device_bytes=device_bytes("peak"),
        input_wait_fraction=None,
    )
    channel.send(figures)
    if finish.input_wait_seconds <= 0:
        return
    waits, in_slices = None, clock.slices.call_seconds
    kept = in_slices and kept_call_seconds(model, clock.iterator, finish.input_wait_seconds)
    if kept and in_slices:  # what the pipeline takes from the step's own cores counts as waiting
        waits = min(1.0, max(0.0, 1.0 - kept / in_slices))
    channel.send(figures.model_copy(update={"input_wait_fraction": waits}))


def kept_call_seconds(model: keras.Model, iterator: Any, seconds: float) -> float | None:
    """What a call of the train function takes on a batch that is kept in memory: it does not wait for input.

    The batch is the next one of the training's own iterator: no pipeline is opened again.

    Args:
        model: Compiled, and trained already.
        iterator: No training goes on with it.
        seconds: How long calls are timed, two of them at least.

    Returns:
        None where the iterator has no batch left.
    """
    import tensorflow as tf

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
