"""What lies between two long epochs, for a training that is timed by steps.

Runs in the trial process, on the model's own compiled functions.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotune.recipe.apply import kind_of
from autotune.record import Boundary
from autotune.worker.building import ENDLESS, elements_in

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from autotune.recipe.apply import TrainingPipeline
    from autotune.worker.training import Training

MOST_BOUNDARY_CALLS, FEWEST_BOUNDARY_CALLS = 6, 2
"""Calls of the train function in each of the short epochs that show what a boundary costs."""
BOUNDARY_EPOCH_SECONDS = 0.5
BOUNDARY_EPOCHS = 4
BOUNDARY_SECONDS = 2.0
"""No further short epoch is begun after so long, once one boundary was seen."""
WORTH_MENDING = 0.01
"""A smaller share of an epoch is charged in full, whatever the epoch's last steps save."""
FEWEST_COUNTED_CALLS = 2
"""Of an epoch: its first call is no part of a slice, so with fewer no slice would ever end."""
KEPT_SECONDS = 0.3
"""How long the step is timed on a batch kept in memory."""
VALIDATION_CALLS, VALIDATION_SECONDS = 20, 0.25
"""A validation runs so many calls of the test function, or for so long, whichever is more. Its rest is extrapolated."""


@dataclass(frozen=True, kw_only=True)
class BetweenEpochs:
    """What lies between two long epochs, and how steps are timed around it.

    Args:
        boundary: What an epoch costs beyond its steps.
        taken_over: Whether another process measured it.
        counted_calls: So many calls of an epoch count, from its beginning; None for all. The shuffle buffer feeds the
            others, which are faster.
        uncounted_seconds: How long nothing may count between two epochs, validation left out.
    """

    boundary: Boundary
    taken_over: bool = False
    counted_calls: int | None = None
    uncounted_seconds: float = 0.0


def take_over(boundary: Boundary, train: TrainingPipeline, training: Training) -> BetweenEpochs:
    """What lies between two epochs, by another process's measurement on the same dataset.

    Args:
        boundary: What that process measured.
        train: The training pipeline of this process.
        training: The training's sizes.
    """
    buffered = _steps_in_shuffle_buffer(train.dataset, training.batch_size)
    counted = _counted_calls(buffered, training) if boundary.tail_excluded else None
    tail = 0.0
    if counted is not None and training.examples is not None:
        uncounted = training.examples - counted * training.steps_per_call * training.batch_size
        tail = uncounted * boundary.seconds_per_example
    return BetweenEpochs(
        boundary=boundary,
        taken_over=True,
        counted_calls=counted,
        # A buffer takes up to as long to refill as the tail takes; `seconds` may leave that out.
        uncounted_seconds=boundary.seconds + 2 * tail,
    )


def measure_between_epochs(
    model: keras.Model,
    train: TrainingPipeline,
    validation: tf.data.Dataset | None,
    training: Training,
    call_seconds: float,
    *,
    validation_examples: int | None = None,
) -> BetweenEpochs:
    """Measure what an epoch costs beyond its steps: a new iterator, a refilled shuffle buffer, validation.

    Trains a few short epochs of the same pipeline and subtracts the time of their steps. The median epoch counts: one
    that stalls does not.

    Short epochs never reach the end of a long one, where the steps take what the shuffle buffer holds and need not wait
    for new examples. So the refill costs a long training less. With p seconds to produce what a step takes from the
    buffer, and w seconds that a step waits for input, min(p, w) is subtracted for each step that the full buffer feeds.

    Args:
        model: Compiled, and trained already.
        train: The training pipeline.
        validation: What is validated after each epoch, or None.
        training: The training's sizes.
        call_seconds: What a call of the train function usually takes.
        validation_examples: How many are validated, where the dataset does not say; None where that is unknown.
    """
    held_out = None
    if validation is not None:
        held_out = _held_out(model, validation, training, validation_examples)
    short = _short_epochs(model, train, held_out, training, call_seconds)
    charged = uncounted = short.start
    calls = (training.steps_per_epoch or math.inf) / training.steps_per_call
    buffered = _steps_in_shuffle_buffer(train.dataset, training.batch_size)
    counted = _counted_calls(buffered, training) if charged >= WORTH_MENDING * calls * short.call else None
    if counted is not None and buffered is not None:
        waited = max(0.0, short.call - _kept_call_seconds(model, train.dataset, training))
        charged = max(0.0, charged - waited * buffered / training.steps_per_call)
        uncounted += (calls - counted) * short.call
    return BetweenEpochs(
        boundary=Boundary(
            seconds=charged,
            validation_seconds=short.validation,
            seconds_per_example=max(short.call, 1e-9) / (training.steps_per_call * training.batch_size),
            tail_excluded=counted is not None,
        ),
        counted_calls=counted,
        uncounted_seconds=uncounted,
    )


@dataclass(frozen=True, kw_only=True)
class _ShortEpochs:
    """What short epochs showed.

    Args:
        start: Seconds of one beyond its calls and its validation.
        call: Seconds of a call within one, the first left out.
        validation: Seconds of a whole validation.
    """

    start: float
    call: float
    validation: float


def _short_epochs(
    model: keras.Model,
    train: TrainingPipeline,
    held_out: _HeldOut | None,
    training: Training,
    call_seconds: float,
) -> _ShortEpochs:
    wanted = BOUNDARY_EPOCH_SECONDS / max(call_seconds, 1e-9)
    calls_each = int(min(MOST_BOUNDARY_CALLS, max(FEWEST_BOUNDARY_CALLS, wanted)))
    few = train.shorter(calls_each * training.steps_per_call)
    seen = _train(
        model, few, held_out, BOUNDARY_EPOCHS, most_seconds=BOUNDARY_SECONDS, synchronise=training.synchronise
    )
    # A dataset that has run dry is reported by the next fit.
    first_calls = [each.calls[0] for each in seen if each.calls]
    later_calls = [seconds for each in seen for seconds in each.calls[1:]]
    call = statistics.median(later_calls or first_calls)
    starts = [
        late.ended_at - early.ended_at - late.validation_seconds - sum(late.calls[1:]) - call
        for early, late in itertools.pairwise(seen)
    ]
    validations = [each.validation for each in seen[1:] if each.validation is not None]
    return _ShortEpochs(
        start=max(0.0, statistics.median(starts)),
        call=call,
        validation=statistics.median(map(held_out.whole_seconds, validations))
        if held_out and validations
        else 0.0,
    )


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

    def whole_seconds(self, seen: _Validation) -> float:
        """Seconds that a validation would take on all of the data."""
        # A model that validates by another function than its own shows no calls.
        call = seen.call if seen.calls > 1 else seen.seconds / (self.calls or 1)
        return seen.seconds + self.unseen * call


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


@dataclass
class _Epoch:
    """One short epoch.

    Args:
        calls: Seconds of each call of the train function.
        validation: What followed; None without validation data, or where the model does not tell.
        ended_at: When it was over, validation included.
    """

    calls: list[float] = field(default_factory=list)
    validation: _Validation | None = None
    ended_at: float = 0.0

    @property
    def validation_seconds(self) -> float:
        """Of its validation, as far as that was run."""
        return 0.0 if self.validation is None else self.validation.seconds


def _train(
    model: keras.Model,
    train: TrainingPipeline,
    held_out: _HeldOut | None,
    epochs: int,
    *,
    most_seconds: float,
    synchronise: Callable[[], None],
) -> list[_Epoch]:
    """Train some epochs, fewer where they take long.

    Args:
        model: Compiled, and trained already.
        train: What an epoch is.
        held_out: What each is validated on, or None.
        epochs: How many.
        most_seconds: No further epoch is begun after so long, once one has followed on another.
        synchronise: Waits until the devices have done what they were given: so each call is timed whole.
    """
    import keras

    seen: list[_Epoch] = []

    class Edges(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        """Notes when epochs and validations begin and end, and ends it all when enough was seen."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append(_Epoch())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen[-1].ended_at = time.perf_counter()
            if len(seen) > 1 and seen[-1].ended_at - began > most_seconds:
                self.model.stop_training = True

        def on_test_begin(self, logs: Any = None) -> None:
            seen[-1].validation = _Validation(time.perf_counter())

        def on_test_end(self, logs: Any = None) -> None:
            if (validation := seen[-1].validation) is not None:
                validation.ended_at = time.perf_counter()

    def note(seconds: float) -> None:
        seen[-1].calls.append(seconds)

    usual = model.train_function
    model.train_function = _timing(usual, note, synchronise)
    began = time.perf_counter()
    arguments = {"epochs": epochs, "verbose": 0, "shuffle": False, "callbacks": [Edges()]}
    try:
        with nullcontext() if held_out is None else _calls_noted(model, held_out, seen):
            model.fit(**train.fit_args, validation_data=held_out and held_out.dataset, **arguments)
    finally:
        model.train_function = usual
    return seen


@contextmanager
def _calls_noted(model: keras.Model, held_out: _HeldOut, seen: Sequence[_Epoch]) -> Iterator[None]:
    """Have each call of the test function noted.

    Args:
        model: What is validated.
        held_out: On what.
        seen: Epochs that have begun, the present one last.
    """

    def noted(iterator: Any) -> Any:
        result = usual(iterator)
        current = seen[-1].validation
        if current is not None:  # a model's own `evaluate` may call nobody back
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


def _counted_calls(buffered: float | None, training: Training) -> int | None:
    """How many calls of an epoch are over before the shuffle buffer alone feeds the rest; None where all are to count.

    A buffer that holds most of an epoch feeds most of its steps: then all count.

    Args:
        buffered: Steps' worth of examples in a full buffer; None without one.
        training: The training's sizes.
    """
    steps = training.steps_per_epoch
    if buffered is None or steps is None or not 0 < buffered <= steps / 2:
        return None
    counted = int((steps - buffered) / training.steps_per_call)
    return counted if counted >= FEWEST_COUNTED_CALLS else None


def _steps_in_shuffle_buffer(train: tf.data.Dataset, batch_size: int) -> float | None:
    """How many steps' worth of examples the pipeline's shuffle buffer holds; None where there is none.

    Looks back from the end of the pipeline over what hands on element by element. What lies further up, such as a
    shuffle of file names, is not taken for one of examples. A repeat without an end begins a new epoch each time; any
    other refills the buffer within an epoch.
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
        if kind not in hands_on and not (kind == "Repeat" and elements_in(dataset) == ENDLESS):
            return None
        if kind.endswith("Batch"):
            steps_per_element = 1 / batch_size
        (dataset,) = dataset._inputs()


def _kept_call_seconds(model: keras.Model, train: tf.data.Dataset, training: Training) -> float:
    """What a call takes on a batch that is kept in memory."""
    kept = iter(train.take(1).cache().repeat())
    for _ in range(2):  # the second ends what was kept, and takes its pipeline down: that may take long
        model.train_function(kept)
    calls: list[float] = []
    function = _timing(model.train_function, calls.append, training.synchronise)
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


def _timing(
    function: Callable[[Any], Any], note: Callable[[float], None], synchronise: Callable[[], None]
) -> Callable[[Any], Any]:
    """`function`, with the seconds of each call noted: until the devices have done its work."""

    def timed(iterator: Any) -> Any:
        began = time.perf_counter()
        result = function(iterator)
        synchronise()
        note(time.perf_counter() - began)
        return result

    return timed
