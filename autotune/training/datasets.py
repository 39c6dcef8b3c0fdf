"""The user's datasets: makes them, counts their examples, fills their caches, and refuses what cannot be timed."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from autotune.data.errors import WorkloadError
from autotune.data.printable import with_article
from autotune.recipe import apply
from autotune.recipe.apply import kind_of
from autotune.recipe.lazy import tf
from autotune.recipe.tf_private import attribute_of, inputs_of
from autotune.runtime.failures import call_user, make_strategy_error
from autotune.script.workload import Workload, call_with_config
from autotune.space.configuration import Configuration

ENDLESS = -1  # `tf.data.INFINITE_CARDINALITY`
BATCHES = ("Batch", "ParallelBatch", "PaddedBatch")  # kinds of datasets that make batches
LOOK_BATCHES, LOOK_SECONDS = 32, 1.0  # of a dataset that batches by itself: no further one so long after the first
MOST_UNEVEN = 0.02  # by how much whole batches may exceed their examples: throughput is overstated by this share


def training_data(workload: Workload, configuration: Configuration, *, examine: bool) -> tf.data.Dataset:
    """What the workload's `dataset()` returns.

    Args:
        workload: Whose.
        configuration: What a dataset that batches by itself is told.
        examine: Look at a first element; of one that batches by itself the first batches are looked at in any case.
    """
    dataset = _made_by(workload.dataset, "dataset", configuration)
    if examine or workload.batched:  # each batch size: one that dataset() ignores would look faster
        _look_at(dataset, workload, configuration.batch_size)
    return dataset


def validation_data(workload: Workload, configuration: Configuration, train: tf.data.Dataset) -> tf.data.Dataset | None:
    """What the workload's `validation()` returns, batched; None without one, or where the training has no end."""
    if workload.validation is None:
        return None
    held_out = _made_by(workload.validation, "validation", configuration)
    if elements_in(train) == ENDLESS:
        return None
    if elements_in(held_out) == ENDLESS:
        raise WorkloadError(
            "validation() has no end, so the first epoch's validation has none either",
            hint="Take as much of it as is validated: dataset.take(N).",
        )
    # Like `fit`, take either: batches have an axis more than single examples.
    ranks = zip(apply.batch_ranks(held_out), apply.batch_ranks(train), strict=False)
    excess = {None if own is None or beside is None else own - beside for own, beside in ranks}
    batched = excess != {-1} if workload.batched else excess == {1}
    return apply.pipeline(held_out, configuration, batched=batched)


def pipeline(dataset: tf.data.Dataset, workload: Workload, configuration: Configuration) -> apply.TrainingPipeline:
    """The training data, batched and prefetched as the configuration says."""
    return apply.training_pipeline(
        dataset, configuration, batched=workload.batched, drop_remainder=workload.drop_remainder
    )


def _made_by(function: Callable[..., Any], part: str, configuration: Configuration) -> tf.data.Dataset:
    dataset = call_user(part, lambda: call_with_config(function, configuration))
    if isinstance(dataset, tf.distribute.DistributedDataset):
        raise make_strategy_error(f"{part}() returned a dataset that a tf.distribute strategy has distributed")
    dataset = apply.as_dataset(dataset) if part == "validation" else dataset
    if not isinstance(dataset, tf.data.Dataset):
        hint = "Wrap arrays as tf.data.Dataset.from_tensor_slices((x, y))."
        if not isinstance(dataset, tuple | list | dict):
            hint = "Wrap it by tf.data.Dataset.from_generator(lambda: …, output_signature=…); one that yields batches, "
            hint += "such as a PyDataset, of config.batch_size and with Workload(batched=True)."
        found = with_article(type(dataset).__name__)
        raise WorkloadError(f"{part}() returned {found}, expected a tf.data.Dataset", hint=hint)
    spec = dataset.element_spec
    if isinstance(spec, tuple) and not 1 <= len(spec) <= 3:
        raise WorkloadError(
            f"{part}() yields tuples of {len(spec)}, expected (x, y) or (x, y, sample_weight)",
            hint="Several inputs go into x, as a tuple or a dict.",
        )
    return dataset


def _look_at(dataset: tf.data.Dataset, workload: Workload, wanted: int) -> None:
    few = dataset.take(LOOK_BATCHES if workload.batched else 1)
    seen = call_user("dataset", lambda: _batches_in(few, LOOK_SECONDS, wanted))
    if not seen.sizes:
        raise WorkloadError("dataset() yields nothing: it is empty", hint="Check the path or the filter that feeds it.")
    if not workload.batched:
        return
    first = seen.sizes[0]
    if first != wanted and first and not (first < wanted and len(seen.sizes) == 1):  # one batch of it all
        raise WorkloadError(
            f"dataset(config) with batched=True yields batches of {first}, expected "
            f"config.batch_size, which is {wanted}",
            hint="Batch by config.batch_size, or yield single examples without batched=True.",
        )
    _refuse_uneven(seen.sizes[:-1], wanted)


def _refuse_uneven(sizes: list[int], wanted: int) -> None:
    """Refuse batches that hold clearly less than was asked for: each step counts for a whole one."""
    if sum(sizes) and len(sizes) * wanted > (1 + MOST_UNEVEN) * sum(sizes):
        mean = sum(sizes) / len(sizes)
        raise WorkloadError(
            f"dataset(config) with batched=True yields batches of {mean:.1f} on average before its last, "
            f"expected config.batch_size, which is {wanted}: throughput is counted in whole batches",
            hint="Batch last, when files are put together and after .repeat(); or drop what fills no batch "
            "(drop_remainder=True); or yield single examples without batched=True.",
        )


def elements_in(dataset: tf.data.Dataset) -> int:
    """How many elements a dataset says it has, negative where it does not say."""
    return int(dataset.cardinality().numpy())


def examples_in(
    dataset: tf.data.Dataset, configuration: Configuration, seconds: float, *, batched: bool, uneven: bool = False
) -> int | None:
    """Examples per epoch; None without an end, or where they could not be counted.

    Args:
        dataset: The training data, before the trial batches it.
        configuration: The trial's.
        seconds: How long counting may take, where the dataset does not say how many it has.
        batched: It holds batches.
        uneven: They may have any length, as a script's do: its own, and the same on both sides.
    """
    elements = elements_in(dataset)
    if elements == ENDLESS:
        return None
    if not batched:
        one = tf.autograph.experimental.do_not_convert(lambda *_: tf.constant(1, tf.int64))
        return elements if elements >= 0 else counted(dataset.map(one).batch(32), seconds, "dataset")
    seen: _Batches = call_user("dataset", lambda: _batches_in(dataset, seconds, configuration.batch_size))
    if not uneven:
        _refuse_uneven(seen.sizes[:-1], configuration.batch_size)
    if seen.ended:
        return sum(seen.sizes)
    return None if elements < 0 else round(sum(seen.sizes) / len(seen.sizes) * elements)


def counted(batches: tf.data.Dataset, seconds: float, part: str) -> int | None:
    """Examples in batches that a part of the workload makes; None if they were not counted in time."""
    seen: _Batches = call_user(part, lambda: _batches_in(batches, seconds))
    return sum(seen.sizes) if seen.ended else None


def batch_length(dataset: tf.data.Dataset) -> int:
    """Examples in the first batch of a dataset; 1 where that does not tell."""
    return sum(_batches_in(dataset.take(1), math.inf).sizes) or 1


class _Batches(NamedTuple):
    """The examples in each batch that came, and whether no more would have come."""

    sizes: list[int]
    ended: bool


def _batches_in(batches: tf.data.Dataset, seconds: float, wanted: int = 0) -> _Batches:
    """Count examples in batches, for so many seconds after the first.

    Not all that a batch holds need be of one example each, as a graph's nodes or a table that is the same for all. The
    first batch tells which part counts: the first one of the wanted length, or else the longest that is shorter.
    """
    sizes: list[int] = []
    part, deadline = 0, math.inf
    for batch in batches:
        shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(batch)]
        lengths = [int(shape[0]) if shape is not None and shape.rank else 0 for shape in shapes] or [0]
        if not sizes:
            deadline = time.perf_counter() + seconds
            shorter = max((each for each in lengths if each <= wanted), default=0)
            part = lengths.index(shorter or next((each for each in lengths if each), 0))
        sizes.append(lengths[part])
        if time.perf_counter() > deadline:
            return _Batches(sizes, ended=False)
    return _Batches(sizes, ended=True)


def fill_caches(dataset: tf.data.Dataset | None, part: str) -> tuple[float, float]:
    """Have caches complete, as they are from a training's second epoch on: a trial sees the beginning of a long one.

    Args:
        dataset: The pipeline; its iterators share what it keeps. None for none.
        part: The workload's function that it comes from.

    Returns:
        Seconds that filling caches in files took, which are filled once, and those in memory, which each trial fills.
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
    """The caches that a training completes: one of which only a part is taken never is, and is left as it is."""
    kind, inputs = kind_of(dataset), inputs_of(dataset)
    if kind == "Cache":
        yield dataset
        return
    if kind == "Take":
        most, whole = elements_in(dataset), max(map(elements_in, inputs), default=ENDLESS)
        inputs = inputs if whole == ENDLESS or 0 <= whole <= most else []
    for each in [] if kind == "TakeWhile" else inputs:
        yield from _completed_caches(each)
