"""Builds what a trial trains from the user's workload, and refuses what cannot be trained.

Runs in the trial process. What is wrong with the workload itself is a `WorkloadError`; want of memory is not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.errors import ApplyError, WorkloadError
from autotune.executors.no_memory import says_no_memory
from autotune.recipe import apply
from autotune.space.configuration import Configuration
from autotune.workloads.loading import users_traceback
from autotune.workloads.workload import Workload, call_with_config

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


LOOK_BATCHES, LOOK_SECONDS = 32, 1.0
"""Of a dataset that batches by itself so many are looked at, and no further one so long after the first."""
HANDFUL = 32
"""Examples that are counted at once, at most."""
MOST_UNEVEN = 0.02
"""By how much whole batches may be more than the examples in them: so much too fast would it look."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, of Python's or TensorFlow's, says that memory ran out."""
    import tensorflow as tf

    text = str(error)
    return (
        isinstance(error, (MemoryError, tf.errors.ResourceExhaustedError))
        or (isinstance(error, tf.errors.OpError) and "RESOURCE_EXHAUSTED" in text)
        or says_no_memory(text)
    )


def datasets(
    workload: Workload, configuration: Configuration, *, examine: bool
) -> tuple[apply.TrainingPipeline, tf.data.Dataset | None, apply.SetByDataset]:
    """The batched pipelines of training and validation (None without one), and what the user's dataset set itself.

    Args:
        workload: Whose.
        configuration: How they are batched and prefetched.
        examine: Look at a first element as well.
    """
    train = _checked_dataset(workload.dataset, "dataset", configuration)
    if examine or workload.batched:  # each batch size: one that dataset() ignores would look faster
        _refuse_unusableelements_in(train, workload, configuration)
    validation = None
    if workload.validation is not None:
        held_out = _checked_dataset(workload.validation, "validation", configuration)
        if elements_in(held_out) == ENDLESS and elements_in(train) != ENDLESS:
            raise WorkloadError(
                "validation() has no end, so the first epoch's validation has none either",
                hint="Take as much of it as is validated: dataset.take(N).",
            )
        validation = apply.pipeline(held_out, configuration, batched=workload.batched)
    return (
        apply.training_pipeline(
            train,
            configuration,
            batched=workload.batched,
            drop_remainder=workload.drop_remainder,
        ),
        validation,
        apply.set_by_dataset(train),
    )


def call_user(part: str, function: Callable[[], Any]) -> Any:
    """Call one of the workload's functions; an exception in it is the user's to mend, want of memory is not."""
    try:
        return function()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise WorkloadError(
            f"the workload's {part}() raised {type(error).__name__}: {error}", detail=users_traceback(error)
        ) from error


def _checked_dataset(
    function: Callable[..., Any], part: str, configuration: Configuration
) -> tf.data.Dataset:
    import tensorflow as tf

    dataset = call_user(part, lambda: call_with_config(function, configuration))
    if not isinstance(dataset, tf.data.Dataset):
        raise WorkloadError(
            f"{part}() returned a {type(dataset).__name__}, expected a tf.data.Dataset",
            hint="Wrap arrays as tf.data.Dataset.from_tensor_slices((x, y)).",
        )
    spec = dataset.element_spec
    if isinstance(spec, tuple) and not 1 <= len(spec) <= 3:
        raise WorkloadError(
            f"{part}() yields tuples of {len(spec)}, expected (x, y) or (x, y, sample_weight)",
            hint="Several inputs go into x, as a tuple or a dict.",
        )
    return dataset


def _refuse_unusableelements_in(
    dataset: tf.data.Dataset, workload: Workload, configuration: Configuration
) -> None:
    wanted = configuration.batch_size
    most = LOOK_BATCHES if workload.batched else 1
    sizes = call_user("dataset", lambda: _first_sizes(dataset, most, wanted))
    if not sizes:
        raise WorkloadError(
            "dataset() yields nothing: it is empty", hint="Check the path or the filter that feeds it."
        )
    if workload.batched:
        first = sizes[0]
        whole_epoch = len(sizes) == 1  # one batch of it all may be smaller than was asked for
        if first and first != wanted and not (whole_epoch and first < wanted):
            raise WorkloadError(
                f"dataset(config) with batched=True yields batches of {first}, expected "
                f"config.batch_size, which is {wanted}",
                hint="Batch by config.batch_size, or yield single examples without batched=True.",
            )
        _refuse_uneven(len(sizes) - 1, sum(sizes[:-1]), wanted)


def _first_sizes(dataset: tf.data.Dataset, most: int, wanted: int) -> list[int]:
    """Examples in batches: of at least two of them, and of more while little time has passed."""
    sizes: list[int] = []
    deadline = math.inf
    size = _sizes(wanted)
    for element in dataset.take(most):
        sizes.append(size(element) if most > 1 else 1)
        if len(sizes) == 1:
            deadline = time.perf_counter() + LOOK_SECONDS
        elif time.perf_counter() > deadline:
            break
    return sizes


def _sizes(wanted: int) -> Callable[[Any], int]:
    """Counts the examples of batch after batch of one dataset; 0 where they have no axes.

    Not all that a batch holds need be of one example each, as a graph's nodes or a table that is the same for all. By
    the first batch it is known what is: the first part of it that is as long as was asked for, or else the longest
    that is shorter, for an epoch may have no more.

    Args:
        wanted: Examples that were asked for in each.
    """
    import keras

    place: int | None = None

    def size(batch: Any) -> int:
        nonlocal place
        shapes = [getattr(leaf, "shape", None) for leaf in keras.tree.flatten(batch)]
        lengths = [int(shape[0]) if shape is not None and shape.rank else 0 for shape in shapes]
        if place is None:
            first = next((index for index, length in enumerate(lengths) if length), 0)
            shorter = [index for index, length in enumerate(lengths) if 0 < length <= wanted]
            place = max(shorter, key=lambda index: lengths[index], default=first)
        return lengths[place] if lengths else 0

    return size


def _refuse_uneven(batches: int, examples: int, wanted: int) -> None:
    """Refuse batches that hold clearly less than was asked for: each step counts for a whole one.

    Args:
        batches: How many were seen that others followed on.
        examples: In them.
        wanted: Examples that were asked for in each.
    """
    if examples and batches * wanted > (1 + MOST_UNEVEN) * examples:
        raise WorkloadError(
            f"dataset(config) with batched=True yields batches of {examples / batches:.1f} on average before its last, "
            f"expected config.batch_size, which is {wanted}: throughput is counted in whole batches",
            hint="Batch last, when files are put together and after .repeat(); or drop what fills no batch "
            "(drop_remainder=True); or yield single examples without batched=True.",
        )


def compiled_model(workload: Workload, configuration: Configuration, train: tf.data.Dataset) -> keras.Model:
    """The workload's model, checked against the pipeline's elements and compiled as the configuration says."""
    import keras

    model = call_user("model", workload.model)
    if not isinstance(model, keras.Model):
        raise WorkloadError(
            f"model() returned a {type(model).__name__}, expected a keras.Model",
            hint="Return the model itself, not compiled; a training loop of one's own cannot be tuned.",
        )
    if model.compiled:
        raise WorkloadError(
            "model() returned a model that is compiled already",
            hint="Leave model.compile() out of model(): give its arguments as Workload(compile=…).",
        )
    _refuse_shapes_that_do_not_fit(model, train.element_spec, workload)
    _refuse_precision_that_does_not_act(model, str(configuration["precision"]))
    arguments = call_user("compile", workload.compile)
    if not isinstance(arguments, dict):
        raise WorkloadError(
            f"compile() returned a {type(arguments).__name__}, expected the arguments of model.compile as a dict",
            hint='Such as {"optimizer": "adam", "loss": "mse"}; model.compile itself is called by the trial.',
        )
    knobs = apply.compile_arguments(configuration)
    for name in knobs:
        if name in arguments:
            raise WorkloadError(
                f"compile() names {name}, which is a knob",
                hint=f"Move it to Workload(baseline={{{name!r}: {arguments[name]!r}}}).",
            )
    call_user("compile", lambda: model.compile(**arguments, **knobs))
    return model


def _refuse_shapes_that_do_not_fit(model: keras.Model, spec: Any, workload: Workload) -> None:
    for got, wanted in _shapes_of_inputs(model, spec[0] if isinstance(spec, tuple) else spec):
        one_more = len(got) == len(wanted) + 1
        surely_batches = one_more and list(got[2:]) == list(wanted[1:])  # whatever its last axis is
        if _fits(got, wanted) and (workload.batched or not surely_batches):
            continue
        if not workload.batched and one_more:
            raise WorkloadError(
                f"dataset() yields batches already: with a batch size added, an input has shape {tuple(got)}, "
                f"and the model takes {tuple(wanted)}",
                hint="Leave .batch() out of dataset(); or batch by config.batch_size and say batched=True.",
            )
        raise WorkloadError(
            f"dataset() yields an input of shape {tuple(got[1:])}, the model takes {tuple(wanted[1:])}",
            hint="Shapes of a single example, without the batch; make one fit the other.",
        )


_Shape = Sequence[int | None]


def _shapes_of_inputs(model: keras.Model, x: Any) -> list[tuple[_Shape, _Shape]]:
    """What the dataset yields for each of the model's inputs, and what that takes; empty where one is not known."""
    import keras

    inputs = getattr(model, "input_shape", None) if model.built else None
    expected = _flat_shapes(inputs)
    if isinstance(x, dict) and not isinstance(inputs, dict):  # Keras goes by names then
        names = [each.name for each in getattr(model, "inputs", None) or ()]
        x = [x[name] for name in names if name in x]
    shapes = [leaf.shape.as_list() for leaf in keras.tree.flatten(x) if leaf.shape.rank is not None]
    return list(zip(shapes, expected, strict=True)) if len(shapes) == len(expected) else []


def _fits(got: _Shape, wanted: _Shape) -> bool:
    """Whether an input's shape is one that the model takes; Keras itself lets a last axis of 1 come and go."""
    if len(got) == len(wanted) + 1 and got[-1] == 1:
        got = got[:-1]
    elif len(got) == len(wanted) - 1 and wanted[-1] == 1:
        wanted = wanted[:-1]
    return len(got) == len(wanted) and all(
        a is None or b is None or a == b for a, b in zip(got[1:], wanted[1:], strict=True)
    )


def _refuse_precision_that_does_not_act(model: keras.Model, policy: str) -> None:
    """Refuse a model none of whose layers took the policy: it would be timed under a wrong name."""
    computes_in = policy.removeprefix("mixed_")
    if policy != computes_in and not any(each.compute_dtype == computes_in for each in _layers(model)):
        raise ApplyError(
            f"precision={policy} does not act: no layer of the model computes in {computes_in}",
            hint="Build the layers inside model(), and leave dtype= to the policy where it may vary.",
        )


def _layers(layer: keras.Layer) -> Iterator[keras.Layer]:
    """The layers that compute something: not inputs, and not models that only hand on to their layers."""
    import keras

    only_hands_on = isinstance(layer, keras.Model) and type(layer).call.__module__.startswith("keras.")
    if not only_hands_on and not isinstance(layer, keras.layers.InputLayer):
        yield layer
    for each in getattr(layer, "layers", ()):
        yield from _layers(each)


def _flat_shapes(shapes: Any) -> list[tuple[int | None, ...]]:
    """The shapes in a model's `input_shape`, which is a shape, or a list or dict of them."""
    if isinstance(shapes, dict):
        return [shape for key in sorted(shapes) for shape in _flat_shapes(shapes[key])]
    if isinstance(shapes, (list, tuple)) and shapes and isinstance(shapes[0], (list, tuple, dict)):
        return [shape for each in shapes for shape in _flat_shapes(each)]
    return [tuple(shapes)] if isinstance(shapes, (list, tuple)) else []


ENDLESS = -1
"""`tf.data.INFINITE_CARDINALITY`."""


def count_examples(
    workload: Workload, configuration: Configuration, seconds: float
) -> tuple[int | None, bool]:
    """Examples per epoch, None when endless or not counted in time; and whether the dataset is endless."""
    dataset = _checked_dataset(workload.dataset, "dataset", configuration)
    return _count(dataset, workload, configuration, seconds), elements_in(dataset) == ENDLESS


def says_its_length(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset knows how many elements it has."""
    return elements_in(dataset) >= 0


def count_validation_examples(validation: tf.data.Dataset, seconds: float) -> int | None:
    """Examples in the batches of validation data that does not say how long it is; None if not counted in time."""
    counted = call_user("validation", lambda: _counted_batches(validation, seconds))
    return counted.examples if counted.all_of_it else None


def own_examples(
    batches: tf.data.Dataset, told: int | None, seconds: float, *, batch_size: int
) -> int | None:
    """Examples in an epoch of a dataset that batches by itself, at its present batch size.

    Where it drops what does not fill a batch, which a batch size in its shapes gives away, that is another number for
    another batch size.

    Args:
        batches: The dataset, batched.
        told: How many there were at the batch size at which they were counted; None when endless or not counted.
        seconds: How long counting may take where it does not say how long it is.
        batch_size: Its present one.

    Returns:
        None where they could not be counted.
    """
    import keras

    shapes = [leaf.shape for leaf in keras.tree.flatten(batches.element_spec)]
    lengths = [shape[0] for shape in shapes if shape.rank]  # one of another length is not of single examples
    drops = next((each is not None for each in lengths if each in (None, batch_size)), False)
    if told is None or not drops:
        return told
    elements = elements_in(batches)
    if elements >= 0:
        return batch_size * elements
    counted = call_user("dataset", lambda: _counted_batches(batches, seconds, wanted=batch_size))
    return counted.examples if counted.all_of_it else None


def examples_in(batches: tf.data.Dataset, *, batch_size: int) -> int:
    """Examples in a batched pipeline that was seen to end: all of it is read."""
    return _counted_batches(batches, math.inf, wanted=batch_size).examples


def elements_in(dataset: tf.data.Dataset) -> int:
    """How many the dataset says it has, negative where it does not say."""
    return int(dataset.cardinality().numpy())


def _count(
    dataset: tf.data.Dataset, workload: Workload, configuration: Configuration, seconds: float
) -> int | None:
    """A dataset's examples; by the size of its first batches where there is no time for all of them."""
    elements = elements_in(dataset)
    if elements == ENDLESS:
        return None
    if elements >= 0 and not workload.batched:
        return elements
    if not workload.batched:
        handful = min(HANDFUL, configuration.batch_size)  # a step waits for so many anyway
        counted = call_user("dataset", lambda: _counted_singly(dataset, seconds, handful))
    else:
        wanted = configuration.batch_size
        counted = call_user("dataset", lambda: _counted_batches(dataset, seconds, wanted=wanted))
        _refuse_uneven(counted.elements - 1, counted.examples - counted.last, configuration.batch_size)
    if counted.all_of_it:
        return int(counted.examples)
    return None if elements < 0 else round(counted.examples / counted.elements * elements)


class _Counted(NamedTuple):
    """What came in some seconds.

    Args:
        elements: How many.
        examples: In all of them.
        last: Examples in the last one.
        all_of_it: Whether no more would have come.
    """

    elements: int
    examples: int
    last: int
    all_of_it: bool


def _counted_singly(dataset: tf.data.Dataset, seconds: float, handful: int) -> _Counted:
    """Count what comes in so many seconds, a handful at a time: none of it is handed to Python."""
    import tensorflow as tf

    def one(*_: Any) -> Any:
        return tf.constant(1, tf.int64)

    deadline = time.perf_counter() + seconds
    elements = 0
    for ones in dataset.map(tf.autograph.experimental.do_not_convert(one)).batch(handful):
        elements += int(ones.shape[0])
        if time.perf_counter() > deadline:
            return _Counted(elements, elements, 1, False)
    return _Counted(elements, elements, 1, True)


def _counted_batches(dataset: tf.data.Dataset, seconds: float, *, wanted: int = 0) -> _Counted:
    """Count what comes in so many seconds, in batches of examples."""
    deadline = time.perf_counter() + seconds
    elements = examples = last = 0
    size = _sizes(wanted)
    for element in dataset:
        last = size(element)
        elements += 1
        examples += last
        if time.perf_counter() > deadline:
            return _Counted(elements, examples, last, False)
    return _Counted(elements, examples, last, True)
