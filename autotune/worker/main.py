"""The trial process: applies one configuration, builds, warms up, then obeys the tuner.

Runs in a fork of the template (or in a fork that has imported nothing, which then imports everything
itself). Never imports Optuna or pandas. Reports go over the pipe, as data; stdout and stderr are the trial's log.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from autotune.devices import telemetry
from autotune.errors import ApplyError, AutotuneError, WorkloadError
from autotune.executors.executor import Data
from autotune.executors.log import printable
from autotune.recipe import apply
from autotune.record import Outcome
from autotune.space.configuration import Configuration
from autotune.worker import building, loss_curves, messages, profiling
from autotune.worker.boundary import BetweenEpochs, measure_between_epochs, take_over
from autotune.worker.keeping import fill_caches
from autotune.worker.retracing import Retracing
from autotune.worker.step_clock import LongEpoch, StepClock, TrainingEnded, TrainingFailed
from autotune.worker.training import Training
from autotune.workloads.loading import load, users_traceback
from autotune.workloads.workload import Workload, WorkloadReference

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    TrialChannel = messages.Channel


def run(
    request: messages.TrialRequest,
    channel: TrialChannel,
    workload: Workload | None,
    reference: WorkloadReference,
) -> int:
    """Run one trial to its end.

    Args:
        request: What to run.
        channel: The pipe to the tuner.
        workload: The workload, where the template has imported it.
        reference: Where to import it from otherwise.

    Returns:
        The exit status of the process: 0 when the tuner ended the trial, 1 when it failed.
    """
    try:
        return _train(request, channel, workload, reference)
    except TrainingFailed as failure:
        return _report(channel, failure.outcome, failure.reason, failure.hint, "", failure.input_error)
    except (WorkloadError, ApplyError) as error:
        return _report(channel, Outcome.ERROR, error.message, error.hint, error.detail, True)
    except AutotuneError as error:
        return _report(channel, Outcome.ERROR, error.message, error.hint, error.detail, False)
    except messages.ChannelClosed:
        return 1
    except MemoryError as error:
        return _report(channel, Outcome.OOM, f"out of host memory: {error}", "", "", False)
    except BaseException as error:
        return _report_exception(channel, error)


def _report(
    channel: TrialChannel, outcome: Outcome, reason: str, hint: str, detail: str, input_error: bool
) -> int:
    channel.send(
        messages.Failed(
            outcome=outcome,
            reason=printable(reason)[:4000],
            hint=hint,
            detail=printable(detail)[-20000:],
            input_error=input_error,
        )
    )
    return 1


_SAYS_NOTHING = re.compile(r'Graph execution error:|Detected at node |<stack traces unavailable>|File "')
"""Lines above the one in which TensorFlow says what went wrong in a graph."""


def _report_exception(channel: TrialChannel, error: BaseException) -> int:
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not _SAYS_NOTHING.match(line)]
    reason = f"{type(error).__name__}: {said[0] if said else 'no message'}"
    outcome = Outcome.OOM if building.is_out_of_memory(error) else Outcome.ERROR
    return _report(channel, outcome, reason, "", users_traceback(error), False)


def _train(
    request: messages.TrialRequest,
    channel: TrialChannel,
    workload: Workload | None,
    reference: WorkloadReference,
) -> int:
    configuration = Configuration(request.configuration)
    workload = _applied(configuration, workload, reference)
    if request.losses is not None:
        curves = loss_curves.loss_curves(workload, configuration, request.losses, request.examples)
        channel.send(messages.LossCurves(curves=curves, gpus=profiling.gpu_names()))
        return 0
    import tensorflow as tf

    train, validation, own_options = building.datasets(workload, configuration, examine=request.examine)
    model = building.compiled_model(workload, train.in_force, train.dataset)
    data, taken = _prepared(request, workload, configuration, train, validation)
    retracing = Retracing(Path(request.log), xla=bool(model.jit_compile) and not model.run_eagerly)
    training = Training(
        steps_per_call=int(train.in_force["steps_per_execution"]),
        batch_size=configuration.batch_size,
        examples=data.examples,
        drop_remainder=workload.drop_remainder,
        endless=data.endless,
        synchronise=tf.test.experimental.sync_devices,
        retraces=retracing.since_last_asked,
        updates=_updates_of(model),
        count=None
        if data.endless
        else lambda: building.examples_in(train.one_epoch, batch_size=configuration.batch_size),
        device_bytes=profiling.device_bytes,
    )
    told = {**taken, "in_force": train.in_force.differences(configuration)}
    channel.send(_started(model, train.dataset, own_options, data, training).model_copy(update=told))
    known = None if request.boundary is None else take_over(request.boundary, train, training)
    validation = None if data.endless else validation
    clock = StepClock(
        training,
        cast(Any, channel),
        warmup_seconds=request.warmup_seconds,
        epoch_seconds=request.epoch_seconds,
        between_epochs=known if validation is None else None,  # a `fit` that validates is left
    )

    def between_epochs() -> BetweenEpochs:
        return known or measure_between_epochs(
            model,
            train,
            validation,
            training,
            clock.call_seconds,
            validation_examples=data.validation_examples,
        )

    finish = _fit(model, train, validation, clock, retracing, between_epochs)
    _tell_closing(channel, model, clock, finish)
    return 0


def _tell_closing(
    channel: TrialChannel, model: keras.Model, clock: StepClock, finish: messages.Finish
) -> None:
    """The closing figures, before the input wait is measured and, where that is asked for, with it."""
    told = messages.Finished(
        peak_host_bytes=telemetry.peak_host_bytes(),
        peak_device_bytes=profiling.peak_device_bytes(),
        input_wait_fraction=None,
    )
    channel.send(told)
    if finish.input_wait_seconds > 0:
        pace = clock.sliced_call_seconds
        waits = None
        if pace is not None:
            waits = profiling.input_wait_fraction(model, clock.iterator, pace, finish.input_wait_seconds)
        channel.send(told.model_copy(update={"input_wait_fraction": waits}))


def _prepared(
    request: messages.TrialRequest,
    workload: Workload,
    configuration: Configuration,
    train: apply.TrainingPipeline,
    validation: tf.data.Dataset | None,
) -> tuple[Data, dict[str, float]]:
    """What is known of the dataset, with all filled that it keeps; and the seconds of either, by `Started`'s names."""
    began = time.monotonic()
    data = _data(request, workload, configuration, validation)
    if workload.batched:
        own = building.own_examples(
            train.one_epoch, data.examples, request.count_seconds, batch_size=configuration.batch_size
        )
        data = replace(data, examples=own)
    keeping = [(train.dataset, "dataset")]
    if validation is not None and not data.endless:
        keeping.append((validation, "validation"))
    for dataset, part in keeping:
        fill_caches(dataset, part, in_files=True)
    counted = time.monotonic()
    for dataset, part in keeping:
        fill_caches(dataset, part, in_files=False)
    return data, {"counting_seconds": counted - began, "filling_seconds": time.monotonic() - counted}


def _data(
    request: messages.TrialRequest,
    workload: Workload,
    configuration: Configuration,
    validation: tf.data.Dataset | None,
) -> Data:
    """What the trial was told of the dataset, or has counted."""
    if not request.examine:
        return Data(
            examples=request.examples,
            validation_examples=request.validation_examples,
            validation_uncounted=request.validation_uncounted,
            endless=request.endless,
        )
    examples, endless = building.count_examples(workload, configuration, request.count_seconds)
    if validation is None or endless or building.says_its_length(validation):
        return Data(examples=examples, endless=endless)
    held_out = building.count_validation_examples(validation, request.count_seconds)
    return Data(
        examples=examples,
        validation_examples=held_out,
        validation_uncounted=held_out is None,
        endless=endless,
    )


def _started(
    model: keras.Model,
    train: tf.data.Dataset,
    own_options: apply.SetByDataset,
    data: Data,
    training: Training,
) -> messages.Started:
    """What building pipeline and model has shown, but for what it took."""
    return messages.Started(
        jit_compile=bool(model.jit_compile),
        examples=data.examples,
        examples_per_epoch=training.examples_per_epoch,
        validation_examples=data.validation_examples,
        validation_uncounted=data.validation_uncounted,
        endless=data.endless,
        element=str(train.element_spec)[:2000],
        batch_ranks=apply.batch_ranks(train),
        parameters=int(model.count_params()) if model.built else 0,
        gpus=profiling.gpu_names(),
        device_limit_bytes=profiling.device_limit_bytes(),
        build=profiling.build_versions(),
        set_by_dataset=own_options,
    )


def _applied(
    configuration: Configuration, workload: Workload | None, reference: WorkloadReference
) -> Workload:
    """The workload, imported now where the template has not, with the configuration in force."""
    apply.apply_before_import(configuration)
    if workload is None:
        # The user's module may start the runtime: what must precede that is set first.
        apply.apply_before_build(configuration)
        workload = load(reference)
        apply.apply_before_import(configuration)  # again: the module may have set them as well
    apply.apply_before_build(configuration)
    return workload


def _updates_of(model: keras.Model) -> Callable[[], int] | None:
    """Reads how many steps' gradients were finite; None where no loss scale leaves out those that are not.

    `iterations` would not do: where gradients are accumulated, it counts once in several steps.
    """
    import keras

    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return None
    return lambda: int(optimizer.inner_optimizer._iterations)


# ------------------------------------------------------------------------------------------------ training


def _fit(
    model: keras.Model,
    train: apply.TrainingPipeline,
    validation: tf.data.Dataset | None,
    clock: StepClock,
    retracing: Retracing,
    between_epochs: Callable[[], BetweenEpochs],
) -> messages.Finish:
    """Train until the tuner asks for the closing figures, and return its message.

    Args:
        model: Compiled.
        train: What it is trained on.
        validation: What it is validated on after each epoch, or None.
        clock: Times the training.
        retracing: Counts what is traced or compiled.
        between_epochs: Says what lies between two long epochs. It may train the model.
    """
    import keras

    class EpochEdges(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        """Tells the clock where epochs begin and end."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            clock.epoch_began()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            clock.epoch_ended()

    model.make_train_function()
    usual = model.train_function
    timed = clock.wrap(retracing.wrap(usual))
    model.train_function = timed
    arguments = {
        **train.fit_args,
        "epochs": 1 << 30,  # the tuner ends it
        "verbose": 0,
        "shuffle": False,
        "callbacks": [EpochEdges()],
    }
    try:
        long = False
        try:
            model.fit(validation_data=validation, **arguments)
        except LongEpoch:
            long = True  # to go on in here would keep the iterator of that `fit`, and all that its pipeline holds
        if long:
            gc.collect()  # Keras's iterator is part of a cycle
            model.train_function = usual
            clock.time_by_steps(between_epochs())
            model.train_function = timed
            model.fit(**arguments)
    except TrainingEnded as ended:
        return ended.finish
    finally:
        model.train_function = usual
    raise TrainingFailed(Outcome.ERROR, "model.fit returned before it was told to")
