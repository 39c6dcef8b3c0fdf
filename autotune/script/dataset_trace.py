"""What the script's own `tf.data` calls made, followed back from the dataset that is trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.data.facts import Site
from autotune.recipe.apply import kind_of
from autotune.recipe.tf_private import inputs_of, operations_of_map

if TYPE_CHECKING:
    import tensorflow as tf

COUNTS_BATCHES = ("Take", "Skip", "Shard", "Enumerate", "Window", "Batch", "ParallelBatch", "PaddedBatch", "Unbatch")
"""What a pipeline does after `batch` that would mean something else with another batch size."""
BATCHES = ("Batch", "ParallelBatch", "PaddedBatch")
HAND_ON = ("Prefetch", "Map", "ParallelMap", "Options", "Cache", "Shuffle")
"""What hands on as many elements as it gets."""


@dataclass(frozen=True)
class Made:
    """How a dataset was made by a call of the script's.

    Args:
        knob: Which knob the call's value stands for.
        site: Where the call is.
        given: The value that the script gave.
        used: The value that was used.
        drop_remainder: Of `batch`.
    """

    knob: str
    site: Site
    given: Any
    used: Any
    drop_remainder: bool = False


def tag(dataset: tf.data.Dataset, made: Made) -> tf.data.Dataset:
    """The dataset, which remembers how it was made."""
    dataset._autotune_made = made
    return dataset


def made_by(dataset: tf.data.Dataset) -> Made | None:
    """How a dataset was made; None where not by a call that a knob reaches."""
    return getattr(dataset, "_autotune_made", None)


def back_from(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """The datasets that a dataset is made of, itself first, each before what it reads from."""
    waiting, seen = [dataset], set()
    while waiting:
        each = waiting.pop(0)
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += inputs_of(each)


def batch_calls(dataset: tf.data.Dataset) -> tuple[list[Made], str]:
    """The calls that batch what is trained on, and why the batch size cannot be changed there; empty where it can."""
    found: list[Made] = []
    waiting = [(dataset, "")]
    while waiting:
        each, counted = waiting.pop(0)
        made, kind = made_by(each), kind_of(each)
        if made is not None and made.knob == "batch_size":
            if counted:
                return [], f"{counted} after {made.site} counts batches"
            found.append(made)
            continue
        if kind in COUNTS_BATCHES:
            counted = f"a `{kind.lower()}`"
        waiting += [(inner, counted) for inner in inputs_of(each)]
    if not found:
        return [], "no `batch()` of the script's feeds the training"
    if len({each.given for each in found}) > 1:
        return [], "its parts are batched by different sizes"
    return found, ""


def drops_remainder(dataset: tf.data.Dataset) -> bool:
    """Whether a smaller last batch is dropped."""
    return any(each.drop_remainder for each in batch_calls(dataset)[0][:1])


def calls_for(dataset: tf.data.Dataset, knob: str) -> list[Made]:
    """The script's calls on the way to a dataset that a knob reaches, the nearest first."""
    calls = (made_by(each) for each in back_from(dataset))
    return [each for each in calls if each is not None and each.knob == knob]


def examples_of(dataset: tf.data.Dataset, batch_size: int) -> int | None:
    """Examples in batches of this size; None where they must be counted, or have no end."""
    while kind_of(dataset) in HAND_ON and len(inputs := inputs_of(dataset)) == 1:
        (dataset,) = inputs
    if kind_of(dataset) in BATCHES and len(inputs := inputs_of(dataset)) == 1:
        found = int(inputs[0].cardinality())
        return found if found >= 0 else None
    made = made_by(dataset)
    elements = int(dataset.cardinality())
    return elements * batch_size if elements >= 0 and made is not None and made.drop_remainder else None


def mean_batch(dataset: tf.data.Dataset, batch_size: int) -> float:
    """Examples in a batch on average, as the last one of each pass may be smaller; its size if that is unknown."""
    batched = next((each for each in back_from(dataset) if kind_of(each) in BATCHES), None)
    if batched is None or len(inputs := inputs_of(batched)) != 1:
        return float(batch_size)
    examples, made = int(inputs[0].cardinality()), made_by(batched)
    if examples <= 0 or (made is not None and made.drop_remainder):
        return float(batch_size)
    return examples / math.ceil(examples / batch_size)


def cacheable(dataset: tf.data.Dataset) -> tuple[Site | None, str]:
    """The last map of a pipeline whose elements are the same in each epoch, and why there is none otherwise."""
    line = [dataset]
    while len(inputs := inputs_of(line[-1])) == 1:
        line += inputs
    found = None
    for each in reversed(line):
        kind = kind_of(each)
        if kind == "Cache":
            return None, "the script's pipeline has a cache already"
        if kind in ("Shuffle", "Repeat", "Sample", "Interleave", "ParallelInterleave"):
            break
        if kind in ("Map", "ParallelMap"):
            operations = operations_of_map(each)
            if operations is None or any("Random" in name or "PyFunc" in name for name in operations):
                break
            made = made_by(each)
            found = found if made is None else made.site
    return found, "" if found else "no map() whose results are the same in each epoch comes before a shuffle"
