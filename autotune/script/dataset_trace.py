"""Find the script's own `tf.data` calls behind the dataset that is trained on."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotune.data.facts import Site
from autotune.data.options import MEMORY_MARGIN
from autotune.data.printable import memory_size
from autotune.machine.fingerprint import memory_limit_bytes
from autotune.machine.telemetry import peak_host_bytes
from autotune.recipe.apply import kind_of
from autotune.recipe.tf_private import effects_of, functions_of, inputs_of, operations_of
from autotune.training.pipeline import BATCHES, count_data

if TYPE_CHECKING:
    import tensorflow as tf

COUNTS_BATCHES = ("Take", "Skip", "Shard", "Window", "Batch", "ParallelBatch", "PaddedBatch", "Unbatch")
"""Calls whose meaning after `batch` depends on the batch size."""
MAPS = ("Map", "ParallelMap")
SAME_ELEMENTS = ("Prefetch", "Map", "ParallelMap", "Options", "Cache", "Shuffle")
"""Datasets that yield as many elements as they read."""
DIFFERS_BY_EPOCH = ("Shuffle", "Repeat", "Sample", "Interleave", "ParallelInterleave", "Random", "Generator")
_SOURCES = re.compile(r"(?!.*(Random|Shuffle|Generator))\w*Dataset(V\d)?")  # operations, such as in `flat_map`
SAMPLED, SECONDS = 8, 1.0  # elements that are read to know whether they stay the same; seconds to read and count them


@dataclass(frozen=True)
class DatasetCall:
    """A call of the script's that has made a dataset."""

    knob: str  # whose value the call takes
    site: Site
    given: Any  # the script's value
    used: Any  # the value in its place
    drop_remainder: bool = False  # of `batch`
    arguments: Mapping[str, Any] = field(default_factory=dict)


def tag(dataset: tf.data.Dataset, call: DatasetCall) -> None:
    """Have a dataset remember the call that has made it."""
    dataset._autotune_call = call


def call_of(dataset: tf.data.Dataset) -> DatasetCall | None:
    """Return the script's call that has made a dataset; None where it is not the script's."""
    return getattr(dataset, "_autotune_call", None)


def upstream(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yield a dataset and all that it reads from, the nearest first."""
    waiting, seen = [dataset], set()
    while waiting:
        found = waiting.pop(0)
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            waiting += inputs_of(found)


def batch_calls(dataset: tf.data.Dataset) -> tuple[list[DatasetCall], str]:
    """Return the calls that batch the training data, and why the batch size cannot change there; empty if it can."""
    found = list(_batch_calls(dataset, ""))
    for call, counted in found:
        if counted:
            return [], f"{counted} after {call.site} counts batches"
    if not found:
        return [], "no `batch()` of the script's feeds the training"
    if len({call.given for call, _ in found}) > 1:
        return [], "its parts are batched by different sizes"
    return [call for call, _ in found], ""


def _batch_calls(dataset: tf.data.Dataset, counted: str) -> Iterator[tuple[DatasetCall, str]]:
    """Yield the calls of `batch`, each with what counts batches between it and the training."""
    call, kind, inputs = call_of(dataset), kind_of(dataset), inputs_of(dataset)
    if call is not None and call.knob == "batch_size":
        yield call, counted
        return
    if kind in COUNTS_BATCHES:
        counted = f"a `{kind.lower()}`"
    elif kind == "Zip" and not all(any(_batch_calls(part, "")) for part in inputs):  # with numbers, as `enumerate` does
        counted = "an `enumerate` or `zip`"
    for part in inputs:
        yield from _batch_calls(part, counted)


def drops_remainder(dataset: tf.data.Dataset) -> bool:
    """Return whether a smaller last batch is dropped."""
    return any(call.drop_remainder for call in batch_calls(dataset)[0][:1])


def is_batched(data: Any) -> bool:
    """Return whether a value is a finite dataset that the script's own `batch` batches."""
    import tensorflow as tf

    return isinstance(data, tf.data.Dataset) and not is_endless(data) and bool(batch_calls(data)[0])


def is_endless(dataset: Any) -> bool:
    """Return whether a dataset is known to have no end."""
    import tensorflow as tf

    return isinstance(dataset, tf.data.Dataset) and int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY


def calls_for(dataset: tf.data.Dataset, knob: str) -> list[DatasetCall]:
    """Return the script's calls upstream of a dataset that take a knob, the nearest first."""
    return [call for call in map(call_of, upstream(dataset)) if call is not None and call.knob == knob]


def examples_of(dataset: tf.data.Dataset, batch_size: int) -> int | None:
    """Return the examples in batches of this size; None if they must be counted or are infinite."""
    while kind_of(dataset) in SAME_ELEMENTS and len(inputs := inputs_of(dataset)) == 1:
        (dataset,) = inputs
    if kind_of(dataset) in BATCHES and len(inputs := inputs_of(dataset)) == 1:
        found = int(inputs[0].cardinality())
        return found if found >= 0 else None
    call, batches = call_of(dataset), int(dataset.cardinality())
    return batches * batch_size if batches >= 0 and call is not None and call.drop_remainder else None


def mean_batch(dataset: tf.data.Dataset, batch_size: int) -> float:
    """Return the mean examples in a batch, as an epoch's last may be smaller; the batch size where it is unknown."""
    batched = next((found for found in upstream(dataset) if kind_of(found) in BATCHES), None)
    if batched is None or len(inputs := inputs_of(batched)) != 1:
        return float(batch_size)
    examples, call = int(inputs[0].cardinality()), call_of(batched)
    if examples <= 0 or (call is not None and call.drop_remainder):
        return float(batch_size)
    return examples / math.ceil(examples / batch_size)


def find_cache(dataset: tf.data.Dataset, room: int) -> tuple[tuple[Site, ...], int, str]:
    """Return the last map that can be cached, the bytes of its file, 0 in memory, and why not; `room`: for a file."""
    part, call, why = cacheable_map(dataset)
    if part is None or call is None:
        return (), 0, why
    try:
        first = list(_contents(part.take(SAMPLED), SECONDS))
        again = list(_contents(part.take(len(first)), math.inf))
        counted = part if kind_of(part) == "FlatMap" else inputs_of(part)[0]
        count = count_data(counted, batch_size=1, seconds=SECONDS, batched=False).examples or 0
    except Exception as error:  # which the rest of the pipeline may ignore
        return (), 0, f"reading the results of its map() raises {type(error).__name__}"
    size = count * sum(map(len, itertools.chain(*first))) // max(1, len(first))
    in_memory = size <= (1 - MEMORY_MARGIN) * memory_limit_bytes() - peak_host_bytes()
    if first != again:
        why = "the results of its map() differ when they are read twice"
    elif not count:
        why = "the number of its elements is not known; apply tf.data.experimental.assert_cardinality(N)"
    elif not in_memory and size > room:
        why = f"an epoch of it takes {memory_size(size)}, for which neither memory nor a local disk has room"
    return () if why else (call.site,), 0 if in_memory else size, why


def cacheable_map(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset | None, DatasetCall | None, str]:
    """Return the last `map`, or `flat_map`, whose results are the same in each epoch, and its call; or why not."""
    parts = list(upstream(dataset))
    if any(kind_of(part) == "Cache" for part in parts):
        return None, None, "the script's pipeline has a cache already"
    calls = [(part, call) for part in parts if kind_of(part) in (*MAPS, "FlatMap") and (call := call_of(part))]
    differing = {call.site.key for part, call in calls if any(map(_differs_by_epoch, upstream(part)))}
    same = ((part, call, "") for part, call in calls if call.site.key not in differing)  # a call may make several maps
    why_not = "no map() whose results are the same in each epoch comes before a shuffle"
    return next(same, (None, None, why_not))


def _differs_by_epoch(part: tf.data.Dataset) -> bool:
    effects = effects_of(part) if kind_of(part) in MAPS or operations_of(part) else []
    captured = (found for function in functions_of(part) for found in getattr(function.function, "captured_inputs", ()))
    if any(found.dtype.name == "variant" for found in captured):  # a dataset that is not looked into
        return True
    return kind_of(part) in DIFFERS_BY_EPOCH or not all(map(_SOURCES.fullmatch, effects))


def _contents(dataset: tf.data.Dataset, seconds: float) -> Iterator[list[bytes]]:
    """Yield the tensors of elements as bytes, for so many seconds."""
    import tensorflow as tf

    ends = time.monotonic() + seconds
    for element in dataset:
        yield [tf.io.serialize_tensor(leaf).numpy() for leaf in tf.nest.flatten(element, expand_composites=True)]
        if time.monotonic() > ends:
            return
