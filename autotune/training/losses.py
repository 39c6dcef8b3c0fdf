"""Short trainings for their losses alone: the same recorded batches, the same weights, another configuration."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from autotune.data.errors import WorkloadError
from autotune.recipe.lazy import keras, tf
from autotune.runtime.protocol import LossRuns
from autotune.script.workload import Workload
from autotune.space.configuration import Configuration
from autotune.training import datasets
from autotune.training.models import compiled_model

LARGEST_RECORDING_BYTES = 256 << 20  # batches are recorded up to here, at least one, and then come round again
ROUNDING = 2.0**-8  # relative: the distance between neighbours of bfloat16, the coarsest format there is to choose
Curves = tuple[tuple[float | None, ...], ...]  # by training and step, see `messages.LossCurves`


def loss_curves(workload: Workload, configuration: Configuration, runs: LossRuns, examples: int | None) -> Curves:
    """The loss of each step of each training of a `Workload`: steps are called one by one, and batches are read once.

    Only full batches of an epoch's `examples` are recorded; None when there is no end, or it is unknown.
    """
    configuration = configuration.replace(steps_per_execution=1, persistent_iterator=False)

    def batches() -> tf.data.Dataset:
        dataset = datasets.training_data(workload, configuration, examine=False)
        return datasets.pipeline(dataset, workload, configuration).dataset

    def initialise(model: keras.Model, batch: Any) -> None:
        fresh = workload.model()
        _build(fresh, batch)
        ours = {id(each) for each in model.trainable_variables}
        if any(id(each) in ours for each in fresh.trainable_variables):
            raise WorkloadError(
                "model() returns the same weights each time, so no two trainings can begin alike",
                hint="Build the model, or the part of it that is trained, inside model().",
            )
        _assign(model.weights, [each.numpy() for each in fresh.weights])

    return _curves(batches, lambda: compiled_model(workload, configuration), initialise, configuration, runs, examples)


def loss_curves_as_built(
    model: keras.Model, batches: tf.data.Dataset, configuration: Configuration, runs: LossRuns, examples: int | None
) -> Curves:
    """The same of a model that exists: each training begins with the weights that it has now."""
    weights: list[Any] = []

    def initialise(model: keras.Model, batch: Any) -> None:
        weights.extend([] if weights else [each.numpy() for each in model.weights])
        _assign(model.weights, weights)

    return _curves(lambda: batches, lambda: model, initialise, configuration, runs, examples)


def _curves(
    batches: Callable[[], tf.data.Dataset],
    made: Callable[[], keras.Model],
    initialise: Callable[[keras.Model, Any], None],
    configuration: Configuration,
    runs: LossRuns,
    examples: int | None,
) -> Curves:
    """The curves of what is trained on `batches` of one epoch, once `initialise` has given it its first weights."""
    keras.utils.set_random_seed(runs.seeds[0])  # what draws from a seed of its own: dropout, augmentation
    recorded = _recorded(batches, configuration, runs, examples)
    model = made()
    first_batch = next(iter(recorded))
    with model.distribute_strategy.scope():
        model.make_train_function()
        _build(model, first_batch)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            optimizer.build(model.trainable_variables)
    untouched = [each.numpy() for each in getattr(optimizer, "variables", ())]
    curves: list[tuple[float | None, ...]] = []
    first_weights: list[Any] = []
    steps, deadline = runs.most_steps, time.perf_counter() + runs.seconds
    for scale, seed in itertools.product(runs.scales, runs.seeds):
        keras.utils.set_random_seed(seed)
        initialise(model, first_batch)
        own = [each.numpy() for each in model.trainable_variables]
        first_weights = first_weights or own
        if seed != runs.seeds[0] and all(map(np.array_equal, own, first_weights)):
            # Weights that no seed changes, such as pretrained ones, are moved by as much as rounding might.
            noise = np.random.default_rng(seed)
            moved = [each * (1 + ROUNDING * noise.uniform(-1, 1, each.shape)).astype(each.dtype) for each in own]
            _assign(model.trainable_variables, moved)
        _assign(getattr(optimizer, "variables", ()), untouched)
        if not _scale_learning_rate(optimizer, scale):
            curves.append(())
            continue
        curves.append(_train(model, recorded, steps, math.inf if curves else deadline))
        steps = len(curves[0])
    return tuple(curves)


def _recorded(
    batches: Callable[[], tf.data.Dataset], configuration: Configuration, runs: LossRuns, examples: int | None
) -> tf.data.Dataset:
    """The recorded batches, over and over; recorded now where they are not yet."""
    # TensorFlow takes brackets in a path for a pattern, and finds nothing. By a descriptor there are none.
    below = os.open(Path(runs.folder).parent, os.O_RDONLY)
    folder = f"/proc/self/fd/{below}/{Path(runs.folder).name}"
    if not Path(folder).exists():
        source = batches()
        whole = max(1, examples // configuration.batch_size) if examples else runs.most_steps
        parts = tf.nest.flatten(next(iter(source)), expand_composites=True)  # of ragged and sparse tensors
        size = sum(int(each.shape.num_elements()) * each.dtype.size for each in parts if each is not None)
        source.take(max(1, min(runs.most_steps, whole, LARGEST_RECORDING_BYTES // max(1, size)))).save(folder)
    recorded = tf.data.Dataset.load(folder).cache().repeat()
    if runs.recorded_batch_size != configuration.batch_size:
        recorded = recorded.unbatch().batch(configuration.batch_size, drop_remainder=True)
    return recorded


def _build(model: keras.Model, batch: Any) -> None:
    """Make the weights of a model that has yet to see its input."""
    if not model.built:
        model(batch[0] if isinstance(batch, tuple) else batch, training=False)


def _assign(variables: Any, values: list[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _scale_learning_rate(optimizer: Any, scale: float) -> bool:
    """Whether the learning rate is now so many times what it was; a schedule's cannot be set."""
    if scale == 1.0:
        return True
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    try:
        inner.learning_rate = float(inner.learning_rate.numpy()) * scale
    except (TypeError, AttributeError):
        return False
    return True


def _train(model: keras.Model, batches: tf.data.Dataset, steps: int, deadline: float) -> tuple[float | None, ...]:
    """The loss of each step; no step but the first is begun after the deadline."""
    iterator = iter(model.distribute_strategy.experimental_distribute_dataset(batches))
    curve: list[float | None] = []
    while len(curve) < steps and (not curve or time.perf_counter() <= deadline):
        model.reset_metrics()
        logs = model.train_function(iterator)
        if not isinstance(logs, dict) or "loss" not in logs:
            break
        loss = float(logs["loss"])
        curve.append(loss if math.isfinite(loss) else None)
    return tuple(curve)
