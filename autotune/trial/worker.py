"""The trial process: applies one configuration, builds, warms up, then obeys the tuner.

Runs in a fork of the template (or in a fork that has imported nothing, which then imports everything
itself). Never imports Optuna or pandas. Reports go over the pipe, as data; stdout and stderr are the trial's log.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from autotune.errors import ApplyError, AutotuneError, WorkloadError
from autotune.recipe import apply
from autotune.space.configuration import Configuration
from autotune.trial import messages, telemetry
from autotune.trial.record import Outcome
from autotune.trial.step_clock import LongEpoch, StepClock, Training, TrainingEnded, TrainingFailed
from autotune.workload import Workload, call_with_config, load, users_traceback

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    TrialChannel = messages.Channel[messages.Measure | messages.Finish]

ENDLESS = 1 << 30
"""Epochs that `fit` is asked for: the tuner ends it."""
BOUNDARY_CALLS = 6
"""Calls of the train function in each of the short epochs that show what a boundary costs."""
BOUNDARY_EPOCHS = 4
VALIDATION_CALLS = 20
"""Calls of the test function from which a longer validation's time is extrapolated."""


def run(
    request: messages.TrialRequest,
    channel: TrialChannel,
    workload: Workload | None,
    reference: messages.WorkloadReference,
) -> int:
    """Run one trial to its end.

    Args:
        request: What to run.
        channel: The pipe to the tuner.
        workload: The workload, where the template has imported it.
        reference: Where to import it from otherwise.

    Returns:
        The exit status of the process: 0 when the tuner ended the trial, 1 when it failed.
    """
    try:
        return _train(request, channel, workload, reference)
    except TrainingFailed as failure:
        return _report(channel, failure.outcome, failure.reason, failure.hint, "", failure.input_error)
    except (WorkloadError, ApplyError) as error:
        return _report(channel, Outcome.ERROR, error.message, error.hint, error.detail, True)
    except AutotuneError as error:
        return _report(channel, Outcome.ERROR, error.message, error.hint, error.detail, False)
    except messages.ChannelClosed:
        return 1
    except MemoryError as error:
        return _report(channel, Outcome.OOM, f"out of host memory: {error}", "", "", False)
    except BaseException as error:
        return _report_exception(channel, error)


def _report(
    channel: TrialChannel, outcome: Outcome, reason: str, hint: str, detail: str, input_error: bool
) -> int:
    channel.send(
        messages.Failed(
            outcome=outcome,
            reason=reason[:4000],
            hint=hint,
            detail=detail[-20000:],
            input_error=input_error,
        )
    )
    return 1


def _report_exception(channel: TrialChannel, error: BaseException) -> int:
    text = str(error)
    first_line = text.strip().splitlines()[0] if text.strip() else "no message"
    reason = f"{type(error).__name__}: {first_line}"
    outcome = Outcome.OOM if _is_out_of_memory(error) else Outcome.ERROR
    return _report(channel, outcome, reason, "", users_traceback(error), False)


def _is_out_of_memory(error: BaseException) -> bool:
    import tensorflow as tf

    text = str(error)
    return (
        isinstance(error, (MemoryError, tf.errors.ResourceExhaustedError))
        or (isinstance(error, tf.errors.OpError) and "RESOURCE_EXHAUSTED" in text)
        or "out of memory" in text.lower()
    )


def _train(
    request: messages.TrialRequest,
    channel: TrialChannel,
    workload: Workload | None,
    reference: messages.WorkloadReference,
) -> int:
    configuration = Configuration(request.configuration)
    apply.apply_before_import(configuration)
    if workload is None:
        # The user's module may start the runtime: what must precede that is set first.
        apply.apply_before_build(configuration)
        workload = load(reference)
    else:
        apply.apply_before_build(configuration)
    import tensorflow as tf

    train, validation = _datasets(workload, configuration, examine=request.examine)
    model = _compiled_model(workload, configuration, train)
    examples, endless = request.examples, request.endless
    if request.examine:
        examples, endless = _count_examples(workload, configuration, request.count_seconds)
    channel.send(
        messages.Started(
            jit_compile=bool(model.jit_compile),
            examples=examples,
            endless=endless,
            element=str(train.element_spec)[:2000],
            parameters=int(model.count_params()) if model.built else 0,
            gpus=_gpu_names(),
            build=_build_versions(),
        )
    )
    training = Training(
        steps_per_call=int(configuration["steps_per_execution"]),
        batch_size=configuration.batch_size,
        examples=examples,
        drop_remainder=workload.drop_remainder,
        iterations=_iterations_of(model),
        synchronise=tf.test.experimental.sync_devices,
    )
    clock = StepClock(
        training,
        cast(Any, channel),
        warmup_seconds=request.warmup_seconds,
        epoch_seconds=request.epoch_seconds,
    )
    finish = _fit(model, train, validation, clock, training, endless)
    channel.send(
        messages.Finished(
            peak_host_bytes=telemetry.peak_host_bytes(),
            peak_device_bytes=_peak_device_bytes(),
            loss=clock.last_loss,
            input_wait_fraction=input_wait_fraction(model, train, finish.input_wait_seconds)
            if finish.input_wait_seconds > 0
            else None,
        )
    )
    return 0


# ------------------------------------------------------------------------------------------------ building


def _datasets(
    workload: Workload, configuration: Configuration, *, examine: bool
) -> tuple[tf.data.Dataset, tf.data.Dataset | None]:
    train = _checked_dataset(workload.dataset, "dataset", configuration)
    if examine:
        _refuse_unusable_elements(train, workload, configuration)
    validation = None
    if workload.validation is not None:
        validation = apply.pipeline(
            _checked_dataset(workload.validation, "validation", configuration),
            configuration,
            batched=workload.batched,
        )
    return (
        apply.pipeline(
            train,
            configuration,
            batched=workload.batched,
            drop_remainder=workload.drop_remainder,
        ),
        validation,
    )


def _call_user(part: str, function: Callable[[], Any]) -> Any:
    """Call one of the workload's functions; an exception in it is the user's to mend, want of memory is not."""
    try:
        return function()
    except Exception as error:
        if _is_out_of_memory(error):
            raise
        raise WorkloadError(
            f"the workload's {part}() raised {type(error).__name__}: {error}", detail=users_traceback(error)
        ) from error


def _checked_dataset(
    function: Callable[..., Any], part: str, configuration: Configuration
) -> tf.data.Dataset:
    import tensorflow as tf

    dataset = _call_user(part, lambda: call_with_config(function, configuration))
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


def _refuse_unusable_elements(
    dataset: tf.data.Dataset, workload: Workload, configuration: Configuration
) -> None:
    import keras

    first = _call_user("dataset", lambda: next(iter(dataset.take(1)), None))
    if first is None:
        raise WorkloadError(
            "dataset() yields nothing: it is empty", hint="Check the path or the filter that feeds it."
        )
    if workload.batched:
        leading = {int(leaf.shape[0]) for leaf in keras.tree.flatten(first) if leaf.shape.rank}
        if leading and max(leading) != configuration.batch_size:
            raise WorkloadError(
                f"dataset(config) with batched=True yields batches of {max(leading)}, expected "
                f"config.batch_size, which is {configuration.batch_size}",
                hint="Batch by config.batch_size, or yield single examples without batched=True.",
            )


def _compiled_model(workload: Workload, configuration: Configuration, train: tf.data.Dataset) -> keras.Model:
    import keras

    model = _call_user("model", workload.model)
    if not isinstance(model, keras.Model):
        raise WorkloadError(f"model() returned a {type(model).__name__}, expected a keras.Model")
    if model.compiled:
        raise WorkloadError(
            "model() returned a model that is compiled already",
            hint="Leave model.compile() out of model(): give its arguments as Workload(compile=…).",
        )
    _refuse_shapes_that_do_not_fit(model, train.element_spec, workload)
    arguments = _call_user("compile", workload.compile)
    if not isinstance(arguments, dict):
        raise WorkloadError(
            f"compile() returned a {type(arguments).__name__}, expected the arguments of model.compile as a dict"
        )
    knobs = apply.compile_arguments(configuration)
    for name in knobs:
        if name in arguments:
            raise WorkloadError(
                f"compile() names {name}, which is a knob",
                hint=f"Move it to Workload(baseline={{{name!r}: {arguments[name]!r}}}).",
            )
    _call_user("compile", lambda: model.compile(**arguments, **knobs))
    return model


def _refuse_shapes_that_do_not_fit(model: keras.Model, spec: Any, workload: Workload) -> None:
    import keras

    inputs = getattr(model, "input_shape", None) if model.built else None
    x = spec[0] if isinstance(spec, tuple) else spec
    shapes = [leaf.shape.as_list() for leaf in keras.tree.flatten(x) if leaf.shape.rank is not None]
    expected = _flat_shapes(inputs)
    if not expected or len(expected) != len(shapes):
        return
    for got, wanted in zip(shapes, expected, strict=True):
        if not workload.batched and len(got) == len(wanted) + 1:
            raise WorkloadError(
                f"dataset() yields batches already: with a batch size added, an input has shape {tuple(got)}, "
                f"and the model takes {tuple(wanted)}",
                hint="Leave .batch() out of dataset(); or batch by config.batch_size and say batched=True.",
            )
        fits = len(got) == len(wanted) and all(
            a is None or b is None or a == b for a, b in zip(got[1:], wanted[1:], strict=True)
        )
        # Keras itself lets a last axis of 1 come and go.
        if not fits and [*got, 1] != list(wanted) and got != [*wanted, 1]:
            raise WorkloadError(
                f"dataset() yields an input of shape {tuple(got[1:])}, the model takes {tuple(wanted[1:])}",
                hint="Shapes of a single example, without the batch; make one fit the other.",
            )


def _flat_shapes(shapes: Any) -> list[tuple[int | None, ...]]:
    """The shapes in a model's `input_shape`, which is a shape, or a list or dict of them."""
    if isinstance(shapes, dict):
        return [shape for key in sorted(shapes) for shape in _flat_shapes(shapes[key])]
    if isinstance(shapes, (list, tuple)) and shapes and isinstance(shapes[0], (list, tuple, dict)):
        return [shape for each in shapes for shape in _flat_shapes(each)]
    return [tuple(shapes)] if isinstance(shapes, (list, tuple)) else []


def _count_examples(
    workload: Workload, configuration: Configuration, seconds: float
) -> tuple[int | None, bool]:
    """Examples per epoch, None when endless or not counted in time; and whether the dataset is endless."""
    import keras

    dataset = _checked_dataset(workload.dataset, "dataset", configuration)
    cardinality = int(dataset.cardinality().numpy())
    if cardinality == -1:  # tf.data.INFINITE_CARDINALITY
        return None, True
    if cardinality >= 0 and not workload.batched:
        return cardinality, False
    deadline = time.perf_counter() + seconds

    def count() -> int | None:
        total = 0
        for element in dataset:
            total += int(keras.tree.flatten(element)[0].shape[0]) if workload.batched else 1
            if time.perf_counter() > deadline:
                return None
        return total

    return _call_user("dataset", count), False


def _iterations_of(model: keras.Model) -> Callable[[], int] | None:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return None
    return lambda: int(optimizer.iterations)


# ------------------------------------------------------------------------------------------------ training


def _fit(
    model: keras.Model,
    train: tf.data.Dataset,
    validation: tf.data.Dataset | None,
    clock: StepClock,
    training: Training,
    endless: bool,
) -> messages.Finish:
    """Train until the tuner asks for the closing figures, whose message is returned."""
    import keras

    class EpochEdges(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        """Tells the clock where epochs begin and end."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            clock.epoch_began()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            clock.epoch_ended()

    model.make_train_function()
    usual = model.train_function
    model.train_function = clock.wrap(usual)
    arguments = {"epochs": ENDLESS, "verbose": 0, "shuffle": False, "callbacks": [EpochEdges()]}
    try:
        try:
            model.fit(train, validation_data=None if endless else validation, **arguments)
        except LongEpoch:
            model.train_function = usual
            overhead = None if endless else epoch_overhead(model, train, validation, training)
            model.train_function = clock.wrap(usual)
            clock.time_by_steps(overhead)
            model.fit(train, **arguments)
    except TrainingEnded as ended:
        return ended.finish
    finally:
        model.train_function = usual
    raise TrainingFailed(Outcome.ERROR, "model.fit returned before it was told to")


def epoch_overhead(
    model: keras.Model,
    train: tf.data.Dataset,
    validation: tf.data.Dataset | None,
    training: Training,
) -> float:
    """What an epoch costs beyond its steps: a new iterator, a refilled shuffle buffer, validation.

    Trains a few short epochs of the same pipeline and takes the time of their steps away.

    Returns:
        Seconds per epoch; the median of several.
    """
    import keras

    edges: list[float] = []
    calls: list[float] = []
    validations: list[float] = []

    class Edges(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        """Notes when epochs and validations end."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            edges.append(time.perf_counter())

        def on_test_begin(self, logs: Any = None) -> None:
            validations.append(-time.perf_counter())

        def on_test_end(self, logs: Any = None) -> None:
            validations[-1] += time.perf_counter()

    usual = model.train_function
    model.train_function = _timing(usual, calls)
    batches = BOUNDARY_CALLS * training.steps_per_call
    arguments: dict[str, Any] = {"epochs": BOUNDARY_EPOCHS, "verbose": 0, "shuffle": False}
    short, whole = validation, 1.0
    if validation is not None:
        short, whole = _shortened(validation, training.steps_per_call)
    try:
        model.fit(train.take(batches), validation_data=short, callbacks=[Edges()], **arguments)
    finally:
        model.train_function = usual
    calls_each = len(calls) // len(edges)
    usual_call = _median([seconds for index, seconds in enumerate(calls) if index % calls_each] or calls)
    spent = [late - early for early, late in itertools.pairwise(edges)]
    checked = validations[1:] or [0.0] * len(spent)
    return max(
        0.0,
        _median(
            [
                epoch - calls_each * usual_call - validated + validated * whole
                for epoch, validated in zip(spent, checked, strict=True)
            ]
        ),
    )


def _shortened(validation: tf.data.Dataset, steps_per_call: int) -> tuple[tf.data.Dataset, float]:
    """At most `VALIDATION_CALLS` calls' worth of a validation set, and how often that is the whole."""
    batches = VALIDATION_CALLS * steps_per_call
    cardinality = int(validation.cardinality().numpy())
    if 0 <= cardinality <= batches:
        return validation, 1.0
    return validation.take(batches), max(1.0, cardinality / batches)


def _timing(function: Callable[[Any], Any], into: list[float]) -> Callable[[Any], Any]:
    def timed(iterator: Any) -> Any:
        began = time.perf_counter()
        result = function(iterator)
        into.append(time.perf_counter() - began)
        return result

    return timed


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


# --------------------------------------------------------------------------------------------- afterwards


def input_wait_fraction(model: keras.Model, train: tf.data.Dataset, seconds: float) -> float:
    """Share of the step that waits for input: the same step on a batch kept in memory is the counterfactual.

    Both take turns in short stretches, on the model's own compiled function. What a pipeline takes away
    from the step by using the same cores counts as waiting, for it goes away with the pipeline.

    Args:
        model: Compiled, and trained already.
        train: The training pipeline, batched.
        seconds: How long all of it may take.
    """
    import tensorflow as tf

    real = iter(train.repeat())
    kept = iter(train.take(1).cache().repeat())
    deadline = time.perf_counter() + seconds
    for iterator in (kept, real, kept):
        model.train_function(iterator)
    began = time.perf_counter()
    model.train_function(real)
    calls = max(1, min(200, int(seconds / 10 / max(time.perf_counter() - began, 1e-6))))
    spent = {"real": 0.0, "kept": 0.0}
    rounds = 0
    while rounds < 2 or (time.perf_counter() < deadline and rounds < 50):
        for name, iterator in (("real", real), ("kept", kept)):
            tf.test.experimental.sync_devices()
            began = time.perf_counter()
            for _ in range(calls):
                model.train_function(iterator)
            tf.test.experimental.sync_devices()
            spent[name] += time.perf_counter() - began
        rounds += 1
    return min(1.0, max(0.0, 1.0 - spent["kept"] / spent["real"]))


def _gpu_names() -> tuple[str, ...]:
    import tensorflow as tf

    return tuple(
        str(tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name))
        for gpu in tf.config.list_physical_devices("GPU")
    )


def _build_versions() -> dict[str, str]:
    import tensorflow as tf

    info = tf.sysconfig.get_build_info()
    return {key: str(info[key]) for key in ("cuda_version", "cudnn_version") if key in info}


def _peak_device_bytes() -> int | None:
    import tensorflow as tf

    gpus = tf.config.list_logical_devices("GPU")
    if not gpus:
        return None
    return sum(
        int(tf.config.experimental.get_memory_info(gpu.name.removeprefix("/device:"))["peak"]) for gpu in gpus
    )
