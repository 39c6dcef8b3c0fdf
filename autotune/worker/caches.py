"""Completes what a pipeline keeps of its elements by `Dataset.cache`, before anything is timed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from autotune.errors import WorkloadError
from autotune.recipe.apply import kind_of
from autotune.worker.datasets import ENDLESS, elements_in
from autotune.worker.failures import call_user
from autotune.worker.private_api import attribute_of, inputs_of

if TYPE_CHECKING:
    import tensorflow as tf


def fill_caches(dataset: tf.data.Dataset | None, part: str) -> tuple[float, float]:
    """Have caches complete, as they are from a training's second epoch on: a trial sees the beginning of a long one.

    Only an iterator that reaches the end completes a cache. One of which only a part is taken, or which has no end, is
    never complete in a training: it is left as it is. So is one that cannot be read to its end: training on it fails.

    Args:
        dataset: The pipeline; its iterators share what it keeps. None for none.
        part: The workload's function that it comes from.

    Returns:
        Seconds that filling caches in files took, which are filled once, and those in memory, which each trial fills.
    """
    import tensorflow as tf

    in_files = in_memory = 0.0
    waiting = [] if dataset is None else [dataset]
    while waiting:
        each = waiting.pop()
        if kind_of(each) != "Cache":
            waiting += [] if _takes_a_part(each) else inputs_of(each)
            continue
        file = attribute_of(each, "_filename")
        complete = file and tf.io.gfile.exists(f"{file}.index")  # which is written last
        if file is None or complete or elements_in(each) == ENDLESS:
            continue
        began = time.monotonic()
        try:
            call_user(part, lambda each=each: each.reduce(tf.constant(0), lambda seen, _: seen + 1))  # type: ignore[misc]
        except WorkloadError:
            continue
        finally:
            in_files += time.monotonic() - began if file else 0.0
            in_memory += 0.0 if file else time.monotonic() - began
    return in_files, in_memory


def _takes_a_part(dataset: tf.data.Dataset) -> bool:
    """Whether its iterators never reach the end of what it takes from."""
    if kind_of(dataset) != "Take":
        return kind_of(dataset) == "TakeWhile"
    most, whole = elements_in(dataset), max(map(elements_in, inputs_of(dataset)), default=ENDLESS)
    return whole != ENDLESS and not 0 <= whole <= most
