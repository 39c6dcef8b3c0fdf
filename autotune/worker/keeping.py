"""Completes what a pipeline keeps of its elements, in memory or in files, before anything is timed.

Runs in the trial process.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

from autotune.errors import WorkloadError
from autotune.recipe.apply import kind_of
from autotune.worker.building import ENDLESS, call_user, elements_in

if TYPE_CHECKING:
    import tensorflow as tf


def fill_caches(dataset: tf.data.Dataset, part: str, *, in_files: bool) -> None:
    """Have what a pipeline keeps (`Dataset.cache`, `Dataset.snapshot`) complete, as from a training's second epoch on.

    Only an iterator that reaches the end completes it, and a trial sees the beginning of a long epoch. What only a part
    of is taken is never complete, in no training, and what has no end neither: those are left as they are. So is what
    cannot be read to its end: whoever trains on it will say so, or leaves out what is damaged.

    Args:
        dataset: The pipeline; its iterators share what it keeps.
        part: The workload's function that it comes from.
        in_files: Whether to fill caches in files, where those are not complete; or those in memory, and snapshots, of
            which each pipeline has its own.
    """
    waiting = [dataset]
    while waiting:
        each = waiting.pop()
        if kind_of(each) in ("Cache", "Snapshot"):
            if elements_in(each) != ENDLESS and in_files == bool(_file_of(each)) and not _is_complete(each):
                fill = _fill_snapshot if kind_of(each) == "Snapshot" else _read
                with contextlib.suppress(WorkloadError):
                    call_user(part, functools.partial(fill, each))
        elif not _takes_a_part(each):
            waiting += each._inputs()


def _read(dataset: tf.data.Dataset) -> None:
    """All of it."""
    import tensorflow as tf

    dataset.reduce(tf.constant(0), lambda seen, _: seen + 1)


def _fill_snapshot(dataset: tf.data.Dataset) -> None:
    """Read all of it where that writes it; an iterator that reads what is complete makes no directory."""
    import tensorflow as tf

    pattern = tf.convert_to_tensor(dataset._path).numpy().decode() + "/*/*"
    before = set(tf.io.gfile.glob(pattern))
    iterator = iter(dataset)
    next(iterator, None)
    if set(tf.io.gfile.glob(pattern)) != before:
        for _ in iterator:
            pass


def _file_of(cached: tf.data.Dataset) -> str:
    """The file in which it caches its elements; empty for memory, and for a snapshot."""
    return "" if kind_of(cached) == "Snapshot" else str(cached._filename.numpy().decode())


def _is_complete(cached: tf.data.Dataset) -> bool:
    """Whether it is known to be: the index of a file is written last."""
    import tensorflow as tf

    file = _file_of(cached)
    return bool(file) and bool(tf.io.gfile.exists(file + ".index"))


def _takes_a_part(dataset: tf.data.Dataset) -> bool:
    """Whether its iterators never reach the end of what it takes from."""
    if kind_of(dataset) == "TakeWhile":
        return True
    if kind_of(dataset) != "Take":
        return False
    (whole,) = dataset._inputs()
    most, there_are = int(dataset._count.numpy()), elements_in(whole)
    return most >= 0 and there_are != ENDLESS and (there_are < 0 or most <= there_are)
