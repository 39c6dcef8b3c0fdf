"""The `tf.distribute` strategy of a configuration, and what it spreads. TensorFlow is imported in functions."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from autotune.data.errors import ApplyError
from autotune.data.models import KnobValue
from autotune.space.combining import refusal


def devices() -> tuple[str, ...]:
    """The devices that a training here can be spread over: all GPUs, or the parts of the processor."""
    import tensorflow as tf

    found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return tuple(each.name for each in found)


def strategy_of(configuration: Mapping[str, KnobValue]) -> Any:
    """The configuration's strategy, made once in a process; TensorFlow's own no-op for `none`.

    Raises:
        ApplyError: This machine cannot have it, or other knobs exclude it.
    """
    import tensorflow as tf

    kind = str(configuration.get("strategy", "none"))
    if kind == "none":
        return tf.distribute.get_strategy()
    if why := refusal(configuration):
        raise ApplyError(why, hint="Change one of these knobs.")
    return _made(kind, int(configuration.get("replicas", 1)), str(configuration.get("cross_device", "auto")))


@functools.cache
def _made(kind: str, replicas: int, cross_device: str) -> Any:
    import tensorflow as tf

    found = devices()
    if replicas > len(found):
        message = f"replicas={replicas} needs as many devices, and TensorFlow sees {len(found)}"
        raise ApplyError(message, hint="Tune again on this machine.")
    if kind == "one_device":
        return tf.distribute.OneDeviceStrategy(found[0])
    if cross_device == "nccl" and not tf.config.list_logical_devices("GPU"):
        raise ApplyError("cross_device=nccl needs GPUs", hint="Use auto, hierarchical_copy or reduce_to_one.")
    operations = {
        "auto": lambda: None,
        "nccl": tf.distribute.NcclAllReduce,
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
        "reduce_to_one": tf.distribute.ReductionToOneDevice,
    }
    return tf.distribute.MirroredStrategy(list(found[:replicas]), cross_device_ops=operations[cross_device]())


def distributed(dataset: Any, configuration: Mapping[str, KnobValue]) -> Any:
    """The batches as `fit` reads them: spread beforehand where the replicas' buffers are not TensorFlow's own size."""
    import tensorflow as tf

    size = int(configuration.get("per_replica_buffer_size", 1))
    if size == 1:
        return dataset
    options = tf.distribute.InputOptions(experimental_per_replica_buffer_size=size)
    return strategy_of(configuration).experimental_distribute_dataset(dataset, options)
