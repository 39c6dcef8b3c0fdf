"""Short trainings for their losses alone: the same recorded batches, the same weights, another configuration."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autotune.data.errors import WorkloadError
from autotune.recipe.keras_api import keras_api
from autotune.recipe.tf_private import keras, tf
from autotune.runtime.protocol import LossCurves, LossRuns
from autotune.space.configuration import Configuration
from autotune.training import gauges
from autotune.training.gauges import Weights

LARGEST_RECORDING_BYTES = 256 << 20  # batches are recorded up to here, at least one, and then repeat
ROUNDING = 2.0**-8  # relative: the distance between neighbours of bfloat16, the coarsest format there is to choose
Curves = tuple[tuple[float | None, ...], ...]  # by training and step or probe, see `protocol.LossCurves`


def loss_curves(
    model: Callable[[], keras.Model],
    batches: Callable[[], tf.data.Dataset],
    configuration: Configuration,
    runs: LossRuns,
    examples: int | None,  # of an epoch, of which only full batches are recorded; None if it is infinite or unknown
    *,
    fresh_model: Callable[[], keras.Model] | None = None,  # whose weights each training begins with; None for `model`'s
) -> LossCurves:
    """Return the loss of each step of each training. Steps are called one by one, and batches are read once."""
    keras.utils.set_random_seed(runs.seeds[0])  # for what draws a seed of its own: dropout, augmentation
    recorded = _record(batches, configuration, runs, examples)
    trained = model()
    first_batch = next(iter(recorded))
    with trained.distribute_strategy.scope():
        trained.make_train_function()
        build(trained, first_batch)
        optimizer = getattr(trained, "optimizer", None)
        if optimizer is not None:
            keras_api().build_optimizer(optimizer, trained.trainable_variables)
    as_built = [] if fresh_model else [weight.numpy() for weight in trained.weights]
    of_optimizer = [] if optimizer is None else keras_api().optimizer_variables(optimizer)
    untouched = [variable.numpy() for variable in of_optimizer]
    curves: list[tuple[float | None, ...]] = []
    first_weights: list[Any] = []
    steps = runs.most_steps
    for seed in runs.seeds:
        keras.utils.set_random_seed(seed)
        _assign(trained.weights, _fresh_values(fresh_model(), trained, first_batch) if fresh_model else as_built)
        own = [weight.numpy() for weight in trained.trainable_variables]
        first_weights = first_weights or own
        if seed != runs.seeds[0] and all(map(np.array_equal, own, first_weights)):
            # Weights that no seed changes, such as pretrained ones, are moved by as much as rounding might.
            noise = np.random.default_rng(seed)
            moved = [w * (1 + ROUNDING * noise.uniform(-1, 1, w.shape)).astype(w.dtype) for w in own]
            _assign(trained.trainable_variables, moved)
        _assign(of_optimizer, untouched)
        curves.append(_train(trained, recorded, steps, math.inf if curves else runs.seconds))
        steps = len(curves[0])
    return describe_losses(trained, tuple(curves))


def describe_losses(
    model: keras.Model, curves: Curves, counted: Mapping[str, tuple[float, ...]] | None = None
) -> LossCurves:
    """Return the message with the losses of trainings of a model."""
    weights = gauges.describe_weights(Weights(model.weights, model.trainable_weights))
    return LossCurves(curves=curves, gpus=gauges.gpu_names(), counted=counted or {}, **weights)


def _fresh_values(fresh: keras.Model, trained: keras.Model, batch: Any) -> list[Any]:
    """Return the weights of a fresh model, which must be its own."""
    build(fresh, batch)
    ours = {id(variable) for variable in trained.trainable_variables}
    if any(id(variable) in ours for variable in fresh.trainable_variables):
        raise WorkloadError(
            "model() returns the same weights each time, so no two trainings can begin the same way",
            hint="Build the model, or the part of it that is trained, inside model().",
        )
    return [weight.numpy() for weight in fresh.weights]


def _record(
    batches: Callable[[], tf.data.Dataset], configuration: Configuration, runs: LossRuns, examples: int | None
) -> tf.data.Dataset:
    """Return the recorded batches, over and over; record them where no other trial has."""
    folder = open_recording(runs.folder)
    if not Path(folder).exists():
        source = batches()
        whole = max(1, examples // configuration.batch_size) if examples else runs.most_steps
        source.take(min(runs.most_steps, whole, most_recorded(source))).save(folder)
    recorded = tf.data.Dataset.load(folder).cache().repeat()
    if runs.recorded_batch_size != configuration.batch_size:
        recorded = recorded.unbatch().batch(configuration.batch_size, drop_remainder=True)
    return recorded


def open_recording(folder: str) -> str:
    """Return the folder of a recording by a descriptor: TensorFlow takes brackets in a path for a pattern."""
    below = os.open(Path(folder).parent, os.O_RDONLY)
    return f"/proc/self/fd/{below}/{Path(folder).name}"


def most_recorded(batches: tf.data.Dataset) -> int:
    """Return how many batches a recording may have."""
    parts = tf.nest.flatten(next(iter(batches)), expand_composites=True)  # of ragged and sparse tensors
    size = sum(int(part.shape.num_elements()) * part.dtype.size for part in parts if part is not None)
    return int(max(1, LARGEST_RECORDING_BYTES // max(1, size)))


def build(model: keras.Model, batch: Any) -> None:
    """Make the weights of a model that has not seen its input yet; those of a model without `call` are there."""
    if not model.built:
        with contextlib.suppress(NotImplementedError):
            model(batch[0] if isinstance(batch, tuple) else batch, training=False)


def _assign(variables: Any, values: list[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _train(model: keras.Model, batches: tf.data.Dataset, steps: int, seconds: float) -> tuple[float | None, ...]:
    """Return the loss of each step; none begins later than so many seconds after the first step, which compiles."""
    iterator = iter(model.distribute_strategy.experimental_distribute_dataset(batches))
    curve: list[float | None] = []
    deadline = math.inf
    while len(curve) < steps and time.perf_counter() <= deadline:
        model.reset_metrics()
        logs = model.train_function(iterator)
        if not isinstance(logs, dict) or "loss" not in logs:
            break
        loss = float(logs["loss"])
        if not curve:
            deadline = time.perf_counter() + seconds
        curve.append(loss if math.isfinite(loss) else None)
    return tuple(curve)
