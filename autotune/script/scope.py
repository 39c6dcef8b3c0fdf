"""The scope of a recipe's or a trial's `tf.distribute` strategy, for a script that trains by Keras's `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.data.errors import ApplyError, WorkloadError
from autotune.data.models import KnobValue
from autotune.recipe.apply import strategy_of
from autotune.recipe.tf_private import let_mirrored_variables_be_numbers
from autotune.script.interpose import around

REFUSED = {
    "ParameterServerStrategy": "Keras 3 does not support it (keras#18624)",
    "TPUStrategy": "there is no tensorflow-tpu for TensorFlow 2.21",
}
"""Strategies of which no training can be tuned, and why."""


def refuse_strategies(tf: Any, keras: Any, refuse: Any) -> None:
    """Call `refuse` with the error where a script makes a strategy that cannot be tuned."""

    def refused(name: str, why: str) -> Any:
        hint = "Train by fit under tf.distribute.MirroredStrategy, on one host."
        return lambda *_, **__: refuse(WorkloadError(f"the script makes a {name}: {why}", hint=hint))

    for name, why in REFUSED.items():
        for owner in (tf.distribute, tf.distribute.experimental):
            if hasattr(owner, name):
                around(getattr(owner, name), "__init__", refused(name, why))
    around(
        tf.distribute.cluster_resolver.TPUClusterResolver, "__init__", refused("TPUStrategy", REFUSED["TPUStrategy"])
    )
    for name in ("DataParallel", "ModelParallel"):
        why = "keras.distribution acts on the JAX backend only"
        around(getattr(keras.distribution, name), "__init__", refused(f"keras.distribution.{name}", why))


def open_when_building(keras: Any, values: Mapping[str, KnobValue]) -> None:
    """Open the strategy's scope when the script makes its first layer, optimizer or metric; it is never left.

    Before that the script may still set threads and devices, which a strategy would fix.
    """
    if values.get("strategy", "none") == "none":
        return
    let_mirrored_variables_be_numbers()
    opened: list[Any] = []

    def entering(usual: Any, *arguments: Any, **named: Any) -> Any:
        import tensorflow as tf

        if not opened and not tf.distribute.has_strategy():
            opened.append(strategy_of(values).scope())
            opened[0].__enter__()
        return usual(*arguments, **named)

    for kind, name in (
        (keras.layers.Layer, "__new__"),
        (keras.optimizers.Optimizer, "__init__"),
        (keras.metrics.Metric, "__init__"),
    ):
        around(kind, name, entering)


def refuse_another_scope(model: Any, values: Mapping[str, KnobValue]) -> None:
    """Raise ApplyError where a model was not built in the scope that `open_when_building` opens."""
    if values.get("strategy", "none") != "none" and model.distribute_strategy is not strategy_of(values):
        raise ApplyError(
            f"strategy={values['strategy']} does not act: the script builds its model under another strategy, or in "
            "another thread",
            hint="Build the model in the main thread, without a tf.distribute strategy of the script's own.",
        )
