"""Applying a configuration, stage by stage, in trials and in training code. TensorFlow is imported in functions."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotune.data.errors import ApplyError
from autotune.data.models import KnobValue
from autotune.recipe.strategy import distributed
from autotune.recipe.tf_private import data_adapter
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS, Knob, Stage

if TYPE_CHECKING:
    import tensorflow as tf

_layer_before_fork = ""
_applied: dict[str, KnobValue] | None = None  # by `apply_in_training`, in this process


def _acting(configuration: Mapping[str, KnobValue], *stages: Stage) -> Iterator[tuple[Knob, KnobValue]]:
    for name, knob in KNOBS.items():
        if knob.stage in stages and name in configuration:
            yield knob, configuration[name]


def environment(configuration: Mapping[str, KnobValue], stage: Stage = Stage.IMPORT) -> dict[str, str]:
    """The environment variables that the knobs of a stage change in this process."""
    variables = dict(os.environ)
    for knob, value in _acting(configuration, stage):
        if knob.read(variables) != value:
            knob.set(variables, value)
    return {name: text for name, text in variables.items() if os.environ.get(name) != text}


def in_force() -> dict[str, KnobValue]:
    """The values of the knobs that act before a model is built, as TensorFlow and Keras report them. Wakes CUDA."""
    import tensorflow as tf

    targets = {Stage.IMPORT: os.environ, Stage.START: os.environ, Stage.RUNTIME: tf, Stage.BUILD: tf}
    found = {each.name: each.read(targets[each.stage]) for each in KNOBS.values() if each.stage in targets}
    return {name: value for name, value in found.items() if value is not None}


def not_knobs() -> tuple[str, ...]:
    """Settings of the shell and of TensorFlow that act on speed and are no knobs, as `NAME=value`."""
    import tensorflow as tf

    shell = {name: text for name in ("TF_XLA_FLAGS", "XLA_FLAGS") if (text := os.environ.get(name))}
    grappler = {"jit": tf.config.optimizer.get_jit(), **tf.config.optimizer.get_experimental_options()}
    set_ = {f"tf.config.optimizer {name}": value for name, value in grappler.items() if value}
    set_["tf.config.run_functions_eagerly"] = tf.config.functions_run_eagerly()
    return tuple(f"{name}={value}" for name, value in {**shell, **set_}.items() if value)


def note_layers() -> None:
    """Remember the layers that live in this process, for its forks: their collector does not see them."""
    global _layer_before_fork
    _layer_before_fork = _layer()


def _layer() -> str:
    """The name of a layer that lives; empty for none."""
    import keras

    return _layer_before_fork or _first_of(keras.layers.Layer)


def _first_of(*kinds: type) -> str:
    """The name of an object of one of these kinds that lives in this process: `Adam 'adam'`; empty for none."""
    for kind in kinds:
        for each in gc.get_objects():
            if issubclass(type(each), kind):
                name = getattr(each, "name", None)
                return f"{type(each).__name__} {name!r}" if name else type(each).__name__
    return ""


def runtime_has_started() -> bool:
    """Whether TensorFlow's runtime runs: a thread count can only be changed before. Wakes CUDA."""
    import tensorflow as tf

    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return False


def apply_in_training(configuration: Mapping[str, KnobValue]) -> None:
    """Set everything that precedes the model, in a process that trains. Raises ApplyError where it is too late."""
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
    import tensorflow as tf

    if changed := environment(configuration, Stage.START):
        os.environ.update(changed)  # first: asking whether the runtime runs may read them
        if runtime_has_started():
            raise _too_late(" ".join(f"{name}={text!r}" for name, text in changed.items()))
    for knob, value in _acting(configuration, Stage.RUNTIME, Stage.BUILD):
        if knob.read(tf) == value:
            continue
        if knob.stage is Stage.BUILD and (layer := _layer()):
            raise ApplyError(
                f"{knob.name}={value} cannot act any more: the layer {layer} was built before it was set",
                hint="Call recipe.apply() before any layer or model is made, those at the top of imported files too.",
            )
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
    """The knobs of the runtime and of layers that something has set to another value since, with that value."""
    import tensorflow as tf

    acting = _acting(configuration, Stage.START, Stage.RUNTIME, Stage.BUILD)
    found = {knob.name: knob.read(os.environ if knob.stage is Stage.START else tf) for knob, _ in acting}
    return {name: now for name, now in found.items() if now is not None and now != configuration[name]}


def refuse_overridden(configuration: Mapping[str, KnobValue]) -> None:
    """Raise ApplyError where training code has undone what `apply_in_training` set in this process."""
    if _applied != dict(configuration):
        return
    for name, now in overridden(configuration).items():
        raise ApplyError(
            f"the recipe set {name}={configuration[name]}, and a later line has set it to {now}",
            hint="Take that line out, or move it above recipe.apply(). Layers that were built since keep what it set.",
        )


def _too_late(what: str) -> ApplyError:
    import tensorflow as tf

    kinds: list[type] = [tf.data.Dataset, tf.Variable, tf.Tensor]
    if keras := sys.modules.get("keras"):
        kinds = [keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.Variable, *kinds]
    made = f", and {name} was made before" if (name := _first_of(*kinds)) else ""
    return ApplyError(
        f"{what} cannot act any more: TensorFlow's runtime has started{made}",
        hint="Call recipe.apply() right after the imports, before the first tensor, dataset or model is made.",
    )


def compile_arguments(configuration: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """The keyword arguments of `model.compile` that the configuration stands for."""
    return {knob.name: value for knob, value in _acting(configuration, Stage.COMPILE)}


def accumulate(optimizer: Any, configuration: Mapping[str, KnobValue]) -> None:
    """Have an optimizer of Keras add up the gradients of a global batch. Raises ApplyError where that cannot be."""
    if "global_batch" not in configuration:
        return
    steps = int(configuration["global_batch"]) // int(configuration["batch_size"])
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # below the loss scale of float16
    if not hasattr(optimizer, "gradient_accumulation_steps"):
        raise ApplyError(
            "gradients cannot be accumulated: the model is not compiled with one optimizer of Keras",
            hint="Compile it with one, or leave --global-batch out: a training step of one's own applies them itself.",
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


def pipeline(dataset: tf.data.Dataset, configuration: Configuration, *, batched: bool = False) -> tf.data.Dataset:
    """Batches, prefetched as the configuration says, that end where `dataset` ends. `batched`: it holds batches."""
    import tensorflow as tf

    if not batched:
        dataset = dataset.batch(configuration.batch_size)
    own, options = set_by_dataset(dataset), None
    for knob, value in _acting(configuration, Stage.OPTIONS):
        if value not in (knob.default, own.get(knob.name)):
            options = options or tf.data.Options()
            knob.set(options, value)
    if options is not None:  # options that say nothing cost each epoch something all the same
        dataset = dataset.with_options(options)
    for knob, value in _acting(configuration, Stage.PIPELINE):
        dataset = knob.set(dataset, value) if knob.acts(configuration) else dataset
    return dataset


@dataclass(frozen=True)
class TrainingPipeline:
    """The batches of a training, and how `model.fit` reads them."""

    dataset: tf.data.Dataset  # batches; they repeat without an end where `steps_per_epoch` is set
    steps_per_epoch: int | None  # with a persistent iterator; None: the end of the dataset ends an epoch
    in_force: Configuration  # with the values that act on this dataset
    shorter: Callable[[int], TrainingPipeline] = field(repr=False, compare=False)  # epochs of so many steps
    source: Any = None  # what `fit` reads in place of the dataset, such as a `PyDataset`

    @property
    def fit_args(self) -> dict[str, Any]:
        """The keyword arguments of `model.fit` for the training data."""
        steps = {} if self.steps_per_epoch is None else {"steps_per_epoch": self.steps_per_epoch}
        x = distributed(self.dataset, self.in_force) if self.source is None else self.source
        return {"x": x, **steps}

    @property
    def one_epoch(self) -> tf.data.Dataset:
        """The batches of one epoch, as a dataset that ends where the user's does."""
        return self.dataset if self.steps_per_epoch is None else self.dataset.take(self.steps_per_epoch)


def training_pipeline(
    dataset: tf.data.Dataset, configuration: Configuration, *, batched: bool = False, drop_remainder: bool = False
) -> TrainingPipeline:
    """As `pipeline`, but repeated where `persistent_iterator` is on and the cardinality is known and finite.

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


def pipeline_in_steps(dataset: tf.data.Dataset, configuration: Configuration, steps: int) -> TrainingPipeline:
    """Batches of which an epoch takes so many, as a script says by `steps_per_epoch`."""
    divisor = largest_divisor(steps, int(configuration.get("steps_per_execution", 1)))
    changes = {"persistent_iterator": False, "steps_per_execution": divisor}
    configuration = configuration.replace(**{name: value for name, value in changes.items() if name in configuration})
    batches = pipeline(dataset, configuration, batched=True)
    return TrainingPipeline(
        batches, steps, configuration, lambda fewer: pipeline_in_steps(dataset, configuration, fewer)
    )


def _persistent(
    batches: tf.data.Dataset, configuration: Configuration, steps: int, *, take: int | None = None
) -> TrainingPipeline:
    """A pipeline without an end, whose epochs have so many steps: all batches, or the first `take` of them."""
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
    """The largest divisor of `number` that is not above `at_most`; both are at least 1."""
    return next(each for each in range(min(number, at_most), 0, -1) if number % each == 0)


def _repeated(batches: tf.data.Dataset, take: int | None) -> tf.data.Dataset:
    """The batches, or the first `take`, without an end. A last prefetch goes behind the repeat to keep its batches."""
    if kind_of(batches) == "Options":
        (inner,) = batches._inputs()
        return _repeated(inner, take).with_options(batches.options())
    if _prefetches(batches):
        (inner,) = batches._inputs()
        return _repeated(inner, take).prefetch(int(batches._buffer_size))
    return (batches if take is None else batches.take(take)).repeat()


def _prefetches(batches: tf.data.Dataset) -> bool:
    """Whether the dataset ends in a prefetch."""
    while kind_of(batches) == "Options":
        (batches,) = batches._inputs()
    return kind_of(batches) == "Prefetch" and int(batches._buffer_size) != 0


def as_dataset(data: Any) -> Any:
    """Arrays, alone or in tuples and dicts, as a dataset of single examples; anything else as it is."""
    import numpy as np
    import tensorflow as tf

    parts = data if isinstance(data, tuple) else (data,)  # of (x, y, sample_weight), which may be None
    leaves = tf.nest.flatten(parts)
    if not all(each is None or isinstance(each, np.ndarray | tf.Tensor) for each in leaves):
        return data
    kept = tuple(each for each in parts if each is not None)
    return tf.data.Dataset.from_tensor_slices(kept if isinstance(data, tuple) else data)


def kind_of(dataset: tf.data.Dataset) -> str:
    """What a dataset does to its input, as `tf.data` names it: `Map`, `Shuffle`, `Cache`."""
    return type(dataset).__name__.strip("_").removesuffix("Dataset")


def set_by_dataset(dataset: tf.data.Dataset) -> dict[str, KnobValue]:
    """The options of a user's dataset that are not TensorFlow's defaults; to be read before the pipeline's own."""
    own, options = {}, dataset.options()
    for knob in KNOBS.values():
        value = knob.read(options) if knob.stage is Stage.OPTIONS else None
        if value is not None and value in knob.domain and value != knob.default:
            own[knob.name] = value
    return own


def batch_ranks(dataset: tf.data.Dataset) -> tuple[int | None, ...]:
    """How many axes each tensor of an element has; None where that is not known."""
    return tuple(None if each is None else each.rank for each in _shapes(dataset))


def looks_batched(dataset: tf.data.Dataset) -> bool:
    """Whether all tensors of an element have the same first axis, as those of a batch have."""
    return len({each[0] if each is not None and each.rank else -1 for each in _shapes(dataset)}) == 1


def _shapes(dataset: tf.data.Dataset) -> list[Any]:
    import tensorflow as tf

    return [getattr(each, "shape", None) for each in tf.nest.flatten(dataset.element_spec)]


def keras_batches(parts: tuple[Any, Any, Any], *, counted: bool = True, **arguments: Any) -> tf.data.Dataset:
    """Return the batches that Keras makes of data that is no dataset. `counted`: they know their number."""
    import tensorflow as tf

    adapter = data_adapter(*parts, steps_per_epoch=None, **arguments)
    dataset, batches = adapter.get_tf_dataset(), adapter.num_batches
    if not counted or not batches:
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(batches))
