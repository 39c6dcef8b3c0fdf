"""The user's model: builds and compiles it as the configuration says, and refuses what cannot be trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.errors import ApplyError, WorkloadError
from autotune.recipe import apply
from autotune.space.configuration import Configuration
from autotune.worker.failures import call_user, strategy_error
from autotune.worker.private_api import computing_layers
from autotune.workloads.workload import Workload

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


def compiled_model(workload: Workload, configuration: Configuration, train: tf.data.Dataset) -> keras.Model:
    """The workload's model, checked against the pipeline's elements and compiled as the configuration says.

    Args:
        workload: Whose.
        configuration: The values that act on this dataset.
        train: Batches.
    """
    import keras

    model = call_user("model", workload.model)
    if not isinstance(model, keras.Model):
        raise WorkloadError(
            f"model() returned a {type(model).__name__}, expected a keras.Model",
            hint="Return the model itself, not compiled; a training loop of one's own cannot be tuned.",
        )
    _refuse_strategy(model)
    if model.compiled:
        raise WorkloadError(
            "model() returned a model that is compiled already",
            hint="Leave model.compile() out of model(): give its arguments as Workload(compile=…).",
        )
    if not workload.batched:
        spec = train.element_spec
        _refuse_batches_of_batches(model, spec[0] if isinstance(spec, tuple) else spec)
    _refuse_precision_that_does_not_act(model, str(configuration["precision"]))
    arguments = call_user("compile", workload.compile)
    if not isinstance(arguments, dict):
        raise WorkloadError(
            f"compile() returned a {type(arguments).__name__}, expected the arguments of model.compile as a dict",
            hint='Such as {"optimizer": "adam", "loss": "mse"}; model.compile itself is called by the trial.',
        )
    knobs = apply.compile_arguments(configuration)
    for name in knobs:
        if name in arguments:
            raise WorkloadError(
                f"compile() names {name}, which is a knob",
                hint=f"Move it to Workload(baseline={{{name!r}: {arguments[name]!r}}}).",
            )
    call_user("compile", lambda: model.compile(**arguments, **knobs))
    return model


def _refuse_batches_of_batches(model: keras.Model, x: Any) -> None:
    """Refuse data of which two axes are batches: the trial has added one. Other misfits are Keras's to tell."""
    import keras

    inputs = (getattr(model, "inputs", None) or []) if model.built else []
    got = [leaf.shape for leaf in keras.tree.flatten(x)]
    for shape, wanted in zip(got, inputs, strict=False):
        if shape.rank == len(wanted.shape) + 1 and tuple(shape[2:]) == tuple(wanted.shape[1:]):
            raise WorkloadError(
                f"dataset() yields batches already: with a batch size added, an input has shape {tuple(shape)}, "
                f"and the model takes {tuple(wanted.shape)}",
                hint="Leave .batch() out of dataset(); or batch by config.batch_size and say batched=True.",
            )


def _refuse_precision_that_does_not_act(model: keras.Model, policy: str) -> None:
    """Refuse a model none of whose layers took the policy: it would be timed under a wrong name."""
    computes_in = policy.removeprefix("mixed_")
    if policy != computes_in and not any(
        each.compute_dtype == computes_in for each in computing_layers(model)
    ):
        raise ApplyError(
            f"precision={policy} does not act: no layer of the model computes in {computes_in}",
            hint="Build the layers inside model(), and leave dtype= to the policy where it may vary.",
        )


def _refuse_strategy(model: keras.Model) -> None:
    """Refuse a model that belongs to a `tf.distribute` strategy: TensorFlow would refuse to train it outside."""
    import tensorflow as tf

    strategy = model.distribute_strategy
    if tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy():
        raise strategy_error(f"model() builds the model under a {type(strategy).__name__}")
