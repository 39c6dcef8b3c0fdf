"""Short trainings for their losses alone: the same recorded batches, the same weights, another configuration."""

from __future__ import annotations

import itertools
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from autotune.errors import WorkloadError
from autotune.space.configuration import Configuration
from autotune.worker import datasets
from autotune.worker.messages import LossRuns
from autotune.worker.models import compiled_model
from autotune.workloads.workload import Workload

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

LARGEST_RECORDING_BYTES = 256 << 20
"""Batches are recorded up to here, at least one, and then come round again."""
ROUNDING = 2.0**-8
"""Relative: the distance between neighbouring numbers of bfloat16, the coarsest format there is to choose."""


class Trainable(Protocol):
    """What can be trained again and again from its first weights."""

    def batches(self) -> tf.data.Dataset:
        """Of one epoch."""

    def model(self) -> keras.Model:
        """Compiled."""

    def initialise(self, model: keras.Model, seed: int, batch: Any) -> None:
        """Give the model the weights that a new one gets from this seed."""


class OfWorkload:
    """The trainings of a `Workload`. Steps are called one by one, and batches are read once."""

    def __init__(self, workload: Workload, configuration: Configuration) -> None:
        self._workload, self._whole = workload, configuration

    @property
    def _configuration(self) -> Configuration:
        return self._whole.replace(steps_per_execution=1, persistent_iterator=False)

    def batches(self) -> tf.data.Dataset:
        """See `Trainable`."""
        dataset = datasets.training_data(self._workload, self._configuration, examine=False)
        return datasets.pipeline(dataset, self._workload, self._configuration).dataset

    def model(self) -> keras.Model:
        """See `Trainable`."""
        return compiled_model(self._workload, self._configuration)

    def initialise(self, model: keras.Model, seed: int, batch: Any) -> None:
        """See `Trainable`. Raises WorkloadError where a new model has the weights of the one before."""
        import keras

        keras.utils.set_random_seed(seed)
        fresh = self._workload.model()
        _build(fresh, batch)
        ours = {id(each) for each in model.trainable_variables}
        if any(id(each) in ours for each in fresh.trainable_variables):
            raise WorkloadError(
                "model() returns the same weights each time, so no two trainings can begin alike",
                hint="Build the model, or the part of it that is trained, inside model().",
            )
        for mine, theirs in zip(model.weights, fresh.weights, strict=True):
            mine.assign(theirs.numpy())


class AsBuilt:
    """The trainings of a model that exists: each begins with the weights that it has now."""

    def __init__(self, model: keras.Model, batches: tf.data.Dataset) -> None:
        self._model, self._batches = model, batches
        self._weights: list[Any] | None = None

    def batches(self) -> tf.data.Dataset:
        """See `Trainable`."""
        return self._batches

    def model(self) -> keras.Model:
        """See `Trainable`."""
        return self._model

    def initialise(self, model: keras.Model, seed: int, batch: Any) -> None:
        """See `Trainable`."""
        import keras

        keras.utils.set_random_seed(seed)
        if self._weights is None:
            self._weights = [each.numpy() for each in model.weights]
        for variable, value in zip(model.weights, self._weights, strict=True):
            variable.assign(value)


def loss_curves(
    trainable: Trainable, configuration: Configuration, runs: LossRuns, examples: int | None
) -> tuple[tuple[float | None, ...], ...]:
    """The loss of each step of each training.

    Args:
        trainable: What is trained.
        configuration: How.
        runs: Which trainings.
        examples: Per epoch; None when endless or unknown. Only full batches are recorded.

    Returns:
        One curve per scale and seed, all of one length; a loss that is not finite is None. Empty where the model
        reports none, or its learning rate cannot be set.
    """
    import keras

    keras.utils.set_random_seed(runs.seeds[0])  # what draws from a seed of its own: dropout, augmentation
    batches = _recorded(trainable, configuration, runs, examples)
    model = trainable.model()
    model.make_train_function()
    first_batch = next(iter(batches))
    _build(model, first_batch)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        optimizer.build(model.trainable_variables)
    untouched = [(each, each.numpy()) for each in ([] if optimizer is None else optimizer.variables)]
    curves: list[tuple[float | None, ...]] = []
    first_weights: list[Any] = []
    steps, deadline = runs.most_steps, time.perf_counter() + runs.seconds
    for scale, seed in itertools.product(runs.scales, runs.seeds):
        trainable.initialise(model, seed, first_batch)
        own = [each.numpy() for each in model.trainable_variables]
        if not curves:
            first_weights = own
        elif seed != runs.seeds[0]:
            _disturb_if_equal(model, own, first_weights, seed)
        for variable, value in untouched:
            variable.assign(value)
        if not _scale_learning_rate(optimizer, scale):
            curves.append(())
            continue
        curves.append(_train(model, batches, steps, math.inf if curves else deadline))
        steps = len(curves[0])
    return tuple(curves)


def _recorded(
    trainable: Trainable, configuration: Configuration, runs: LossRuns, examples: int | None
) -> tf.data.Dataset:
    """The recorded batches, over and over; recorded now where they are not yet."""
    import tensorflow as tf

    # TensorFlow takes brackets in a path for a pattern, and finds nothing. By a descriptor there are none.
    below = os.open(Path(runs.folder).parent, os.O_RDONLY)
    folder = f"/proc/self/fd/{below}/{Path(runs.folder).name}"
    if not Path(folder).exists():
        batches = trainable.batches()
        whole = max(1, examples // configuration.batch_size) if examples else runs.most_steps
        size = max(1, sum(_bytes(leaf) for leaf in tf.nest.flatten(next(iter(batches)))))
        batches.take(max(1, min(runs.most_steps, whole, LARGEST_RECORDING_BYTES // size))).save(folder)
    batches = tf.data.Dataset.load(folder).cache().repeat()
    if runs.recorded_batch_size != configuration.batch_size:
        batches = batches.unbatch().batch(configuration.batch_size, drop_remainder=True)
    return batches


def _bytes(leaf: Any) -> int:
    dtype = getattr(leaf, "dtype", None)
    flat = getattr(leaf, "flat_values", getattr(leaf, "values", leaf))  # ragged and sparse tensors
    return int(flat.shape.num_elements() or 0) * max(1, getattr(dtype, "size", 1))


def _build(model: keras.Model, batch: Any) -> None:
    """Make the weights of a model that has yet to see its input."""
    if not model.built:
        model(batch[0] if isinstance(batch, tuple) else batch, training=False)


def _disturb_if_equal(model: keras.Model, own: list[Any], first: list[Any], seed: int) -> None:
    """Move weights that no seed changes, such as pretrained ones, by as much as rounding might.

    Else all trainings would be equal, and say that rounding makes no difference.
    """
    import numpy as np

    if not all(np.array_equal(a, b) for a, b in zip(own, first, strict=True)):
        return
    generator = np.random.default_rng(seed)
    for variable, value in zip(model.trainable_variables, own, strict=True):
        variable.assign(value * (1 + ROUNDING * generator.uniform(-1, 1, value.shape)).astype(value.dtype))


def _scale_learning_rate(optimizer: Any, scale: float) -> bool:
    """Whether the learning rate is now so many times what it was; a schedule's cannot be set."""
    if scale == 1.0:
        return True
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    try:
        inner.learning_rate = float(inner.learning_rate) * scale
    except (TypeError, AttributeError):
        return False
    return True


def _train(model: keras.Model, batches: tf.data.Dataset, steps: int, deadline: float) -> tuple[float | None, ...]:
    """The loss of each step; no step but the first is begun after the deadline."""
    iterator = iter(batches)
    curve: list[float | None] = []
    while len(curve) < steps and (not curve or time.perf_counter() <= deadline):
        model.reset_metrics()
        logs = model.train_function(iterator)
        if not isinstance(logs, dict) or "loss" not in logs:
            break
        loss = float(logs["loss"])
        curve.append(loss if math.isfinite(loss) else None)
    return tuple(curve)
