"""Applying a configuration, stage by stage: the one code path of trial processes and of training code.

What was measured is what runs. TensorFlow is imported inside the functions only, never at the top, because
the environment variables of the import stage must be set before it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.errors import ApplyError
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS, KnobValue, Stage

if TYPE_CHECKING:
    import tensorflow as tf

_ENVIRONMENT: dict[str, tuple[str, Callable[[Any], str]]] = {
    "onednn": ("TF_ENABLE_ONEDNN_OPTS", lambda on: "1" if on else "0"),
}
"""Knobs of the import stage: the environment variable, and its text for a value."""


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

    keras.config.set_dtype_policy(policy)


_SETTERS: dict[str, Callable[[Any], None]] = {
    "intra_op_threads": _set_intra_op_threads,
    "inter_op_threads": _set_inter_op_threads,
    "tensor_float_32": _set_tensor_float_32,
    "precision": _set_precision,
}
"""Knobs of the runtime and build stages: what sets them."""

_COMPILE_ARGUMENTS = ("jit_compile", "steps_per_execution")


def environment(configuration: Mapping[str, KnobValue]) -> dict[str, str]:
    """The environment variables that the import-stage knobs stand for, where they are not set so already."""
    return {
        variable: text(configuration[name])
        for name, (variable, text) in _ENVIRONMENT.items()
        if name in configuration
        and text(configuration[name]) != os.environ.get(variable, text(KNOBS[name].default))
    }


def apply_before_import(configuration: Mapping[str, KnobValue]) -> None:
    """Set the environment variables that TensorFlow reads while it is imported.

    Raises:
        ApplyError: TensorFlow was imported already, with another value.
    """
    for variable, text in environment(configuration).items():
        if "tensorflow" in sys.modules and os.environ.get(variable) != text:
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
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except (RuntimeError, ValueError) as error:
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
    """Batch and prefetch a dataset as the configuration says.

    Args:
        dataset: Single examples, or batches with `batched=True`.
        configuration: Where batch size and pipeline knobs come from.
        batched: The dataset does its own batching.
        drop_remainder: Drop the last, smaller batch of an epoch.

    Returns:
        A dataset of batches.
    """
    import tensorflow as tf

    if not batched:
        dataset = dataset.batch(configuration.batch_size, drop_remainder=drop_remainder)
    options = tf.data.Options()
    if not configuration.get("deterministic", True):
        options.deterministic = False
    if configuration.get("data_threads", 0):
        options.threading.private_threadpool_size = configuration["data_threads"]
    dataset = dataset.with_options(options)
    prefetch = configuration.get("prefetch", 0)
    if prefetch:
        dataset = dataset.prefetch(tf.data.AUTOTUNE if prefetch == "autotune" else prefetch)
    return dataset
