"""Map whole batches: move the script's last `map` behind `batch`, and prove on elements that they stay the same."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from autotune.data.facts import Site
from autotune.recipe.apply import kind_of
from autotune.recipe.tf_private import attribute_of, effects_of, functions_of, inputs_of, tf
from autotune.runtime.failures import summarize_error
from autotune.script.dataset_trace import MAPS, DatasetCall, call_of, tag, upstream

_COMMUTES = {"Shuffle": ("buffer_size", "reshuffle_each_iteration"), "Prefetch": ("buffer_size",)}
_COMMUTES |= dict.fromkeys(("Repeat", "Take", "Skip"), ("count",))
"""Calls that may stand before a `map` as well as after it, with their arguments."""
FIRST_BATCHES, LONGEST_BATCH = 3, 32  # that a proof reads, apart from later ones
PROOF_SECONDS, PROOF_BYTES = 1.0, 32 << 20  # after which it reads no further one
_proofs: dict[Any, tuple[bool, str]] = {}  # by code and element: a loop over `fit` makes its maps anew


def _back_to_map(examples: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Return a dataset and what it reads from, up to a `map` or anything else that does not commute with one."""
    line = [examples]
    while kind_of(line[-1]) in _COMMUTES and (inputs := inputs_of(line[-1])):
        line += inputs
    return line


def without_map(examples: tf.data.Dataset, moved: Collection[Any]) -> tuple[tf.data.Dataset, DatasetCall | None]:
    """Return the batched dataset without its last `map`, and the call of that; None where it is not to be moved."""
    *between, mapped = _back_to_map(examples)
    call = call_of(mapped)
    if call is None or call.site.key not in moved or kind_of(mapped) not in MAPS or not _has_one_shape(mapped):
        return examples, None
    (examples,) = inputs_of(mapped)
    for made in reversed(between):
        arguments = {name: attribute_of(made, f"_{name}") for name in _COMMUTES[kind_of(made)]}
        if kind_of(made) == "Shuffle" and any(int(attribute_of(made, name)) for name in ("_seed", "_seed2")):
            arguments["seed"] = attribute_of(made, "_seed2")  # drawn once: the script's later operations keep theirs
        examples = getattr(examples, kind_of(made).lower())(**arguments)
        if (own := call_of(made)) is not None:
            tag(examples, own)
    return examples, call


def map_batches(
    batches: tf.data.Dataset, map_func: Callable[..., Any], *, vectorized: bool, **named: Any
) -> tf.data.Dataset:
    """Return batches mapped by a function of examples: by itself, or by `tf.vectorized_map`."""

    def map_batch(*batch: Any) -> Any:
        return tf.vectorized_map(lambda example: map_func(*example), batch, fallback_to_while_loop=False)

    return batches.map(map_batch if vectorized else map_func, **named)


def _has_one_shape(mapped: tf.data.Dataset) -> bool:
    """Return whether all elements that a `map` reads are dense, and of the same shape."""
    specs = tf.nest.flatten(inputs_of(mapped)[0].element_spec)
    return all(isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined() for spec in specs)


def find_batched_map(
    dataset: tf.data.Dataset, batch_size: int, changing: Callable[[Any], str]
) -> tuple[tuple[Site, ...], bool, str]:
    """Return the calls of `map` and `batch` that may change places, whether by `tf.vectorized_map`, and why not.

    `changing` says what functions read that may change: the `map` of a later epoch would not be the one compared.
    """
    batched = [(part, call) for part in upstream(dataset) if (call := call_of(part)) and call.knob == "batch_size"]
    if len(batched) != 1:
        return (), False, f"{len(batched) or 'no'} calls of batch() feed the training"
    ((batches, batch),) = batched
    mapped = _back_to_map(inputs_of(batches)[0])[-1]
    maps = [(part, call) for part in upstream(mapped) if kind_of(part) in MAPS and (call := call_of(part))]
    if not maps:
        return (), False, f"no map() stands before {batch.site}"
    last, call = maps[0]
    if batch.site.call in ("padded_batch", "ragged_batch"):
        why = f"{batch.site} takes examples of varying shapes"
    elif batch.site.call != "batch" or call.site.call != "map":
        why = f"{batch.site} makes its batches example by example; write them with tf.data, whole batches at a time"
    elif last is not mapped:
        why = f"a `{kind_of(mapped).lower()}` stands between {call.site} and batch()"
    elif operations := effects_of(mapped):
        why = f"{call.site} draws at random, writes or runs Python: {operations[0]}"
    elif not _has_one_shape(mapped):
        why = f"{call.site} reads elements that are ragged, sparse or of varying shapes"
    elif not (why := changing([call.arguments["map_func"]]).partition(", and batches")[0]):
        function = call.arguments["map_func"]
        is_plain = isinstance(function, FunctionType) and not (function.__closure__ or function.__defaults__)
        key = function.__code__ if is_plain else object(), str(inputs_of(mapped)[0].element_spec)
        if key not in _proofs:
            _proofs[key] = _prove(mapped, call, min(max(2, batch_size), LONGEST_BATCH), drop=batch.drop_remainder)
        vectorized, why = _proofs[key]
        if not why:
            return (call.site, batch.site), vectorized, ""
        why = f"the function of {call.site} {why}"
    return (), False, why


def _prove(mapped: tf.data.Dataset, call: DatasetCall, size: int, *, drop: bool) -> tuple[bool, str]:
    """Compare functions of batches with a `map` of examples, on some of the script's examples and on changed ones.

    Return whether it must be by `tf.vectorized_map`, and why neither gives the same bits.
    """
    (wrapped,), map_func = functions_of(mapped), call.arguments["map_func"]
    source = _back_to_map(inputs_of(mapped)[0])[-1]  # before a shuffle, which first fills its buffer

    def map_one(*example: Any) -> Any:  # as the script has traced it
        return tf.nest.pack_sequence_as(mapped.element_spec, wrapped.function(*tf.nest.flatten(example)))

    def find_difference(examples: Any, wanted: list[Any], length: int) -> str:
        made: list[Any] = []

        def map_batched(data: Any) -> Any:
            made.append(map_batches(data.batch(length, drop_remainder=drop), map_func, vectorized=vectorized))
            return made[0].unbatch()

        try:
            found = _run(examples, map_batched)
        except Exception as error:
            return f"fails on a batch: {_quote(error)}"
        expected = mapped.batch(length, drop_remainder=drop).element_spec
        if (spec := made[0].element_spec) != expected:
            return f"gives {spec} for a batch, not {expected}"
        for number, (part, whole) in enumerate(zip(found, wanted, strict=True)):
            right = whole[: len(part)]
            same = np.array_equal(part, right) if part.dtype == object else part.tobytes() == right.tobytes()
            if part.shape != right.shape or not same:
                return f"gives other values for a batch, in tensor {number} of an element"
        return ""

    try:
        real = _read(source.batch(size))
        wanted = [_run(real, lambda data: data.map(map_one))]
    except Exception as error:
        return False, f"cannot be compared: {_quote(error)}"
    examples, differences = [real], []
    with contextlib.suppress(Exception):  # it refuses such numbers
        changed = tf.nest.map_structure(lambda part: _change(part[: max(1, size // 2)]), real)
        wanted.append(_run(changed, lambda data: data.map(map_one)))
        examples.append(changed)
    for vectorized in (False, True):
        # tf.vectorized_map mixes none, but may compute another NaN. Batches of one show a function that reads the
        # length of a batch, or removes axes of length 1.
        compared = list(zip(examples, wanted, strict=True))[: 1 if vectorized else 2]
        found = (find_difference(*both, length) for both in compared for length in (size, 1))
        if not (difference := next(filter(None, found), "")):
            return vectorized, ""
        differences.append(difference)
    return False, f"{differences[0]}; with tf.vectorized_map it {differences[1]}"


def _quote(error: Exception) -> str:
    """Return an error of a function in one line, without the names of TensorFlow's nodes."""
    unconverted = re.search(r"No pfor vectorization defined for \w+", str(error))
    return unconverted[0] if unconverted else re.sub(r"\{\{.*?\}\} *|\[Op:.*", "", summarize_error(error)).rstrip()


def _read(batches: tf.data.Dataset) -> Any:
    """Return the examples of some first batches, and of later ones at ever wider distances."""
    kept, seen, began = [], 0, time.monotonic()
    for number, batch in enumerate(batches.as_numpy_iterator()):
        if number < FIRST_BATCHES or not number & (number - 1):
            kept.append(batch)
            seen += sum(part.nbytes for part in tf.nest.flatten(batch))
        if seen > PROOF_BYTES or time.monotonic() - began > PROOF_SECONDS:
            break
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *kept)


def _change(part: Any) -> Any:
    """Return examples, each beside a copy of other numbers, once for each kind of copy.

    A function may mix the examples of a batch, but only where one of them is large, negative or not a number.
    """
    if part.dtype.kind in "iu":
        all_of_type = part.itemsize == 1 and part.ndim > 1  # larger ones may be indices, or lengths
        limits = np.iinfo(part.dtype) if all_of_type else SimpleNamespace(min=part.min(), max=part.max())
        copies = [part * 0, part // 2, np.full_like(part, limits.min), np.full_like(part, limits.max), part]
    elif part.dtype.kind in "bOSU":
        copies = [~part if part.dtype.kind == "b" else part] * 5
    else:
        with np.errstate(all="ignore"):
            copies = [(part * factor).astype(part.dtype) for factor in (0.0, 0.5, -1e3, 1e3, np.nan)]
    return np.concatenate([np.stack([part, copy], axis=1).reshape(-1, *part.shape[1:]) for copy in copies])


def _run(examples: Any, act: Callable[[Any], Any]) -> list[Any]:
    """Return all that `act` makes of a dataset of these examples, a tensor for each part of an element."""
    count = len(tf.nest.flatten(examples)[0])  # TensorFlow allocates a batch of the size asked for
    with tf.device("CPU:0"):
        (whole,) = act(tf.data.Dataset.from_tensor_slices(examples)).batch(count).as_numpy_iterator()
    return list(tf.nest.flatten(whole))
