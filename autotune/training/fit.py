"""A training by Keras's `fit`: the adapter that makes its session, times it, and applies the arguments of `compile`."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from autotune.data.errors import ApplyError
from autotune.data.figures import Ceilings
from autotune.data.record import Outcome
from autotune.recipe import apply
from autotune.recipe.keras_api import keras_api
from autotune.recipe.tf_private import computing_layers, keras, tf, with_stable_function_names
from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import Channel, Finish, TrialRequest
from autotune.space.configuration import Configuration
from autotune.space.variables import caches_in
from autotune.training.boundary import kept_call_seconds, mean_seconds, measure_between_epochs, take_over
from autotune.training.clock import LongEpoch, StepClock
from autotune.training.gauges import Gauge, Retracing, Weights, skipped_steps_gauge
from autotune.training.losses import save_state
from autotune.training.pipeline import count_data, fill_caches, validation_batches
from autotune.training.progress import BetweenEpochs, Training
from autotune.training.session import TimedTrial, TrainingSession
from autotune.training.slices import TrainingEnded

MOST_VALIDATION_SECONDS, MOST_VALIDATION_BATCHES = 10.0, 20
"""Of a validation of unknown length inside `fit`: one that exceeds both may be infinite."""
EPOCHS = 1 << 30  # that `fit` is asked for: the tuner ends it


@dataclass(kw_only=True)
class Parts:
    """The model, data and arguments of a `fit`."""

    model: keras.Model  # compiled
    dataset: tf.data.Dataset  # the training data, before the trial batches it
    validation: tf.data.Dataset | None  # batches
    train: apply.TrainingPipeline
    batched: bool  # `dataset` holds batches
    drop_remainder: bool  # a smaller last batch is dropped
    known_examples: int | None = None  # of an epoch, where the length is known without counting
    fit_args: Mapping[str, Any] = field(default_factory=dict)  # more of `fit`'s; its `callbacks` precede the trial's
    validation_share: float = 1.0  # validations for each epoch
    uneven: bool = False  # batches may have any length
    refit_seconds: float = 0.0  # an epoch's share of what a further call of `fit` costs beyond its epochs
    compiling_seconds: float | None = None  # of the call that has compiled already
    validated_by: str = "validation()"  # what makes the validation data, as shown to the user
    validation_hint: str = "Take as much of it as is validated: dataset.take(N)."
    epochs: int | None = None  # that the script asks for; None where nothing says
    time_writers: Callable[[], float | None] = lambda: None  # those that the trial omits, at the end of an epoch
    reads_changing: str = ""  # see `Started`
    prove: Callable[[], None] = lambda: None  # checks the first step and the last one
    explain: Callable[[Exception], Exception | None] = lambda error: None  # why the very first step failed, if known


def time_fit(request: TrialRequest, channel: Channel, configuration: Configuration, parts: Parts) -> None:
    """Time the training of these parts, and obey the tuner until it ends the trial."""
    session = FitSession(request, configuration, parts)
    validates = session.parts.validation is not None
    trial = TimedTrial(session, request, channel, between_epochs=None if validates else session.known_between_epochs)
    if parts.compiling_seconds is not None:
        trial.clock.warm_up.compiling_seconds.append(parts.compiling_seconds)
    try:
        finish = session.train(trial.clock)
    except Exception as error:
        explained = parts.explain(error) if session.progress.steps == 0 else None
        if explained is None:
            raise
        raise explained from error
    parts.prove()
    steps = trial.close(finish)
    try:
        session.run_closing(steps, trial.clock.iterator)
    except Exception as error:  # a failed profile is no failed trial
        trial.send_final(error)


class FitSession(TrainingSession):
    """A training by `fit`, which never ends by itself."""

    def __init__(self, request: TrialRequest, configuration: Configuration, parts: Parts) -> None:
        # A script may have named a cache of its own since the import.
        os.environ.update(caches_in(request.timing.compiled, os.environ, request.timing.compiled_use))
        filled = [fill_caches(parts.dataset, "dataset"), fill_caches(parts.validation, "validation")]
        began = time.monotonic()
        data = count_data(
            parts.dataset,
            parts.validation,
            batch_size=configuration.batch_size,
            seconds=request.count_seconds,
            counted_before=request.data,
            known_examples=parts.known_examples,
            batched=parts.batched,
            uneven=parts.uneven,
        )
        in_files, in_memory = map(sum, zip(*filled, strict=True))
        self._counting_seconds, self._filling_seconds = time.monotonic() - began + in_files, in_memory
        filled_once = in_files + in_memory if configuration.get("cache") else 0.0  # which counts in all epochs
        if data.examples is None:  # an end that nobody knows is left out
            endless = apply.training_pipeline(
                parts.dataset.repeat(), configuration, batched=parts.batched, drop_remainder=parts.drop_remainder
            )
            if keras_api().counts_steps:
                endless = replace(endless, steps_per_epoch=EPOCHS)  # of an epoch that does not end
            parts = replace(parts, validation=None, train=endless)
        if parts.validation is not None and data.validation_uncounted:
            callbacks = [*parts.fit_args.get("callbacks", ()), _validation_limit(parts)]
            parts = replace(parts, fit_args={**parts.fit_args, "callbacks": callbacks})
        training = Training(
            steps_per_call=int(parts.train.in_force["steps_per_execution"]),
            batch_size=configuration.batch_size,
            examples=data.examples,
            drop_remainder=parts.drop_remainder,
            synchronise=tf.test.experimental.sync_devices,
            charged_per_epoch_seconds=parts.refit_seconds + filled_once / (parts.epochs or 1),
        )
        super().__init__(training, data)
        model, known = parts.model, request.timing.boundary
        self.parts, self.strategy, self.time_writers = parts, model.distribute_strategy, parts.time_writers
        self.known_between_epochs = None if known is None else take_over(known, parts.train, training)
        if parts.epochs and training.steps_per_epoch:
            self.planned_steps = parts.epochs * training.steps_per_epoch
        self._configuration = configuration
        self._keeps_compilations = bool(request.timing.compiled)
        self._retracing = Retracing(Path(request.log), xla=bool(model.jit_compile) and not model.run_eagerly)

    def facts(self) -> dict[str, Any]:
        """See `TrainingSession`."""
        model, train = self.parts.model, self.parts.train
        return {
            "counting_seconds": self._counting_seconds,
            "filling_seconds": self._filling_seconds,
            "jit_compile": bool(model.jit_compile),
            "element": str(train.dataset.element_spec),
            "batch_ranks": apply.batch_ranks(train.dataset),
            "set_by_dataset": apply.set_by_dataset(self.parts.dataset) if train.source is None else {},
            "reads_changing": self.parts.reads_changing,
            "in_force": train.in_force.differences(self._configuration),
        }

    def weights(self) -> Weights:
        """See `TrainingSession`."""
        model = self.parts.model
        return Weights(model.weights, model.trainable_weights)

    def gauges(self) -> list[Gauge]:
        """See `TrainingSession`."""
        finite = keras_api().finite_steps(getattr(self.parts.model, "optimizer", None))
        skipped = [] if finite is None else [skipped_steps_gauge(self.progress, finite)]
        return [self._retracing.gauge, *skipped]

    def train(self, clock: StepClock) -> Finish:
        """Train until the tuner asks for the closing figures, and return its message."""
        model, parts = self.parts.model, self.parts

        def epoch_ended(*_: Any) -> None:
            clock.epoch_ended()
            model.stop_training = False  # a callback of the script's may have set it, but the tuner ends the training

        edges = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: clock.epoch_began(), on_epoch_end=epoch_ended)
        callbacks = [*parts.fit_args.get("callbacks", ()), edges]
        arguments = {"epochs": EPOCHS, "verbose": 0, "shuffle": False, **parts.fit_args, "callbacks": callbacks}
        model.make_train_function()
        usual, proofs = model.train_function, iter([parts.prove])  # the first call is proven
        if self._keeps_compilations:
            usual = with_stable_function_names(usual)

        def train_and_prove(iterator: Any) -> Any:
            logs = usual(iterator)
            next(proofs, lambda: None)()
            return logs

        timed, tidy_up = clock.wrap(self._retracing.wrap(train_and_prove)), partial(keras_api().tidy_up, model)
        model.train_function = timed
        early = TrialFailed(Outcome.ERROR, "model.fit returned before it was asked to")
        try:
            with contextlib.suppress(LongEpoch):
                model.fit(**parts.train.fit_args, validation_data=parts.validation, **arguments)
                raise early
            gc.collect()  # Keras's iterator is part of a cycle, and keeps all that its pipeline holds
            model.train_function = usual
            tidy_up(self.training.steps_per_call)
            clock.time_by_steps(self._between_epochs(clock))
            model.train_function = timed
            few = None if parts.validation is None else parts.validation.take(self.training.steps_per_call)
            # Callbacks read what a validation reports.
            model.fit(**parts.train.fit_args, validation_data=few, **arguments)
            raise early
        except TrainingEnded as ended:
            tidy_up(self.training.steps_per_call)
            return ended.finish
        finally:
            model.train_function = usual

    def _between_epochs(self, clock: StepClock) -> BetweenEpochs:
        """Return the boundary between two epochs, measured by more training where no other trial has measured it."""
        if self.known_between_epochs is not None:
            return self.known_between_epochs
        parts = self.parts
        between = measure_between_epochs(
            parts.model,
            parts.train,
            parts.validation,
            self.training,
            call_seconds=clock.warm_up.usual_call_seconds,
            iterator=clock.iterator,
            validation_batches=validation_batches(parts.validation, self.data),
            fit_args=parts.fit_args,
        )
        validating = between.boundary.validation_seconds * parts.validation_share
        return replace(between, boundary=between.boundary.model_copy(update={"validation_seconds": validating}))

    def save_state(self, file: Path) -> bool:
        """See `TrainingSession`."""
        return getattr(self.parts.model, "optimizer", None) is not None and save_state(self.parts.model, file)

    def close(self, finish: Finish, clock: StepClock) -> Generator[int, None, dict[str, Any]]:
        """Measure the wait for input by the step alone, and the ceilings of input and step."""
        yield from ()  # a kept batch trains by itself
        seconds, in_slices, training = finish.input_wait_seconds, clock.slices.call_seconds, self.training
        call_seconds = kept_call_seconds(self.parts.model, clock.iterator, seconds) if in_slices else None
        found: dict[str, Any] = {}
        if call_seconds and in_slices:  # what the pipeline takes from the step's own cores counts as waiting
            found["input_wait_fraction"] = min(1.0, max(0.0, 1.0 - call_seconds / in_slices))
        if finish.ceilings:
            train, batch_seconds = self.parts.train, None
            if train.source is None:
                endless = train.dataset if train.in_force.get("persistent_iterator") else train.dataset.repeat()
                batch_seconds = mean_seconds(partial(next, iter(endless)), seconds)
            found["ceilings"] = Ceilings(
                by_input=training.batch_size / batch_seconds if batch_seconds else None,
                by_compute=training.batch_size * training.steps_per_call / call_seconds if call_seconds else None,
            )
        return found

    def run_closing(self, steps: Iterator[int], iterator: Any) -> None:
        """Train at each of these steps."""
        model = self.parts.model
        for _ in steps:
            try:
                model.train_function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                iterator = iter(self.parts.train.dataset.repeat())
                model.train_function(iterator)


def _validation_limit(parts: Parts) -> keras.callbacks.Callback:
    """Return a callback that ends a trial whose validation does not end."""

    class ValidationLimit(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        def on_test_begin(self, logs: Any = None) -> None:
            self.began = time.monotonic()

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            seconds = time.monotonic() - self.began
            if seconds > MOST_VALIDATION_SECONDS and batch >= MOST_VALIDATION_BATCHES:
                raise TrialFailed(
                    Outcome.ERROR,
                    f"{parts.validated_by}: the validation has unknown length and has not ended after {batch + 1} "
                    f"batches in {seconds:.0f} s; it may be infinite",
                    hint=parts.validation_hint,
                    input_error=True,
                )

    return ValidationLimit()


def refuse_idle_precision(model: keras.Model, policy: str) -> None:
    """Refuse a model none of whose layers took the policy: it would be timed under a wrong name."""
    computes_in = policy.removeprefix("mixed_")
    layers = list(computing_layers(model))
    if policy == computes_in:  # layers without weights may compute in any type
        layers = [layer for layer in layers if layer.weights and not isinstance(layer, keras.Model)] or [model]
    if not any(layer.compute_dtype == computes_in for layer in layers):
        raise ApplyError(
            f"precision={policy} does not act: no layer of the model computes in {computes_in}",
            hint="Build the layers inside model(), leave dtype= to the policy where it may vary, and name another "
            'policy in Workload(baseline={"precision": …}).',
        )
