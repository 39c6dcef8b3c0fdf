"""One trial of a `Workload`: builds pipeline and model, and times `model.fit`.

This is one kind of workload. Another kind is one more file with a `run` like this one's, named in `worker/main.py`.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.data.record import Outcome
from autotune.recipe import apply
from autotune.recipe.apply import list_devices
from autotune.recipe.lazy import keras, tf
from autotune.recipe.tf_private import finite_steps
from autotune.runtime import protocol
from autotune.runtime.executor import Data
from autotune.runtime.failures import TrainingFailed, is_out_of_memory
from autotune.script.workload import Workload
from autotune.space.configuration import Configuration
from autotune.space.variables import without_caches
from autotune.training import closing, datasets, gauges, gpus
from autotune.training.boundary import BetweenEpochs, measure_between_epochs, take_over
from autotune.training.clock import LongEpoch, StepClock
from autotune.training.losses import loss_curves
from autotune.training.models import batched_twice, compiled_model, refuse_batches
from autotune.training.retracing import Retracing
from autotune.training.session import Training
from autotune.training.slices import TrainingEnded

MOST_VALIDATION_SECONDS = 10.0  # of a validation of unknown length inside `fit`: a longer one may have no end
EPOCHS = 1 << 30  # that `fit` is asked for: the tuner ends it


@dataclass(kw_only=True)
class Parts:
    """What `fit` is timed on."""

    model: keras.Model  # compiled
    dataset: tf.data.Dataset  # what is trained on, before the trial batches it
    validation: tf.data.Dataset | None  # batches
    train: apply.TrainingPipeline
    batched: bool  # `dataset` holds batches
    drop_remainder: bool  # a smaller last batch is dropped
    known: Data | None = None  # what is known of the data without counting
    fit_args: Mapping[str, Any] = field(default_factory=dict)  # more of `fit`'s; its `callbacks` precede the trial's
    validation_share: float = 1.0  # validations for each epoch
    uneven: bool = False  # batches may have any length
    refit_seconds: float = 0.0  # an epoch's share of what a further call of `fit` costs beyond its epochs
    compiling_seconds: float | None = None  # of the call that has compiled already
    validated_by: str = "validation()"  # what makes the validation data, as shown to the user
    validation_hint: str = "Take as much of it as is validated: dataset.take(N)."


def run(
    request: protocol.TrialRequest, channel: protocol.Channel, workload: Workload, configuration: Configuration
) -> None:
    """Run one trial to its end."""
    if request.losses is not None:
        examples = None if request.data is None else request.data.examples
        curves = loss_curves(workload, configuration, request.losses, examples)
        channel.send(protocol.LossCurves(curves=curves, gpus=gpus.gpu_names()))
        return
    dataset = datasets.training_data(workload, configuration, examine=request.data is None)
    validation = datasets.validation_data(workload, configuration, dataset)
    train = datasets.pipeline(dataset, workload, configuration)
    model = compiled_model(workload, train.in_force)
    if request.data is None and not workload.batched and not getattr(model, "inputs", None):
        refuse_batches(workload, train.in_force, dataset)
    parts = Parts(
        model=model,
        dataset=dataset,
        validation=validation,
        train=train,
        batched=workload.batched,
        drop_remainder=workload.drop_remainder,
    )
    time_fit(request, channel, configuration, parts)


def time_fit(
    request: protocol.TrialRequest, channel: protocol.Channel, configuration: Configuration, parts: Parts
) -> None:
    """Time the training of these parts, and obey the tuner until it ends the trial."""
    os.environ.update(without_caches(os.environ))  # a script's own line may have named one since the import
    model, dataset = parts.model, parts.dataset
    caches = [datasets.fill_caches(dataset, "dataset"), datasets.fill_caches(parts.validation, "validation")]
    began = time.monotonic()
    data = _counted(request, configuration, parts)
    counting_seconds = time.monotonic() - began + sum(in_files for in_files, _ in caches)
    if data.examples is None:  # an end that nobody knows is left out
        endless = apply.training_pipeline(
            dataset.repeat(), configuration, batched=parts.batched, drop_remainder=parts.drop_remainder
        )
        parts = replace(parts, validation=None, train=endless)
    train, validation = parts.train, parts.validation
    if validation is not None and data.validation_uncounted:
        callbacks = [*parts.fit_args.get("callbacks", ()), _validation_limit(parts)]
        parts = replace(parts, fit_args={**parts.fit_args, "callbacks": callbacks})
    training = Training(
        steps_per_call=int(train.in_force["steps_per_execution"]),
        batch_size=configuration.batch_size,
        examples=data.examples,
        drop_remainder=parts.drop_remainder,
        synchronise=tf.test.experimental.sync_devices,
        charged_per_epoch_seconds=parts.refit_seconds,
    )
    channel.send(
        protocol.Started(
            **data.model_dump(),
            counting_seconds=counting_seconds,
            filling_seconds=sum(in_memory for _, in_memory in caches),
            jit_compile=bool(model.jit_compile),
            examples_per_epoch=training.examples_per_epoch,
            element=str(train.dataset.element_spec)[:2000],
            batch_ranks=apply.batch_ranks(train.dataset),
            parameters=int(model.count_params()) if model.built else 0,
            gpus=gpus.gpu_names(),
            devices=len(list_devices()),
            device_limit_bytes=gpus.device_limit_bytes(),
            build=gpus.build_versions(),
            set_by_dataset=apply.set_by_dataset(dataset) if train.source is None else {},
            not_knobs=apply.not_knobs(),
            in_force=train.in_force.differences(configuration),
        )
    )
    retracing = Retracing(Path(request.log), xla=bool(model.jit_compile) and not model.run_eagerly)
    measured = [
        *gauges.gpus(gpus.cards(model.distribute_strategy)),
        gauges.machine,
        gauges.device_memory,
        retracing.gauge,
    ]
    known = None if request.timing.boundary is None else take_over(request.timing.boundary, train, training)
    clock = StepClock(
        training,
        channel,
        warmup_seconds=request.timing.warmup_seconds,
        epoch_seconds=request.timing.epoch_seconds,
        between_epochs=known if validation is None else None,  # a `fit` that validates is left
        gauges=measured,
    )
    if parts.compiling_seconds is not None:
        clock.warm_up.compiling_seconds.append(parts.compiling_seconds)
    measured.append(gauges.ruined_weights(model, clock.progress))
    if (finite := finite_steps(getattr(model, "optimizer", None))) is not None:
        measured.append(gauges.skipped_steps(clock.progress, finite))

    def between_epochs() -> BetweenEpochs:
        if known is not None:
            return known
        between = measure_between_epochs(
            model,
            train,
            validation,
            training,
            call_seconds=clock.warm_up.usual_call_seconds,
            iterator=clock.iterator,
            validation_batches=_validation_batches(validation, data),
            fit_args=parts.fit_args,
        )
        validating = between.boundary.validation_seconds * parts.validation_share
        return replace(between, boundary=between.boundary.model_copy(update={"validation_seconds": validating}))

    try:
        finish = fit(parts, clock, retracing, between_epochs)
    except Exception as error:
        spec = train.dataset.element_spec
        twice = batched_twice(model, spec[0] if isinstance(spec, tuple) else spec)
        if twice is None or parts.batched or clock.progress.steps or is_out_of_memory(error):
            raise
        raise twice from error
    closing.tell(channel, model, clock, finish, train, Path(request.log))


def _validation_limit(parts: Parts) -> keras.callbacks.Callback:
    """Return a callback that ends a trial whose validation goes on and on."""

    class ValidationLimit(keras.callbacks.Callback):  # type: ignore[misc]
        def on_test_begin(self, logs: Any = None) -> None:
            self.began = time.monotonic()

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            seconds = time.monotonic() - self.began
            if seconds > MOST_VALIDATION_SECONDS:
                raise TrainingFailed(
                    Outcome.ERROR,
                    f"{parts.validated_by}: the validation has unknown length and has not ended after {batch + 1} "
                    f"batches in {seconds:.0f} s; it may have no end",
                    hint=parts.validation_hint,
                    input_error=True,
                )

    return ValidationLimit()


def _counted(request: protocol.TrialRequest, configuration: Configuration, parts: Parts) -> Data:
    """What the trial was told of the data, or has counted."""
    dataset, validation = parts.dataset, parts.validation
    told = request.data or parts.known or Data(examples=None, endless=False)
    examples, held_out, uncounted = told.examples, told.validation_examples, told.validation_uncounted
    elements = datasets.elements_in(dataset)
    if request.data is None and parts.known is None:
        examples = datasets.examples_in(
            dataset, configuration, request.count_seconds, batched=parts.batched, uneven=parts.uneven
        )
    elif parts.batched and parts.known is None and examples is not None and elements >= 0:
        examples = min(examples, elements * configuration.batch_size)  # it may drop what fills no batch
    if request.data is None and validation is not None and datasets.elements_in(validation) < 0:
        held_out = datasets.counted(validation, request.count_seconds, "validation")
        uncounted = held_out is None
    return Data(
        examples=examples,
        validation_examples=held_out,
        validation_uncounted=uncounted,
        endless=examples is None and elements == datasets.ENDLESS,
    )


def _validation_batches(validation: tf.data.Dataset | None, data: Data) -> int | None:
    """Batches of a validation; None where they are unknown."""
    batches = -1 if validation is None else datasets.elements_in(validation)
    if batches < 0 and data.validation_examples is not None:
        return math.ceil(data.validation_examples / datasets.batch_length(validation))
    return batches if batches >= 0 else None


def fit(
    parts: Parts, clock: StepClock, retracing: Retracing, between_epochs: Callable[[], BetweenEpochs]
) -> protocol.Finish:
    """Train until the tuner asks for the closing figures, and return its message. `between_epochs` may train, too."""
    model, data = parts.model, parts.train.fit_args

    def epoch_ended(*_: Any) -> None:
        clock.epoch_ended()
        model.stop_training = False  # whatever a callback of the script's has decided: the tuner ends it

    edges = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: clock.epoch_began(), on_epoch_end=epoch_ended)
    callbacks = [*parts.fit_args.get("callbacks", ()), edges]
    arguments = {"epochs": EPOCHS, "verbose": 0, "shuffle": False, **parts.fit_args, "callbacks": callbacks}
    model.make_train_function()
    usual = model.train_function
    timed = clock.wrap(retracing.wrap(usual))
    model.train_function = timed
    early = TrainingFailed(Outcome.ERROR, "model.fit returned before it was told to")
    try:
        with contextlib.suppress(LongEpoch):
            model.fit(**data, validation_data=parts.validation, **arguments)
            raise early
        gc.collect()  # Keras's iterator is part of a cycle, and keeps all that its pipeline holds
        model.train_function = usual
        clock.time_by_steps(between_epochs())
        model.train_function = timed
        few = None if parts.validation is None else parts.validation.take(clock.progress.training.steps_per_call)
        model.fit(**data, validation_data=few, **arguments)  # callbacks read what a validation reports
        raise early
    except TrainingEnded as ended:
        return ended.finish
    finally:
        model.train_function = usual
