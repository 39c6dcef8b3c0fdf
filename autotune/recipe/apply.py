"""Apply a configuration, stage by stage, in trials and in training code. TensorFlow is imported in functions."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.data.errors import ApplyError
from autotune.data.models import KnobValue
from autotune.recipe.keras_api import keras_api
from autotune.recipe.tf_private import keras, tf
from autotune.space.configuration import Configuration, find_conflict
from autotune.space.keras_in_use import keras_in_use
from autotune.space.knobs import KNOBS, Knob, Stage
from autotune.space.variables import without_caches

_layer_before_fork = ""
_applied: dict[str, KnobValue] | None = None  # by `apply_in_training`, in this process


def _knobs_of(configuration: Mapping[str, KnobValue], *stages: Stage) -> Iterator[tuple[Knob, KnobValue]]:
    for name, knob in KNOBS.items():
        if knob.stage in stages and name in configuration:
            yield knob, configuration[name]


def environment(configuration: Mapping[str, KnobValue], stage: Stage = Stage.IMPORT) -> dict[str, str]:
    """Return the environment variables that the knobs of a stage change in this process."""
    variables = dict(os.environ)
    for knob, value in _knobs_of(configuration, stage):
        if knob.read(variables) != value:
            knob.set(variables, value)
    return {name: text for name, text in variables.items() if os.environ.get(name) != text}


def in_force() -> dict[str, KnobValue]:
    """Read the knobs that act before a model is built, as TensorFlow and Keras report them. Wakes CUDA."""
    targets = {Stage.IMPORT: os.environ, Stage.START: os.environ, Stage.RUNTIME: tf, Stage.BUILD: tf}
    values = {knob.name: knob.read(targets[knob.stage]) for knob in KNOBS.values() if knob.stage in targets}
    return {name: value for name, value in values.items() if value is not None}


def not_knobs() -> tuple[str, ...]:
    """Read settings of the shell and of TensorFlow that act on speed and are no knobs, as `NAME=value`."""
    variables = {**os.environ, **without_caches(os.environ)}  # those are the trial's own
    shell = {name: text for name in ("TF_XLA_FLAGS", "XLA_FLAGS") if (text := variables.get(name))}
    grappler = {"jit": tf.config.optimizer.get_jit(), **tf.config.optimizer.get_experimental_options()}
    settings = {**shell, **{f"tf.config.optimizer {name}": value for name, value in grappler.items()}}
    settings["tf.config.run_functions_eagerly"] = tf.config.functions_run_eagerly()
    return tuple(f"{name}={value}" for name, value in settings.items() if value)


def note_layers() -> None:
    """Remember the layers that exist in this process, for its forks: their garbage collector does not see them."""
    global _layer_before_fork
    _layer_before_fork = _name_a_layer()


def _name_a_layer() -> str:
    """Name a layer that exists; empty for none."""
    return _layer_before_fork or _first_of(keras.layers.Layer)


def _first_of(*kinds: type) -> str:
    """Name an object of one of these kinds that exists in this process: `Adam 'adam'`; empty for none."""
    for kind in kinds:
        for candidate in gc.get_objects():
            if issubclass(type(candidate), kind):
                name = getattr(candidate, "name", None)
                return f"{type(candidate).__name__} {name!r}" if name else type(candidate).__name__
    return ""


def runtime_has_started() -> bool:
    """Return whether TensorFlow's runtime runs: only before that can a thread count be changed. Wakes CUDA."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return False


def apply_in_training(configuration: Mapping[str, KnobValue]) -> None:
    """Set every knob that acts before the model, in a process that trains. Raises ApplyError where it is too late."""
    global _applied
    if _applied != dict(configuration):
        apply_before_import(configuration)
    apply_before_build(configuration)
    _applied = dict(configuration)


def apply_before_import(configuration: Mapping[str, KnobValue]) -> None:
    """Set the variables of the import stage. Raises ApplyError where TensorFlow was imported with another value."""
    for variable, text in environment(configuration).items():
        if "tensorflow" in sys.modules:
            raise ApplyError(
                f"{variable}={text} must be set before TensorFlow is imported, and it was imported already",
                hint=f"Call recipe.apply() above `import tensorflow`, or start Python with {variable}={text}.",
            )
        os.environ[variable] = text


def apply_before_build(configuration: Mapping[str, KnobValue]) -> None:
    """Set what acts before the runtime starts and layers are built, and memory growth on every GPU.

    Raises ApplyError where the runtime has started or layers were built, so that a knob cannot act.
    """
    if changed := environment(configuration, Stage.START):
        os.environ.update(changed)  # first: asking whether the runtime runs may read them
        if runtime_has_started():
            raise _too_late(" ".join(f"{name}={text!r}" for name, text in changed.items()))
    for knob, value in _knobs_of(configuration, Stage.RUNTIME, Stage.BUILD):
        if knob.read(tf) == value:
            continue
        if knob.stage is Stage.BUILD and (layer := _name_a_layer()):
            raise ApplyError(
                f"{knob.name}={value} cannot act any more: the layer {layer} was built before it was set",
                hint="Call recipe.apply() before any layer or model is made, those at the top of imported files too.",
            )
        if knob.name == "keep_freed_memory" and runtime_has_started():  # each of its threads may have an arena
            raise _too_late(f"{knob.name}={value}")
        try:
            knob.set(tf, value)
        except RuntimeError as error:
            raise _too_late(f"{knob.name}={value}") from error
    for gpu in tf.config.list_physical_devices("GPU"):
        divided = tf.config.get_logical_device_configuration(gpu) is not None  # by the user: it has growth or that
        if divided or tf.config.experimental.get_memory_growth(gpu) is True:
            continue
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError as error:
            raise _too_late("GPU memory growth") from error


def overridden(configuration: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """Return the knobs of the runtime and of layers that something has set to another value since, with that value."""
    current = {
        knob.name: knob.read(os.environ if knob.stage is Stage.START else tf)
        for knob, _ in _knobs_of(configuration, Stage.START, Stage.RUNTIME, Stage.BUILD)
    }
    return {name: value for name, value in current.items() if value is not None and value != configuration[name]}


def refuse_overridden(configuration: Mapping[str, KnobValue]) -> None:
    """Raise ApplyError where `apply_in_training` was not called, or training code has changed what it set."""
    if _applied != dict(configuration):
        raise ApplyError(
            f"the recipe is not in force: {'another one was applied since' if _applied else 'apply() was not called'}",
            hint="Write recipe = autotune.Recipe.load(path).apply() above all that makes tensors, datasets or models.",
        )
    for name, value in overridden(configuration).items():
        raise ApplyError(
            f"the recipe set {name}={configuration[name]}, and a later line has set it to {value}",
            hint="Remove that line, or move it above recipe.apply(). Layers built since then keep its setting.",
        )


def _too_late(setting: str) -> ApplyError:
    kinds: list[type] = [tf.data.Dataset, tf.Variable, tf.Tensor]
    if keras_in_use().package in sys.modules:
        variables = [keras.Variable] if hasattr(keras, "Variable") else []  # Keras 2 has TensorFlow's
        kinds = [keras.layers.Layer, *keras_api().optimizer_bases(), keras.metrics.Metric, *variables, *kinds]
    made = f", and {name} was made before" if (name := _first_of(*kinds)) else ""
    return ApplyError(
        f"{setting} cannot act any more: TensorFlow's runtime has started{made}",
        hint="Call recipe.apply() right after the imports, before the first tensor, dataset or model is made.",
    )


def compile_arguments(configuration: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """Return the keyword arguments of `model.compile` that the configuration stands for."""
    arguments = {knob.name: value for knob, value in _knobs_of(configuration, Stage.COMPILE)}
    if "jit_compile" in arguments:
        arguments["jit_compile"] = keras_api().jit_compile(arguments["jit_compile"])
    return arguments


def accumulate(optimizer: Any, configuration: Mapping[str, KnobValue]) -> None:
    """Make an optimizer of Keras accumulate the gradients of a global batch. Raises ApplyError where it cannot."""
    if "global_batch" not in configuration:
        return
    steps = int(configuration["global_batch"]) // int(configuration["batch_size"])
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # below the loss scale of float16
    if not hasattr(optimizer, "gradient_accumulation_steps"):
        raise ApplyError(
            "gradients cannot be accumulated: the model is not compiled with one optimizer of Keras 3",
            hint="Compile it with one, or omit --global-batch: Keras 2 and custom training steps do not accumulate.",
        )
    wanted = steps if steps > 1 else None
    if optimizer.gradient_accumulation_steps == wanted:
        return
    if optimizer.built:  # its accumulators are made then
        raise ApplyError(
            f"gradients cannot be accumulated any more: the optimizer {optimizer.name!r} was built before",
            hint="Compile the model with a new optimizer, or leave --global-batch out.",
        )
    optimizer.gradient_accumulation_steps = wanted


def set_compiled(model: Any, configuration: Configuration) -> None:
    """Set the arguments that `compile` did not get, or a model's own `compile` has not passed on."""
    accumulate(model.optimizer, configuration)
    keras_api().set_steps(model, int(configuration["steps_per_execution"]))
    wanted = configuration["jit_compile"]
    if wanted != "auto" and bool(model.jit_compile) != wanted and not (wanted and model.run_eagerly):
        model.jit_compile = wanted  # Keras turns it off where a layer cannot be compiled


def pipeline(dataset: tf.data.Dataset, configuration: Configuration, *, batched: bool = False) -> tf.data.Dataset:
    """Return the batches, prefetched as the configuration says, of a dataset that holds examples or is `batched`."""
    if not batched:
        dataset = dataset.batch(configuration.batch_size)
    own, options = set_by_dataset(dataset), None
    for knob, value in _knobs_of(configuration, Stage.OPTIONS):
        if value not in (knob.default, own.get(knob.name)):
            options = options or tf.data.Options()
            knob.set(options, value)
    if options is not None:  # options that say nothing cost each epoch something all the same
        dataset = dataset.with_options(options)
    for knob, value in _knobs_of(configuration, Stage.PIPELINE):
        dataset = knob.set(dataset, value) if knob.acts(configuration) else dataset
    return dataset


@dataclass(frozen=True)
class TrainingPipeline:
    """The batches of a training, and how `model.fit` reads them."""

    dataset: tf.data.Dataset  # batches; they repeat without an end where `steps_per_epoch` is set
    steps_per_epoch: int | None  # with a persistent iterator; None: the end of the dataset ends an epoch
    in_force: Configuration  # with the values that act on this dataset
    shorter: Callable[[int], TrainingPipeline] = field(repr=False, compare=False)  # epochs of so many steps
    source: Any = None  # what `fit` reads instead of the dataset, such as a `PyDataset`

    @property
    def fit_args(self) -> dict[str, Any]:
        """The keyword arguments of `model.fit` for the training data."""
        steps = {} if self.steps_per_epoch is None else {"steps_per_epoch": self.steps_per_epoch}
        x = distribute(self.dataset, self.in_force) if self.source is None else self.source
        return {"x": x, **steps}

    @property
    def one_epoch(self) -> tf.data.Dataset:
        """The batches of one epoch, as a dataset that ends where the user's does."""
        return self.dataset if self.steps_per_epoch is None else self.dataset.take(self.steps_per_epoch)


def training_pipeline(
    dataset: tf.data.Dataset, configuration: Configuration, *, batched: bool = False, drop_remainder: bool = False
) -> TrainingPipeline:
    """Do as `pipeline`, but repeat where `persistent_iterator` is on and the cardinality is known and finite.

    It needs a prefetch of at least 1, and a `steps_per_execution` that divides the steps of an epoch.
    """
    if not batched:
        dataset = dataset.batch(configuration.batch_size, drop_remainder=drop_remainder)
    steps = int(dataset.cardinality())
    if configuration.get("persistent_iterator", False) and steps > 0:
        return _persistent(dataset, configuration, steps)
    if "persistent_iterator" in configuration:
        configuration = configuration.replace(persistent_iterator=False)
    return _ending(pipeline(dataset, configuration, batched=True), configuration)


def _ending(batches: tf.data.Dataset, configuration: Configuration) -> TrainingPipeline:
    return TrainingPipeline(batches, None, configuration, lambda steps: _ending(batches.take(steps), configuration))


def pipeline_in_steps(
    dataset: tf.data.Dataset, configuration: Configuration, steps: int, *, whole_calls: bool = True
) -> TrainingPipeline:
    """Return batches of which an epoch takes so many, as a script says by `steps_per_epoch`.

    With `whole_calls`, the steps per execution are lowered to a divisor of them.
    """
    per_call = min(steps, int(configuration.get("steps_per_execution", 1)))
    changes = {
        "persistent_iterator": False,
        "steps_per_execution": largest_divisor(steps, per_call) if whole_calls else per_call,
    }
    configuration = configuration.replace(**{name: value for name, value in changes.items() if name in configuration})
    batches = pipeline(dataset, configuration, batched=True)
    return TrainingPipeline(
        batches,
        steps,
        configuration,
        lambda fewer: pipeline_in_steps(dataset, configuration, fewer, whole_calls=whole_calls),
    )


def _persistent(
    batches: tf.data.Dataset, configuration: Configuration, steps: int, *, take: int | None = None
) -> TrainingPipeline:
    """Return an endless pipeline whose epochs have so many steps: all batches, or the first `take` of them."""
    repeated = _repeated(batches, take)
    changes: dict[str, KnobValue] = {}
    if "steps_per_execution" in configuration:
        changes["steps_per_execution"] = largest_divisor(steps, int(configuration["steps_per_execution"]))
    if not _prefetches(repeated):
        changes["prefetch"] = configuration.get("prefetch", 0) or 1
    in_force = configuration.replace(**changes)

    def shorter(fewer: int) -> TrainingPipeline:
        return _persistent(batches, configuration, min(steps, fewer), take=min(steps, fewer))

    return TrainingPipeline(pipeline(repeated, in_force, batched=True), steps, in_force, shorter)


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` that is not above `at_most`; both are at least 1."""
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)


def _repeated(batches: tf.data.Dataset, take: int | None) -> tf.data.Dataset:
    """Repeat the batches, or the first `take`, endlessly. Put a last prefetch behind it, to keep its batches."""
    if kind_of(batches) == "Options":
        (inner,) = batches._inputs()
        return _repeated(inner, take).with_options(batches.options())
    if _prefetches(batches):
        (inner,) = batches._inputs()
        return _repeated(inner, take).prefetch(int(batches._buffer_size))
    return (batches if take is None else batches.take(take)).repeat()


def _prefetches(batches: tf.data.Dataset) -> bool:
    """Return whether the dataset ends in a prefetch."""
    while kind_of(batches) == "Options":
        (batches,) = batches._inputs()
    return kind_of(batches) == "Prefetch" and int(batches._buffer_size) != 0


def as_dataset(data: Any) -> Any:
    """Turn arrays, alone or in tuples and dicts, into a dataset of single examples; return anything else as it is."""
    import numpy as np

    parts = data if isinstance(data, tuple) else (data,)  # of (x, y, sample_weight), which may be None
    leaves = tf.nest.flatten(parts)
    if not all(leaf is None or isinstance(leaf, np.ndarray | tf.Tensor) for leaf in leaves):
        return data
    given = tuple(part for part in parts if part is not None)
    return tf.data.Dataset.from_tensor_slices(given if isinstance(data, tuple) else data)


def kind_of(dataset: tf.data.Dataset) -> str:
    """Return the operation of a dataset, as `tf.data` names it: `Map`, `Shuffle`, `Cache`."""
    return type(dataset).__name__.strip("_").removesuffix("Dataset")


def set_by_dataset(dataset: tf.data.Dataset) -> dict[str, KnobValue]:
    """Return the options of a user's dataset that are not TensorFlow's defaults. Call it before the pipeline's own."""
    own, options = {}, dataset.options()
    for knob in KNOBS.values():
        value = knob.read(options) if knob.stage is Stage.OPTIONS else None
        if value is not None and value in knob.domain and value != knob.default:
            own[knob.name] = value
    return own


def batch_ranks(dataset: tf.data.Dataset) -> tuple[int | None, ...]:
    """Return how many axes each tensor of an element has; None where that is not known."""
    return tuple(None if shape is None else shape.rank for shape in _shapes(dataset))


def looks_batched(dataset: tf.data.Dataset) -> bool:
    """Return whether all tensors of an element have the same first axis, as those of a batch have."""
    return len({shape[0] if shape is not None and shape.rank else -1 for shape in _shapes(dataset)}) == 1


def _shapes(dataset: tf.data.Dataset) -> list[Any]:
    return [getattr(spec, "shape", None) for spec in tf.nest.flatten(dataset.element_spec)]


def keras_batches(
    parts: tuple[Any, Any, Any],
    *,
    batch_size: int | None = None,
    shuffle: Any = False,
    class_weight: Any = None,
    epochs: int = 1,
    counted: bool = True,
) -> tf.data.Dataset:
    """Return the batches that Keras makes of data; see `KerasApi.batches`. `counted`: they know their number."""
    dataset, batches = keras_api().batches(
        parts, batch_size=batch_size, shuffle=shuffle, class_weight=class_weight, epochs=epochs
    )
    if not counted or not batches:
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(batches))


def list_devices() -> tuple[str, ...]:
    """List the devices that a training here can be spread over: all GPUs, or the parts of the processor."""
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return tuple(device.name for device in devices)


def strategy_of(configuration: Mapping[str, KnobValue]) -> Any:
    """Return the configuration's strategy, made once in a process; TensorFlow's own no-op for `none`.

    Raises:
        ApplyError: This machine cannot have it, or other knobs exclude it.
    """
    kind = str(configuration.get("strategy", "none"))
    if kind == "none":
        return tf.distribute.get_strategy()
    if why := find_conflict(configuration):
        raise ApplyError(why)
    return _make_strategy(kind, int(configuration.get("replicas", 1)), str(configuration.get("cross_device", "auto")))


@functools.cache
def _make_strategy(kind: str, replicas: int, cross_device: str) -> Any:
    devices = list_devices()
    if replicas > len(devices):
        message = f"replicas={replicas} needs as many devices, and TensorFlow sees {len(devices)}"
        raise ApplyError(message, hint="Tune again on this machine.")
    if kind == "one_device":
        return tf.distribute.OneDeviceStrategy(devices[0])
    if cross_device == "nccl" and not tf.config.list_logical_devices("GPU"):
        raise ApplyError("cross_device=nccl needs GPUs", hint="Use auto, hierarchical_copy or reduce_to_one.")
    operations = {
        "auto": lambda: None,
        "nccl": tf.distribute.NcclAllReduce,
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
        "reduce_to_one": tf.distribute.ReductionToOneDevice,
    }
    return tf.distribute.MirroredStrategy(list(devices[:replicas]), cross_device_ops=operations[cross_device]())


def refuse_another_scope(model: Any, values: Mapping[str, KnobValue]) -> None:
    """Raise ApplyError where a model was not built in the scope of the configuration's strategy."""
    if values.get("strategy", "none") != "none" and model.distribute_strategy is not strategy_of(values):
        raise ApplyError(
            f"strategy={values['strategy']} does not act: the model was built in another scope, or in another thread",
            hint="Build it in the main thread, without a strategy of your own; in code `with recipe.scope():`.",
        )


def distribute(dataset: Any, configuration: Mapping[str, KnobValue]) -> Any:
    """Return the batches as `fit` reads them: spread beforehand where a replica's buffer has not TensorFlow's size."""
    size = int(configuration.get("per_replica_buffer_size", 1))
    if size == 1:
        return dataset
    options = tf.distribute.InputOptions(experimental_per_replica_buffer_size=size)
    return strategy_of(configuration).experimental_distribute_dataset(dataset, options)
