"""Measure how much the gradients of micro-batches differ, beside a training that goes on as if nothing had happened.

The micro-batches are cut from the batches that the training reads next, and the training gets those all the same. What
computing a gradient changes, such as the statistics of batch normalisation and the seeds of dropout, is set back.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from autotune.data.printable import printable
from autotune.data.record import GradientNoise
from autotune.recipe.keras_api import keras_api
from autotune.recipe.tf_private import computing_layers, keras, tf
from autotune.runtime.failures import summarize_error
from autotune.training.gauges import Weights, count_parameters

BATCHES = 4  # that micro-batches are cut from
PASSES = 2  # over them: the mean of all gradients is known after the first one, and none is kept
MICRO_BATCHES, FEWEST_MICRO_BATCHES = 32, 8
FEWEST_NORMALISED = 8  # examples of a micro-batch, where layers normalise over it
LARGEST_BATCHES_BYTES = 256 << 20
LARGEST_MODEL = 32 << 20  # weights: up to three copies of them are held meanwhile
LONGEST_REASON = 300


class UpcomingBatches:
    """The next batches of a training, seen before it trains on them.

    Args:
        steps_per_call: Batches that a call of the train function takes.
    """

    def __init__(self, steps_per_call: int) -> None:
        self._steps_per_call = steps_per_call
        self._calls = 0  # of the train function that get batches which were seen
        self._iterator: Any = None  # that they came from
        self._seen: Any = None  # an iterator of them

    def count(self, least: int) -> int:
        """Return how many batches are read to see so many: those of whole calls."""
        return math.ceil(least / self._steps_per_call) * self._steps_per_call

    def look(self, iterator: tf.data.Iterator, least: int) -> list[Any]:
        """Return the next batches, at least so many; fewer where the data ends."""
        batches: list[Any] = []
        # In the pipeline's shapes, so that nothing is traced again.
        again = tf.data.Dataset.from_generator(lambda: batches, output_signature=iterator.element_spec)
        batches += itertools.islice(iterator, self.count(least))
        if batches:
            self._calls = math.ceil(len(batches) / self._steps_per_call)
            self._iterator, self._seen = iterator, iter(again)
        return batches

    def wrap(self, train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a train function that gets the batches that were seen before the others of their iterator."""

        def train(iterator: Any) -> Any:
            if self._seen is None or iterator is not self._iterator:
                return train_function(iterator)
            seen, self._calls = self._seen, self._calls - 1
            if not self._calls:
                self._iterator = self._seen = None
            return train_function(seen)

        return train


def measure_noise(
    model: keras.Model,
    upcoming: UpcomingBatches,
    iterator: Any,
    *,
    batch_size: int,
    seconds: float,
    step_seconds: float,
    compile_seconds: float,
) -> GradientNoise:
    """Return the gradients' lengths and products of micro-batches, or why there are none.

    Args:
        model: Compiled and trained; its weights stay as they are.
        upcoming: Gives the training the batches that are read here.
        iterator: What the train function gets.
        batch_size: Examples of a step.
        seconds: That it may take.
        step_seconds: What a step takes.
        compile_seconds: What tracing the train function took.
    """
    ends = time.perf_counter() + seconds
    count = upcoming.count(BATCHES)
    least = compile_seconds + (count + PASSES * BATCHES) * step_seconds
    why = _why_not(model, iterator, count * batch_size)
    if not why and least > seconds:
        why = f"it takes some {least:.1f} s, and may take {seconds:.1f} s"
    if why:
        return GradientNoise(not_measured=why)
    batches = upcoming.look(iterator, BATCHES)  # an error in reading them is the training's own
    try:
        return _compare_gradients(model, batches[:BATCHES], _micro_batch_size(model, batch_size), ends)
    except Exception as error:  # it only orders proposals: no trial fails for it
        return GradientNoise(not_measured=printable(summarize_error(error))[:LONGEST_REASON])


def _why_not(model: keras.Model, iterator: Any, examples: int) -> str:
    """Return why no gradients of so many examples can be computed, in half a sentence; empty where they can."""
    if not isinstance(iterator, tf.data.Iterator) or model.distribute_strategy.num_replicas_in_sync > 1:
        return "batches are spread over devices"
    if getattr(model.train_step, "__func__", None) is not keras.Model.train_step:
        return "the model has a train_step of its own"
    if model.run_eagerly:
        return "the model runs eagerly"
    specs = tf.nest.flatten(iterator.element_spec)
    if not all(isinstance(spec, tf.TensorSpec) and spec.shape.rank for spec in specs):
        return "batches are not dense tensors"
    sizes = [math.prod([size or 1 for size in spec.shape[1:]]) * spec.dtype.size for spec in specs]
    if examples * sum(sizes) > LARGEST_BATCHES_BYTES:
        return "batches are too large"
    return "the model is too large" if count_parameters(Weights(model.variables, ())) > LARGEST_MODEL else ""


def _micro_batch_size(model: keras.Model, batch_size: int) -> int:
    """Return the examples of a micro-batch."""
    examples = max(1, BATCHES * batch_size // MICRO_BATCHES)
    normalises = any(isinstance(layer, keras.layers.BatchNormalization) for layer in computing_layers(model))
    return max(examples, min(batch_size, FEWEST_NORMALISED)) if normalises else examples


def _compare_gradients(model: keras.Model, batches: list[Any], examples: int, ends: float) -> GradientNoise:
    """Return lengths and products of the gradients of micro-batches with so many examples."""
    micro_batches = list(itertools.islice(_cut(batches, examples), MICRO_BATCHES))
    if len(micro_batches) < FEWEST_MICRO_BATCHES:
        return GradientNoise(not_measured="too few examples were left of the epoch")
    compute = tf.function(_gradient_of(model), autograph=False)
    variables = compute.get_concrete_function(micro_batches[0]).graph.variables

    def pass_over(figure: Callable[[np.ndarray], float]) -> list[float]:
        with _keep(variables):  # so that each pass draws the same dropout
            figures = []
            for micro_batch in micro_batches:
                if time.perf_counter() > ends:
                    raise TimeoutError("its time was over")
                figures.append(figure(compute(micro_batch).numpy()))
            return figures

    total = np.zeros((), np.float32)

    def add(gradient: np.ndarray) -> float:
        nonlocal total
        total = total + gradient
        return float(gradient @ gradient)

    squares = pass_over(add)
    mean = total / np.float32(len(micro_batches))
    products = pass_over(lambda gradient: float(gradient @ mean))
    if not np.isfinite([*squares, *products]).all() or not any(squares):
        return GradientNoise(not_measured="gradients are zero or not finite")
    return GradientNoise(examples=examples, squares=tuple(squares), products=tuple(products))


def _cut(batches: list[Any], examples: int) -> Iterator[Any]:
    """Cut each batch into micro-batches of so many examples; what is left of it is not used."""
    for batch in batches:
        (length,) = {int(part.shape[0]) for part in tf.nest.flatten(batch)}  # else it is no batch of examples
        for start in range(0, length - examples + 1, examples):
            among = slice(start, start + examples)
            yield tf.nest.map_structure(lambda part, among=among: part[among], batch)


def _gradient_of(model: keras.Model) -> Callable[[Any], tf.Tensor]:
    """Return a function of a batch: the gradient of the training's own loss, as one vector in float32."""
    arguments = {"training": True} if "training" in inspect.signature(model.call).parameters else {}

    def gradient(batch: Any) -> tf.Tensor:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, **arguments), sample_weight=sample_weight)
        # Without its scale small gradients of float16 vanish.
        scale = keras_api().scaled_loss(model.optimizer, tf.ones((), loss.dtype))
        parts = tape.gradient(loss, model.trainable_weights, output_gradients=scale)
        dense = [tf.convert_to_tensor(part) for part in parts if part is not None]
        whole = tf.concat([tf.reshape(tf.cast(part, tf.float32), [-1]) for part in dense], axis=0)
        return whole / tf.cast(scale, tf.float32)

    return gradient


@contextlib.contextmanager
def _keep(variables: Any) -> Iterator[None]:
    """Set variables back to their values at the end."""
    before = [(variable, variable.numpy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)
