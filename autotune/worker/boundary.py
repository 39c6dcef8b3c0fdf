"""What lies between two long epochs, for a training that is timed by steps."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.recipe.apply import kind_of
from autotune.record import Boundary
from autotune.worker.closing import kept_call_seconds
from autotune.worker.datasets import ENDLESS, elements_in
from autotune.worker.lazy import keras, tf
from autotune.worker.private_api import attribute_of, inputs_of

if TYPE_CHECKING:
    from autotune.recipe.apply import TrainingPipeline
    from autotune.worker.training import Training

SHORT_EPOCHS, SHORT_EPOCH_SECONDS, SHORT_EPOCH_CALLS = 4, 0.5, (2, 6)
"""Short epochs that show what a boundary costs, how long each is, and its fewest and most calls."""
SHORT_EPOCHS_SECONDS = 2.0
"""No further short epoch is begun after so long, once one boundary was seen."""
WORTH_MENDING = 0.01
"""A smaller share of an epoch is charged in full, whatever the epoch's last steps save."""
FEWEST_COUNTED_CALLS = 2
"""Of an epoch: its first call is no part of a slice, so with fewer no slice would ever end."""
HAND_ON = ("Options", "Prefetch", "AssertCardinality", "Map", "ParallelMap", "DenseToRagged")
BATCHES = ("Batch", "ParallelBatch", "PaddedBatch")
"""Kinds of datasets that hand on element by element, and that make batches."""
KEPT_SECONDS = 0.3
"""How long the step is timed on a batch kept in memory."""
VALIDATION_SECONDS = 0.5
"""So much of a validation is run; the rest is extrapolated."""
UNKNOWN_VALIDATION_CALLS = 20
"""What is charged of a validation of unknown length: equally much for each configuration."""


@dataclass(frozen=True, kw_only=True)
class BetweenEpochs:
    """What lies between two long epochs, and how steps are timed around it."""

    boundary: Boundary  # what an epoch costs beyond its steps
    taken_over: bool = False  # another process measured it
    counted_calls: int | None = None  # an epoch's first calls that count; None for all. A shuffle buffer feeds the rest
    uncounted_seconds: float = 0.0  # how long nothing may count between two epochs, validation left out


def take_over(boundary: Boundary, train: TrainingPipeline, training: Training) -> BetweenEpochs:
    """What lies between two epochs, by another process's measurement on the same dataset."""
    counted, uncounted = None, boundary.seconds
    if boundary.tail_excluded:
        counted = _counted_calls(_steps_in_shuffle_buffer(train.dataset, training.batch_size), training)
    if counted is not None and training.examples is not None:
        tail = training.examples - counted * training.steps_per_call * training.batch_size
        # A buffer takes up to as long to refill as the tail takes; `boundary.seconds` may leave that out.
        uncounted += 2 * tail * boundary.seconds_per_example
    return BetweenEpochs(boundary=boundary, taken_over=True, counted_calls=counted, uncounted_seconds=uncounted)


def measure_between_epochs(
    model: keras.Model,
    train: TrainingPipeline,
    validation: tf.data.Dataset | None,
    training: Training,
    *,
    call_seconds: float,
    iterator: Any,
    validation_batches: int | None,
) -> BetweenEpochs:
    """Measure what an epoch costs beyond its steps: a new iterator, a refilled shuffle buffer, validation.

    Trains a few short epochs of the same pipeline and subtracts the time of their steps.

    Short epochs never reach the end of a long one, where steps take what the shuffle buffer holds and need not wait for
    new examples. So the refill costs a long training less, by what each step that the full buffer feeds would wait.

    Args:
        model: Compiled, and trained already.
        train: The training pipeline.
        validation: What is validated after each epoch, or None.
        training: The training's sizes.
        call_seconds: What a call of the train function usually takes.
        iterator: Of the training so far, which no training goes on with.
        validation_batches: How many are validated; None where that is unknown.
    """
    start, call = _short_epochs(model, train, training, call_seconds)
    assert training.steps_per_epoch is not None
    calls = training.steps_per_epoch / training.steps_per_call
    buffered = _steps_in_shuffle_buffer(train.dataset, training.batch_size)
    counted = _counted_calls(buffered, training) if start >= WORTH_MENDING * calls * call else None
    charged = uncounted = start
    if counted is not None and buffered is not None:
        kept = kept_call_seconds(model, iterator, KEPT_SECONDS)
        waited = 0.0 if kept is None else max(0.0, call - kept)
        charged = max(0.0, start - waited * buffered / training.steps_per_call)
        uncounted += (calls - counted) * call
    validating = 0.0
    if validation is not None:
        validating = _validation_seconds(model, validation, training.steps_per_call, validation_batches)
    boundary = Boundary(
        seconds=charged,
        validation_seconds=validating,
        seconds_per_example=max(call, 1e-9) / (training.steps_per_call * training.batch_size),
        tail_excluded=counted is not None,
    )
    return BetweenEpochs(boundary=boundary, counted_calls=counted, uncounted_seconds=uncounted)


def _short_epochs(
    model: keras.Model, train: TrainingPipeline, training: Training, call_seconds: float
) -> tuple[float, float]:
    """What short epochs take beyond their calls, and what a call within one takes, in seconds: the medians."""
    fewest, most = SHORT_EPOCH_CALLS
    calls_each = int(min(most, max(fewest, SHORT_EPOCH_SECONDS / max(call_seconds, 1e-9))))
    calls: list[list[float]] = []
    ends: list[float] = []

    def epoch_ended(*_: Any) -> None:
        ends.append(time.perf_counter())
        if len(ends) > 1 and ends[-1] - began > SHORT_EPOCHS_SECONDS:
            model.stop_training = True

    def timed(batches: Any) -> Any:
        call_began = time.perf_counter()
        logs = usual(batches)
        training.synchronise()
        calls[-1].append(time.perf_counter() - call_began)
        return logs

    few = train.shorter(calls_each * training.steps_per_call)
    usual, model.train_function = model.train_function, timed
    edges = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: calls.append([]), on_epoch_end=epoch_ended)
    began = time.perf_counter()
    try:
        model.fit(**few.fit_args, epochs=SHORT_EPOCHS, verbose=0, shuffle=False, callbacks=[edges])
    finally:
        model.train_function = usual
    later = [seconds for epoch in calls for seconds in epoch[1:]]
    call = statistics.median(later or [epoch[0] for epoch in calls if epoch] or [call_seconds])
    starts = [
        end - before - sum(epoch[1:]) - call
        for (before, end), epoch in zip(itertools.pairwise(ends), calls[1:], strict=True)
    ]
    return max(0.0, statistics.median(starts)), call


def _validation_seconds(
    model: keras.Model, validation: tf.data.Dataset, steps_per_call: int, batches: int | None
) -> float:
    """What a whole validation of so many batches takes, by a part of it.

    Validates on some calls' worth of batches, and on twice as many, until that takes long enough. What each further
    call takes is the difference between the last two parts.
    """

    def part_seconds(calls: int) -> float:
        part, seconds = validation.take(calls * steps_per_call), math.inf
        for _ in range(2):  # the first may compile, and one of the two may stall
            began = time.perf_counter()
            model.evaluate(part, verbose=0)
            seconds = min(seconds, time.perf_counter() - began)
        return seconds

    whole = UNKNOWN_VALIDATION_CALLS if batches is None else math.ceil(batches / steps_per_call)
    calls, seconds, per_call = 1, part_seconds(1), 0.0
    while calls < whole and (calls == 1 or seconds < VALIDATION_SECONDS):
        before, fewer, calls = seconds, calls, min(2 * calls, whole)
        seconds = part_seconds(calls)
        per_call = max(0.0, seconds - before) / (calls - fewer)
    return seconds + max(0, whole - calls) * per_call


def _counted_calls(buffered: float | None, training: Training) -> int | None:
    """How many calls of an epoch are over before a buffer of so many steps alone feeds the rest.

    None where all calls count: without a buffer, and with one that holds most of an epoch.
    """
    steps = training.steps_per_epoch
    if buffered is None or steps is None or not 0 < buffered <= steps / 2:
        return None
    counted = int((steps - buffered) / training.steps_per_call)
    return counted if counted >= FEWEST_COUNTED_CALLS else None


def _steps_in_shuffle_buffer(dataset: tf.data.Dataset, batch_size: int) -> float | None:
    """How many steps' worth of examples the pipeline's shuffle buffer holds; None where there is none.

    Looks back over what hands on element by element: further up there may be a shuffle of file names. A repeat without
    an end begins a new epoch each time; any other refills the buffer within an epoch.
    """
    kind, steps_per_element = kind_of(dataset), 1.0
    while kind != "Shuffle":
        if kind in BATCHES:
            steps_per_element = 1 / batch_size
        elif kind not in HAND_ON and not (kind == "Repeat" and elements_in(dataset) == ENDLESS):
            return None
        inputs = inputs_of(dataset)
        if len(inputs) != 1:
            return None
        dataset = inputs[0]
        kind = kind_of(dataset)
    buffer_size = attribute_of(dataset, "_buffer_size")
    return None if buffer_size is None else float(buffer_size) * steps_per_element
