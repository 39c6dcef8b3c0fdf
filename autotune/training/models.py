"""The user's model: builds and compiles it as the configuration says, and refuses what cannot be trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from autotune.data.errors import ApplyError, WorkloadError
from autotune.data.printable import with_article
from autotune.recipe import apply
from autotune.recipe.apply import strategy_of
from autotune.recipe.lazy import keras, tf
from autotune.recipe.tf_private import computing_layers, inputs_of
from autotune.runtime.failures import call_user, strategy_error
from autotune.script.workload import Workload
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS
from autotune.training.datasets import BATCHES


def compiled_model(workload: Workload, configuration: Configuration) -> keras.Model:
    """The workload's model, compiled as the configuration says: the values that act on its dataset."""
    if configuration.get("strategy", "none") == "none":  # in no scope at all: the workload may misuse one
        return _compiled(workload, configuration)
    with strategy_of(configuration).scope():
        return _compiled(workload, configuration)


def _compiled(workload: Workload, configuration: Configuration) -> keras.Model:
    ours = tf.distribute.get_strategy()
    model = call_user("model", workload.model)
    if any(each.__module__.startswith("tf_keras.") for each in type(model).__mro__):
        raise WorkloadError(
            f"model() returned {with_article(type(model).__name__)} of Keras 2 (tf_keras), expected a model of Keras 3",
            hint="Unset TF_USE_LEGACY_KERAS and import keras in place of tf_keras; Keras 2 cannot be tuned.",
        )
    if not isinstance(model, keras.Model):
        raise WorkloadError(
            f"model() returned {with_article(type(model).__name__)}, expected a keras.Model",
            hint="Return the model itself, not compiled; a training loop of one's own cannot be tuned.",
        )
    strategy = model.distribute_strategy  # TensorFlow would refuse to train it outside
    if tf.distribute.get_strategy() is not ours or strategy is not ours:
        raise strategy_error(f"model() builds the model under {with_article(type(strategy).__name__)}")
    if workload.compile is not None:
        _compile(model, workload.compile, configuration)
    elif not model.compiled:
        raise WorkloadError(
            "model() returned a model that is not compiled, and Workload(compile=None) leaves that to it",
            hint="Call model.compile() in model(), or give its arguments as Workload(compile=…).",
        )
    elif model.steps_per_execution != 1:
        raise WorkloadError(
            f"model() compiles with steps_per_execution={model.steps_per_execution}, which is a knob",
            hint="Leave it out there, and name it in "
            f'Workload(baseline={{"steps_per_execution": {model.steps_per_execution}}}).',
        )
    set_compiled(model, configuration)
    for name, now in apply.overridden(configuration).items():  # else it would be timed under a wrong name
        raise WorkloadError(
            f"a function of the workload sets {name} to {now!r}, which is a knob: this trial's is "
            f"{configuration[name]!r}",
            hint="Take that line out of model(), dataset() or compile(), and name it in "
            f"Workload(baseline={{{name!r}: …}}). It takes {KNOBS[name].domain.describe()}.",
        )
    refuse_precision_that_does_not_act(model, str(configuration["precision"]))
    return model


def _compile(model: keras.Model, function: Callable[[], Any], configuration: Configuration) -> None:
    """Compile a model with what the workload's `compile()` returns, and the knobs."""
    if model.compiled:
        raise WorkloadError(
            "model() returned a model that is compiled already",
            hint="Say Workload(compile=None) to train it as it is compiled, or leave model.compile() out of model().",
        )
    arguments = call_user("compile", function)
    if not isinstance(arguments, Mapping):
        raise WorkloadError(
            f"compile() returned {with_article(type(arguments).__name__)}, expected a dict of compile arguments",
            hint='Such as {"optimizer": "adam", "loss": "mse"}; model.compile itself is called by the trial.',
        )
    knobs = apply.compile_arguments(configuration)
    for name in knobs:
        if name in arguments:
            raise WorkloadError(
                f"compile() names {name}, which is a knob",
                hint=f"Move it to Workload(baseline={{{name!r}: {arguments[name]!r}}}).",
            )
    takes = inspect.signature(model.compile).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    taken = {name: value for name, value in knobs.items() if takes_all or name in takes}
    call_user("compile", lambda: model.compile(**arguments, **taken))


def set_compiled(model: keras.Model, configuration: Configuration) -> None:
    """Set what `compile` was not told, or a model's own `compile` has not passed on."""
    apply.accumulate(model.optimizer, configuration)
    set_steps(model, int(configuration["steps_per_execution"]))
    wanted = configuration["jit_compile"]
    if wanted != "auto" and model.jit_compile != wanted and not (wanted and model.run_eagerly):
        model.jit_compile = wanted  # Keras turns it off where a layer cannot be compiled


def set_steps(model: keras.Model, steps: int) -> None:
    """Set the steps per execution; functions that an earlier `fit` has made would keep theirs."""
    if model.steps_per_execution != steps:
        model.steps_per_execution = steps
        model.train_function = model.test_function = model.predict_function = None


def refuse_batches(workload: Workload, configuration: Configuration, dataset: tf.data.Dataset) -> None:
    """Refuse data that is batched already, where nothing tells the shape of the model's inputs.

    Such a model may train on batches of batches without a word, so one is asked to train on the user's own first
    element. An example that looks like a batch, such as a sequence, is not taken for one: then it is no batch.
    """
    if not _may_hold_batches(dataset):
        return
    model = compiled_model(workload, configuration)
    model.run_eagerly = True
    try:
        model.fit(dataset.take(1), verbose=0)
    except Exception:  # whatever a model raises that cannot be trained on it
        return
    raise _yields_batches("the model trains on an element of it as it is")


def _may_hold_batches(dataset: tf.data.Dataset) -> bool:
    """Whether elements look like batches: of an unknown length, or put together by `.batch()` as tuples."""
    shapes = [getattr(each, "shape", None) for each in tf.nest.flatten(dataset.element_spec)]
    lengths = {each[0] if each is not None and each.rank else -1 for each in shapes}
    if len(lengths) > 1 or lengths == {-1}:
        return False
    while lengths != {None} and (kind := apply.kind_of(dataset)) not in BATCHES:
        before = inputs_of(dataset)
        if len(before) != 1 or kind in ("Unbatch", "FlatMap", "Window"):
            return False
        (dataset,) = before
    return lengths == {None} or isinstance(dataset.element_spec, tuple)  # a sequence is made of one tensor


def batched_twice(model: keras.Model, x: Any) -> WorkloadError | None:
    """Why a model cannot be trained, where two axes of its data are batches: the trial has added one."""
    got = [leaf.shape for leaf in keras.tree.flatten(x)]
    for shape, wanted in zip(got, getattr(model, "inputs", None) or [], strict=False):
        if shape.rank == len(wanted.shape) + 1 and tuple(shape[2:]) == tuple(wanted.shape[1:]):
            return _yields_batches(
                f"with a batch size added, an input has shape {tuple(shape)}, and the model takes {tuple(wanted.shape)}"
            )
    return None


def _yields_batches(why: str) -> WorkloadError:
    return WorkloadError(
        f"dataset() yields batches already: {why}",
        hint="Leave .batch() out of dataset(); or batch by config.batch_size and say batched=True.",
    )


def refuse_precision_that_does_not_act(model: keras.Model, policy: str) -> None:
    """Refuse a model none of whose layers took the policy: it would be timed under a wrong name."""
    computes_in = policy.removeprefix("mixed_")
    layers = list(computing_layers(model))
    if policy == computes_in:  # what has no weights need not compute in anything
        layers = [each for each in layers if each.weights and not isinstance(each, keras.Model)] or [model]
    if not any(each.compute_dtype == computes_in for each in layers):
        raise ApplyError(
            f"precision={policy} does not act: no layer of the model computes in {computes_in}",
            hint="Build the layers inside model(), leave dtype= to the policy where it may vary, and name another "
            'policy in Workload(baseline={"precision": …}).',
        )
