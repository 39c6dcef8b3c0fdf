"""One trial of a script: it runs as it is up to its training, and the trial times that training in its place."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from autotune.data.errors import WorkloadError
from autotune.data.facts import ScriptFacts, Site, Trains, WorkloadReference
from autotune.data.record import Outcome
from autotune.recipe import apply
from autotune.recipe.tf_private import keep_collectives, keras, tf
from autotune.runtime import failures, protocol
from autotune.runtime.executor import TrialFailed
from autotune.runtime.failures import (
    ARGS_HINT,
    format_user_traceback,
    locate_user_line,
    make_exit_error,
    summarize_with_line,
)
from autotune.runtime.supervisor import exit_now
from autotune.script import strategies
from autotune.script.dataset_trace import drops_remainder
from autotune.script.execute import is_scripts_fork, note_process, run_as_main
from autotune.script.fit_call import VALIDATION_HINT, FitCall, last_epochs
from autotune.script.graph_step import prove_fit
from autotune.script.loop_trial import LoopTraining, OtherWorker, TrialHooks
from autotune.script.settings import Settings
from autotune.script.strategies import open_when_building
from autotune.space.configuration import Configuration
from autotune.space.keras_in_use import keras_module
from autotune.training.boundary import Refits
from autotune.training.fit import Parts, refuse_idle_precision, time_fit
from autotune.training.losses import train_losses


def prepare(configuration: Configuration, facts: ScriptFacts) -> None:
    """Set what acts before TensorFlow's runtime starts; TensorFlow is imported as the script's environment has it."""
    changes = Settings.from_configuration(configuration, facts).changes  # the rest is the script's own affair
    apply.apply_before_import(changes)
    keras_module()
    apply.apply_before_build(changes)


def run(
    request: protocol.TrialRequest,
    channel: protocol.Channel,
    reference: WorkloadReference,
    configuration: Configuration,
) -> None:
    """Run one trial to its end. Returns only after losses; a script that does not train is an error."""
    facts = request.script
    assert facts is not None
    with timing(request, channel, reference, configuration, os.getcwd()):
        run_users(reference, endless=facts.epochs_range)


@contextlib.contextmanager
def timing(
    request: protocol.TrialRequest,
    channel: protocol.Channel,
    reference: WorkloadReference,
    configuration: Configuration,
    here: str,
) -> Iterator[None]:
    """Time the training of the script that runs meanwhile. The script began in the directory `here`."""
    import tensorflow as tf

    facts = request.script
    assert facts is not None
    kind: type[TrialHooks] = LoopTraining if facts.trains is Trains.LOOP else FitTraining
    if request.losses is not None:
        single = {"steps_per_execution": 1, "persistent_iterator": False}
        configuration = configuration.replace(**{name: single[name] for name in single if name in configuration})
        keras.utils.set_random_seed(request.losses.seeds[0])  # each such trial builds the same weights
    if facts.workers and strategies.start_workers(facts.workers, partial(_fail_without_worker, channel)):
        kind = OtherWorker
    training = kind(request, channel, configuration, facts, reference)
    training.effects.install(tf)
    training.effects.install_keras(keras_module())
    training.wrappers.install()
    if facts.workers:
        strategies.keep_own_config(tf)
    open_when_building(configuration)
    yield
    while training.restarts():
        # TensorFlow runs, and has the first run's devices and threads.
        devices = ("set_logical_device_configuration", "set_visible_devices", "set_memory_growth")
        threads = ("set_intra_op_parallelism_threads", "set_inter_op_parallelism_threads")
        for owner in (tf.config, tf.config.experimental, tf.config.threading):
            for name in (*devices, *threads):
                setattr(owner, name, lambda *_, **__: None)
        if facts.workers:
            keep_collectives()
        os.chdir(here)
        run_users(reference, endless=facts.epochs_range)
    raise make_no_training_error(reference)


def _fail_without_worker(channel: protocol.Channel, why: str) -> NoReturn:
    """End this process because a worker died; an error of either was sent before."""
    channel.send(protocol.Failed(outcome=Outcome.CRASHED, reason=why))
    exit_now(1)


def run_users(reference: WorkloadReference, *, endless: Site | None = None, adjustable: bool = False) -> None:
    """Run the script; for `endless` and `adjustable` see `run_as_main`.

    Raises:
        WorkloadError: It raised an exception. Environment failures (`failures.is_environment_failure`) pass through.
    """
    name = reference.shown
    note_process()
    try:
        try:
            run_as_main(reference, endless=endless, adjustable=adjustable)
        finally:
            if is_scripts_fork():  # which is over, and answers for nobody
                exit_now(sys.exc_info()[0] is not None)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise make_exit_error(name, error) from error
    except EOFError as error:
        line = locate_user_line(traceback.extract_tb(error.__traceback__))
        raise WorkloadError(
            f"{line}: reads from stdin, which trials do not have",
            hint=f"Give it as an argument of the script. {ARGS_HINT}",
        ) from error
    except (WorkloadError, TrialFailed):
        raise
    except BaseException as error:
        if failures.is_environment_failure(error):
            raise
        raise WorkloadError(
            f"{name} raised {summarize_with_line(error)}", detail=format_user_traceback(error)
        ) from error


def make_no_training_error(reference: WorkloadReference) -> WorkloadError:
    """Return the error of a script that ended without training."""
    return WorkloadError(
        f"{reference.shown} ended, and autotune saw no training",
        hint="If it needs arguments to train, give them after `--`: autotune tune train.py -- --train. autotune sees "
        "Keras fit, and loops that use a Keras optimizer.",
    )


class FitTraining(TrialHooks):
    """Times the tuned `fit` of a trial, from which the script never returns."""

    _count = 0
    _refits: Refits | None = None

    def restarts(self) -> bool:
        """See `TrialHooks`: a loop over `fit` may be shorter than the survey's."""
        self._count = 0
        if self._refits is None:
            return False
        self._refits.end()
        return True

    def fit(self, model: Any, usual: Callable[..., Any], arguments: dict[str, Any], site: Site) -> Any:
        """See `Hooks`."""
        self._count += 1
        tuned = self.facts.fit_site
        is_earlier = self._count < self.facts.fit or bool(self._refits and tuned and site.key != tuned.key)
        if is_earlier:
            return super().fit(model, usual, arguments, site)
        return self.time(FitCall(model=model, arguments=arguments, settings=self.wrappers.settings), usual)

    def time(self, call: FitCall, usual: Callable[..., Any]) -> Any:
        """Time the tuned `fit` and end the process; or measure how the script calls it again, and return its result."""
        history = self._refit(call, usual)
        if self._refits is not None and not self._refits.are_measured:
            return history
        callbacks = self.effects.without_writers(call.arguments["callbacks"], timed=True)
        for callback in callbacks:
            first = int(call.arguments["initial_epoch"])
            _repeat_epochs(callback, range(first, first + max(1, call.epochs)))
        self._obey(partial(self._train, call, callbacks))
        return exit_now(0)

    def _refit(self, call: FitCall, usual: Callable[..., Any]) -> Any:
        """Run a `fit` that the script calls again and again as it is, but for two epochs only, cut short.

        Callbacks see them as its first and its last: the script may load what it saves, so writers are kept.
        """
        import tensorflow as tf

        if self.facts.fit_calls < 2 or self.request.losses is not None:
            return None
        self._refits = self._refits or Refits(self.facts.fit_calls, tf.test.experimental.sync_devices)
        if self._refits.are_measured:
            return None
        try:
            arguments = {**call.arguments, **call.changed_arguments(self.configuration, self.facts)}
            arguments["initial_epoch"] = first = last_epochs(arguments, 2)
            callbacks = self.effects.without_writers(arguments["callbacks"])
            for callback in callbacks:
                _repeat_epochs(callback, (int(call.arguments["initial_epoch"]), last_epochs(arguments, 1)), start=first)
            return self._refits.run(call.model, usual, arguments, callbacks)
        except BaseException as error:
            self.fail(error)

    def _train(self, call: FitCall, callbacks: list[Any]) -> None:
        request, configuration, model = self.request, self.configuration, call.model
        call.settings.refuse_missing(self.facts)
        apply.refuse_another_scope(model, configuration)
        dataset, source = call.training_dataset
        train = call.pipeline(dataset, source, configuration)
        apply.set_compiled(model, train.in_force)
        if "precision" in call.settings.changes:
            refuse_idle_precision(model, str(configuration["precision"]))
        examples = call.examples(dataset)
        if request.losses is not None:
            losses = train_losses(
                request.losses,
                lambda: model,
                lambda: call.with_class_weight(train.one_epoch),
                batch_size=call.batch_used or configuration.batch_size,
                held_out=call.validation,
                examples=examples,
                callbacks=callbacks,
            )
            self.channel.send(losses)
            return
        epochs, frequency = max(1, call.epochs), call.arguments["validation_freq"]
        parts = Parts(
            model=model,
            dataset=dataset,
            validation=call.validation(),
            train=train,
            batched=True,
            drop_remainder=drops_remainder(dataset),
            known_examples=None if request.data else examples,
            fit_args=_fit_args(call, callbacks),
            validation_share=1.0 / frequency if isinstance(frequency, int) and frequency > 0 else 1.0,
            uneven=True,
            refit_seconds=0.0 if self._refits is None else self._refits.seconds / epochs,
            compiling_seconds=None if self._refits is None else self._refits.first_call_seconds,
            epochs=epochs,
            time_writers=partial(self.effects.time_writers, model) if request.data is None else lambda: None,
            validated_by=str(self.facts.fit_site),
            validation_hint=VALIDATION_HINT,
        )
        if call.settings.changes.get("graph_step"):
            compiled = tf.function(model.train_step, reduce_retracing=True, jit_compile=model.jit_compile or None)
            parts.prove = partial(
                prove_fit, model, dataset, compiled, str(self.facts.compile_site or self.facts.fit_site)
            )
        time_fit(request, self.channel, configuration, parts)


def _fit_args(call: FitCall, callbacks: list[Any]) -> dict[str, Any]:
    """Return the script's own arguments that its `fit` keeps in a trial, with callbacks that see its own epochs."""
    given = call.arguments
    passed_on = ["verbose", "validation_freq"]
    passed_on += ["class_weight"] if call.kind != "arrays" else []
    passed_on += ["shuffle"] if call.kind == "py_dataset" else []

    # To be the first: it gives the others the script's number of epochs, not the trial's.
    class ReportEpochs(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        def set_params(self, params: Any) -> None:
            params["epochs"] = int(given["epochs"])  # Keras hands this dict to each callback in turn
            super().set_params(params)

    callbacks = [ReportEpochs(), *callbacks]
    return {**{name: given[name] for name in passed_on}, **call.loading_arguments, "callbacks": callbacks}


def _repeat_epochs(callback: Any, epochs: Sequence[int], *, start: int = 0) -> None:
    """Have a callback see these epochs of the script over and over: a trial counts its epochs on from `start`."""
    for name in ("on_epoch_begin", "on_epoch_end"):
        present = getattr(callback, name, None)
        if present is None:
            continue
        # A script may give a callback to several calls of `fit`.
        usual = getattr(vars(callback).get(name), "_autotune_usual", present)

        def again(epoch: int, *rest: Any, usual: Any = usual, **named: Any) -> Any:
            return usual(epochs[(epoch - start) % len(epochs)], *rest, **named)

        again._autotune_usual = usual  # type: ignore[attr-defined]
        setattr(callback, name, again)
