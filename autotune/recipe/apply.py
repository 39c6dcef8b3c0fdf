"""Applying a configuration, stage by stage: the one code path of trial processes and of training code.

What was measured is what runs. TensorFlow is imported inside the functions only, never at the top, because
the environment variables of the import stage must be set before it.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from autotune.errors import ApplyError
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS, KnobValue, Stage

if TYPE_CHECKING:
    import tensorflow as tf

_ENVIRONMENT: dict[str, tuple[str, Callable[[Any], str], Callable[[str], KnobValue]]] = {
    "onednn": (
        "TF_ENABLE_ONEDNN_OPTS",
        lambda on: "1" if on else "0",
        lambda text: text.lower() not in ("0", "false"),
    ),
}
"""Knobs of the import stage: the environment variable, its text for a value, and the value of any text, as
TensorFlow reads it."""


def _set_intra_op_threads(threads: int) -> None:
    import tensorflow as tf

    if tf.config.threading.get_intra_op_parallelism_threads() != threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads)


def _set_inter_op_threads(threads: int) -> None:
    import tensorflow as tf

    if tf.config.threading.get_inter_op_parallelism_threads() != threads:
        tf.config.threading.set_inter_op_parallelism_threads(threads)


def _set_tensor_float_32(on: bool) -> None:
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(on)


def _set_precision(policy: str) -> None:
    import keras

    if keras.config.dtype_policy().name == policy:
        return
    if _layers_exist():
        raise ApplyError(
            f"precision={policy} cannot act any more: layers were built before it was set, and keep theirs",
            hint="Call recipe.apply() before any layer or model is made, those at the top of imported files too.",
        )
    keras.config.set_dtype_policy(policy)


def note_layers() -> None:
    """Remember whether layers live in this process, for forks of it, whose collector does not see them."""
    global _layers_before_fork
    _layers_before_fork = _layers_exist()


def _layers_exist() -> bool:
    """Whether a Keras layer lives in this process."""
    import keras

    return _layers_before_fork or any(issubclass(type(each), keras.layers.Layer) for each in gc.get_objects())


_SETTERS: dict[str, Callable[[Any], None]] = {
    "intra_op_threads": _set_intra_op_threads,
    "inter_op_threads": _set_inter_op_threads,
    "tensor_float_32": _set_tensor_float_32,
    "precision": _set_precision,
}
"""Knobs of the runtime and build stages: what sets them."""

_layers_before_fork = False
_applied: dict[str, KnobValue] | None = None
"""What `apply_in_training` has set in this process."""

_COMPILE_ARGUMENTS = ("jit_compile", "steps_per_execution")


def environment(configuration: Mapping[str, KnobValue]) -> dict[str, str]:
    """The environment variables that the import-stage knobs stand for, where they are not set so already."""
    return {
        variable: text(configuration[name])
        for name, (variable, text, _) in _ENVIRONMENT.items()
        if name in configuration and configuration[name] != _imported_with(name)
    }


def _imported_with(name: str) -> KnobValue:
    """What a knob of the import stage stands at, by this process's environment."""
    variable, text, value = _ENVIRONMENT[name]
    return value(os.environ.get(variable, text(KNOBS[name].default)))


def in_force() -> dict[str, KnobValue]:
    """What the knobs that act before a model is built stand at in this process, as TensorFlow and Keras say.

    Wakes CUDA where there is a GPU. A policy that is no value of the knob comes back by its name.
    """
    import keras
    import tensorflow as tf

    return {
        "onednn": _imported_with("onednn"),
        "intra_op_threads": tf.config.threading.get_intra_op_parallelism_threads(),
        "inter_op_threads": tf.config.threading.get_inter_op_parallelism_threads(),
        "tensor_float_32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "precision": str(keras.config.dtype_policy().name),
    }


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
    """Set everything that precedes the model, in a process that trains. Twice the same is once.

    Raises:
        ApplyError: TensorFlow's runtime has started, or a knob can no longer act.
    """
    global _applied
    if _applied == dict(configuration):
        if "precision" in configuration:  # it alone can have been set to something else since
            _set_precision(str(configuration["precision"]))
        return
    apply_before_import(configuration)
    if "tensorflow" in sys.modules and runtime_has_started():
        raise _too_late("the recipe")
    apply_before_build(configuration)
    _applied = dict(configuration)


def apply_before_import(configuration: Mapping[str, KnobValue]) -> None:
    """Set the environment variables that TensorFlow reads while it is imported.

    Raises:
        ApplyError: TensorFlow was imported already, with another value.
    """
    for variable, text in environment(configuration).items():
        if "tensorflow" in sys.modules:
            raise ApplyError(
                f"{variable}={text} must be set before TensorFlow is imported, and it was imported already",
                hint=f"Call recipe.apply() above `import tensorflow`, or start Python with {variable}={text}.",
            )
        os.environ[variable] = text


def apply_before_build(configuration: Mapping[str, KnobValue]) -> None:
    """Set what must stand before TensorFlow's runtime starts and before layers are built.

    Turns on memory growth on every GPU, as in the trials.

    Raises:
        ApplyError: TensorFlow's runtime has started, so a knob can no longer act.
    """
    for name, knob in KNOBS.items():
        if knob.stage not in (Stage.RUNTIME, Stage.BUILD) or name not in configuration:
            continue
        try:
            _SETTERS[name](configuration[name])
        except RuntimeError as error:
            raise _too_late(f"{name}={configuration[name]}") from error
    _grow_gpu_memory()


def _grow_gpu_memory() -> None:
    import tensorflow as tf

    for gpu in tf.config.list_physical_devices("GPU"):
        if tf.config.experimental.get_memory_growth(gpu) is True:
            continue
        if tf.config.get_logical_device_configuration(gpu) is not None:
            continue  # the user has divided or limited its memory, and TensorFlow has growth or that
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError as error:
            raise _too_late("GPU memory growth") from error


def _too_late(what: str) -> ApplyError:
    return ApplyError(
        f"{what} cannot act any more: TensorFlow's runtime has started",
        hint="Call recipe.apply() right after the imports, before the first tensor, dataset or model is made.",
    )


def compile_arguments(configuration: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """The keyword arguments of `model.compile` that the configuration stands for."""
    return {name: configuration[name] for name in _COMPILE_ARGUMENTS if name in configuration}


def pipeline(
    dataset: tf.data.Dataset,
    configuration: Configuration,
    *,
    batched: bool = False,
    drop_remainder: bool = False,
) -> tf.data.Dataset:
    """Batch and prefetch a dataset as the configuration says. It ends where `dataset` ends.

    Args:
        dataset: Single examples, or batches with `batched=True`.
        configuration: Where batch size and pipeline knobs come from.
        batched: The dataset does its own batching.
        drop_remainder: Drop the last, smaller batch of an epoch.

    Returns:
        A dataset of batches.
    """
    batches = _batches(dataset, configuration, batched=batched, drop_remainder=drop_remainder)
    return _with_pipeline_knobs(batches, configuration)


@dataclass(frozen=True, kw_only=True)
class TrainingPipeline:
    """The batches of a training, and how `model.fit` reads them.

    Args:
        dataset: Batches. They repeat without an end where `steps_per_epoch` is set.
        steps_per_epoch: Steps of one epoch with a persistent iterator. None: the end of the dataset ends an epoch.
        in_force: The configuration, with the values that act on this dataset.
        shorter: Returns the same pipeline with epochs of the given number of steps.
    """

    dataset: tf.data.Dataset
    steps_per_epoch: int | None
    in_force: Configuration
    shorter: Callable[[int], TrainingPipeline] = field(repr=False, compare=False)

    @property
    def fit_args(self) -> dict[str, Any]:
        """The keyword arguments of `model.fit` for the training data."""
        if self.steps_per_epoch is None:
            return {"x": self.dataset}
        return {"x": self.dataset, "steps_per_epoch": self.steps_per_epoch}

    @property
    def one_epoch(self) -> tf.data.Dataset:
        """The batches of one epoch, as a dataset that ends where the user's does."""
        return self.dataset if self.steps_per_epoch is None else self.dataset.take(self.steps_per_epoch)


def training_pipeline(
    dataset: tf.data.Dataset,
    configuration: Configuration,
    *,
    batched: bool = False,
    drop_remainder: bool = False,
) -> TrainingPipeline:
    """Batch and prefetch a training's dataset; repeat it where `persistent_iterator` is on and can act.

    It can act where the cardinality of the batches is known and finite. `in_force` says whether it does. A persistent
    iterator needs a prefetch of at least 1, and a `steps_per_execution` that divides the steps of an epoch.

    Args:
        dataset: Single examples, or batches with `batched=True`.
        configuration: Where batch size and pipeline knobs come from.
        batched: The dataset does its own batching.
        drop_remainder: Drop the last, smaller batch of an epoch.
    """
    batches = _batches(dataset, configuration, batched=batched, drop_remainder=drop_remainder)
    steps = int(batches.cardinality())
    if configuration.get("persistent_iterator", False) and steps > 0:
        return _persistent(batches, configuration, steps)
    changes = {"persistent_iterator": False} if "persistent_iterator" in configuration else {}
    return _ending(_with_pipeline_knobs(batches, configuration), configuration.replace(**changes))


def _ending(batches: tf.data.Dataset, configuration: Configuration) -> TrainingPipeline:
    """A pipeline whose end ends an epoch."""
    return TrainingPipeline(
        dataset=batches,
        steps_per_epoch=None,
        in_force=configuration,
        shorter=lambda steps: _ending(batches.take(steps), configuration),
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
    return TrainingPipeline(
        dataset=_with_pipeline_knobs(repeated, in_force),
        steps_per_epoch=steps,
        in_force=in_force,
        shorter=lambda fewer: _persistent(batches, configuration, min(steps, fewer), take=min(steps, fewer)),
    )


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is not above `at_most`; both are at least 1."""
    return next(each for each in range(min(number, at_most), 0, -1) if number % each == 0)


def _repeated(batches: tf.data.Dataset, take: int | None) -> tf.data.Dataset:
    """All batches, or the first `take`, repeated without an end.

    A prefetch that ends the user's dataset goes behind the repeat: it keeps its batches while the pipeline restarts.
    """
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


def kind_of(dataset: tf.data.Dataset) -> str:
    """What a dataset does to its input, as `tf.data` names it: `Map`, `Shuffle`, `Cache`."""
    return type(dataset).__name__.strip("_").removesuffix("Dataset")


def _batches(
    dataset: tf.data.Dataset, configuration: Configuration, *, batched: bool, drop_remainder: bool
) -> tf.data.Dataset:
    return dataset if batched else dataset.batch(configuration.batch_size, drop_remainder=drop_remainder)


def _with_pipeline_knobs(dataset: tf.data.Dataset, configuration: Configuration) -> tf.data.Dataset:
    """The batches with the options and the prefetch that the configuration asks for."""
    import tensorflow as tf

    own = set_by_dataset(dataset)
    unordered = not configuration.get("deterministic", True) and "deterministic" not in own
    untuned = not configuration.get("data_autotune", True) and "data_autotune" not in own
    threads = configuration.get("data_threads", 0)
    threads = 0 if threads == own.get("data_threads") else threads
    if unordered or threads or untuned:  # options that say nothing cost each epoch something all the same
        options = tf.data.Options()
        if untuned:
            options.autotune.enabled = False
        if unordered:
            options.deterministic = False
        if threads:
            options.threading.private_threadpool_size = threads
        dataset = dataset.with_options(options)
    prefetch = configuration.get("prefetch", 0)
    if prefetch:
        dataset = dataset.prefetch(tf.data.AUTOTUNE if prefetch == "autotune" else prefetch)
    return dataset


SetByDataset = dict[Literal["data_autotune", "deterministic", "data_threads"], bool | int]


def set_by_dataset(dataset: tf.data.Dataset) -> SetByDataset:
    """Pipeline knobs that a user's dataset has set itself, otherwise than TensorFlow does, with its values.

    Args:
        dataset: Before the pipeline's own options are put on it.
    """
    options = dataset.options()
    found: SetByDataset = {}
    if options.autotune.enabled is False:
        found["data_autotune"] = False
    if options.deterministic is False:
        found["deterministic"] = False
    threads = options.threading.private_threadpool_size
    if threads and threads in KNOBS["data_threads"].domain:
        found["data_threads"] = threads
    return found


def batch_ranks(dataset: tf.data.Dataset) -> tuple[int | None, ...]:
    """How many axes each tensor of an element has; None where that is not known."""
    import tensorflow as tf

    shapes = [getattr(each, "shape", None) for each in tf.nest.flatten(dataset.element_spec)]
    return tuple(None if shape is None else shape.rank for shape in shapes)


def looks_batched(dataset: tf.data.Dataset) -> bool:
    """Whether all tensors of an element have the same first axis, as those of a batch have."""
    import tensorflow as tf

    shapes = [getattr(each, "shape", None) for each in tf.nest.flatten(dataset.element_spec)]
    return len({shape[0] if shape is not None and shape.rank else -1 for shape in shapes}) == 1
