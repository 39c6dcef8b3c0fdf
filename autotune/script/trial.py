"""One trial of a script: it runs as it is up to its training, which is timed in its place."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from autotune.data.errors import WorkloadError
from autotune.data.facts import ScriptFacts, Site, Trains, WorkloadReference
from autotune.data.record import Outcome
from autotune.recipe import apply
from autotune.recipe.tf_private import keep_collectives
from autotune.runtime import failures, protocol
from autotune.runtime.failures import (
    ARGS_HINT,
    format_user_traceback,
    locate_user_line,
    make_exit_error,
    summarize_error,
)
from autotune.runtime.protocol import Data
from autotune.script import ranks
from autotune.script.dataset_trace import drops_remainder
from autotune.script.execute import leave, run_as_main
from autotune.script.fit_call import VALIDATION_HINT, FitCall, few_steps
from autotune.script.long_run import changed_arguments
from autotune.script.loop_trial import LoopTraining, OtherWorker, TrialHooks
from autotune.script.refits import Refits
from autotune.script.scope import open_when_building, refuse_another_scope
from autotune.script.settings import Settings
from autotune.space.configuration import Configuration
from autotune.training import fit, gpus
from autotune.training.losses import loss_curves_as_built
from autotune.training.models import refuse_precision_that_does_not_act, set_compiled


def prepare(configuration: Configuration, facts: ScriptFacts) -> None:
    """Set what acts before the script runs; TensorFlow is imported as the script's environment has it."""
    os.environ.update(facts.variables)
    changes = Settings.of(configuration, facts).changes  # the rest is the script's own affair
    apply.apply_before_import(changes)
    importlib.import_module("keras")
    apply.apply_before_build(changes)


def run(
    request: protocol.TrialRequest,
    channel: protocol.Channel,
    reference: WorkloadReference,
    configuration: Configuration,
) -> None:
    """Run one trial to its end. It comes back only where the script has not trained."""
    import keras
    import tensorflow as tf

    facts = request.script
    assert facts is not None
    loop = facts.trains is Trains.LOOP
    if request.losses is not None:
        if loop:  # its weights cannot be made anew, so its losses cannot be compared
            channel.send(protocol.LossCurves(curves=(), gpus=gpus.gpu_names()))
            return
        single = {"steps_per_execution": 1, "persistent_iterator": False}
        configuration = configuration.replace(**{name: single[name] for name in single if name in configuration})
        keras.utils.set_random_seed(request.losses.seeds[0])  # each such trial builds the same weights
    kind = LoopTraining if loop else _FitTraining
    if facts.workers and ranks.start_others(facts.workers, partial(_a_worker_died, channel)):
        kind = OtherWorker
    training = kind(request, channel, configuration, facts, reference)
    training.effects.install(tf, keras)
    training.wrappers.install()
    if facts.workers:
        ranks.keep_own_config(tf)
    open_when_building(keras, configuration)
    here = os.getcwd()
    run_users(reference, endless=facts.epochs_range)
    while training.restarted():
        repeatable(tf)
        if facts.workers:
            keep_collectives()
        os.chdir(here)
        run_users(reference, endless=facts.epochs_range)
    raise never_trains(reference)


def _a_worker_died(channel: protocol.Channel, why: str) -> NoReturn:
    """End this process: its own error, or the other's, was told before."""
    channel.send(protocol.Failed(outcome=Outcome.CRASHED, reason=why))
    leave(1)


def repeatable(tf: Any) -> None:
    """What a script sets before TensorFlow starts stays as it is when the script begins anew."""
    devices = ("set_logical_device_configuration", "set_visible_devices", "set_memory_growth")
    threads = ("set_intra_op_parallelism_threads", "set_inter_op_parallelism_threads")
    for owner in (tf.config, tf.config.experimental, tf.config.threading):
        for name in (*devices, *threads):
            setattr(owner, name, lambda *_, **__: None)


def run_users(reference: WorkloadReference, *, endless: Site | None = None) -> None:
    """Run the script, with a `range()` of it that has no end.

    Raises:
        WorkloadError: It has raised an exception. What `failures.is_environment_failure` says passes through.
    """
    name, own = reference.shown, os.getpid()
    try:
        try:
            run_as_main(reference, endless=endless)
        finally:
            if os.getpid() != own:  # a fork by the script's `os.fork` is over, and answers for nobody
                leave(sys.exc_info()[0] is not None)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise make_exit_error(name, error, ARGS_HINT) from error
    except EOFError as error:
        line = locate_user_line(traceback.extract_tb(error.__traceback__))
        raise WorkloadError(
            f"{line}: asks for input, and a trial has none", hint=f"Give it as an argument of the script. {ARGS_HINT}"
        ) from error
    except (WorkloadError, failures.TrainingFailed):
        raise
    except BaseException as error:
        if failures.is_environment_failure(error):
            raise
        raise WorkloadError(
            f"{name} raised {summarize_error(error)}",
            hint=f"Check that it runs by itself: python {name}",
            detail=format_user_traceback(error),
        ) from error


def never_trains(reference: WorkloadReference) -> WorkloadError:
    """The error of a script that ended without training."""
    return WorkloadError(
        f"{reference.shown} ended without a training that could be seen",
        hint="Give the arguments with which it trains after `--`, as in `autotune tune train.py -- --train`. A Keras "
        "model trains by fit; a loop of one's own by an optimizer of Keras.",
    )


class _FitTraining(TrialHooks):
    """Times the tuned `fit` of a trial, which never comes back from it."""

    _count = 0
    _refits: Refits | None = None

    def restarted(self) -> bool:
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
        callbacks = self.effects.without_writers(arguments["callbacks"], timed=not is_earlier)
        if is_earlier:
            return few_steps(model, usual, arguments, callbacks)
        self.effects.training_begins()
        call = FitCall(model=model, arguments=arguments, settings=self.wrappers.settings)
        for each in callbacks:
            _repeat_epochs(each, int(arguments["initial_epoch"]), max(1, call.epochs))
        history = self._refit(call, usual, callbacks)
        if self._refits is not None and not self._refits.are_measured:
            return history
        self._obeying(partial(self._train, call, callbacks))
        return leave(0)

    def _refit(self, call: FitCall, usual: Callable[..., Any], callbacks: list[Any]) -> Any:
        """Run a `fit` that the script calls again and again as it is, but shorter."""
        import tensorflow as tf

        if self.facts.fit_calls < 2 or self.request.losses is not None:
            return None
        self._refits = self._refits or Refits(self.facts.fit_calls, tf.test.experimental.sync_devices)
        if self._refits.are_measured:
            return None
        try:
            arguments = {**call.arguments, **changed_arguments(call, self.configuration, self.facts)}
            return self._refits.run(call.model, usual, arguments, callbacks)
        except BaseException as error:
            self._failed(error)

    def _train(self, call: FitCall, callbacks: list[Any]) -> None:
        import keras

        request, configuration, model, given = self.request, self.configuration, call.model, call.arguments
        call.settings.refuse_missing(self.facts)
        refuse_another_scope(model, configuration)
        dataset, source = call.training_dataset()
        train = call.pipeline(dataset, source, configuration)
        set_compiled(model, train.in_force)
        if "precision" in call.settings.changes:
            refuse_precision_that_does_not_act(model, str(configuration["precision"]))
        examples = call.examples(dataset)
        if request.losses is not None:
            curves = loss_curves_as_built(model, train.one_epoch, configuration, request.losses, examples)
            self.channel.send(protocol.LossCurves(curves=curves, gpus=gpus.gpu_names()))
            return
        # Keras makes its progress bar itself. One that it is given would end its asynchronous dispatch.
        for each in (*callbacks, keras.callbacks.ProgbarLogger):
            _repeat_epochs(each, int(given["initial_epoch"]), max(1, call.epochs))
        callbacks.insert(0, _tells_epochs(int(given["epochs"])))
        kept = {name: given[name] for name in ("verbose", "validation_freq")}
        if call.kind != "arrays":
            kept["class_weight"] = given["class_weight"]
        if call.kind == "py_dataset":
            kept["shuffle"] = given["shuffle"]
        frequency = given["validation_freq"]
        parts = fit.Parts(
            model=model,
            dataset=dataset,
            validation=call.validation(),
            train=train,
            batched=True,
            drop_remainder=drops_remainder(dataset),
            known=None if examples is None or request.data else Data(examples=examples, endless=False),
            fit_args={**kept, "callbacks": callbacks},
            validation_share=1.0 / frequency if isinstance(frequency, int) and frequency > 0 else 1.0,
            uneven=True,
            refit_seconds=0.0 if self._refits is None else self._refits.seconds / max(1, call.epochs),
            compiling_seconds=None if self._refits is None else self._refits.first_call_seconds,
            validated_by=str(self.facts.fit_site),
            validation_hint=VALIDATION_HINT,
        )
        fit.time_fit(request, self.channel, configuration, parts)


def _tells_epochs(epochs: int) -> Any:
    """Return a callback, to be the first, that tells the others the script's number of epochs, not the trial's."""
    import keras

    class TellsEpochs(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        def set_params(self, params: Any) -> None:
            params["epochs"] = epochs  # Keras hands this dict to each callback in turn
            super().set_params(params)

    return TellsEpochs()


def _repeat_epochs(callback: Any, first: int, epochs: int) -> None:
    """Have a callback, or a class of them, see the script's own epochs over and over: a trial trains more of them."""
    for name in ("on_epoch_begin", "on_epoch_end"):
        usual = getattr(callback, name, None)
        if usual is None:
            continue

        def again(*arguments: Any, usual: Any = usual, **named: Any) -> Any:
            place = int(isinstance(callback, type))  # of the epoch: a class's function has its object first
            before, epoch, after = arguments[:place], arguments[place], arguments[place + 1 :]
            return usual(*before, first + epoch % epochs, *after, **named)

        setattr(callback, name, again)
