"""Input pipelines: counts their examples, fills their caches, and refuses uneven batches."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

from autotune.data.errors import WorkloadError
from autotune.recipe.apply import kind_of
from autotune.recipe.tf_private import attribute_of, inputs_of, tf
from autotune.runtime.failures import call_user
from autotune.runtime.protocol import Data

ENDLESS = -1  # `tf.data.INFINITE_CARDINALITY`
BATCHES = ("Batch", "ParallelBatch", "PaddedBatch")  # kinds of datasets that make batches
MOST_UNEVEN = 0.02  # by how much whole batches may exceed their examples: throughput is overstated by this share


def refuse_uneven(sizes: list[int], wanted: int) -> None:
    """Refuse batches that hold clearly fewer examples than wanted: each step counts as a whole one."""
    if sum(sizes) and len(sizes) * wanted > (1 + MOST_UNEVEN) * sum(sizes):
        mean = sum(sizes) / len(sizes)
        raise WorkloadError(
            f"dataset(config) with batched=True yields batches of {mean:.1f} on average before its last, "
            f"expected config.batch_size, which is {wanted}: throughput is counted in whole batches",
            hint="Batch last, when files are put together and after .repeat(); or drop what fills no batch "
            "(drop_remainder=True); or yield single examples without batched=True.",
        )


def elements_in(dataset: tf.data.Dataset) -> int:
    """Return how many elements a dataset says it has; negative where it does not say."""
    return int(dataset.cardinality().numpy())


def count_data(
    dataset: tf.data.Dataset,  # before the trial batches it
    validation: tf.data.Dataset | None = None,  # batches
    *,
    batch_size: int,
    seconds: float,  # that each count may take, where a dataset does not know its length
    counted_before: Data | None = None,
    known_examples: int | None = None,  # of an epoch
    batched: bool = True,
    uneven: bool = True,  # batches may have any length, as a script's do: the same on both sides
) -> Data:
    """Return how many examples an epoch and a validation have: as counted before, as known, or counted now."""
    elements = elements_in(dataset)
    found = counted_before or Data(examples=known_examples, endless=False)
    examples, held_out, uncounted = found.examples, found.validation_examples, found.validation_uncounted
    if known_examples is None and counted_before is None and elements != ENDLESS:
        examples = _count_examples(dataset, elements, batch_size, seconds, batched=batched, uneven=uneven)
    elif known_examples is None and batched and examples is not None and elements >= 0:
        examples = min(examples, elements * batch_size)  # it may drop what fills no batch
    if counted_before is None and validation is not None and elements_in(validation) < 0:
        held_out = _count_batches(validation, seconds, "validation")
        uncounted = held_out is None
    return Data(
        examples=examples,
        validation_examples=held_out,
        validation_uncounted=uncounted,
        endless=examples is None and elements == ENDLESS,
    )


def _count_examples(
    dataset: tf.data.Dataset, elements: int, batch_size: int, seconds: float, *, batched: bool, uneven: bool
) -> int | None:
    """Return the examples of an epoch with an end; None where they could not be counted in time."""
    if not batched:
        count_one = tf.autograph.experimental.do_not_convert(lambda *_: tf.constant(1, tf.int64))
        return elements if elements >= 0 else _count_batches(dataset.map(count_one).batch(32), seconds, "dataset")
    seen: Batches = call_user("dataset", lambda: batches_in(dataset, seconds, batch_size))
    if not uneven:
        refuse_uneven(seen.sizes[:-1], batch_size)
    if seen.ended:
        return sum(seen.sizes)
    return None if elements < 0 else round(sum(seen.sizes) / len(seen.sizes) * elements)


def _count_batches(batches: tf.data.Dataset, seconds: float, part: str) -> int | None:
    """Count examples in batches that a part of the workload makes; None where time runs out."""
    seen: Batches = call_user(part, lambda: batches_in(batches, seconds))
    return sum(seen.sizes) if seen.ended else None


def validation_batches(validation: tf.data.Dataset | None, data: Data) -> int | None:
    """Return the number of batches of a validation; None where it is unknown."""
    batches = -1 if validation is None else elements_in(validation)
    if batches < 0 and data.validation_examples is not None:
        return math.ceil(data.validation_examples / batch_length(validation))
    return batches if batches >= 0 else None


def batch_length(dataset: tf.data.Dataset) -> int:
    """Return the number of examples in the first batch of a dataset; 1 where that does not show."""
    return sum(batches_in(dataset.take(1), math.inf).sizes) or 1


class Batches(NamedTuple):
    """The examples in each batch that was read, and whether the dataset ended."""

    sizes: list[int]
    ended: bool


def batches_in(batches: tf.data.Dataset, seconds: float, wanted: int = 0) -> Batches:
    """Count examples in batches, for so many seconds after the first.

    Some tensors of a batch do not have one row per example: a graph's nodes, or a table that is the same for all. The
    first batch shows which tensor to count by: the first one of the wanted length, or the longest that is shorter.
    """
    sizes: list[int] = []
    part, deadline = 0, math.inf
    for batch in batches:
        shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(batch)]
        lengths = [int(shape[0]) if shape is not None and shape.rank else 0 for shape in shapes] or [0]
        if not sizes:
            deadline = time.perf_counter() + seconds
            shorter = max((length for length in lengths if length <= wanted), default=0)
            part = lengths.index(shorter or next((length for length in lengths if length), 0))
        sizes.append(lengths[part])
        if time.perf_counter() > deadline:
            return Batches(sizes, ended=False)
    return Batches(sizes, ended=True)


def fill_caches(dataset: tf.data.Dataset | None, part: str) -> tuple[float, float]:
    """Fill a pipeline's caches, as they are from a training's second epoch on.

    Return the seconds spent on caches in files, which are filled once, and on those that each trial fills.
    """
    in_files = in_memory = 0.0
    for cache in () if dataset is None else _completed_caches(dataset):
        file, began = attribute_of(cache, "_filename"), time.monotonic()
        complete = file and tf.io.gfile.exists(f"{file}.index")  # which is written last
        if file is None or complete or elements_in(cache) == ENDLESS:
            continue
        read = functools.partial(cache.reduce, tf.constant(0), lambda seen, _: seen + 1)
        with contextlib.suppress(WorkloadError):  # training on what cannot be read to its end fails
            call_user(part, read)
        in_files += time.monotonic() - began if file else 0.0
        in_memory += 0.0 if file else time.monotonic() - began
    return in_files, in_memory


def _completed_caches(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yield the caches that a training completes: one of which only a part is taken never is."""
    kind, inputs = kind_of(dataset), inputs_of(dataset)
    if kind == "Cache":
        yield dataset
        return
    if kind == "Take":
        most, whole = elements_in(dataset), max(map(elements_in, inputs), default=ENDLESS)
        inputs = inputs if whole == ENDLESS or 0 <= whole <= most else []
    for source in [] if kind == "TakeWhile" else inputs:
        yield from _completed_caches(source)
