"""What lies between two long epochs, for a training that is timed by steps."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune.data.record import Boundary
from autotune.recipe.apply import TrainingPipeline, kind_of
from autotune.recipe.lazy import keras, tf
from autotune.recipe.tf_private import attribute_of, inputs_of
from autotune.training.closing import kept_call_seconds
from autotune.training.datasets import BATCHES, ENDLESS, elements_in
from autotune.training.session import Training

SHORT_EPOCHS, SHORT_EPOCHS_SECONDS = 4, 2.0  # that show what a boundary costs; none is begun after so long, but two
SHORT_EPOCH_SECONDS, SHORT_EPOCH_CALLS = 0.5, (2, 6)  # how long each of them is, and its fewest and most calls
WORTH_MENDING = 0.01  # of an epoch: less is charged in full, whatever the epoch's last steps save
FEWEST_COUNTED_CALLS = 2  # of an epoch: its first is no part of a slice, so with fewer no slice would ever end
KEPT_SECONDS = 0.3  # how long the step is timed on a batch kept in memory
VALIDATION_SECONDS = 0.5  # so much of a validation is run; the rest is extrapolated
UNKNOWN_VALIDATION_CALLS = 20  # charged of a validation of unknown length: equally much for each configuration
# What hands on element by element.
HAND_ON = ("Options", "Prefetch", "CopyToDevice", "AssertCardinality", "Map", "ParallelMap", "DenseToRagged")


@dataclass(frozen=True, kw_only=True)
class BetweenEpochs:
    """What lies between two long epochs, and how steps are timed around it."""

    boundary: Boundary  # what an epoch costs beyond its steps
    taken_over: bool = False  # another process measured it
    counted_calls: int | None = None  # an epoch's first calls that count; None for all. A shuffle buffer feeds the rest


def take_over(boundary: Boundary, train: TrainingPipeline, training: Training) -> BetweenEpochs:
    """What lies between two epochs, by another process's measurement on the same dataset."""
    counted = _counted_calls(train, training) if boundary.tail_excluded else None
    return BetweenEpochs(boundary=boundary, taken_over=True, counted_calls=counted)


def measure_between_epochs(
    model: keras.Model,
    train: TrainingPipeline,
    validation: tf.data.Dataset | None,
    training: Training,
    *,
    call_seconds: float,
    iterator: Any,
    validation_batches: int | None,
    fit_args: Mapping[str, Any] | None = None,
) -> BetweenEpochs:
    """Measure what an epoch costs beyond its steps: a new iterator, a refilled shuffle buffer, callbacks, validation.

    Trains a few short epochs of the same pipeline and subtracts the time of their steps. They never reach the end of a
    long one, where steps take what the shuffle buffer holds and need not wait for new examples. So the refill costs a
    long training less, by what each step that the full buffer feeds would wait.

    Args:
        model: Compiled, and trained already.
        train: The training pipeline.
        validation: What is validated after each epoch, or None.
        training: The training's sizes.
        call_seconds: What a call of the train function usually takes.
        iterator: Of the training so far, which no training goes on with.
        validation_batches: How many are validated; None where that is unknown.
        fit_args: Further arguments of `fit`: its callbacks and its progress bar belong to an epoch.
    """
    fit_args = dict(fit_args or {})
    if validation is not None and fit_args.get("callbacks"):  # which read what it reports
        fit_args["validation_data"] = validation.take(training.steps_per_call)
    seconds, call = _short_epochs(model, train, training, call_seconds, fit_args)
    steps, per_call = training.steps_per_epoch, training.steps_per_call
    assert steps is not None
    excluded = seconds >= WORTH_MENDING * call * steps / per_call and _counted_calls(train, training) is not None
    if excluded and (kept := kept_call_seconds(model, iterator, KEPT_SECONDS)) is not None:
        buffered = _steps_in_shuffle_buffer(train.dataset, training.batch_size) or 0.0
        seconds = max(0.0, seconds - max(0.0, call - kept) * buffered / per_call)
    first, validating = 0.0, 0.0
    if validation is not None:
        first, validating = _validation_seconds(model, validation, per_call, validation_batches)
    boundary = Boundary(
        seconds=max(0.0, seconds - first) if "validation_data" in fit_args else seconds,
        validation_seconds=validating,
        seconds_per_example=max(call, 1e-9) / (per_call * training.batch_size),
        tail_excluded=excluded,
    )
    return replace(take_over(boundary, train, training), taken_over=False)


def _short_epochs(
    model: keras.Model, train: TrainingPipeline, training: Training, call_seconds: float, fit_args: Mapping[str, Any]
) -> tuple[float, float]:
    """What short epochs take beyond their calls, and what a call within one takes, in seconds: the medians.

    What passes between two calls of an epoch, as in callbacks of each batch, belongs to the steps.
    """
    fewest, most = SHORT_EPOCH_CALLS
    calls_each = int(min(most, max(fewest, SHORT_EPOCH_SECONDS / max(call_seconds, 1e-9))))
    calls: list[list[float]] = []
    pauses: list[float] = []  # of each epoch, between its calls
    ends: list[float] = []
    call_ended_at = math.inf

    def epoch_began(*_: Any) -> None:
        nonlocal call_ended_at
        calls.append([])
        pauses.append(0.0)
        call_ended_at = math.inf

    def epoch_ended(*_: Any) -> None:
        ends.append(time.perf_counter())
        # Whatever a callback of the script's has decided.
        model.stop_training = len(ends) > 1 and ends[-1] - began > SHORT_EPOCHS_SECONDS

    def timed(batches: Any) -> Any:
        nonlocal call_ended_at
        call_began = time.perf_counter()
        pauses[-1] += max(0.0, call_began - call_ended_at)
        logs = usual(batches)
        training.synchronise()
        call_ended_at = time.perf_counter()
        calls[-1].append(call_ended_at - call_began)
        return logs

    few = train.shorter(calls_each * training.steps_per_call)
    edges = keras.callbacks.LambdaCallback(on_epoch_begin=epoch_began, on_epoch_end=epoch_ended)
    callbacks = [*fit_args.get("callbacks", ()), edges]
    arguments = {"verbose": 0, "shuffle": False, **fit_args, "epochs": SHORT_EPOCHS, "callbacks": callbacks}
    usual, model.train_function = model.train_function, timed
    began = time.perf_counter()
    try:
        model.fit(**few.fit_args, **arguments)
    finally:
        model.train_function = usual
    later = [seconds for epoch in calls for seconds in epoch[1:]]
    call = statistics.median(later or [epoch[0] for epoch in calls if epoch] or [call_seconds])
    lengths = (end - before for before, end in itertools.pairwise(ends))
    later_epochs = zip(lengths, calls[1:], pauses[1:], strict=True)
    starts = [length - pause - sum(epoch[1:]) - call for length, epoch, pause in later_epochs]
    return max(0.0, statistics.median(starts)), call


def _validation_seconds(
    model: keras.Model, validation: tf.data.Dataset, steps_per_call: int, batches: int | None
) -> tuple[float, float]:
    """What the first call of a validation takes, and all of its batches, by parts of it, each twice as long as before.

    What each further call takes is the difference between the last two parts.
    """

    def part_seconds(calls: int) -> float:
        part, seconds = validation.take(calls * steps_per_call), math.inf
        for _ in range(2):  # the first may compile, and one of the two may stall
            began = time.perf_counter()
            model.evaluate(part, verbose=0)
            seconds = min(seconds, time.perf_counter() - began)
        return seconds

    whole = UNKNOWN_VALIDATION_CALLS if batches is None else math.ceil(batches / steps_per_call)
    first = part_seconds(1)
    calls, seconds, per_call = 1, first, 0.0
    while calls < whole and (calls == 1 or seconds < VALIDATION_SECONDS):
        before, fewer, calls = seconds, calls, min(2 * calls, whole)
        seconds = part_seconds(calls)
        per_call = max(0.0, seconds - before) / (calls - fewer)
    return first, seconds + max(0, whole - calls) * per_call


def _counted_calls(train: TrainingPipeline, training: Training) -> int | None:
    """How many calls of an epoch are over before a full shuffle buffer alone feeds the rest.

    None where all calls count: without a buffer, and with one that holds most of an epoch.
    """
    buffered, steps = _steps_in_shuffle_buffer(train.dataset, training.batch_size), training.steps_per_epoch
    if buffered is None or steps is None or not 0 < buffered <= steps / 2:
        return None
    counted = int((steps - buffered) / training.steps_per_call)
    return counted if counted >= FEWEST_COUNTED_CALLS else None


def _steps_in_shuffle_buffer(dataset: tf.data.Dataset, batch_size: int) -> float | None:
    """How many steps' worth of examples the pipeline's shuffle buffer holds; None where there is none.

    Looks back over what hands on element by element: further up there may be a shuffle of file names. A repeat without
    an end begins a new epoch each time; any other refills the buffer within an epoch.
    """
    steps_per_element = 1.0
    while (kind := kind_of(dataset)) != "Shuffle":
        steps_per_element = 1 / batch_size if kind in BATCHES else steps_per_element
        endless = kind == "Repeat" and elements_in(dataset) == ENDLESS
        if not (kind in BATCHES or kind in HAND_ON or endless) or len(inputs := inputs_of(dataset)) != 1:
            return None
        (dataset,) = inputs
    buffer_size = attribute_of(dataset, "_buffer_size")
    return None if buffer_size is None else float(buffer_size) * steps_per_element
