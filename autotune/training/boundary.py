"""Measures what lies between two long epochs, and between two calls of `fit`: neither is part of the timed steps."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autotune.data.record import Boundary
from autotune.recipe.apply import TrainingPipeline, kind_of
from autotune.recipe.tf_private import attribute_of, inputs_of, keras, tf
from autotune.stats.steady_state import SLOW_CALL_SECONDS
from autotune.training.pipeline import BATCHES, ENDLESS, elements_in
from autotune.training.progress import BetweenEpochs, Training

SHORT_EPOCHS, SHORT_EPOCHS_SECONDS = 4, 2.0  # that show what a boundary costs; after so long, no third one is begun
SHORT_EPOCH_SECONDS, SHORT_EPOCH_CALLS = 0.5, (2, 6)  # the length of a short epoch, and its fewest and most calls
WORTH_CORRECTING = 0.01  # of an epoch: less is charged in full, whatever the epoch's last steps save
FEWEST_COUNTED_CALLS = 2  # of an epoch: its first is no part of a slice, so with fewer no slice would ever end
KEPT_SECONDS = 0.3  # how long the step is timed on a batch kept in memory
VALIDATION_SECONDS = 0.5  # so much of a validation is run; the rest is extrapolated
UNKNOWN_VALIDATION_CALLS = 20  # charged for a validation of unknown length, the same for each configuration
ENOUGH_GAPS = ((5, 0.0), (2, 3.0), (1, 10.0))
"""Gaps, and seconds since the first call, that end their measuring; the first gap may compile."""
CALLS_PER_EPOCH = 2
"""Calls of the train function in an epoch that is cut short."""
# Datasets that pass each element on.
HAND_ON = ("Options", "Prefetch", "CopyToDevice", "AssertCardinality", "Map", "ParallelMap", "DenseToRagged")


def take_over(boundary: Boundary, train: TrainingPipeline, training: Training) -> BetweenEpochs:
    """Return the boundary between two epochs, as another process measured it on the same dataset."""
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
    long epoch, where the shuffle buffer feeds the steps and no step waits for new examples. So the refill costs a long
    training less: by what the steps that the full buffer feeds would have waited.
    """
    fit_args = dict(fit_args or {})
    if validation is not None and fit_args.get("callbacks"):  # which read what it reports
        fit_args["validation_data"] = validation.take(training.steps_per_call)
    seconds, call = _short_epochs(model, train, training, call_seconds, fit_args)
    steps, per_call = training.steps_per_epoch, training.steps_per_call
    assert steps is not None
    excluded = seconds >= WORTH_CORRECTING * call * steps / per_call and _counted_calls(train, training) is not None
    if excluded and (in_memory_seconds := kept_call_seconds(model, iterator, KEPT_SECONDS)) is not None:
        buffered = _steps_in_shuffle_buffer(train.dataset, training.batch_size) or 0.0
        seconds = max(0.0, seconds - max(0.0, call - in_memory_seconds) * buffered / per_call)
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
    """Return the median seconds that short epochs take beyond their calls, and those of a call within one.

    Time between two calls of an epoch, as in callbacks of each batch, belongs to the steps.
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
        # A callback of the script's may have set it.
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
    """Return the seconds of a validation's first call and of the whole, from parts that double in length.

    The time of a further call is the difference between the last two parts.
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
    """Return how many calls of an epoch precede those that a full shuffle buffer feeds alone.

    None where all calls count: without a buffer, and with one that holds most of an epoch.
    """
    buffered, steps = _steps_in_shuffle_buffer(train.dataset, training.batch_size), training.steps_per_epoch
    if buffered is None or steps is None or not 0 < buffered <= steps / 2:
        return None
    counted = int((steps - buffered) / training.steps_per_call)
    return counted if counted >= FEWEST_COUNTED_CALLS else None


def _steps_in_shuffle_buffer(dataset: tf.data.Dataset, batch_size: int) -> float | None:
    """Return how many steps the pipeline's shuffle buffer can feed; None without a buffer.

    Looks back over what passes each element on: further up there may be a shuffle of file names. An endless repeat
    begins a new epoch each time; any other refills the buffer within an epoch.
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


def kept_call_seconds(model: keras.Model, iterator: Any, seconds: float) -> float | None:
    """Return the time of a call of the train function on a batch kept in memory, which does not wait for input.

    The batch is the iterator's next one. None where it has none left, or its batches are spread over devices.
    """
    batch = next(iterator, None) if isinstance(iterator, tf.data.Iterator) else None
    if batch is None:
        return None
    # In the pipeline's shapes, so that nothing is traced again.
    again = tf.data.Dataset.from_generator(lambda: [batch], output_signature=iterator.element_spec)
    return mean_seconds(functools.partial(model.train_function, iter(again.cache().repeat())), seconds)


def mean_seconds(call: Callable[[], Any], seconds: float) -> float | None:
    """Return the mean time of a call after a first one, over so long; None where data runs out.

    There are two such calls at least, or a single slow one.
    """
    calls, began, taken = -1, 0.0, 0.0
    try:
        while calls < 1 or taken < seconds or (calls < 2 and taken < SLOW_CALL_SECONDS):
            call()
            calls += 1
            taken = time.perf_counter() - began
            if calls == 0:
                tf.test.experimental.sync_devices()
                began = time.perf_counter()
    except StopIteration:
        return None
    tf.test.experimental.sync_devices()
    return (time.perf_counter() - began) / calls


class Gaps:
    """Gaps between two trainings, or two epochs, measured several times."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._began = time.perf_counter()

    def add(self, seconds: float) -> None:
        """Note a gap."""
        self._seconds.append(seconds)

    @property
    def are_enough(self) -> bool:
        """True if no further gap is to be measured."""
        taken = time.perf_counter() - self._began
        return any(len(self._seconds) >= gaps and taken >= seconds for gaps, seconds in ENOUGH_GAPS)

    @property
    def usual_seconds(self) -> float:
        """The usual gap; 0 without any."""
        return statistics.median(self._seconds[1:] or self._seconds or [0.0])


class Refits:
    """Measures what lies between two calls of a `fit` that a script calls again and again.

    A trial trains by one endless `fit`. What lies between two calls is not part of it: the start of `fit`, a new data
    adapter and iterator, and the script's own lines, such as `evaluate`, or a new model that compiles. So the first
    calls run as the long run makes them, with two epochs that are cut short after a few steps.
    """

    def __init__(self, calls: int, synchronise: Callable[[], None]) -> None:
        self._calls_left, self._synchronise = calls, synchronise
        self._gaps = Gaps()  # from an epoch's last call to the first one of the next `fit`
        self._boundaries = Gaps()  # the same between two epochs of one `fit`
        self._last_call_at: float | None = None
        self.first_call_seconds: float | None = None  # of the train function, which compiles in it

    @property
    def are_measured(self) -> bool:
        """True if no further call is to be cut short."""
        return self._calls_left <= 0 or self._gaps.are_enough

    @property
    def seconds(self) -> float:
        """The seconds that a call costs beyond the boundary of an epoch."""
        return max(0.0, self._gaps.usual_seconds - self._boundaries.usual_seconds)

    def end(self) -> None:
        """Cut no further call short: the script has ended, and restarts."""
        self._calls_left = 0

    def run(self, model: Any, usual: Callable[..., Any], arguments: Mapping[str, Any], callbacks: list[Any]) -> Any:
        """Call `fit` for two short epochs, and return its history."""
        self._calls_left -= 1
        gaps, calls = self._gaps, 0
        first_epoch = int(arguments["initial_epoch"])

        def timed(iterator: Any) -> Any:
            nonlocal calls
            began = time.perf_counter()
            logs = train(iterator)
            self._synchronise()
            now = time.perf_counter()
            if self.first_call_seconds is None:
                self.first_call_seconds = now - began
            if calls == 0 and self._last_call_at is not None:
                gaps.add(now - self._last_call_at)
            calls, self._last_call_at = calls + 1, now
            if calls >= CALLS_PER_EPOCH:
                model.stop_training = True
            return logs

        def epoch_began(epoch: int, _: Any = None) -> None:
            nonlocal gaps, calls
            calls = 0
            if epoch > first_epoch:
                gaps = self._boundaries

        def epoch_ended(epoch: int, _: Any = None) -> None:
            model.stop_training = epoch > first_epoch

        edges = keras.callbacks.LambdaCallback(on_epoch_begin=epoch_began, on_epoch_end=epoch_ended)
        model.make_train_function()
        train, model.train_function = model.train_function, timed
        try:
            return usual(model, **{**arguments, "epochs": first_epoch + 2, "callbacks": [*callbacks, edges]})
        finally:
            model.train_function = train
