"""What lies between two long epochs, for a training that is timed by steps: what it costs, and how often it is a stall.

Runs in the trial process, on the model's own compiled functions.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.measure.epoch_ends import FEWEST_ENDS, EpochEnd, share_of_stalls, usual_gap_of
from autotune.trial.building import kind_of

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from autotune.trial.step_clock import Training

MOST_BOUNDARY_CALLS, FEWEST_BOUNDARY_CALLS = 6, 2
"""Calls of the train function in each of the short epochs that show what a boundary costs."""
BOUNDARY_EPOCH_SECONDS = 0.5
BOUNDARY_EPOCHS = 4
BOUNDARY_SECONDS = 2.0
"""No further short epoch is begun after so long, once one boundary was seen."""
TELLING_SECONDS = (0.16, 0.22)
"""Lengths of epochs that show how often one ends in a stall: such stalls take 0.14 and 0.08 s. Two, because a pipeline
that takes its time at an epoch's start makes them longer: one of them is far from an awakening."""
TELLING_EPOCHS = 4
"""Of each length, and without tuning."""
TELLING_MOST_SECONDS = 2.0
"""No further one of these is begun after so long."""
SLOW_EPOCH_SECONDS = 1.0
"""Where an epoch of one call takes longer, they would take too long to be trained."""
WORTH_MENDING = 0.01
"""Share of an epoch that a boundary must cost before it is asked how much of that the epoch's end pays back."""
FEWEST_COUNTED_CALLS = 2
"""Of an epoch: its first call is no part of a slice, so with fewer no slice would ever end."""
LONGEST_STALL_SECONDS = 60.0
"""Of one at a long epoch's end."""
KEPT_SECONDS = 0.3
"""How long the step is timed on a batch kept in memory."""
VALIDATION_CALLS, VALIDATION_SECONDS = 20, 0.25
"""A longer validation's time is extrapolated from so many calls of the test function; from as many as are over in so
many seconds, where those are more."""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """What lies between two long epochs, for a training that is timed by steps.

    Args:
        seconds: What an epoch costs beyond its steps, at the pace of those that count.
        counted_calls: So many calls of an epoch count, from its beginning; None for all. The rest is quicker than
            the usual pace: a shuffle buffer is emptied that nothing refills. That is in `seconds`.
        stalled_ends: Share of epochs that end in a stall on top of that (`measure/epoch_ends.py`): 0 where `tf.data`
            does not tune the pipeline, None where too little was seen.
        uncounted_seconds: How long nothing may count between two epochs that follow on each other without a validation.
    """

    seconds: float
    counted_calls: int | None = None
    stalled_ends: float | None = None
    uncounted_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _ShortEpochs:
    """What short epochs showed.

    Args:
        start: Seconds of one beyond its calls and its validation, a stall at its end included.
        call: Seconds of a call within one, the first left out.
        validating: Seconds of a validation, or of the part of it that is run.
        validated_call: Seconds from the end of one of its calls to that of the next.
        ends: How they ended, all but the last.
        usual_gap: Seconds from an epoch's beginning to its first call where no stall can be; infinite where nobody
            looked, because the pipeline is not tuned, or is too slow.
    """

    start: float
    call: float
    validating: float
    validated_call: float
    ends: list[EpochEnd]
    usual_gap: float


def boundary(
    model: keras.Model,
    train: tf.data.Dataset,
    validation: tf.data.Dataset | None,
    training: Training,
    call_seconds: float,
    *,
    validation_examples: int | None = None,
) -> Boundary:
    """What an epoch costs beyond its steps: a new iterator, a refilled shuffle buffer, validation.

    Trains a few short epochs of the same pipeline and takes the time of their steps away. What fills a shuffle
    buffer at an epoch's start need not be produced at its end, which short epochs never reach: so much
    less is charged as the steps wait for that production. With p seconds to produce what a step takes from
    the buffer, and w seconds that a step waits for input, it is min(p, w) for each step that the full buffer feeds:
    all of it in a pipeline that takes turns with its training, nothing where it keeps ahead of it.

    Where `tf.data` tunes the pipeline, some short epochs end in a stall, which is left out. How often, they and some
    more show; how long that takes follows from a long epoch's length, which only its slices tell.

    Args:
        model: Compiled, and trained already.
        train: The training pipeline, batched.
        validation: What is validated after each epoch, or None.
        training: The training's sizes.
        call_seconds: What a call of the train function usually takes.
        validation_examples: How many are validated, where the dataset does not say; None where nobody knows.

    Returns:
        The mean of several, for a long training pays for its stalls too.
    """
    held_out, unseen = None, 0.0
    if validation is not None:
        held_out = _held_out(model, validation, training, validation_examples)
        unseen = held_out.unseen
    short = _short_epochs(model, train, held_out, training, call_seconds)
    ends = short.ends
    stalled_ends: float | None = 0.0
    tuned = train.options().autotune.enabled is not False
    if tuned:
        ends, stalled_ends = _ends_with_stalls(model, train, training, short, call_seconds)
    start, counted_calls = short.start - _stalled(short, ends), None
    uncounted = max(0.0, start)
    buffered, steps = _steps_in_shuffle_buffer(train, training.batch_size), training.steps_per_epoch
    per_call = training.steps_per_call
    # From a buffer that holds most of an epoch, most steps are fed without production.
    if buffered is not None and steps is not None and 0 < buffered <= steps / 2:
        counted = int((steps - buffered) / per_call)
        if start >= WORTH_MENDING * steps / per_call * short.call and counted >= FEWEST_COUNTED_CALLS:
            waited = max(0.0, short.call - _kept_call_seconds(model, train))
            start -= min(start, waited * buffered / per_call)
            counted_calls = counted
            uncounted += (steps / per_call - counted) * short.call
    if tuned:
        # Whatever short epochs have shown: a stall takes up to as long as its epoch.
        epoch = math.inf if steps is None else steps / per_call * short.call
        uncounted += min(LONGEST_STALL_SECONDS, epoch)
    return Boundary(
        seconds=max(0.0, start + short.validating + unseen * short.validated_call),
        counted_calls=counted_calls,
        stalled_ends=stalled_ends,
        uncounted_seconds=uncounted,
    )


def _short_epochs(
    model: keras.Model,
    train: tf.data.Dataset,
    held_out: _HeldOut | None,
    training: Training,
    call_seconds: float,
) -> _ShortEpochs:
    wanted = BOUNDARY_EPOCH_SECONDS / max(call_seconds, 1e-9)
    calls_each = int(min(MOST_BOUNDARY_CALLS, max(FEWEST_BOUNDARY_CALLS, wanted)))
    few = train.take(calls_each * training.steps_per_call)
    seen = _train(model, few, held_out, BOUNDARY_EPOCHS, most_seconds=BOUNDARY_SECONDS)
    calls_each = max(1, len(seen.calls) // len(seen.ended))  # one that has run dry is told of by the next fit
    usual_call = statistics.fmean(
        [seconds for index, seconds in enumerate(seen.calls) if index % calls_each] or seen.calls
    )
    spent = [late - early for early, late in itertools.pairwise(seen.ended)]
    checked = seen.validations[1:]
    validating = statistics.fmean(each.seconds for each in checked) if checked else 0.0
    start = statistics.fmean(spent) - validating - calls_each * usual_call
    if len(checked) == len(spent):
        # A validation's iterator goes as well, perhaps in a stall: of three ends one says little of each.
        after = [late - each.ended_at for late, each in zip(seen.ended[1:], checked, strict=True)]
        start -= statistics.fmean(after) - min(after)
    usual_gap = math.inf
    if train.options().autotune.enabled is not False and start + usual_call <= SLOW_EPOCH_SECONDS:
        one = _untuned(train).take(training.steps_per_call)
        untuned = _train(model, one, None, TELLING_EPOCHS, most_seconds=TELLING_MOST_SECONDS)
        usual_gap = statistics.median(each.gap for each in untuned.ends)
    return _ShortEpochs(
        start=start,
        call=usual_call,
        validating=validating,
        validated_call=statistics.fmean(map(held_out.call_of, checked)) if held_out and checked else 0.0,
        ends=seen.ends,
        usual_gap=usual_gap,
    )


def _stalled(short: _ShortEpochs, ends: Sequence[EpochEnd]) -> float:
    """Seconds that stalls took of an epoch beyond its calls, on average.

    What a tuned pipeline takes longer at every end is no stall's: it is charged. The shortest epochs do not tell the
    two apart, whose stalls would be as short.

    Args:
        short: What short epochs have shown.
        ends: Theirs, and those of longer ones.
    """
    if math.isinf(short.usual_gap):
        return 0.0
    usual = usual_gap_of(ends, short.usual_gap)
    return sum(max(0.0, each.gap - usual) for each in short.ends) / max(1, len(short.ends))


def _ends_with_stalls(
    model: keras.Model, train: tf.data.Dataset, training: Training, short: _ShortEpochs, call_seconds: float
) -> tuple[list[EpochEnd], float | None]:
    """How short epochs of the pipeline as it is end, and the share that do in a stall; None if that does not tell.

    Args:
        model: Compiled, and trained already.
        train: The training pipeline, batched, which `tf.data` tunes.
        training: The training's sizes.
        short: What short epochs have shown already.
        call_seconds: What a call of the train function usually takes.
    """
    call = max(short.call, call_seconds)
    if math.isinf(short.usual_gap) or call > SLOW_EPOCH_SECONDS:
        return short.ends, None
    ends, calls, left = list(short.ends), 0, TELLING_MOST_SECONDS
    for seconds in TELLING_SECONDS:
        calls = max(calls + 1, round(seconds / call))
        began = time.perf_counter()
        few = train.take(calls * training.steps_per_call)
        ends += _train(model, few, None, TELLING_EPOCHS, most_seconds=left).ends
        left -= time.perf_counter() - began
        if left < 0 and len(ends) >= FEWEST_ENDS:
            break
    return ends, share_of_stalls(ends, short.usual_gap)


@dataclass(frozen=True, kw_only=True)
class _HeldOut:
    """What short epochs are validated on.

    Args:
        dataset: All of the validation data, or a part.
        calls: Of the test function on a part; None on all of it.
        unseen: Calls that the rest would take.
        synchronise: Waits until the devices have done what they were given.
    """

    dataset: tf.data.Dataset
    calls: int | None
    unseen: float
    synchronise: Callable[[], None]

    def call_of(self, seen: _Validation) -> float:
        """Seconds of one call; on average, where a model validates by another function than its own."""
        return seen.call if seen.calls > 1 else seen.seconds / (self.calls or 1)


@dataclass
class _Validation:
    """One validation.

    Args:
        began_at: When it began.
        first_at: When its first call was over.
        last_at: When the last one so far was.
        calls: How many that were.
        ended_at: When all of it was over, what it does after its last call included.
    """

    began_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    calls: int = 0
    ended_at: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all of it, what it does before its first call included."""
        return self.ended_at - self.began_at

    @property
    def call(self) -> float:
        """Seconds from the end of one call to that of the next; 0 of a single one."""
        return (self.last_at - self.first_at) / max(1, self.calls - 1)

    def called(self, now: float) -> None:
        """One more call is over."""
        if not self.calls:
            self.first_at = now
        self.last_at = now
        self.calls += 1


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What some epochs showed.

    Args:
        calls: Seconds of each call of the train function.
        ended: When epochs ended, validation included.
        validations: All of them.
        ends: Of all epochs but the last.
    """

    calls: list[float]
    ended: list[float]
    validations: list[_Validation]
    ends: list[EpochEnd]


def _train(
    model: keras.Model,
    train: tf.data.Dataset,
    held_out: _HeldOut | None,
    epochs: int,
    *,
    most_seconds: float,
) -> _Seen:
    """Train some epochs, fewer where they take long.

    Args:
        model: Compiled, and trained already.
        train: What an epoch is.
        held_out: What each is validated on, or None.
        epochs: How many.
        most_seconds: No further epoch is begun after so long, once one has followed on another.
    """
    import keras

    calls: list[float] = []
    began_at: list[float] = []
    first_calls: list[float] = []
    ended: list[float] = []
    validations: list[_Validation] = []

    class Edges(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        """Notes when epochs and validations begin and end, and ends it all when enough was seen."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            began_at.append(time.perf_counter())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ended.append(time.perf_counter())
            if len(ended) > 1 and ended[-1] - began > most_seconds:
                self.model.stop_training = True

        def on_test_begin(self, logs: Any = None) -> None:
            validations.append(_Validation(time.perf_counter()))

        def on_test_end(self, logs: Any = None) -> None:
            validations[-1].ended_at = time.perf_counter()

    def timed(iterator: Any) -> Any:
        if len(first_calls) < len(began_at):
            first_calls.append(time.perf_counter())
        return function(iterator)

    usual = model.train_function
    function = _timing(usual, calls)
    model.train_function = timed
    began = time.perf_counter()
    arguments = {"epochs": epochs, "verbose": 0, "shuffle": False, "callbacks": [Edges()]}
    try:
        with nullcontext() if held_out is None else _calls_noted(model, held_out, validations):
            model.fit(train, validation_data=held_out and held_out.dataset, **arguments)
    finally:
        model.train_function = usual
    ends = [
        EpochEnd(age=next_began - called, gap=next_called - next_began)
        for called, next_began, next_called in zip(first_calls, began_at[1:], first_calls[1:], strict=False)
    ]
    return _Seen(calls=calls, ended=ended, validations=validations, ends=ends)


@contextmanager
def _calls_noted(
    model: keras.Model, held_out: _HeldOut, validations: Sequence[_Validation]
) -> Iterator[None]:
    """Have each call of the test function noted.

    Args:
        model: What is validated.
        held_out: On what.
        validations: Those that have begun, the present one last.
    """

    def noted(iterator: Any) -> Any:
        result = usual(iterator)
        if validations:  # none, where a model's own `evaluate` calls nobody back
            current = validations[-1]
            if current.calls in (0, (held_out.calls or 0) - 1):  # a device may still be at what came back
                held_out.synchronise()
            current.called(time.perf_counter())
        return result

    model.make_test_function()
    usual, model.test_function = model.test_function, noted
    try:
        yield
    finally:
        model.test_function = usual


def _untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same without `tf.data`'s own tuning."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _steps_in_shuffle_buffer(train: tf.data.Dataset, batch_size: int) -> float | None:
    """How many steps' worth of examples the pipeline's shuffle buffer holds; None where there is none.

    Looks back from the end of the pipeline over what hands on element by element. What lies further up, such as a
    shuffle of file names, is not taken for one of examples.
    """
    hands_on = (
        *("Options", "Prefetch", "AssertCardinality", "Map", "ParallelMap", "DenseToRagged"),
        *("Batch", "ParallelBatch", "PaddedBatch"),
    )
    steps_per_element, dataset = 1.0, train
    while True:
        kind = kind_of(dataset)
        if kind == "Shuffle":
            return float(getattr(dataset, "_buffer_size", math.nan)) * steps_per_element
        if kind not in hands_on:
            return None
        if kind.endswith("Batch"):
            steps_per_element = 1 / batch_size
        (dataset,) = dataset._inputs()


def _kept_call_seconds(model: keras.Model, train: tf.data.Dataset) -> float:
    """What a call takes on a batch that is kept in memory."""
    kept = iter(train.take(1).cache().repeat())
    for _ in range(2):  # the second ends what was kept, and takes its pipeline down: that may take long
        model.train_function(kept)
    calls: list[float] = []
    function = _timing(model.train_function, calls)
    while sum(calls) < KEPT_SECONDS:
        function(kept)
    return statistics.fmean(calls)


def _held_out(
    model: keras.Model, validation: tf.data.Dataset, training: Training, examples: int | None
) -> _HeldOut:
    """So much of the validation data as is enough to tell what a call takes.

    Where nobody knows how much there is, no more than some calls can be charged: as many for each configuration.

    Args:
        model: Compiled, and trained already.
        validation: The validation data, batched.
        training: The training's sizes.
        examples: How many there are, where the dataset does not say; None where nobody knows.
    """
    batches, per_call = int(validation.cardinality().numpy()), training.steps_per_call
    if batches < 0 and examples is not None:
        batches = math.ceil(examples / _examples_per_batch(validation))
    calls = VALIDATION_CALLS
    if batches > calls * per_call:
        calls = max(calls, _calls_in_time(model, validation, training))
    if 0 <= batches <= calls * per_call:
        return _HeldOut(dataset=validation, calls=None, unseen=0.0, synchronise=training.synchronise)
    return _HeldOut(
        dataset=validation.take(calls * per_call),
        calls=calls,
        unseen=max(0.0, batches / per_call - calls),
        synchronise=training.synchronise,
    )


def _calls_in_time(model: keras.Model, validation: tf.data.Dataset, training: Training) -> int:
    """How many calls of the test function are over in `VALIDATION_SECONDS`, by some twenty or fewer of them.

    What an iterator takes before its first batch counts as well: others may have been made meanwhile.

    Args:
        model: Compiled, and trained already.
        validation: More data than that.
        training: The training's sizes.
    """
    model.make_test_function()
    model.test_function(iter(validation.take(training.steps_per_call)))  # compiles
    training.synchronise()
    began, seconds, calls = time.perf_counter(), 0.0, 0
    batches = iter(validation)
    while calls < VALIDATION_CALLS and seconds < VALIDATION_SECONDS:
        model.test_function(batches)
        training.synchronise()
        seconds, calls = time.perf_counter() - began, calls + 1
    return math.ceil(VALIDATION_SECONDS * calls / seconds)


def _examples_per_batch(dataset: tf.data.Dataset) -> int:
    """Of a dataset that batches by itself, that need not be the training's batch size."""
    import keras

    shapes = [getattr(leaf, "shape", None) for each in dataset.take(1) for leaf in keras.tree.flatten(each)]
    return next((int(shape[0]) for shape in shapes if shape is not None and shape.rank and shape[0]), 1)


def _timing(function: Callable[[Any], Any], into: list[float]) -> Callable[[Any], Any]:
    def timed(iterator: Any) -> Any:
        began = time.perf_counter()
        result = function(iterator)
        into.append(time.perf_counter() - began)
        return result

    return timed
