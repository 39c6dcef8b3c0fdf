"""One trial of a script: it runs as it is up to its training, which is timed in its place."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from autotune.errors import WorkloadError
from autotune.executors.executor import Data
from autotune.recipe import apply
from autotune.scripts.execute import directory_of, run_as_main
from autotune.scripts.facts import ScriptFacts, ScriptSettings, Site, Trains
from autotune.scripts.fit_call import FitCall
from autotune.scripts.leaving import few_steps, leave
from autotune.scripts.loop_trial import LoopTraining, losses_unknown
from autotune.scripts.loop_watch import LoopWatch
from autotune.scripts.settings import Settings
from autotune.scripts.side_effects import SideEffects, effects_of
from autotune.scripts.wrapping import Wrappers
from autotune.space.configuration import Configuration
from autotune.worker import failures, gpus, keras_fit, messages
from autotune.worker.loss_curves import loss_curves_as_built
from autotune.worker.models import refuse_precision_that_does_not_act, set_compiled
from autotune.workloads.loading import ARGS_HINT
from autotune.workloads.users_errors import cause_of, exit_error, users_line, users_traceback
from autotune.workloads.workload import WorkloadReference


class Script:
    """A script as a kind of workload."""

    def __init__(self, reference: WorkloadReference) -> None:
        self.reference = reference


def run(
    request: messages.TrialRequest, channel: messages.Channel, script: Script, configuration: Configuration
) -> None:
    """Run one trial to its end. It comes back only where the script has not trained."""
    import keras
    import tensorflow as tf

    facts = request.script
    assert facts is not None
    if request.losses is not None:
        configuration = configuration.replace(
            **{
                name: value
                for name, value in {"steps_per_execution": 1, "persistent_iterator": False}.items()
                if name in configuration
            }
        )
        keras.utils.set_random_seed(request.losses.seeds[0])  # each such trial builds the same weights

    def refuse(error: WorkloadError) -> NoReturn:
        channel.send(failures.told(error))
        leave(1)

    if facts.trains is Trains.LOOP and request.losses is not None:
        losses_unknown(request, channel)
        return
    side_effects = effects_of(script.reference, refuse)
    given = request, channel, configuration, facts, side_effects
    settings = script.reference.script or ScriptSettings()
    training = LoopTraining(*given, settings.loss) if facts.trains is Trains.LOOP else _FitTraining(*given)
    wrappers = Wrappers(Settings.of(configuration, facts), training, directory_of(script.reference))
    training.wrappers = wrappers
    wrappers.scratch = side_effects.scratch
    side_effects.install(tf, keras)
    wrappers.install()
    if isinstance(training, LoopTraining):
        training.watch = LoopWatch(wrappers, training, facts)
        training.watch.install(tf, keras)
    here = os.getcwd()
    run_users(script.reference, endless=facts.epochs_range)
    while training.has_trained:  # the script's own training is shorter than a trial's
        repeatable(tf)
        training.restarted()
        os.chdir(here)
        run_users(script.reference, endless=facts.epochs_range)
    raise never_trains(script.reference)


def repeatable(tf: Any) -> None:
    """What a script sets before TensorFlow starts stays as it is when the script begins anew."""
    for name in ("set_logical_device_configuration", "set_visible_devices"):
        setattr(tf.config, name, lambda *_, **__: None)
        setattr(tf.config.experimental, name, lambda *_, **__: None)
    for owner in (tf.config.experimental, tf.config.threading):
        for name in ("set_memory_growth", "set_intra_op_parallelism_threads", "set_inter_op_parallelism_threads"):
            setattr(owner, name, lambda *_, **__: None)


def run_users(reference: WorkloadReference, *, endless: Site | None = None) -> None:
    """Run the script, with a `range()` of it that has no end.

    Raises:
        WorkloadError: It has raised an exception. Want of memory passes through.
    """
    name = reference.shown
    try:
        run_as_main(reference, endless=endless)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise exit_error(name, error, ARGS_HINT) from error
    except EOFError as error:
        line = users_line(traceback.extract_tb(error.__traceback__))
        raise WorkloadError(
            f"{line}: asks for input, and a trial has none", hint=f"Give it as an argument of the script. {ARGS_HINT}"
        ) from error
    except WorkloadError:
        raise
    except BaseException as error:
        if failures.is_out_of_memory(error) or isinstance(error, failures.TrainingFailed):
            raise
        raise WorkloadError(
            f"{name} raised {cause_of(error)}",
            hint=f"Check that it runs by itself: python {name}",
            detail=users_traceback(error),
        ) from error


def never_trains(reference: WorkloadReference) -> WorkloadError:
    """The error of a script that ended without training."""
    return WorkloadError(
        f"{reference.shown} ended without a training that could be seen",
        hint="Give the arguments with which it trains after `--`, as in `autotune tune train.py -- --train`. A Keras "
        "model trains by fit; a loop of one's own by an optimizer of Keras.",
    )


class _FitTraining:
    """Times the tuned `fit` of a trial."""

    wrappers: Wrappers

    def __init__(
        self,
        request: messages.TrialRequest,
        channel: messages.Channel,
        configuration: Configuration,
        facts: ScriptFacts,
        side_effects: SideEffects,
    ) -> None:
        self._request, self._channel, self._configuration = request, channel, configuration
        self._facts, self._side_effects = facts, side_effects
        self._count = 0

    has_trained = False
    """It never comes back from its training."""

    def restarted(self) -> None:
        """A `fit` is trained on until the tuner ends it."""

    def fit(self, model: Any, usual: Callable[..., Any], arguments: dict[str, Any], site: Site) -> Any:
        """See `wrapping.Hooks`."""
        self._count += 1
        callbacks = self._side_effects.kept(arguments["callbacks"])
        if self._count < self._facts.fit:
            return few_steps(model, usual, arguments, callbacks)
        try:
            self._train(model, arguments, callbacks)
        except messages.ChannelClosed:
            return leave(1)
        except BaseException as error:
            self._channel.send(failures.told(error))
            return leave(1)
        return leave(0)

    def _train(self, model: Any, arguments: dict[str, Any], callbacks: list[Any]) -> None:
        request, configuration, settings = self._request, self._configuration, self.wrappers.settings
        settings.refuse_missing(self._facts)
        call = FitCall(model=model, arguments=arguments, settings=settings)
        dataset, source = call.training_dataset()
        train = call.pipeline(dataset, source, configuration)
        set_compiled(model, train.in_force)
        if "precision" in settings.changes:
            refuse_precision_that_does_not_act(model, str(configuration["precision"]))
        examples = call.examples(dataset)
        if request.losses is not None:
            curves = loss_curves_as_built(model, train.one_epoch, configuration, request.losses, examples)
            self._channel.send(messages.LossCurves(curves=curves, gpus=gpus.gpu_names()))
            return
        known = None
        if examples is not None and request.data is None:
            known = Data(examples=examples, endless=False)
        parts = keras_fit.Parts(
            model=model,
            dataset=dataset,
            validation=call.validation(),
            train=train,
            batched=True,
            drop_remainder=call.drops_remainder(dataset),
            known=known,
            fit_args=fit_args(call, callbacks),
            validation_share=_share(arguments["validation_freq"]),
            uneven=True,
        )
        keras_fit.time_fit(request, self._channel, configuration, parts)


def fit_args(call: FitCall, callbacks: list[Any]) -> dict[str, Any]:
    """The arguments of the script's `fit` that stay as they are."""
    given = call.arguments
    for each in callbacks:
        _repeat_epochs(each, int(given["initial_epoch"]), int(given["epochs"]))
    kept: dict[str, Any] = {"callbacks": callbacks, "verbose": given["verbose"]}
    kept["validation_freq"] = given["validation_freq"]
    if call.kind != "arrays":
        kept["class_weight"] = given["class_weight"]
    if call.kind == "py_dataset":
        kept["shuffle"] = given["shuffle"]
    return kept


def _share(frequency: Any) -> float:
    return 1.0 / frequency if isinstance(frequency, int) and frequency > 0 else 1.0


def _repeat_epochs(callback: Any, first: int, end: int) -> None:
    """Have a callback see the script's own epochs, over and over: a trial trains more than those."""
    for name in ("on_epoch_begin", "on_epoch_end"):
        usual = getattr(callback, name, None)
        if usual is None:
            continue

        def again(epoch: int, logs: Any = None, usual: Any = usual) -> Any:
            return usual(first + epoch % max(1, end - first), logs)

        setattr(callback, name, again)


def prepare(configuration: Configuration, facts: ScriptFacts) -> None:
    """Set what acts before the script runs; TensorFlow is imported as the script's environment has it."""
    os.environ.update(facts.variables)
    changes = Settings.of(configuration, facts).changes  # the rest is the script's own affair
    apply.apply_before_import(changes)
    importlib.import_module("keras")
    apply.apply_before_build(changes)
