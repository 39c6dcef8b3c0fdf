"""Make the batches of a training by a recipe: of arrays, of a dataset of examples, or of a dataset of batches."""

from __future__ import annotations

from typing import Any

from autotune.data.errors import ApplyError
from autotune.data.facts import KnownWorkload
from autotune.data.printable import with_article
from autotune.recipe import apply
from autotune.recipe.tf_private import tf
from autotune.space.configuration import Configuration


def make_pipeline(
    dataset: tf.data.Dataset,
    configuration: Configuration,
    workload: KnownWorkload,
    *,
    drop_remainder: bool | None,
    shuffle: bool = False,
) -> apply.TrainingPipeline:
    """Return the batches of a dataset. Refuse batches of batches, and single examples instead of batches.

    `shuffle` acts on arrays with the recipe of a script.
    """
    given = dataset
    dataset = apply.as_dataset(given)
    if not hasattr(dataset, "element_spec"):
        raise ApplyError(
            f"the recipe was given {with_article(type(given).__name__)}, expected a tf.data.Dataset or arrays",
            hint="Set its batch size by recipe.batch_size, and its other knobs by recipe.configuration.",
        )
    batched, drop = workload.batched, workload.drop_remainder if drop_remainder is None else drop_remainder
    if workload.script is not None:  # its batches were measured, and code may hand over single examples as well
        batched = _extra_axes(dataset, workload)[:1] == [0]
        if shuffle and dataset is not given:
            dataset, batched = shuffle_batches(given, configuration.batch_size, drop=drop), True
    pipeline = apply.training_pipeline(dataset, configuration, batched=batched, drop_remainder=drop)
    excess = set(_extra_axes(pipeline.dataset, workload))
    if excess == {1} and not workload.batched and apply.looks_batched(dataset):
        raise ApplyError(
            "the recipe was given a dataset that is batched already",
            hint="Pass single examples, without .batch(): the recipe batches them.",
        )
    if excess == {-1} and batched:
        raise ApplyError(
            "the recipe was given single examples, and the tuned workload did its own batching",
            hint="Batch the dataset first, by recipe.dataset_config.batch_size.",
        )
    return pipeline


def _extra_axes(dataset: tf.data.Dataset, workload: KnownWorkload) -> list[int | None]:
    """Return how many axes each tensor of an element has beyond those of the workload's batches; None: unknown."""
    pairs = zip(apply.batch_ranks(dataset), workload.batch_ranks or (), strict=False)
    return [None if rank is None or known is None else rank - known for rank, known in pairs]


def shuffle_batches(arrays: Any, batch_size: int, *, drop: bool) -> tf.data.Dataset:
    """Return the batches that `fit` makes of arrays: it shuffles them anew in each epoch."""
    x, y, weights = (*(arrays if isinstance(arrays, tuple) else (arrays,)), None, None)[:3]
    batches = apply.keras_batches(
        (x, y, weights), counted=False, batch_size=batch_size, shuffle=True, class_weight=None
    )
    full = len(apply.as_dataset(arrays)) // batch_size
    return batches.take(full) if drop else batches
